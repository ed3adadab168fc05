"""What a tensor holds, in a few numbers; and what is wrong with the samples of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forewarn.codec import Noun
from forewarn.measure.engine.portable import dense_values
from forewarn.measure.nested import nested_tensors

_MOST_SAMPLES = 5
"""Maximum number of samples that are named."""
_FAR = 1000.0
"""A sample is out of scale if its largest value is this many times that of the median sample."""
_LEAST_SAMPLES = 4
LABELS = ("labels", "label", "targets", "target", "y")
"""Arguments that hold labels, by name."""
IGNORED = -100
"""The label that torch's losses ignore by default."""


@dataclass(frozen=True, slots=True)
class TensorFacts(Noun):
    """One tensor in numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_nan: int = 0
    num_inf: int = 0
    """Number of values that are ∞."""
    num_minus_inf: int = 0
    low: float = math.nan
    """The least finite value; NaN if there is none."""
    high: float = math.nan
    rms: float = math.nan
    """The root of the mean square of the finite values."""
    is_mask: bool = False
    """Whether it holds only 0 and -∞, as what is added to attention scores."""

    @property
    def abs_max(self) -> float:
        return max(abs(self.low), abs(self.high))

    @property
    def is_finite(self) -> bool:
        return self.is_mask or not (self.num_nan or self.num_inf or self.num_minus_inf)

    @property
    def may_be_masked(self) -> bool:
        """Whether all that is not finite is -∞, as before a softmax."""
        return not (self.num_nan or self.num_inf)


def facts(tensor: Tensor, name: str = "") -> TensorFacts:
    """A tensor in numbers."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    values = dense_values(tensor).flatten()
    if not values.numel():
        return TensorFacts(name, dtype, shape)
    if not values.is_floating_point():
        whole = values.to(torch.float64)
        return TensorFacts(name, dtype, shape, low=float(whole.min()), high=float(whole.max()), rms=_rms(whole))
    values = values.to(torch.float32) if values.itemsize < 4 else values
    finite = values[values.isfinite()]
    nan, inf, minus_inf = int(values.isnan().sum()), int(values.isposinf().sum()), int(values.isneginf().sum())
    if not finite.numel():
        return TensorFacts(name, dtype, shape, nan, inf, minus_inf)
    low, high = float(finite.min()), float(finite.max())
    is_mask = bool(minus_inf and not nan and not inf and low == high == 0)
    return TensorFacts(name, dtype, shape, nan, inf, minus_inf, low, high, _rms(finite), is_mask)


def _rms(values: Tensor) -> float:
    return float(values.to(torch.float64).square().mean().sqrt())


def named_facts(value: Any, name: str) -> list[TensorFacts]:
    """Every tensor in a nested value in numbers, by its path: `x`, `batch[mask]`."""
    return [facts(tensor, f"{name}{path}") for path, tensor in nested_tensors(value) if not tensor.is_meta]


@dataclass(frozen=True, slots=True)
class BatchFault(Noun):
    """Something wrong with a tensor of the batch itself."""

    name: str
    kind: str
    """`non_finite`, `out_of_scale`, `label_out_of_range` or `index_out_of_range`."""
    samples: tuple[int, ...]
    """The first samples that have it."""
    num_samples: int
    words: str

    @property
    def is_certain(self) -> bool:
        """Whether it alone explains what follows; a large sample may be meant to be large."""
        return self.kind != "out_of_scale"


def batch_faults(value: Any, name: str) -> Iterator[BatchFault]:
    """What is wrong with the tensors of a nested value, whatever the model does with them."""
    for path, tensor in nested_tensors(value):
        if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            continue
        fault = _fault_of(tensor.detach(), f"{name}{path}")
        if fault is not None:
            yield fault


def _fault_of(tensor: Tensor, name: str) -> BatchFault | None:
    about = facts(tensor, name)
    rows = tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    if not about.is_finite:
        wrong = (~rows.isfinite()).any(1).nonzero().flatten().tolist()
        what = "NaN" if about.num_nan else "∞" if about.num_inf else "-∞"
        return BatchFault(
            name, "non_finite", tuple(wrong[:_MOST_SAMPLES]), len(wrong),
            f"{what} already in {_in_words(name)}, {_samples(wrong)}",
        )  # fmt: skip
    if about.is_mask or len(rows) < _LEAST_SAMPLES or rows.shape[1] < 2:
        return None
    largest = rows.abs().to(torch.float32).amax(1)
    median = float(largest.median())
    wrong = (largest > _FAR * median).nonzero().flatten().tolist() if median > 0 else []
    if not wrong:
        return None
    times = float(largest.max()) / median
    return BatchFault(
        name, "out_of_scale", tuple(wrong[:_MOST_SAMPLES]), len(wrong),
        f"{_samples(wrong)} of {name} is {times:.3g} times as large as the median sample",
    )  # fmt: skip


def label_fault(labels: Tensor, name: str, outputs: Tensor) -> BatchFault | None:
    """The labels that are no class of an output of logits, if the output has one row of logits per label."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool or not labels.numel():
        return None
    num_classes = _num_classes(labels, outputs)
    if num_classes is None:
        return None
    what = f"is none of the {num_classes} classes (0 to {num_classes - 1})"
    is_wrong = (labels != IGNORED) & ((labels < 0) | (labels >= num_classes))
    return _out_of_range(labels, name, is_wrong, "label", f"in {name}", what)


def index_fault(indices: Tensor, name: str, size: int, module: str) -> BatchFault | None:
    """The indices that are outside a module's table of a size."""
    what = f"is outside the table of {module} (0 to {size - 1})"
    return _out_of_range(indices, name, (indices < 0) | (indices >= size), "index", f"in {_in_words(name)}", what)


def _out_of_range(values: Tensor, name: str, is_wrong: Tensor, kind: str, place: str, what: str) -> BatchFault | None:
    wrong = is_wrong.reshape(len(values), -1).any(1).nonzero().flatten().tolist() if values.dim() else []
    if not wrong:
        return None
    first = int(values[is_wrong].flatten()[0])
    return BatchFault(
        name, f"{kind}_out_of_range", tuple(wrong[:_MOST_SAMPLES]), len(wrong),
        f"{kind} {first} {place}, {_samples(wrong)}, {what}",
    )  # fmt: skip


def _num_classes(labels: Tensor, outputs: Tensor) -> int | None:
    """The classes of logits [samples × classes × …] or [… × classes]; None if these are no logits of such labels."""
    shape = tuple(outputs.shape)
    if not outputs.is_floating_point() or len(shape) < 2:
        return None
    if (shape[0], *shape[2:]) == tuple(labels.shape):
        return shape[1]
    if math.prod(shape[:-1]) == labels.numel():
        return shape[-1]
    return None


def _in_words(name: str) -> str:
    return "the input" if name in ("input", "inputs") else f"the {name}" if name in LABELS else f"the input {name}"


def _samples(samples: list[int]) -> str:
    named = ", ".join(map(str, samples[:_MOST_SAMPLES]))
    rest = len(samples) - _MOST_SAMPLES
    return f"sample{'s' if len(samples) > 1 else ''} {named}" + (f" and {rest} more" if rest > 0 else "")
