"""The scale of the model's logits: their log-normalizer, which does not change the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forewarn.measure.engine import Numbers
from forewarn.measure.engine.host_arrays import host_array
from forewarn.measure.engine.portable import wide
from forewarn.measure.forward import hookable_modules
from forewarn.measure.hooks import Hook
from forewarn.measure.loss_graph import LossGraph
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.probe import ONE, Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.probes.batch import GivenTargets, count_targets, target_readings
from forewarn.measure.step import Step

_MAX_VALUES = 2**20
"""Maximum number of logits read per forward pass; above that, evenly spaced rows."""

_FEWEST_ROWS = 64
"""Minimum number of rows read, whatever the size of the vocabulary."""

_CLEAR_ROWS = 0.9
"""Minimum fraction of the rows with one negative value, the target: there are more if the loss has the wrong sign."""

_FEW_CLEAR_ROWS = 0.25
"""Minimum fraction of the rows with one negative or one positive value that tells in which direction the loss goes."""

_FEWEST_CLASSES = 3
"""Minimum number of classes that tells the target from the others."""

_SUM_ERROR = 1e-2
"""Largest distance of the sum of probabilities from 1, for rounding in bfloat16."""

_TOLERANCE = 1e-3
"""Maximum Σ (row sum)² / Σ (values)² of a softmax gradient. It is 0 except for rounding: 1e-5 in bfloat16, and as much
for a z-loss of the usual weight 1e-4. Other losses have about 1, whatever the number of classes."""


Rows = Tensor | NDArray[Any]


class LogitsProbe(Probe):
    """`activation/log_z`: the mean of log Σ exp over the rows of the model's output, if that is the input of a softmax.

    Also `activation/probability_rows`: how many rows are probabilities already, `activation/reversed_rows`: how many
    are pushed away from their target, and the classes in the targets.

    The backward pass shows whether it is. Shifting a whole row does not change a softmax loss, so its gradient sums to
    zero over each row. That freedom is also why log Z can drift unnoticed. Some losses without a softmax ignore a shift
    too, such as that of a waveform whose mean is subtracted; the graph of the loss tells them apart. If the model
    returns only its loss, or logits that the loss does not use, the output of the last linear layer that ran is used.
    """

    name = "logits"
    only_measured = True
    on_every_rank = True
    needs: Mapping[type, Sequence[str]] = {GivenTargets: (), LossGraph: ()}
    from_modules = ("activation/log_z",)

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._given = True
        """Whether the model's own output has contained logits so far."""
        self._unused = False
        """Whether a backward pass went through the output but not through its logits: the loss is made inside."""
        self._last: Any = None
        self._total: Any = None
        self._rows = 0
        self._shift: Any = None
        """Over sampled rows of the gradient: Σ (row sum)², Σ (values)² and the numbers with one negative value and with
        one positive value."""
        self._is_directed = False
        """Whether there are enough classes to see in which direction the loss goes."""
        self._targets: Numbers | None = None
        """What is counted of the targets. In a row of the gradient of a softmax loss, the lowest value is the target;
        for a loss on log-probabilities, it is the only value."""
        self._failure: Exception | None = None
        self._modules: dict[str, nn.Module] = {}
        self._taps: list[ModuleTap] = []
        """For the outputs of the linear layers among these modules."""

    def forward_begins(self) -> None:
        self._last = None

    def module_taps(self) -> Sequence[ModuleTap]:
        if self._given and not self._unused:
            return ()
        modules = hookable_modules(self._model)
        if modules is not self._modules:
            self._modules = modules
            self._taps = [
                ModuleTap(module, left=self._passed)
                for name, module in modules.items()
                if name and isinstance(module, nn.Linear)
            ]
        return self._taps

    def _passed(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._last = output

    def forward_ended(self, output: Any) -> None:
        last, self._last = self._last, None
        if output is None:
            return
        candidate = None if self._unused else output_logits(output)
        self._given = candidate is not None
        if candidate is None and (candidate := output_logits(last)) is None:
            return
        every = _stride(candidate)
        rows = _rows(candidate, every)
        hook = self._gradient_of(every, _log_z(rows), len(rows))
        candidate.register_hook(Hook(hook, self._fail, traced=True))

    def _gradient_of(self, every: int, total: Numbers, num_rows: int) -> Callable[[Tensor | None], None]:
        def seen(gradient: Tensor | None) -> None:
            if gradient is None:  # DDP and compiled code return a copy, and the loss was made from the original
                self._unused = True
                return
            rows = _rows(gradient, every)
            sums = _shift(rows)
            self._is_directed = rows.shape[-1] >= _FEWEST_CLASSES
            if self._targets is None:
                self._targets = count_targets(rows.argmin(-1))
            self._total = total if self._total is None else self._total + total
            self._rows += num_rows
            self._shift = sums if self._shift is None else self._shift + sums

        return seen

    def _fail(self, error: Exception) -> None:
        """Keep an error for `collect` to raise: a hook must not raise into the backward pass."""
        self._failure = error

    def collect(self, step: Step) -> Pending | None:
        total, seen, shift, targets = self._total, self._rows, self._shift, self._targets
        self._total, self._rows, self._shift, self._targets = None, 0, None, None
        failure, self._failure = self._failure, None
        given, graph = step.get(GivenTargets), step.get(LossGraph)
        other_loss = graph is not None and graph.has_softmax is False
        if failure is not None:
            raise failure
        if total is None or shift is None or targets is None:
            return None
        is_directed = self._is_directed

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            (of_rows, of_values, num_targets, num_reversed), (log_z, probabilities), counted, num_rows = arrays
            rows = float(num_rows)
            is_softmax = of_values > 0 and of_rows <= _TOLERANCE * of_values and not other_loss
            names_one = of_values > 0 and abs(of_rows - of_values) <= _TOLERANCE * of_values
            if is_softmax:
                yield Reading("activation/log_z", ONE, log_z / rows)
                yield Reading("activation/probability_rows", ONE, probabilities / rows)
                num_clear = num_targets + num_reversed
                if is_directed and num_clear >= _FEW_CLEAR_ROWS * rows:
                    yield Reading("activation/reversed_rows", ONE, num_reversed / num_clear)
            is_shown = (is_softmax or names_one) and num_targets >= _CLEAR_ROWS * rows
            if is_shown and not (given is not None and given.were_given):
                yield from target_readings(counted)

        parts = [Part(How.SUM), Part(How.SUM), Part(How.TARGETS, once=True), Part(How.SUM)]
        return Pending([shift, total, targets, np.array(float(seen))], decode, parts)


def output_logits(output: Any) -> Tensor | None:
    """The tensor in a model's output that may be logits: the one named so, else the first with rows of numbers."""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    parts = output if isinstance(output, list | tuple) else (output,)
    return next((part for part in (named, *parts) if isinstance(part, Tensor) and _may_be_logits(part)), None)


def _may_be_logits(tensor: Tensor) -> bool:
    if hasattr(tensor, "to_local"):  # its rows may be divided between ranks
        return False
    rows = tensor.dim() >= 2 and tensor.shape[-1] >= 2 and not tensor.is_nested and tensor.numel() > 0
    return rows and tensor.is_floating_point() and tensor.grad_fn is not None


def _stride(tensor: Tensor) -> int:
    num_rows = tensor.shape[:-1].numel()
    return -(-num_rows // max(_FEWEST_ROWS, _MAX_VALUES // tensor.shape[-1]))


def _rows(tensor: Tensor, every: int) -> Rows:
    """Evenly spaced rows of a tensor, [rows, classes]; an array that shares its memory if it is on the host."""
    if (array := host_array(tensor)) is not None:
        return array.reshape(-1, array.shape[-1])[::every]
    return tensor.detach().flatten(0, -2)[::every]


def _log_z(rows: Rows) -> Numbers:
    """The sum of log Σ exp over the rows, and the number of rows that are probabilities."""
    if isinstance(rows, np.ndarray):
        rows = rows.astype(np.float32, copy=False)
        with np.errstate(all="ignore"):
            highest = rows.max(-1, keepdims=True)
            highest[~np.isfinite(highest)] = 0.0
            log_z = np.log(np.exp(rows - highest).sum(-1)) + highest[:, 0]
            sums_to_one = np.abs(rows.sum(-1) - 1) < _SUM_ERROR
            num_probabilities = np.count_nonzero((rows[sums_to_one] >= 0).all(-1))
        return np.array([log_z.sum(dtype=np.float64), num_probabilities])
    rows = rows.float()
    to_one = (rows.sum(-1) - 1).abs() < _SUM_ERROR
    precise = wide(rows.device)
    return torch.stack([
        rows.logsumexp(-1).sum(dtype=precise), (to_one & (rows >= 0).all(-1)).sum(dtype=precise)
    ])  # fmt: skip


def _shift(rows: Rows) -> Numbers:
    """Over the rows of the gradient: Σ (row sum)², Σ (values)², and the numbers with one value below and above 0."""
    if isinstance(rows, np.ndarray):
        rows = rows.astype(np.float64, copy=False)
        with np.errstate(all="ignore"):
            sides = (np.count_nonzero(np.count_nonzero(side, -1) == 1) for side in (rows < 0, rows > 0))
            return np.array([np.square(rows.sum(-1)).sum(), np.square(rows).sum(), *sides])
    precise = rows.to(wide(rows.device))
    num_targets, num_reversed = ((side.sum(-1) == 1).sum(dtype=precise.dtype) for side in (precise < 0, precise > 0))
    return torch.stack([precise.sum(-1).square().sum(), precise.square().sum(), num_targets, num_reversed])
