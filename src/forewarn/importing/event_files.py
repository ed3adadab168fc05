"""TensorBoard's event files, read without TensorBoard: scalars only, everything else is passed over."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forewarn.files import read_regular
from forewarn.importing.log import Log, opened_log
from forewarn.importing.wire import fields, message, text

TOOL = "TensorBoard"
PATTERN = "*tfevents*"

_MOST_RECORD_BYTES = 256 << 20
"""Larger records are passed over; an event of one step with 100,000 scalars takes 10 MB."""
_MOST_FACTS_BYTES = 16 << 20
FACTS = "forewarn-run.json"
"""Written beside the event files by forewarn's own view."""
_FLOAT, _DOUBLE = 1, 2
"""Element types of a tensor."""


def read(paths: Sequence[Path], log: Log) -> None:
    """Add the scalars of these event files, which belong to one run, oldest first."""
    for path in sorted(paths, key=lambda path: path.name):
        try:
            for record in _records(path, log):
                _add_event(record, log)
        except (ValueError, struct.error) as error:
            log.note(f"{path.name} is damaged ({error}); it was read up to there")
    for folder in {path.parent for path in paths}:
        if (folder / FACTS).exists():
            log.facts = _facts(folder / FACTS, log)


def _facts(path: Path, log: Log) -> dict[str, Any]:
    try:
        plain = json.loads(read_regular(path, _MOST_FACTS_BYTES))
    except (OSError, ValueError, RecursionError):
        log.note(f"{path.name} cannot be read, so what forewarn knew of the model is missing")
        return {}
    return plain if isinstance(plain, dict) else {}


def _records(path: Path, log: Log) -> Iterator[memoryview]:
    """The records of a file. The last one may be cut off, as in a run that was killed."""
    with opened_log(path) as file:
        while len(header := file.read(12)) == 12:
            length, checksum = struct.unpack("<QI", header)
            if checksum != _masked(_crc32c(header[:8])):
                raise ValueError("the length of a record does not match its checksum")
            if length > _MOST_RECORD_BYTES:
                log.note(f"{path.name} has a record of {length >> 20} MB, which was left out")
                file.seek(length + 4, 1)
                continue
            record = file.read(length)
            if len(record) < length or len(file.read(4)) < 4:
                return
            log.tell(length + 16)
            yield memoryview(record)


def _add_event(record: memoryview, log: Log) -> None:
    time, step, summaries = math.nan, 0, []
    for number, value in fields(record):
        if number == 1:
            (time,) = struct.unpack("<d", message(value))
        elif number == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >= 1 << 63 else value
        elif number == 5:
            summaries.append(message(value))
    for summary in summaries:
        for number, value in fields(summary):
            if number == 1:
                tag, scalar = _scalar(message(value))
                if scalar is not None:
                    log.add(tag, step, time, scalar)


def _scalar(summary: memoryview) -> tuple[str, float | None]:
    """The tag and number of a summary; None if it is a histogram, an image or text."""
    tag, scalar = "", None
    for number, value in fields(summary):
        if number == 1:
            tag = text(value)
        elif number == 2:
            (scalar,) = struct.unpack("<f", message(value))
        elif number == 8:
            scalar = _single_element(message(value))
    return tag, scalar


def _single_element(tensor: memoryview) -> float | None:
    """The only element of a tensor of floats without dimensions, as newer writers store a scalar."""
    kind, content = 0, memoryview(b"")
    for number, value in fields(tensor):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number == 2 and len(message(value)):
            return None
        elif number in (4, 5, 6) and not isinstance(value, int):
            content = value
    if kind == _FLOAT and len(content) == 4:
        return float(struct.unpack("<f", content)[0])
    if kind == _DOUBLE and len(content) == 8:
        return float(struct.unpack("<d", content)[0])
    return None


def _table() -> list[int]:
    """CRC-32C, which the standard library does not have: the remainder of every byte."""
    table = []
    for remainder in range(256):
        for _ in range(8):
            remainder = (remainder >> 1) ^ (0x82F63B78 if remainder & 1 else 0)
        table.append(remainder)
    return table


_TABLE = _table()


def _crc32c(content: bytes) -> int:
    remainder = 0xFFFFFFFF
    for byte in content:
        remainder = _TABLE[(remainder ^ byte) & 0xFF] ^ (remainder >> 8)
    return remainder ^ 0xFFFFFFFF


def _masked(checksum: int) -> int:
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF
