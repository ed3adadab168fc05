"""`forewarn run`: a script behaves as under `python`, and is watched. Each test starts real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forewarn

LOOP = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)


def train(steps=15):
    for _ in range(steps):
        x = torch.randn(32, 4)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def state():
    return sum(weight.double().sum().item() for weight in model.parameters()), torch.rand(1).item()
"""


def called(*command: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "PYTHONWARNINGS")}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True, timeout=600,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def run(folder: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return called("-m", "forewarn", "run", *arguments, folder=folder, **environment)


def written(folder: Path, source: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path


def num_steps(path: Path) -> int:
    with forewarn.open_run(path) as stored:
        return stored.num_steps


SEEN = """
import json, os, pickle, sys
import sibling

class Thing:
    pass

print(json.dumps({
    "argv": sys.argv, "file": __file__, "name": __name__, "path": sys.path, "package": __package__,
    "globals": sorted(globals()), "spec": __spec__ and [__spec__.name, __spec__.origin],
    "main": sys.modules["__main__"].__dict__ is globals(),
    "pickle": type(pickle.loads(pickle.dumps(Thing()))).__qualname__, "cwd": os.getcwd(), "doc": __doc__,
    "loader": type(__loader__).__name__, "errors": [sys.stdout.errors, sys.stderr.errors],
}))
"""


@pytest.mark.parametrize("target", [["package/train.py"], ["-m", "package.train"], ["-m", "package"]])
def test_a_script_sees_what_python_would_show_it(tmp_path: Path, target: list[str]) -> None:
    for name in ("package/train.py", "package/__main__.py"):
        written(tmp_path, SEEN.replace("import sibling", "" if "-m" in target else "import sibling"), name)
    written(tmp_path, "", "package/sibling.py")
    arguments = [*target, "--run", "x", "-m", "--help", "--", "-x"]
    alone, watched = called(*arguments, folder=tmp_path), run(tmp_path, *arguments)
    assert alone.returncode == watched.returncode == 0, watched.stderr
    assert json.loads(watched.stdout) == json.loads(alone.stdout)
    assert "does not use torch" in watched.stderr


@pytest.mark.parametrize(
    "source",
    ["import sys; sys.exit(3)", "import sys; sys.exit('a reason')", "raise SystemExit", "import os; os._exit(5)",
     "def f():\n    raise ValueError('wrong')\nf()", "raise KeyboardInterrupt", "print('a'", "import no_such_module",
     "import sys; sys.excepthook = lambda *args: print('own hook', args[0].__name__)\n1 / 0",
     "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('chained') from error",
     "import atexit, threading, time\natexit.register(print, 'bye')\n"
     "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"],
)  # fmt: skip
@pytest.mark.parametrize("as_module", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_a_script_ends_as_it_would_under_python(tmp_path: Path, source: str, as_module: bool) -> None:
    written(tmp_path, source)
    target = ["-m", "train"] if as_module else ["train.py"]
    alone, watched = called(*target, folder=tmp_path), run(tmp_path, *target)
    assert (watched.returncode, watched.stdout) == (alone.returncode, alone.stdout)
    assert watched.stderr.startswith(alone.stderr)
    assert len(watched.stderr.removeprefix(alone.stderr).splitlines()) == 1  # nothing to judge, in one sentence


def test_a_missing_script_and_a_wrong_option_are_mistakes_of_the_command_line(tmp_path: Path) -> None:
    assert "there is no script 'nothing.py'" in run(tmp_path, "nothing.py").stderr
    wrong = run(tmp_path, "--no-such-option", "train.py")
    assert wrong.returncode == 64
    missing = run(tmp_path, "-m", "no.such.module")
    assert missing.returncode == 1
    assert "No module named 'no'" in missing.stderr.splitlines()[0]


def test_a_training_is_watched_judged_and_unchanged(tmp_path: Path) -> None:
    written(tmp_path, LOOP + "train()\nprint(*state())\nraise SystemExit(7)\n")
    alone = called("train.py", folder=tmp_path)
    watched = run(tmp_path, "--run", "runs/mine", "--every", "5", "train.py")
    assert (watched.returncode, watched.stdout) == (alone.returncode, alone.stdout)
    assert watched.stderr.count("forewarn  Sequential") == 1
    assert re.search(r"stored in \S+/runs/mine\n", watched.stderr)  # a long path is shortened
    assert "runs/mine  Sequential, 49 parameters, AdamW, 15 steps, interrupted (SystemExit: 7)" in watched.stderr
    assert "healthy: no alerts" in watched.stderr
    assert "Health checks" in watched.stderr
    judged = called("-m", "forewarn", "check", "runs/mine", folder=tmp_path)
    assert watched.stderr.endswith(judged.stdout)


@pytest.mark.ci
def test_quiet_shows_only_the_diagnosis(tmp_path: Path) -> None:
    written(tmp_path, LOOP + "import os\nos.chdir('/')\ntrain()\nos.chdir(os.path.dirname(__file__))\n")
    watched = run(tmp_path, "--quiet", "--run", "mine", "train.py")
    assert watched.stderr.startswith("mine  Sequential")


@pytest.mark.ci
@pytest.mark.parametrize(
    "source",
    [
        "nn.functional.mse_loss(model(torch.zeros(3, 4)), torch.zeros(3, 1)).item().backward()",
        "train(3)\nloss = model(torch.zeros(2, 4)).sum()\nloss.backward()\nloss.backward()",
        "torch.optim.SGD([], lr=1)",
        "train(12)\nraise KeyboardInterrupt",
        "import warnings\nwarnings.simplefilter('error')\ntrain(3)\nwarnings.warn('mine')",
    ],
)
def test_tracebacks_are_those_of_python(tmp_path: Path, source: str) -> None:
    written(tmp_path, LOOP + source)
    alone, watched = called("train.py", folder=tmp_path), run(tmp_path, "--quiet", "train.py")
    assert alone.returncode != 0
    assert watched.returncode == alone.returncode
    assert watched.stderr.startswith(alone.stderr)


@pytest.mark.ci
def test_an_error_in_the_first_forward_pass_shows_no_frame_of_forewarn(tmp_path: Path) -> None:
    written(tmp_path, LOOP + "model(torch.zeros(3, 5))")
    watched = run(tmp_path, "--quiet", "train.py")
    assert watched.returncode == 1
    assert "mat1 and mat2 shapes cannot be multiplied" in watched.stderr
    assert str(Path(forewarn.__file__).parent) not in watched.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("train()\nimport os; os._exit(4)", 4),
        ("import threading\nthreading.Thread(target=train).start()", 0),
        ("from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor().submit(train)", 0),
        ("import os\ntrain(10)\nif os.fork() == 0:\n    train(3)\n    raise SystemExit\nos.wait()\ntrain(5)", 0),
        (
            "data = torch.utils.data.DataLoader(torch.randn(60, 4), 4, num_workers=2, multiprocessing_context='fork')\n"
            "for x in data:\n    optimizer.zero_grad()\n    model(x).mean().backward()\n    optimizer.step()",
            0,
        ),
    ],
)
def test_a_training_is_recorded_once_to_its_end(tmp_path: Path, source: str, code: int) -> None:
    written(tmp_path, LOOP + source)
    watched = run(tmp_path, "--run", "runs/mine", "train.py")
    assert watched.returncode == code
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
    assert num_steps(tmp_path / "runs" / "mine") == 15
    assert watched.stderr.count("Health checks") == 1


@pytest.mark.ci
def test_spawned_workers_find_the_main_module_and_are_not_watched(tmp_path: Path) -> None:
    source = """
class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((4,), index / 60)

if __name__ == "__main__":
    data = torch.utils.data.DataLoader(Squares(), 4, num_workers=1, multiprocessing_context="spawn")
    for x in data:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    process = torch.multiprocessing.get_context("spawn").Process(target=train)
    process.start()
    process.join()
"""
    written(tmp_path, LOOP + source)
    watched = run(tmp_path, "--run", "runs/mine", "train.py")
    assert watched.returncode == 0, watched.stderr
    assert num_steps(tmp_path / "runs" / "mine") == 15
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.ci
def test_a_script_that_uses_forewarn_itself_is_left_alone(tmp_path: Path) -> None:
    source = "import forewarn\nmonitor = forewarn.watch(model, optimizer, 'mine')\ntrain()\nmonitor.close()\n"
    written(tmp_path, LOOP + source)
    watched = run(tmp_path, "--run", "other", "train.py")
    assert "the script calls forewarn itself" in watched.stderr
    assert not (tmp_path / "other").exists()
    assert (tmp_path / "mine" / "run.json").exists()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import torch\ntorch.zeros(1)", "nothing was trained in this process"),
        ("import torch\nw = torch.ones(1, requires_grad=True)\nw.backward()", "but no torch optimizer stepped"),
        (LOOP + "model(torch.zeros(1, 4))", "nothing was trained in this process"),
        ("import multiprocessing as m, torch\np = m.Process(target=print)\np.start(); p.join()", "the processes that"),
    ],
)
def test_no_training_is_said_in_one_sentence(tmp_path: Path, source: str, words: str) -> None:
    written(tmp_path, source)
    watched = run(tmp_path, "train.py")
    assert watched.returncode == 0
    assert words in watched.stderr
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.ci
def test_under_torchrun_the_first_process_records(tmp_path: Path) -> None:
    source = (
        LOOP
        + """
import os
torch.distributed.init_process_group("gloo")
torch.manual_seed(int(os.environ["RANK"]))
model = nn.parallel.DistributedDataParallel(model)
norms = []
for _ in range(15):
    x = torch.randn(32, 4)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    norms.append(sum(float((own.grad.double() ** 2).sum()) for own in model.parameters()) ** 0.5)
    optimizer.step()
if os.environ["RANK"] == "0":
    print(*norms)
torch.distributed.destroy_process_group()
"""
    )
    written(tmp_path, source)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    alone = called(*launch, "train.py", folder=tmp_path)
    watched = called(*launch, "-m", "--", "forewarn", "run", "--run", "runs/mine", "train.py", folder=tmp_path)
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout
    assert watched.stderr.count("Health checks") == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
    with forewarn.open_run(tmp_path / "runs" / "mine") as stored:
        norms = stored.series("gradient/global_norm").values.tolist()
    assert norms == pytest.approx([float(word) for word in watched.stdout.split()], rel=1e-5)
