"""What the README and the docs show works: every command and every piece of Python in them runs here."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import forewarn
from forewarn.cli import cli
from forewarn.metrics import FAMILIES, find
from tests.importing import small_logs
from tests.page_runs import built

__all__ = ["built"]  # a fixture

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")])


YOUR_OWN = ROOT / "docs" / "your_own.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def files_of(page: Path) -> dict[str, str]:
    """The pieces of Python that begin with the name of a file."""
    named = {code: re.match(r"# (\w+\.py)\n", code) for code in blocks(page, "python")}
    return {name[1]: code for code, name in named.items() if name}


class Toy(nn.Module):
    """A model whose output is its loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch):
        return self.layer(batch).square().mean()


class Demo(nn.Module):
    """A model that has a layer of the same name as that of `forewarn demo`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.blocks = nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"output": nn.Linear(4, 4)})})])

    def forward(self, batch):
        return self.layer(self.blocks[0]["mlp"]["output"](batch)).square().mean()


def make_logs(folder: Path) -> None:
    """The logs of other tools that docs/import.md names."""
    places = {
        "outputs": small_logs.trainer_state, "runs/tb": small_logs.event_file, "wandb/offline": small_logs.wandb_file,
        "lightning_logs/version_0": small_logs.csv_file, ".": small_logs.mlflow_database,
    }  # fmt: skip
    for name, make in places.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        make(folder / name)
    (folder / "lightning_logs/version_0/log.csv").rename(folder / "lightning_logs/version_0/metrics.csv")
    small_logs.console_output(folder)
    (folder / "train.csv").write_text("step,nll,heldout\n" + "".join(f"{step},2.0,2.5\n" for step in range(50)))


@pytest.fixture
def place(tmp_path, monkeypatch, built):
    """A folder with a finished run `runs/demo` in it, and a copy of that."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Demo()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with forewarn.watch(model, optimizer, "runs/demo", views=[]) as monitor:
        for _ in range(12):
            loss = model(torch.randn(8, 4))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    shutil.copytree("runs/demo", "runs/demo-saved")
    Path("forewarn.toml").write_text(next(iter(blocks(ROOT / "docs" / "monitor.md", "toml"))))
    for name, code in (files_of(YOUR_OWN) | files_of(ROOT / "docs" / "preflight.md")).items():
        Path(name).write_text(code)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    make_logs(tmp_path)
    # Docs show W&B beside the monitor; `benchmarks.named_faults` runs the same code with the real package.
    run = SimpleNamespace(log=lambda values: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project, mode: run))
    return tmp_path


ELSEWHERE = {
    "guide": "tests/test_guide.py", "first_alert": "tests/test_guide.py, tests/integrations",
    "integrations": "tests/integrations", "trackers": "tests/integrations",
}  # fmt: skip
"""Pages whose Python other tests run, because they look at what it prints or need other libraries."""

PYTHON = [
    (page, at, code)
    for page in PAGES
    if page.parent.name not in ELSEWHERE and page.stem not in ELSEWHERE
    for at, code in enumerate(blocks(page, "python"))
]
FIRST = {page: code for page, at, code in PYTHON if at == 0 and page.parent.name == "docs"}


@pytest.mark.parametrize(("page", "code"), FIRST.items(), ids=[page.stem for page in FIRST])
def test_the_first_python_of_a_page_runs_as_pasted(page, code, place):
    names = {}
    exec(compile(code, str(page), "exec"), names)
    if "monitor" in names:
        names["monitor"].close()


FURTHER = [(page, at, code) for page, at, code in PYTHON if FIRST.get(page) != code]


@pytest.mark.parametrize(("page", "at", "code"), FURTHER, ids=[f"{page.stem}-{at}" for page, at, _ in FURTHER])
def test_python_that_builds_on_it_runs(page, at, code, place):
    """On a page of the docs it builds on what comes first, in the README on a model, an optimizer and data of yours."""
    model = Toy()
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": torch.randn(3, 8, 4),
    }
    if page in FIRST:
        names = {}
        exec(compile(FIRST[page], str(page), "exec"), names)
        if "monitor" in names:
            names["monitor"].close()
    else:
        model(names["loader"][0]).backward()
    names |= {"path": "saved.pt", "accuracy": 0.5, "auxiliary": torch.tensor(1.0)}
    if "batch" in names:
        names["loss"] = names["model"](names["batch"]).square().mean()  # that of a step under way
    if "monitor." in code and "monitor =" not in code.partition("monitor.")[0]:
        names["monitor"] = forewarn.watch(names["model"], names["optimizer"], "runs/mine", views=[])
    if "GradScaler" in code:
        code = code.replace('"cuda"', '"cpu"').replace("...\n", "")
    exec(compile(code, str(page), "exec"), names)
    if "monitor" in names:
        names["monitor"].close()


COMMANDS = [
    (page, line.partition("#")[0].strip())
    for page in PAGES
    if (page.parent.name != "guide" and page.stem != "first_alert") or not blocks(page, "python")
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if line.startswith("forewarn ")
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_commands_of_the_documentation_run(page, line, place, monkeypatch):
    arguments = shlex.split(line)[1:]
    if arguments[0] == "run":  # what it replaces in torch is for a process of its own
        (place / "package").mkdir()
        for name in ("train.py", "package/train.py"):
            (place / name).write_text(files_of(ROOT / "docs" / "run.md")["train.py"])
        ended = subprocess.run([sys.executable, "-m", "forewarn", *arguments], capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert "AdamW, 100 steps, completed" in " ".join(ended.stderr.split())
        return
    if arguments[0] == "replay":
        monkeypatch.delitem(sys.modules, "train", raising=False)
        (place / "train.py").write_text(files_of(ROOT / "docs" / "snapshots.md")["train.py"])
        runpy.run_path("train.py", run_name="__main__")
    if arguments[:2] == ["train", "multitask"]:
        arguments += ["--epochs", "1", "--samples", "200"]
    elif arguments[0] == "train":
        arguments += ["--width", "16", "--heads", "2", "--depth", "1", "--max-steps", "5", "--result-dir", str(place)]
    if arguments[0] == "serve":  # tests/cli/test_serve.py starts it
        arguments.append("--help")
    if arguments[0] == "coordinate-check":
        arguments += ["--widths", "16,32,64", "--steps", "2", "--seeds", "1"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code in (0, 1, 2), result.output
    assert result.output.strip()


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text()))
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets
    assert targets <= known


def test_settings_of_the_documentation_load(place):
    for page in PAGES:
        for block in blocks(page, "toml"):
            forewarn.Config.of(tomllib.loads(block))


def test_links_between_pages_lead_somewhere():
    """To a file, and in a page to a heading."""
    dead = []
    for page in [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]:
        for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", without_code(page)):
            goal = page.parent / target if target else page
            if "://" not in target and (not goal.exists() or (heading and heading not in headings(goal))):
                dead.append(f"{page.name}: {target}#{heading}")
    assert not dead


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def headings(page: Path) -> set[str]:
    """As GitHub writes them in a link."""
    found = re.findall(r"^#+ (.*)", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_every_metric_that_a_run_records_is_documented(place):
    text = (ROOT / "docs" / "metrics.md").read_text()
    with forewarn.open_run("runs/demo") as run:
        assert run.names()
        assert [name for name in run.names() if f"| `{name}` |" not in text] == []


def test_every_metric_that_the_documentation_names_is_in_the_catalogue():
    names = re.compile(rf"[`\"]((?:{'|'.join(FAMILIES)})/[a-z0-9_]+)[`\"]")
    elsewhere = {"train/step_loss_ema"}
    named = {
        name for page in [*PAGES, *(ROOT / "docs" / "rules").glob("*.md")] for name in names.findall(page.read_text())
    }
    assert len(named) > 80
    assert {name for name in named - elsewhere if find(name) is None} == set()
