"""The runs that the page shows: those in a folder, each named by its path in there."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from forewarn.files import read_regular, replacing
from forewarn.standing import FAILED, run_state
from forewarn.store import ResumedError, Run, RunError, database, list_runs, manifest, open_run
from forewarn.store.newest import Newest, kept_newest
from forewarn.store.run_summary import NAME as SUMMARY
from forewarn.store.run_summary import Stamp, Summary, kept_summary, stamp_of, summary_of
from forewarn.types import in_words
from forewarn.views.exposition import LIVE, RECENT_SECONDS, Exported
from forewarn.views.wording import literal

NOTES = "notes.json"
MOST_OPEN = 6
"""Maximum number of runs kept open for the next request."""
MOST_TAGS, LONGEST_TAG, LONGEST_NOTE = 20, 60, 4000
_LONGEST_NAME = 1024
_MOST_BYTES = 1 << 16
_ATTEMPTS = 5

T = TypeVar("T")


class NoRunError(LookupError):
    """There is no such run in the folder."""


class Folder:
    """The runs at or below a directory. Safe to use from many threads; each run is read by a thread of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._real = Path(os.path.realpath(root))
        self._readers: OrderedDict[str, _Reader] = OrderedDict()
        self._rows: dict[str, tuple[Stamp, dict[str, Any]]] = {}
        self._lock = Lock()

    @property
    def is_one_run(self) -> bool:
        """Whether the directory is a run itself."""
        return (self._real / manifest.NAME).is_file()

    def path_of(self, name: str) -> Path:
        """The directory of a run. Raises NoRunError if it is not inside of the folder."""
        if self.is_one_run:
            if name != self._real.name:
                raise NoRunError(f"there is no run {literal(name[:200])!r} here")
            return self.root
        path = self.root / name
        try:
            is_inside = Path(os.path.realpath(path)).is_relative_to(self._real) and ".." not in Path(name).parts
            if is_inside and 0 < len(name) <= _LONGEST_NAME and self._holds(path):
                return path
        except (OSError, ValueError):  # no file can have such a name
            pass
        raise NoRunError(f"there is no run {literal(name[:200])!r} here")

    def _holds(self, path: Path) -> bool:
        """Whether a directory holds a run whose own files are not links that lead out of the folder."""
        files = [path / manifest.NAME, path / database.NAME]
        links = [file for file in files if file.is_symlink()]
        return files[0].is_file() and all(Path(os.path.realpath(link)).is_relative_to(self._real) for link in links)

    def names(self) -> list[str]:
        """All runs, most recently written first."""
        return [name for name, _ in self._paths()]

    def _paths(self) -> Iterator[tuple[str, Path]]:
        """The name and directory of every run, most recently written first."""
        if self.is_one_run:
            yield self._real.name, self.root
            return
        for path in list_runs(self.root):
            name = path.relative_to(self.root).as_posix()
            with suppress(NoRunError):  # a link that leads out of the folder
                yield name, self.path_of(name)

    def stamps(self) -> dict[str, Stamp]:
        """The state of the files of each run."""
        stamps: dict[str, Stamp] = {}
        for name, path in self._paths():
            with suppress(OSError):  # deleted meanwhile
                stamps[name] = stamp_of(path)
        return stamps

    def stamp(self, name: str) -> Stamp:
        """The state of the files of a run: it changes whenever the run does."""
        try:
            return stamp_of(self.path_of(name))
        except OSError as error:
            raise NoRunError(f"the run {literal(name)} cannot be read: {error.strerror}") from error

    def rows(self) -> list[dict[str, Any]]:
        """All runs in a few numbers each."""
        rows = []
        for name, path in self._paths():
            with suppress(NoRunError, OSError):  # deleted meanwhile
                rows.append(self._row(name, path))
        return rows

    def _row(self, name: str, path: Path) -> dict[str, Any]:
        stamp = stamp_of(path)
        kept = self._rows.get(name)
        if kept is None or kept[0] != stamp:
            try:
                summary = kept_summary(path) or self.read(name, summary_of)
                kept = stamp, _plain(summary)
            except RunError as error:
                kept = stamp, {"error": literal(str(error))}
            self._rows[name] = kept
        empty = {
            "model": "", "num_steps": 0, "last_step": None, "last_loss": None, "loss_words": "", "updated": None,
            "alerts": {},
        }  # fmt: skip
        row: dict[str, Any] = {"run": name, **empty, **kept[1]}
        end = row.pop("end", None)
        row["state"] = run_state(end, row["updated"]) if row["updated"] is not None else FAILED
        return {**row, **read_notes(path)}

    def exported(self) -> tuple[dict[str, int], list[Exported]]:
        """The number of runs by state, and what Prometheus gets of those that train or ended a short while ago."""
        rows = self.rows()
        recent = time.time() - RECENT_SECONDS
        runs = []
        for row in rows:
            is_live = row["state"] in LIVE
            if row["updated"] is not None and (is_live or row["updated"] > recent):
                directory = self.root if self.is_one_run else self.root / row["run"]
                newest = kept_newest(directory / SUMMARY) if is_live else Newest()
                runs.append(Exported(row["run"], row["state"], row["last_step"], row["updated"], newest))
        return Counter(row["state"] for row in rows), runs

    def read(self, name: str, work: Callable[[Run], T]) -> T:
        """The result of `work` on one consistent state of a run."""
        return self.submit(name, work).result()

    def submit(self, name: str, work: Callable[[Run], T]) -> Future[T]:
        """The same, without waiting."""
        path = self.path_of(name)
        with self._lock:
            reader = self._readers.get(name)
            if reader is None:
                reader = self._readers[name] = _Reader(path)
            self._readers.move_to_end(name)
            while len(self._readers) > MOST_OPEN:
                self._readers.popitem(last=False)[1].close()
            return reader.submit(work)

    def close(self) -> None:
        """Close all runs."""
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].close()


class _Reader:
    """An open run and the thread that reads it: a run belongs to one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "forewarn reader")
        self._run: Run | None = None
        self._files: list[Any] = []

    def submit(self, work: Callable[[Run], T]) -> Future[T]:
        return self._thread.submit(self._read, work)

    def close(self) -> None:
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def _read(self, work: Callable[[Run], T]) -> T:
        for attempt in range(_ATTEMPTS):
            try:
                with np.errstate(all="ignore"):  # a damaged run can hold any value
                    return work(self._opened().freeze())
            except ResumedError:
                self._close()
                if attempt == _ATTEMPTS - 1:
                    raise
            except RunError:
                self._close()
                raise
        raise AssertionError

    def _opened(self) -> Run:
        """The run, opened again if its files were replaced or it was resumed."""
        try:
            status = [os.stat(self._path / name) for name in (database.NAME, manifest.NAME)]
        except OSError as error:
            self._close()
            raise RunError(f"{self._path} cannot be read: {error.strerror}") from error
        files = [status[0].st_ino, status[1].st_ino, status[1].st_mtime_ns]
        if self._run is None or files != self._files:
            self._close()
            self._run, self._files = open_run(self._path), files
        return self._run

    def _close(self) -> None:
        if self._run is not None:
            self._run.close()
        self._run = None


def _plain(summary: Summary) -> dict[str, Any]:
    loss = summary.last_loss
    return {
        "model": literal(summary.model),
        "num_steps": summary.num_steps,
        "last_step": summary.last_step,
        "last_loss": loss if loss is not None and math.isfinite(loss) else None,
        "loss_words": "" if loss is None else in_words(loss),
        "updated": summary.updated,
        "end": summary.end,
        "alerts": {str(severity): count for severity, count in summary.num_alerts.items()},
    }


def read_notes(path: Path) -> dict[str, Any]:
    """The tags and the note that a person gave a run; empty ones if there are none."""
    try:
        plain = json.loads(read_regular(path / NOTES, _MOST_BYTES))
        return checked_notes(plain)
    except (OSError, RecursionError, TypeError, ValueError):
        return {"tags": [], "note": ""}


def write_notes(path: Path, notes: dict[str, Any]) -> None:
    """Keep tags and a note with a run."""
    with replacing(path / NOTES) as file:
        file.write(json.dumps(notes, ensure_ascii=False, indent=2).encode("utf-8", "replace"))


def checked_notes(plain: Any) -> dict[str, Any]:
    """Tags and a note. Raises ValueError if they are something else, or too long."""
    tags, note = (plain.get("tags", []), plain.get("note", "")) if isinstance(plain, dict) else (None, None)
    are_tags = isinstance(tags, Sequence) and not isinstance(tags, str) and all(isinstance(tag, str) for tag in tags)
    if tags is None or not are_tags or not isinstance(note, str):
        raise ValueError('notes are {"tags": ["…"], "note": "…"}')
    kept = [tag for tag in dict.fromkeys(tag.strip() for tag in tags) if tag]
    if len(kept) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in kept) or len(note) > LONGEST_NOTE:
        raise ValueError(
            f"a run can have {MOST_TAGS} tags of {LONGEST_TAG} characters and a note of {LONGEST_NOTE} characters"
        )
    return {"tags": kept, "note": note}
