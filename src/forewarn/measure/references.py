"""A reference model, and its activations for the current micro-batch."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from forewarn.measure.metric_evaluation import Evaluation
from forewarn.measure.metric_kinds import NOTHING, ModuleMetric
from forewarn.measure.module_outputs import NamedModules, Returned, tensors_in
from forewarn.random_states import random_states_kept


class Reference:
    """Holds the reference's activations by name, one per call of a module within a forward, until they are compared.

    A new forward of the reference replaces the activations of the one before. Only those that a difference metric needs
    are kept.
    """

    def __init__(
        self,
        modules: NamedModules,
        evaluation: Evaluation,
        declared: nn.Module | None = None,
        cpu_offload: bool = False,
        missing: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`declared` is the reference that metrics name; `missing` is called with names that have no activation."""
        self.modules = modules
        self.declared = declared
        self.ignored = 0
        """While above 0, forwards of the reference do not count."""
        self.running = 0
        """Above 0 during a forward of the reference."""
        self.companions: list[Callable[[], None]] = []
        """Called when the reference is removed."""
        self._evaluation = evaluation
        self._cpu_offload = cpu_offload
        self._missing = missing
        self.kept: dict[str, list[Tensor]] = {}
        """The activations by name, one per call of a module."""
        self._compared: Counter[str] = Counter()

    @property
    def is_compared(self) -> bool:
        """Whether any metric compares its activations."""
        return any(metric.kind == "activation_difference" for metric in self._asking())

    def listen(self, returned: Returned | None = None) -> None:
        """Listen to its modules' outputs; by default they are kept."""
        self.modules.listen(self._begins, returned or self.keep, self._ended)

    def stop_listening(self) -> None:
        self.modules.stop_listening()
        self.forget()
        self.running = 0

    def close(self) -> None:
        """Remove the reference."""
        self.stop_listening()
        for end in self.companions:
            end()

    def keep(self, name: str, output: Any) -> None:
        """Keep a copy of each tensor: the next module may change an output in place."""
        for place, tensor in () if self.ignored else tensors_in(name, output):
            if self._is_asked(place):
                copied = tensor.detach()
                copied = copied.cpu() if self._cpu_offload and not copied.is_cpu else copied.clone()
                self.kept.setdefault(place, []).append(copied)

    def restart(self) -> None:
        """The other model begins a forward: calls are matched from the first again."""
        self._compared.clear()

    def compare(self, name: str, tensor: Tensor) -> None:
        """Evaluate all differences from the reference's output at the same call of the same module."""
        if not self._is_asked(name):
            return
        activations, call = self.kept.get(name, []), self._compared[name]
        self._compared[name] += 1
        if call < len(activations):
            activation = activations[call].to(tensor.device)
            self._evaluation.activation("activation_difference", name, tensor, activation, reference=self.declared)
        else:
            self._missing(name)

    def forget(self) -> None:
        """Release all activations."""
        self.kept = {}
        self._compared.clear()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the reference on a copy of this input and keep its outputs, without gradients or random numbers.

        If it fails, nothing is compared with it any more.
        """
        root = self.modules.root
        self.listen()
        try:
            if any(module.training for module in root.modules()):
                raise RuntimeError("it is in training mode; call eval() on it")
            positional, keywords = _copied((args, kwargs))
            with torch.no_grad(), random_numbers_kept(root.parameters()):
                root(*positional, **keywords)
        except Exception as error:
            asking = self._asking()
            self._evaluation.logger.warning(
                "the reference of %s failed: %s: %s; nothing is compared with it from now on",
                ", ".join(metric.name for metric in asking), type(error).__name__, error,
            )  # fmt: skip
            for metric in asking:
                self._evaluation.metrics.switch_off(metric)
        finally:
            self.modules.stop_listening()

    def _asking(self) -> list[ModuleMetric]:
        return [metric for metric in self._evaluation.metrics if metric.compared_with is self.declared]

    def _is_asked(self, name: str) -> bool:
        metrics = self._evaluation.metrics
        return metrics.asked("activation_difference", name, reference=self.declared) is not NOTHING

    def _begins(self) -> None:
        self.running += 1
        if not self.ignored:
            self.forget()

    def _ended(self) -> None:
        self.running -= 1


def _copied(arguments: Any) -> Any:
    """A deep copy of a model's inputs, in containers of any kind, so that in-place changes do not reach the original.

    Inputs that can be read only once, such as generators, raise a TypeError.
    """
    memo: dict[int, Any] = {}
    return tree_map(
        lambda value: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value, memo), arguments
    )


@contextlib.contextmanager
def random_numbers_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the random state of torch (on the tensors' devices), numpy and Python after this block."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    with random_states_kept(), torch.random.fork_rng(devices):
        yield
