"""`forewarn forecast`: where the loss of a run is heading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forewarn.judge.forecast import Forecast, LossCurve

NEARLY_OVER = 1.05
"""Times the steps made that the declared ones must be, for what is left of them to be a future."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--at", "step_ahead", type=click.IntRange(min=1), metavar="STEP",
              help="The step to look ahead to; by default the "
              "declared total_steps, or twice as far as the run has come where that is (nearly) reached.")  # fmt: skip
@click.option("--target", type=float, metavar="LOSS", help="When will the loss be this low?")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
def command(run: Path, step_ahead: int | None, target: float | None, as_json: bool) -> None:
    """Tell where the loss is heading, with an interval, or that it is too early to tell.

    A power law with an asymptote is fitted to the whole curve of the training loss. How wide the interval is comes from
    the run itself: from how wrong the same fit is when it has seen only a part of the curve and must predict the rest.

    \b
    Examples:
      forewarn forecast runs/demo
      forewarn forecast runs/demo --at 20000 --target 1.5
    """
    import dataclasses

    from forewarn.cli.terminal import Failure, opened, print_json, show
    from forewarn.judge.forecast import LossCurve, forecast
    from forewarn.judge.remedies import declared

    with opened(run) as stored:
        if "train/loss" not in stored.names():
            raise Failure(f"{run} has no train/loss: give the loss to monitor.step(loss)")
        losses = stored.series("train/loss")
        total = declared(stored.info, "total_steps")
        curve = LossCurve.of(losses.steps.tolist(), losses.values.tolist())
        if step_ahead is None and len(losses.steps):
            step_ahead = _if_ahead(total, int(losses.steps[-1]))
        try:
            result = forecast(curve, step_ahead, target)
        except ValueError as error:
            raise Failure(str(error)) from error
        if as_json:
            print_json(dataclasses.asdict(result))
        else:
            show(*_picture(curve, result))


def _if_ahead(total: float, now: int) -> int | None:
    """The declared number of steps, if still ahead."""
    return int(total) if total == total // 1 and total > NEARLY_OVER * (now + 1) else None


def _picture(curve: LossCurve, result: Forecast) -> list[RenderableType]:
    from rich.text import Text

    from forewarn.cli.terminal import quiet_table
    from forewarn.types import in_words
    from forewarn.views.bars import line

    level = f"{result.level:.4g}"
    if result.too_early:
        reached = f"The target {in_words(result.target)} is reached already. " if result.reached else ""
        why = ("Too early to tell: ", "yellow")
        return [Text.assemble(f"step {result.now}: loss {level}. {reached}", why, f"{result.too_early}.")]
    _, losses = curve.points
    table = quiet_table()
    for name in ("", "step", "loss", "nine times in ten"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("now", str(result.now), level, "")
    table.add_row("expected", str(result.at), f"{result.loss:.4g}", f"{result.low:.4g} – {result.high:.4g}")
    if result.reached:
        table.add_row("target", str(result.now), in_words(result.target), "reached already")
    elif not math.isnan(result.target):
        soonest, latest = (_step(step) for step in (result.target_soonest, result.target_latest))
        table.add_row("target", _step(result.target_step), in_words(result.target), f"{soonest} – {latest}")
    return [Text.assemble(("loss so far  ", "dim"), line(losses.tolist(), 60)), table]


def _step(step: float) -> str:
    return str(round(step)) if math.isfinite(step) else "not in sight"
