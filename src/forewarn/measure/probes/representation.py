"""The last hidden state: whether different inputs still look different to the output layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from forewarn.measure.engine.host_arrays import host_array
from forewarn.measure.engine.portable import wide
from forewarn.measure.engine.similarity import Rows, joined, similarity
from forewarn.measure.forward import hookable_modules
from forewarn.measure.hidden_from_checkpointing import hidden_from_checkpointing
from forewarn.measure.layers import is_leaf
from forewarn.measure.nested import nested_tensors
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.step import Step

MAX_ROWS = 64
"""Maximum number of rows compared: 2 MFlop at a width of 512, and an effective rank of up to 63."""


class RepresentationProbe(Probe):
    """`activation/row_cosine` and `activation/effective_rank` of the last linear layer's input.

    Only a whole pass shows which layer is last, so the first measured pass has no reading.
    """

    name = "representation"
    only_measured = True
    on_every_rank = True
    from_modules = ("activation/effective_rank",)

    def __init__(self, parameter_index: ParameterIndex) -> None:
        self._parameter_index = parameter_index
        self._head: str | None = None
        self._last: str | None = None
        self._modules: dict[str, nn.Module] = {}
        self._tapped: str | None = None
        self._taps: list[ModuleTap] = []
        """For these modules and this head."""
        self._sample: list[Rows] = []
        self._num_rows = 0

    def module_taps(self) -> Sequence[ModuleTap]:
        self._last = None
        modules = hookable_modules(self._parameter_index.called)
        if modules is not self._modules or self._head != self._tapped:
            self._modules, self._tapped = modules, self._head
            self._taps = [
                ModuleTap(module, self._entered if name == self._head else None, self._left(name))
                for name, module in modules.items()
                if name == self._head or (self._head not in modules and _is_linear(name, module))
            ]
        return self._taps

    def forward_ended(self, output: Any) -> None:
        if output is not None:
            self._head = self._last  # if the head was not called, the next pass looks for it again

    def _left(self, name: str) -> Callable[[tuple[Any, ...], dict[str, Any], Any], None]:
        def left(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._last = name

        return left

    def _entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = next((tensor for _, tensor in nested_tensors([*args, *kwargs.values()])), None)
        if tensor is not None and tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel():
            self._take(tensor)

    def _take(self, tensor: Tensor) -> None:
        """Copy a few evenly spaced rows, from the first calls of the step: the tensor may change or be freed."""
        num_wanted = MAX_ROWS - self._num_rows
        if num_wanted > 0:
            every = max(1, tensor.shape[:-1].numel() // num_wanted)
            if (array := host_array(tensor)) is not None:
                few = array.reshape(-1, array.shape[-1])[::every][:num_wanted]
                self._sample.append(few.astype(np.float64))
            else:
                with hidden_from_checkpointing():
                    rows = tensor.detach().reshape(-1, tensor.shape[-1])[::every][:num_wanted]
                    self._sample.append(rows.to(wide(tensor.device), copy=True))
            self._num_rows += len(self._sample[-1])

    def collect(self, step: Step) -> Pending | None:
        sample, self._sample, self._num_rows = self._sample, [], 0
        if not sample or sum(map(len, sample)) < 2:
            return None
        scope = (self._head or type(self._parameter_index.model).__name__,)
        cosine, rank = similarity(joined(sample))

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            yield Reading("activation/row_cosine", scope, arrays[0])
            yield Reading("activation/effective_rank", scope, arrays[1])

        return Pending([cosine, rank], decode, [Part(How.MEAN)] * 2)

    def state_dict(self) -> dict[str, Any]:
        return {"head": self._head}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._head = state["head"]


def _is_linear(name: str, module: nn.Module) -> bool:
    """Whether a module is a leaf that multiplies by a matrix rather than looking up its rows."""
    lookup = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    weight = None if lookup else _stored_weight(module)
    return weight is not None and weight.dim() == 2 and is_leaf(name, module)


def _stored_weight(module: nn.Module) -> Tensor | None:
    """The weight as stored. A parametrization is not evaluated: it may draw random numbers or change its state."""
    parametrized = module._modules.get("parametrizations")
    computed = parametrized._modules.get("weight") if parametrized is not None else None
    weight = module._parameters.get("weight") if computed is None else getattr(computed, "original", None)
    return weight if isinstance(weight, Tensor) else None
