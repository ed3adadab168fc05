"""The parameters of a model by the names that people know, and where the optimizers hold them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.engine import Standing
from forewarn.measure.module_tree import Tree, clean_name, unwrapped
from forewarn.types import ParameterInfo

_LONGEST_STACK = 128
"""Layers of a plain stack up to which each counts as a block: looking at more of them costs more than it tells."""


class ParameterIndex:
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
        self._tree = Tree(model)
        self._keys: list[int] = []
        self._live: dict[int, nn.Parameter] = {}
        self._take()

    @property
    def gradients(self) -> list[Tensor | None]:
        """What each parameter holds in `.grad` at this moment."""
        return [each.grad for each in self.parameters]

    def refresh(self) -> None:
        """Look whether the model has other parameters by now; names that stay keep what is known of them."""
        if self._present() != self._seen:
            self._take()
            self.version += 1

    def live(self) -> dict[int, nn.Parameter]:
        """Every parameter that the model has at this moment, by its id: the same as `model.parameters()`, sooner."""
        found = self._tree.parameters()
        keys = list(map(id, found))
        if keys != self._keys:
            self._keys = keys
            self._live = {key: one for key, one in zip(keys, found, strict=True) if one is not None}
        return self._live

    def unknown(self) -> list[nn.Parameter]:
        """The parameters that the model has got since the index was last refreshed."""
        return [one for key, one in self.live().items() if key not in self._index]

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

    def info(self) -> dict[str, ParameterInfo]:
        kinds = _kinds(self.model)
        return {
            name: ParameterInfo(
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
