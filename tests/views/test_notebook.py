"""A run and an alert at a prompt, in a notebook and as a figure."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter

import forewarn
from forewarn.config import Config
from forewarn.standing import NOT_FALLING
from forewarn.store import Run, RunWriter, open_run
from forewarn.types import Alert, AlertState, Block, Finding, Remedy, RunInfo, Severity

HOSTILE = "<script>alert('x')</script>&\"'$[red]\x1b[31m\u202e\n_"


def alert(**changes: object) -> Alert:
    finding = Finding("L102", "", 181, Severity.WARNING, 9.0, 3.0)
    fields: dict[str, object] = {
        "code": "L102", "name": "loss-spike", "scope": "", "severity": Severity.WARNING, "state": AlertState.FIRING,
        "since": 180, "fired": 181, "last": 190, "finding": finding,
        "remedies": (Remedy("lower_lr", {"from": 0.1, "to": 0.01}, "smaller steps help", do="Lower it to 0.01"),),
        "headline": "The training loss is 3× its usual level", "numbers": "loss 9 · limit 4",
    }  # fmt: skip
    return Alert(**(fields | changes))  # type: ignore[arg-type]


def written(path: Path, losses: list[float], alerts: list[Alert] | None = None, model: str = "Net") -> Path:
    writer = RunWriter(path, info=RunInfo(model=model), config=Config().to_dict())
    for step, loss in enumerate(losses):
        blocks = [Block(step, 1.7e9 + step, name, ("",), np.array([loss], np.float32))
                  for name in ("train/loss", "train/loss_ema")]  # fmt: skip
        rates = Block(step, 1.7e9 + step, "train/lr", ("0",), np.array([1e-3], np.float32))
        norms = Block(step, 1.7e9 + step, "gradient/norm", (HOSTILE, "b"), np.array([1.0, 2.0], np.float32))
        writer.append(step, [*blocks, rates, norms])
    for one in alerts or []:
        writer.record(one.fired or 0, alerts=[one])
    writer.close()
    return path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    losses = [5 / (1 + step / 20) for step in range(300)]
    with open_run(written(tmp_path / "run", losses, [alert()])) as stored:
        yield stored


class Checker(HTMLParser):
    """Collects tags and text, and fails on tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


PLAIN_TAGS = {"div", "span", "b", "ol", "li", "svg", "g", "title", "text", "polyline", "line", "code"}


def test_a_run_says_what_it_is_and_how_it_stands(run: Run) -> None:
    assert repr(run) == f"<Run {run.path}: Net, 300 steps, loss 5 → 0.313, completed, 1 warning>"


def test_a_run_that_cannot_be_read_has_a_repr_all_the_same(tmp_path: Path) -> None:
    run = open_run(written(tmp_path / "run", [1.0]))
    run.close()
    assert repr(run) == f"<Run {run.path}: closed>"
    assert "closed" in run._repr_html_()
    damaged = open_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.sqlite").write_bytes(b"x" * 4096)
    for file in (tmp_path / "run").glob("*.sqlite*"):
        file.write_bytes(b"x" * 4096)
    assert repr(damaged).startswith(f"<Run {run.path}: ")
    assert Checker(damaged._repr_html_()).tags <= PLAIN_TAGS
    damaged.close()


def test_an_alert_says_what_happened_where_and_since_when() -> None:
    assert repr(alert()) == (
        "<Alert L102 loss-spike, warning, firing since step 180: The training loss is 3× its usual level>"
    )
    assert repr(alert(scope="2.weight", place="layer 2 (Linear) weight", state=AlertState.RESOLVED, headline="")) == (
        "<Alert L102 loss-spike in layer 2 (Linear) weight, warning, resolved, steps 180–190>"
    )
    assert pickle.loads(pickle.dumps(alert())) == alert()


def test_a_run_in_a_notebook_has_verdict_curve_cause_symptoms_and_remedies(tmp_path: Path) -> None:
    symptom = alert(code="G102", name="exploding-gradient", since=183, fired=183, headline="Gradients explode")
    path = written(tmp_path / "run", [2.0] * 300, [alert(), symptom])
    with open_run(path) as run:
        page = Checker(run._repr_html_())
    assert page.tags <= PLAIN_TAGS
    assert {"svg", "polyline", "line", "li"} <= page.tags
    for words in ("⚠ warnings", str(path), "The training loss is 3× its usual level",
                  "symptoms: exploding-gradient", "Lower it to 0.01. Smaller steps help."):  # fmt: skip
        assert words in page.words


def test_a_healthy_run_is_a_verdict_and_a_curve(tmp_path: Path) -> None:
    with open_run(written(tmp_path / "run", [3.0, 2.0, 1.0])) as run:
        page = Checker(run._repr_html_())
    assert "✓ healthy" in page.words
    assert "li" not in page.tags
    assert "line" not in page.tags


def test_colours_are_those_of_the_page_but_for_signs_and_marks(run: Run) -> None:
    for page in (run._repr_html_(), run.alerts()[0]._repr_html_()):
        assert "background" not in page
        assert set(re.findall(r"[; ']color: (\S+?)'", page)) <= {"#16a34a", "#d97706", "#dc2626", "#0891b2"}
        assert set(re.findall(r"(?:fill|stroke)='([^']+)'", page)) <= {"currentColor", "none", "#d97706"}


def test_hostile_names_are_text(tmp_path: Path) -> None:
    bad = alert(name=HOSTILE, scope=HOSTILE, headline=HOSTILE, numbers=HOSTILE, cause=HOSTILE, place=HOSTILE,
                remedies=(Remedy(HOSTILE, {}, HOSTILE, do=HOSTILE),))  # fmt: skip
    with open_run(written(tmp_path / "run<b>", [2.0, np.nan, np.inf, 1.0], [bad], model=HOSTILE)) as run:
        for page in (run._repr_html_(), run.alerts()[0]._repr_html_()):
            assert Checker(page).tags <= PLAIN_TAGS
            assert page.isprintable()
        assert repr(run).isprintable()
        assert repr(run.alerts()).isprintable()
        assert run.plot("gradient/norm")._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "losses", [[], [1.0], [np.nan] * 5, [0.0] * 5, [-1.0, 5.0, -3.0], [1e-38, 3e38], [1.0] * 5000], ids=str
)
def test_every_course_of_the_loss_can_be_shown(tmp_path: Path, losses: list[float]) -> None:
    with open_run(written(tmp_path / "run", losses)) as run:
        assert repr(run).startswith("<Run ")
        assert Checker(run._repr_html_()).tags <= PLAIN_TAGS
        assert len(run._repr_html_()) < 12_000
        assert run.plot()._repr_png_().startswith(b"\x89PNG")


def test_a_figure_has_the_curves_the_rate_and_the_alerts(run: Run) -> None:
    figure = run.plot()
    loss, rate = figure.axes
    curves = {line.get_label(): line for line in loss.get_lines()}
    stored = run.series("train/loss")
    assert curves["training"].get_xdata().tolist() == stored.steps.tolist()
    assert np.array_equal(curves["training"].get_ydata(), stored.values)
    assert {"moving average", "step 181: loss-spike"} <= curves.keys()
    assert rate.get_ylabel() == "learning rate"
    assert rate.get_xlabel() == "step"
    assert [line.get_xdata()[0] for line in rate.get_lines()[1:]] == [181]


def test_each_further_metric_has_a_panel_and_an_unknown_one_is_refused(run: Run) -> None:
    figure = run.plot("gradient/norm")
    assert len(figure.axes) == 3
    assert len(figure.axes[-1].get_lines()) == 3  # two tensors and the alert
    with pytest.raises(KeyError, match="did you mean 'train/loss'"):
        run.plot("loss")


def test_long_names_leave_room_for_the_curves(tmp_path: Path) -> None:
    long = alert(name="x" * 300)
    with open_run(written(tmp_path / ("run" * 60), [2.0, 1.0], [long], model="M" * 300)) as run:
        figure = run.plot("gradient/norm")
        figure.canvas.draw()
        assert all(axes.get_position().width > 0.5 for axes in figure.axes)


def test_a_notebook_shows_a_run_and_an_alert_as_html_and_a_figure_as_a_picture(run: Run) -> None:
    shown = DisplayFormatter()
    for thing, kind in ((run, "text/html"), (run.alerts()[0], "text/html"), (run.plot(), "image/png")):
        data, _ = shown.format(thing)
        assert {"text/plain", kind} <= data.keys()


def test_a_figure_needs_no_display_and_leaves_pyplot_alone(run: Run, tmp_path: Path) -> None:
    script = f"""
import sys, forewarn
forewarn.open_run({str(run.path)!r}).plot().savefig({str(tmp_path / "loss.png")!r})
print("matplotlib.pyplot" in sys.modules, "torch" in sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    environment["MPLBACKEND"] = "TkAgg"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout == "False False\n"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_opening_a_run_imports_neither_pandas_nor_matplotlib_nor_views(run: Run) -> None:
    script = f"""
import sys, forewarn
run = forewarn.open_run({str(run.path)!r})
run.series("train/loss"), run.alerts()
print([name for name in ("pandas", "matplotlib", "rich", "torch", "forewarn.views") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
    assert forewarn.Run is Run


def test_a_run_that_learns_nothing_is_not_called_healthy(tmp_path: Path) -> None:
    with open_run(written(tmp_path / "run", [2.3] * 100)) as run:
        assert NOT_FALLING in run._repr_html_()
