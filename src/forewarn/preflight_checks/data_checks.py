"""Checks of the batches themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from forewarn.preflight_checks.convention import Batches, classes_of, inputs_of, targets_of
from forewarn.preflight_checks.result import PreflightCheck, State
from forewarn.types import figure

MOST_VALUES = 4096
"""Maximum number of values compared per sample, evenly spaced."""
RICH = 8
"""Minimum number of values per sample for which equal samples are no coincidence."""
MOST_DUPLICATES = 0.5
"""Largest share of the samples of a batch that may repeat others: samplers with replacement stay below it."""


def check_batches(data: Batches) -> PreflightCheck:
    """Whether batches and the samples in them differ."""
    name = "batches differ"
    inputs = [tensor.detach() for batch in data.batches if (tensor := inputs_of(batch)) is not None]
    if not inputs:
        return PreflightCheck(name, State.UNKNOWN, "the batch holds no tensor of inputs")
    first = inputs[0]
    broken = sum(int((~torch.isfinite(tensor)).sum()) for tensor in inputs if tensor.is_floating_point())
    if broken:
        return PreflightCheck(
            name, State.FAIL, f"NaN or infinite values in the inputs: {broken}",
            "Remove or replace them: one such value makes the loss NaN", {"nonfinite": float(broken)},
        )  # fmt: skip
    size, distinct = len(first), _num_distinct(first)
    if size > 1 and distinct == 1:
        what = "all inputs are the same value" if bool((first == first.flatten()[0]).all()) else "all samples are equal"
        return PreflightCheck(
            name, State.FAIL, f"{what}, in a batch of {size}", "Look at what the data set returns", {"distinct": 1.0}
        )
    values = first[0].numel() if first.dim() > 1 else 1
    repeated = 1 - distinct / size
    if repeated > MOST_DUPLICATES and values >= RICH:
        return PreflightCheck(
            name, State.LOOK, f"{size - distinct} of {size} samples repeat others", "Look at what the data set returns",
            {"distinct": float(distinct)},
        )  # fmt: skip
    same = sum(_is_same(data.batches[0], batch) for batch in data.batches[1:])
    if same and same == len(data.batches) - 1:
        return PreflightCheck(
            name, State.LOOK, f"all {same + 1} batches are the same",
            "Make sure that the loader shuffles, unless every step is to see all data",
        )  # fmt: skip
    lone = classes_of(targets_of(data.batches[0]))
    if lone is not None and lone.numel() > RICH and len(torch.unique(lone)) == 1:
        return PreflightCheck(
            name, State.LOOK, f"all targets of a batch are {int(lone.flatten()[0])}",
            "Shuffle the data: each batch should hold many classes",
        )  # fmt: skip
    many = f"{len(data.batches)} batches of " if len(data.batches) > 1 else "a batch of "
    return PreflightCheck(name, State.PASS, f"{many}{size}, {_share_words(distinct, size)}")


def input_words(data: Batches) -> str:
    """Mean, standard deviation and range of the inputs; empty if they are whole numbers or absent."""
    tensor = inputs_of(data.batches[0])
    if tensor is None:
        return ""
    if not tensor.is_floating_point():
        return f"whole numbers from {int(tensor.min())} to {int(tensor.max())}"
    values = tensor.detach().flatten().double()
    spread = figure(float(values.std(correction=0)))
    extent = f"from {figure(float(values.min()))} to {figure(float(values.max()))}"
    return f"mean {figure(float(values.mean()))}, standard deviation {spread}, {extent}"


def _share_words(distinct: int, size: int) -> str:
    return "all samples different" if distinct == size else f"{distinct} of its samples different"


def _num_distinct(tensor: Tensor) -> int:
    """Number of different samples."""
    rows = tensor.reshape(len(tensor), -1)
    return len(torch.unique(rows[:, :: -(-rows.shape[1] // MOST_VALUES)], dim=0))


def _is_same(batch: object, other: object) -> bool:
    pairs = ((inputs_of(batch), inputs_of(other)), (targets_of(batch), targets_of(other)))
    return all((one is None and two is None) or _is_equal(one, two) for one, two in pairs)


def _is_equal(one: Tensor | None, two: Tensor | None) -> bool:
    return one is not None and two is not None and one.shape == two.shape and torch.equal(one, two)
