"""`forewarn demo`: a small GPT, a fault, and a warning before the loss diverges."""

from __future__ import annotations

import shlex
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from forewarn.types import Alert

WIDTH = 64
BATCH_SIZE = 16
LEARNING_RATE = 1e-3
LR_JUMP = 30.0
"""Times the learning rate after the fault: far beyond what this model survives."""
FAULT_SHARE = 0.6
"""Where in the run the fault comes."""
STEPS_AFTER_FAULT = 40
EVERY = 5
"""Steps between measurements of each layer; the fault falls between two of them."""
FEWEST_STEPS = 100
"""With fewer, there is too little healthy history to compare with."""


@click.command()
@click.option("--steps", type=click.IntRange(min=FEWEST_STEPS), default=300, show_default=True, help="Planned length.")
@click.option("--fault", type=click.Choice(["lr-jump", "none"]), default="lr-jump", show_default=True)
@click.option("--run", type=click.Path(path_type=Path), default="runs/demo", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def command(steps: int, fault: str, run: Path, seed: int) -> None:
    """Train a small GPT that goes wrong, and watch the warning.

    It learns the source text of Python's own standard library, on the CPU, in less than a minute. At 60% of the run the
    learning rate is multiplied by 30. Nothing is downloaded. The run is stored; an existing one is never overwritten.

    \b
    Examples:
      forewarn demo
      forewarn demo --fault none --steps 200
    """
    from forewarn.cli.terminal import Failure, output
    from forewarn.store.claim import new_directory

    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise Failure("forewarn demo trains a model and needs torch: pip install 'forewarn[torch]'") from error
    console = output()
    path = new_directory(run)
    fault_at = int(steps * FAULT_SHARE) + 1 if fault == "lr-jump" else None
    _introduce(console, steps, fault_at)
    losses = _train(console, path, steps, fault_at, seed)
    _conclude(console, path, losses, fault_at)


def _introduce(console: Console, steps: int, fault_at: int | None) -> None:
    console.print(f"A small GPT is to learn the source of Python's standard library in {steps} steps.")
    if fault_at is not None:
        console.print(f"At step {fault_at} its learning rate is multiplied by {LR_JUMP:g}. forewarn is not told.")
    console.print()


def _train(console: Console, path: Path, steps: int, fault_at: int | None, seed: int) -> list[float]:
    """Train to the end, or until shortly after the fault; returns the loss of each step."""
    import torch

    import forewarn
    from forewarn.lab.data import TokenBatches, stdlib_text
    from forewarn.lab.gpt import GPT, GPTConfig
    from forewarn.views.live import LiveView

    torch.set_num_threads(1)  # more threads only wait for each other on a model this small
    torch.manual_seed(seed)
    shape = GPTConfig(width=WIDTH)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = TokenBatches(stdlib_text(), BATCH_SIZE, shape.context, seed)
    view = LiveView(steps, every=25, console=console)
    losses: list[float] = []
    config = forewarn.Config(hyperparameters={"total_steps": steps})
    with forewarn.watch(model, optimizer, path, every=EVERY, config=config, views=[view]) as monitor:
        for step in range(steps):
            if step == fault_at:
                for group in optimizer.param_groups:
                    group["lr"] *= LR_JUMP
            inputs, targets = next(batches)
            loss = model(inputs, targets)
            loss.backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
            losses.append(loss.item())
            if fault_at is not None and step == fault_at + STEPS_AFTER_FAULT:
                break
    return losses


def _conclude(console: Console, path: Path, losses: list[float], fault_at: int | None) -> None:
    """Print the timeline, the cause, the remedies and the next commands, from the stored run and the losses."""
    from rich.padding import Padding
    from rich.text import Text

    from forewarn.cli.terminal import from_run, loaded_rules, show
    from forewarn.cli.verdict import alert_lines, folded, next_commands, what_to_do
    from forewarn.config import Config
    from forewarn.judge.diagnosis import replay
    from forewarn.types import Severity
    from forewarn.views.wording import literal

    own = loaded_rules(())
    diagnosis = from_run(path, lambda run: replay(run, Config.from_stored(run.config, own).rule_set(own)))
    parts: list[RenderableType] = [Text("\nWhat happened", style="bold")]
    parts += [Text(f"  step {step:3}  {words}") for step, words in _timeline(losses, fault_at, diagnosis.alerts)]
    for cause, symptoms in [pair for pair in folded(diagnosis) if pair[0].worst.severity > Severity.INFO][:1]:
        parts += [Text("\nWhy", style="bold"), Padding(alert_lines(cause), (0, 0, 0, 2))]
        if symptoms:
            names = ", ".join(symptom.worst.name for symptom in symptoms)
            parts.append(Padding(Text(f"its symptoms: {names}"), (0, 0, 0, 6)))
        parts += [Text(), what_to_do([cause])]
    parts += [
        Text(f"\nThe run is stored in {literal(str(path))}.\n"),
        next_commands(path, diagnosis.ranked, f"forewarn check {shlex.quote(str(path))}"),
    ]
    show(*parts, console=console)


def _timeline(losses: list[float], fault_at: int | None, alerts: tuple[Alert, ...]) -> list[tuple[int, str]]:
    """The turning points of the run, in order."""
    from forewarn.types import Severity, in_words

    events = [(0, f"loss {in_words(losses[0])}")]
    if fault_at is not None:
        before = max(losses[fault_at // 2 : fault_at])
        events.append((fault_at, f"the fault: the learning rate is multiplied by {LR_JUMP:g}"))
        lost = next((step for step in range(fault_at, len(losses)) if not losses[step] <= before), None)
        if lost is not None:
            events.append(
                (lost, f"the loss is {in_words(losses[lost])}; before the fault it was {in_words(before)} at most")
            )
    warned = next((alert for alert in alerts if alert.severity > Severity.INFO and alert.fired is not None), None)
    if warned is not None and warned.fired is not None:
        events.append((warned.fired, f"forewarn warns: {warned.name}; the loss is {in_words(losses[warned.fired])}"))
    events = sorted(events, key=lambda event: event[0])
    last = "the end" if warned else "the end, without a warning"
    return [*events, (len(losses) - 1, f"{last}: loss {in_words(losses[-1])}{_setback(losses, fault_at)}")]


def _setback(losses: list[float], fault_at: int | None) -> str:
    """How far back the run was thrown, judged by the median of ten losses."""
    now = statistics.median(losses[-10:])
    level = (statistics.median(losses[start : start + 10]) for start in range(fault_at or 0))
    back_at = next((step for step, median in enumerate(level) if median <= now), None)
    return "" if fault_at is None or back_at is None else f", back where it was at step {back_at}"
