"""`forewarn replay`: run the step of a debug snapshot again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from torch import nn

    from forewarn.snapshots.reading import SavedSnapshot
    from forewarn.snapshots.step_again import Replay
    from forewarn.snapshots.tensor_facts import TensorFacts
    from forewarn.snapshots.tracing import Place

FOUND = 1
"""Exit code if something went wrong again."""
_MOST_TENSORS = 6
"""Maximum number of tensors shown of a module's inputs, or of its outputs."""


@click.command()
@click.argument("snapshot", type=click.Path(path_type=Path))
@click.option(
    "--model", "model_name", metavar="MODULE:FUNCTION",
    help="Your function that builds the model, without arguments. Without it, only the batch is checked.",
)  # fmt: skip
@click.option(
    "--loss", "loss_name", metavar="MODULE:FUNCTION",
    help="The loss function, called as loss(output, targets) with the targets of monitor.batch, or as loss(output). "
    "Not needed if the model returns its loss.",
)  # fmt: skip
@click.option(
    "--weights", "weights_path", type=click.Path(path_type=Path), metavar="FILE",
    help="Weights to use instead of those in the snapshot: safetensors, or a checkpoint of torch.",
)  # fmt: skip
@click.option("--step", type=int, help="Run another step whose batch is in the snapshot.")
@click.option("--device", default="cpu", show_default=True, help="Where to run it.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_context
def command(
    ctx: click.Context,
    snapshot: Path,
    model_name: str | None,
    loss_name: str | None,
    weights_path: Path | None,
    step: int | None,
    device: str,
    wants_json: bool,
) -> None:
    """Run the step of a debug snapshot again, and find where it goes wrong.

    SNAPSHOT is a folder such as runs/mine/snapshots/step-000123, or a run, whose last snapshot is taken. A critical
    alert writes one, and so does monitor.snapshot(). The batch is in it with Snapshots(keep_batches=1).

    The batch is checked first: values that are not finite, samples out of scale, labels that are no class. Then the
    model runs forwards and backwards, and the first module is named whose output or gradient is not finite or out of
    scale, with its inputs.

    Your code is imported only through --model and --loss. The module is looked up in the current folder first. A script
    must guard its training with `if __name__ == "__main__":`.

    \b
    Examples:
      forewarn replay runs/mine
      forewarn replay runs/mine --model train:make_model --loss torch.nn.functional:cross_entropy
      forewarn replay runs/mine/snapshots/step-000123 --model train:make_model --weights last.safetensors

    \b
    Exit codes:
      0  nothing was found
      1  the step goes wrong again, or the batch is faulty
      3  the snapshot or the weights cannot be read, or the model cannot be built
      64 invalid command line
    """
    from forewarn.cli.terminal import Failure, busy, print_json, show, torch_on
    from forewarn.store.errors import RunError

    torch_on(device)
    from forewarn.snapshots.reading import load_snapshot
    from forewarn.snapshots.step_again import replay

    try:
        saved = load_snapshot(snapshot, step, device)
        model, notes = _model(model_name, saved, weights_path, device)
        loss = None if loss_name is None else _function(loss_name, "the loss")
        with busy(f"Running step {saved.step} again"):
            result = replay(saved, model, loss)
    except RunError as error:
        raise Failure(str(error)) from error
    notes += result.notes
    if wants_json:
        print_json({"snapshot": str(saved.path), **result.to_json(), "notes": notes, "about": saved.about.to_json()})
    else:
        show(*_text(saved, result, notes, model_name))
    ctx.exit(FOUND if result.cause else 0)


def _function(name: str, what: str) -> Callable[..., Any]:
    from forewarn.cli.terminal import Failure
    from forewarn.lab.bench.workloads import named_function

    if ":" not in name:
        raise click.UsageError(f"{what} must be named as module:function, such as train:make, not {name!r}")
    try:
        return named_function(name, what)
    except ValueError as error:
        raise Failure(str(error)) from error


def _model(
    name: str | None, saved: SavedSnapshot, weights_path: Path | None, device: str
) -> tuple[nn.Module | None, list[str]]:
    """The user's model with the weights of the snapshot, and what to tell about them."""
    from forewarn.cli.terminal import Failure
    from forewarn.snapshots.reading import read_weights
    from forewarn.snapshots.step_again import as_model, load_weights

    if name is None:
        return None, []
    function = _function(name, "the model")
    try:
        made = function()
    except Exception as error:
        raise Failure(f"the model {name} cannot be built: {type(error).__name__}: {error}") from error
    model = as_model(made)
    source = weights_path or saved.weights
    if source is None:
        notes = [f"no weights are in the snapshot, so those that {name} makes are used; pass others as --weights"]
    else:
        are_updated = weights_path is None and saved.about.weights == "after"
        named = str(weights_path) if weights_path else "the snapshot"
        notes = load_weights(model, read_weights(source), named, are_updated=are_updated)
        if are_updated:
            notes.append("the weights are those of when the snapshot was written, usually after the update of the step")
    return model.to(device), notes


def _text(saved: SavedSnapshot, result: Replay, notes: list[str], model_name: str | None) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    from forewarn.types import figure
    from forewarn.views.wording import CRITICAL, HEALTHY, literal, short

    about = saved.about
    yield Text.assemble((short(str(saved.path)), "bold"), f"  step {result.step}")
    if about.reason:
        numbers = literal(about.alert.numbers) if about.alert is not None else ""
        yield Text(" · ".join(filter(None, [literal(about.reason), numbers])), style="dim")
    yield Text()
    if result.cause:
        yield Text.assemble((f"{CRITICAL} ", "bold red"), (literal(result.cause), "bold"))
    else:
        what = "the step does not go wrong here" if result.loss is not None or result.places else "nothing was found"
        yield Text.assemble((f"{HEALTHY} ", "green"), (what, "bold"))
    yield Text()
    rows = [("Batch", _batch_words(saved, result))]
    rows += [(place.direction.capitalize(), _place_words(place)) for place in result.places]
    if result.loss is not None:
        recorded = f", in the run {figure(saved.loss)}" if saved.has_loss else ""
        rows.append(("Loss", f"{figure(result.loss)}{recorded}"))
    for name, words in rows:
        yield _row(name, words)
    for place in result.places:
        yield Padding(_tensors(place), (1, 0, 0, 2))
    yield Text()
    for note in notes:
        yield _row("Note", literal(note), style="dim")
    if model_name is None:
        yield Text("Next", style="bold")
        yield Text(f"  forewarn replay {literal(shlex.quote(str(saved.path)))} --model MODULE:FUNCTION")


def _row(name: str, words: str, style: str = "") -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=8)
    table.add_column()
    table.add_row(Text(name, style=style or "bold"), Text(words, style=style))
    return table


def _batch_words(saved: SavedSnapshot, result: Replay) -> str:
    from forewarn.views.wording import literal

    if result.batch:
        return "\n".join(literal(fault.words) for fault in result.batch)
    if not saved.calls and saved.given is None:
        return "not in the snapshot"
    return "finite, and no sample is out of scale"


def _place_words(place: Place) -> str:
    from forewarn.views.wording import short

    name = f"{short(place.module)} ({short(place.kind)})" if place.module else f"the model ({short(place.kind)})"
    return f"{name}: {short(place.words)}"


def _tensors(place: Place) -> Table:
    """The inputs and outputs of a module in numbers."""
    from rich.text import Text

    from forewarn.cli.terminal import quiet_table
    from forewarn.types import figure
    from forewarn.views.wording import short

    table = quiet_table()
    for name in (short(place.module or "the model"), "shape", "least", "largest", "rms", "not finite"):
        table.add_column(name, justify="right" if name in ("least", "largest", "rms") else "left", no_wrap=True)
    for role, tensors in (("in", place.inputs), ("own", place.weights), ("out", place.outputs)):
        shown = _shown(tensors)
        for one in shown:
            shape = " × ".join(map(str, one.shape)) or "scalar"
            numbers = [figure(number) if number == number else "–" for number in (one.low, one.high, one.rms)]
            style = "" if one.is_finite else "red"
            table.add_row(*map(Text, (f"{role:3} {short(one.name)}", f"{one.dtype} {shape}", *numbers)),
                          Text(_not_finite(one), style=style))  # fmt: skip
        if len(tensors) > len(shown):
            table.add_row(Text(f"{role:3} and {len(tensors) - len(shown)} more"))
    return table


def _shown(tensors: Sequence[TensorFacts]) -> list[TensorFacts]:
    """As many tensors as fit, in their order, among them those that are not finite."""
    first = sorted(range(len(tensors)), key=lambda index: tensors[index].is_finite)[:_MOST_TENSORS]
    return [tensors[index] for index in sorted(first)]


def _not_finite(one: TensorFacts) -> str:
    counts = ((one.num_nan, "NaN"), (one.num_inf, "∞"), (one.num_minus_inf, "-∞"))
    return ", ".join(f"{count} {what}" for count, what in counts if count) or "–"
