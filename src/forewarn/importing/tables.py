"""Tables with one row per step or epoch: CSV, such as Lightning's CSVLogger writes it, and JSON lines."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forewarn.files import read_regular
from forewarn.importing.log import Log, LogError, lines_of, number, whole_number
from forewarn.importing.step_counter import StepCounter

CSV, JSON_LINES, JSON = "CSV", "JSON lines", "JSON"

STEPS = (
    "step", "global_step", "train/global_step", "trainer/global_step", "_step", "steps", "train_step", "iteration",
    "iter", "iterations", "itr", "update", "num_updates", "batch_idx", "total_steps",
)  # fmt: skip
"""Columns that count steps, best first."""
EPOCHS = ("epoch", "epochs", "train/epoch")
TIMES = ("_timestamp", "timestamp", "wall_time", "wall time", "time")
"""Columns that may hold the time since 1970, in seconds or milliseconds."""
_EARLIEST, _LATEST = 1e9, 1e10
"""Times between 2001 and 2286, in seconds: any other number is no time since 1970."""
_OF_RUN = " - "
_MOST_COLUMNS = 20_000
_MOST_CELL_CHARACTERS = 1 << 17
_DELIMITERS = ",\t;|"
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
"""A number as spreadsheets write it in much of Europe, where cells are separated by semicolons."""
_MOST_BYTES = 128 << 20
"""Larger documents are not read: unlike lines, they are in memory as a whole."""
_DOCUMENT = re.compile(rb'\s*(?:\[\s*\{|\{\s*"[^"]*"\s*:\s*\[)')
"""The beginning of a list of objects, or of an object of lists."""


def read_csv(path: Path, log: Log) -> None:
    """Add a table with a header; cells may be empty, as where a value is logged every tenth step."""
    lines = (line for line in lines_of(path, log) if line.strip() and not line.startswith("#"))
    header = next(lines, "").removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
    delimiter = max(_DELIMITERS, key=header.count)
    names = _of_a_chart([name.strip() for name in _cells(header, delimiter)])
    if len(names) > _MOST_COLUMNS:
        raise LogError(f"it has more than {_MOST_COLUMNS:,} columns")
    if not delimiter or len(names) < 2 or all(number(name) is not None for name in names):
        raise LogError("its first line does not name columns")
    rows = (dict(zip(names, _cells(line, delimiter), strict=False)) for line in lines)
    _add_rows(({name: _plain(cell, delimiter) for name, cell in row.items()} for row in rows), log)


def is_document(head: bytes) -> bool:
    """Whether a JSON file is one list of rows, or one object of columns, rather than an object per line."""
    return _DOCUMENT.match(head) is not None and b"\n{" not in head


def read_json(path: Path, log: Log) -> None:
    """Add a list of objects, as `json.dump(trainer.state.log_history)` writes it, or lists by name, as in Keras."""
    try:
        document = json.loads(read_regular(path, _MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise LogError(f"it is not JSON ({error})") from error
    if isinstance(document, dict):
        columns = {name: values for name, values in document.items() if isinstance(values, list)}
        size = max(map(len, columns.values()), default=0)
        document = [{name: values[row] for name, values in columns.items() if row < len(values)} for row in range(size)]
    _add_rows((dict(_flat(row)) for row in document if isinstance(row, dict)), log)


def read_json_lines(path: Path, log: Log) -> None:
    """Add the objects of a file, one per line; nested ones are joined with a slash."""
    broken = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal broken
        for line in lines_of(path, log):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                broken += 1
                continue
            if isinstance(row, dict):
                yield dict(_flat(row))

    _add_rows(rows(), log)
    if broken:
        log.note(f"{path.name} has {broken} line{'s' * (broken > 1)} that {'are' if broken > 1 else 'is'} no JSON")


def _flat(row: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict) and depth < 8:
            yield from _flat(value, f"{prefix}{name}/", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _of_a_chart(names: list[str]) -> list[str]:
    """The columns of a chart that W&B exports are `run - loss`, `run - loss__MIN`, …; of a single run, `loss` is it."""
    runs = {name.partition(_OF_RUN)[0] for name in names if f"{name}__MIN" in names}
    if len(runs) != 1:
        return names
    return [name.removeprefix(f"{next(iter(runs))}{_OF_RUN}") for name in names]


def _plain(cell: str, delimiter: str) -> str:
    cell = cell.strip()
    return cell.replace(",", ".") if delimiter == ";" and _DECIMAL_COMMA.fullmatch(cell) else cell


def _cells(line: str, delimiter: str) -> list[str]:
    if '"' not in line:
        return line.rstrip("\r\n").split(delimiter)
    try:
        return next(csv.reader([line.rstrip("\r\n")], delimiter=delimiter), [])
    except csv.Error:
        return []


def _add_rows(rows: Iterator[dict[str, Any]], log: Log) -> None:
    """Add the numbers of each row at its step; without a column of steps, epochs or rows are counted."""
    counter = StepCounter(log)
    for index, row in enumerate(rows):
        by_name = {name.lower(): value for name, value in row.items()}
        step = next((step for name in STEPS if (step := whole_number(by_name.get(name))) is not None), None)
        epoch = next((epoch for name in EPOCHS if (epoch := number(by_name.get(name))) is not None), None)
        time_name, time = _time(by_name)
        step = counter.step(index, step, epoch)
        for name, value in row.items():
            lowered = name.lower()
            reading = number(value) if value != "" else None
            if reading is not None and lowered not in STEPS and lowered != time_name:
                log.add(name, step, time, reading)
    counter.finish()


def _time(row: Mapping[str, Any]) -> tuple[str, float]:
    """The column that holds the time since 1970, and that time; NaN if there is none."""
    for name in TIMES:
        time = number(row.get(name))
        if time is not None:
            seconds = time / 1000 if time > _LATEST else time
            if _EARLIEST < seconds < _LATEST:
                return name, seconds
    return "", math.nan
