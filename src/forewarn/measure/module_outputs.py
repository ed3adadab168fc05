"""Where a `ModuleMonitor` listens: the outputs of modules, and the tensors inside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forewarn.measure.hooks import Hook
from forewarn.measure.module_tree import clean_name, unwrapped
from forewarn.measure.nested import nested_tensors
from forewarn.measure.parameters import ParameterIndex

ROOT = "[root module]"

_MAX_DEPTH = 8
"""How deep the tensors of an output are looked for; an output may contain itself."""


def default_format_module_name_fn(name: str) -> str:
    """The name that people know a module or parameter by, without what wrappers put into it."""
    return clean_name(f"{name}.".replace("_forward_module.", ""))[:-1] or ROOT


class HooksManager:
    """Forward hooks on modules, at most one on each, that go away together."""

    def __init__(self) -> None:
        self.hooks: dict[nn.Module, Any] = {}

    def register_forward_hook(self, module: nn.Module, hook_fn: Callable[..., None]) -> None:
        """Call `hook_fn(module, args, output)` after every forward of the module; copies of it call nothing."""
        self.remove_hook(module)
        self.hooks[module] = module.register_forward_hook(Hook(hook_fn, traced=True))

    def remove_hook(self, module: nn.Module) -> None:
        if module in self.hooks:
            self.hooks.pop(module).remove()

    def remove_all_hooks(self) -> None:
        for module in list(self.hooks):
            self.remove_hook(module)

    def __len__(self) -> int:
        return len(self.hooks)

    def __enter__(self) -> HooksManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove_all_hooks()


class Modules:
    """The modules of one model by name, and hooks on those that are listened to."""

    def __init__(self, model: nn.Module, format_name: Callable[[str], str], excluded: Callable[[str], bool]) -> None:
        self.model = model
        self.root = unwrapped(model)
        self.names = {module: format_name(name) for name, module in self.root.named_modules()}
        self.names.setdefault(model, self.names[self.root])
        self.heard = [(name, module) for module, name in self.names.items() if not excluded(name) and self._own(module)]
        """What is not excluded, by the name that it is logged under."""
        self.format_name = format_name
        self._parameter_index = ParameterIndex(self.root, ())
        self._parameters: tuple[int, list[tuple[str, nn.Parameter]]] | None = None
        """With the version of the parameter index that they were found in."""
        self._hooks = HooksManager()
        self._handles: list[Any] = []

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter once, by the name that it is logged under, as the model is now."""
        self._parameter_index.refresh()
        if self._parameters is None or self._parameters[0] != self._parameter_index.version:
            named = [(self.format_name(name), each) for name, each in self.root.named_parameters()]
            self._parameters = (self._parameter_index.version, named)
        return self._parameters[1]

    def listen(
        self,
        begins: Callable[[], None],
        returned: Callable[[str, Any], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `begins` and `ended` around each forward of the model, `returned(name, output)` after each module's.

        What activation checkpointing computes again in the backward pass is not heard.
        """
        if self._handles:
            return

        def listener(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if torch._C._current_graph_task_id() == -1:
                    returned(name, output)

            return hook

        self._handles = [
            self.root.register_forward_pre_hook(Hook(lambda module, args: begins(), traced=True)),
        ]
        for name, module in self.heard:
            self._hooks.register_forward_hook(module, listener(name))
        self._handles.append(
            self.root.register_forward_hook(Hook(lambda module, args, output: ended(), traced=True), always_call=True)
        )

    def stop_listening(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hooks.remove_all_hooks()

    def _own(self, module: nn.Module) -> bool:
        """A wrapper around the whole model is not a module of it."""
        return module is not self.model or self.model is self.root


def tensors_in(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output: itself under `name`, those in tuples, mappings and dataclasses under `name[place]`.

    Inside such a structure only tensors of real or complex numbers count: indices and masks have no mean.
    """
    for place, tensor in nested_tensors(output, _MAX_DEPTH):
        if not place or tensor.is_floating_point() or tensor.is_complex():
            yield name + place, tensor
