"""Bars made of block characters."""

from __future__ import annotations

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"


def cell(level: int, bars: str) -> str:
    """One character of a bar that reaches `level` above the foot of this row."""
    return bars[min(level, len(bars) - 1)] if level >= 0 else " "
