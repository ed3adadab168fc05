"""How gradients grow or shrink on their way down through the blocks of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forewarn.measure.engine import COLUMNS, Numbers, row_of
from forewarn.measure.forward import differentiable, hookable_modules, received
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.parameters import ParameterIndex, block_names
from forewarn.measure.probe import ONE, Array, GradientTap, ModuleTap, Pending, Probe, Reading
from forewarn.measure.probes.gradients import GradientNorms
from forewarn.measure.step import Step
from forewarn.types import Reason

_input_of, _output_of = attrgetter("input_of"), attrgetter("output_of")

_SUM_SQUARES, _NONFINITE = COLUMNS.index("sum_squares"), COLUMNS.index("nonfinite")


@dataclass(slots=True)
class _Boundary:
    """The block that a tensor is the input of, and the block it is the output of; -1 for none."""

    input_of: int = -1
    output_of: int = -1


class GainProbe(Probe):
    """Gain of each block: ‖∂L/∂input‖ / ‖∂L/∂output‖. Above 1, gradients grow on their way from the last block down.

    `gain/mean` is the mean of `gain/block` over the blocks, and `gain/amplification` their product. `gain/mean_ma`
    averages `gain/mean` over a window of checks, and `gain/drift` is its change since the oldest check of that window.
    `gradient/block_norm` is the gradient norm of the parameters in each block. All are recorded on measured steps.
    Blocks that get the same input, such as the heads of a layer, lie side by side and have no order: nothing is
    recorded.
    """

    name = "gain"
    only_measured = True
    on_every_rank = True
    from_modules = ("gain/block",)

    def __init__(self, parameter_index: ParameterIndex, blocks: str, window: int) -> None:
        reachable = hookable_modules(parameter_index.called)
        self._names = block_names(parameter_index.model, blocks)
        self.needs = {GradientNorms: ("gradient/block_norm",) if self._names else ()}
        self._modules = [reachable[name] for name in self._names if name in reachable]
        self._taps = [ModuleTap(module, self._entered(n), self._left(n)) for n, module in enumerate(self._modules)]
        self._parameter_index = parameter_index
        self._means: deque[float] = deque(maxlen=window)
        self._output: Tensor | None = None
        """Output of the latest block; usually the next block's input."""
        self._boundary = _Boundary()
        self._inputs: list[Tensor] = []
        """Inputs of the latest block."""
        self._block = -1
        """The latest block."""
        self._side_by_side = False
        """Whether two blocks got the same input."""
        self._reached: list[tuple[int, _Boundary, Numbers]] = []
        """For each gradient seen: its backward pass, its boundary and its statistics."""
        self._leaves: dict[tuple[int, int], GradientTap] = {}
        """By tensor and block: the inputs of blocks that another rank computed."""
        self._owners: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def module_taps(self) -> Sequence[ModuleTap]:
        return self._taps

    def gradient_taps(self) -> Sequence[GradientTap]:
        return list(self._leaves.values())

    def forward_ended(self, output: Any) -> None:
        self._output, self._inputs = None, []

    def collect(self, step: Step) -> Pending | None:
        reached, self._reached, self._leaves = self._reached, [], {}
        if not step.measured or self._side_by_side or (not self._names and self._parameter_index.rank is None):
            return None  # other pipeline stages may have blocks if this one has none

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            yield from self._gains(step, [(task, boundary) for task, boundary, _ in reached], arrays)
            gradients = step.get(GradientNorms)
            if gradients is not None:
                yield from self._block_norms(gradients.norms)
            if len(self._modules) < len(self._names):
                step.unavailable("gain/block", Reason.COMPILED)

        rows = [row for _, _, row in reached]
        if self._parameter_index.rank is None and rows and all(isinstance(row, np.ndarray) for row in rows):
            rows = [np.concatenate(rows)]
        return Pending(rows, decode, [Part(How.ROWS)] * len(rows))

    def state_dict(self) -> dict[str, Any]:
        return {"means": list(self._means)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._means.extend(float(mean) for mean in state["means"])

    def _entered(self, block: int) -> Callable[..., Iterable[GradientTap]]:
        def entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[GradientTap]:
            inputs = differentiable(args[0] if len(args) == 1 and not kwargs else [*args, *kwargs.values()])
            same = len(inputs) == len(self._inputs) and all(map(is_, inputs, self._inputs))
            self._side_by_side |= bool(inputs) and same and block != self._block
            self._inputs, self._block = inputs, block
            tensor = inputs[0] if inputs else None
            if tensor is not None and tensor is self._output:
                self._boundary.input_of = block
                return ()
            if tensor is None:  # the input of a pipeline stage; a hook on it would outlive the pass
                for leaf in received([*args, *kwargs.values()])[:1]:
                    self._leaves[id(leaf), block] = GradientTap(leaf, partial(self._reach, _Boundary(input_of=block)))
                return ()
            return self._followed(tensor, _Boundary(input_of=block))

        return entered

    def _left(self, block: int) -> Callable[..., Iterable[GradientTap]]:
        def left(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Iterable[GradientTap]:
            self._output = next(iter(differentiable(output)), None)
            self._boundary = _Boundary(output_of=block)
            return self._followed(self._output, self._boundary)

        return left

    def _followed(self, tensor: Tensor | None, boundary: _Boundary) -> Iterable[GradientTap]:
        return () if tensor is None else [GradientTap(tensor, partial(self._reach, boundary))]

    def _reach(self, boundary: _Boundary, gradient: Tensor) -> None:
        self._reached.append((torch._C._current_graph_task_id(), boundary, row_of(gradient)))

    def _gains(
        self, step: Step, boundaries: Sequence[tuple[int, _Boundary]], arrays: Sequence[Array]
    ) -> Iterator[Reading]:
        rows = np.concatenate([np.empty((0, len(COLUMNS))), *arrays])
        passes = [self._of_pass(boundaries, rows, task) for task in dict.fromkeys(task for task, _ in boundaries)]
        complete = (np.where(seen.all(axis=0), squares, 0.0) for squares, seen in passes)
        into, out = np.sum(list(complete), axis=0) if passes else np.zeros((2, len(self._names)))
        gains = np.sqrt(np.divide(into, out, out=np.full(len(out), np.nan), where=out > 0))
        if np.isfinite(gains).any():
            yield Reading("gain/block", self._names, gains)
        gains = step.with_other_stages("gain/block", gains)
        finite = gains[np.isfinite(gains)]
        if not len(finite):
            return
        mean = float(finite.mean())
        self._means.append(mean)
        yield Reading("gain/mean", ONE, mean)
        yield Reading("gain/mean_ma", ONE, float(np.mean(self._means)))
        with np.errstate(over="ignore", divide="ignore"):
            yield Reading("gain/amplification", ONE, float(np.exp(np.log(finite).sum())))
        if len(self._means) > 1 and self._means[0] > 0:
            yield Reading("gain/drift", ONE, mean / self._means[0] - 1)

    def _of_pass(
        self, boundaries: Sequence[tuple[int, _Boundary]], rows: Array, task: int
    ) -> tuple[Array, NDArray[np.bool_]]:
        """Σ (gradient)² at the input and at the output of each block in one backward pass, and which were seen."""
        squares, seen = np.zeros((2, len(self._names))), np.zeros((2, len(self._names)), bool)
        values = np.where(rows[:, _NONFINITE] > 0, np.nan, rows[:, _SUM_SQUARES])
        is_of_task = np.array([own == task for own, _ in boundaries])
        for side, get in enumerate((_input_of, _output_of)):
            blocks = np.array([get(boundary) for _, boundary in boundaries])
            is_at_block = is_of_task & (blocks >= 0)
            np.add.at(squares[side], blocks[is_at_block], values[is_at_block])
            seen[side, blocks[is_at_block]] = True
        return squares, seen

    def _block_norms(self, norms: Array) -> Iterator[Reading]:
        if self._owners[0] != self._parameter_index.version:
            self._owners = (self._parameter_index.version, _owners(self._parameter_index.names, self._names))
        owners = self._owners[1]
        if len(owners) != len(norms):  # the model's parameters have changed since
            return
        inside = np.flatnonzero((owners >= 0) & ~np.isnan(norms))
        if len(inside):
            squares = np.bincount(owners[inside], norms[inside] ** 2, len(self._names))
            counts = np.bincount(owners[inside], minlength=len(self._names))
            yield Reading("gradient/block_norm", self._names, np.where(counts > 0, np.sqrt(squares), np.nan))


def _owners(parameters: Sequence[str], blocks: Sequence[str]) -> NDArray[np.int64]:
    """The block that each parameter belongs to; -1 for parameters outside all blocks."""
    owners = np.full(len(parameters), -1, np.int64)
    for index, block in enumerate(blocks):
        owners[[place for place, name in enumerate(parameters) if name.startswith(f"{block}.")]] = index
    return owners
