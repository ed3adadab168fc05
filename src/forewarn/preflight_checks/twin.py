"""A copy of a model and its optimizers to try things on, while the originals and all random states stay as they are."""

from __future__ import annotations

import contextlib
import copy
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from forewarn.act.training_state import schedulers_of
from forewarn.measure.module_tree import Models, children_of, models_in, named_modules, named_parameters, unwrapped
from forewarn.measure.nested import nested_tensors
from forewarn.plan import planned_peaks
from forewarn.random_states import random_states_kept
from forewarn.types import peak_lr

LossFunction = Callable[[Any, Any], Tensor]
"""From a model, or several by name, and a batch to the loss."""

_MOST_OBJECTS = 1000
"""Maximum number of objects behind a loader that are searched for random generators."""


class TwinError(RuntimeError):
    """The model or its optimizer cannot be copied."""


@dataclass(slots=True)
class Twin:
    """A copy of the models and optimizers, which refer to each other as the originals do."""

    root: nn.Module
    optimizers: tuple[Optimizer, ...]
    clip: float | None = None
    """The norm to which gradients are clipped, if they are."""
    scaler: Any = None
    """The copy of the gradient scaler, if there is one."""
    _has_strangers: bool | None = None
    """Whether the loss uses trainable tensors that are not in the model; None until the first step."""

    @property
    def model(self) -> Any:
        """What the loss function gets: the model, or several by name."""
        return children_of(self.root) if isinstance(self.root, Models) else self.root

    @property
    def device(self) -> torch.device:
        return next((parameter.device for _, parameter in named_parameters(self.root)), torch.device("cpu"))

    def loss(self, function: LossFunction, batch: Any) -> Tensor:
        """The loss of a batch, which may be changed by the model without changing that of the user."""
        return function(self.model, own_copy(batch, self.device))

    def step(self, function: LossFunction, *batches: Any) -> Tensor:
        """One optimizer step on the gradients of one batch, or the mean of several; returns the loss before it."""
        loss = self._backward(function, batches)
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(lambda: self._backward(function, batches))
            elif self.scaler is not None:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        return loss

    def _backward(self, function: LossFunction, batches: Sequence[Any]) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        own = [parameter for _, parameter in named_parameters(self.root) if parameter.requires_grad]
        losses = []
        for batch in batches:
            loss = self.loss(function, batch) / len(batches)
            if self._has_strangers is None:
                self._has_strangers = not set(map(id, leaves(loss))) <= set(map(id, own))
            scaled = loss if self.scaler is None else self.scaler.scale(loss)
            scaled.backward(inputs=own if self._has_strangers else None)  # others must not get a gradient from a trial
            losses.append(loss.detach())
        if self.clip is not None:
            for optimizer in self.optimizers if self.scaler is not None else ():
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(own, self.clip)
        return torch.stack(losses).sum()

    @property
    def searches(self) -> bool:
        """Whether a step of an optimizer runs many passes to find its own way."""
        return any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a group; one that is a tensor stays one, as compiled optimizers need it."""
    group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate


def ramp(twin: Twin) -> Callable[[float], None]:
    """A function that sets the learning rates at a share of the way from their present values to their peaks.

    A schedule with a warm-up begins near 0, where nothing moves.
    """
    ends = [(group, float(group["lr"]), peak_lr(group)) for group in twin.groups if "lr" in group]

    def set_share(share: float) -> None:
        for group, present, peak in ends:
            if peak > present:
                set_rate(group, present + (peak - present) * share)

    return set_share


def unnoted_peaks(optimizers: Sequence[Optimizer], num_steps: int) -> dict[int, float]:
    """By the position of a group: its highest rate in so many steps, if its scheduler may multiply the noted one.

    A function such as that of "Attention is all you need" goes from 1e-7 to 1e-3 with a noted rate of 1.
    """
    positions: dict[int, float] = {}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for scheduler in schedulers_of(optimizers):
        parts = getattr(scheduler, "_schedulers", [scheduler])
        if not any(isinstance(part, LambdaLR) for part in parts):
            continue
        with contextlib.suppress(Exception):  # of the user's function, or one that ends before
            peaks = planned_peaks(scheduler, num_steps)
            for group, peak in zip(scheduler.optimizer.param_groups, peaks, strict=True):
                positions[next(place for place, one in enumerate(groups) if one is group)] = peak
    return positions


def twin_of(root: nn.Module, optimizers: Sequence[Optimizer], clip: float | None = None, scaler: Any = None) -> Twin:
    """Copy a model and its optimizers together, so that the copied optimizers hold the copied parameters."""
    memo: dict[int, Any] = {}
    for _, module in named_modules(root):
        for value in vars(module).values():
            for _, tensor in nested_tensors(value):
                if tensor.requires_grad and not tensor.is_leaf:  # a cached output, which torch refuses to copy
                    memo[id(tensor)] = tensor.detach().clone()
    try:
        copied = copy.deepcopy(unwrapped(root), memo)
        for _, module in named_modules(copied):
            _rebind(vars(module), memo)
        twins = tuple(_copied_optimizer(optimizer, memo) for optimizer in optimizers)
        own_scaler = copy.deepcopy(scaler)
    except Exception as error:
        raise TwinError(
            f"{type(unwrapped(root)).__name__} or its optimizer cannot be copied ({type(error).__name__}: {error}), "
            "and preflight never runs on your own; build a second model and optimizer and pass those"
        ) from error
    for model in models_in(copied):
        if not model.training:  # a check of its own; the others are about training
            model.train()
    return Twin(copied, twins, clip, own_scaler)


def _rebind(held: dict[Any, Any], memo: Mapping[int, Any], depth: int = 2) -> None:
    """Let functions that a copied module holds, such as a lambda or a hook, use the copies of what they enclose.

    Python copies a function by reference, so that it would go on using the modules of the original.
    """
    for name, value in held.items():
        if isinstance(value, types.FunctionType) and value.__closure__:
            held[name] = _rebound(value, memo)
        elif isinstance(value, dict) and depth:
            _rebind(value, memo, depth - 1)


def _rebound(function: types.FunctionType, memo: Mapping[int, Any]) -> types.FunctionType:
    cells = [
        types.CellType(memo[id(cell.cell_contents)]) if _is_filled(cell) and id(cell.cell_contents) in memo else cell
        for cell in function.__closure__ or ()
    ]
    code, names = function.__code__, function.__globals__
    twin = types.FunctionType(code, names, function.__name__, function.__defaults__, tuple(cells))
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    return twin


def _copied_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy with all attributes: torch's own keeps three of them, and LBFGS or a custom optimizer has more.

    Hooks and replaced methods, such as the `step` that a scheduler wraps, belong to the original and are left out.
    """
    held = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.endswith("_hooks") and not isinstance(value, types.FunctionType | types.MethodType)
    }
    twin = type(optimizer).__new__(type(optimizer))
    twin.__setstate__(copy.deepcopy(held, memo))
    return twin


def own_copy(batch: Any, device: torch.device) -> Any:
    """A copy of a batch; its tensors on the device of the model."""
    try:
        copied = copy.deepcopy(batch)
    except Exception:  # a batch of tensors with a graph, or with a handle of a file
        copied = batch
    return _moved(copied, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    move = getattr(value, "to", None)  # such as the batches of Hugging Face and PyTorch Geometric
    return move(device) if callable(move) else value


def leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that a backward pass from this loss would give a gradient to."""
    waiting, seen, reached = [loss.grad_fn], set[Any](), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            reached.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return reached


def prepare_lazy(twin: Twin, function: LossFunction, batch: Any) -> None:
    """Give parameters that get their shape from the first batch that shape."""
    if any(is_lazy(parameter) for _, parameter in named_parameters(twin.root)):
        with torch.no_grad():
            twin.loss(function, batch)


@contextlib.contextmanager
def buffers_kept(root: nn.Module) -> Iterator[None]:
    """Restore the buffers of the originals after this block, if something in the copy still refers to them."""
    kept = [(buffer, buffer.clone()) for buffer in root.buffers()]
    try:
        yield
    finally:
        for buffer, values in kept:
            if not torch.equal(buffer, values):
                with torch.no_grad():
                    buffer.copy_(values)


@contextlib.contextmanager
def everything_kept(data: Any) -> Iterator[None]:
    """Restore all random states after this block, those of devices and of the loader's own generators included."""
    own = [(generator, _state_of(generator)) for generator in _generators(data)]
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    grad_mode = torch.is_grad_enabled()
    try:
        with random_states_kept(), torch.enable_grad():
            yield
    finally:
        torch.set_grad_enabled(grad_mode)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)
        for generator, state in own:
            _restore(generator, state)


def _generators(data: Any) -> list[Any]:
    """The random generators that a loader, its samplers or its data set hold."""
    generators: list[Any] = []
    waiting, seen = [data], set[int]()
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, Tensor | nn.Module | np.ndarray | type | types.ModuleType):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            generators.append(value)
        elif isinstance(value, types.FunctionType):
            waiting += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        elif isinstance(value, types.MethodType):
            waiting.append(value.__self__)
        else:
            waiting += list(getattr(value, "__dict__", {}).values())
    return generators


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
