"""A run as an HDF5 file: a group for each metric, with a row for each step and a column for each scope."""

from __future__ import annotations

from typing import IO, Any

import numpy as np

from forewarn import __version__
from forewarn.views.export.readings import Part, Selection, Tell

_CHUNK = 1 << 16
"""Values in a compressed chunk."""


def write_hdf5(selection: Selection, file: IO[bytes], tell: Tell) -> None:
    """`file["gradient/norm/values"]` is a matrix [steps, scopes], beside it are `steps`, `unix_seconds` and `scopes`.

    NaN stands where a step has no reading. Of a step that was recorded twice, one reading counts.
    """
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("HDF5 needs h5py: pip install 'forewarn[hdf5]'", name=error.name) from error
    with h5py.File(file, "w") as target:
        target.attrs.update(run=_storable(str(selection.run.path)), model=_storable(selection.run.info.model))
        target.attrs["forewarn"] = __version__
        for name, scopes in selection.scopes.items():
            steps = selection.run.steps_of(name)
            begin = 0 if selection.first is None else np.searchsorted(steps, selection.first)
            end = None if selection.last is None else np.searchsorted(steps, selection.last, side="right")
            steps = steps[begin:end]
            group = target.create_group(name)
            group.attrs.update(unit=selection.units[name], meaning=selection.meanings[name])
            group["steps"] = steps
            group.create_dataset("scopes", data=list(map(_storable, scopes)), dtype=h5py.string_dtype())
            times = np.full(len(steps), np.nan)
            shape = len(steps), len(scopes)
            chunks = (min(max(1, len(steps)), max(1, _CHUNK // len(scopes))), len(scopes))
            values = group.create_dataset(
                "values", shape, np.float32, chunks=chunks if len(steps) else None, fillvalue=np.nan,
                **({"compression": "gzip", "compression_opts": 1, "shuffle": True} if len(steps) else {}),
            )  # fmt: skip
            columns = {scope: column for column, scope in enumerate(scopes)}
            for part in selection.parts_of(name, tell):
                _fill(values, times, steps, columns, part)
            group["unix_seconds"] = times


def _fill(values: Any, times: Any, steps: Any, columns: dict[str, int], part: Part) -> None:
    """Put a part in its place; its rows and columns usually follow each other."""
    rows = np.searchsorted(steps, part.steps)
    order = np.flatnonzero(np.append(np.diff(rows), 1)) if (np.diff(rows) >= 0).all() else _last_of_each(rows)
    rows, read = rows[order], part.values[order]
    times[rows] = part.times[order]
    place = slice(int(rows[0]), int(rows[-1]) + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows
    if len(part.scopes) == len(columns) and part.scopes == tuple(columns):
        values[place] = read
    else:
        for scope, column in zip(part.scopes, read.T, strict=True):
            values[place, columns[scope]] = column


def _last_of_each(rows: Any) -> Any:
    """Where each row occurs last, in the order of the rows."""
    _, backwards = np.unique(rows[::-1], return_index=True)
    return len(rows) - 1 - backwards


def _storable(text: str) -> str:
    """Text that HDF5 can hold: it allows neither NUL nor lone surrogates."""
    return text.replace("\0", "\\0").encode("utf-8", "replace").decode()
