"""Runs the step of a snapshot again and says where it goes wrong, and whether the batch itself is the cause."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forewarn.codec import Noun
from forewarn.measure.module_tree import Models, clean_name, unwrapped
from forewarn.measure.nested import nested_tensors
from forewarn.random_states import random_states_kept, restore_random_state
from forewarn.snapshots.reading import KeptCall, SavedSnapshot
from forewarn.snapshots.tensor_facts import LABELS, BatchFault, batch_faults, index_fault, label_fault
from forewarn.snapshots.tracing import Place, Trace, named_arguments
from forewarn.snapshots.writing import named_weights
from forewarn.store.snapshot_folders import SnapshotError

Loss = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Replay(Noun):
    """What came out when a step was run again."""

    step: int
    cause: str
    """What went wrong, in one sentence; empty if nothing was found."""
    batch: tuple[BatchFault, ...]
    places: tuple[Place, ...]
    """Where it first goes wrong: forwards, then backwards."""
    loss: float | None
    """None if the step could not be run up to the loss."""
    error: str
    """What a pass raised; empty if it did not."""
    notes: tuple[str, ...]
    """What was not done, or not as in the run, and why."""


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str, *, are_updated: bool) -> list[str]:
    """Copy weights into a model. If they `are_updated`, those that are not finite are left out: the update ruined them.

    Returns what to tell about it. Raises SnapshotError if they do not belong to this model.
    """
    renamed = {clean_name(name.removeprefix("module.")): tensor for name, tensor in weights.items()}
    own = dict(named_weights(model))
    missing = [name for name in own if name not in renamed]
    if own and len(missing) == len(own):
        raise SnapshotError(f"{source} holds no weight of this model; it has {_few(renamed)}, the model {_few(own)}")
    ruined, misfits = [], []
    with torch.no_grad():
        for name, tensor in own.items():
            if name not in renamed:
                continue
            value = renamed[name]
            if value.shape != tensor.shape:
                misfits.append(name)
            elif are_updated and not bool(value.isfinite().all()):
                ruined.append(name)
            else:
                tensor.copy_(value)
    notes = []
    if misfits:
        raise SnapshotError(f"{source} holds weights of another shape than the model's: {_few(misfits)}")
    if missing:
        notes.append(
            f"{len(missing)} of {len(own)} weights are not in {source}, so the model's own are used: {_few(missing)}"
        )
    if ruined:
        notes.append(
            f"{len(ruined)} of {len(own)} weights in {source} are not finite, because the update of the step has "
            f"already ruined them, so the model's own are used: {_few(ruined)}. Pass an earlier checkpoint as "
            '--weights, or keep them with Snapshots(weights="before")'
        )
    return notes


def replay(saved: SavedSnapshot, model: nn.Module | None, loss: Loss | None) -> Replay:
    """Run the step of a snapshot again; without a model, only the batch is looked at."""
    notes = list(saved.about.notes)
    faults = _faults(saved, model)
    if model is None or not saved.calls:
        if model is not None:
            notes.append("the step was not run: there is no batch of a forward pass")
        return Replay(saved.step, _cause(faults, [], ""), tuple(faults), (), None, "", tuple(notes))
    if saved.about.num_ranks > 1:
        notes.append(f"this is the batch of rank 0; the other {saved.about.num_ranks - 1} ranks had others")
    if any(call.is_changed for call in saved.calls):
        notes.append("the batch was changed in place after the pass had begun, so this pass differs")
    _set_modes(model, saved)
    trace = Trace(model)
    value: Tensor | None = None
    error = ""
    with trace.hooks(), random_states_kept(), torch.enable_grad():
        try:
            value = _loss_of(saved, model, loss, notes)
            if value is not None and value.requires_grad:
                value.backward()
        except SnapshotError:
            raise
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else ''}".rstrip(": ")
    faults += [fault for fault in _label_faults(saved, model, trace.last_output) if fault not in faults]
    if error and trace.running:
        faults += _index_faults(saved, model, trace.running[-1], trace.modules[trace.running[-1]], trace.last_input)
    number = None if value is None else float(value.detach())
    places = _places(trace, saved, number, error)
    if number is not None and saved.has_loss and math.isfinite(number) is not math.isfinite(saved.loss):
        notes.append(
            f"the loss is {number:.4g} here and was {saved.loss:.4g} in the run: the weights, the loss function or the "
            "precision are not the same"
        )
    cause = _cause(faults, places, error, is_loss_wrong=number is not None and not math.isfinite(number))
    return Replay(saved.step, cause, tuple(faults), tuple(places), number, error, tuple(notes))


def _places(trace: Trace, saved: SavedSnapshot, loss: float | None, error: str) -> list[Place]:
    if error:
        return [trace.place_of_error(error)] if trace.running else []
    forward = trace.first_forward(is_loss_finite=loss is None or math.isfinite(loss))
    places = [trace.first_out_of_scale(saved.usual), forward]
    if forward is None and (loss is None or math.isfinite(loss)):  # otherwise the gradients tell nothing
        places.append(trace.first_backward() or trace.first_gradient_out_of_scale(saved.usual))
    return [place for place in places if place is not None]


def _cause(faults: list[BatchFault], places: list[Place], error: str, is_loss_wrong: bool = False) -> str:
    certain = [fault for fault in faults if fault.is_certain]
    if certain:
        return f"The batch is the cause: {certain[0].words}"
    if faults and (places or error or is_loss_wrong):
        return f"Probably the batch is the cause: {faults[0].words}"
    if places:
        place = places[0]
        name = f"{place.module} ({place.kind})" if place.module else f"the model itself ({place.kind})"
        verb = "raises an error" if place.fault == "error" else f"goes wrong first, {place.direction}s"
        return f"{name[0].upper() + name[1:] if not place.module else name} {verb}: {place.words}"
    if error:
        return f"The loss function raises an error: {error}"
    return "The loss function: the model's output is finite, but the loss is not" if is_loss_wrong else ""


def _loss_of(saved: SavedSnapshot, model: nn.Module, loss: Loss | None, notes: list[str]) -> Tensor | None:
    """The loss of the step; None if the model returns none and there is no function for it."""
    outputs = [_called(call, model) for call in saved.calls]
    if loss is not None:
        targets = () if saved.given is None or saved.given[1] is None else (saved.given[1],)
        value = loss(outputs[0] if len(outputs) == 1 else outputs, *targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise SnapshotError(
                f"the function passed as --loss must return a scalar tensor, not {type(value).__name__}"
            )
        return value.sum()
    own = [value for value in map(_own_loss, outputs) if value is not None]
    if len(own) == len(outputs):
        return torch.stack([value.sum() for value in own]).sum()
    notes.append("there was no backward pass: the model returns no loss, so pass the loss function as --loss")
    return None


def _own_loss(output: Any) -> Tensor | None:
    """The loss that a model returns: its output, or the `loss` of that."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for value in (output, named, output[0] if isinstance(output, tuple) and output else None):
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
            return value
    return None


def _called(call: KeptCall, model: nn.Module) -> Any:
    try:
        module = _module(model, call.module)
    except AttributeError:
        raise SnapshotError(f"the loop called {call.module!r}, which this model does not have") from None
    if call.random is not None:
        with contextlib.suppress(Exception):  # another kind of device, or a damaged state
            restore_random_state(call.random)
    kind = next((tensor.device.type for _, tensor in nested_tensors((call.args, call.kwargs))), "cpu")
    with _autocast(kind, call.autocast):
        return module(*call.args, **call.kwargs)


@contextlib.contextmanager
def _autocast(device: str, dtype: str | None) -> Iterator[None]:
    precise = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if precise not in (torch.float16, torch.bfloat16):
        yield
    else:
        with torch.autocast(device, precise):
            yield


def _module(model: nn.Module, name: str) -> nn.Module:
    own = unwrapped(model)
    return own.get_submodule(name) if name else own


def _set_modes(model: nn.Module, saved: SavedSnapshot) -> None:
    """Put every module into the mode in which it was."""
    for name, module in Trace(model).modules.items():
        module.training = name not in saved.in_evaluation


def _batch_parts(saved: SavedSnapshot, model: nn.Module | None) -> Iterator[tuple[str, Any]]:
    """Everything in the batch by name."""
    for call in saved.calls:
        module = None
        with contextlib.suppress(AttributeError):
            module = None if model is None else _module(model, call.module)
        if module is None:
            yield from ((f"[{index}]", value) for index, value in enumerate(call.args))
            yield from call.kwargs.items()
        else:
            yield from named_arguments(module, call.args, call.kwargs)
    if saved.given is not None:
        yield from zip(("inputs", "targets"), saved.given, strict=True)


def _faults(saved: SavedSnapshot, model: nn.Module | None) -> list[BatchFault]:
    """What is wrong with the batch, each tensor once: the model's arguments may be given again as inputs."""
    faults: list[BatchFault] = []
    seen: list[Tensor] = []
    for name, value in _batch_parts(saved, model):
        tensors = [tensor for _, tensor in nested_tensors(value)]
        if tensors and all(any(_is_same(tensor, other) for other in seen) for tensor in tensors):
            continue
        seen += tensors
        faults += batch_faults(value, name)
    return faults


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype and bool(
        torch.equal(tensor.nan_to_num(), other.nan_to_num())
    )  # fmt: skip


def _label_faults(saved: SavedSnapshot, model: nn.Module, output: Any) -> Iterator[BatchFault]:
    """The labels that the model's output has no class for."""
    logits = [tensor for _, tensor in nested_tensors(output)]
    for name, value in _batch_parts(saved, model):
        if name in LABELS and isinstance(value, Tensor):
            for tensor in logits:
                if (fault := label_fault(value, name, tensor)) is not None:
                    yield fault
                    break


def _index_faults(
    saved: SavedSnapshot, model: nn.Module, name: str, table: nn.Module, taken: Any
) -> Iterator[BatchFault]:
    """The indices of the batch that an embedding, which raised an error, has no row for."""
    if not isinstance(table, nn.Embedding | nn.EmbeddingBag):
        return
    indices = next((tensor for _, tensor in nested_tensors(taken)), None)
    if indices is None or (indices.dim() < 2 and isinstance(table, nn.EmbeddingBag)):  # bags of unknown lengths
        return
    for part, value in _batch_parts(saved, model):
        for path, tensor in nested_tensors(value):
            fault = index_fault(indices, f"{part}{path}", table.num_embeddings, name or "the model")
            if fault is not None and _is_same(tensor, indices):
                yield fault
                return


def as_model(made: Any) -> nn.Module:
    """The model that the user's function made: a module, or several by name. Raises SnapshotError for anything else."""
    if isinstance(made, nn.Module):
        return made
    if isinstance(made, Mapping) and made and all(isinstance(part, nn.Module) for part in made.values()):
        return Models(made)
    raise SnapshotError(
        f"the function passed as --model must return a torch.nn.Module, or a dict of them, not {type(made).__name__}"
    )


def _few(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
