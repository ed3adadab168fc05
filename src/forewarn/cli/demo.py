"""`forewarn demo`: a small GPT, a fault, a warning long before the loss shows it, and the same run saved."""

from __future__ import annotations

import shlex
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from forewarn.judge.diagnosis import Diagnosis
    from forewarn.types import Alert, Remedy
    from forewarn.views import View

WIDTH = 64
BATCH_SIZE = 16
LEARNING_RATE = 1e-3
GROWTH = 370.0
"""Growth of the learning rate during the fault, as a factor: 3% per step over the last 200 of 300 steps."""
FAULT_SHARE = 1 / 3
"""Fraction of the run before the fault begins."""
EVERY = 5
"""Steps between measurements of each layer."""
REPORT = "report.html"
FEWEST_STEPS = 200
"""With fewer steps, the model has learned too little when the fault begins."""


class Course(NamedTuple):
    """How a training run went."""

    path: Path
    losses: list[float]
    warned: Alert | None
    """The first warning."""


@click.command()
@click.option("--steps", type=click.IntRange(min=FEWEST_STEPS), default=300, show_default=True, help="Training steps.")
@click.option(
    "--fault", type=click.Choice(["lr-growth", "none"]), default="lr-growth", show_default=True, help="Fault to inject."
)
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    default="runs/demo",
    show_default=True,
    help="Directory to store the run in.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed for weights and data.")
@click.option("--autopilot", is_flag=True, help='Save the run with policy="autopilot", while the fault goes on.')
def command(steps: int, fault: str, run: Path, seed: int, autopilot: bool) -> None:
    """Train a small GPT that goes wrong, and see the warning.

    The model learns the source code of Python's standard library on the CPU, in less than a minute. After a third of
    the run its learning rate starts to grow, as if the schedule had the wrong sign. forewarn warns long before the loss
    shows it. Then the same run is trained again with the first remedy.

    Nothing is downloaded. Both runs are stored, and an existing run is never overwritten.

    \b
    Examples:
      forewarn demo
      forewarn demo --autopilot
      forewarn demo --fault none --steps 200
    """
    from forewarn.cli.terminal import Failure, busy, output
    from forewarn.store.claim import new_directory
    from forewarn.views.live import LiveView

    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise Failure("forewarn demo trains a model and needs torch: pip install 'forewarn[torch]'") from error
    console = output()
    path = new_directory(run)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:  # before a minute of training, not after it
        raise Failure(f"the demo cannot write to {path}: {error.strerror}; choose another path with --run") from error
    fault_at = int(steps * FAULT_SHARE) if fault == "lr-growth" else None
    _introduce(console, steps, fault_at)
    course = _train(path, steps, fault_at, seed, [LiveView(steps, every=50, console=console, leave=False)])
    saved = twin = None
    beside = new_directory(path.with_name(f"{path.name}-saved"))
    if autopilot and fault_at is not None:
        with busy("Training again with autopilot"):
            saved = _train(beside, steps, fault_at, seed, [], policy="autopilot")
        with busy("Training once more without the fault"):
            twin = _train(new_directory(path.with_name(f"{path.name}-healthy")), steps, None, seed, [])
    elif course.warned is not None and _lower_lr(course.warned) is not None:
        with busy("Training again with the first remedy"):
            saved = _train(beside, steps, fault_at, seed, [], heed=True)
    _conclude(console, course, saved, twin, fault_at)


def _introduce(console: Console, steps: int, fault_at: int | None) -> None:
    console.print(f"Training a small GPT on Python's standard library for {steps} steps.")
    if fault_at is not None:
        console.print(f"From step {fault_at}, the learning rate grows by {_percent(steps, fault_at)} per step. "
                      "forewarn is not told.")  # fmt: skip
    console.print()


def _growth(steps: int, fault_at: int) -> float:
    """Growth factor of the learning rate per step during the fault."""
    return float(GROWTH ** (1 / (steps - fault_at)))


def _percent(steps: int, fault_at: int) -> str:
    return f"{100 * (_growth(steps, fault_at) - 1):.2g}%"


def _train(
    path: Path, steps: int, fault_at: int | None, seed: int, views: Sequence[View], heed: bool = False,
    policy: str = "observe",
) -> Course:  # fmt: skip
    """Train to the end. With `heed`, the first warning ends the fault and sets the advised learning rate."""
    import torch

    import forewarn
    from forewarn.lab.data import TokenBatches, stdlib_text
    from forewarn.lab.gpt import GPT, GPTConfig
    from forewarn.types import Severity

    torch.set_num_threads(1)  # more threads only wait for each other on a model this small
    torch.manual_seed(seed)
    shape = GPTConfig(width=WIDTH)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = TokenBatches(stdlib_text(), BATCH_SIZE, shape.context, seed)
    losses: list[float] = []
    warned: Alert | None = None
    config = forewarn.Config(hyperparameters={"total_steps": steps})
    with forewarn.watch(model, optimizer, path, every=EVERY, config=config, views=views, policy=policy) as monitor:
        for step in range(steps):
            is_heeded = heed and warned is not None
            if fault_at is not None and step >= fault_at and not is_heeded:
                for group in optimizer.param_groups:
                    group["lr"] *= _growth(steps, fault_at)
            inputs, targets = next(batches)
            loss = model(inputs, targets)
            loss.backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            outcome = monitor.step(loss)
            losses.append(loss.item())
            warned = warned or next((alert for alert in outcome.alerts if alert.severity > Severity.INFO), None)
            if heed and not is_heeded and warned is not None and (remedy := _lower_lr(warned)) is not None:
                for group in optimizer.param_groups:
                    group["lr"] = remedy.parameters["to"]
    return Course(path, losses, warned)


def _lower_lr(alert: Alert) -> Remedy | None:
    """The first remedy of an alert, if the demo can apply it."""
    first = next(iter(alert.remedies), None)
    return first if first is not None and first.action == "lower_lr" else None


def _conclude(
    console: Console, course: Course, saved: Course | None, twin: Course | None, fault_at: int | None
) -> None:
    """Print what happened, what the remedy changed, and the next commands."""
    from rich.text import Text

    from forewarn.cli.report import write_html
    from forewarn.cli.terminal import from_run, loaded_rules, show
    from forewarn.cli.verdict import next_commands
    from forewarn.config import Config
    from forewarn.judge.diagnosis import replay
    from forewarn.views.page.built_page import is_built
    from forewarn.views.wording import literal

    own = loaded_rules(())
    diagnosis: Diagnosis = from_run(
        course.path, lambda run: replay(run, Config.from_stored(run.config, own).rule_set(own))
    )
    parts: list[RenderableType] = [Text("\nWhat happened", style="bold")]
    parts += [Text(f"  step {step:3}  {words}") for step, words in _timeline(course, fault_at)]
    if saved is not None:
        parts += _comparison(console, course, saved, twin)
    stored = [literal(str(trained.path)) for trained in (course, saved, twin) if trained is not None]
    paths = " and ".join([", ".join(stored[:-1]), stored[-1]] if len(stored) > 1 else stored)
    report = ""
    if is_built():
        write_html(course.path, course.path / REPORT)
        report = f"Open {literal(str(course.path / REPORT))} in a browser to see what happened.\n"
    parts += [
        Text(f"\nStored in {paths}.\n{report}"),
        next_commands(course.path, diagnosis.ranked, f"forewarn check {shlex.quote(str(course.path))}"),
    ]
    show(*parts, console=console)


def _timeline(course: Course, fault_at: int | None) -> list[tuple[int, str]]:
    """The turning points of the run, in order."""
    from forewarn.types import figure

    losses, warned = course.losses, course.warned
    events = [(0, f"loss {figure(losses[0])}")]
    if fault_at is not None:
        growth = _percent(len(losses), fault_at)
        events.append((fault_at, f"fault: the learning rate starts to grow by {growth} per step"))
    if warned is not None and warned.fired is not None:
        events.append((warned.fired, f"forewarn warns: {warned.name} (loss {figure(losses[warned.fired])})"))
    lost = None if fault_at is None else _lost(losses, fault_at)
    if lost is not None and fault_at is not None:
        highest = figure(max(losses[fault_at // 2 : fault_at]))
        events.append((lost, f"the loss shows it: {figure(losses[lost])}, up from at most {highest} before the fault"))
    last = "end" if warned else "end, no warnings"
    events.append((len(losses) - 1, f"{last}: loss {figure(_level(losses))}{_setback(losses, fault_at)}"))
    return sorted(events, key=lambda event: event[0])


def _comparison(console: Console, course: Course, saved: Course, twin: Course | None) -> list[RenderableType]:
    """The losses of the runs, one above the other and on the same scale."""
    import numpy as np
    from rich.text import Text

    from forewarn.types import figure
    from forewarn.views.bars import ASCII_BARS, BARS, bar_chart

    title, lines = _what_saved_it(saved) if twin is None else _what_autopilot_did(saved)
    width = max(10, min(40, console.width - 34))
    bars = ASCII_BARS if console.options.ascii_only else BARS
    named = {"without remedy": course, "with remedy": saved}
    if twin is not None:
        named = {"observed": course, "autopilot": saved, "without fault": twin}
    parts = [part.mean() for trained in named.values() for part in np.array_split(trained.losses, width)]
    chart = bar_chart(np.array(parts), len(named) * width, bars=bars)
    return [
        Text(f"\n{title}", style="bold"),
        *(Text(f"  {line}") for line in lines),
        *(
            Text.assemble(
                f"  {label:15}  ", (chart[row * width :][:width], "cyan"), f"  loss {figure(_level(trained.losses))}"
            )
            for row, (label, trained) in enumerate(named.items())
        ),
    ]


def _what_saved_it(saved: Course) -> tuple[str, list[str]]:
    from forewarn.views.wording import thing_to_do

    assert saved.warned is not None
    remedy = _lower_lr(saved.warned)
    assert remedy is not None
    return "The same run with the first remedy", [f"At step {saved.warned.fired}: {thing_to_do(remedy)}."]


def _what_autopilot_did(saved: Course) -> tuple[str, list[str]]:
    import dataclasses

    from forewarn.store.reader import open_run
    from forewarn.views.wording import deed

    with open_run(saved.path) as run:
        actions = run.actions()
    words = [deed(dataclasses.replace(action, watched_steps=0)).partition(", because of")[0] for action in actions]
    lines = [f"At step {action.step}: {what}." for action, what in zip(actions, words, strict=True)]
    return "The same run on autopilot, the fault going on", lines


def _lost(losses: Sequence[float], fault_at: int) -> int | None:
    """The first step after the fault with a loss above every recent loss before it."""
    before = max(losses[fault_at // 2 : fault_at])
    return next((step for step in range(fault_at, len(losses)) if not losses[step] <= before), None)


def _level(losses: Sequence[float]) -> float:
    """The final loss: the median of the last ten."""
    return statistics.median(losses[-10:])


def _setback(losses: Sequence[float], fault_at: int | None) -> str:
    """How far the fault set the run back, by the median of ten losses."""
    levels = (_level(losses[: end + 1]) for end in range(9, fault_at or 0))
    back_at = next((step for step, level in enumerate(levels, 9) if level <= _level(losses)), None)
    return "" if back_at is None else f", back to where it was at step {back_at}"
