"""Reads a debug snapshot back. Its files may come from anywhere: they are JSON and safetensors, read with limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forewarn.files import check_regular
from forewarn.measure.packed import unpack
from forewarn.snapshots.writing import NEEDS_SAFETENSORS
from forewarn.store.snapshot_folders import (
    BATCH,
    BATCH_TENSORS,
    DESCRIPTION,
    RANDOM,
    RANDOM_TENSORS,
    READINGS,
    WEIGHTS,
    Snapshot,
    SnapshotError,
    read_json,
    read_snapshot,
    snapshots_in,
)


@dataclass(frozen=True, slots=True)
class KeptCall:
    """One forward pass to run again."""

    module: str
    """The name of the module that the loop called; empty for the model itself."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: dict[str, Any] | None
    autocast: str | None
    is_changed: bool
    """Whether a tensor was changed in place after the pass had begun."""


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """A snapshot with its batch."""

    path: Path
    about: Snapshot
    step: int
    """The step whose batch this is."""
    calls: tuple[KeptCall, ...]
    given: tuple[Any, Any] | None
    """`(inputs, targets)` as passed to `monitor.batch`."""
    in_evaluation: frozenset[str]
    """Modules that were in evaluation mode."""
    loss: float
    """The recorded loss of the step; NaN if it was NaN or not recorded."""
    has_loss: bool
    usual: Mapping[tuple[str, str], float]
    """By metric and scope: the median of the last readings before the step."""

    @property
    def weights(self) -> Path | None:
        path = self.path / WEIGHTS
        return path if path.exists() else None


def find_snapshot(path: Path) -> Path:
    """The snapshot at a path; if it holds a run, its newest one. Raises SnapshotError if there is none."""
    if (path / DESCRIPTION).is_file():
        return path
    if several := snapshots_in(path):
        return several[-1]
    what = "has no snapshots: no alert was critical" if (path / "run.json").exists() else "holds no snapshot"
    raise SnapshotError(f"{path} {what}; monitor.snapshot() writes one")


def load_snapshot(path: Path, step: int | None = None, device: str = "cpu") -> SavedSnapshot:
    """A snapshot with the batch of its step, or of another one that it has. Raises SnapshotError."""
    path = find_snapshot(path)
    about = read_snapshot(path)
    has_batch = (path / BATCH).exists() and (step is not None or about.step in about.batches)
    step = about.step if step is None else step
    readings = _metrics(read_json(path / READINGS) if (path / READINGS).exists() else {})
    loss = _value_at(readings, "train/loss", step)
    calls: tuple[KeptCall, ...] = ()
    given = None
    in_evaluation: frozenset[str] = frozenset()
    if has_batch:
        try:
            calls, given, in_evaluation = _batch(path, step, device)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise SnapshotError(f"{path / BATCH} is damaged ({error!s:.200})") from error
    usual = _usual(readings, step)
    return SavedSnapshot(
        path, about, step, calls, given, in_evaluation, float("nan") if loss is None else loss, loss is not None, usual
    )  # fmt: skip


def _batch(path: Path, step: int, device: str) -> tuple[tuple[KeptCall, ...], tuple[Any, Any] | None, frozenset[str]]:
    plain = read_json(path / BATCH)
    kept = {int(one["step"]): (index, one) for index, one in enumerate(plain["steps"])}
    if step not in kept:
        steps = ", ".join(map(str, kept)) or "none"
        raise SnapshotError(f"{path} has no batch of step {step}; it has those of these steps: {steps}")
    index, one = kept[step]
    tensors = {name: tensor.to(device) for name, tensor in read_tensors(path / BATCH_TENSORS).items()}
    states = read_json(path / RANDOM)
    random_states = _unpacked(states, read_tensors(path / RANDOM_TENSORS))[index]
    calls = []
    for call, random_state in zip(one["calls"], random_states, strict=True):
        args, kwargs = _unpacked(call["arguments"], tensors)
        calls.append(KeptCall(str(call["module"]), args, kwargs, random_state, call["autocast"], bool(call["changed"])))
    given = None if one["given"] is None else tuple(_unpacked(one["given"], tensors))
    return tuple(calls), given, frozenset(map(str, plain["in_evaluation"]))


def _unpacked(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    return unpack(plain["structure"], [tensors[name] for name in plain["tensors"]])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a safetensors file. Raises SnapshotError if it cannot be read."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise SnapshotError(NEEDS_SAFETENSORS) from None
    try:
        check_regular(path)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a safetensors file, or in a checkpoint of torch, of which nothing but tensors is read.

    Raises SnapshotError if it cannot be read.
    """
    if path.suffix == ".safetensors":
        return read_tensors(path)
    try:
        check_regular(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, pickle and zipfile raise many kinds for a damaged file
        raise SnapshotError(f"{path} cannot be read as weights ({type(error).__name__}: {error!s:.200})") from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    weights = {str(name): value for name, value in state.items()} if isinstance(state, dict) else {}
    weights = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    if not weights:
        raise SnapshotError(f"{path} holds no weights: it should be a state_dict, or a dict with one")
    return weights


def _metrics(plain: Any) -> dict[str, tuple[list[str], list[int], np.ndarray[Any, Any]]]:
    """The readings by metric: scopes, steps and values; empty where they are damaged."""
    metrics = {}
    for name, one in plain.get("metrics", {}).items() if isinstance(plain, dict) else ():
        try:
            values = np.array(one["values"], np.float64).reshape(len(one["steps"]), len(one["scopes"]))
            metrics[str(name)] = ([str(scope) for scope in one["scopes"]], [int(step) for step in one["steps"]], values)
        except (TypeError, ValueError, KeyError):
            continue
    return metrics


def _value_at(readings: Mapping[str, Any], name: str, step: int) -> float | None:
    scopes, steps, values = readings.get(name, ([], [], None))
    return float(values[steps.index(step), 0]) if step in steps and scopes else None


def _usual(readings: Mapping[str, Any], step: int) -> dict[tuple[str, str], float]:
    usual = {}
    for name in ("activation/abs_max", "gradient/norm"):
        scopes, steps, values = readings.get(name, ([], [], np.empty((0, 0))))
        before = values[np.array(steps, np.int64) < step]
        for scope, column in zip(scopes, before.T, strict=False):
            finite = column[np.isfinite(column)]
            if len(finite):
                usual[name, scope] = float(np.median(finite))
    return usual
