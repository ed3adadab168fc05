"""Deleting the run in a directory, to make room for a new one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from forewarn.store import database, manifest, run_summary
from forewarn.store.claim import Claim
from forewarn.store.errors import RunError
from forewarn.store.rank_logs import delete_rank_logs
from forewarn.store.snapshot_folders import delete_snapshots

STACKS = "stalled.txt"
"""The stacks of all threads when a run hung."""


def delete_run(path: Path, first: Callable[[], None] = lambda: None) -> None:
    """Delete the files of the run in a directory, if there is one; other files stay.

    `first` deletes what belongs to the run: if it is interrupted, the run is still there for the next try.
    Raises FileExistsError if a process is still writing the run, or if forewarn did not write these files.
    """
    files = path / manifest.NAME, path / database.NAME
    if not any(map(os.path.lexists, files)):
        return
    claim = Claim()
    try:
        claim.take(path)
    except BlockingIOError as error:
        raise FileExistsError(
            f"{path} is being written by a process that is still running, so it is not overwritten; stop that process, "
            "or name another path with run="
        ) from error
    try:
        _check_ours(*files)
        first()
        database.delete_database(path / database.NAME)
        (path / run_summary.NAME).unlink(missing_ok=True)
        (path / STACKS).unlink(missing_ok=True)
        delete_rank_logs(path)
        delete_snapshots(path)
        (path / manifest.NAME).unlink(missing_ok=True)  # last, because it shows that the other files are ours
    except (OSError, RunError, sqlite3.Error) as error:
        raise FileExistsError(
            f"{path} is not overwritten, because it does not hold a run that forewarn can delete ({error}); name "
            "another path with run="
        ) from error
    finally:
        claim.release()


def _check_ours(facts: Path, readings: Path) -> None:
    if os.path.lexists(facts):
        manifest.read_manifest(facts.parent)
    else:  # a process was killed before it wrote run.json
        database.open_for_reading(readings).close()
