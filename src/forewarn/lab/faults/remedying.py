"""Carries out a remedy: the script runs again with it, as a person would do from the last checkpoint."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping

from torch import Tensor

from forewarn.lab.faults.change import Change
from forewarn.lab.faults.injected.rates import Clipped
from forewarn.lab.faults.session import Session
from forewarn.types import Remedy

Numbers = Mapping[str, float | str]

CHECKPOINT_EVERY = 20
"""Steps between the checkpoints from which a remedied run continues."""
SKIPPED_AFTER = 10
"""Steps of data that are skipped after the alert when a run is rolled back."""
LOWER = Remedy("lower_lr", {"factor": 0.1}, "")
"""What the rule `always lower the learning rate` does."""
USUAL = (
    LOWER,
    Remedy("raise_lr", {"factor": 10.0}, ""),
    Remedy("clip_gradient", {"max_norm": 1.0}, ""),
    Remedy("warm_up", {"steps": 20}, ""),
    Remedy("lower_weight_decay", {"factor": 0.1}, ""),
    Remedy("raise_weight_decay", {"to": 0.01}, ""),
    Remedy("lower_beta2", {"to": 0.95}, ""),
    Remedy("skip_batch", {}, ""),
    Remedy("stop", {}, ""),
)
"""The remedies among which chance decides, with their usual numbers."""


def random_remedy(case: str) -> Remedy:
    return random.Random(case).choice(USUAL)


def checkpoint_before(step: int) -> int:
    return step // CHECKPOINT_EVERY * CHECKPOINT_EVERY


def as_change(remedy: Remedy, seen: int, num_steps: int, *, is_twin: bool = False) -> Change | None:
    """The remedy as a change of the script from the checkpoint before step `seen` on; None if no code can do it.

    In a twin that has not got the fault, a number that is to be lowered or raised may be right already.
    """
    numbers = remedy.parameters
    begin = checkpoint_before(seen)
    match remedy.action:
        case "lower_lr" | "raise_lr" | "set_lr":
            return _Rate(begin, _factor(numbers), limit=float(numbers.get("to", 0)) if is_twin else 0.0)
        case "decay_lr":
            return _Rate(begin, 0.1, over=num_steps - begin)
        case "warm_up":
            return _Rate(begin, 1.0, warm_up=int(numbers.get("steps", 20)))
        case "clip_gradient":
            return Clipped(float(numbers["max_norm"]), begin)
        case "lower_clip":
            return Clipped(float(numbers["to"]), begin)
        case "lower_weight_decay" | "raise_weight_decay":
            return _Setting("weight_decay", numbers, begin, never_higher=remedy.action == "lower_weight_decay")
        case "lower_beta2":
            return _Setting("betas", numbers, begin)
        case "raise_epsilon" | "lower_epsilon":
            return _Setting("eps", numbers, begin) if "to" in numbers else None
        case "skip_batch":
            return _Skipped(seen, seen + 1)
        case "roll_back":
            return _Skipped(begin, seen + SKIPPED_AFTER)
        case "stop" | "stop_early":
            return _Rate(seen, 0.0)
        case "add_to_optimizer":
            return _Added()
        case "raise_task_weight" | "lower_task_weight":
            return _TaskWeight(str(numbers["task"]), _factor(numbers)) if "from" in numbers else None
    return None


def _factor(numbers: Numbers) -> float:
    """By how much a quantity is multiplied; a numeric remedy without a scale halves it."""
    before, after = float(numbers.get("from", math.nan)), float(numbers.get("to", math.nan))
    return after / before if before and math.isfinite(after / before) else float(numbers.get("factor", 0.5))


class _Rate(Change):
    """Multiplies the learning rate by a factor from a step on: at once, over a decay, or after a warm-up.

    With a limit, the rate is moved to it, unless it is there or beyond already.
    """

    def __init__(self, begin: int, factor: float, *, over: int = 0, warm_up: int = 0, limit: float = 0.0) -> None:
        self.begin, self.factor, self.over, self.warm_up, self.limit = begin, factor, over, warm_up, limit
        self._now = 1.0

    def watched(self, session: Session) -> None:
        self._scale(session, 0)

    def completed(self, step: int, session: Session) -> None:
        self._scale(session, step + 1)

    def _scale(self, session: Session, step: int) -> None:
        if self.limit and step == self.begin:
            rates = [group["lr"] for optimizer in session.optimizers for group in optimizer.param_groups]
            missing = self.limit / max(rates) if max(rates) else 1.0
            self.factor = min(1.0, missing) if self.factor < 1 else max(1.0, missing)
        wanted = self._wanted(step)
        if wanted != self._now and self._now:
            session.scale_lr(wanted / self._now)
            self._now = wanted

    def _wanted(self, step: int) -> float:
        since = step - self.begin
        if since < 0:
            return 1.0
        if self.over:
            return self.factor + (1 - self.factor) * 0.5 * (1 + math.cos(math.pi * min(1.0, since / self.over)))
        return self.factor * min(1.0, (since + 1) / self.warm_up) if self.warm_up else self.factor


class _Setting(Change):
    """Sets an option of every optimizer group from a step on."""

    def __init__(self, name: str, numbers: Numbers, begin: int, *, never_higher: bool = False) -> None:
        self.name, self.numbers, self.begin, self.never_higher = name, numbers, begin, never_higher

    def watched(self, session: Session) -> None:
        if self.begin == 0:
            self._set(session)

    def completed(self, step: int, session: Session) -> None:
        if step == self.begin - 1:
            self._set(session)

    def _set(self, session: Session) -> None:
        for group in (group for optimizer in session.optimizers for group in optimizer.param_groups):
            if self.name not in group:
                continue
            if self.name == "betas":
                group["betas"] = (group["betas"][0], float(self.numbers["to"]))
            elif "to" in self.numbers:
                to = float(self.numbers["to"])
                group[self.name] = min(to, group[self.name]) if self.never_higher else to
            else:
                group[self.name] *= float(self.numbers["factor"])


class _Skipped(Change):
    """Repeats an earlier batch instead of those between two steps."""

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end
        self._before: tuple[Tensor, Tensor] | None = None

    def batch(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.first <= step < self.end and self._before is not None and self._before[0].shape == inputs.shape:
            return self._before
        self._before = (inputs, targets)
        return inputs, targets


class _Added(Change):
    """Adds every trainable parameter that no optimizer has to the one that has its nearest relative."""

    def watched(self, session: Session) -> None:
        owners = {
            id(parameter): optimizer
            for optimizer in session.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        named = dict(session.model.named_parameters())
        owned = [name for name, parameter in named.items() if id(parameter) in owners]
        for name, parameter in named.items():
            if parameter.requires_grad and name not in owned and owned:
                relative = max(owned, key=lambda other: _num_shared(name, other))
                owners[id(named[relative])].param_groups[0]["params"].append(parameter)


def _num_shared(name: str, other: str) -> int:
    """The number of leading modules that two parameters share."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class _TaskWeight(Change):
    """Multiplies the weight of a task."""

    def __init__(self, task: str, factor: float) -> None:
        self.task, self.factor = task, factor

    def number(self, name: str, value: float) -> float:
        if name != "task_weight":
            return value
        return value * self.factor if self.task == "contrast" else value / self.factor
