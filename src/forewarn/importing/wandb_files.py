"""The `.wandb` file of a run of Weights & Biases, read without wandb: its history and config."""

from __future__ import annotations

import json
import math
import struct
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from forewarn.catalogue import TRACKER_PREFIX
from forewarn.importing.log import Log, LogError, number, opened_log, whole_number
from forewarn.importing.wire import fields, message, text

TOOL = "W&B"
PATTERN = "*.wandb"
IDENTITY = b":W&B"

_BLOCK_BYTES = 32 << 10
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MOST_RECORD_BYTES = 64 << 20
_MOST_JSON_CHARACTERS = 1 << 20

# Numbers of fields in `wandb_internal.proto`.
_HISTORY, _CONFIG, _RUN = 2, 5, 17
_CONFIG_OF_RUN = 4
_HISTORY_ITEM, _HISTORY_STEP, _UPDATE = 1, 2, 1
_KEY, _NESTED_KEY, _INTEGER, _NUMBER, _VALUE_JSON = 1, 2, 5, 6, 16

_STEPS = (
    f"{TRACKER_PREFIX}step", "train/global_step", "trainer/global_step", "global_step", "step", "train/step", "iter",
    "iteration", "train/iter", "num_updates",
)  # fmt: skip
"""Names under which scripts log the step that they count, best first; W&B itself counts calls of `log`."""


def read(paths: Sequence[Path], log: Log) -> None:
    """Add the history of these files, which belong to one run."""
    for path in paths:
        try:
            for record in _records(path, log):
                for kind, value in fields(memoryview(record)):
                    _take(kind, value, log)
        except (ValueError, struct.error) as error:
            if isinstance(error, LogError):
                raise
            log.note(f"{path.name} is damaged ({error}); it was read up to there")
    _count_own_steps(log)


def _count_own_steps(log: Log) -> None:
    """Replace W&B's steps by those that the script counts, if it logs them and they only rise.

    A row without them has the step of the row before.
    """
    for name in _STEPS:
        track = log.tracks.get(name)
        if track is None or track.values[-1] <= track.values[0]:
            continue
        own = [int(value) if value >= 0 and value.is_integer() else -1 for value in track.values]
        if own[0] < 0 or any(later < earlier for earlier, later in pairwise(own)):
            continue
        rows = track.steps
        del log.tracks[name]
        for other in log.tracks.values():
            other.steps = array("q", (own[max(0, bisect_right(rows, row) - 1)] for row in other.steps))
        return


def _take(kind: int, value: int | memoryview, log: Log) -> None:
    """Take one record, if it is of a kind that says something about training."""
    if kind == _HISTORY:
        _add_history(message(value), log)
    elif kind == _CONFIG:
        _add_config(message(value), log)
    elif kind == _RUN:
        for number_, part in fields(message(value)):
            if number_ == _CONFIG_OF_RUN:
                _add_config(message(part), log)


def _records(path: Path, log: Log) -> Iterator[bytes]:
    """The records of a log in LevelDB's format; the last one may be cut off, as in a run that was killed."""
    with opened_log(path) as file:
        if file.read(len(IDENTITY) + 3)[: len(IDENTITY)] != IDENTITY:
            raise LogError("it is not a log of W&B: it begins with other bytes")
        place, parts, size = len(IDENTITY) + 3, [b""], 0
        while True:
            left = _BLOCK_BYTES - place % _BLOCK_BYTES
            if left < _HEADER.size:
                place += len(file.read(left))
                continue
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return
            checksum, length, kind = _HEADER.unpack(header)
            part = file.read(length)
            if len(part) < length:
                return
            place += len(header) + length
            log.tell(len(header) + length)
            if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or checksum != zlib.crc32(part, zlib.crc32(bytes([kind]))):
                raise ValueError("a record does not match its checksum")
            if kind in (_FULL, _FIRST):
                parts, size = [], 0
            size += length
            if size <= _MOST_RECORD_BYTES:
                parts.append(part)
            if kind in (_FULL, _LAST):
                if size <= _MOST_RECORD_BYTES:
                    yield b"".join(parts)
                parts = []


def _add_history(history: memoryview, log: Log) -> None:
    """Add one call of `wandb.log`: its numbers, at the step that the trainer counts if it is there."""
    values: dict[str, Any] = {}
    step = None
    for kind, value in fields(history):
        if kind == _HISTORY_ITEM:
            name, item = _item(message(value))
            values[name] = item
        elif kind == _HISTORY_STEP:
            step = next((part for number_, part in fields(message(value)) if number_ == 1), None)
    step = whole_number(values.get("_step", step if isinstance(step, int) else None))
    time = number(values.get("_timestamp"))
    if step is None:
        return
    for name, item in values.items():
        reading = number(item)
        if reading is not None and not name.startswith("_"):
            log.add(name, step, math.nan if time is None else time, reading)


def _add_config(config: memoryview, log: Log) -> None:
    for kind, value in fields(config):
        if kind != _UPDATE:
            continue
        name, setting = _item(message(value))
        if not name.startswith("_") and isinstance(setting, bool | int | float | str) and len(str(setting)) < 200:
            log.hyperparameters[name] = setting


def _item(item: memoryview) -> tuple[str, Any]:
    """The name and value of a pair; names may be nested."""
    names: list[str] = []
    content: Any = None
    for kind, value in fields(item):
        if kind in (_KEY, _NESTED_KEY):
            names.append(text(value))
        elif kind == _VALUE_JSON:
            content = _decoded(text(value))
        elif kind == _INTEGER and isinstance(value, int):
            content = value - (1 << 64) if value >= 1 << 63 else value
        elif kind == _NUMBER:
            (content,) = struct.unpack("<d", message(value))
    return ".".join(filter(None, names)), content


def _decoded(words: str) -> Any:
    if len(words) > _MOST_JSON_CHARACTERS or words[:1] in "{[":
        return None  # a histogram, an image or a table
    try:
        return json.loads(words)
    except ValueError:
        return None
