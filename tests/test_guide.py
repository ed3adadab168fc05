"""The guide: every loop in it prints the alert that its page shows, and every limit in it is that of a setting."""

import re
import shlex
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from click.testing import CliRunner

from forewarn.catalogue import Scope
from forewarn.cli import cli
from forewarn.config import Thresholds
from forewarn.judge.checklist import GROWTH, SLOWDOWN
from forewarn.judge.rules import find_rule, is_rule
from forewarn.metrics import all_metrics
from forewarn.types import Shape
from forewarn.views.bands import UPDATE_RATIO, Phase
from forewarn.views.bars import BARS
from tests.measure.engine.distributions.made import histogram
from tests.measure.engine.distributions.test_shape import shape_of
from tests.test_documentation import ROOT, blocks

GUIDE = ROOT / "docs" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))
SYMPTOMS = [
    "nan-loss", "loss-not-decreasing", "loss-spikes", "plateau", "validation-rises", "layer-not-learning",
    "exploding-gradients", "vanishing-gradients", "slow-training", "out-of-memory",
]  # fmt: skip
LOOPS = [page for page in PAGES if blocks(page, "python")]
OF_THE_MONITOR = {Scope.MONITOR, Scope.PROBE, Scope.RULE}
NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)?")


def without_numbers(text: str) -> str:
    """The words of an output, on one line: numbers differ between machines, and with them where lines break."""
    return " ".join(NUMBER.sub("#", re.sub(r"\x1b\[[\d;]*m", "", text)).split())


def outputs(page: Path) -> list[str]:
    """The blocks in no language: what is printed."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in fenced if not language]


def rows(page: Path) -> list[list[str]]:
    """The cells of every table row."""
    return [line.strip("| \n").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]


def linked_rules(text: str) -> list[str]:
    return [name for name in re.findall(r"\(\.\./rules/([\w-]+)\.md\)", text) if name != "README"]


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    """A terminal of 80 columns, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("page", LOOPS, ids=[page.stem for page in LOOPS])
def test_a_loop_prints_what_its_page_shows(page, terminal, capsys):
    (code,) = blocks(page, "python")
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})
    for command in "".join(blocks(page, "bash")).splitlines():
        print(CliRunner().invoke(cli, shlex.split(command)[1:]).output, file=sys.stderr)
    printed = without_numbers("".join(capsys.readouterr()))
    (shown,) = outputs(page)
    assert without_numbers(shown) in printed
    first_sign = re.search(r"[⚠✖] step", printed)
    assert first_sign
    assert printed[first_sign.start() :].startswith(without_numbers(shown)), "the page shows what comes first"
    assert is_rule(next(word for word in shown.split() if "-" in word))


def test_the_first_alert_is_the_one_on_its_page_and_its_remedy_repairs_the_run(terminal, capsys):
    page = ROOT / "docs" / "first_alert.md"
    code, broken, mended = blocks(page, "python")[0], *outputs(page)
    exec(code, {"__name__": "__main__"})
    assert without_numbers(broken) in without_numbers(capsys.readouterr().err)
    rate = re.search(r"Lower the learning rate from 1 to ([\d.]+)", broken)[1]
    exec(code.replace("lr=1.0", f"lr={rate}"), {"__name__": "__main__"})
    assert without_numbers(mended) in without_numbers(capsys.readouterr().err)
    codes = [
        CliRunner().invoke(cli, shlex.split(line)[1:]).exit_code
        for line in "".join(blocks(page, "bash")).splitlines()
        if line.startswith("forewarn ") and "serve" not in line
    ]
    assert codes[0] > 0
    assert codes[1:] == [0]


def test_every_symptom_has_a_page_with_the_same_sections():
    index = (GUIDE / "README.md").read_text()
    for name in SYMPTOMS:
        text = (GUIDE / f"{name}.md").read_text()
        assert re.findall(r"^## (.*)", text, re.M) == [
            "What it means", "What to do", "Which rules look for it", "What forewarn does not see",
        ]  # fmt: skip
        assert f"({name}.md)" in index
    assert all(f"({page.name})" in index for page in PAGES if page.stem != "README")


def test_every_rule_that_the_workflow_names_exists():
    (diagram,) = outputs(GUIDE / "README.md")
    assert {len(line) for line in diagram.splitlines() if line[0] in "┌│└"} == {80}
    alerts = re.findall(r"alerts((?:.(?!if any|└))*)", diagram, re.DOTALL)
    names = [name for part in alerts for name in re.findall(r"[a-z]+(?:-[a-z]+)+", part)]
    assert len(alerts) == 4
    assert len(names) > 20
    assert [name for name in names if not is_rule(name)] == []


LIMITS = [
    pytest.param(row, id=f"{page.stem}-{index}")
    for page in (GUIDE / "healthy-ranges.md", GUIDE / "task-balance.md")
    for index, row in enumerate(rows(page))
    if "**" in " ".join(row)
]


@pytest.mark.parametrize("row", LIMITS)
def test_limits_are_those_of_the_settings(row):
    limits = re.findall(r"\*\*([-\d.e]+)(%?)\*\*", " ".join(row))
    values = [float(number) / (100 if percent else 1) for number, percent in limits]
    settings = re.findall(r"`(\w+)`", row[-1])
    assert linked_rules(" ".join(row))
    assert len(settings) == len(values)
    for name in linked_rules(" ".join(row)):
        table = getattr(Thresholds(), find_rule(name).table)
        assert [getattr(table, setting) for setting in settings] == pytest.approx(values)


def test_healthy_ranges_are_those_of_the_catalogue():
    text = (GUIDE / "healthy-ranges.md").read_text()
    of_a_model = [metric for metric in all_metrics() if metric.healthy and metric.scope not in OF_THE_MONITOR]
    assert len(of_a_model) > 5
    for metric in of_a_model:
        if metric.healthy == (0.0, 0.0):
            assert f"| `{metric.name}` | 0 |" in text
        else:
            assert f"`{metric.name}`" in text
            assert "{:g} to {:g} is healthy".format(*metric.healthy).replace("e-0", "e-") in text
    for phase in Phase:
        assert f"| {phase.name.lower()} | {UPDATE_RATIO[phase]} |" in text


@pytest.mark.parametrize(("page", "factor"), [("slow-training", SLOWDOWN), ("out-of-memory", GROWTH)])
def test_health_checks_fail_where_the_page_says(page, factor):
    assert f"over {factor:g} times as" in (GUIDE / f"{page}.md").read_text()


COSTS = [row for row in rows(GUIDE / "what-to-log.md") if len(row) == 4 and "](" in row[3]]


@pytest.mark.parametrize("row", COSTS, ids=[row[0] for row in COSTS])
def test_costs_are_those_of_the_page_they_are_from(row):
    source = (GUIDE / re.search(r"\((.+?)[#)]", row[3])[1]).read_text()
    figures = re.findall(r"[\d.]+ to [\d.]+ ms|\+?[\d.–]+ ?(?:%|times|µs|ms)", row[2])
    assert figures or not re.search(r"\d", row[2])
    assert [figure for figure in figures if figure not in source] == []


def test_the_pictures_are_histograms_of_the_shapes_they_stand_for():
    bell = np.array([NormalDist().inv_cdf((index + 0.5) / 4096) for index in range(4096)])
    samples = {
        "healthy": 0.1 * bell,
        "shifted": 1 + 0.1 * bell,
        "heavy tails": 0.03 * np.sign(bell) * np.abs(bell) ** 4,
        "collapsed": 0.5 + 1e-8 * bell,
        "multi-modal": np.concatenate([0.1 * bell, 5 + 0.5 * bell]),
        "constant": np.zeros(4096),
    }
    pictures = {row[0]: row[1].strip("`") for row in rows(GUIDE / "histogram-shapes.md") if row[1].startswith("`")}
    assert pictures.keys() == samples.keys()
    assert {shape_of(values) for values in samples.values()} == set(Shape)
    for name, values in samples.items():
        assert str(Shape(int(shape_of(values)))).startswith(name)
        assert pictures[name] == sparkline(values)


def sparkline(values) -> str:
    """Values from -8 to 8, one column per power of two down to 2^-10, with zero in the middle."""
    counts, zeros = histogram(values)
    columns = np.concatenate([counts[0, 0, 42:29:-1], zeros, counts[0, 1, 30:43]])
    heights = np.ceil(columns / columns.max() * len(BARS)).astype(int)
    return "".join(f"·{BARS}"[height] for height in heights)
