"""The weighted sum of several losses in a step, compared by a probe and balanced on request."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forewarn.act.task_weights import BALANCERS, Balancer
from forewarn.config import Balancing
from forewarn.measure.exchange import Exchange
from forewarn.measure.loop import Loop
from forewarn.measure.probe import Probe
from forewarn.measure.probes.tasks import Shared, TaskProbe, first_loss, products
from forewarn.measure.transfer import on_host
from forewarn.types import Reason

_log = logging.getLogger("forewarn")

EVERY = 10
"""Default number of steps between comparisons of the tasks."""

Weight = float | Tensor

_FACTOR = "factor/"
"""Before the name of a task in the saved state: its weight is multiplied. Names of tasks have no slash."""


class TaskLosses:
    """Implements `monitor.combine_losses`: checks, weights and regularly compares losses, and updates the balancer.

    With several ranks, the balancer learns at the end of each step from the losses and gradients of all ranks, so their
    weights are the same.
    """

    def __init__(
        self, probes: Mapping[str, Probe], loop: Loop, settings: Balancing, exchange: Exchange | None = None
    ) -> None:
        self._exchange = exchange
        self._seen: list[tuple[dict[str, Tensor], Tensor | None]] = []
        """The losses of this rank in the current step, and its part of the gradients of each batch."""
        self._first: dict[str, Tensor] = {}
        """The first losses, over all ranks."""
        self._probes = probes
        self._loop = loop
        self._settings = settings
        self._every = 0
        """0 until the first call."""
        self._balancer: Balancer | None = None
        self._saved: dict[str, float] = {}
        self._factors: dict[str, float] = {}
        """By which a policy multiplies the declared weights."""
        self._compared_at = -1

    def prepare(
        self,
        losses: Mapping[str, Tensor],
        shared: Shared,
        weights: Mapping[str, Weight] | None,
        every: int | None,
        balance: str | None,
    ) -> tuple[dict[str, Tensor], dict[str, Weight]]:
        """Check the arguments and return losses and weights; the first call that trains fixes the settings."""
        checked = _checked_losses(losses)
        declared = _checked_weights(checked, weights)
        if torch.is_grad_enabled() and not self._every:
            self._begin(checked, declared, shared, every, balance)
        return checked, declared

    def combine(self, step: int, losses: Mapping[str, Tensor], declared: Mapping[str, Weight]) -> Tensor:
        """The weighted sum of the losses of one batch of `step`."""
        present = self._weights(losses, declared)
        if not torch.is_grad_enabled():  # validation: the same sum, nothing to learn from it
            return _sum(losses, present)
        norms = self._observe(step, losses, present)
        total = _sum(losses, present)
        if self._balancer is not None:
            detached = {name: loss.detach().reshape(()) for name, loss in losses.items()}
            if self._exchange is None:
                self._balancer.update(detached, self._probe.first, norms)
            else:
                self._seen.append((detached, norms))
        return total

    @property
    def learns(self) -> bool:
        """Whether the ranks learn weights together."""
        return self._exchange is not None and self._balancer is not None and not self._exchange.off

    def learn(self, step: int) -> None:
        """Learn from the losses of all ranks in a step that all of them have completed; waits for all ranks."""
        seen, self._seen = self._seen, []
        assert self._exchange is not None
        parts = [part for losses, rows in seen for part in (*losses.values(), *(() if rows is None else (rows,)))]
        numbers = [np.ones(1), *(on_host(part).ravel() for part in parts)]
        total = self._exchange.total(step, np.concatenate(numbers))
        if total is None:
            if self._exchange.off:
                _log.warning("the weights of the tasks stay as they are: the monitors of the ranks are not connected")
            return
        num_ranks, total = total[0], total[1:]
        for losses, rows in seen:
            means, total = total[: len(losses)] / num_ranks, total[len(losses) :]
            norms = None
            if rows is not None:
                inner = products(total[: rows.numel()].reshape(rows.shape), int(num_ranks))
                norms = None if inner is None else torch.from_numpy(np.sqrt(np.diagonal(inner)))
                total = total[rows.numel() :]
            current = {
                name: loss.new_tensor(float(mean)) for (name, loss), mean in zip(losses.items(), means, strict=True)
            }
            self._first |= {name: first_loss(self._first.get(name), loss) for name, loss in current.items()}
            assert self._balancer is not None
            self._balancer.update(current, self._first, norms)
        self._probe.first |= self._first

    @property
    def _probe(self) -> TaskProbe:
        probe = self._probes["tasks"]
        assert isinstance(probe, TaskProbe)
        return probe

    def _begin(
        self,
        losses: Mapping[str, Tensor],
        declared: Mapping[str, Weight],
        shared: Shared,
        every: int | None,
        balance: str | None,
    ) -> None:
        """Check and apply the settings, which the first call fixes for the run."""
        if balance is not None and balance not in BALANCERS:
            raise ValueError(f"balance must be {', '.join(map(repr, BALANCERS))} or None, not {balance!r}")
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"every must be a number of steps, at least 1, not {every!r}")
        self._loop.guard(self._probe, self._probe.look, losses)
        self._probe.share(shared, losses)
        if balance is not None:
            _check_balance(balance, losses, declared, self._probe.reason)
            balancer: Balancer = BALANCERS[balance](self._settings)
            balancer.load_state_dict(self._saved)
            self._balancer = balancer
            self._first = dict(self._probe.first)
        self._every = every or (1 if balance == "gradnorm" else EVERY)

    def _weights(self, losses: Mapping[str, Tensor], declared: Mapping[str, Weight]) -> Mapping[str, Weight]:
        if self._balancer is None:
            return {name: weight * self._factors[name] if name in self._factors else weight
                    for name, weight in declared.items()} if self._factors else declared  # fmt: skip
        starting = {name: weight for name, weight in declared.items() if not isinstance(weight, Tensor)}
        return self._balancer.weights(losses, starting)

    def _observe(self, step: int, losses: Mapping[str, Tensor], weights: Mapping[str, Weight]) -> Tensor | None:
        """Pass the batch to the probe, which compares the tasks on the first batch of every N-th step."""
        probe = self._probe
        if not self._loop.runs(probe):
            return None
        self._loop.guard(probe, probe.see, losses, weights)
        if step % self._every or self._compared_at == step or not self._loop.runs(probe):
            return None
        self._compared_at = step
        norms: Tensor | None = self._loop.guard(probe, probe.compare, losses, weights)
        return norms

    def obstacle(self, task: str) -> str:
        """Why the weight of a task cannot be changed; empty if it can."""
        if self._balancer is not None:
            return "the weights of the tasks are balanced already"
        return "" if self._every and task else "no task of monitor.combine_losses is named"

    def rebalance(self, task: str, factor: float) -> dict[str, float | str]:
        """Multiply the weight of a task from now on."""
        before = self._factors.get(task, 1.0)
        self._factors[task] = before * factor
        return {"task": task, "from": before, "to": before * factor}

    def state_dict(self) -> dict[str, float]:
        if self._factors:
            return {_FACTOR + name: factor for name, factor in self._factors.items()}
        return self._saved if self._balancer is None else self._balancer.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore learned weights; before the first call, keep them until it comes."""
        factors = {name: float(value) for name, value in state.items() if name.startswith(_FACTOR)}
        self._factors = {name.removeprefix(_FACTOR): factor for name, factor in factors.items()}
        self._saved = {name: float(value) for name, value in state.items() if name not in factors}
        if self._balancer is not None:
            self._balancer.load_state_dict(self._saved)


def _sum(losses: Mapping[str, Tensor], weights: Mapping[str, Weight]) -> Tensor:
    """The sum from left to right, bit for bit as written by hand, since 1.0 · x is x."""
    parts = (weights[name] * loss for name, loss in losses.items())
    total: Tensor = next(parts)
    for part in parts:
        total = total + part
    return total


def _checked_losses(losses: Any) -> dict[str, Tensor]:
    if not isinstance(losses, Mapping) or not losses:
        raise TypeError(f"losses must map the name of each task to its loss, such as {{'type': loss}}, not {losses!r}")
    for name, loss in losses.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"a task's name must be a string without a slash, not {name!r}")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            actual = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TypeError(f"the loss of task {name!r} must be a tensor of one number, not {actual}; take its mean()")
    return dict(losses)


def _checked_weights(losses: Mapping[str, Tensor], weights: Any) -> dict[str, Weight]:
    if weights is not None and not isinstance(weights, Mapping):
        raise TypeError(f"weights must map the name of each task to a number, such as {{'type': 0.5}}, not {weights!r}")
    for name, weight in (weights or {}).items():
        if name not in losses:
            close = difflib.get_close_matches(name, losses, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the tasks are {', '.join(losses)}"
            raise ValueError(f"weights names the task {name!r}, which has no loss; {hint}")
        if isinstance(weight, Tensor):
            if weight.numel() != 1:
                raise TypeError(f"the weight of task {name!r} must be one number, not of shape {tuple(weight.shape)}")
        elif not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"the weight of task {name!r} must be a number of at least 0, not {weight!r}")
    return {name: (weights or {}).get(name, 1.0) for name in losses}


def _check_balance(balance: str, losses: Mapping[str, Tensor], declared: Mapping[str, Weight], reason: Reason) -> None:
    for name, weight in declared.items():
        if isinstance(weight, Tensor) or weight == 0:
            raise ValueError(f"balance needs positive weights, but the weight of task {name!r} is {weight!r}")
    for name, loss in losses.items():
        if balance == "uncertainty" and (first := float(loss.detach())) < 0:
            raise ValueError(
                f"balance='uncertainty' weighs a task by 1 / loss, but task {name!r} has a loss of {first:.4g}; "
                "use balance='gradnorm', or add a constant that keeps this loss above 0"
            )
    if balance == "gradnorm" and reason is not Reason.AVAILABLE:
        raise ValueError(f"balance='gradnorm' needs each task's gradient, which is unavailable here: {reason}")
