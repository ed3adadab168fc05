"""Statistics of a layer's output and its units, added up over the calls of a step.

Everything kept is a sum, a count, an extreme or a flag, so micro-batches and shared layers merge exactly.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forewarn.measure.engine import cuda, native, portable
from forewarn.measure.engine.native.layer_visits import NativeTally
from forewarn.measure.engine.statistics import COLUMNS, MOMENTS
from forewarn.measure.engine.summary import summarize
from forewarn.types import Values

_NOTHING = np.array([0.0, 0.0, 0.0, np.inf, -np.inf, 0.0, 0.0, 0.0, 0.0])
_ROWS_PER_CHUNK = 256


class Look(IntEnum):
    """What to measure in the units of a layer; the numbers match interface.h."""

    NOTHING = 0
    FIRED = 1
    """Which units were nonzero at some position."""
    INSIDE = 2
    """At how many positions each unit was strictly between two bounds."""
    PEAKED = 3
    """How many positions have a largest unit that reaches a bound."""
    CHANNELS = 4
    """Sum and sum of squares of every unit."""


_PER_UNIT = (Look.FIRED, Look.INSIDE, Look.CHANNELS)


class Layout(NamedTuple):
    """A tensor as [outer × units × inner], of which every `every`-th outer row is read, starting with the first."""

    outer: int
    units: int
    inner: int
    every: int = 1

    @property
    def positions(self) -> int:
        """Number of positions at which each unit is read."""
        return -(-self.outer // self.every) * self.inner


class Chunk(NamedTuple):
    """What was counted in the units of outputs: a row for each, or one of these rows."""

    positions: NDArray[np.int64]
    """How often each unit was read."""
    fired: Any
    """Which units fired."""
    sums: Any
    """INSIDE: how often each unit was inside. PEAKED: the number of peaked positions, and of all. CHANNELS: the sum of
    every unit, then the sums of squares."""

    def clear(self) -> None:
        for array in self:
            array[:] = 0


class Shelf:
    """The units of all outputs that have as many of them and are looked at alike, in arrays whose addresses stay."""

    def __init__(self, look: Look, units: int) -> None:
        self.look, self.units = look, units
        self._num_sums = {Look.INSIDE: units, Look.PEAKED: 2, Look.CHANNELS: 2 * units}.get(look, 0)
        self._num_flags = units if look is Look.FIRED else 0
        self._chunks: list[Chunk] = []
        self._free: list[int] = []
        """The rows that no output uses, with room in the chunks."""

    def new_row(self) -> tuple[int, Chunk]:
        """The number of a row that is free, and the row."""
        if not self._free:
            size = self.num_rows
            room = min(max(1, size), _ROWS_PER_CHUNK)
            flags, sums = np.zeros((room, self._num_flags), np.uint8), np.zeros((room, self._num_sums))
            self._chunks.append(Chunk(np.zeros((room, 1), np.int64), flags, sums))
            self._free = list(reversed(range(size, size + room)))
        number = place = self._free.pop()
        for chunk in self._chunks:
            if place < len(chunk.positions):
                return number, Chunk(*(array[place] for array in chunk))
            place -= len(chunk.positions)
        raise IndexError(number)

    def give_back(self, number: int, row: Chunk) -> None:
        """Forget a row, whose output has another number of units now."""
        row.clear()
        self._free.append(number)

    @property
    def num_rows(self) -> int:
        return sum(len(chunk.positions) for chunk in self._chunks)

    def take(self) -> Chunk:
        """All rows, and begin anew."""
        taken = Chunk(*(np.concatenate(arrays) for arrays in zip(*self._chunks, strict=True)))
        for chunk in self._chunks:
            chunk.clear()
        return taken


class Board:
    """The rows of many layers in a few arrays whose addresses stay fixed."""

    def __init__(self) -> None:
        self._chunks: list[NDArray[np.float64]] = []
        self._num = 0
        self._on_devices: list[tuple[int, Tensor]] = []
        self._shelves: dict[tuple[Look, int], Shelf] = {}
        self.version = 0
        """Number of times that an output got a row, here or on a shelf."""

    def new_row(self) -> tuple[int, NDArray[np.float64]]:
        """The number of a new row, and the row."""
        number = self._num
        if number == len(self._chunks) * _ROWS_PER_CHUNK:
            self._chunks.append(np.tile(_NOTHING, (_ROWS_PER_CHUNK, 1)))
        self._num += 1
        return number, self._chunks[number // _ROWS_PER_CHUNK][number % _ROWS_PER_CHUNK]

    def shelf(self, look: Look, units: int) -> Shelf:
        """Where the units of an output are kept that has so many and is looked at so."""
        self.version += 1
        key = (look, units if look in _PER_UNIT else 0)
        if key not in self._shelves:
            self._shelves[key] = Shelf(*key)
        return self._shelves[key]

    def add(self, number: int, row: Tensor) -> None:
        """Add a part that is still on a device to row `number`."""
        self._on_devices.append((number, row))

    def take(self) -> tuple[NDArray[np.float64], list[int], list[Tensor]]:
        """The rows so far, and what to add to them from devices: row numbers, and one tensor per device."""
        rows = np.concatenate(self._chunks)[: self._num] if self._chunks else np.empty((0, len(MOMENTS)))
        for chunk in self._chunks:
            chunk[:] = _NOTHING
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, row in self._on_devices:
            by_device.setdefault(row.device, []).append((number, row))
        self._on_devices = []
        places = [number for pairs in by_device.values() for number, _ in pairs]
        return rows, places, [torch.stack([row for _, row in pairs]) for pairs in by_device.values()]


class Tally:
    """Sums over one output of a layer since the last `take`."""

    __slots__ = (
        "_board", "_dtype", "_fired_there", "_high", "_layout", "_low", "_native", "_row", "_sums_there", "_units",
        "at", "look", "place", "shelf",
    )  # fmt: skip

    def __init__(self, board: Board, look: Look, low: float = 0.0, high: float = 0.0) -> None:
        self.look, self._low, self._high = look, low, high
        self._board = board
        self.at, self._row = board.new_row()
        """The number of its row on the board."""
        self._take_place(0)

    def _take_place(self, units: int) -> None:
        self.shelf = self._board.shelf(self.look, units)
        self.place, self._units = self.shelf.new_row()
        """The number of its row on the shelf, and the row."""
        self._fired_there: Tensor | None = None
        self._sums_there: Tensor | None = None
        """The same on an accelerator, for a layer that runs there."""
        self._native = NativeTally(self.look, self._low, self._high, self._row, *self._units)
        self._layout = Layout(0, 0, 0)
        """What the library expects."""
        self._dtype: torch.dtype | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether something was counted on an accelerator."""
        return self._fired_there is not None or self._sums_there is not None

    def take(self, here: Chunk) -> Chunk:
        """What was counted, with tensors that are still on their device; `here` is its row from the shelf."""
        fired, sums = self._fired_there, self._sums_there
        self._fired_there = self._sums_there = None
        return Chunk(
            here.positions,
            *(on_host if there is None else there for on_host, there in zip(here[1:], (fired, sums), strict=True)),
        )

    def add(self, tensor: Tensor, layout: Layout) -> None:
        """Add the output of one call; the tensor itself is not kept."""
        if not tensor.numel():
            return
        if layout.units != self.shelf.units and self.look in _PER_UNIT:
            self.shelf.give_back(self.place, self._units)  # a different number of units: the old sums do not fit
            self._take_place(layout.units)
        if native.available() and native.supports(tensor) and tensor.is_contiguous():
            self._dtype, self._layout = tensor.dtype, layout
            self._native.prepare(layout, tensor.dtype)
            self._native.add(tensor.data_ptr())
            return
        self._units.positions[0] += layout.positions
        sample = tensor.detach().reshape(layout.outer, layout.units, layout.inner)[:: layout.every]
        self._add_row(moments(sample))
        self._add_units(*_units(sample, self.look, self._low, self._high))

    def add_alike(self, tensor: Tensor, layout: Layout) -> bool:
        """The same, if the library can read the tensor and expects one like it; whether it does."""
        if layout is not self._layout or tensor.dtype is not self._dtype or not native.supports(tensor):
            return False
        self._native.add(tensor.data_ptr())
        return True

    def _add_row(self, row: Tensor) -> None:
        if row.is_cpu:
            merge(self._row[None], [0], row.numpy()[None])
        else:
            self._board.add(self.at, row)

    def _add_units(self, fired: Tensor | None, sums: Tensor | None) -> None:
        if fired is not None and fired.is_cpu:
            self._units.fired[:] |= fired.to(torch.uint8).numpy()
        elif fired is not None:
            self._fired_there = fired if self._fired_there is None else self._fired_there | fired
        if sums is not None and sums.is_cpu:
            self._units.sums[:] += sums.numpy()
        elif sums is not None:
            self._sums_there = sums if self._sums_there is None else self._sums_there + sums


def moments(sample: Tensor) -> Tensor:
    """The row of a tensor, in the order of `MOMENTS`, on its device."""
    flat = sample.contiguous().reshape(-1)
    if cuda.supports(flat):
        return cuda.measure([flat], powers=True)[0][0]
    x = flat.to(portable.wide(flat.device))
    row = portable.measure([x])[0][0]
    clean = x.where(x.isfinite(), 0.0)
    square = clean * clean
    return torch.cat([row, torch.stack([torch.dot(square, clean), torch.dot(square, square)])])


def _units(sample: Tensor, look: Look, low: float, high: float) -> tuple[Tensor | None, Tensor | None]:
    """The flags and the sums of the units of a tensor [outer × units × inner]."""
    if look is Look.FIRED:
        return (sample != 0).any(dim=2).any(dim=0), None
    if look is Look.INSIDE:
        wide = sample.to(portable.wide(sample.device))
        return None, (~((wide <= low) | (wide >= high))).sum(dim=(0, 2)).to(wide.dtype)
    if look is Look.PEAKED:
        peaks = sample.amax(dim=1).to(portable.wide(sample.device))
        count = (peaks >= high).sum()
        return None, torch.stack([count, torch.full_like(count, peaks.numel())]).to(peaks.dtype)
    if look is Look.CHANNELS:
        wide = sample.to(portable.wide(sample.device))
        return None, torch.cat([wide.sum(dim=(0, 2)), (wide * wide).sum(dim=(0, 2))])
    return None, None


def merge(rows: NDArray[np.float64], places: list[int], parts: NDArray[np.float64]) -> None:
    """Add further rows to those at the given places."""
    for place, part in zip(places, parts, strict=True):
        least, most = min(rows[place, 3], part[3]), max(rows[place, 4], part[4])
        rows[place] += part
        rows[place, 3], rows[place, 4] = least, most


def describe(rows: NDArray[np.float64]) -> dict[str, Values]:
    """The quantities of each row [n × moments]; NaN where nothing was measured.

    `kurtosis` is the fourth central moment over the squared variance: 3 for a normal distribution, large for outliers.
    """
    measured = np.where(rows[:, :1] > 0, rows, np.nan)
    quantities = summarize(measured[:, : len(COLUMNS)])
    del quantities["norm"]
    quantities["abs_max"] = np.maximum(np.abs(quantities["min"]), np.abs(quantities["max"]))
    quantities["kurtosis"] = _kurtosis(measured).astype(np.float32)
    return quantities


def _kurtosis(rows: NDArray[np.float64]) -> Any:
    """The kurtosis from the sums of powers; NaN for a constant, and where rounding would dominate the result."""
    with np.errstate(all="ignore"):
        finite = rows[:, 0] - rows[:, 6]
        mean, second, third, fourth = (rows[:, column] / finite for column in (1, 2, 7, 8))
        variance = second - mean * mean
        central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        trusted = variance**2 > 1e-12 * fourth  # four of 16 digits are left in the worst case
        return np.where(trusted, central / variance**2, np.nan)


def channel_spread(sums: Any, positions: Any) -> tuple[Any, Any]:
    """The standard deviations, across channels, of the channel means and of the channel standard deviations.

    Both have their channels last; there may be several outputs.
    """
    num = sums.shape[-1] // 2
    means, squares = sums[..., :num] / positions, sums[..., num:] / positions
    deviations = (squares - means * means).clip(0.0) ** 0.5
    return _spread(means), _spread(deviations)


def _spread(values: Any) -> Any:
    return _mean((values - _mean(values)[..., None]) ** 2) ** 0.5


def _mean(values: Any) -> Any:
    """`values.mean(-1)`, in a third of the time for an array."""
    return np.add.reduce(values, -1) / values.shape[-1] if isinstance(values, np.ndarray) else values.mean(-1)
