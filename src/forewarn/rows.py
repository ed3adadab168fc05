"""The readings of a step as one row of numbers, without an object per metric."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from forewarn.types import Block, Values

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
    """The readings of a step without detail. It is a sequence of blocks, which are made when somebody looks at them."""

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


class Sheet(Sequence[Block]):
    """The readings of a measured step in one array. A block is a part of it, made when somebody looks at it."""

    __slots__ = ("_blocks", "layout", "step", "time", "values")

    def __init__(self, step: int, time: float, layout: RowLayout, values: Values) -> None:
        self.step = step
        self.time = time
        self.layout = layout
        self.values = values
        """All of them, in the order of the layout."""
        self._blocks: list[Block] | None = None

    def __len__(self) -> int:
        return len(self.layout.names)

    @overload
    def __getitem__(self, index: int) -> Block: ...

    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...

    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return self.blocks[index]
        return self._block(index) if self._blocks is None else self._blocks[index]

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    @property
    def blocks(self) -> list[Block]:
        """The same as blocks."""
        if self._blocks is None:
            self._blocks = [self._block(place) for place in range(len(self))]
        return self._blocks

    def _block(self, place: int) -> Block:
        layout = self.layout
        place = range(len(layout.names))[place]
        values = self.values[layout.starts[place] : layout.starts[place + 1]]
        return Block(self.step, self.time, layout.names[place], layout.scopes[place], values)

    def with_others(self, others: Mapping[int, Sequence[Block]]) -> Sequence[Block]:
        """The same with further blocks of this step, which follow that many of its own."""
        layout, ends = self.layout, self.layout.starts
        metrics: list[tuple[str, tuple[str, ...]]] = []
        parts: list[Values] = []
        begin = 0
        for end in sorted(others):
            metrics += zip(layout.names[begin:end], layout.scopes[begin:end], strict=True)
            metrics += [(block.name, block.scopes) for block in others[end]]
            parts += [self.values[ends[begin] : ends[end]], *(block.values for block in others[end])]
            begin = end
        metrics += zip(layout.names[begin:], layout.scopes[begin:], strict=True)
        extended = layout_of([name for name, _ in metrics], [scopes for _, scopes in metrics])
        if extended is None:  # a name occurs twice
            joined = self.blocks.copy()
            for end in sorted(others, reverse=True):
                joined[end:end] = others[end]
            return joined
        return Sheet(self.step, self.time, extended, np.concatenate([*parts, self.values[ends[begin] :]]))


def blocks_of(readings: Sequence[Block], metrics: Collection[str]) -> list[Block]:
    """The blocks of these metrics, without making any others."""
    if isinstance(readings, Sheet):
        places = readings.layout.places
        return [readings[places[metric]] for metric in metrics if metric in places]
    return [block for block in readings if block.name in metrics]


_MOST_LAYOUTS = 64
"""Number of remembered combinations of metrics; the steps of a run differ in few ways."""
_layouts: dict[tuple[str, ...], list[RowLayout]] = {}


def layout_of(names: Sequence[str], scopes: Sequence[tuple[str, ...]]) -> RowLayout | None:
    """The layout of these metrics and scopes, the same object as long as they recur; None if a name occurs twice."""
    layouts = _layouts.get(key := tuple(names), [])
    all_scopes = tuple(scopes)
    for layout in layouts:
        if layout.scopes == all_scopes:
            return layout
    if len(set(key)) < len(key):
        return None
    if len(_layouts) >= _MOST_LAYOUTS or len(layouts) >= _MOST_LAYOUTS:
        _layouts.clear()
    layout = RowLayout(list(zip(key, all_scopes, strict=True)))
    _layouts.setdefault(key, []).append(layout)
    return layout
