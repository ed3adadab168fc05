"""The wire format of protocol buffers, as far as logs need it: fields by number, nothing is built from them."""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The number and value of each field, in order: an integer, or the bytes of anything else.

    Raises ValueError if the message is damaged.
    """
    place, end = 0, len(message)
    while place < end:
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == _BYTES:
            length, place = _varint(message, place)
        elif kind == _FIXED64:
            length = 8
        elif kind == _FIXED32:
            length = 4
        else:
            raise ValueError(f"a field has the unknown wire type {kind}")
        if length > end - place:
            raise ValueError("a field is longer than its message")
        yield number, message[place : place + length]
        place += length


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    for byte in message[place : place + _MOST_VARINT_BYTES]:
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError("a number is cut off")


def text(value: int | memoryview) -> str:
    """A string field; raises ValueError if it is none."""
    if isinstance(value, int):
        raise ValueError("a string was expected, not a number")
    return str(value, "utf-8")


def message(value: int | memoryview) -> memoryview:
    """A field that is a message itself; raises ValueError if it is none."""
    if isinstance(value, int):
        raise ValueError("a message was expected, not a number")
    return value
