"""The readings of a step as one row of numbers, without an object per metric: most steps have nothing else."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from forewarn.types import Block

_IS_LITTLE_ENDIAN = sys.byteorder == "little"


class RowLayout:
    """Which metrics and scopes the numbers of a row belong to; one object for all steps that read the same."""

    __slots__ = ("names", "places", "scopes", "starts", "whole")

    def __init__(self, metrics: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        """`metrics`: name and scopes of each, in order; no name twice."""
        self.names = tuple(name for name, _ in metrics)
        self.scopes = tuple(scopes for _, scopes in metrics)
        starts = [0]
        for scopes in self.scopes:
            starts.append(starts[-1] + len(scopes))
        self.starts = tuple(starts)
        """Where the numbers of each metric begin, and where the last ones end."""
        self.places: Mapping[str, int] = {name: place for place, name in enumerate(self.names)}
        """By name: the position among the metrics."""
        self.whole: Mapping[str, int] = {
            name: start for name, scopes, start in zip(self.names, self.scopes, starts, strict=False) if scopes == ("",)
        }
        """By name of a metric of the run as a whole: the position of its number."""


class Row(Sequence[Block]):
    """The readings of one step. It is a sequence of blocks, which are made when somebody looks at them."""

    __slots__ = ("_blocks", "_packed", "layout", "numbers", "step", "time")

    def __init__(self, step: int, time: float, layout: RowLayout, numbers: Sequence[Any]) -> None:
        """Raises TypeError, ValueError or OverflowError if these are not as many numbers as the layout has scopes."""
        packed = array("f", numbers)
        if len(packed) != layout.starts[-1]:
            raise ValueError(f"{len(packed)} numbers for {layout.starts[-1]} scopes")
        self.step = step
        self.time = time
        self.layout = layout
        self.numbers: list[float] = packed.tolist()
        """Rounded to float32, as stored."""
        self._packed = packed
        self._blocks: list[Block] | None = None

    def __len__(self) -> int:
        return len(self.layout.names)

    @overload
    def __getitem__(self, index: int) -> Block: ...

    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...

    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        return self.blocks[index]

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    @property
    def blocks(self) -> list[Block]:
        """The same as blocks."""
        if self._blocks is None:
            layout, values = self.layout, np.array(self._packed, np.float32)
            self._blocks = [
                Block(self.step, self.time, name, scopes, values[start : start + len(scopes)])
                for name, scopes, start in zip(layout.names, layout.scopes, layout.starts, strict=False)
            ]
        return self._blocks

    @property
    def body(self) -> bytes:
        """The numbers as little-endian float32."""
        packed = self._packed
        if not _IS_LITTLE_ENDIAN:
            packed = packed[:]
            packed.byteswap()
        return packed.tobytes()
