"""Tables with one row per step or epoch: CSV, such as Lightning's CSVLogger writes it, and JSON lines."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forewarn.importing.log import Log, LogError, lines_of, number, whole_number
from forewarn.importing.step_counter import StepCounter

CSV, JSON_LINES = "CSV", "JSON lines"

STEPS = (
    "step", "global_step", "train/global_step", "trainer/global_step", "_step", "steps", "train_step", "iteration",
    "iter", "iterations", "itr", "update", "num_updates", "batch_idx", "total_steps",
)  # fmt: skip
"""Columns that count steps, best first."""
EPOCHS = ("epoch", "epochs", "train/epoch")
TIMES = ("_timestamp", "timestamp", "wall_time", "time")
"""Columns that may hold the time since 1970, in seconds or milliseconds."""
_EARLIEST, _LATEST = 1e9, 1e10
"""Times between 2001 and 2286, in seconds: any other number is no time since 1970."""
_MOST_COLUMNS = 20_000
_MOST_CELL_CHARACTERS = 1 << 17
_DELIMITERS = ",\t;"


def read_csv(path: Path, log: Log) -> None:
    """Add a table with a header; cells may be empty, as where a value is logged every tenth step."""
    lines = (line for line in lines_of(path, log) if line.strip() and not line.startswith("#"))
    header = next(lines, "").removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
    delimiter = max(_DELIMITERS, key=header.count)
    names = [name.strip() for name in _cells(header, delimiter)]
    if len(names) > _MOST_COLUMNS:
        raise LogError(f"it has more than {_MOST_COLUMNS:,} columns")
    if not delimiter or len(names) < 2 or all(number(name) is not None for name in names):
        raise LogError("its first line does not name columns")
    rows = (dict(zip(names, _cells(line, delimiter), strict=False)) for line in lines)
    _add_rows(({name: cell.strip() for name, cell in row.items()} for row in rows), log)


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
