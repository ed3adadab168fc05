"""The modules of a model by the names that people know, what they return, and the tensors inside that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from forewarn.measure.module_hooks import ModuleHooks
from forewarn.measure.module_tree import clean_name, unwrapped
from forewarn.measure.nested import nested_tensors
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import ModuleTap

ROOT = "[root module]"

Returned = Callable[[str, Any], None]
"""Takes the name of a module, and what it has returned."""

_MAX_DEPTH = 8
"""How deep the tensors of an output are looked for; an output may contain itself."""


def default_format_module_name_fn(name: str) -> str:
    """The name that people know a module or parameter by, without what wrappers put into it."""
    return clean_name(f"{name}.".replace("_forward_module.", ""))[:-1] or ROOT


class NamedModules:
    """The modules of one model by name, and hooks on those that are listened to."""

    def __init__(
        self,
        model: nn.Module,
        format_name: Callable[[str], str] = default_format_module_name_fn,
        excluded: Callable[[str], bool] = lambda name: False,
    ) -> None:
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
        self._hooks = ModuleHooks(traced=True)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter once, by the name that it is logged under, as the model is now."""
        self._parameter_index.refresh()
        if self._parameters is None or self._parameters[0] != self._parameter_index.version:
            named = [(self.format_name(name), each) for name, each in self.root.named_parameters()]
            self._parameters = (self._parameter_index.version, named)
        return self._parameters[1]

    def gradients(self) -> list[tuple[str, Tensor]]:
        """The gradient of every parameter that has one."""
        return [(name, each.grad) for name, each in self.parameters() if each.grad is not None]

    def listen(self, begins: Callable[[], None], returned: Returned, ended: Callable[[], None]) -> None:
        """Call `begins` and `ended` around each forward of the model, `returned(name, output)` after each module's."""
        if self._hooks:
            return
        self._hooks.put_on(ModuleTap(self.root, entered=lambda args, kwargs: begins()))
        for name, module in self.heard:
            self._hooks.put_on(passing_on(name, module, returned))
        self._hooks.put_on(ModuleTap(self.root, left=lambda args, kwargs, output: ended()), always_call=True)

    def stop_listening(self) -> None:
        self._hooks.remove()

    def check_twin(self, names: Iterable[str], what: str) -> None:
        """Whether this reference is built like the model that has these names; `what` is how an error calls it."""
        different = set(names) ^ set(self.names.values())
        if different:
            raise ValueError(f"{what}, but only one of them has " + ", ".join(sorted(different)[:5]))

    def _own(self, module: nn.Module) -> bool:
        """A wrapper around the whole model is not a module of it."""
        return module is not self.model or self.model is self.root


def passing_on(name: str, module: nn.Module, returned: Returned) -> ModuleTap:
    """A tap that tells what a module returns."""
    return ModuleTap(module, left=lambda args, kwargs, output: returned(name, output))


def tensors_in(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output: itself under `name`, those in tuples, mappings and dataclasses under `name[place]`.

    Inside such a structure only tensors of real or complex numbers count: indices and masks have no mean.
    """
    for place, tensor in nested_tensors(output, _MAX_DEPTH):
        if not place or tensor.is_floating_point() or tensor.is_complex():
            yield name + place, tensor
