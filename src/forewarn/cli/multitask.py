"""`forewarn train multitask`: train a model on two tasks, and see how they affect each other."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forewarn.cli.option_groups import POSITIVE, GroupedCommand, option, options
from forewarn.cli.terminal import Failure, output, torch_on

if TYPE_CHECKING:
    from rich.console import Console

    from forewarn.lab.dual_task import DualTaskLSTM

LENGTH = 24
"""Time steps in a generated sequence."""
TASKS = ("pointer", "type")


class _TaskWeight(click.ParamType):  # type: ignore[type-arg]
    """A task and its weight: `pointer=0.5`."""

    name = "task=weight"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        task, _, number = value.partition("=")
        if task not in TASKS:
            self.fail(f"{task!r} is not a task: use pointer or type, as in pointer=0.5", param, ctx)
        try:
            weight = float(number)
        except ValueError:
            self.fail(f"{number!r} is not a number: give a weight, as in {task}=0.5", param, ctx)
        if not 0 < weight < float("inf"):
            self.fail(f"the weight of {task} must be finite and above 0, not {number}", param, ctx)
        return task, weight


@click.command(
    cls=GroupedCommand,
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-"), "max_content_width": 100},
)
@options(
    "Training",
    option("--epochs", type=POSITIVE, default=20, help="Passes over the training data."),
    option("--samples", type=POSITIVE, default=2000, help="Sequences to generate; a fifth is held out."),
    option("--batch-size", type=POSITIVE, default=64, help="Sequences per batch."),
    option("--lr", type=click.FloatRange(min=0.0, min_open=True), default=5e-3, help="Learning rate."),
    option("--device", default="cpu", help="Device to train on: cpu, cuda, cuda:1, mps, …"),
    option("--seed", type=int, default=0, help="Random seed for weights, sequences and their order."),
)
@options(
    "Tasks",
    option("--predict-pointers/--no-predict-pointers", default=True, help="Learn both tasks, or only the type."),
    option("--task-weight", type=_TaskWeight(), multiple=True, metavar="TASK=WEIGHT", show_default=False,
           help="Weight of a task's loss, 1 by default; type=0.001 starves that task. Repeatable."),
    option("--balance", type=click.Choice(["gradnorm", "uncertainty", "none"]), default="none",
           help="Adjust the weights automatically, starting from --task-weight."),
)  # fmt: skip
@options(
    "Gradients",
    option("--monitor-gradients/--no-monitor-gradients", default=True,
           help="Measure, compare, judge and record the gradients."),
    option("--gradient-log-freq", type=POSITIVE, default=5, metavar="N", help="Print the gradients every N epochs."),
)  # fmt: skip
@options(
    "Results",
    option("--result-dir", type=click.Path(path_type=Path), default="results/multitask",
           help="Directory for the run and its snapshots. If it holds a run, the next free name."),
    option("--overwrite", is_flag=True, help="Delete the run in --result-dir instead of using the next free name."),
)  # fmt: skip
def multitask(**settings: Any) -> None:
    """Train an LSTM on two tasks at once.

    Each generated sequence contains a burst. The task `pointer` finds where it starts and ends, and the task `type`
    whether it rises, falls or zigzags. Both share one LSTM, and the gradients show whether they share it fairly. If one
    task starves the other, an alert is printed in red and a snapshot is saved.

    \b
    Examples:
      forewarn train multitask
      forewarn train multitask --task-weight type=0.001
      forewarn train multitask --task-weight type=0.001 --balance gradnorm
      forewarn train multitask --no-predict-pointers --epochs 10
    """
    torch = torch_on(settings["device"])
    from forewarn.lab.data import bursts
    from forewarn.lab.dual_task import DualTaskLSTM
    from forewarn.views.task_lines import TaskView

    console = output()
    balance = None if settings["balance"] == "none" else settings["balance"]
    if balance and not settings["monitor_gradients"]:
        raise Failure("--balance needs the gradients: remove --no-monitor-gradients")
    weights = dict(settings["task_weight"])
    if "pointer" in weights and not settings["predict_pointers"]:
        raise Failure("--task-weight pointer=... conflicts with --no-predict-pointers: remove one of them")
    torch.set_num_threads(1)  # more threads only wait for each other on a model this small
    torch.manual_seed(settings["seed"])
    data = bursts(settings["samples"], LENGTH, settings["seed"])
    model = DualTaskLSTM(predict_pointers=settings["predict_pointers"])
    _introduce(console, model, settings, weights)
    pointers = (data.starts, data.ends) if settings["predict_pointers"] else (None, None)
    try:
        model.fit(
            data.sequences, data.types, *pointers, task_weights=weights, balance=balance,
            view=TaskView(settings["epochs"], settings["gradient_log_freq"], console),
            **{name: settings[name] for name in (
                "epochs", "batch_size", "lr", "device", "seed", "monitor_gradients", "gradient_log_freq",
                "result_dir", "overwrite",
            )},
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise Failure(str(error)) from error
    _conclude(console, model)


def _introduce(console: Console, model: DualTaskLSTM, settings: dict[str, Any], weights: dict[str, float]) -> None:
    size = sum(parameter.numel() for parameter in model.parameters())
    both = "where a burst starts and ends (pointer) and whether it"
    pointer_task = both if settings["predict_pointers"] else "whether a burst"
    console.print(f"An LSTM with {size:,} parameters learns {pointer_task} rises, falls or zigzags (type).")
    weighting = [f"{task} weight {weight:g}" for task, weight in weights.items()]
    weighting += [f"weights balanced by {settings['balance']}"] if settings["balance"] != "none" else []
    console.print(f"{settings['samples']} sequences, {settings['epochs']} epochs on {settings['device']}"
                  + (f"; {', '.join(weighting)}" if weighting else "") + ".\n")  # fmt: skip


def _conclude(console: Console, model: DualTaskLSTM) -> None:
    """Print the held-out results of both tasks, and the next commands."""
    held_out = model.epochs[-1].held_out
    words = [f"{held_out['accuracy']:.0%} of the types are correct"]
    if "pointer" in held_out:
        error = (2 * held_out["pointer"]) ** 0.5 * float(model.pointer_std.mean())
        words.insert(0, f"starts and ends are off by about {error:.1f} of {LENGTH} steps")
    console.print(f"\nOn held-out data, {' and '.join(words)}.")
    if model.monitor is not None:
        run = shlex.quote(str(model.monitor.path))
        console.print(f"\n  forewarn check {run}\n  forewarn show {run}")
