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
from forewarn.measure.peers import num_ranks
from forewarn.measure.probe import Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.step import Step

MAX_ROWS = 64
"""Maximum number of rows compared: 2 MFlop at a width of 512, and an effective rank of up to 63."""

_MAX_SHARED = 2**18
"""Maximum number of values, 2 MB, that ranks share to compare the rows of the whole batch."""


class RepresentationProbe(Probe):
    """`activation/row_cosine` and `activation/effective_rank` of the last linear layer's input.

    Only a whole pass shows which layer is last, so the first measured pass has no reading. With several ranks, each
    gives some of the rows.
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
        _, _, limit = self._places(tensor.shape[-1])
        num_wanted = limit - self._num_rows
        if num_wanted > 0 or not self._sample:
            every = max(1, tensor.shape[:-1].numel() // max(1, num_wanted))
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
        if not sample or (sum(map(len, sample)) < 2 and self._parameter_index.rank is None):
            return None
        scope = (self._head or type(self._parameter_index.model).__name__,)
        rows = joined(sample)
        is_shared = self._parameter_index.rank is not None

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            if is_shared:
                given = arrays[0][arrays[0][:, -1] > 0, :-1]
                arrays = [] if len(given) < 2 else [np.array(value) for value in similarity(given)]
            for name, value in zip(("row_cosine", "effective_rank"), arrays, strict=False):
                yield Reading(f"activation/{name}", scope, value)

        def settle(arrays: Sequence[Array]) -> Pending:
            return Pending([self._placed(arrays[0])], decode, [Part(How.SUM, f"rows {scope[0]}")])

        return Pending([rows], decode, settle=settle) if is_shared else Pending(list(similarity(rows)), decode)

    def _places(self, width: int) -> tuple[int, int, int]:
        """Number of rows that all ranks compare, the first place among them of this rank's, and their number."""
        rank = self._parameter_index.rank
        if rank is None:
            return MAX_ROWS, 0, MAX_ROWS
        most, ranks = max(2, min(MAX_ROWS, _MAX_SHARED // width)), num_ranks()
        per_rank, every = max(1, most // ranks), -(-ranks // most)
        shards = self._parameter_index.shards
        is_twin = shards is not None and shards.is_twin
        return per_rank * -(-ranks // every), per_rank * (rank // every), 0 if is_twin or rank % every else per_rank

    def _placed(self, rows: Array) -> Array:
        """The rows of this rank among those of all, which are zero, with a 1 at the end of each."""
        num, first, _ = self._places(rows.shape[1])
        placed = np.zeros((num, rows.shape[1] + 1))
        placed[first : first + len(rows)] = np.pad(rows, ((0, 0), (0, 1)), constant_values=1.0)
        return placed

    def state_dict(self) -> dict[str, Any]:
        return {"head": self._head}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._head = state["head"]


def _is_linear(name: str, module: nn.Module) -> bool:
    """Whether a module is a leaf that multiplies by a matrix rather than looking up its rows."""
    lookup = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    weight = None if lookup else _stored_weight(module)
    is_matrix = weight is not None and (weight.dim() == 2 or isinstance(module, nn.Linear))  # FSDP1 keeps it flat
    return is_matrix and is_leaf(name, module)


def _stored_weight(module: nn.Module) -> Tensor | None:
    """The weight as stored. A parametrization is not evaluated: it may draw random numbers or change its state."""
    parametrized = module._modules.get("parametrizations")
    computed = parametrized._modules.get("weight") if parametrized is not None else None
    weight = module._parameters.get("weight") if computed is None else getattr(computed, "original", None)
    return weight if isinstance(weight, Tensor) else None
