"""A model that another is compared with, and what it returned for the input of the present micro-batch."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from forewarn.measure.metric_evaluation import Evaluation
from forewarn.measure.metric_kinds import NOTHING, ModuleMetric
from forewarn.measure.module_outputs import NamedModules, Returned, tensors_in


class Reference:
    """The reference's activations by name, one for each call of a module within one forward, until they are compared.

    A new forward of the reference replaces those of the one before. Only what a difference metric asks for is kept.
    """

    def __init__(
        self,
        modules: NamedModules,
        evaluation: Evaluation,
        declared: nn.Module | None = None,
        cpu_offload: bool = False,
        missing: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`declared` is how metrics name this reference; `missing` is told what it has returned nothing for."""
        self.modules = modules
        self.declared = declared
        self.ignored = 0
        """Above 0, forwards of the reference do not count."""
        self.running = 0
        """Above 0, a forward of the reference is under way."""
        self.companions: list[Callable[[], None]] = []
        """What ends with the reference: called when it is removed."""
        self._evaluation = evaluation
        self._cpu_offload = cpu_offload
        self._missing = missing
        self._kept: dict[str, list[Tensor]] = {}
        self._compared: Counter[str] = Counter()

    @property
    def is_compared(self) -> bool:
        """Whether a metric asks about its activations."""
        return any(each.kind == "activation_difference" for each in self._asking())

    def listen(self, returned: Returned | None = None) -> None:
        """Hear what its modules return; by default it is kept."""
        self.modules.listen(self._begins, returned or self.keep, self._ended)

    def stop_listening(self) -> None:
        self.modules.stop_listening()
        self.forget()
        self.running = 0

    def close(self) -> None:
        """The reference is removed."""
        self.stop_listening()
        for end in self.companions:
            end()

    def keep(self, name: str, output: Any) -> None:
        """A clone of each tensor: what a module returned may be changed in place by the next."""
        for place, tensor in () if self.ignored else tensors_in(name, output):
            if self._is_asked(place):
                kept = tensor.detach()
                kept = kept.cpu() if self._cpu_offload and not kept.is_cpu else kept.clone()
                self._kept.setdefault(place, []).append(kept)

    def restart(self) -> None:
        """The other model begins a forward: its first call of a module belongs to the reference's first."""
        self._compared.clear()

    def compare(self, name: str, tensor: Tensor) -> None:
        """All differences from what the reference returned at the same call of the same module."""
        if not self._is_asked(name):
            return
        kept, call = self._kept.get(name, []), self._compared[name]
        self._compared[name] += 1
        if call < len(kept):
            own = kept[call].to(tensor.device)
            self._evaluation.activation("activation_difference", name, tensor, own, reference=self.declared)
        else:
            self._missing(name)

    def forget(self) -> None:
        """Release all activations."""
        self._kept = {}
        self._compared.clear()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the reference returns for a copy of this input: no gradients, and no random number is drawn.

        If it fails, nothing is compared with it any more.
        """
        root = self.modules.root
        self.listen()
        try:
            if any(module.training for module in root.modules()):
                raise RuntimeError("it is in training mode; call eval() on it")
            given, named = _copied((args, kwargs))
            with torch.no_grad(), random_numbers_kept(root.parameters()):
                root(*given, **named)
        except Exception as error:
            asking = self._asking()
            self._evaluation.logger.warning(
                "the reference of %s failed: %s: %s; nothing is compared with it from here on",
                ", ".join(each.name for each in asking), type(error).__name__, error,
            )  # fmt: skip
            for each in asking:
                self._evaluation.metrics.switch_off(each)
        finally:
            self.modules.stop_listening()

    def _asking(self) -> list[ModuleMetric]:
        return [each for each in self._evaluation.metrics if each.compared_with is self.declared]

    def _is_asked(self, name: str) -> bool:
        metrics = self._evaluation.metrics
        return metrics.asked("activation_difference", name, reference=self.declared) is not NOTHING

    def _begins(self) -> None:
        self.running += 1
        if not self.ignored:
            self.forget()

    def _ended(self) -> None:
        self.running -= 1


def _copied(given: Any) -> Any:
    """All that a model is given, in containers of any kind, so that what another does to it does not show.

    What can be read only once, such as a generator, can not be copied: a TypeError.
    """
    made: dict[int, Any] = {}
    return tree_map(
        lambda each: each.detach().clone() if isinstance(each, Tensor) else copy.deepcopy(each, made), given
    )


@contextlib.contextmanager
def random_numbers_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Whatever is drawn in this block, by torch on their devices, by numpy or Python itself, was never drawn."""
    devices = {each.device for each in tensors if each.device.type == "cuda"}
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
