"""The parameters of a model by readable name, and their groups in the optimizers."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.engine import Standing
from forewarn.measure.module_tree import Tree, children_of, clean_name, named_modules, named_parameters, unwrapped
from forewarn.measure.shards import Shards
from forewarn.types import ParameterInfo

_LONGEST_STACK = 128
"""Maximum length of a plain stack whose layers count as blocks: measuring more is not worth the cost."""

_COMPARED = 16
"""Number of values of each parameter that tell copies of a model or of a parameter from others."""


class ParameterIndex:
    """Every parameter of a model once, tied ones under their first name, with its group in the optimizers."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.called = model
        """The module that the loop calls: the user's own, or a wrapper around it."""
        self.model = unwrapped(model)
        self.optimizers = tuple(optimizers)
        self.rank: int | None = None
        """The rank of this process in a distributed run; None in a single process."""
        self.first_rank = 0
        """The first of the ranks that hold this model: 0, except in later stages of a pipeline."""
        self._shards: Shards | None = None
        self.version = 0
        """Number of times the model's parameters have changed."""
        self.names: tuple[str, ...] = ()
        self.parameters: Sequence[nn.Parameter] = ()
        self.trainable = np.empty(0, bool)
        """Which parameters were trainable when first seen; the others are frozen on purpose."""
        self._index: dict[int, int] = {}
        self._seen: list[int] = []
        self._any_meta = True
        self._held: dict[int, tuple[tuple[int, ...], NDArray[np.intp]]] = {}
        self._keys_held: dict[int, tuple[list[int], list[int]]] = {}
        self._groups: tuple[list[int], NDArray[np.int64]] | None = None
        self._optimizer_names: tuple[str, ...] = ()
        self.tree = Tree(model)
        """The modules of the model that the loop calls."""
        self._keys: list[int] = []
        self._live: dict[int, nn.Parameter] = {}
        self._sizes: list[int] = []
        self._take()

    @property
    def gradients(self) -> list[Tensor | None]:
        """The current `.grad` of each parameter."""
        return [parameter.grad for parameter in self.parameters]

    def refresh(self) -> None:
        """Check whether the model's parameters have changed; names that stay keep their `trainable` flag."""
        if self._present() != self._seen:
            self._take()
            self.version += 1

    @property
    def shards(self) -> Shards | None:
        """The parts of the parameters that this rank reads; None in a single process."""
        if self._shards is None and self.rank is not None:
            self._shards = Shards(self.called, self.parameters, self.rank, self.first_rank)
        return self._shards

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only a part of some parameters."""
        return self.shards is not None and self.shards.is_sharded

    @property
    def records(self) -> bool:
        """Whether this process records the run."""
        return not self.rank

    @property
    def leads(self) -> bool:
        """Whether the readings of this model, or of this pipeline stage, are put together here."""
        return self.rank is None or self.rank == self.first_rank

    def belong_to(self, first_rank: int) -> None:
        """Leave it to another rank to read what several of them hold, or take that over."""
        if first_rank != self.first_rank:
            self.first_rank = first_rank
            self._shards = None
            self.version += 1

    def checksum(self) -> int:
        """A number that ranks with the same parameters have in common; reads a few values of each."""
        samples = [parameter.detach().flatten()[:_COMPARED].double() for parameter in self.parameters]
        whole = torch.cat([sample.cpu() for sample in samples]) if samples else torch.empty(0)
        return zlib.crc32(whole.numpy().tobytes())

    def weights(self) -> Sequence[Tensor]:
        """What this process reads of the parameters: all, or the part of this rank."""
        return self.parameters if self.shards is None else self.shards.weights(self.parameters)

    def live(self, *, walks: bool = True) -> dict[int, nn.Parameter]:
        """Every current parameter by its id: the same as `model.parameters()`, but faster.

        Without `walks`, the parameters of the modules that the last walk found.
        """
        parameters = self.tree.parameters(walks=walks)
        keys = list(map(id, parameters))
        if keys != self._keys:
            self._keys = keys
            self._live = {
                key: parameter for key, parameter in zip(keys, parameters, strict=True) if parameter is not None
            }
        return self._live

    def recent(self) -> dict[int, nn.Parameter]:
        """The same, walking the model only if an optimizer has got or lost parameters: for steps without detail."""
        sizes = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                sizes.append(len(group["params"]))
        if sizes == self._sizes:
            return self._live
        self._sizes = sizes
        return self.live()

    def unknown(self) -> list[nn.Parameter]:
        """The parameters added to the model since the last refresh."""
        return [parameter for key, parameter in self.live().items() if key not in self._index]

    def _present(self) -> list[int]:
        """The ids of the parameters that have values; a parameter that has values keeps them."""
        live = self.live()
        return [key for key, parameter in live.items() if not parameter.is_meta] if self._any_meta else list(live)

    def _take(self) -> None:
        self._any_meta = True
        self._seen = self._present()
        self._any_meta = len(self._seen) < len(self.live())
        was_trainable = dict(zip(self.names, self.trainable, strict=True))
        named = [
            (clean_name(name), parameter) for name, parameter in named_parameters(self.model) if not parameter.is_meta
        ]
        self.names = tuple(name for name, _ in named)
        self.parameters = Standing(parameter for _, parameter in named)
        self.trainable = np.array(
            [was_trainable.get(name, parameter.requires_grad) for name, parameter in named], dtype=bool
        )
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._held = {}
        self._keys_held = {}
        self._groups = None
        self._optimizer_names = ()
        self._shards = None

    @property
    def num_optimizers(self) -> int:
        return len(self.optimizers)

    def optimizer_names(self) -> tuple[str, ...]:
        """A name for each optimizer: the part of the model that it alone trains, such as `generator`, or its number."""
        if not self._optimizer_names:
            trained = [
                {self.names[place].partition(".")[0] for place in self.of(index)}
                for index in range(self.num_optimizers)
            ]
            every_part = Counter(chain.from_iterable(trained))
            self._optimizer_names = tuple(
                min(parts) if len(parts) == 1 and every_part[min(parts)] == 1 else f"optimizer {index}"
                for index, parts in enumerate(trained)
            )
        return self._optimizer_names

    def of(self, index: int) -> NDArray[np.intp]:
        """Indices of the parameters that optimizer number `index` holds."""
        groups = self.optimizers[index].param_groups
        sizes = tuple(len(group["params"]) for group in groups)
        cached = self._held.get(index)
        if cached is None or cached[0] != sizes:
            keys = (id(parameter) for group in groups for parameter in group["params"])
            cached = self._held[index] = (
                sizes,
                np.array([self._index[key] for key in keys if key in self._index], np.intp),
            )
        return cached[1]

    def keys_of(self, index: int) -> list[int]:
        """The ids of all parameters that optimizer number `index` holds, in their order."""
        groups = self.optimizers[index].param_groups
        ends: list[int] = []
        for group in groups:
            held = group["params"]
            ends += (len(held), id(held[0]), id(held[-1])) if held else (0,)
        cached = self._keys_held.get(index)
        if cached is None or cached[0] != ends:
            cached = self._keys_held[index] = ends, [id(parameter) for group in groups for parameter in group["params"]]
        return cached[1]

    def groups(self) -> NDArray[np.int64]:
        """The group of each parameter, counted over all optimizers; -1 if no optimizer holds it."""
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        sizes = list(map(len, groups))
        if self._groups is None or self._groups[0] != sizes:
            group_of = np.full(len(self.names), -1, np.int64)
            for number, params in enumerate(groups):
                group_of[[self._index[id(parameter)] for parameter in params if id(parameter) in self._index]] = number
            self._groups = sizes, group_of
        return self._groups[1]

    def _copied(self) -> set[int]:
        """The indices of parameters that are not trained and have the first values of one that is."""
        is_trained = self.trainable & (self.groups() >= 0)
        shapes = [parameter.shape for parameter in self.parameters]
        trained = [int(place) for place in np.flatnonzero(is_trained)]
        twins = {shapes[place] for place in trained}
        idle = [int(place) for place in np.flatnonzero(~is_trained) if shapes[place] in twins]
        wanted = {shapes[place] for place in idle}
        originals = {_first_values(self.parameters[place]) for place in trained if shapes[place] in wanted} - {()}
        return {place for place in idle if _first_values(self.parameters[place]) in originals}

    def info(self) -> dict[str, ParameterInfo]:
        kinds, copied = _kinds(self.model), self._copied()
        return {
            name: ParameterInfo(
                shape=tuple(parameter.shape) if self.shards is None else self.shards.of[place].shape,
                kind=kinds.get(id(parameter), "Parameter"),
                dtype=str(parameter.dtype).removeprefix("torch."),
                group=int(group) if group >= 0 else None,
                trainable=bool(trainable),
                copied=place in copied,
            )
            for place, (name, parameter, group, trainable) in enumerate(
                zip(self.names, self.parameters, self.groups(), self.trainable, strict=True)
            )
        }


def _first_values(parameter: Tensor) -> tuple[float, ...]:
    """The first values that this process holds; none if they cannot be read, as on the meta device."""
    try:
        values: Any = parameter.detach()
        part = values.to_local() if hasattr(values, "to_local") else values
        return tuple(part.flatten()[:_COMPARED].double().tolist()) if part.is_floating_point() else ()
    except RuntimeError:  # also NotImplementedError
        return ()


def _kinds(model: nn.Module) -> dict[int, str]:
    kinds: dict[int, str] = {}
    for _, module in named_modules(model):
        for name, parameter in module._parameters.items():
            kinds.setdefault(id(parameter), f"{type(module).__name__}.{name}")
    return kinds


def block_names(model: nn.Module, pattern: str = "") -> tuple[str, ...]:
    """The repeated blocks of a model, first to last, or the modules whose names match a regex.

    Blocks are the children of its longest list of modules of one class; without such a list, the layers of its longest
    plain stack.
    """
    modules = [(clean_name(f"{name}.").removesuffix("."), module) for name, module in named_modules(unwrapped(model))]
    if pattern:
        chosen = tuple(name for name, _ in modules if re.fullmatch(pattern, name))
        if not chosen:
            raise ValueError(f"blocks={pattern!r} matches no module; names look like {modules[-1][0]!r}")
        return chosen
    lists = [(name, module) for name, module in modules if _is_list(module)]
    return _longest(lists, _alike_and_grown) or _longest(lists, _plain_stack)


def _is_list(module: nn.Module) -> bool:
    """Whether modules are kept here in order; by number in a dict, as parts of a list keep their names."""
    if isinstance(module, nn.ModuleDict):
        return all(name.isdigit() for name in children_of(module))
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _longest(
    lists: Sequence[tuple[str, nn.Module]], is_of_blocks: Callable[[list[nn.Module]], bool]
) -> tuple[str, ...]:
    best: tuple[str, ...] = ()
    for prefix, module in lists:
        children = children_of(module)
        if len(children) > max(1, len(best)) and is_of_blocks(list(children.values())):
            best = tuple(clean_name(f"{prefix}.{name}" if prefix else name) for name in children)
    return best


def _alike_and_grown(children: list[nn.Module]) -> bool:
    return len({type(child) for child in children}) == 1 and all(map(children_of, children))


def _plain_stack(children: list[nn.Module]) -> bool:
    """Whether these are plain layers, at least two of one class with parameters, and not too many."""
    if len(children) > _LONGEST_STACK:
        return False
    classes = [type(child) for child in children if any(True for _ in named_parameters(child))]
    return len(classes) > len(set(classes)) and not any(map(children_of, children))
