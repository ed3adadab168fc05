"""`forewarn import`: keep another tool's log as a run."""  # noqa: N999 - the command is called that

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from forewarn.cli.other_logs import map_option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forewarn.importing import FoundLog, ImportedRun


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="RUN",
    help="Write the run to this directory; of several logs, each to one below it. Default: runs/NAME.",
)  # fmt: skip
@map_option
def command(path: Path, out: Path | None, pairs: tuple[str, ...]) -> None:
    """Keep another tool's log as a run, to be judged, shown and compared like any other.

    PATH is a file or a folder: TensorBoard's event files, the .wandb file of W&B, MLflow's folders or database, Hugging
    Face's trainer_state.json, Lightning's metrics.csv, any other CSV or JSON lines, or what a script printed. Usual
    names such as loss, val_loss, grad_norm and lr are recognized. All others are kept under their own name, and --map
    says what they stand for.

    To judge a log only once, `forewarn check PATH` is enough.

    \b
    Examples:
      forewarn import outputs/trainer_state.json
      forewarn import runs/tensorboard --out runs/imported
      forewarn import train.csv --map nll=train/loss --map heldout=eval/loss

    \b
    Exit codes:
      0  imported
      3  nothing there can be read, or the run cannot be written
      64 invalid command line
    """
    from forewarn.cli.other_logs import answers, imported, is_log, logs_at, title
    from forewarn.cli.terminal import Failure, progress, show
    from forewarn.store import RunError, open_run

    given = answers(pairs)
    if not is_log(path):
        try:
            open_run(path).close()
        except (RunError, OSError) as error:
            raise Failure(str(error)) from error
        raise Failure(f"{path} is a run of forewarn already: forewarn check {path}")
    logs = logs_at(path)
    if len(logs) == 1:
        show(_told(imported(logs[0], out or Path("runs") / _name(logs[0]), given)))
        return
    runs: list[ImportedRun] = []
    failures: list[str] = []
    with progress(len(logs)) as tell:
        for log, target in zip(logs, _targets(path, logs, out or Path("runs")), strict=True):
            tell(title(log))
            try:
                runs.append(imported(log, target, given))
            except Failure as failure:
                failures.append(failure.format_message())
        tell("")
    for run in runs:
        show(_told(run))
    if failures:
        raise Failure("; ".join(failures))


def _name(log: FoundLog) -> str:
    """A name for the run of a log: that of its file or folder, or the name that it has itself."""
    import re

    own = log.name or (log.path.stem if log.path.is_file() else log.path.resolve().name)
    if own in ("trainer_state", "metrics", "results", "mlflow", "log", "train", "output"):
        own = log.path.resolve().parent.name
    return re.sub(r"[^\w.\-]+", "_", own).strip("._") or "imported"


def _targets(path: Path, logs: list[FoundLog], out: Path) -> list[Path]:
    """A directory for each log below `out`, named by its place in the folder."""
    import re

    targets: list[Path] = []
    for log in logs:
        place = log.path.relative_to(path) if log.path != path else Path(_name(log))
        words = "_".join(place.with_suffix("").parts if log.path.is_file() else place.parts)
        if log.name and log.path != path:
            words += f"_{log.name}"
        target = base = out / (re.sub(r"[^\w.\-]+", "_", words).strip("._") or "imported")
        number = 2
        while target in targets:
            target, number = base.with_name(f"{base.name}-{number}"), number + 1
        targets.append(target)
    return targets


def _told(run: ImportedRun) -> RenderableType:
    """What was read, what it was taken for, and what to do next."""
    import shlex

    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from forewarn.types import spelled_out
    from forewarn.views.wording import literal, short

    title = Text.assemble(
        (short(str(run.path)), "bold"), f"  from {run.tool}: {run.num_readings:,} readings at {run.num_steps:,} steps"
    )
    renamed = [
        (place.metric if place.scope in ("", "0") else spelled_out(place.metric, place.scope), name)
        for name, place in run.names.items()
        if place.metric != name and not place.metric.startswith("logged/")
    ]
    table = Table.grid(padding=(0, 2))
    for metric, name in renamed[:MOST_NAMES]:
        table.add_row(Text(f"  {short(metric)}"), Text(f"from {short(name)}", style="dim"))
    if len(renamed) > MOST_NAMES:
        table.add_row(Text(f"  and {len(renamed) - MOST_NAMES} more"))
    kept = [name for name, place in run.names.items() if place.metric.startswith("logged/")]
    if kept:
        table.add_row(Text("  logged/…"), Text(f"{len(kept)} other names, kept as they are", style="dim"))
    notes = [Padding(Text(f"· {literal(note)}", style="yellow"), (0, 0, 0, 2)) for note in run.notes]
    return Group(title, table, *notes, Text(f"  forewarn check {literal(shlex.quote(str(run.path)))}"))


MOST_NAMES = 12
"""Maximum number of renamed metrics that are listed."""
