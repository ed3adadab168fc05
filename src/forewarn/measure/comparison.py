"""What a watched model is compared with: a reference of the same structure, or itself as it was at attaching."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from forewarn.measure.metric_evaluation import Evaluation, is_sharded
from forewarn.measure.metric_kinds import NOTHING, Metrics, ModuleMetric
from forewarn.measure.module_outputs import Modules, default_format_module_name_fn, tensors_in
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.references import References
from forewarn.measure.step_log import StepLog

_log = logging.getLogger("forewarn")


class Comparison:
    """One reference, and the difference metrics that ask about it.

    Parameters are compared with those that the reference has at that moment, or without one with the weights at
    attaching. For activations the reference runs on a copy of the same input, before the watched model: one more
    forward pass on measured steps, without gradients and with the random numbers put back.
    """

    def __init__(
        self,
        metrics: Sequence[ModuleMetric],
        separator: str,
        parameter_index: ParameterIndex,
        reference: nn.Module | None,
    ) -> None:
        self._metrics = Metrics(separator)
        for each in metrics:
            self._metrics.add(each)
        self._evaluation = Evaluation(self._metrics, _log, strict=False)
        self._asked = [
            (name, each)
            for name, each in zip(parameter_index.names, parameter_index.parameters, strict=True)
            if self._metrics.asked("parameter_difference", name) != NOTHING
        ]
        self.at_first: dict[str, Tensor] = {}
        """The weights at attaching, where there is no reference."""
        self._references: References | None = None
        if reference is None:
            self.at_first = {name: each.detach().clone() for name, each in self._asked}
        else:
            self._references = References(Modules(reference, default_format_module_name_fn, lambda name: False), False)
            self._check(self._references.modules, parameter_index)

    @property
    def runs(self) -> bool:
        """Whether the reference has to run on what the watched model is given."""
        return self._references is not None and self._metrics.any("activation_difference")

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the reference returns for this input."""
        references = self._references
        assert references is not None
        root = references.modules.root
        references.listen(self._returned)
        try:
            if any(module.training for module in root.modules()):
                raise RuntimeError("it is in training mode; call eval() on it")
            given, named = _copied((args, kwargs))
            with torch.no_grad(), _random_numbers_kept(root):
                root(*given, **named)
        except Exception as error:
            _log.warning(
                "the reference of %s failed: %s: %s; nothing is compared with it from here on",
                ", ".join(each.name for each in self._metrics), type(error).__name__, error,
            )  # fmt: skip
            for each in list(self._metrics):
                self._metrics.switch_off(each)
        finally:
            references.modules.stop_listening()

    def activation(self, log: StepLog, name: str, tensor: Tensor) -> None:
        """All differences of what the watched model's module returned; none if the reference's returned nothing."""
        if self._references is None or self._metrics.asked("activation_difference", name) == NOTHING:
            return
        kept = self._references.of(name, tensor.device)
        if kept is not None:
            self._evaluation.activation(log, "activation_difference", name, tensor, kept)

    def parameters(self, log: StepLog, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """All differences of the parameters."""
        known: dict[str, Any] = self.at_first
        if self._references is not None:
            known = {} if not self._asked else dict(self._references.modules.parameters())
        pairs = (
            (name, (each, known[name])) for name, each in named if name in known and known[name].shape == each.shape
        )
        self._evaluation.parameters(log, "parameter_difference", pairs)

    def forget(self) -> None:
        """The forward pass is over: release the reference's activations."""
        if self._references is not None:
            self._references.forget()

    def _returned(self, name: str, output: Any) -> None:
        assert self._references is not None
        for place, tensor in tensors_in(name, output):
            if self._metrics.asked("activation_difference", place) != NOTHING:
                self._references.keep(place, tensor)

    def _check(self, reference: Modules, parameter_index: ParameterIndex) -> None:
        """A reference that can not be compared with is an error at attaching."""
        of_reference = dict(reference.parameters())
        own = {each.data_ptr() for each in parameter_index.parameters} - {
            0
        }  # neither empty ones nor shards have an address
        for name, each in of_reference.items():
            if each.data_ptr() in own:
                raise ValueError(
                    f"metrics: the reference shares {name} with the watched model; use copy.deepcopy(model)"
                )
            if is_sharded(each):
                raise ValueError(
                    f"metrics: {name} of the reference is sharded, and watch runs in the first process only"
                )
        for name, each in self._asked:
            if name not in of_reference or of_reference[name].shape != each.shape:
                raise ValueError(f"metrics: the reference has no {name} of shape {tuple(each.shape)} to compare with")
        if self._metrics.any("activation_difference"):
            names = {default_format_module_name_fn(name) for name, _ in parameter_index.model.named_modules()}
            different = names ^ set(reference.names.values())
            if different:
                raise ValueError(
                    "metrics: the reference must have the structure of the watched model, but only one of them has "
                    + ", ".join(sorted(different)[:5])
                )
            if any(module.training for module in reference.root.modules()):
                raise ValueError(
                    "metrics: the reference is in training mode, where it would drop units at random and move its "
                    "running statistics; call reference.eval() first"
                )


def _copied(given: Any) -> Any:
    """All that a model is given, in containers of any kind, so that what another does to it does not show.

    What can be read only once, such as a generator, can not be copied: a TypeError.
    """
    made: dict[int, Any] = {}
    return tree_map(
        lambda each: each.detach().clone() if isinstance(each, Tensor) else copy.deepcopy(each, made), given
    )


@contextlib.contextmanager
def _random_numbers_kept(model: nn.Module) -> Iterator[None]:
    """Whatever is drawn in this block, by torch, numpy or Python itself, was never drawn."""
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
