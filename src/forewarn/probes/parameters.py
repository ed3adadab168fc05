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
        self.optimizers = tuple(optimizers)
        named = [(clean_name(name), parameter) for name, parameter in unwrapped(model).named_parameters()]
        self.names = tuple(name for name, _ in named)
        self.parameters = [parameter for _, parameter in named]
        self.trainable = np.array([parameter.requires_grad for parameter in self.parameters], dtype=bool)
        """What was trainable at attach time; the rest is frozen on purpose."""
        self._index = {id(parameter): at for at, parameter in enumerate(self.parameters)}
        self._kinds = _kinds(unwrapped(model))

    @property
    def num_optimizers(self) -> int:
        return len(self.optimizers)

    def of(self, at: int) -> list[int]:
        """Which parameters optimizer number `at` holds."""
        held = (id(parameter) for group in self.optimizers[at].param_groups for parameter in group["params"])
        return [self._index[one] for one in held if one in self._index]

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
        return {
            name: ParameterFacts(
                shape=tuple(parameter.shape),
                kind=self._kinds.get(id(parameter), "Parameter"),
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
