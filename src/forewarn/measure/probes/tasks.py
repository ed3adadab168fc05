"""Several losses in one step: how hard each task pulls on what they share, and whether they pull together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from forewarn.measure.engine import Numbers
from forewarn.measure.engine.portable import dense_values, wide
from forewarn.measure.hooks import own_pass
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import Array, Pending, Probe, Reading
from forewarn.measure.shared_layer import last_shared_layer, obstacle, reached_parameters
from forewarn.measure.step import Step
from forewarn.types import Reason

Shared = str | nn.Module | Iterable[nn.Parameter] | None
"""What `shared=` accepts: a regular expression over names, a module, parameters, or None for the last shared layer."""

_Numbers = TypeVar("_Numbers", Tensor, Array)


class TaskProbe(Probe):
    """`task/{loss,weight}` on every step with several losses; norms, ratios, cosines, shares and rates when asked for.

    A task's gradient is measured by `torch.autograd.grad` on the shared parameters, weighted as it enters the sum: the
    graph is kept, `.grad` is never touched, and the only cost is a backward pass from each loss to those parameters.
    """

    name = "tasks"

    def __init__(self, parameter_index: ParameterIndex, scaler: Any) -> None:
        self._parameter_index = parameter_index
        self._scaler = scaler
        self._given: list[nn.Parameter] | None = None
        self._found: list[nn.Parameter] = []
        self.layer = ""
        """The name of the last shared layer once it is found; "" where parameters were given."""
        self.reason = Reason.AVAILABLE
        """Why gradients can not be measured, if they can not."""
        self.first: dict[str, Tensor] = {}
        """The first loss of each task that is finite and not 0: a batch without labels is no beginning."""
        self._begun: set[str] = set()
        """The tasks whose first loss is known to be one."""
        self._losses: dict[str, list[Tensor]] = {}
        self._weights: dict[str, Numbers] = {}
        self._products: tuple[tuple[str, ...], Tensor] | None = None
        self._looked = False

    def look(self, losses: Mapping[str, Tensor]) -> None:
        """See from the graph of the losses whether measuring is safe."""
        self.reason = obstacle(
            [loss for loss in losses.values() if loss.grad_fn is not None], self._parameter_index.model
        )

    def share(self, shared: Shared, losses: Mapping[str, Tensor]) -> None:
        """Decide on which parameters the tasks are compared; those that a task does not reach are refused."""
        self._given = None if shared is None else _parameters(shared, self._parameter_index)
        wanted = {id(parameter) for parameter in self._given or ()}
        for name, loss in losses.items():
            unsafe = self.reason is not Reason.AVAILABLE or loss.grad_fn is None
            if wanted and not unsafe and not wanted & reached_parameters(loss):
                raise ValueError(f"the loss of task {name!r} depends on none of the shared parameters")

    def see(self, losses: Mapping[str, Tensor], weights: Mapping[str, Tensor | float]) -> None:
        """Take the losses of one batch; several batches before one optimizer step are averaged."""
        for name, loss in losses.items():
            now = loss.detach().reshape(())
            self._losses.setdefault(name, []).append(now)
            self._weights[name] = weight if isinstance(weight := weights[name], Tensor) else np.array(float(weight))
            if name not in self._begun:
                self.first[name] = _first(self.first.get(name), now)

    def compare(self, losses: Mapping[str, Tensor], weights: Mapping[str, Tensor | float]) -> Tensor | None:
        """Measure the gradients of this batch; the norms of the weighted ones in the order of the losses, if known."""
        self._looked = True
        live = {name: loss for name, loss in losses.items() if loss.grad_fn is not None}
        if self.reason not in (Reason.AVAILABLE, Reason.NO_SHARED_LAYER) or not live:
            return None
        parameters = self._shared(list(live.values()))
        self.reason = Reason.AVAILABLE if parameters else Reason.NO_SHARED_LAYER
        if not parameters:
            return None
        products = self._inner_products(list(live.values()), parameters)
        factors = torch.stack([_beside(products, weights[name]) for name in live])
        self._products = (tuple(live), products * torch.outer(factors, factors))
        return self._products[1].diagonal().sqrt() if len(live) == len(losses) else None

    def collect(self, step: Step) -> Pending | None:
        losses, self._losses = self._losses, {}
        weights, self._weights = self._weights, {}
        products, self._products = self._products, None
        looked, self._looked = self._looked, False
        if not losses:
            return None
        names = tuple(losses)
        means = [each[0] if len(each) == 1 else torch.stack(each).mean() for each in losses.values()]
        tensors: list[Numbers] = [*means, *(weights[name] for name in names), *(self.first[name] for name in names)]
        tensors += [] if products is None else [products[1]]
        reason = self.reason

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            now, weight, first = np.array(arrays[: 3 * len(names)], np.float64).reshape(3, len(names))
            self._begun |= {name for name, loss in zip(names, first, strict=True) if np.isfinite(loss) and loss != 0}
            yield Reading("task/loss", names, now)
            yield Reading("task/weight", names, weight)
            if looked:
                with np.errstate(all="ignore"):
                    left = np.where(first > 0, now / first, np.nan)
                    left[(first == 0) & (now == 0)] = 0.0  # nothing was ever to be learned
                    yield Reading("task/remaining", names, left)
                    yield Reading("task/rate", names, relative_rates(now, np.where(first > 0, first, np.nan)))
                step.unavailable("task/gradient_norm", reason)
            if products is not None:
                yield from comparisons(products[0], arrays[-1], dict(zip(names, weight, strict=True)))

        return Pending(tensors, decode)

    def state_dict(self) -> dict[str, Any]:
        return {"first": {name: float(loss) for name, loss in self.first.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = {name: torch.tensor(float(loss), dtype=torch.float64) for name, loss in state["first"].items()}
        self._begun = set()

    def _shared(self, losses: Sequence[Tensor]) -> list[nn.Parameter]:
        """The parameters to compare on; the last shared layer is looked for once, and again if it is frozen or gone."""
        if self._given is not None:
            return [each for each in self._given if each.requires_grad]
        present = self._parameter_index.live()
        if not self._found or any(id(each) not in present or not each.requires_grad for each in self._found):
            self.layer, self._found = last_shared_layer(losses, self._parameter_index.model)
        return self._found

    def _inner_products(self, losses: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> Tensor:
        """The inner product of every two tasks' gradients, by one pass from each loss."""
        scale = getattr(self._scaler, "_scale", None)  # in half precision, gradients of an unscaled loss round to zero
        gradients = []
        with own_pass():
            for loss in losses:
                seed = None if scale is None else scale.detach().to(loss).reshape(loss.shape)
                gradients.append(torch.autograd.grad(loss, parameters, seed, retain_graph=True, allow_unused=True))
        home = losses[0].device
        total = torch.zeros(len(losses), len(losses), dtype=wide(home), device=home)
        for parameter, of_tasks in zip(parameters, zip(*gradients, strict=True), strict=True):
            if any(each is not None for each in of_tasks):
                rows = torch.stack([_flat(each, parameter) for each in of_tasks])
                total += (rows @ rows.T).to(home)
        return total if scale is None else total / scale.detach().to(total) ** 2


def relative_rates(losses: _Numbers, first: _Numbers) -> _Numbers:
    """What is left of each loss over the mean of what is left of all: above 1, a task learns slower than the others."""
    left: _Numbers = losses / first
    rates: _Numbers = left / left.mean()
    return rates


def comparisons(names: tuple[str, ...], products: Array, weights: Mapping[str, float]) -> Iterator[Reading]:
    """Norms and shares of the tasks, ratios and cosines of their pairs, from inner products of weighted gradients.

    A task of weight 0 is off, and compared with none. One that has a weight and no gradient is: its ratio is 0 or inf.
    """
    with np.errstate(all="ignore"):
        norms = np.sqrt(np.diagonal(products))
        yield Reading("task/gradient_norm", names, norms)
        yield Reading("task/share", names, norms / norms.sum())
        on = [at for at, name in enumerate(names) if weights[name] != 0]
        pairs = list(itertools.combinations(on, 2))
        if pairs:
            scopes = tuple(f"{names[a]}/{names[b]}" for a, b in pairs)
            first, second = (norms[list(side)] for side in zip(*pairs, strict=True))
            cosines = np.array([products[a, b] for a, b in pairs]) / (first * second)
            yield Reading("task/ratio", scopes, first / second)
            yield Reading("task/cosine", scopes, np.clip(cosines, -1.0, 1.0))


def _first(known: Tensor | None, now: Tensor) -> Tensor:
    """The loss that a task began with, decided on the device: the one that is known, if it is a beginning."""
    if known is None:
        return now
    known = known.to(now)
    return known.where(known.isfinite() & (known != 0), now)


def _beside(other: Tensor, number: Tensor | float) -> Tensor:
    """One number where another tensor is; filled in there, for a copy from the host would be waited for."""
    if isinstance(number, Tensor):
        return number.detach().to(other).reshape(())
    return torch.full((), number, dtype=other.dtype, device=other.device)


def _flat(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
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
            raise ValueError(f"shared={shared!r} is no regular expression: {error}") from None
        named = zip(parameter_index.names, parameter_index.parameters, strict=True)
        chosen = [one for name, one in named if pattern.search(name)]
        if not chosen:
            known = ", ".join(parameter_index.names[:4])
            raise ValueError(f"shared={shared!r} matches no parameter of the model; their names are {known}, …")
    else:
        chosen = list(shared.parameters() if isinstance(shared, nn.Module) else shared)
        if wrong := [each for each in chosen if not isinstance(each, Tensor)]:
            raise TypeError(f"shared must be a regular expression, a module or parameters, but it holds {wrong[0]!r}")
        known_ones = {id(each) for each in parameter_index.parameters}
        if any(id(each) not in known_ones for each in chosen):
            raise ValueError("shared holds a tensor that is no parameter of the watched model")
    chosen = [each for each in chosen if each.requires_grad]
    if not chosen:
        raise ValueError("shared holds no trainable parameter: nothing there could be pulled on")
    return chosen
