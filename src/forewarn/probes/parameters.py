"""The parameters of a model by the names that people know, and where the optimizers hold them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, methodcaller

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from forewarn.stats import Standing
from forewarn.types import ParameterFacts

_parameters_of, _modules_of, _values = attrgetter("_parameters"), attrgetter("_modules"), methodcaller("values")

_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


_LONGEST_STACK = 128
"""Layers of a plain stack up to which each counts as a block: looking at more of them costs more than it tells."""


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
        self.called = model
        """The module that the loop calls: the user's own, or what wraps it."""
        self.model = unwrapped(model)
        self.optimizers = tuple(optimizers)
        self.version = 0
        """Counts how often the model has got other parameters."""
        self.names: tuple[str, ...] = ()
        self.parameters: Sequence[nn.Parameter] = ()
        self.trainable = np.empty(0, bool)
        """What was trainable when it was first seen; the rest is frozen on purpose."""
        self._index: dict[int, int] = {}
        self._seen: list[int] = []
        self._any_meta = True
        self._held: dict[int, tuple[tuple[int, ...], NDArray[np.intp]]] = {}
        self._groups: tuple[list[int], NDArray[np.int64]] | None = None
        self._modules: list[nn.Module] = []
        self._children: list[nn.Module | None] = []
        self._take()

    def refresh(self) -> None:
        """Look whether the model has other parameters by now; names that stay keep what is known of them."""
        if self._present() != self._seen:
            self._take()
            self.version += 1

    def live(self) -> dict[int, nn.Parameter]:
        """Every parameter that the model has at this moment, by its id.

        The same as `model.parameters()` in a seventh of the time: the tree is only walked when it has changed.
        """
        children = list(chain.from_iterable(map(_values, map(_modules_of, self._modules))))
        if not self._modules or children != self._children:
            self._modules = list(self.model.modules())
            self._children = list(chain.from_iterable(map(_values, map(_modules_of, self._modules))))
        found = list(chain.from_iterable(map(_values, map(_parameters_of, self._modules))))
        live = dict(zip(map(id, found), found, strict=True))
        live.pop(id(None), None)
        return live

    def _present(self) -> list[int]:
        """The ids of the parameters that have values; who has them keeps them."""
        live = self.live()
        return [key for key, one in live.items() if not one.is_meta] if self._any_meta else list(live)

    def _take(self) -> None:
        self._any_meta = True
        self._seen = self._present()
        self._any_meta = len(self._seen) < len(self.live())
        known = dict(zip(self.names, self.trainable, strict=True))
        named = [(clean_name(name), one) for name, one in self.model.named_parameters() if not one.is_meta]
        self.names = tuple(name for name, _ in named)
        self.parameters = Standing(parameter for _, parameter in named)
        self.trainable = np.array([known.get(name, one.requires_grad) for name, one in named], dtype=bool)
        self._index = {id(parameter): at for at, parameter in enumerate(self.parameters)}
        self._held = {}
        self._groups = None

    @property
    def num_optimizers(self) -> int:
        return len(self.optimizers)

    def of(self, at: int) -> NDArray[np.intp]:
        """Which parameters optimizer number `at` holds."""
        groups = self.optimizers[at].param_groups
        sizes = tuple(len(group["params"]) for group in groups)
        known = self._held.get(at)
        if known is None or known[0] != sizes:
            held = (id(parameter) for group in groups for parameter in group["params"])
            known = self._held[at] = (
                sizes,
                np.array([self._index[one] for one in held if one in self._index], np.intp),
            )
        return known[1]

    def groups(self) -> NDArray[np.int64]:
        """The group of each parameter, counted over all optimizers; -1 for those that none holds."""
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        sizes = list(map(len, groups))
        if self._groups is None or self._groups[0] != sizes:
            where = np.full(len(self.names), -1, np.int64)
            for number, params in enumerate(groups):
                where[[self._index[id(one)] for one in params if id(one) in self._index]] = number
            self._groups = sizes, where
        return self._groups[1]

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


def block_names(model: nn.Module, pattern: str = "") -> tuple[str, ...]:
    """The repeated blocks of a model, first to last, or the modules whose names match a regex.

    Blocks are the children of its longest list of modules of one class; where there is none, the layers of its longest
    plain stack.
    """
    modules = [(clean_name(f"{name}.").removesuffix("."), each) for name, each in unwrapped(model).named_modules()]
    if pattern:
        chosen = tuple(name for name, _ in modules if re.fullmatch(pattern, name))
        if not chosen:
            raise ValueError(f"blocks={pattern!r} matches no module; names look like {modules[-1][0]!r}")
        return chosen
    lists = [(name, each) for name, each in modules if isinstance(each, nn.ModuleList | nn.Sequential)]
    return _longest(lists, _alike_and_grown) or _longest(lists, _plain_stack)


def _longest(
    lists: Sequence[tuple[str, nn.Module]], is_of_blocks: Callable[[list[nn.Module]], bool]
) -> tuple[str, ...]:
    best: tuple[str, ...] = ()
    for prefix, module in lists:
        children = list(module.named_children())
        if len(children) > max(1, len(best)) and is_of_blocks([child for _, child in children]):
            best = tuple(clean_name(f"{prefix}.{name}" if prefix else name) for name, _ in children)
    return best


def _alike_and_grown(children: list[nn.Module]) -> bool:
    return len({type(child) for child in children}) == 1 and all(any(child.children()) for child in children)


def _plain_stack(children: list[nn.Module]) -> bool:
    """Whether these are layers one after the other, at least two of a class that has parameters, and not too many."""
    if len(children) > _LONGEST_STACK:
        return False
    classes = [type(child) for child in children if any(True for _ in child.parameters())]
    return len(classes) > len(set(classes)) and not any(any(child.children()) for child in children)
