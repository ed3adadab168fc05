"""Runs that forewarn did not watch: where a command takes a run, it takes another tool's log as well."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from forewarn.importing import FoundLog, ImportedRun

_RUN_FILES = ("run.json", "run.db")
_MOST_LISTED = 10

map_option = click.option(
    "--map", "pairs", multiple=True, metavar="NAME=METRIC",
    help="What a name in the log stands for, such as nll=train/loss. May be repeated.",
)  # fmt: skip


def is_log(path: Path) -> bool:
    """Whether the path exists and is not a run of forewarn, nor a folder with such runs and nothing else."""
    from forewarn.importing import LogError, find_logs

    try:
        if not path.exists() or any((path / name).exists() for name in _RUN_FILES):
            return False
        if not path.is_dir():
            return True
    except (OSError, ValueError):
        return False
    try:
        return bool(find_logs(path))
    except LogError:
        return not _has_runs(path)


def _has_runs(path: Path) -> bool:
    from forewarn.store import list_runs

    return bool(list_runs(path))


def logs_at(path: Path) -> list[FoundLog]:
    """The logs at a path; raises a Failure if there are none."""
    from forewarn.cli.terminal import Failure
    from forewarn.importing import LogError, find_logs

    try:
        return find_logs(path)
    except LogError as error:
        raise Failure(str(error)) from error


@contextlib.contextmanager
def as_run(path: Path) -> Iterator[Path]:
    """The run at a path; a log becomes a temporary run. Raises a Failure if there are several logs."""
    from forewarn.cli.terminal import Failure

    if not is_log(path):
        yield path
        return
    logs = logs_at(path)
    if len(logs) > 1:
        names = [title(log) for log in logs[:_MOST_LISTED]]
        rest = f" and {len(logs) - _MOST_LISTED} more" if len(logs) > _MOST_LISTED else ""
        raise Failure(
            f"{path} holds the logs of {len(logs)} runs: {', '.join(names)}{rest}; name one of them, or import them "
            "with forewarn import"
        )
    with temporary_run(logs[0], judge=True) as imported:
        yield imported.path


@contextlib.contextmanager
def temporary_run(log: FoundLog, given: Mapping[str, str] | None = None, *, judge: bool) -> Iterator[ImportedRun]:
    """The run that a log gives, until the end of the block; with `judge`, its alerts are recorded."""
    with tempfile.TemporaryDirectory(prefix="forewarn-") as folder:
        yield imported(log, Path(folder) / "run", given, judge=judge)


def imported(log: FoundLog, to: Path, given: Mapping[str, str] | None = None, *, judge: bool = True) -> ImportedRun:
    """Write a log as a run, with a progress bar; raises a Failure if that is not possible."""
    from forewarn.cli.terminal import Failure, byte_progress
    from forewarn.importing import LogError, import_log

    try:
        with byte_progress(f"Reading {log.path}", max(log.num_bytes, 1)) as (tell, again):
            read = log.read(tell)
            again(f"Writing {sum(map(len, read.tracks.values()))} readings")
            return import_log(read, to, given, judge=judge, tell=again)
    except LogError as error:
        text = str(error)
        raise Failure(text if str(log.path) in text else f"{log.path}: {text}") from error
    except FileExistsError as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"{to} cannot be written: {error}") from error


def title(log: FoundLog) -> str:
    """A log as a person would name it."""
    from forewarn.views.wording import short

    return short(f"{log.path}") + (f" ({short(log.name)})" if log.name else "")


def answers(pairs: Sequence[str]) -> dict[str, str]:
    """What `--map` says, by name in the log."""
    given = {}
    for pair in pairs:
        name, separator, metric = pair.rpartition("=")
        if not (name and separator and metric):
            raise click.BadParameter(f"{pair!r} must be NAME=METRIC, such as nll=train/loss", param_hint="--map")
        given[name] = metric
    return given
