"""The modules of a model, walked again only when the model has changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, ValuesView
from itertools import chain
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch import nn

_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

_modules_of, _parameters_of, _compiled_of = map(attrgetter, ("_modules", "_parameters", "_compiled_call_impl"))


def clean_name(name: str) -> str:
    """The name of a parameter or module without the parts that torch.compile, FSDP and checkpoint wrappers add."""
    return _WRAPPERS.sub("", name)


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, as `nn.Module.named_modules` lists them.

    It reads torch's own dictionaries and compares modules by identity. A model may override the walk, its attribute
    lookup, its equality or its truth value, and any of these may raise.
    """
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            inside = children_of(module).items()
            waiting += [(f"{path}.{child}" if path else child, inner) for child, inner in reversed(inside)]


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules directly inside a module, as `nn.Module.named_children` lists them."""
    return {name: child for name, child in module._modules.items() if child is not None}


def named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, as `nn.Module.named_parameters` lists them."""
    seen: set[int] = set()
    for path, module in named_modules(root):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


class Models(nn.Module):
    """Several models watched as one, such as a generator and a discriminator; it is never called itself."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)


def models_in(model: nn.Module) -> list[nn.Module]:
    """The models that are watched as one; usually just the model itself."""
    return list(children_of(model).values()) if isinstance(model, Models) else [model]


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module behind DataParallel, DistributedDataParallel and torch.compile."""
    if isinstance(model, Models):
        return Models({name: unwrapped(child) for name, child in children_of(model).items()})
    while True:
        inner = children_of(model).get("_orig_mod")
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = children_of(model).get("module")
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class Seen(NamedTuple):
    """What hooks can be put on; the same object until the model changes."""

    hookable: dict[str, nn.Module]
    """The modules of the user's own model on which hooks fire, by their clean names; the root's name is empty.

    Modules inside compiled code are left out: hooks there never fire.
    """
    any_compiled: bool
    """Whether any part of the model is compiled, so that its children are not called as modules."""


class Tree:
    """Every module of a model, and its parameters.

    Checking for changes takes a fraction of the time of a walk: torch's own dictionaries of children and parameters are
    kept for each module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules: list[nn.Module] = []
        self._below: list[dict[str, nn.Module | None]] = []
        """The children of each module."""
        self._held: list[dict[str, nn.Parameter | None]] = []
        """The parameters of each module."""
        self._children: list[ValuesView[nn.Module | None]] = []
        self._parameters: list[ValuesView[nn.Parameter | None]] = []
        """Views of what these dictionaries hold now."""
        self._seen_names: list[str] = []
        self._seen_children: list[nn.Module | None] = []
        self._seen_compiled: list[object] = []
        """What the last walk found."""
        self._seen = Seen({}, False)

    def parameters(self, *, walks: bool = True) -> list[nn.Parameter | None]:
        """The modules' current parameters; one that several modules share appears several times.

        Without `walks`, modules that were added or removed since the last walk are not noticed.
        """
        if walks or not self._modules:
            self._refresh()
        return list(chain.from_iterable(self._parameters))

    def seen(self) -> Seen:
        """The modules that hooks can be put on now."""
        self._refresh()
        return self._seen

    @property
    def hookable(self) -> dict[str, nn.Module]:
        """`Seen.hookable` now."""
        return self.seen().hookable

    @property
    def any_compiled(self) -> bool:
        """`Seen.any_compiled` now."""
        return self.seen().any_compiled

    def _refresh(self) -> None:
        """Walk the model if a module was added, removed, renamed or compiled since the last time."""
        if self._modules and self._is_unchanged():
            return
        self._modules = [module for _, module in named_modules(self._root)]
        self._below = list(map(_modules_of, self._modules))
        self._held = list(map(_parameters_of, self._modules))
        self._children = [below.values() for below in self._below]
        self._parameters = [held.values() for held in self._held]
        self._seen_names = list(chain.from_iterable(self._below))
        self._seen_children = list(chain.from_iterable(self._children))
        self._seen_compiled = list(map(_compiled_of, self._modules))
        self._seen = Seen(dict(_hookable(self._root)), any(map(is_compiled, self._modules)))

    def _is_unchanged(self) -> bool:
        """Compares by identity, since modules may define their own equality.

        Torch sometimes replaces a dictionary, for instance when a list of modules is sliced.
        """
        return (
            all(map(is_, map(_modules_of, self._modules), self._below))
            and all(map(is_, map(_parameters_of, self._modules), self._held))
            and list(chain.from_iterable(self._below)) == self._seen_names
            and all(map(is_, chain.from_iterable(self._children), self._seen_children))
            and all(map(is_, map(_compiled_of, self._modules), self._seen_compiled))
        )


def _hookable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, Models):
        for key, child in children_of(model).items():
            for name, module in _hookable(child):
                yield f"{key}.{name}" if name else key, module
        return
    own = unwrapped(model)
    hidden: list[str] = []
    start: str | None = None
    for path, module in named_modules(model):
        if any(path.startswith(prefix) for prefix in hidden):
            continue
        compiled = is_compiled(module)
        if compiled:
            hidden.append(f"{path}." if path else "")
        if module is own:
            start = path
        if start is not None and (not compiled or "_orig_mod" in module._modules):
            name = path[len(start) :].removeprefix(".")
            yield clean_name(f"{name}.").removesuffix("."), module


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, so that its children are not called as modules."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules  # a failing hasattr is slow here
