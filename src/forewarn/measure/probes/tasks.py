"""Several losses in one step: how large each task's gradient on the shared parameters is, and whether they agree."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.measure.engine import Numbers
from forewarn.measure.engine.portable import dense_values, wide
from forewarn.measure.hooks import own_pass
from forewarn.measure.over_ranks import OWN, How, Part
from forewarn.measure.own_backward import NeedsMessagesError, holds_gradients, whole_parameters, without_messages
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.peers import num_ranks
from forewarn.measure.probe import Array, Pending, Probe, Reading
from forewarn.measure.shards import own_summand
from forewarn.measure.shared_layer import crosses_sharded_module, last_shared_layer, obstacle, reached_parameters
from forewarn.measure.step import Step
from forewarn.types import Reason

Shared = str | nn.Module | Iterable[nn.Parameter] | None
"""Values of `shared=`: a regular expression over names, a module, parameters, or None for the last shared layer."""

_Numbers = TypeVar("_Numbers", Tensor, Array)

MOST_VALUES = 16_381
"""With several ranks, a gradient of more values than these is folded into so many sums of random sign.

Inner products are then off by the product of the norms times 1 / sqrt(16,381), or 0.8%. It is a prime number, so that
the values of one row or column do not all go into the same few sums."""

_NUM_MARKS = 2
"""After the values of a rank: whether no other rank has the same batch, and 1."""


class TaskProbe(Probe):
    """`task/{loss,weight}` on every step with several losses; norms, ratios, cosines, shares and rates on request.

    A task's gradient is measured by `torch.autograd.grad` on the shared parameters, weighted as in the total loss. The
    graph is kept, `.grad` is never touched, and the only cost is a backward pass from each loss to those parameters.

    With several ranks, a task's gradient is the mean over their batches, as in the training. So the gradients
    themselves are added up, not their norms.
    """

    name = "tasks"
    on_every_rank = True

    def __init__(self, parameter_index: ParameterIndex, scaler: Any) -> None:
        self._parameter_index = parameter_index
        self._scaler = scaler
        self._given: list[nn.Parameter] | None = None
        self._found: list[Tensor] = []
        self.layer = ""
        """The name of the last shared layer once it is found; "" if parameters were given."""
        self.reason = Reason.AVAILABLE
        """Why gradients cannot be measured; AVAILABLE if they can."""
        self.first: dict[str, Tensor] = {}
        """The first loss of each task that is finite and not 0: batches without labels do not count."""
        self._begun: set[str] = set()
        """The tasks whose first loss is known to be finite and not 0."""
        self._losses: dict[str, list[Tensor]] = {}
        self._weights: dict[str, Numbers] = {}
        self._compared: tuple[tuple[str, ...], Tensor] | None = None
        """The tasks, and the inner products of their gradients, or with several ranks, their rows of `_rows`."""
        self._signs: Tensor | None = None
        self._looked = False

    def look(self, losses: Mapping[str, Tensor]) -> None:
        """Check from the graph of the losses whether measuring is safe."""
        index = self._parameter_index
        self.reason = obstacle([loss for loss in losses.values() if loss.grad_fn is not None], index.model)
        if index.rank is None and num_ranks() > 1 and any(hasattr(one, "to_local") for one in index.parameters):
            self.reason = Reason.SHARDED_PARAMETERS  # nobody adds up what the ranks have measured

    def share(self, shared: Shared, losses: Mapping[str, Tensor]) -> None:
        """Choose the parameters that tasks are compared on; raise if a task reaches none of them."""
        self._given = None if shared is None else _parameters(shared, self._parameter_index)
        whole = whole_parameters(self._parameter_index.model) if self._given else {}
        shared_ids = {id(whole.get(id(parameter), parameter)) for parameter in self._given or ()}
        for name, loss in losses.items():
            unsafe = self.reason is not Reason.AVAILABLE or loss.grad_fn is None
            if shared_ids and not unsafe and not shared_ids & reached_parameters(loss):
                raise ValueError(f"the loss of task {name!r} depends on none of the shared parameters")

    def see(self, losses: Mapping[str, Tensor], weights: Mapping[str, Tensor | float]) -> None:
        """Add the losses of one batch; several batches before one optimizer step are averaged."""
        for name, loss in losses.items():
            value = loss.detach().reshape(())
            self._losses.setdefault(name, []).append(value)
            self._weights[name] = weight if isinstance(weight := weights[name], Tensor) else np.array(float(weight))
            if name not in self._begun:
                self.first[name] = first_loss(self.first.get(name), value)

    def compare(self, losses: Mapping[str, Tensor], weights: Mapping[str, Tensor | float]) -> Tensor | None:
        """Measure the gradients of this batch; returns the weighted norms by loss; None if unknown.

        With several ranks, it returns what this one adds to the sum that `products` takes.
        """
        self._looked = True
        live = {name: loss for name, loss in losses.items() if loss.grad_fn is not None}
        if self.reason not in (Reason.AVAILABLE, Reason.NO_SHARED_LAYER) or not live:
            return None
        parameters = self._shared(list(live.values()))
        self.reason = Reason.AVAILABLE if parameters else Reason.NO_SHARED_LAYER
        if not parameters:
            return None
        model = self._parameter_index.model
        if whole_parameters(model) and (
            holds_gradients(model) or crosses_sharded_module(list(live.values()), parameters)
        ):
            self.reason = Reason.SHARDED_PARAMETERS
            return None
        try:
            with without_messages(model):
                gradients = self._gradients(list(live.values()), parameters)
        except NeedsMessagesError:
            self.reason = Reason.NEEDS_MESSAGES
            return None
        is_alone = self._is_alone
        home = next(iter(live.values())).device
        measured = (self._inner_products if is_alone else self._rows)(gradients, parameters, home)
        factors = torch.stack([_beside(measured, weights[name]) for name in live])
        if is_alone:
            measured = measured * torch.outer(factors, factors)
        else:
            measured[:, :-_NUM_MARKS] *= factors[:, None]
        self._compared = tuple(live), measured
        if len(live) < len(losses):
            return None
        return measured.diagonal().sqrt() if is_alone else measured

    def collect(self, step: Step) -> Pending | None:
        losses, self._losses = self._losses, {}
        weights, self._weights = self._weights, {}
        compared, self._compared = self._compared, None
        looked, self._looked = self._looked, False
        if not losses:
            return None
        names = tuple(losses)
        means = [batches[0] if len(batches) == 1 else torch.stack(batches).mean() for batches in losses.values()]
        tensors: list[Numbers] = [*means, *(weights[name] for name in names), *(self.first[name] for name in names)]
        num_single = len(tensors)
        tensors += [] if compared is None else [compared[1]] if self._is_alone else list(compared[1])
        reason = self.reason

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            current, weight, first = np.array(arrays[:num_single], np.float64).reshape(3, len(names))
            self._begun |= {name for name, loss in zip(names, first, strict=True) if np.isfinite(loss) and loss != 0}
            yield Reading("task/loss", names, current)
            yield Reading("task/weight", names, weight)
            if not looked:
                return
            with np.errstate(all="ignore"):
                remaining = np.where(first > 0, current / first, np.nan)
                remaining[(first == 0) & (current == 0)] = 0.0  # there was never anything to learn
                yield Reading("task/remaining", names, remaining)
                yield Reading("task/rate", names, relative_rates(current, np.where(first > 0, first, np.nan)))
            inner = None
            if compared is not None:
                rest = arrays[num_single:]
                inner = rest[0] if self._is_alone else products(np.stack(rest), max(1, len(step.ranks)))
            is_partial = compared is not None and inner is None
            step.unavailable("task/gradient_norm", Reason.NOT_ON_EVERY_RANK if is_partial else reason)
            if compared is not None and inner is not None:
                yield from comparisons(compared[0], inner, dict(zip(names, weight, strict=True)))

        return Pending(tensors, decode, self._parts(names, () if compared is None else compared[0]))

    @property
    def _is_alone(self) -> bool:
        return self._parameter_index.rank is None

    def _parts(self, names: Sequence[str], compared: Sequence[str]) -> list[Part]:
        """How losses, weights, first losses and rows of gradients are combined over the ranks."""
        if self._is_alone:
            return []
        return [
            *(Part(How.MEAN, f"task/loss {name}") for name in names),
            *(OWN for _ in names),
            *(Part(How.MEAN, f"task/remaining {name}") for name in names),
            *(Part(How.SUM, f"task/gradient_norm {name}") for name in compared),
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"first": {name: float(loss) for name, loss in self.first.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = {name: torch.tensor(float(loss), dtype=torch.float64) for name, loss in state["first"].items()}
        self._begun = set()

    def _shared(self, losses: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parameters to compare on, as the graph holds them.

        The last shared layer is searched once, and again if it is frozen or gone.
        """
        model = self._parameter_index.model
        whole = whole_parameters(model)
        if self._given is not None:
            return [whole.get(id(parameter), parameter) for parameter in self._given if parameter.requires_grad]
        live = self._parameter_index.live().keys() | set(map(id, whole.values()))
        if not self._found or any(
            id(parameter) not in live or not parameter.requires_grad for parameter in self._found
        ):
            self.layer, self._found = last_shared_layer(losses, model, whole)
        return self._found

    def _gradients(self, losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Sequence[Tensor | None]]:
        """The gradients of each task, with one backward pass per loss."""
        scale = getattr(self._scaler, "_scale", None)  # in half precision, gradients of an unscaled loss round to zero
        gradients: list[Sequence[Tensor | None]] = []
        with own_pass():
            for loss in losses:
                seed = None if scale is None else scale.detach().to(loss).reshape(loss.shape)
                gradients.append(torch.autograd.grad(loss, parameters, seed, retain_graph=True, allow_unused=True))
        return gradients

    def _inner_products(
        self, gradients: Sequence[Sequence[Tensor | None]], parameters: Sequence[Tensor], home: torch.device
    ) -> Tensor:
        """The inner products of all pairs of task gradients."""
        total = torch.zeros(len(gradients), len(gradients), dtype=wide(home), device=home)
        for parameter, of_tasks in zip(parameters, zip(*gradients, strict=True), strict=True):
            if any(gradient is not None for gradient in of_tasks):
                rows = torch.stack([_flat(gradient, parameter) for gradient in of_tasks])
                total += (rows @ rows.T).to(home)
        scale = getattr(self._scaler, "_scale", None)
        return total if scale is None else total / scale.detach().to(total) ** 2

    def _rows(
        self, gradients: Sequence[Sequence[Tensor | None]], parameters: Sequence[Tensor], home: torch.device
    ) -> Tensor:
        """What this rank adds to each task's gradient, folded if it is long, and its marks."""
        shards = self._parameter_index.shards
        is_twin = shards is not None and shards.is_twin
        rows = torch.stack([
            torch.cat([
                torch.zeros(parameter.numel(), dtype=wide(home), device=home) if gradient is None
                else _flat(own_summand(gradient, is_twin), parameter).to(home)
                for gradient, parameter in zip(of_task, parameters, strict=True)
            ])
            for of_task in gradients
        ])  # fmt: skip
        scale = getattr(self._scaler, "_scale", None)
        rows = self._folded(rows if scale is None else rows / scale.detach().to(rows))
        marks = (rows.new_full((len(rows), 1), mark) for mark in (float(not is_twin), 1.0))
        return torch.cat([rows, *marks], dim=1)

    def _folded(self, rows: Tensor) -> Tensor:
        num_values = rows.shape[1]
        if num_values <= MOST_VALUES:
            return rows
        if self._signs is None or len(self._signs) != num_values:
            generator = torch.Generator().manual_seed(num_values)  # the same signs on all ranks
            drawn = torch.randint(0, 2, (num_values,), generator=generator, dtype=torch.int8)
            self._signs = (2 * drawn - 1).to(rows.device)
        padded = functional.pad(rows * self._signs, (0, -num_values % MOST_VALUES))
        return padded.view(len(rows), -1, MOST_VALUES).sum(dim=1)


def products(rows: Array, num_ranks: int) -> Array | None:
    """The inner products of the tasks' gradients, from rows added up over the ranks; None if a rank is missing."""
    values, num_batches, num_rows = rows[:, :-_NUM_MARKS], rows[0, -2], rows[0, -1]
    if num_rows != num_ranks or not num_batches:
        return None
    inner: Array = values @ values.T / num_batches**2
    return inner


def relative_rates(losses: _Numbers, first: _Numbers) -> _Numbers:
    """Remaining fraction of each loss relative to the mean over tasks: above 1, a task learns slower than others."""
    remaining: _Numbers = losses / first
    rates: _Numbers = remaining / remaining.mean()
    return rates


def comparisons(names: tuple[str, ...], products: Array, weights: Mapping[str, float]) -> Iterator[Reading]:
    """Norms and shares of the tasks, ratios and cosines of their pairs, from inner products of weighted gradients.

    A task of weight 0 is off and not compared. One with a weight but no gradient is: its ratio is 0 or inf.
    """
    with np.errstate(all="ignore"):
        norms = np.sqrt(np.diagonal(products))
        yield Reading("task/gradient_norm", names, norms)
        yield Reading("task/share", names, norms / norms.sum())
        on = [index for index, name in enumerate(names) if weights[name] != 0]
        pairs = list(itertools.combinations(on, 2))
        if pairs:
            scopes = tuple(f"{names[a]}/{names[b]}" for a, b in pairs)
            first, second = (norms[list(side)] for side in zip(*pairs, strict=True))
            cosines = np.array([products[a, b] for a, b in pairs]) / (first * second)
            yield Reading("task/ratio", scopes, first / second)
            yield Reading("task/cosine", scopes, np.clip(cosines, -1.0, 1.0))


def first_loss(earlier: Tensor | None, current: Tensor) -> Tensor:
    """A task's first loss, chosen on the device: the earlier one if it is finite and not 0."""
    if earlier is None:
        return current
    earlier = earlier.to(current)
    return earlier.where(earlier.isfinite() & (earlier != 0), current)


def _beside(tensor: Tensor, number: Tensor | float) -> Tensor:
    """One number on the device of a tensor; filled in there, since a copy from the host would wait."""
    if isinstance(number, Tensor):
        return number.detach().to(tensor).reshape(())
    return torch.full((), number, dtype=tensor.dtype, device=tensor.device)


def _flat(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
    return dense_values(dense).reshape(-1).to(wide(dense.device))


def _parameters(
    shared: str | nn.Module | Iterable[nn.Parameter], parameter_index: ParameterIndex
) -> list[nn.Parameter]:
    """The trainable parameters that `shared=` names."""
    if isinstance(shared, str):
        try:
            pattern = re.compile(shared)
        except re.error as error:
            raise ValueError(f"shared={shared!r} is not a regular expression: {error}") from None
        named = zip(parameter_index.names, parameter_index.parameters, strict=True)
        chosen = [parameter for name, parameter in named if pattern.search(name)]
        if not chosen:
            examples = ", ".join(parameter_index.names[:4])
            raise ValueError(f"shared={shared!r} matches no parameter of the model; their names are {examples}, …")
    else:
        chosen = list(shared.parameters() if isinstance(shared, nn.Module) else shared)
        if wrong := [item for item in chosen if not isinstance(item, Tensor)]:
            raise TypeError(f"shared must be a regular expression, a module or parameters, but it holds {wrong[0]!r}")
        own_ids = {id(parameter) for parameter in parameter_index.parameters}
        if any(id(parameter) not in own_ids for parameter in chosen):
            raise ValueError("shared holds a tensor that is not a parameter of the watched model")
    chosen = [parameter for parameter in chosen if parameter.requires_grad]
    if not chosen:
        raise ValueError("shared holds no trainable parameter, so there is no gradient to compare")
    return chosen
