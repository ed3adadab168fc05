"""The monitor: measure → record → judge → act → show, once per optimizer step."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from forewarn.actions import Policy, act
from forewarn.alerts import Ledger
from forewarn.config import Config
from forewarn.history import History
from forewarn.probes.gradients import GradientProbe
from forewarn.probes.loop import Loop
from forewarn.probes.loss import LossProbe
from forewarn.probes.probe import Array, Pending, Probe, Reading
from forewarn.probes.speed import Stopwatch
from forewarn.probes.transfer import Transfer
from forewarn.probes.user import UserProbe
from forewarn.rules import Judge, enabled_rules
from forewarn.schedule import Escalation
from forewarn.store.writer import RunWriter
from forewarn.types import Action, Alert, Block, Facts, Outcome, Severity, State
from forewarn.views import View

_log = logging.getLogger("forewarn")


@dataclass(frozen=True, slots=True)
class _Step:
    """What was collected at one step, on its way to the host."""

    step: int
    time: float
    collected: list[tuple[Probe, Pending]]


class Monitor:
    """Watches one training run. Made by `forewarn.watch`."""

    def __init__(
        self,
        *,
        loop: Loop,
        probes: dict[str, Probe],
        stopwatch: Stopwatch,
        schedule: Escalation,
        config: Config,
        facts: Facts,
        writer: RunWriter | None,
        views: Sequence[View],
        policy: Policy,
    ) -> None:
        self.config = config
        self.facts = facts
        self.at = 0
        """The step under way: the next call of `step` completes it."""
        self.history = History(config.history_window, config.detail_window)
        rules = enabled_rules(config)
        self._judge = Judge(rules, config, facts)
        self._ledger = Ledger(rules)
        self._loop = loop
        self._probes = probes
        self._stopwatch = stopwatch
        self._schedule = schedule
        self._writer = writer
        self._views = list(views)
        self._policy = policy
        self._transfer: Transfer[_Step] = Transfer()
        self._stop = False
        self._closed = False
        self._told: set[str] = set()
        self._loop.measured = schedule.measured(0)
        weakref.finalize(self, loop.close)  # a monitor that nobody holds any more must not go on measuring

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every alert of the run that has fired, in the order in which they did."""
        return self._ledger.alerts

    @property
    def firing(self) -> tuple[Alert, ...]:
        """The alerts that are open now, most important first: the cause before its symptoms."""
        return self._ledger.firing

    @property
    def should_stop(self) -> bool:
        """Whether the policy asks the loop to stop; never True under the default policy."""
        return self._stop

    def step(self, loss: Tensor | float | None = None, **extra: Tensor | float) -> Outcome:
        """Complete one optimizer step. `extra` values are recorded as `train/NAME`.

        On an accelerator the outcome is that of the steps whose values have arrived: usually the step before.
        """
        self._check_open()
        with self._stopwatch:
            try:
                self._give(loss, extra)
                now = _Step(self.at, time.time(), self._loop.collect())
                self._transfer.send(now, [tensor for _, pending in now.collected for tensor in pending.tensors])
                outcome = self._conclude(self._transfer.receive())
                self._loop.measured = self._schedule.measured(self.at + 1)
            except _WrongArgument as error:
                raise error.cause from None
            except Exception as error:
                self._loop.report("monitor itself", "monitor", error)
                self._told.clear()  # what this step had to tell may have been lost with it
                outcome = Outcome()
            finally:
                self.at += 1
            return outcome

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the model's gradients as `torch.nn.utils.clip_grad_norm_` does, whose norm is reused: no second pass."""
        self._check_open()
        gradients = self._probes["gradients"]
        assert isinstance(gradients, GradientProbe)
        return gradients.clip(max_norm, error_if_nonfinite)

    def log(self, name: str, value: Tensor | float, scope: str = "", *, completed: bool = False) -> None:
        """Record a value of your own under a name such as `eval/accuracy`.

        It belongs to the step under way, or with `completed=True` to the one that ended last.
        """
        self._check_open()
        user = self._probes["user"]
        assert isinstance(user, UserProbe)
        user.log(name, value, scope)
        if completed:
            self._keep_what_was_logged()

    def close(self, reason: str = "completed") -> None:
        """Take all hooks back, judge what is still under way and write the end of the run. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.close()
        with self._stopwatch:
            try:
                self._conclude(self._transfer.receive(wait=True))
                self._keep_what_was_logged()
            except Exception:
                _log.exception("the monitor failed while closing")
        for view in self._views:
            self._safely(view, view.close)
        if self._writer is not None:
            self._writer.close(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("completed" if kind is None else f"{kind.__name__}: {error}".rstrip(": "))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to go on without a seam; plain values and tensors only."""
        self._conclude(self._transfer.receive(wait=True))
        state = {
            "at": self.at,
            "dense_until": self._schedule.until,
            "history": self.history.state_dict(),
            "ledger": self._ledger.state_dict(),
            "failed_rules": sorted(self._judge.failed),
            "probes": {name: probe.state_dict() for name, probe in self._probes.items()},
        }
        portable: dict[str, Any] = to_tensors(state)
        return portable

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; what the run directory holds from that step on is discarded."""
        self._check_open()
        state = _to_arrays(state)
        self.at = int(state["at"])
        self._schedule.until = int(state["dense_until"])
        self.history.load_state_dict(state["history"])
        self._ledger.load_state_dict(state["ledger"])
        self._judge.failed = set(state["failed_rules"])
        for name, probe in self._probes.items():
            if state["probes"].get(name):
                probe.load_state_dict(state["probes"][name])
        if self._writer is not None and self._writer.failure is None:
            self._writer.close("rewound")
            self._writer = RunWriter(
                self._writer.path, facts=self.facts, config=self.config.to_dict(), resume_at=self.at
            )
        self._loop.measured = self._schedule.measured(self.at)

    def recall(self, steps: Iterable[tuple[int, Sequence[Block]]], last_ema: float) -> None:
        """Go on after stored steps where no state was saved: they are judged again, and recorded nowhere."""
        for step, blocks in steps:
            self.history.append(blocks)
            self._ledger.update(self._judge(step, self.history, blocks), self.history, self.facts)
            self.at = step + 1
        self._probes["loss"].load_state_dict({"ema": last_ema})
        self._loop.measured = self._schedule.measured(self.at)

    def _give(self, loss: Any, extra: dict[str, Any]) -> None:
        """A wrong loss is an error at the first step; later it is the run that matters, and the value is left out."""
        probe = self._probes["loss"]
        assert isinstance(probe, LossProbe)
        try:
            probe.give(loss, extra)
        except (TypeError, ValueError) as error:
            if not self.history.names():
                raise _WrongArgument(error) from None
            _log.warning("step %d: %s; the value is left out", self.at, error)

    def _conclude(self, arrived: Iterable[tuple[_Step, list[Array]]]) -> Outcome:
        """Record, judge, act and show the steps whose values have arrived."""
        outcome = Outcome()
        for step, arrays in arrived:
            changed, taken = self._conclude_one(step, arrays)
            outcome = Outcome(outcome.alerts + changed, outcome.actions + taken)
        return outcome

    def _conclude_one(self, step: _Step, arrays: list[Array]) -> tuple[tuple[Alert, ...], tuple[Action, ...]]:
        blocks = self._blocks(step, arrays)
        self.history.append(blocks)
        judgement = self._judge(step.step, self.history, blocks)
        changed = self._ledger.update(judgement, self.history, self.facts)
        taken = act(changed, self._policy, step.step)
        self._stop = self._stop or any(each.action == "stop" for each in taken)
        if any(alert.severity >= Severity.WARNING and alert.state is State.FIRING for alert in changed):
            self._schedule.escalate(step.step)
        if self._writer is not None:
            self._writer.append(step.step, blocks)
            if changed or taken:
                findings = [alert.finding for alert in changed]
                self._writer.record(step.step, findings=findings, alerts=changed, actions=taken)
        for view in list(self._views):
            self._safely(view, view.show, step.step, blocks, changed, taken)
        return changed, taken

    def _blocks(self, step: _Step, arrays: list[Array]) -> list[Block]:
        """The readings of one step, in the form that is stored and judged."""
        readings: list[Reading] = []
        for probe, pending in step.collected:
            own, arrays = arrays[: len(pending.tensors)], arrays[len(pending.tensors) :]
            readings += self._loop.guard(probe, _decoded, pending, own) or []
        readings += self._troubles()
        with np.errstate(over="ignore"):
            return [
                Block(
                    step.step,
                    step.time,
                    reading.name,
                    reading.scopes,
                    np.asarray(reading.values, dtype=np.float32).reshape(len(reading.scopes)),
                )
                for reading in _joined(readings)
            ]

    def _troubles(self) -> Iterator[Reading]:
        """What went wrong in the monitor itself since the last step."""
        failed = {name: what for name, what in self._loop.failures.items() if name not in self._told}
        if failed:
            self._told |= set(failed)
            yield Reading("monitor/probe_failed", tuple(failed), [1.0] * len(failed))
            for name, what in failed.items():
                if self._writer is not None:
                    self._writer.event("probe_failed", probe=name, error=what)
        if self._writer is not None and self._writer.failure and "store" not in self._told:
            self._told.add("store")
            _log.warning("recording stopped: %s; training goes on", self._writer.failure)
            yield Reading("monitor/store_failed", ("",), 1.0)

    def _safely(self, view: View, call: Any, *args: Any) -> None:
        """Call a view; one that raises is dropped."""
        try:
            call(*args)
        except Exception as error:
            name = f"view {type(view).__name__}"
            _log.exception("the %s failed and is dropped; training goes on", name)
            self._loop.failures[name] = f"{type(error).__name__}: {error}"
            self._views = [other for other in self._views if other is not view]

    def _keep_what_was_logged(self) -> None:
        """Take what was logged since the last step into that step."""
        user = self._probes["user"]
        pending = user.collect(False)
        if pending is not None:
            self._transfer.send(_Step(max(0, self.at - 1), time.time(), [(user, pending)]), pending.tensors)
            self._conclude(self._transfer.receive(wait=self._closed))

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "the monitor is closed; call forewarn.watch for a new one (resume=True goes on with its run)"
            )


class _WrongArgument(Exception):  # noqa: N818 - carries the error that the user sees
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _decoded(pending: Pending, arrays: Sequence[Array]) -> list[Reading]:
    return list(pending.decode(arrays))


def _joined(readings: Iterable[Reading]) -> list[Reading]:
    """One reading per metric: several probes may each say of their own that it is unavailable."""
    found: dict[str, Reading] = {}
    apart: list[Reading] = []
    for reading in readings:
        known = found.get(reading.name)
        if known is None:
            found[reading.name] = reading
        elif set(known.scopes).isdisjoint(reading.scopes):
            scopes = known.scopes + reading.scopes
            found[reading.name] = Reading(reading.name, scopes, np.append(known.values, reading.values))
        else:
            apart.append(reading)  # logged under the name of another's, which comes last and counts
    return [*found.values(), *apart]


def to_tensors(tree: Any) -> Any:
    """The same tree with numpy arrays as tensors, so that `torch.load(weights_only=True)` reads it back."""
    if isinstance(tree, dict):
        return {name: to_tensors(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_tensors(value) for value in tree]
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree.copy())
    return tree.item() if isinstance(tree, np.generic) else tree


def _to_arrays(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _to_arrays(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_to_arrays(value) for value in tree]
    return tree.cpu().numpy() if isinstance(tree, Tensor) else tree
