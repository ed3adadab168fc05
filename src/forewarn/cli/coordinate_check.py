"""`forewarn coordinate-check`: do the updates of a layer depend on the width of the model?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forewarn.lab.coordinates.sweep import Sweep


def _widths(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """The widths given to --widths, in ascending order."""
    try:
        return tuple(sorted({int(width) for width in value.split(",") if width.strip()}))
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a list of whole numbers; separate them with commas, as in 64,128,256"
        ) from None


@click.command("coordinate-check")
@click.option(
    "--widths", callback=_widths, default="64,96,128,192,256", show_default=True, metavar="N,N,N",
    help="Widths to compare: at least three multiples of 4. --lr should suit the smallest.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(min=1), default=8, show_default=True, help="Optimizer steps per training run."
)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Training runs per width.")
@click.option(
    "--parametrization", type=click.Choice(["standard", "mup", "both"]), default="both", show_default=True,
    help="How initial weights and learning rates scale with width.",
)  # fmt: skip
@click.option(
    "--lr", type=click.FloatRange(min=0, min_open=True), default=1e-3, show_default=True, help="Adam's learning rate."
)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default="coordinate-check.png", show_default=True,
    metavar="FILE.png", help="File to write the plot to. Requires matplotlib.",
)  # fmt: skip
@click.option("--json", "wants_json", is_flag=True, help="Print the results of every step as JSON, and nothing else.")
def command(
    widths: tuple[int, ...], steps: int, seeds: int, parametrization: str, lr: float, out: Path, wants_json: bool
) -> None:
    """Check whether updates depend on model width, before you train a wide model.

    Trains the example GPT for a few steps at several widths, in standard parametrization (initial variance 1/width, one
    learning rate) and in muP. The refined coordinate check (arXiv 2505.22491) then measures two terms in every layer:
    what its own updates add to its output, (W_t-W_0)x_t, and what it passes on from below, W_0(x_t-x_0).

    For each term, an exponent is fitted over widths and seeds: 0 is constant, 1 is proportional to width. A
    parametrization is width-stable if nothing grows and no layer learns less. Then the learning rate of a narrow model
    also works for a wide one.

    Takes about half a minute on one core. For your own model, see docs/coordinate_check.md.

    \b
    Examples:
      forewarn coordinate-check
      forewarn coordinate-check --parametrization mup --widths 64,128,256,512 --seeds 5
      forewarn coordinate-check --steps 20 --lr 3e-4 --out check.png
    """
    from forewarn.cli.terminal import Failure, print_json, show

    try:
        import torch
    except ModuleNotFoundError as error:
        raise Failure(
            "forewarn coordinate-check trains a model and needs torch: pip install 'forewarn[torch]'"
        ) from error
    from forewarn.lab.coordinates.sweep import check_widths

    try:
        check_widths(widths)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--widths") from error
    try:
        out.parent.mkdir(parents=True, exist_ok=True)  # fail before training, not after it
    except OSError as error:
        raise Failure(f"{out} cannot be written: {error.strerror}") from error
    drawn = _can_draw()
    if not drawn:
        click.echo("No plot will be drawn because matplotlib is missing: pip install matplotlib", err=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads only slow down a small model
    try:
        sweeps = _swept(parametrization, widths, steps, seeds, lr)
    finally:
        torch.set_num_threads(threads)
    if wants_json:
        print_json([_as_json(sweep) for sweep in sweeps])
    else:
        show(*_parts(sweeps, seeds))
    if drawn:
        _draw(out, sweeps)


def _can_draw() -> bool:
    """Whether matplotlib is installed; checked before training, not after it."""
    from importlib import import_module

    try:
        import_module("matplotlib.figure")
    except ModuleNotFoundError:
        return False
    return True


def _swept(parametrization: str, widths: Sequence[int], steps: int, seeds: int, lr: float) -> list[Sweep]:
    from forewarn.cli.terminal import progress
    from forewarn.lab.coordinates.sweep import sweep
    from forewarn.lab.mup import Parametrization

    chosen = list(Parametrization) if parametrization == "both" else [Parametrization(parametrization)]
    with progress(len(chosen) * len(widths) * seeds) as tell:
        return [sweep(choice, widths, steps, seeds, lr, tell) for choice in chosen]


def _parts(sweeps: Sequence[Sweep], seeds: int) -> Iterator[RenderableType]:
    """A table and a sentence for each parametrization."""
    from rich.text import Text

    from forewarn.cli.terminal import quiet_table
    from forewarn.lab.coordinates.exponents import JUDGED
    from forewarn.lab.coordinates.findings import MEANINGS, NAMES, caveat, cells, verdict_sentence, verdict_word

    first = sweeps[0]
    yield Text(
        f"Width exponents after {first.num_steps} steps, over widths {', '.join(map(str, first.widths))} "
        f"and {seeds} seed{'s' if seeds > 1 else ''}, with standard errors."
    )
    for term in JUDGED:
        yield Text(f"  {term:<13} {MEANINGS[term]}", style="dim")
    for sweep in sweeps:
        growths = sweep.growths()
        word = verdict_word(growths)
        yield Text(f"\n{NAMES[sweep.parametrization]}: {word}\n", style="bold")
        table = quiet_table()
        table.add_column("layer", no_wrap=True)
        for term in JUDGED:
            table.add_column(str(term), no_wrap=True)
            table.add_column("")
        for layer, terms in growths.items():
            table.add_row(layer, *(Text(text, style=style) for text, style in cells(terms)))
        yield table
        yield Text("\n" + verdict_sentence(growths, sweep.widths))
    if doubt := caveat(len(first.widths), seeds):
        yield Text(f"\n{doubt}", style="yellow")


def _as_json(sweep: Sweep) -> dict[str, Any]:
    from forewarn.lab.coordinates.findings import verdict_word

    return {
        "parametrization": str(sweep.parametrization),
        "widths": list(sweep.widths),
        "verdict": verdict_word(sweep.growths()),
        "losses": sweep.losses.tolist(),
        "steps": [
            {
                layer: {
                    str(term): {"exponent": growth.exponent, "error": growth.error, "trend": str(growth.trend)}
                    for term, growth in terms.items()
                }
                for layer, terms in sweep.growths(step).items()
            }
            for step in range(sweep.num_steps)
        ],
    }


def _draw(out: Path, sweeps: Sequence[Sweep]) -> None:
    """Write the plot and print its path."""
    from forewarn.cli.terminal import Failure
    from forewarn.lab.coordinates.picture import draw
    from forewarn.views.wording import literal

    try:
        draw(out, sweeps)
    except OSError as error:
        raise Failure(f"{out} cannot be written: {error.strerror}") from error
    else:
        click.echo(f"Wrote {literal(str(out))}", err=True)
