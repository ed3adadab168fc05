"""`forewarn forecast`: where the loss of a run is heading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forewarn.judge.forecast import Forecast, LossCurve
    from forewarn.store import Run, StoredSeries
    from forewarn.types import Alert

NEARLY_OVER = 1.05
"""Minimum ratio of declared to completed steps for which the declared end is still worth forecasting."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--at", "step_ahead", type=click.IntRange(min=1), metavar="STEP",
              help="Step to forecast. Default: the declared "
              "total_steps or, if that is nearly reached or unknown, twice the current step.")  # fmt: skip
@click.option("--target", type=float, metavar="LOSS", help="Also estimate when the loss reaches this value.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(run: Path, step_ahead: int | None, target: float | None, as_json: bool) -> None:
    """Forecast the loss with a 90% interval, or say why that is not possible.

    A power law with an asymptote is fitted to the whole training loss. To get the interval, the same fit sees only part
    of the curve and predicts the rest; its error sets the width. Open warnings are listed below the forecast. While a
    critical alert is open, there is no forecast.

    \b
    Examples:
      forewarn forecast runs/demo
      forewarn forecast runs/demo --at 20000 --target 1.5
    """
    import dataclasses

    from forewarn.cli.terminal import Failure, from_run, print_json, show
    from forewarn.judge.forecast import LossCurve, forecast
    from forewarn.judge.remedies import declared

    def recorded(stored: Run) -> tuple[StoredSeries, float, list[Alert]]:
        if "train/loss" not in stored.names():
            raise Failure(f"{run} has no train/loss: pass the loss to monitor.step(loss)")
        return stored.series("train/loss"), declared(stored.info, "total_steps"), stored.alerts()

    losses, total, alerts = from_run(run, recorded)
    curve = LossCurve.of(losses.steps.tolist(), losses.values.tolist())
    if step_ahead is None and len(losses.steps):
        step_ahead = _if_ahead(total, int(losses.steps[-1]))
    try:
        result = forecast(curve, step_ahead, target, alerts)
    except ValueError as error:
        raise Failure(str(error)) from error
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        show(*_picture(curve, result), *_caution(run, result, alerts))


def _if_ahead(total: float, now: int) -> int | None:
    """The declared number of steps, if still ahead."""
    return int(total) if total == total // 1 and total > NEARLY_OVER * (now + 1) else None


def _picture(curve: LossCurve, result: Forecast) -> list[RenderableType]:
    from rich.text import Text

    from forewarn.cli.terminal import quiet_table
    from forewarn.types import in_words
    from forewarn.views.bars import line

    level = f"{result.level:.4g}"
    if result.declined:
        reached = f"The target {in_words(result.target)} has already been reached. " if result.reached else ""
        why = ("No forecast: ", "yellow")
        return [Text.assemble(f"step {result.now}: loss {level}. {reached}", why, f"{result.declined}.")]
    _, losses = curve.points
    table = quiet_table()
    for name in ("", "step", "loss", "90% interval"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("now", str(result.now), level, "")
    table.add_row("expected", str(result.at), f"{result.loss:.4g}", f"{result.low:.4g} – {result.high:.4g}")
    if result.reached:
        table.add_row("target", str(result.now), in_words(result.target), "already reached")
    elif not math.isnan(result.target):
        soonest, latest = (_step(step) for step in (result.target_soonest, result.target_latest))
        table.add_row("target", _step(result.target_step), in_words(result.target), f"{soonest} – {latest}")
    return [Text.assemble(("loss so far  ", "dim"), line(losses.tolist(), 60)), table]


def _caution(run: Path, result: Forecast, alerts: list[Alert]) -> list[RenderableType]:
    """The open warnings, so that nobody relies on the forecast of a run that is going wrong."""
    import shlex

    from rich.text import Text

    from forewarn.standing import open_words
    from forewarn.types import Severity
    from forewarn.views.wording import WARNING, literal

    if not result.open_warnings:
        return []
    counts = open_words(alert for alert in alerts if alert.severity > Severity.INFO)
    words = f"{counts}: {', '.join(result.open_warnings)}. "
    words += "The run may do worse than this forecast. " if not result.declined else ""
    return [Text(f"{WARNING} {literal(words)}See: forewarn check {literal(shlex.quote(str(run)))}", style="yellow")]


def _step(step: float) -> str:
    return str(round(step)) if math.isfinite(step) else "not in sight"
