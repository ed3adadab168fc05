"""The metrics of a `ModuleMonitor`, by step, and as an HDF5 file for a notebook."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Number
from os import PathLike
from typing import Any

import numpy as np

Path = str | PathLike[str]
Steps = dict[int, dict[str, float]]


class StorageManager:
    """`{step: {metric: value}}`, all values plain numbers."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self.log_dict: Steps = {}
        self._logger = logger or logging.getLogger("forewarn")

    def create_step_entry(self, step: int) -> None:
        """Start a step, dropping what was logged in it."""
        self.log_dict[step] = {}

    def has_step(self, step: int) -> bool:
        return step in self.log_dict

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add finished values to a step."""
        self.log_dict.setdefault(step, {}).update(metrics)

    def log_scalar(self, step: int, key: str, value: Any) -> None:
        """Add one number to a step; a tensor of one element is read, which waits for its device."""
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, Number):
            raise ValueError(f"log_scalar takes a number for {key!r}, not {value!r}")
        self.record(step, {key: number})  # type: ignore[dict-item]

    def get_step_metrics(self, step: int | None) -> dict[str, float]:
        """`{metric: value}` of one step; empty if nothing was logged in it."""
        return {} if step is None else self.log_dict.get(step, {})

    def get_all_metrics(self) -> Steps:
        """`{step: {metric: value}}`."""
        return self.log_dict

    def load_metrics(self, log_dict: Steps) -> None:
        """Load `{step: {metric: value}}`, as `get_all_metrics` returns it."""
        if self.log_dict:
            raise ValueError("The current log dict is not empty: call clear() before load_metrics()")
        self.log_dict = log_dict

    def clear(self) -> None:
        self.log_dict = {}

    def condensed_log_dict(self) -> dict[str, dict[int, float]]:
        """The metrics by name: `{metric: {step: value}}`."""
        condensed: dict[str, dict[int, float]] = {}
        for step, metrics in self.log_dict.items():
            for name, value in metrics.items():
                condensed.setdefault(name, {})[step] = value
        return condensed

    def save_hdf5(self, filename: Path, condensed: bool = True) -> None:
        """Write one group per metric with the datasets `keys` (its steps) and `values`; not condensed, one per step.

        A name with slashes is a path in the file: `file["gradient/0.weight/norm/values"]`.
        """
        entries: Mapping[Any, Mapping[Any, float]] = self.condensed_log_dict() if condensed else self.log_dict
        with _h5py().File(filename, "w") as file:
            for entry, column in entries.items():
                group = file.require_group(_escaped(str(entry)))
                group.create_dataset("keys", data=list(column) if column else np.empty(0))
                group.create_dataset("values", data=np.array(list(column.values()), np.float64))

    @staticmethod
    def read_hdf5_entry_keys(filename: Path) -> list[str]:
        """The names of the entries in a file: its metrics, or its steps if it was not condensed."""
        return list(_entries(filename))

    @staticmethod
    def read_hdf5_entry(filename: Path, entry_key: str | int) -> tuple[Any, Any] | None:
        """Keys and values of one entry, as two arrays; None if the file has no such entry."""
        with _h5py().File(filename, "r") as file:
            place = _escaped(str(entry_key))
            return _columns(file[place]) if place in file and _is_entry(file[place]) else None

    @staticmethod
    def load_hdf5(filename: Path) -> dict[str, dict[int, float]]:
        """`{metric: {step: value}}` from a file, whichever way it was saved."""
        loaded: dict[str, dict[int, float]] = {}
        for entry, (keys, values) in _entries(filename).items():
            for key, value in zip(keys.tolist(), values.tolist(), strict=True):
                metric, step = (key, entry) if isinstance(key, str) else (entry, key)
                loaded.setdefault(metric, {})[int(step)] = value
        return loaded


_RESERVED = {"", ".", "..", "keys", "values"}
"""Parts of a path with a special meaning in a file; in a metric's name they are escaped with a percent sign."""


def _escaped(name: str) -> str:
    parts = name.split("/")
    return "/".join(f"%{part}" if part in _RESERVED or part.startswith("%") else part for part in parts)


def _unescaped(path: str) -> str:
    return "/".join(part.removeprefix("%") for part in path.split("/"))


def _entries(filename: Path) -> dict[str, tuple[Any, Any]]:
    entries: dict[str, tuple[Any, Any]] = {}

    def visit(path: str, item: Any) -> None:
        if _is_entry(item):
            entries[_unescaped(path)] = _columns(item)

    with _h5py().File(filename, "r") as file:
        file.visititems(visit)
    return entries


def _is_entry(item: Any) -> bool:
    """Whether a group is a metric itself, not only a prefix of others."""
    return hasattr(item, "keys") and all(hasattr(item.get(name), "shape") for name in ("keys", "values"))


def _columns(group: Any) -> tuple[Any, Any]:
    keys = group["keys"]
    return (keys.asstr()[()] if keys.dtype.kind == "O" else keys[()]), group["values"][()]


def _h5py() -> Any:
    try:
        import h5py
    except ModuleNotFoundError:
        raise ModuleNotFoundError("HDF5 files need h5py: pip install 'forewarn[hdf5]'", name="h5py") from None
    return h5py
