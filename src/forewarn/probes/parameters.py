"""The parameters of a model by the names that people know, and where the optimizers hold them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from forewarn.types import ParameterFacts

_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def clean_name(name: str) -> str:
    """A parameter's or module's name without what torch.compile, FSDP and checkpoint wrappers put into it."""
    return _WRAPPERS.sub("", name)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module behind DataParallel, DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class Roster:
    """Every parameter of a model once, tied ones under their first name, with its group in the optimizers."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.watched = model
        """The module that is called: the user's own, or what wraps it."""
        self.model = unwrapped(model)
        self.optimizers = tuple(optimizers)
        self.version = 0
        """Counts how often the model has got other parameters."""
        self.names: tuple[str, ...] = ()
        self.parameters: list[nn.Parameter] = []
        self.trainable = np.empty(0, bool)
        """What was trainable when it was first seen; the rest is frozen on purpose."""
        self._index: dict[int, int] = {}
        self._held: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        self._take()

    def refresh(self) -> None:
        """Look whether the model has other parameters by now; names that stay keep what is known of them."""
        now = [id(parameter) for parameter in self.model.parameters() if not parameter.is_meta]
        if now != list(self._index):
            self._take()
            self.version += 1

    def _take(self) -> None:
        known = dict(zip(self.names, self.trainable, strict=True))
        named = [(clean_name(name), one) for name, one in self.model.named_parameters() if not one.is_meta]
        self.names = tuple(name for name, _ in named)
        self.parameters = [parameter for _, parameter in named]
        self.trainable = np.array([known.get(name, one.requires_grad) for name, one in named], dtype=bool)
        self._index = {id(parameter): at for at, parameter in enumerate(self.parameters)}
        self._held = {}

    @property
    def num_optimizers(self) -> int:
        return len(self.optimizers)

    def of(self, at: int) -> list[int]:
        """Which parameters optimizer number `at` holds."""
        groups = self.optimizers[at].param_groups
        sizes = tuple(len(group["params"]) for group in groups)
        known = self._held.get(at)
        if known is None or known[0] != sizes:
            held = (id(parameter) for group in groups for parameter in group["params"])
            known = self._held[at] = (sizes, [self._index[one] for one in held if one in self._index])
        return known[1]

    def groups(self) -> NDArray[np.int64]:
        """The group of each parameter, counted over all optimizers; -1 for those that none holds."""
        where = np.full(len(self.names), -1, np.int64)
        number = 0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                held = [self._index[id(one)] for one in group["params"] if id(one) in self._index]
                where[held] = number
                number += 1
        return where

    def facts(self) -> dict[str, ParameterFacts]:
        kinds = _kinds(self.model)
        return {
            name: ParameterFacts(
                shape=tuple(parameter.shape),
                kind=kinds.get(id(parameter), "Parameter"),
                dtype=str(parameter.dtype).removeprefix("torch."),
                group=int(group) if group >= 0 else None,
                trainable=bool(trainable),
            )
            for name, parameter, group, trainable in zip(
                self.names, self.parameters, self.groups(), self.trainable, strict=True
            )
        }


def _kinds(model: nn.Module) -> dict[int, str]:
    kinds: dict[int, str] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kinds.setdefault(id(parameter), f"{type(module).__name__}.{name}")
    return kinds


def block_names(model: nn.Module) -> tuple[str, ...]:
    """The repeated blocks of a model, first to last: the children of its longest list of modules of one class."""
    best: tuple[str, ...] = ()
    for prefix, module in unwrapped(model).named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = list(module.named_children())
        alike = len({type(child) for _, child in children}) == 1
        grown = all(next(child.children(), None) is not None for _, child in children)
        if alike and grown and len(children) > max(1, len(best)):
            best = tuple(clean_name(f"{prefix}.{name}" if prefix else name) for name, _ in children)
    return best
