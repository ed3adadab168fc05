"""Writes a debug snapshot: readings, settings, environment and, if they were kept, batches and weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forewarn.config import Config
from forewarn.judge.history import History
from forewarn.measure.kept_batches import KeptBatches, KeptStep
from forewarn.measure.module_tree import clean_name, named_modules, unwrapped
from forewarn.measure.packed import Packed, Structure, left_out, pack
from forewarn.snapshots.environment import environment
from forewarn.store.plain import encoded
from forewarn.store.snapshot_folders import (
    BATCH,
    BATCH_TENSORS,
    CONFIG,
    DESCRIPTION,
    ENVIRONMENT,
    RANDOM,
    RANDOM_TENSORS,
    READINGS,
    WEIGHTS,
    Snapshot,
    write_folder,
)
from forewarn.types import Alert, RunInfo

_FEW_SCOPES = 8
"""Up to this many scopes, a metric is saved for every step; of others, the last measured steps."""
_MEASURED_STEPS = 4
"""Number of measured steps of which readings per tensor and layer are saved."""
NEEDS_SAFETENSORS = "batches and weights in snapshots need safetensors: pip install 'forewarn[snapshots]'"
_BETWEEN = (
    "Metrics with many scopes, such as those of every tensor, have values for the last measured steps only: "
    "between measured steps they do not exist."
)

Writer = Callable[[Path], None]


class SnapshotWriter:
    """Writes the snapshots of one run. It keeps nothing in memory, unless batches are kept."""

    def __init__(
        self, model: nn.Module, info: RunInfo, config: Config, num_ranks: int, kept: KeptBatches | None
    ) -> None:
        self.settings = config.snapshots
        self.kept = kept
        self._model = model
        self._info = info
        self._config = config
        self._num_ranks = num_ranks

    def write(self, run: Path, step: int, now: int, history: History, reason: str, alert: Alert | None) -> Path:
        """Write the snapshot of a step; the loop is in step `now`. Raises OSError, among others, if that fails."""
        batches = [] if self.kept is None else self.kept.steps(step)
        own = next((kept for kept in batches if kept.step == step), None)
        notes: list[str] = []
        weights, which = self._weights(own, step, now, notes)
        files: dict[str, Writer] = {
            READINGS: _json(_readings(history, step, self.settings.steps)),
            CONFIG: _json(self._config.to_dict()),
            ENVIRONMENT: _json(environment()),
        }
        if batches:
            files |= self._batch_files(batches, notes)
            if own is None:
                notes.append(f"the batch of step {step} is gone: keep more with Snapshots(keep_batches=...)")
        else:
            notes.append(_without_batch(self.kept))
        if weights:
            files[WEIGHTS] = _tensors(weights)
        description = Snapshot(
            step, time.time(), now, reason, alert, which, tuple(kept.step for kept in batches), self._num_ranks,
            tuple(notes), dict(self._info.versions),
        )  # fmt: skip
        return write_folder(run, step, {**files, DESCRIPTION: lambda path: _describe(description, path)})

    def _batch_files(self, batches: Sequence[KeptStep], notes: list[str]) -> dict[str, Writer]:
        assert self.kept is not None
        tensors: dict[str, Tensor] = {}
        random_states = pack([[call.random for call in kept.calls] for kept in batches])
        plain = []
        for kept in batches:
            calls = [
                {
                    "module": self.kept.name_of(call.module),
                    "autocast": call.autocast,
                    "changed": call.arguments.changed,
                    "arguments": _added(call.arguments, tensors),
                }
                for call in kept.calls
            ]
            given = None if kept.given is None else _added(kept.given, tensors)
            plain.append({"step": kept.step, "calls": calls, "num_missing": kept.num_missing, "given": given})
            missing = [line for call in kept.calls for line in left_out(call.arguments.structure)]
            missing += left_out(kept.given.structure) if kept.given is not None else []
            notes += [f"not in the batch of step {kept.step}: {line}" for line in missing]
            if kept.num_missing:
                notes.append(f"step {kept.step} had {kept.num_missing} more forward passes than are kept")
            if kept.is_changed:
                notes.append(f"the batch of step {kept.step} was changed in place after the forward pass had begun")
            if not kept.calls:
                notes.append(f"no forward pass in training mode was seen in step {kept.step}")
        in_evaluation = [
            clean_name(name) for name, module in named_modules(unwrapped(self._model)) if not module.training
        ]
        states: dict[str, Tensor] = {}
        return {
            BATCH: _json({"steps": plain, "in_evaluation": in_evaluation}),
            BATCH_TENSORS: _tensors(tensors),
            RANDOM: _json(_added(random_states, states)),
            RANDOM_TENSORS: _tensors(states),
        }

    def _weights(self, kept: KeptStep | None, step: int, now: int, notes: list[str]) -> tuple[dict[str, Tensor], str]:
        """The weights to save and which ones they are: of before the update, if they were kept."""
        if self.settings.weights == "off":
            return {}, "none"
        weights = dict(named_weights(self._model))
        which = "after"
        if kept is not None and kept.weights is not None:
            weights |= {name: tensor for name, tensor in kept.weights.items() if name in weights}
            which = "before"
        elif kept is not None and self.settings.weights == "before":
            which = "before"  # the update of the step under way is still to come
        divided = [name for name, tensor in weights.items() if hasattr(tensor, "to_local")]
        if divided:
            notes.append("the weights are not saved: they are divided over the ranks")
            return {}, "none"
        size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        if size > self.settings.most_weight_bytes:
            notes.append(
                f"the weights are not saved: they have {size / 2**20:.0f} MB, and Snapshots.most_weight_bytes allows "
                f"{self.settings.most_weight_bytes / 2**20:.0f} MB"
            )
            return {}, "none"
        if which == "after" and now > step + 1:
            notes.append(f"the weights are those after step {now - 1}, not after step {step}")
        return weights, which


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and saved buffer of the user's model, once, by the name it has there."""
    seen: set[int] = set()
    for path, module in named_modules(unwrapped(model)):
        buffers = {name: one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in {**module._parameters, **buffers}.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield clean_name(f"{path}.{name}" if path else name), tensor.detach()


def _without_batch(kept: KeptBatches | None) -> str:
    if kept is None:
        return "no batch is saved: Snapshots(keep_batches=1) keeps the last one"
    return "no batch is saved: none of the last steps called the model in training mode"


def _readings(history: History, step: int, num_steps: int) -> dict[str, Any]:
    """The flight recorder: every step's values, and the last measured ones of what has many scopes."""
    metrics: dict[str, Any] = {}
    for name in history.names():
        panel = history.panel(name)
        chosen = (panel.steps > step - num_steps) & (panel.steps <= step)
        steps, values = panel.steps[chosen], panel.values[chosen]
        if len(panel.scopes) > _FEW_SCOPES:
            steps, values = steps[-_MEASURED_STEPS:], values[-_MEASURED_STEPS:]
        if len(steps):
            metrics[name] = {"scopes": list(panel.scopes), "steps": steps.tolist(), "values": _digits(values)}
    return {"about": _BETWEEN, "metrics": metrics}


def _digits(values: np.ndarray[Any, np.dtype[np.float32]]) -> list[list[float]]:
    """Rows of values with the digits that float32 has."""
    return [[float(f"{value:.8g}") for value in row] for row in values.tolist()]


def _added(packed: Packed, tensors: dict[str, Tensor]) -> Structure:
    """A packed value whose tensors are added to those of a file: `{"tensors": [names], "structure": …}`."""
    names = [str(len(tensors) + index) for index in range(len(packed.tensors))]
    tensors.update(zip(names, packed.tensors, strict=True))
    return {"tensors": names, "structure": packed.structure}


def _json(value: Any) -> Writer:
    def write(path: Path) -> None:
        path.write_text(encoded(value), encoding="utf-8")

    return write


def _tensors(tensors: Mapping[str, Tensor]) -> Writer:
    def write(path: Path) -> None:
        try:
            from safetensors.torch import save_file
        except ModuleNotFoundError:
            raise ModuleNotFoundError(NEEDS_SAFETENSORS) from None
        # A copy of each: two arguments may be views of one tensor, which the format does not allow.
        save_file({name: _plain_copy(tensor) for name, tensor in tensors.items()}, path)

    return write


def _plain_copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.complex128:
        tensor = tensor.to(torch.complex64)
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _describe(description: Snapshot, path: Path) -> None:
    files = {file.name: file.stat().st_size for file in sorted(path.parent.iterdir())}
    path.write_text(encoded(replace(description, files=files).to_json()), encoding="utf-8")
