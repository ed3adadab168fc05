"""The first forward pass: its loss, the model's output, and whether the two fit the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.preflight_checks.convention import (
    ConventionError,
    classes_of,
    output_tensor,
    rows_of,
    targets_of,
)
from forewarn.preflight_checks.result import PreflightCheck, State
from forewarn.preflight_checks.twin import LossFunction, Twin, leaves
from forewarn.types import figure

IGNORED = -100
"""The target that torch's losses ignore by default."""
MATCH = 0.01
"""Largest relative difference between the loss and the cross-entropy of the output for the two to be the same."""
START_FACTOR, START_EXCESS = 1.5, 0.7
"""How far above ln(classes) a first loss may lie: as a factor, and in nats. Small models with the initialization of
torch started at 0.97 to 1.05 times ln(classes); a tied embedding of N(0, 1) at 12 times, weights × 10 at 62 times."""


@dataclass(frozen=True, slots=True)
class FirstPass:
    """What the first forward pass showed."""

    loss: float = math.nan
    error: str = ""
    """Why there is no loss."""
    is_connected: bool = False
    """Whether the loss has a graph that reaches a parameter of the model."""
    num_outputs: int = 0
    """Number of classes that the model can name; 0 if its output does not fit integer targets."""
    is_cross_entropy: bool = False
    """Whether the loss is the plain cross-entropy of the output and the targets."""
    labels: tuple[int, int] | None = None
    """The lowest and highest class in the targets."""
    num_labels: int = 0
    """Number of different classes in the targets."""
    entropy: float = math.nan
    """Of the classes in the targets, in nats: the loss of the best model that ignores its inputs."""

    @property
    def is_out_of_range(self) -> bool:
        if self.labels is None or self.num_outputs < 2:
            return False
        return self.labels[0] < 0 or self.labels[1] >= self.num_outputs


def first_pass(twin: Twin, function: LossFunction, batch: Any, originals: set[int]) -> FirstPass:
    """Run one forward pass; `originals` are the ids of the parameters of the user's model."""
    outputs: list[Any] = []
    targets = classes_of(targets_of(batch))
    labels = None if targets is None else targets[targets != IGNORED]

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)
        if twin.device.type == "cuda" and _described(outputs, labels, targets).is_out_of_range:
            raise IndexError("a target is out of range")  # before the loss: an assertion on the device ends the process

    handles = [] if not isinstance(twin.model, nn.Module) else [twin.model.register_forward_hook(keep)]
    try:
        loss = twin.loss(function, batch)
    except ConventionError:
        raise
    except Exception as error:
        return _described(outputs, labels, targets, error=error_words(error))
    finally:
        for handle in handles:
            handle.remove()
    reached = {id(leaf) for leaf in leaves(loss)}
    own = {id(parameter) for parameter in twin.root.parameters()}
    if reached & originals:
        raise ConventionError(
            "the loss uses your own model instead of the copy: the loss function must call the model that is its first "
            "argument, and the model must not hold a function that was made for another"
        )
    return _described(outputs, labels, targets, loss=float(loss.detach()), is_connected=bool(reached & own))


def error_words(error: Exception) -> str:
    """An error of the user's model in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def _described(outputs: list[Any], labels: Tensor | None, targets: Tensor | None, **facts: Any) -> FirstPass:
    if labels is None or targets is None or not len(labels):
        return FirstPass(**facts)
    counts = torch.unique(labels, return_counts=True)[1].double()
    shares = counts / counts.sum()
    facts |= {
        "labels": (int(labels.min()), int(labels.max())),
        "num_labels": len(counts),
        "entropy": float(-(shares * shares.log()).sum()),
    }
    logits = next((tensor for output in reversed(outputs) if (tensor := output_tensor(output)) is not None), None)
    rows = None if logits is None else rows_of(logits.detach(), targets)
    if rows is None:
        return FirstPass(**facts)
    described = FirstPass(**facts, num_outputs=rows.shape[-1])
    if described.num_outputs < 2 or described.is_out_of_range or not math.isfinite(described.loss):
        return described
    is_plain = any(_is_near(described.loss, value) for value in _cross_entropies(rows.float(), targets.to(rows.device)))
    return FirstPass(**facts, num_outputs=rows.shape[-1], is_cross_entropy=is_plain)


def _cross_entropies(rows: Tensor, targets: Tensor) -> list[float]:
    """The cross-entropy with the targets, and with those of the next position, as language models use it."""
    pairs = [(rows, targets)]
    if targets.dim() == 2 and targets.shape[1] > 1:
        pairs.append((rows[:, :-1], targets[:, 1:]))
    return [float(functional.cross_entropy(scores.flatten(0, -2), truth.flatten())) for scores, truth in pairs]


def _is_near(value: float, other: float) -> bool:
    return abs(value - other) <= MATCH * max(abs(value), abs(other))


def check_step(seen: FirstPass) -> PreflightCheck | None:
    """Whether a forward pass gives a loss that can be trained on; None if it does."""
    name = "a step runs"
    if seen.error:
        return PreflightCheck(name, State.FAIL, seen.error)
    if not math.isfinite(seen.loss):
        return PreflightCheck(
            name,
            State.FAIL,
            f"the first loss is {figure(seen.loss)}",
            "Look for NaN in the inputs and log(0) in the loss",
        )
    if not seen.is_connected:
        return PreflightCheck(
            name, State.FAIL, "the loss does not depend on any trainable parameter of the model",
            "Look for detach(), no_grad(), .item() or numpy between the model and the loss",
        )  # fmt: skip
    return None


def check_labels(seen: FirstPass) -> PreflightCheck:
    """Whether the model can name every class in the targets."""
    name = "labels in range"
    if seen.labels is None:
        return PreflightCheck(name, State.UNKNOWN, "the batch has no integer targets")
    low, high = seen.labels
    numbers = {"lowest": float(low), "highest": float(high), "outputs": float(seen.num_outputs)}
    if seen.num_outputs < 2:
        return PreflightCheck(
            name, State.UNKNOWN, f"{low} to {high}; the model's output does not show its classes", "", numbers
        )
    if seen.is_out_of_range:
        return PreflightCheck(
            name, State.FAIL, f"{low} to {high}, but the {seen.num_outputs} outputs are 0 to {seen.num_outputs - 1}",
            f"Give the last layer {high + 1} outputs, or number the classes from 0", numbers,
        )  # fmt: skip
    detail = f"{low} to {high}, for {seen.num_outputs} outputs"
    return PreflightCheck(name, State.PASS, detail, "", numbers)


def check_start(seen: FirstPass) -> PreflightCheck:
    """Whether the first loss is that of a model that knows nothing yet."""
    name = "loss at the start"
    if not math.isfinite(seen.loss):
        return PreflightCheck(name, State.UNKNOWN, "there is no loss")
    if not seen.is_cross_entropy:
        return PreflightCheck(
            name, State.INFO, f"{figure(seen.loss)}; no plain cross-entropy, so nothing to compare it with", "",
            {"loss": seen.loss},
        )  # fmt: skip
    expected = math.log(seen.num_outputs)
    numbers = {"loss": seen.loss, "expected": expected}
    against = f"ln({seen.num_outputs}) = {figure(expected)}"
    if seen.loss > START_FACTOR * expected and seen.loss > expected + START_EXCESS:
        return PreflightCheck(
            name, State.LOOK, f"{figure(seen.loss)}, far above {against}",
            "Make the initial weights of the last layer smaller: the model begins by being sure and wrong", numbers,
        )  # fmt: skip
    where = "below" if seen.loss < expected / START_FACTOR else "near"
    remark = ": the model knows something already" if where == "below" else ""
    return PreflightCheck(name, State.PASS, f"{figure(seen.loss)}, {where} {against}{remark}", "", numbers)
