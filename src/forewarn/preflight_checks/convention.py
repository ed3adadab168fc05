"""How a training loop gets from a batch to its loss, and where its batches come from."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from forewarn.measure.probes.logits import output_logits
from forewarn.preflight_checks.twin import LossFunction, Twin, own_copy

TARGET_NAMES = ("labels", "label", "targets", "target", "y")
"""What people call the targets: keys of a batch, arguments of `forward`."""

_WHAT_TO_PASS = (
    "pass loss=..., a function of (model, batch) that returns the loss, such as "
    "loss=lambda model, batch: functional.mse_loss(model(batch[0]), batch[1])"
)


class ConventionError(TypeError):
    """The arguments do not say how a loss is computed."""


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches that the checks use."""

    batches: tuple[Any, ...]
    is_single: bool
    """Whether one batch was passed, so that nothing can be said about others."""
    seconds: tuple[float, ...] = ()
    """How long each took to load; empty if they were given."""


def first_batches(data: Any, most: int, clock: Callable[[], float]) -> Batches:
    """Up to `most` batches from a loader, a list of batches or a function that makes them, or the one batch given."""
    if _is_batch(data):
        return Batches((data,), is_single=True)
    if isinstance(data, Iterator):
        raise ConventionError(
            "data is an iterator, and what preflight reads from it would be missing in your training; pass the loader "
            "itself, or a list of batches"
        )
    if isinstance(data, Sequence) or hasattr(data, "__iter__"):
        # A copy, since a loader with persistent workers keeps its first iterator.
        source: Iterator[Any] = iter(copy.copy(data) if isinstance(data, DataLoader) else data)
    elif callable(data):
        source = iter(data, object())
    else:
        raise ConventionError(
            f"data must be a batch, a loader, a list of batches or a function that returns one, not "
            f"{type(data).__name__}"
        )
    batches, seconds = [], []
    begin = clock()
    for batch in itertools.islice(source, most):
        seconds.append(clock() - begin)
        batches.append(batch)
        begin = clock()
    if not batches:
        raise ConventionError("data holds no batch")
    return Batches(tuple(batches), is_single=False, seconds=() if isinstance(data, Sequence) else tuple(seconds))


def _is_batch(data: Any) -> bool:
    """Tensors, mappings, tuples and lists of tensors; a list of anything else holds batches."""
    if isinstance(data, Tensor | Mapping | tuple):
        return True
    return isinstance(data, list) and any(isinstance(part, Tensor) for part in data)


def inputs_of(batch: Any) -> Tensor | None:
    """The first tensor of a batch: pixels, tokens or features."""
    if isinstance(batch, Mapping):
        parts = [value for name, value in batch.items() if name not in TARGET_NAMES and "mask" not in str(name)]
    else:
        parts = list(batch[:1]) if isinstance(batch, list | tuple) else [batch]
    return next((part for part in parts if isinstance(part, Tensor) and part.dim() and part.numel()), None)


def targets_of(batch: Any) -> Tensor | None:
    """The targets of a batch: the second of a pair, or what a mapping calls so."""
    if isinstance(batch, Mapping):
        targets = next((batch[name] for name in TARGET_NAMES if name in batch), None)
    else:
        targets = batch[1] if isinstance(batch, list | tuple) and len(batch) == 2 else None
    return targets if isinstance(targets, Tensor) else None


def classes_of(targets: Tensor | None) -> Tensor | None:
    """Targets that are numbers of classes; None if they are something else."""
    is_integer = targets is not None and not (targets.is_floating_point() or targets.is_complex())
    return targets.long() if targets is not None and is_integer and targets.dtype != torch.bool else None


def rows_of(logits: Tensor, targets: Tensor) -> Tensor | None:
    """Logits as [..., classes] over the shape of the targets; None if they do not fit together."""
    if logits.dim() < 2:
        return None
    if logits.shape[:-1] == targets.shape:
        return logits
    if logits.shape[:1] + logits.shape[2:] == targets.shape:
        return logits.movedim(1, -1)
    return None


def loss_function(twin: Twin, batch: Any, loss: Any) -> LossFunction:
    """The function of (model, batch) that returns the loss; raises ConventionError if it cannot be told.

    Without `loss`, the model is called once to see what it returns.
    """
    if isinstance(loss, nn.Module) or getattr(loss, "__module__", "") == "torch.nn.functional":
        return _with_criterion(loss)
    if loss is not None and not callable(loss):
        raise ConventionError(f"loss must be a function of (model, batch), not {type(loss).__name__}; {_WHAT_TO_PASS}")
    if loss is not None:
        return lambda model, given: _scalar(loss(model, given), "the loss function returned")
    if not isinstance(twin.model, nn.Module):
        raise ConventionError(f"with several models, {_WHAT_TO_PASS}")
    return _guessed(twin, batch)


def _guessed(twin: Twin, batch: Any) -> LossFunction:
    call = _call(twin.model, batch)
    try:
        with torch.no_grad():
            output = call(twin.model, own_copy(batch, twin.device))
    except TypeError as error:  # arguments that are missing or unknown
        raise ConventionError(
            f"the model cannot be called with {described(batch)}: {error}; {_WHAT_TO_PASS}"
        ) from error
    if loss_in(output) is not None:
        return lambda model, given: _scalar(call(model, given), "the model returned")
    classes, logits = classes_of(targets_of(batch)), output_tensor(output)
    if classes is not None and logits is not None and rows_of(logits, classes) is not None:

        def cross_entropy(model: Any, given: Any) -> Tensor:
            logits, targets = output_tensor(call(model, given)), classes_of(targets_of(given))
            rows = None if logits is None or targets is None else rows_of(logits, targets)
            if rows is None or targets is None:
                raise ConventionError(f"the targets do not fit the output in a batch of {described(given)}")
            return functional.cross_entropy(rows.flatten(0, -2), targets.flatten())

        return cross_entropy
    raise ConventionError(
        f"the loss cannot be told: the model returned {described(output)} for a batch of {described(batch)}; "
        f"{_WHAT_TO_PASS}"
    )


def _call(model: nn.Module, batch: Any) -> Callable[[Any, Any], Any]:
    """How the model is called with a batch."""
    if isinstance(batch, Mapping):
        return lambda model, given: model(**given)
    if isinstance(batch, list | tuple):
        names = list(inspect.signature(model.forward).parameters)
        takes_targets = len(batch) == 2 and len(names) > 1 and names[1].lower() in TARGET_NAMES
        return (lambda model, given: model(*given)) if takes_targets else (lambda model, given: model(given[0]))
    return lambda model, given: model(given)


def _with_criterion(criterion: Any) -> LossFunction:
    def loss(model: Any, batch: Any) -> Tensor:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise ConventionError(
                f"a loss on outputs and targets needs batches of (inputs, targets), not {described(batch)}; "
                f"{_WHAT_TO_PASS}"
            )
        return _scalar(criterion(model(batch[0]), batch[1]), "the loss function returned")

    return loss


def loss_in(output: Any) -> Tensor | None:
    """The loss in what a model or a loss function returned: named so, or the only scalar."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    parts = output if isinstance(output, list | tuple) else (output,)
    scalars = (part for part in (named, *parts) if isinstance(part, Tensor) and part.numel() == 1)
    return next((part for part in scalars if part.is_floating_point()), None)


def output_tensor(output: Any) -> Tensor | None:
    """The predictions in what a model returned."""
    if (logits := output_logits(output)) is not None:
        return logits
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    parts = output if isinstance(output, list | tuple) else (output,)
    return next((part for part in (named, *parts) if isinstance(part, Tensor) and part.dim() >= 2), None)


def _scalar(returned: Any, what: str) -> Tensor:
    loss = loss_in(returned)
    if loss is None:
        raise ConventionError(f"{what} {described(returned)}, and not one loss; {_WHAT_TO_PASS}")
    return loss.reshape(())


def described(value: Any) -> str:
    """What was given, for a message: `a tensor of shape [32, 10]`."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(str, value))}"
    return f"a {type(value).__name__}"
