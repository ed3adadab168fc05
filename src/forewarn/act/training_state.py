"""Everything a training run continues from, copied and restored bit for bit: the local part of it on each rank."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from forewarn.random_states import random_state, restore_random_state

_SCHEDULERS = (LRScheduler, ReduceLROnPlateau)


class TrainingState:
    """A copy of model, optimizers, their schedulers, gradient scaler, loader position and random states.

    Tensors stay on their device. Sharded ones are copied as the shard of this rank, so nothing is sent.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    @classmethod
    def capture(cls, parts: Parts) -> TrainingState:
        return cls({
            "tensors": {name: _local(tensor).detach().clone() for name, tensor in parts.tensors()},
            "optimizers": [_optimizer_state(optimizer) for optimizer in parts.optimizers],
            "stateful": [copied(part.state_dict()) for part in parts.stateful()],
            "random": random_state(),
        })  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Memory of the copied tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_in(self.state))

    def check(self, parts: Parts) -> None:
        """Raise ValueError if the run no longer consists of the parts that were copied."""
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in self.state["tensors"].items()}
        if {name: (_local(tensor).shape, tensor.dtype) for name, tensor in parts.tensors()} != shapes:
            raise ValueError("the model's parameters or buffers have changed since the checkpoint")
        sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in parts.optimizers]
        if sizes != [[group["num_parameters"] for group in saved["groups"]] for saved in self.state["optimizers"]]:
            raise ValueError("the optimizer's groups have changed since the checkpoint")
        if len(parts.stateful()) != len(self.state["stateful"]):
            raise ValueError("a scheduler or the loader was made or dropped since the checkpoint")

    def restore(self, parts: Parts, skip_data: bool = False) -> None:
        """Return to this state. What may refuse it comes first: if it raises, everything is as it was before."""
        self.check(parts)
        stateful = parts.stateful(skip_data)
        before = [copied(part.state_dict()) for part in stateful]
        groups_before = [_optimizer_state(optimizer, only_groups=True) for optimizer in parts.optimizers]
        done = 0
        try:
            for part, saved in zip(stateful, self.state["stateful"], strict=False):  # without the loader, one less
                done += 1
                part.load_state_dict(copied(saved))
            for optimizer, saved in zip(parts.optimizers, self.state["optimizers"], strict=True):
                _restore_groups(optimizer, saved)
        except BaseException:
            for part, was in zip(stateful[:done], before, strict=False):
                part.load_state_dict(was)
            for optimizer, groups in zip(parts.optimizers, groups_before, strict=True):
                with contextlib.suppress(Exception):  # what refuses one value may refuse another
                    _restore_groups(optimizer, groups)
            raise
        with torch.no_grad():
            for name, tensor in parts.tensors():
                _local(tensor).copy_(self.state["tensors"][name])
        for optimizer, saved in zip(parts.optimizers, self.state["optimizers"], strict=True):
            for index, parameter in enumerate(parameters_of(optimizer)):
                if index in saved["state"]:
                    optimizer.state[parameter] = _restored(saved["state"][index], optimizer.state.get(parameter))
                else:
                    optimizer.state.pop(parameter, None)
        if not skip_data and parts.loader is not None:
            parts.loader.restart()
        restore_random_state(self.state["random"])


class Loader:
    """A loader with a `state_dict`, in which a loop that iterates over it can return to an earlier position."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.num_restarts = 0

    def restart(self) -> None:
        """Let every iteration under way continue from the position that was restored."""
        self.num_restarts += 1

    def __iter__(self) -> Iterator[Any]:
        seen, batches = self.num_restarts, iter(self.loader)
        while True:
            if self.num_restarts != seen:
                seen, batches = self.num_restarts, iter(self.loader)
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def __next__(self) -> Any:
        return next(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.loader)


class SizedLoader(Loader):
    """The same for a loader that has a length."""

    def __len__(self) -> int:
        return len(self.loader)


class Parts:
    """The objects that make up a training run."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], scaler: Any) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self.scaler = scaler
        self.loader: Loader | None = None
        self._schedulers: list[weakref.ref[Any]] = []
        self._noted: Any = None
        """What showed which schedulers there are when they were searched."""

    def follow(self, loader: Any) -> Any:
        """The loader; one that can save its position, so that iterations over it can return to an earlier one."""
        if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            return loader
        self.loader = (SizedLoader if hasattr(type(loader), "__len__") else Loader)(loader)
        return self.loader

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers of the model, those that its `state_dict` leaves out too."""
        for name, parameter in self.model.named_parameters():
            yield f"parameter {name}", parameter
        for name, buffer in self.model.named_buffers():
            yield f"buffer {name}", buffer

    def schedulers(self) -> list[Any]:
        """The learning-rate schedulers of the optimizers. The loop need not name them, since they can be found."""
        noted = [
            (hasattr(optimizer.step, "_wrapped_by_lr_sched"), [sorted(group) for group in optimizer.param_groups])
            for optimizer in self.optimizers
        ]
        live = [one for reference in self._schedulers if (one := reference()) is not None]
        if noted != self._noted or len(live) < len(self._schedulers):
            live, self._noted = schedulers_of(self.optimizers), noted  # takes some tens of milliseconds
            self._schedulers = [weakref.ref(one) for one in live]
        return live

    def stateful(self, skip_data: bool = False) -> list[Any]:
        """Parts with a `state_dict`, in an order that stays; the loader comes last."""
        parts = [*self.schedulers(), *([] if self.scaler is None else [self.scaler])]
        return parts if self.loader is None or skip_data else [*parts, self.loader.loader]


def schedulers_of(optimizers: Iterable[Optimizer]) -> list[Any]:
    """The schedulers that change the rates of these optimizers; those inside others are left out."""
    ids = {id(optimizer) for optimizer in optimizers}
    every = [one for one in gc.get_objects() if issubclass(type(one), _SCHEDULERS)]
    live = [one for one in every if id(unwrapped_optimizer(vars(one).get("optimizer"))) in ids]
    inner = {id(part) for one in live for part in getattr(one, "_schedulers", ())}
    return sorted((one for one in live if id(one) not in inner), key=id)


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside wrappers that look like one, such as that of accelerate."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def copied(value: Any) -> Any:
    """A deep copy, with the local shards of tensors."""
    if isinstance(value, Tensor):
        return _local(value).detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return copy.deepcopy(value)


def _optimizer_state(optimizer: Optimizer, only_groups: bool = False) -> dict[str, Any]:
    """The state of an optimizer as it is: its own `load_state_dict` may change the dtype of what it holds."""
    groups = [
        {"num_parameters": len(group["params"]),
         "settings": {name: copied(value) for name, value in group.items() if name != "params"}}
        for group in optimizer.param_groups
    ]  # fmt: skip
    if only_groups:
        return {"groups": groups}
    held = enumerate(parameters_of(optimizer))
    return {
        "groups": groups,
        "state": {index: copied(optimizer.state[one]) for index, one in held if one in optimizer.state},
    }


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _restored(saved: Any, now: Any) -> Any:
    """A saved value, written into the tensors that hold it now: they may be sharded, or part of a compiled step."""
    if isinstance(saved, Tensor):
        if isinstance(now, Tensor) and _local(now).shape == saved.shape and now.dtype == saved.dtype:
            with torch.no_grad():
                _local(now).copy_(saved)
            return now
        return saved.clone()
    if isinstance(saved, dict):
        before = now if isinstance(now, dict) else {}
        return {name: _restored(value, before.get(name)) for name, value in saved.items()}
    return copied(saved)


def _restore_groups(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    for group, before in zip(optimizer.param_groups, saved["groups"], strict=True):
        for name in group.keys() - before["settings"].keys() - {"params"}:
            del group[name]
        for name, value in before["settings"].items():
            group[name] = _restored(value, group.get(name))


def _local(tensor: Tensor) -> Tensor:
    """The shard of a sharded tensor that this rank holds, sharing its memory; any other tensor itself."""
    shard = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors_in(item)
