"""Carries out a policy: decides, agrees with the other ranks, acts, and follows what comes of it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch.optim import Optimizer

from forewarn.act.checkpoints import Checkpoints
from forewarn.act.decisions import Decision, Decisions
from forewarn.act.guard import Guard
from forewarn.act.learning_rate import scale_lr
from forewarn.act.outcomes import Outcomes, highest_usual
from forewarn.act.task_losses import TaskLosses
from forewarn.act.training_state import Parts, TrainingState, copied
from forewarn.judge.families import Family
from forewarn.judge.history import History
from forewarn.judge.rules import family_of
from forewarn.measure.exchange import Exchange
from forewarn.policy import Policy
from forewarn.types import Action, Alert, AlertState, Block, Finding, Severity

_log = logging.getLogger("forewarn")

_FIRST_CHECKPOINT = 10
"""Number of steps before the first checkpoint."""

NO_CHECKPOINT = "there is no checkpoint yet"

_AT_ONCE = frozenset({"notify", "stop"})
"""Actions that need no agreement here: the first is taken by the views, the second has its own."""

_ELSEWHERE = (Family.PERFORMANCE, Family.MONITOR, Family.EVALUATION)
"""Families whose warnings do not make a checkpoint unhealthy."""


class Host(Protocol):
    """What a recovery needs of the monitor."""

    at: int
    history: History

    @property
    def path(self) -> Path | None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def snapshot(self, reason: str) -> Path | None: ...


Rewind = Callable[[dict[str, Any], Sequence[Action]], None]
"""Returns the monitor to a state, and records again what was done in the steps that are given up."""


class Recovery:
    """The policy of one run at work."""

    def __init__(
        self, policy: Policy, parts: Parts, tasks: TaskLosses, guard: Guard | None, exchange: Exchange | None
    ) -> None:
        self.parts = parts
        self.guard = guard
        self.clip_factor = 1.0
        """By which the limits given to `monitor.clip_grad_norm_` are multiplied."""
        self.clip_limit = math.inf
        """The largest limit, whatever is given."""
        self._policy = policy
        self._tasks = tasks
        self._exchange = exchange
        self._decisions = Decisions(policy)
        self._outcomes = Outcomes(policy.outcome_steps)
        self._pending: list[Decision] = []
        self._checkpoints: Checkpoints | None = None
        if "roll_back" in policy.actions and not policy.is_dry("roll_back"):
            self._checkpoints = Checkpoints(policy.roll_back, 0 if exchange is None else exchange.rank)
        self._last_clip = math.nan
        self._skipped_at = -1
        self._skips_in_a_row = 0
        self._is_healthy, self._is_critical = True, False
        self._levels: dict[str, float] = {}
        """By the code of an alert: the highest usual loss before it."""
        self._loaded: TrainingState | None = None
        """The checkpoint to which a return is prepared."""
        self._last_step = -1

    # The judging rank: decide.

    def conclude(
        self, step: int, firing: Sequence[Alert], blocks: Sequence[Block], history: History
    ) -> tuple[Action, ...]:
        """Decide what is done about the alerts of a judged step, and return the actions and outcomes known by now."""
        readings = {block.name: float(block.values[0]) for block in blocks if block.scopes == ("",)}
        actions: list[Action] = []
        if step > self._last_step:
            self._decisions.step()
            actions += self._outcomes.update({alert.identity for alert in firing}, readings.get("train/loss", math.nan))
        self._last_step = step
        worst = max((alert.severity for alert in firing if family_of(alert.code) not in _ELSEWHERE), default=0)
        self._is_healthy, self._is_critical = worst < Severity.WARNING, worst >= Severity.CRITICAL
        actions += self._skipped(step, readings, history)
        firing = [*self._unseen(step, readings), *firing]
        for decision in self._decisions.decide(firing, step, self._obstacle):
            self._levels[decision.code] = self._level_before(decision, firing, history)
            if decision.action in _AT_ONCE:
                actions.append(self._noted(decision, step, {}))
            else:
                self._pending.append(decision)
        return tuple(actions)

    def _skipped(self, step: int, readings: Mapping[str, float], history: History) -> list[Action]:
        """The action of the guard at this step, if any. A gradient scaler skips batches too, by itself."""
        if not (readings.get("guard/skipped") or readings.get("update/skipped")):
            return []
        self._skips_in_a_row = self._skips_in_a_row + 1 if self._skipped_at == step - 1 else 1
        self._skipped_at = step
        if not readings.get("guard/skipped"):
            return []
        self._decisions.take("skip_batch")
        norm, limit = readings["guard/checked_norm"], readings.get("guard/norm_limit", math.nan)
        code, what = ("G104", "far above its usual level") if math.isfinite(norm) else ("G101", "not finite")
        numbers = {"norm": norm} | ({"limit": limit} if math.isfinite(limit) and math.isfinite(norm) else {})
        losses = history.series("train/loss").values[:-1]
        self._levels[code] = highest_usual(losses.tolist())
        is_dry = self._policy.is_dry("skip_batch")
        return [self._noted(Decision("skip_batch", code, "", f"The gradient norm is {what}", is_dry), step, numbers)]

    def _unseen(self, step: int, readings: Mapping[str, float]) -> list[Alert]:
        """An alert about gradients that are never finite: no rule reads those of a step that was skipped."""
        norm = readings.get("guard/checked_norm", math.nan)
        is_streak = self._skips_in_a_row > self._policy.skip_batch.in_a_row
        if not (readings.get("guard/skipped") and is_streak) or math.isfinite(norm):
            return []
        words = "No gradient is finite any more"
        finding = Finding("G101", "", step, Severity.CRITICAL, norm, math.nan)
        since = step + 1 - self._skips_in_a_row
        about = ("G101", "non-finite-gradient", "", finding.severity, AlertState.FIRING, since, step, step, finding)
        return [Alert(*about, headline=words)]

    def _level_before(self, decision: Decision, firing: Sequence[Alert], history: History) -> float:
        """The highest usual loss before the alert of a decision."""
        alert = next(one for one in firing if one.code == decision.code)
        losses = history.series("train/loss")
        before = losses.values[losses.steps < alert.since]
        return highest_usual(before.tolist())

    def _obstacle(self, action: str, alert: Alert) -> str | None:
        """Why an action cannot help with this alert; empty if it can, None if it is at work already."""
        if any(decision.action == action for decision in self._pending):
            return None
        if action == "skip_batch":
            can_return = self._checkpoints is not None and self._checkpoints.steps
            if can_return and self._skips_in_a_row > self._policy.skip_batch.in_a_row:
                return "it is not the batch"
            if self._skipped_at == alert.last:
                return None
            return "the batch was not skipped before the step"
        if action == "roll_back" and self._checkpoints is not None and not self._checkpoints.steps:
            return NO_CHECKPOINT
        return ""

    # Every rank: act.

    def carry_out(self, host: Host, rewind: Rewind) -> tuple[Action, ...]:
        """Do what was decided, after a step at which all ranks do it. Returns what was done, on the judging rank."""
        step = host.at - 1
        if self._is_due(host.at):
            self._pending.append(Decision("checkpoint", numbers={"directory": str((host.path or Path()).absolute())}))
        decided = self._pending
        if self._exchange is not None:
            if self._exchange.off and self._pending:
                self._pending = []
                done = [one for one in decided if one.action != "checkpoint"]
                return tuple(self._noted(one, step, {}, "the ranks are not connected") for one in done)
            if self._pending:
                self._exchange.ask_to_act()
            if not self._exchange.acts_now():
                return ()
            decided = self._agreed(step)
            if self._checkpoints is not None and any(one.action == "roll_back" for one in decided):
                self._drop_what_others_lack(step, self._checkpoints)
        self._pending = []
        reasons = [self._prepared(decision) for decision in decided]
        if self._exchange is not None and decided:
            reasons = self._voted(step, reasons)
        taken: list[Action] = []
        for decision, reason in zip(decided, reasons, strict=True):
            numbers: dict[str, float | str] = {}
            if not reason and (not decision.dry_run or decision.action == "checkpoint"):
                try:
                    numbers = self._done(decision, host)
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    _log.warning("the action %s was not taken: %s", decision.action, reason)
            if decision.action != "checkpoint":
                action = self._noted(decision, step, numbers or self._foreseen(decision), reason)
                taken.append(action)
                if decision.action == "roll_back" and not reason and not decision.dry_run:
                    return self._after_return(rewind, taken)
        return tuple(taken) if self._judges else ()

    @property
    def _judges(self) -> bool:
        return self._exchange is None or self._exchange.records

    def _is_due(self, completed: int) -> bool:
        """Whether a checkpoint is taken now."""
        if self._checkpoints is None or not self._judges:
            return False
        if not self._is_healthy and (self._is_critical or self._checkpoints.steps):
            return False  # the first one is taken all the same: a run may live with a warning for long
        if any(decision.action in ("checkpoint", "roll_back") for decision in self._pending):
            return False
        if self._decisions.is_spent("roll_back"):
            return False
        last = self._checkpoints.last_step
        every = self._policy.roll_back.every
        return completed >= min(_FIRST_CHECKPOINT, every) if last < 0 else completed - last >= every

    def _agreed(self, step: int) -> list[Decision]:
        """What rank 0 has decided."""
        assert self._exchange is not None
        plain = [decision.to_json() for decision in self._pending] if self._judges else []
        word = self._exchange.word_of_rank_0(step, json.dumps(plain).encode())
        return [] if word is None else [Decision.from_json(decision) for decision in json.loads(word)]

    def _drop_what_others_lack(self, step: int, checkpoints: Checkpoints) -> None:
        """Leave the checkpoints that every rank has, so that all return to the same step: a disk may have been full."""
        assert self._exchange is not None
        words = self._exchange.words(step, json.dumps(checkpoints.steps).encode())
        if words is not None:
            checkpoints.leave(set.intersection(*(set(json.loads(word)) for word in words)))

    def _voted(self, step: int, reasons: list[str]) -> list[str]:
        """Why each decision cannot be carried out on some rank; empty if it can on all."""
        assert self._exchange is not None
        words = self._exchange.words(step, json.dumps(reasons).encode())
        if words is None:
            return ["the ranks are not connected"] * len(reasons)
        votes: list[list[str]] = [json.loads(word) for word in words]
        return [next(filter(None, of_all), "") for of_all in zip(*votes, strict=True)]

    def _prepared(self, decision: Decision) -> str:
        """Why an action cannot be taken on this rank; empty if it can. Changes nothing."""
        if decision.action == "lower_lr" and not any(_rates(one) for one in self.parts.optimizers):
            return "no optimizer has a learning rate above zero"
        if decision.action in ("lower_clip", "raise_clip"):
            return self._obstacle_to_clip(decision)
        if decision.action == "rebalance":
            return self._tasks.obstacle(str(decision.numbers.get("task", "")))
        if decision.action == "roll_back" and not decision.dry_run:
            return self._obstacle_to_return(decision)
        return ""

    def _obstacle_to_clip(self, decision: Decision) -> str:
        limit = float(decision.numbers.get("limit", math.nan))
        if math.isnan(self._last_clip):
            return "the loop does not clip with monitor.clip_grad_norm_"
        if math.isinf(self._last_clip) and not (decision.action == "lower_clip" and math.isfinite(limit)):
            return "the limit is infinite"
        return ""

    def _obstacle_to_return(self, decision: Decision) -> str:
        assert self._checkpoints is not None
        target = self._target(decision)
        checkpoint = None if target is None else self._checkpoints.get(target)
        if checkpoint is None:
            return NO_CHECKPOINT
        try:
            loaded = checkpoint.load()
            loaded.check(self.parts)
        except Exception as error:
            return str(error)
        self._loaded = loaded
        return ""

    def _target(self, decision: Decision) -> int | None:
        assert self._checkpoints is not None
        return self._checkpoints.before(int(decision.numbers["began"]))

    def _done(self, decision: Decision, host: Host) -> dict[str, float | str]:
        """Carry out one decision, and return its numbers."""
        numbers = decision.numbers
        if decision.action == "checkpoint":
            assert self._checkpoints is not None
            directory = Path(str(numbers["directory"])) if numbers["directory"] else None
            self._checkpoints.take(host.at, host.state_dict(), self.parts, directory)
            return {}
        if decision.action == "snapshot":
            return self._snapshot(decision, host)
        if decision.action == "lower_lr":
            before, after = scale_lr(self.parts.optimizers, self.parts.schedulers(), float(numbers["factor"]))
            return {"from": before, "to": after}
        if decision.action in ("lower_clip", "raise_clip"):
            return self._move_clip(float(numbers["factor"]), float(numbers["limit"]))
        if decision.action == "rebalance":
            return self._tasks.rebalance(str(numbers["task"]), float(numbers["factor"]))
        assert decision.action == "roll_back"
        return self._return(decision, host)

    def _snapshot(self, decision: Decision, host: Host) -> dict[str, float | str]:
        if not self._judges:
            return {}
        path = host.snapshot(f"{decision.code}: {decision.reason}")
        if path is None:
            raise OSError("the log says why")
        return {"path": f"{path.parent.name}/{path.name}"}

    def _foreseen(self, decision: Decision) -> dict[str, float | str]:
        """What a dry run would have done, in numbers."""
        if decision.action == "lower_lr" and (rates := [rate for one in self.parts.optimizers for rate in _rates(one)]):
            return {"from": max(rates), "to": max(rates) * float(decision.numbers["factor"])}
        if decision.action in ("lower_clip", "raise_clip") and math.isfinite(self._last_clip):
            return {"from": self._last_clip, "to": self._last_clip * float(decision.numbers["factor"])}
        return {name: value for name, value in decision.numbers.items() if name in ("task", "factor", "began")}

    def clip(self, max_norm: float) -> float:
        """The limit to clip to in place of the one that the loop asks for."""
        self._last_clip = min(max_norm * self.clip_factor, self.clip_limit)
        return self._last_clip

    def _move_clip(self, factor: float, limit: float) -> dict[str, float | str]:
        before = self._last_clip
        if math.isinf(before):
            self.clip_limit = limit
        else:
            self.clip_factor *= factor
            self.clip_limit *= factor
        self._last_clip = limit if math.isinf(before) else before * factor
        return {"from": before, "to": self._last_clip}

    def _return(self, decision: Decision, host: Host) -> dict[str, float | str]:
        """Return to the checkpoint that was prepared."""
        assert self._checkpoints is not None
        settings = self._policy.roll_back
        target = self._target(decision)
        assert target is not None
        assert self._loaded is not None
        self._loaded.restore(self.parts, settings.skip_data)
        self._loaded = None
        if settings.lr_factor < 1:
            scale_lr(self.parts.optimizers, self.parts.schedulers(), settings.lr_factor)
        return {"from": host.at, "to": target}

    def _after_return(self, rewind: Rewind, taken: Sequence[Action]) -> tuple[Action, ...]:
        """Return the monitor to the checkpoint too; what was done in the steps given up stays recorded."""
        assert self._checkpoints is not None
        kept, target = self.state_dict(), int(taken[-1].parameters["to"])
        checkpoint = self._checkpoints.get(target)
        assert checkpoint is not None
        rewind(copied(checkpoint.monitor), [one for one in self._outcomes.taken.values() if one.step >= target])
        self.load_state_dict(kept, target)  # budgets are not renewed
        self._pending, self._last_step = [], target - 1
        self._is_healthy, self._is_critical = True, False
        self._skipped_at, self._skips_in_a_row = -1, 0
        return tuple(taken) if self._judges else ()

    def _noted(self, decision: Decision, step: int, numbers: Mapping[str, float | str], failed: str = "") -> Action:
        """The action as it is recorded, whose outcome is followed from now on."""
        about = (step, decision.code, decision.scope, decision.action)
        action = Action(*about, dict(numbers), decision.reason, decision.dry_run, failed)
        between = 0
        if decision.action == "roll_back" and not failed and not decision.dry_run:
            between = int(numbers["from"]) - int(numbers["to"])
        self._outcomes.add(action, self._levels.get(decision.code, math.nan), between)
        return action

    def finish(self) -> list[Action]:
        """The outcomes that are not recorded yet, at the end of the run; checkpoints are deleted."""
        if self._checkpoints is not None:
            self._checkpoints.drop()
        return self._outcomes.finish() if self._judges else []

    def state_dict(self) -> dict[str, Any]:
        return {
            "decisions": self._decisions.state_dict(),
            "outcomes": self._outcomes.state_dict(),
            "clip": [self.clip_factor, self.clip_limit],
        }

    def load_state_dict(self, state: Mapping[str, Any], completed: int) -> None:
        """Continue after `completed` steps; checkpoints of later ones are dropped."""
        if self._checkpoints is not None:
            self._checkpoints.returned_to(completed)
        if not state:
            return
        self._decisions.load_state_dict(state["decisions"])
        self._outcomes.load_state_dict(state["outcomes"])
        self.clip_factor, self.clip_limit = map(float, state["clip"])


def _rates(optimizer: Optimizer) -> list[float]:
    """The learning rates above zero."""
    return [rate for group in optimizer.param_groups if (rate := float(group.get("lr", 0.0))) > 0]
