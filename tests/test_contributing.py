"""CONTRIBUTING.md holds: its paths exist, and a newcomer's rule touches one source file and one test file."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import forewarn

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()

RULE = '''
@dataclass(frozen=True, slots=True, kw_only=True)
class LossBelowZero(Settings):
    """When `loss-below-zero` fires."""

    limit: float = between(0.0, -1e6)
    """The lowest loss that is well."""


@rule(
    "L900", "loss-below-zero", reads=("train/loss",), settings=LossBelowZero,
    message=Message("The loss is negative", "loss {value} · limit {bound}"),
    remedies=(advise("check_sign", "Check the sign of the loss", "a cross entropy cannot be negative"),),
)  # fmt: skip
def loss_below_zero(loss: Series, settings: LossBelowZero) -> Finding | None:
    """Loss below the lowest value that it can have.

    ## Why is this bad?
    A cross entropy or a squared error below zero is computed wrongly.

    ## Example
    fires: 2.0x3 -1.0
    quiet: 2.0x3 0.0
    """
    return finding(Severity.WARNING, loss.last, settings.limit) if loss.last < settings.limit else None


'''
TABLE = "    loss_below_zero: LossBelowZero = LossBelowZero()\n"
TEST = """

import torch

import forewarn


def constant_left_in_the_loss(run):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with forewarn.watch(model, optimizer, run, views=[]) as monitor:
        for _ in range(20):
            loss = model(torch.randn(8, 4)).square().mean() - 100
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


FAULTS = {"L900": constant_left_in_the_loss}
"""


@pytest.fixture
def copy(tmp_path):
    """The package and its tests with a rule more, which only `judge/rules/loss.py` and `test_loss.py` know of."""
    shutil.copytree(Path(forewarn.__file__).parent, tmp_path / "forewarn", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "forewarn" / "judge" / "rules" / "loss.py"
    before, head, after = path.read_text().rpartition("@dataclass(frozen=True, kw_only=True)\nclass LossThresholds")
    path.write_text(f"{before.rstrip()}\n\n{RULE}{head}{after.rstrip()}\n{TABLE}")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "tests" / "judge" / "rules" / "test_loss.py").open("a") as file:
        file.write(TEST)
    return tmp_path


def run(copy, *command):
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run([sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True)


def test_a_new_rule_in_one_file_keeps_every_contract_and_is_known_everywhere(copy):
    suites = ["tests/judge/rules/test_contract.py", "tests/cli/test_rules.py", "tests/test_real_runs.py"]
    wanted = "L900 or loss-below-zero or loss or every_rule_has_a_fault"
    tested = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites, "-k", wanted)
    assert tested.returncode == 0, tested.stdout
    assert int(re.search(r"(\d+) passed", tested.stdout)[1]) > 50
    for command, answer in (
        (["rules"], "L900  loss-below-zero"),
        (["explain", "loss-below-zero"], "[thresholds.loss_below_zero]"),
    ):
        assert answer in run(copy, "-m", "forewarn", *command).stdout
    settings = "from forewarn import Config; print(Config().thresholds.loss_below_zero.limit)"
    assert run(copy, "-c", settings).stdout == "0.0\n"
    pages = run(copy, "-m", "forewarn.judge.documentation", str(copy / "docs")).stdout
    assert "loss-below-zero.md" in pages


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (TABLE, "", "add `loss_below_zero: LossBelowZero = LossBelowZero()` to the class at the end of its file"),
        ('"L900"', '"L102"', "is declared twice; a code and a name are never reused"),
        ("    fires: 2.0x3 -1.0\n", "", "its docstring has no example that fires"),
    ],
)
def test_a_part_that_is_forgotten_is_an_error_that_says_what_to_add(copy, before, after, sentence):
    path = copy / "forewarn" / "judge" / "rules" / "loss.py"
    text = path.read_text()
    assert text.count(before) == 1 or before == '"L900"'
    path.write_text(text.replace(before, after))
    assert sentence in run(copy, "-c", "from forewarn import Config; Config()").stderr


def test_every_path_and_target_that_it_names_exists():
    paths = re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.]+)`", PAGE) + re.findall(r"\]\(([^)#:]+)\)", PAGE)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []
    targets = set(re.findall(r"`make ([a-z-]+)`", PAGE))
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("what", ["a rule", "a probe", "a metric", "a view", "a command", "a fault"])
def test_what_can_be_added_is_described_in_numbered_steps(what):
    (section,) = re.findall(rf"^## Add {what}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    numbers = re.findall(r"^(\d)\. ", section, re.MULTILINE)
    assert numbers == [str(number + 1) for number in range(len(numbers))]
    assert len(numbers) >= 3
