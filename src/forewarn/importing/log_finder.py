"""Finds the logs of other tools in a file or a folder, and tells what wrote them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from forewarn.importing import console_logs, event_files, mlflow_store, tables, trainer_state, wandb_files
from forewarn.importing.log import Log, LogError, encoding_of, opened_log, size_of

MOST_LOGS = 1_000
_MOST_FOLDERS = 20_000
_MOST_DEPTH = 12
_HEAD_BYTES = 256 << 10
"""How much of a file is read to tell whether it is a log."""
_FIRST_BYTES = 1 << 10
_SQLITE = b"SQLite format 3\0"
_COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
"""How files of gzip, zip, bzip2, xz and zstd begin."""
_TABLES = {".csv": tables.CSV, ".tsv": tables.CSV, ".jsonl": tables.JSON_LINES, ".ndjson": tables.JSON_LINES}
_TEXTS = (".log", ".txt", ".out", "")
_SKIPPED = {".git", "__pycache__", "node_modules", ".venv", "site-packages", ".trash"}
_SURE = ("metrics.csv", "results.csv", "summary.csv", "progress.csv", "log.csv")
"""Names that training tools give their tables."""


@dataclass(frozen=True, slots=True)
class FoundLog:
    """The log of one run, not read yet."""

    path: Path
    """What a person would name: the file, or the folder of a run."""
    tool: str
    files: tuple[Path, ...]
    _read: Callable[[Log], None]
    name: str = ""
    """The name of the run, if several are in one file."""

    @property
    def num_bytes(self) -> int:
        """The size of its files."""
        return sum(map(size_of, self.files))

    def read(self, tell: Callable[[int], None] = lambda _: None) -> Log:
        """Read it. Raises LogError, with the path in it, if it cannot be read or has no readings."""
        log = Log(self.tool, tell=tell)
        try:
            self._read(log)
        except (LogError, OSError, RecursionError, MemoryError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise LogError(f"{self.path} cannot be read ({self.tool}): {reason}") from error
        if not log.tracks:
            reason = log.notes[0] if log.notes else "it holds no numbers with a step"
            raise LogError(f"{self.path} cannot be read ({self.tool}): {reason}")
        log.number_unnumbered()
        return log


def find_logs(path: Path) -> list[FoundLog]:
    """The logs at a path: one for a file, or one for each run below a folder, sorted by path.

    Raises LogError if the file is no log, or the folder has none.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISDIR(mode):
            return _in_file(path)
        logs = _in_folder(path)
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror or error}") from error
    if not logs:
        raise LogError(
            f"{path} holds neither a run of forewarn nor a log that it can read: TensorBoard, W&B, MLflow, Hugging "
            "Face, Lightning, CSV, JSON lines or console output"
        )
    return logs


def _in_file(path: Path) -> list[FoundLog]:
    """The logs in one file: several if it is a database."""
    with opened_log(path) as file:
        head = file.read(_HEAD_BYTES)
    name = path.name
    if head.startswith(_SQLITE):
        return _in_database(path)
    if head.startswith(wandb_files.IDENTITY):
        return [_of_wandb(path, path)]
    if "tfevents" in name:
        return [_of_events(path, [path])]
    if name == trainer_state.NAME or (name.endswith(".json") and b'"log_history"' in head):
        return [_of_states(path, [path])]
    if (kind := _TABLES.get(path.suffix.lower())) is not None:
        return [_of_table(path, kind)]
    if head.startswith(_COMPRESSED):
        raise LogError(f"{path} is compressed; unpack it first")
    if b"\0" in head and not encoding_of(head):
        raise LogError(f"{path} is not a log that forewarn can read: it is a binary file of another kind")
    if not head.strip():
        raise LogError(f"{path} is empty")
    if path.suffix.lower() == ".json" and tables.is_document(head):
        return [_of_table(path, tables.JSON)]
    if b"".join(head[:_FIRST_BYTES].split()).startswith(b'{"'):  # what Hugging Face prints has other quotes
        return [_of_table(path, tables.JSON_LINES)]
    return [_of_console(path)]


def _in_folder(top: Path) -> list[FoundLog]:
    logs: list[FoundLog] = []
    for folder, names in _folders(top):
        logs += _of_folder(folder, names)
        if len(logs) > MOST_LOGS:
            raise LogError(f"{top} holds more than {MOST_LOGS:,} logs; name one of them")
    return sorted(_without_copies(logs), key=lambda log: (str(log.path), log.name))


def _of_folder(folder: Path, names: Sequence[str]) -> Iterator[FoundLog]:
    """The logs in one folder. If several tools wrote there, they logged the same run: the first of them is taken."""
    files = [folder / name for name in names]
    if trainer_state.NAME in names:
        yield _of_states(folder, [folder / trainer_state.NAME])
    elif wandb := [path for path in files if path.suffix == ".wandb"]:
        for path in wandb:
            yield _of_wandb(folder if len(wandb) == 1 else path, path)
    elif mlflow_store.is_run_folder(folder):
        yield FoundLog(folder, mlflow_store.TOOL, (), partial(mlflow_store.read_folder, folder))
    elif some_tables := [path for path in files if _is_table_of_a_run(path)]:
        for path in some_tables:
            yield _of_table(path, _TABLES[path.suffix.lower()])
    elif events := [path for path in files if "tfevents" in path.name]:
        yield _of_events(folder, events)
    else:
        for path in files:
            if path.suffix in (".db", ".sqlite") and _begins_with(path, _SQLITE):
                try:
                    yield from _in_database(path)
                except LogError:
                    continue
            elif path.suffix.lower() in _TEXTS and _is_console_log(path):
                yield _of_console(path)


def _without_copies(logs: list[FoundLog]) -> Iterator[FoundLog]:
    """The logs without those that another one holds: older checkpoints, and what a trainer's own loggers wrote."""
    newest: dict[Path, FoundLog] = {}
    owners: list[Path] = []
    for log in logs:
        if log.tool == trainer_state.TOOL:
            output = log.path.parent if log.path.name.startswith("checkpoint-") else log.path
            owners.append(output)
            if output not in newest or _progress(log) > _progress(newest[output]):
                newest[output] = log
        elif log.tool == wandb_files.TOOL:
            owners.append(log.path if log.path.is_dir() else log.path.parent)
    yield from newest.values()
    for log in logs:
        is_copy = any(owner in log.path.parents for owner in owners)
        if log.tool != trainer_state.TOOL and (log.tool == wandb_files.TOOL or not is_copy):
            yield log


def _progress(log: FoundLog) -> tuple[bool, int]:
    """How far the state of a Trainer goes: the one in the output folder is written last."""
    number = log.path.name.removeprefix("checkpoint-")
    return (not log.path.name.startswith("checkpoint-"), int(number) if number.isdecimal() else 0)


def _folders(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every folder below and the names of its regular files, sorted, without following links."""
    num_folders = 0
    for folder, children, names in os.walk(top):
        path = Path(folder)
        num_folders += 1
        if num_folders > _MOST_FOLDERS:
            raise LogError(f"{top} holds more than {_MOST_FOLDERS:,} folders; name one of them")
        if len(path.relative_to(top).parts) >= _MOST_DEPTH or "run.db" in names:
            children.clear()
        if "run.db" in names:
            continue
        children[:] = sorted(name for name in children if name not in _SKIPPED)
        yield path, sorted(name for name in names if _is_regular(path / name))


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_table_of_a_run(path: Path) -> bool:
    """Whether a table has a column that is a loss, or a name that training tools give it."""
    if path.suffix.lower() not in _TABLES:
        return False
    if path.name in _SURE:
        return True
    try:
        with opened_log(path) as file:
            return b"loss" in file.readline(_HEAD_BYTES).lower()
    except OSError:
        return False


def _begins_with(path: Path, identity: bytes) -> bool:
    try:
        with opened_log(path) as file:
            return file.read(len(identity)) == identity
    except OSError:
        return False


def _is_console_log(path: Path) -> bool:
    """Whether any of the first lines has a step and a loss."""
    try:
        with opened_log(path) as file:
            lines = file.read(_HEAD_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return False
    for line in islice(lines, 5000):
        pairs = list(console_logs.pairs_of(line))
        if any("loss" in pair.name.lower() for pair in pairs) and console_logs.step_of(pairs) is not None:
            return True
    return False


def _in_database(path: Path) -> list[FoundLog]:
    runs = mlflow_store.runs_in(path)
    if not runs:
        raise LogError(f"{path} holds no run of MLflow")
    return [
        FoundLog(path, mlflow_store.TOOL, (path,), partial(mlflow_store.read_database, path, identity), name)
        for identity, name in runs
    ]


def _of_wandb(path: Path, file: Path) -> FoundLog:
    return FoundLog(path, wandb_files.TOOL, (file,), partial(wandb_files.read, [file]))


def _of_events(path: Path, files: Sequence[Path]) -> FoundLog:
    return FoundLog(path, event_files.TOOL, tuple(files), partial(event_files.read, files))


def _of_states(path: Path, files: Sequence[Path]) -> FoundLog:
    return FoundLog(path, trainer_state.TOOL, tuple(files), partial(trainer_state.read, files))


def _of_table(path: Path, kind: str) -> FoundLog:
    readers = {tables.CSV: tables.read_csv, tables.JSON: tables.read_json}
    return FoundLog(path, kind, (path,), partial(readers.get(kind, tables.read_json_lines), path))


def _of_console(path: Path) -> FoundLog:
    return FoundLog(path, console_logs.TOOL, (path,), partial(console_logs.read, path))
