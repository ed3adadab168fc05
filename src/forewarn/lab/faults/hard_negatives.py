"""Healthy runs that look odd: whatever a rule says about them is a false warning."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.lab.faults.change import Change, Draw
from forewarn.lab.faults.injected.batches import MixedUp
from forewarn.lab.faults.injected.rates import Clipped, LrStep, Scaled, Set
from forewarn.lab.faults.injected.wiring import LossChanged, layers
from forewarn.lab.faults.session import Session
from forewarn.lab.faults.workload import Trait, Workload


@dataclass(frozen=True, slots=True)
class HardNegative:
    """A change that is no fault."""

    name: str
    make: Callable[[Draw], Change]
    summary: str
    needs: frozenset[Trait]
    unlike: frozenset[Trait]
    """What a workload must not have, or the change would be a fault there."""

    def fits(self, workload: Workload) -> bool:
        return self.needs <= workload.traits and not self.unlike & workload.traits


HARD_NEGATIVES: dict[str, HardNegative] = {}


def hard_negative(
    name: str, *, needs: set[Trait] | None = None, unlike: set[Trait] | None = None
) -> Callable[[Callable[[Draw], Change]], HardNegative]:
    def declare(make: Callable[[Draw], Change]) -> HardNegative:
        summary = (make.__doc__ or "").partition("\n")[0]
        HARD_NEGATIVES[name] = HardNegative(name, make, summary, frozenset(needs or ()), frozenset(unlike or ()))
        return HARD_NEGATIVES[name]

    return declare


class Shaped(Change):
    """Multiplies the learning rate by a function of the progress of the run."""

    def __init__(self, shape: Callable[[float], float]) -> None:
        self.shape = shape
        self._now = 1.0

    def watched(self, session: Session) -> None:
        self._scale(session, 0.0)

    def completed(self, step: int, session: Session) -> None:
        self._scale(session, (step + 1) / session.num_steps)

    def _scale(self, session: Session, progress: float) -> None:
        wanted = max(self.shape(progress), 1e-6)
        session.scale_lr(wanted / self._now)
        self._now = wanted


@hard_negative("long-warm-up")
def long_warm_up(draw: Draw) -> Change:
    """The learning rate rises for a tenth to a fifth of the run."""
    share = draw.between(0.1, 0.2)
    return Shaped(lambda progress: min(1.0, 0.01 + progress / share))


@hard_negative("cosine-to-zero")
def cosine_to_zero(draw: Draw) -> Change:
    """The learning rate ends at zero."""
    return Shaped(lambda progress: 0.5 * (1 + math.cos(math.pi * progress)))


@hard_negative("warm-restarts")
def warm_restarts(draw: Draw) -> Change:
    """The learning rate falls and starts again at its peak, two or three times (SGDR)."""
    cycles = round(draw.between(2, 3))
    return Shaped(lambda progress: 0.05 + 0.475 * (1 + math.cos(math.pi * (cycles * progress % 1.0))))


@hard_negative("frozen-on-purpose", unlike={Trait.PLAYERS, Trait.REINFORCEMENT})
def frozen_on_purpose(draw: Draw) -> Change:
    """The first layer is frozen before the run, as in fine-tuning."""

    class FirstLayer(Change):
        def model(self, model: nn.Module) -> None:
            layers(model)[0][1].requires_grad_(False)

    return FirstLayer()


@hard_negative("always-clipped", needs={Trait.ADAM})
def always_clipped(draw: Draw) -> Change:
    """Gradients are clipped on every step, to a few times less than their norm; Adam does not mind."""

    class BelowUsual(Clipped):
        def optimizer(self, optimizer: Optimizer, model: nn.Module, session: Session) -> None:
            share = draw.between(0.3, 0.7)

            def clip(optimizer: Optimizer, *_: Any) -> None:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                norm = torch.nn.utils.get_total_norm(gradients)
                if self.max_norm == 0.0 and math.isfinite(norm):
                    self.max_norm = share * float(norm)
                torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)

            optimizer.register_step_pre_hook(clip)

    return BelowUsual(0.0)


@hard_negative("noisy-labels", needs={Trait.TARGETS, Trait.CLASSES})
def noisy_labels(draw: Draw) -> Change:
    """Some labels are wrong from the start, as in real data."""

    class Some(MixedUp):
        share = draw.between(0.1, 0.25)

        def corrupt(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            _, shuffled = super().corrupt(step, inputs, targets)
            wrong = torch.rand(targets.shape, generator=self._generator) < self.share
            return inputs, torch.where(wrong, shuffled, targets)

    return Some(draw, 0)


@hard_negative("near-zero-loss", needs={Trait.FLOATS, Trait.CLASSES})
def near_zero_loss(draw: Draw) -> Change:
    """The inputs give the answer away, so that the loss falls to almost zero."""
    seed = draw.seed

    class Hinted(Change):
        def batch(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            hints = torch.randn(16, *inputs.shape[1:], generator=torch.Generator().manual_seed(seed))
            return inputs + 3 * hints[targets], targets

    return Hinted()


@hard_negative("tiny-batches", unlike={Trait.BATCH_NORM, Trait.PLAYERS, Trait.REINFORCEMENT, Trait.FULL_BATCH})
def tiny_batches(draw: Draw) -> Change:
    """Batches of four samples, with a learning rate to match."""

    class Tiny(Change):
        def number(self, name: str, value: float) -> float:
            return 4 if name == "batch_size" else 0.3 * value if name == "lr" else value

    return Tiny()


@hard_negative("pauses")
def pauses(draw: Draw) -> Change:
    """The run pauses for evaluation and checkpoints, and is resumed once from a complete checkpoint."""

    class Pauses(Change):
        onset = draw.onset()

        def completed(self, step: int, session: Session) -> None:
            if step % 50 == 49:
                time.sleep(0.05)
            if step == self.onset:
                session.resume()

    return Pauses()


@hard_negative("summed-loss", unlike={Trait.PLAYERS, Trait.REINFORCEMENT, Trait.WEIGHT_DECAY, Trait.TASKS},
               needs={Trait.ADAM})  # fmt: skip
def summed_loss(draw: Draw) -> Change:
    """The loss is a sum over thousands of elements instead of a mean; Adam does not mind."""
    factor = draw.magnitude(500, 5000)
    return LossChanged(lambda loss: factor * loss)


@hard_negative("negative-loss", unlike={Trait.PLAYERS, Trait.REINFORCEMENT})
def negative_loss(draw: Draw) -> Change:
    """The loss has a constant that makes it negative, as a log likelihood of densities does."""
    constant = draw.between(3, 30)
    return LossChanged(lambda loss: loss - constant)


@hard_negative("rising-by-design", needs={Trait.ANNEALED})
def rising_by_design(draw: Draw) -> Change:
    """The weight of the divergence rises over most of the run, and the loss with it."""
    return Set("annealing", draw.between(150, 240))


@hard_negative("harder-data", needs={Trait.FLOATS, Trait.CLASSES}, unlike={Trait.REINFORCEMENT})
def harder_data(draw: Draw) -> Change:
    """A curriculum: noise is added to the inputs step by step, so the loss may rise."""
    generator = torch.Generator().manual_seed(draw.seed)
    most = draw.between(0.5, 1.0)

    class Harder(Change):
        def batch(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            noise = most * step / draw.num_steps * torch.randn(inputs.shape, generator=generator)
            return inputs + noise, targets

    return Harder()


@hard_negative("small-rate-drop")
def small_rate_drop(draw: Draw) -> Change:
    """The learning rate drops to a tenth during the run, as a step schedule does."""
    return LrStep(draw.onset(), 0.1)


@hard_negative("sparse-weights", unlike={Trait.PLAYERS, Trait.REINFORCEMENT})
def sparse_weights(draw: Draw) -> Change:
    """Half of the weights of every layer are pruned and kept at zero."""
    share = draw.between(0.3, 0.6)
    seed = draw.seed

    class Pruned(Change):
        def model(self, model: nn.Module) -> None:
            generator = torch.Generator().manual_seed(seed)
            weights = [module.get_parameter("weight") for _, module in layers(model) if hasattr(module, "weight")]
            self.masks = [(weight, torch.rand(weight.shape, generator=generator) > share) for weight in weights]
            self._prune()

        def completed(self, step: int, session: Session) -> None:
            self._prune()

        @torch.no_grad()
        def _prune(self) -> None:
            for weight, mask in self.masks:
                weight.mul_(mask)

    return Pruned()


@hard_negative("sparse-embedding", needs={Trait.TOKENS})
def sparse_embedding(draw: Draw) -> Change:
    """The embedding has many rows that no batch ever uses."""

    class Wide(Change):
        def number(self, name: str, value: float) -> float:
            return value + 400 if name == "num_symbols" else value

    return Wide()


@hard_negative("validation-below-training", needs={Trait.EPOCHS, Trait.FLOATS})
def validation_below_training(draw: Draw) -> Change:
    """Training inputs are masked as augmentation, so that the validation loss lies below the training loss."""
    generator = torch.Generator().manual_seed(draw.seed)

    class Masked(Change):
        def batch(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return inputs * (torch.rand(inputs.shape, generator=generator) > 0.3), targets

    return Masked()


@hard_negative("more-samples", needs={Trait.EPOCHS})
def more_samples(draw: Draw) -> Change:
    """A training set that one epoch hardly covers."""
    return Scaled("num_samples", 3)
