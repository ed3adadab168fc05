"""The modules of a model by readable name, and the tensors in their outputs."""

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
"""Takes the name of a module and its output."""

_MAX_DEPTH = 8
"""How deep to look for tensors in an output, which may contain itself."""


def default_format_module_name_fn(name: str) -> str:
    """The name of a module or parameter without the parts that wrappers add."""
    return clean_name(f"{name}.".replace("_forward_module.", ""))[:-1] or ROOT


class NamedModules:
    """The modules of one model by name, and the hooks on them."""

    def __init__(
        self,
        model: nn.Module,
        format_name: Callable[[str], str] = default_format_module_name_fn,
        excluded: Callable[[str], bool] = lambda name: False,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """`failed` receives the exceptions of hooks and the refusals of modules; without it, they raise."""
        self.model = model
        self.root = unwrapped(model)
        self.names = {module: format_name(name) for name, module in self.root.named_modules()}
        self.names.setdefault(model, self.names[self.root])
        self.heard = [(name, module) for module, name in self.names.items() if not excluded(name) and self._own(module)]
        """The modules that are not excluded, with the names they are logged under."""
        self.format_name = format_name
        self._parameter_index = ParameterIndex(self.root, ())
        self._parameters: tuple[int, list[tuple[str, nn.Parameter]]] | None = None
        """The parameters by name, and the version of the parameter index they belong to."""
        self._failed = failed
        self.hooks = ModuleHooks(failed, traced=True)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every current parameter that has values, once, with the name it is logged under."""
        self._parameter_index.refresh()
        if self._parameters is None or self._parameters[0] != self._parameter_index.version:
            named = [
                (self.format_name(name), parameter)
                for name, parameter in self.root.named_parameters()
                if not parameter.is_meta
            ]
            self._parameters = (self._parameter_index.version, named)
        return self._parameters[1]

    def gradients(self) -> list[tuple[str, Tensor]]:
        """The gradient of every parameter that has one."""
        return [(name, parameter.grad) for name, parameter in self.parameters() if parameter.grad is not None]

    def listen(self, begins: Callable[[], None], returned: Returned, ended: Callable[[], None]) -> None:
        """Call `begins` and `ended` around each forward of the model, `returned(name, output)` after each module."""
        if self.hooks:
            return
        self._put_on(ModuleTap(self.root, entered=lambda args, kwargs: begins()))
        for name, module in self.heard:
            self._put_on(passing_on(name, module, returned))
        self._put_on(ModuleTap(self.root, left=lambda args, kwargs, output: ended()), always_call=True)

    def stop_listening(self) -> None:
        self.hooks.remove()

    def _put_on(self, tap: ModuleTap, always_call: bool = False) -> None:
        try:
            self.hooks.put_on(tap, always_call)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)

    def check_twin(self, names: Iterable[str], description: str) -> None:
        """Raise unless this reference has exactly the modules with these names; `description` begins the message."""
        different = set(names) ^ set(self.names.values())
        if different:
            raise ValueError(f"{description}, but only one of them has " + ", ".join(sorted(different)[:5]))

    def _own(self, module: nn.Module) -> bool:
        """Whether a module is part of the model, and not a wrapper around it."""
        return module is not self.model or self.model is self.root


def passing_on(name: str, module: nn.Module, returned: Returned) -> ModuleTap:
    """A tap that passes on a module's output."""
    return ModuleTap(module, left=lambda args, kwargs, output: returned(name, output))


def tensors_in(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output: itself as `name`, those in tuples, mappings and dataclasses as `name[place]`.

    Inside such a structure only floating-point and complex tensors count: indices and masks have no mean. Those on the
    meta device have no values.
    """
    for place, tensor in nested_tensors(output, _MAX_DEPTH, local=False):
        if not tensor.is_meta and (not place or tensor.is_floating_point() or tensor.is_complex()):
            yield name + place, tensor
