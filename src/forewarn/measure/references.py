"""What a reference model returned for the input of the present micro-batch, kept until the comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forewarn.measure.module_outputs import Modules


class References:
    """The reference's activations by name, one for each call of a module within one forward.

    A new forward of the reference replaces those of the one before.
    """

    def __init__(self, modules: Modules, cpu_offload: bool) -> None:
        self.modules = modules
        self.ignored = 0
        """Above 0, forwards of the reference do not count."""
        self.running = 0
        """Above 0, a forward of the reference is under way."""
        self.companions: list[Callable[[], None]] = []
        """What ends with the reference: called when it is removed."""
        self._cpu_offload = cpu_offload
        self._kept: dict[str, list[Tensor]] = {}
        self._compared: Counter[str] = Counter()

    def listen(self, returned: Callable[[str, Any], None]) -> None:
        self.modules.listen(self._begins, returned, self._ended)

    def stop_listening(self) -> None:
        self.modules.stop_listening()
        self.forget()
        self.running = 0

    def close(self) -> None:
        """The reference is removed."""
        self.stop_listening()
        for end in self.companions:
            end()

    def keep(self, name: str, activation: Tensor) -> None:
        """A clone: what a module returned may be changed in place by the next."""
        if not self.ignored:
            kept = activation.detach()
            kept = kept.cpu() if self._cpu_offload and not kept.is_cpu else kept.clone()
            self._kept.setdefault(name, []).append(kept)

    def restart(self) -> None:
        """The monitored model begins a forward: its first call of a module belongs to the reference's first."""
        self._compared.clear()

    def of(self, name: str, device: torch.device) -> Tensor | None:
        """What the reference returned at the same call of the same module, on the device it is compared on."""
        kept = self._kept.get(name)
        at = self._compared[name]
        self._compared[name] += 1
        return kept[at].to(device) if kept is not None and at < len(kept) else None

    def forget(self) -> None:
        """Release all."""
        self._kept = {}
        self._compared.clear()

    def _begins(self) -> None:
        self.running += 1
        if not self.ignored:
            self.forget()

    def _ended(self) -> None:
        self.running -= 1
