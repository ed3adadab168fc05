"""Faults in the data: single batches, labels, order and scale.

An alert that marks the step of a bad batch counts as naming it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forewarn.lab.faults.change import Change, Draw
from forewarn.lab.faults.fault import fault
from forewarn.lab.faults.injected.rates import Set
from forewarn.lab.faults.workload import Trait


class Corrupted(Change):
    """Changes inputs or targets of training batches from a step on, each with a chance."""

    def __init__(self, draw: Draw, onset: int, chance: float = 1.0) -> None:
        self.onset, self.chance = onset, chance
        self._generator = torch.Generator().manual_seed(draw.seed)

    def batch(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        is_hit = step >= self.onset and float(torch.rand((), generator=self._generator)) < self.chance
        return self.corrupt(step, inputs, targets) if is_hit else (inputs, targets)

    def corrupt(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def permutation(self, num: int) -> Tensor:
        return torch.randperm(num, generator=self._generator)


class NanOnce(Corrupted):
    def corrupt(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if step != self.onset:
            return inputs, targets
        inputs = inputs.clone()
        inputs.view(-1)[0] = float("nan")
        return inputs, targets


class Noise(Corrupted):
    def corrupt(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not inputs.is_floating_point():
            shuffled = inputs.flatten()[self.permutation(inputs.numel())]
            return shuffled.view_as(inputs), targets
        return 30 * torch.randn(inputs.shape, generator=self._generator), targets


class MixedUp(Corrupted):
    def corrupt(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        shuffled = targets.flatten()[self.permutation(targets.numel())]
        return inputs, shuffled.view_as(targets)


class Misaligned(Change):
    def batch(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, targets.roll(1, 0)


class Repeated(Change):
    def __init__(self, onset: int) -> None:
        self.onset = onset
        self._kept: tuple[Tensor, Tensor] | None = None

    def batch(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if step < self.onset:
            return inputs, targets
        if self._kept is None or self._kept[0].shape != inputs.shape:
            self._kept = (inputs.clone(), targets.clone())
        return self._kept


class Sorted(Change):
    def order(self, order: Tensor, labels: Tensor) -> Tensor:
        return order[labels[order].argsort(stable=True)]


class FewSamples(Change):
    """Repeats the first samples, so that epochs stay as long as they are."""

    def __init__(self, num: int) -> None:
        self.num = num

    def order(self, order: Tensor, labels: Tensor) -> Tensor:
        return order % self.num


class Unnormalized(Change):
    """Inputs as bytes: from 0 to 255 instead of around zero."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def pipeline(self, inputs: Tensor) -> Tensor:
        return self.factor * (inputs + 1) if inputs.is_floating_point() else inputs


@fault("nan-batch", causes="L101 G101", words="(batch|input).*(NaN|finite)|(NaN|finite).*(batch|input)",
       fixes="skip_batch inspect_batch find_operation roll_back", needs={Trait.FLOATS}, is_dynamic=True,
       is_instant=True)  # fmt: skip
def nan_batch(draw: Draw) -> Change:
    """One batch contains a NaN."""
    return NanOnce(draw, draw.onset())


@fault("corrupt-batches", causes="L102 G104", words="batch|input|the data", needs={Trait.TARGETS}, is_dynamic=True,
       is_instant=True, fixes="skip_batch inspect_batch clip_gradient inspect_data")  # fmt: skip
def corrupt_batches(draw: Draw) -> Change:
    """Some batches hold noise instead of inputs."""
    return Noise(draw, draw.onset(), draw.between(0.1, 0.4))


@fault("label-noise-onset", words="label|target|the data", fixes="inspect_labels inspect_batch inspect_data roll_back",
       needs={Trait.TARGETS}, is_dynamic=True, is_instant=True)  # fmt: skip
def label_noise_onset(draw: Draw) -> Change:
    """Labels are shuffled from some step on."""
    return MixedUp(draw, draw.onset())


@fault("label-misalignment", words="label|target", fixes="inspect_labels overfit_one_batch inspect_data",
       needs={Trait.TARGETS})  # fmt: skip
def label_misalignment(draw: Draw) -> Change:
    """Each sample has the label of its neighbour in the batch."""
    return Misaligned()


@fault("repeated-batch", words="same batch|repeat|identical batch", fixes="inspect_data shuffle_data",
       needs={Trait.TARGETS}, unlike={Trait.FULL_BATCH}, is_dynamic=True)  # fmt: skip
def repeated_batch(draw: Draw) -> Change:
    """The loader returns one batch again and again."""
    return Repeated(draw.onset())


@fault(
    "class-sorted-data",
    words="sorted|shuffl|(one|single) class|label entropy",
    fixes="shuffle_data",
    needs={Trait.ORDER},
)
def class_sorted_data(draw: Draw) -> Change:
    """Samples come sorted by class."""
    return Sorted()


@fault("unnormalized-inputs", words="input", fixes="shrink_inputs normalize_inputs check_inputs", needs={Trait.FLOATS})
def unnormalized_inputs(draw: Draw) -> Change:
    """Inputs go from 0 to 255 instead of lying around zero."""
    return Unnormalized(draw.between(60, 130))


@fault("overfitting", causes="E101 E104", words="overfit|memori", needs={Trait.EPOCHS},
       fixes="stop_early raise_weight_decay raise_dropout add_data")  # fmt: skip
def overfitting(draw: Draw) -> Change:
    """The training set has only 40 to 80 different samples, which are learned by heart."""
    return FewSamples(round(draw.between(40, 80)))


@fault("label-smoothing-one", words="smoothing|label|target|uniform",
       fixes="lower_smoothing check_objective inspect_labels",        needs={Trait.SMOOTHING})  # fmt: skip
def label_smoothing_one(draw: Draw) -> Change:
    """Label smoothing of 1: every class is equally right."""
    return Set("label_smoothing", 1.0)
