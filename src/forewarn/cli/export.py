"""`forewarn export`: the readings of a run in another format."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from forewarn.store import Run
    from forewarn.views.export.readings import Selection

ENDINGS = {"csv": ".csv", "json": ".jsonl", "parquet": ".parquet", "hdf5": ".h5", "tensorboard": "-tensorboard"}
"""What is added to the name of the run, by format."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(list(ENDINGS)), required=True, help="Format to write.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="PATH",
    help="File to write, or folder for TensorBoard. Default: the name of the run, here.",
)  # fmt: skip
@click.option("--metric", "metrics", multiple=True, metavar="GLOB", help="Only metrics that match. Repeatable.")
@click.option("--scope", "scopes", multiple=True, metavar="GLOB", help="Only layers that match. Repeatable.")
@click.option("--steps", metavar="A:B", help="Only steps A to B, both included; either may be left out.")
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
def command(
    run: Path,
    form: str,
    output: Path | None,
    metrics: tuple[str, ...],
    scopes: tuple[str, ...],
    steps: str | None,
    overwrite: bool,
) -> None:
    """Write the readings of a run to a file for other tools.

    CSV, JSON lines and Parquet have one row per reading: step, unix_seconds, metric, scope, value and unit. HDF5 has a
    matrix for each metric. TensorBoard gets every reading, histogram and alert. The run can be of any size, and may
    still be training. Numbers are exactly those that were recorded.

    A filter is a name, a glob or a regular expression. Quote it, so that the shell does not expand it.

    \b
    Examples:
      forewarn export runs/demo --to csv
      forewarn export runs/demo --to parquet --metric 'gradient/*' --steps 100:200
      forewarn export runs/demo --to hdf5 -o demo.h5 --scope 'blocks.0.*'
      forewarn export runs/demo --to tensorboard -o logs/demo

    In Python, run.to_pandas() returns a DataFrame, with the same filters.
    """
    from forewarn.cli.terminal import Failure, from_run
    from forewarn.views.wording import literal

    bounds = _bounds(steps)
    target = output or Path(run.resolve().name + ENDINGS[form])
    if os.path.lexists(target) and not overwrite:
        raise Failure(f"{target} exists already; replace it with --overwrite, or name another path with -o")
    if target.is_dir() != (form == "tensorboard") and os.path.lexists(target):
        raise Failure(f"{target} is a {'folder' if target.is_dir() else 'file'}; name another path with -o")

    def written(stored: Run) -> Selection:
        from forewarn.store.errors import UnknownSeriesError
        from forewarn.views.export.readings import Selection

        try:
            selection = Selection.of(stored, metrics or None, scopes or None, bounds)
        except (UnknownSeriesError, ValueError) as error:
            raise Failure(str(error.args[0])) from error
        _write(selection, form, target)
        return selection

    try:
        selection = from_run(run, written)
    except ModuleNotFoundError as error:
        raise Failure(str(error)) from error
    size = sum(path.stat().st_size for path in (target.iterdir() if target.is_dir() else [target]))
    click.echo(f"Wrote {literal(str(target))}: {selection.num_series:,} series, {_in_bytes(size)}.")


def _write(selection: Selection, form: str, target: Path) -> None:
    from forewarn.cli.terminal import Failure, share_done
    from forewarn.files import replacing
    from forewarn.views.export import event_files, hdf5_file, tables

    writers = {
        "csv": tables.write_csv,
        "json": tables.write_json_lines,
        "parquet": tables.write_parquet,
        "hdf5": hdf5_file.write_hdf5,
    }
    try:
        if form == "tensorboard":
            total = selection.num_rows + event_files.num_histograms(selection)
            with share_done(total) as tell, event_files.replacing_folder(target) as folder:
                event_files.write_events(selection, folder, tell)
        else:
            with share_done(selection.num_rows) as tell, replacing(target) as file:
                writers[form](selection, file, tell)
    except OSError as error:
        raise Failure(f"{target} cannot be written: {error.strerror or error}") from error


def _bounds(steps: str | None) -> tuple[int | None, int | None]:
    if steps is None:
        return None, None
    match = re.fullmatch(r"(\d{0,18}):(\d{0,18})", steps)
    if match is None:
        raise click.BadParameter(
            f"{steps!r} is not a range of steps such as 100:200, 100: or :200", param_hint="--steps"
        )
    first, last = (int(text) if text else None for text in match.groups())
    if first is not None and last is not None and last < first:
        raise click.BadParameter(f"{steps!r} ends before it begins", param_hint="--steps")
    return first, last


def _in_bytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} KB"
