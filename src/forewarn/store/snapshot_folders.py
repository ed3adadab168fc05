"""Debug snapshots in a run directory: `snapshots/step-000123/`, each written as a whole or not at all."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forewarn.codec import Noun
from forewarn.files import read_regular
from forewarn.store.errors import RunError
from forewarn.store.plain import decoded
from forewarn.types import Alert

FOLDER = "snapshots"
DESCRIPTION, READINGS, CONFIG, ENVIRONMENT = "snapshot.json", "readings.json", "config.json", "environment.json"
BATCH, BATCH_TENSORS, RANDOM, RANDOM_TENSORS, WEIGHTS = (
    "batch.json", "batch.safetensors", "random.json", "random.safetensors", "weights.safetensors",
)  # fmt: skip
FILES = (
    DESCRIPTION, READINGS, CONFIG, ENVIRONMENT, BATCH, BATCH_TENSORS, RANDOM, RANDOM_TENSORS, WEIGHTS,
)  # fmt: skip

_NAME = re.compile(r"step-\d{6,18}(-\d+)?")
_DRAFT = re.compile(r"\.step-\d{6,18}\.\d+\.draft")
_MOST_BYTES = 64 << 20
"""Maximum size of a JSON file in a snapshot."""
_MOST_OF_A_STEP = 100
"""Maximum number of snapshots of the same step."""


class SnapshotError(RunError):
    """The path holds no readable snapshot. The message says what was found and what to do."""


@dataclass(frozen=True, slots=True)
class Snapshot(Noun):
    """What a snapshot is about, and what is in it."""

    step: int
    """The step that went wrong or, if `monitor.snapshot()` was called, the one under way or completed last."""
    time: float
    """Seconds since the epoch, when it was written."""
    at: int
    """The step that the loop was in by then."""
    reason: str = ""
    alert: Alert | None = None
    """The critical alert that caused it."""
    weights: str = "none"
    """Which weights are in it: `before` the update of its step, `after` it, or `none`."""
    batches: tuple[int, ...] = ()
    """The steps whose batches are in it."""
    num_ranks: int = 1
    """Number of processes of the run; the batch and the random states are those of rank 0."""
    notes: tuple[str, ...] = ()
    """What is missing, and why."""
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    """The size of each file, in bytes."""


def snapshots_in(run: Path) -> list[Path]:
    """The snapshots of a run, in the order of their steps; empty if it has none."""
    try:
        names = [entry.name for entry in os.scandir(run / FOLDER) if _NAME.fullmatch(entry.name)]
    except OSError:
        return []
    ordered = sorted(names, key=lambda name: [int(number) for number in name.split("-")[1:]])
    return [run / FOLDER / name for name in ordered if (run / FOLDER / name / DESCRIPTION).is_file()]


def replay_command(run: Path) -> str | None:
    """The command that runs the step of the run's first snapshot with a batch again; None if it has none.

    The first problem is usually the cause of the next.
    """
    first = next((path for path in snapshots_in(run) if (path / BATCH).is_file()), None)
    return None if first is None else f"forewarn replay {shlex.quote(str(first))} --model MODULE:FUNCTION"


def write_folder(run: Path, step: int, files: Mapping[str, Callable[[Path], None]]) -> Path:
    """A new snapshot with these files. If one cannot be written, nothing is left. Raises OSError.

    The last file may look at the others, next to its own path.
    """
    folder = run / FOLDER
    draft = folder / f".step-{step:06d}.{os.getpid()}.draft"
    folder.mkdir(exist_ok=True)
    try:
        if draft.exists():  # left by a killed process with the same process id
            shutil.rmtree(draft)
        draft.mkdir()
        for name, write in files.items():
            write(draft / name)
        return _renamed(draft, folder / f"step-{step:06d}")
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # the first snapshot of a run leaves no empty folder
            folder.rmdir()
        raise


def _renamed(draft: Path, target: Path) -> Path:
    """The draft under its final name; a step may have several snapshots."""
    for number in range(1, _MOST_OF_A_STEP + 1):
        numbered = target if number == 1 else target.with_name(f"{target.name}-{number}")
        if not os.path.lexists(numbered):
            draft.rename(numbered)
            return numbered
    raise FileExistsError(f"step {target.name} already has {_MOST_OF_A_STEP} snapshots")


def read_snapshot(path: Path) -> Snapshot:
    """The description of a snapshot. Raises SnapshotError if the path holds none."""
    plain = read_json(path / DESCRIPTION)
    try:
        return Snapshot.from_json(plain)
    except (TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"{path / DESCRIPTION} is damaged ({error!r:.200})") from error


def read_json(path: Path) -> Any:
    """A JSON file of a snapshot. Raises SnapshotError if it cannot be read."""
    try:
        return decoded(read_regular(path, _MOST_BYTES).decode("utf-8"))
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SnapshotError(f"{path} is not JSON ({error!s:.200})") from error


def delete_snapshots(run: Path) -> None:
    """Delete the snapshots of a run, and the drafts of killed processes; other files stay."""
    folder = run / FOLDER
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        is_ours = _NAME.fullmatch(entry.name) or _DRAFT.fullmatch(entry.name)
        if is_ours and stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
            for name in FILES:
                Path(entry.path, name).unlink(missing_ok=True)
            with suppress(OSError):  # somebody put a file there
                os.rmdir(entry.path)
    with suppress(OSError):
        folder.rmdir()
