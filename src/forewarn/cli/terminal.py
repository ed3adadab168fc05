"""Shared by the commands: the console, opening a run, and failing with a message."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from forewarn.judge.registry import Rule
    from forewarn.store import Run

_log = logging.getLogger("forewarn")

T = TypeVar("T")

PLAIN_WIDTH = 160
"""Columns for a file or a pipe, unless COLUMNS is set."""


_MOST_READS = 20
"""Maximum number of attempts to read a run that is resumed from an earlier step meanwhile."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""


class Failure(click.ClickException):
    """An error for the user: one sentence on standard error."""

    exit_code = 3
    """1 and 2 are verdicts on a run."""


class SuggestingGroup(click.Group):
    """A group that suggests the closest command for an unknown one; early versions of click do not."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            from forewarn.suggestions import did_you_mean

            hint = did_you_mean(args[0], self.list_commands(ctx)) or f"choose from {', '.join(self.list_commands(ctx))}"
            ctx.fail(f"No such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


def output(stderr: bool = False) -> Console:
    """Standard output, or standard error. If it is not a terminal, it is COLUMNS or else wide enough for a table."""
    from forewarn.views.console import plain_console

    columns = os.environ.get("COLUMNS", "")
    if not (columns.isascii() and columns.isdigit() and int(columns) > 0):
        os.environ.pop("COLUMNS", None)  # rich would accept 0 and ²
        columns = ""
    console = plain_console(stderr=stderr)
    if not console.is_terminal and not columns:
        console.width = PLAIN_WIDTH
    return console


def show(*parts: RenderableType, console: Console | None = None) -> None:
    """Print to standard output or another console, without trailing spaces if it is not a terminal."""
    console = console or output()
    if console.is_terminal and not console.options.ascii_only:
        console.print(*parts, sep="\n")
        return
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    _write("\n".join(line.rstrip() for line in captured.get().splitlines()), console.file)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Run]:
    """Open the stored run at a path, or the run that another tool's log there gives.

    Any error while it is open becomes a Failure, except ResumedError.
    """
    import numpy as np

    from forewarn.cli.other_logs import as_run
    from forewarn.store import ResumedError, RunError, open_run
    from forewarn.store.errors import UnknownSeriesError

    try:
        with as_run(path) as stored, open_run(stored) as run, np.errstate(all="ignore"):  # values may be anything
            run.path = path
            yield run
    except ResumedError:
        raise
    except (RunError, OSError) as error:
        raise Failure(str(error)) from error
    except UnknownSeriesError as error:
        raise Failure(f"{path} cannot be read: {error}") from error
    except MADE_BY_WRONG_VALUES as error:
        _log.debug("%s cannot be read", path, exc_info=True)
        reason = f"{type(error).__name__}: {error}"
        raise Failure(
            f"{path} cannot be read ({reason:.200}): it is damaged; if forewarn wrote it this way, please report a bug"
        ) from error


MADE_BY_WRONG_VALUES = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions that unexpected values cause."""


def loaded_rules(modules: Sequence[str]) -> tuple[Rule, ...]:
    """The user's own rules: those in these modules and those of installed packages."""
    from forewarn.judge.own_rules import own_rules

    try:
        return own_rules(modules=modules)
    except (TypeError, ValueError) as error:
        raise Failure(str(error)) from error


def from_run(path: Path, read: Callable[[Run], T]) -> T:
    """The result of `read` on a snapshot of the run at a path, which may still be training.

    If the run is resumed from an earlier step meanwhile, `read` is called again. A damaged run raises a Failure.
    """
    from forewarn.store import ResumedError

    for _ in range(_MOST_READS):
        try:
            with opened(path) as run:
                return read(run.freeze())
        except ResumedError:
            continue
    raise Failure(f"{path} was resumed from an earlier step {_MOST_READS} times while it was read; try again later")


def busy(words: str) -> contextlib.AbstractContextManager[object]:
    """Show a status on the terminal during slow work; silent without a terminal."""
    from forewarn.views.console import plain_console

    console = plain_console(stderr=True)
    return console.status(words) if console.is_terminal else contextlib.nullcontext()


@contextlib.contextmanager
def share_done(total: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar in percent on standard error, if it is a terminal.

    Call what is yielded with words, and with how much was done since the last call.
    """
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from forewarn.views.console import plain_console

    console = plain_console(stderr=True)
    columns = (TaskProgressColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=max(1, total))
        yield lambda words, done: bar.update(task, advance=done, description=words)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error, if it is a terminal. Call what is yielded with words before each part."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from forewarn.views.console import plain_console

    console = plain_console(stderr=True)
    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        num_done = -1

        def tell(words: str) -> None:
            nonlocal num_done
            num_done += 1
            bar.update(task, completed=num_done, description=words)

        yield tell


@contextlib.contextmanager
def byte_progress(words: str, num_bytes: int) -> Iterator[tuple[Callable[[int], None], Callable[..., None]]]:
    """A progress bar on standard error, if it is a terminal, over the bytes of a file and then over further work.

    The first function takes the number of bytes done since the last call. The second one begins with other words, or
    takes how much of how much is done.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from forewarn.views.console import plain_console
    from forewarn.views.wording import short

    console = plain_console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(short(words), total=num_bytes)

        def again(*news: str | int) -> None:
            if len(news) == 2:
                bar.update(task, completed=float(news[0]), total=float(news[1]))
            else:
                bar.reset(task, description=short(str(news[0])), total=1)

        yield lambda done: bar.advance(task, done), again


def quiet_table() -> Table:
    """A table with a header and no lines: easy to read, easy to copy."""
    from rich.table import Table

    return Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))


def torch_on(device: str) -> ModuleType:
    """The torch module; raises Failure if it is missing or cannot use the device."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise Failure("forewarn train needs torch: pip install 'forewarn[torch]'") from error
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Failure(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return torch


def newest(path: Path, is_usable: Callable[[Path], bool]) -> Path:
    """The newest usable path among `lm`, `lm-2`, `lm-3`, …; the path itself if there is none."""
    from forewarn.store.claim import numbered

    *_, last = [path, *filter(is_usable, itertools.takewhile(Path.exists, numbered(path)))]
    return last


def print_json(value: Any) -> None:
    """Print one JSON value to standard output, with non-finite numbers as null."""
    _write(json.dumps(json_plain(value), indent=2, allow_nan=False))


def _write(text: str, stream: IO[str] | None = None) -> None:
    from forewarn.views.wording import fit_for

    stream = stream or sys.stdout
    with contextlib.suppress(BrokenPipeError):  # the reader has closed the pipe; click would exit with 1
        click.echo(fit_for(stream, text), file=stream)


def json_plain(value: Any) -> Any:
    """Plain values that JSON can hold: numbers that are not finite are None."""
    if isinstance(value, float):
        return _shortest(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_plain(item) for item in value]
    return value


def _shortest(value: float) -> float:
    """A float32 reading with its shortest digits: 0.001, not 0.0010000000474974513."""
    import numpy as np

    if value.is_integer():
        return value  # a count or a size must not be rounded to float32
    with np.errstate(over="ignore"):
        stored = np.float32(value)
    return float(str(stored)) if float(stored) == value else value
