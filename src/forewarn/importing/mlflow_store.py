"""MLflow's stores, read without MLflow: the folders of its file store, and its SQLite database."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from forewarn.files import check_regular, read_regular
from forewarn.importing.log import Log, LogError, lines_of, number, whole_number
from forewarn.store.read_limits import ReadLimits

TOOL = "MLflow"
METADATA = "meta.yaml"
_METRICS, _PARAMETERS = "metrics", "params"
_MOST_FILES = 20_000
_MOST_PARAMETER_BYTES = 1 << 14
_MOST_RUNS = 10_000
_LARGEST = 1.79e308
"""From here on, the database means infinity, which it cannot hold."""
_ROWS = 10_000


def is_run_folder(folder: Path) -> bool:
    """Whether this is the folder of one run in a file store."""
    return (folder / METADATA).is_file() and (folder / _METRICS).is_dir()


def read_folder(folder: Path, log: Log) -> None:
    """Add the metrics of a run in a file store: a line per reading, with its time in ms, its value and its step."""
    for path in _files_in(folder / _METRICS):
        name = path.relative_to(folder / _METRICS).as_posix()
        for line in lines_of(path, log):
            parts = line.split()
            if len(parts) in (3, 4):  # newer versions may add a dataset
                time, value, step = number(parts[0]), number(parts[1]), whole_number(parts[2])
                if time is not None and value is not None and step is not None:
                    log.add(name, step, time / 1000, value)
    for path in _files_in(folder / _PARAMETERS):
        try:
            words = read_regular(path, _MOST_PARAMETER_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            continue
        _add_parameter(path.relative_to(folder / _PARAMETERS).as_posix(), words, log)


def runs_in(database: Path) -> list[tuple[str, str]]:
    """The id and name of each run that is not deleted, oldest first. Raises LogError if it is not MLflow's."""
    with closing(_connection(database)) as connection:
        try:
            ReadLimits(connection, database)
            rows = connection.execute(
                "SELECT run_uuid, name FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time LIMIT ?",
                [_MOST_RUNS],
            ).fetchall()
        except (sqlite3.Error, ValueError) as error:
            raise LogError(f"it is no database of MLflow ({error})") from error
    return [(str(identity), str(name or identity)) for identity, name in rows]


def read_database(database: Path, run: str, log: Log) -> None:
    """Add the metrics of one run."""
    with closing(_connection(database)) as connection:
        try:
            limits = ReadLimits(connection, database)
            query = (
                "SELECT key, value, timestamp, step, is_nan FROM metrics WHERE run_uuid = ? ORDER BY timestamp, step"
            )
            rows = connection.execute(query, [run])
            while some := rows.fetchmany(_ROWS):
                limits.begin(connection)
                for name, value, time, step, is_nan in some:
                    _add_row(name, value, time, step, is_nan, log)
            for name, words in connection.execute("SELECT key, value FROM params WHERE run_uuid = ?", [run]):
                _add_parameter(str(name), str(words), log)
        except (sqlite3.Error, ValueError) as error:
            raise LogError(f"the database cannot be read ({error})") from error


def _add_row(name: Any, value: Any, time: Any, step: Any, is_nan: Any, log: Log) -> None:
    if isinstance(name, str) and isinstance(value, int | float) and isinstance(step, int):
        reading = math.nan if is_nan else value if abs(value) < _LARGEST else math.copysign(math.inf, value)
        log.add(name, step, time / 1000 if isinstance(time, int | float) else math.nan, reading)


def _add_parameter(name: str, words: str, log: Log) -> None:
    value = number(words)
    if len(name) < 200 and len(words) < 200:
        log.hyperparameters[name] = words if value is None else value


def _connection(database: Path) -> sqlite3.Connection:
    check_regular(database)
    try:
        return sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise LogError(f"the database cannot be opened ({error})") from error


def _files_in(folder: Path) -> Iterator[Path]:
    """The files below a folder, without following links."""
    pending, num_files = [folder], 0
    while pending:
        try:
            children = sorted(pending.pop().iterdir())
        except OSError:
            continue
        for child in children:
            num_files += 1
            if num_files > _MOST_FILES:
                raise LogError(f"it has more than {_MOST_FILES:,} files")
            if child.is_symlink():
                continue
            if child.is_dir():
                pending.append(child)
            elif child.is_file():
                yield child
