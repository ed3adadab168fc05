"""`torch_module_monitor.hooks`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from forewarn.measure.hooks import Hook

__all__ = ["HooksManager"]


class HooksManager:
    """Forward hooks on modules, at most one on each, removed together."""

    def __init__(self) -> None:
        self.hooks: dict[nn.Module, Any] = {}

    def register_forward_hook(self, module: nn.Module, hook_fn: Callable[..., None]) -> None:
        """Call `hook_fn(module, args, output)` after every forward of the module, but not of its copies."""
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

    def __del__(self) -> None:
        self.remove_all_hooks()


class MonitorHooks(HooksManager):
    """The forward hooks that a monitor has on its modules now; they stay when this object is gone."""

    def __init__(self, hooks: Iterable[Hook] = (), modules: Iterable[nn.Module] = ()) -> None:
        among = set(modules)
        self.hooks = {hook.owner: hook.handle for hook in hooks if hook.owner in among}

    def __del__(self) -> None:
        pass
