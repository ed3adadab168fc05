"""Statistics of many tensors, each read by the best backend for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from forewarn.measure.engine import cuda, native, portable
from forewarn.measure.engine.statistics import COLUMNS, NUM_BINS, Measurement, Numbers

_log = logging.getLogger("forewarn")

Rows = tuple[Numbers, Numbers | None]
Backend = Callable[[Sequence[Tensor], int], Rows]

_FIRST = range(1)

_broken: set[Backend] = set()
"""Backends that failed once, for instance because a kernel cannot be compiled here; they are not tried again."""


def measure(tensors: Sequence[Tensor | None], histogram_blocks: int = 0) -> Measurement:
    """Statistics of many tensors in one pass, still on their devices; None gives a row of NaN.

    A histogram counts up to `histogram_blocks` evenly spaced blocks of 4096 values per tensor, or one block in 16 if
    that is more. 0 means no histograms. Some backends count every value.
    """
    if len(tensors) == 1 and not histogram_blocks and (row := _native_row(tensors[0])) is not None:
        return Measurement(_FIRST, (row,))
    order: Sequence[int] = range(len(tensors))
    described = isinstance(tensors, native.Described)
    missing = [] if described else [index for index, tensor in enumerate(tensors) if tensor is None]
    if missing:
        order = [index for index, tensor in enumerate(tensors) if tensor is not None]
        tensors = [tensor for tensor in tensors if tensor is not None]
    present: Sequence[Tensor] = tensors  # type: ignore[assignment]
    rows: list[Numbers] = []
    histograms: list[Numbers] = []
    positions: list[int] = []
    for backend, indices, part in _parts(present):
        measured, counts = _measured(backend, part, histogram_blocks)
        positions += indices
        rows.append(measured)
        if counts is not None:
            histograms.append(counts)
    if len(rows) > 1:
        order = [order[position] for position in positions]
    if missing:
        order = [*order, *missing]
        rows.append(np.full((len(missing), len(COLUMNS)), np.nan))
        if histogram_blocks:
            histograms.append(np.zeros((len(missing), 2, NUM_BINS), np.int64))
    return Measurement(order, tuple(rows), tuple(histograms))


def row_of(tensor: Tensor) -> Numbers:
    """The row [1 × columns] of a single tensor, such as the gradient of an activation."""
    row = _native_row(tensor)
    return measure([tensor]).rows[0] if row is None else row


def _native_row(tensor: Tensor | None) -> Numbers | None:
    """The same by a shortcut; None if the native backend does not read this tensor."""
    if tensor is None or _backend(tensor) is not _native:
        return None
    try:
        return native.measure_one(tensor)
    except Exception:
        _give_up(_native)
        return None


def _parts(tensors: Sequence[Tensor]) -> Iterator[tuple[Backend, Sequence[int], Sequence[Tensor]]]:
    """The tensors by backend and device, with their indices; usually a single part."""
    described = _described(tensors)
    if described is not None:
        if tensors:
            yield _native, range(len(tensors)), described
        return
    groups: dict[tuple[Backend, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((_backend(tensor), tensor.device), []).append(index)
    for (backend, _), indices in groups.items():
        yield backend, indices, [tensors[index] for index in indices]


def looked_at(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same tensors, with addresses looked up once for several reads in a row; nothing may run in between."""
    return tensors if (described := _described(tensors)) is None else described


def backend_of(tensor: Tensor) -> str:
    """Which backend reads this tensor: `native`, `triton` or `portable`."""
    return _backend(tensor).__name__.removeprefix("_")


def _described(tensors: Sequence[Tensor]) -> native.Described | None:
    return native.described(tensors) if native.available() and _native not in _broken else None


def _backend(tensor: Tensor) -> Backend:
    if tensor.is_cpu:
        if native.available() and _native not in _broken and native.supports(tensor):
            return _native
    elif tensor.is_cuda and _triton not in _broken and cuda.supports(tensor):
        return _triton
    return _portable


def _measured(backend: Backend, tensors: Sequence[Tensor], histogram_blocks: int) -> Rows:
    if backend is _portable:
        return _portable(tensors, histogram_blocks)
    try:
        return backend(tensors, histogram_blocks)
    except Exception:
        _give_up(backend)
        return _portable(tensors, histogram_blocks)


def _give_up(backend: Backend) -> None:
    """Stop using a backend; call this while handling the exception that it raised."""
    _log.exception("the %s statistics backend failed; torch operations are used from now on", backend.__name__)
    _broken.add(backend)


def _native(tensors: Sequence[Tensor], histogram_blocks: int) -> Rows:
    rows, histograms, _ = native.measure(tensors, histogram_blocks)
    return rows, histograms


def _triton(tensors: Sequence[Tensor], histogram_blocks: int) -> Rows:
    return cuda.measure(tensors, histogram_blocks)


def _portable(tensors: Sequence[Tensor], histogram_blocks: int) -> Rows:
    return portable.measure(tensors, bool(histogram_blocks))
