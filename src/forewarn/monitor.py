"""The monitor: measure → record → judge → act → show, once per optimizer step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import operator
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor
from torch.optim import Optimizer

from forewarn.act.adjustments import Adjuster
from forewarn.act.clipping import clip_grad_norm_
from forewarn.act.recovery import Recovery
from forewarn.act.task_losses import TaskLosses
from forewarn.config import Config
from forewarn.judge import objective
from forewarn.judge.epochs import NO_VALIDATION_LOSS, Patience
from forewarn.judge.families import Family
from forewarn.judge.forecast import Forecast, LossCurve, forecast
from forewarn.judge.judgement import Judge, RuleSet
from forewarn.judge.ledger import Ledger
from forewarn.judge.rules import family_of
from forewarn.measure.cadence import Cadence
from forewarn.measure.exchange import Exchange
from forewarn.measure.loader import watched
from forewarn.measure.loop import Loop
from forewarn.measure.module_tree import Models, children_of
from forewarn.measure.portable_state import to_tensors
from forewarn.measure.post_mortem import last_readings
from forewarn.measure.probe import ONE, Array, Pending, Probe, Reading
from forewarn.measure.probes.batch import BatchProbe
from forewarn.measure.probes.evaluation import EvaluationProbe
from forewarn.measure.probes.gradients import GradientProbe
from forewarn.measure.probes.loss import LossProbe, as_scalar
from forewarn.measure.probes.speed import COUNTED, SpeedProbe
from forewarn.measure.probes.tasks import Shared
from forewarn.measure.probes.user import UserProbe
from forewarn.measure.recording import Collected, recorded
from forewarn.measure.step import Step
from forewarn.measure.stopwatch import Stopwatch
from forewarn.measure.transfer import Transfer
from forewarn.measure.watchdog import FIRST_STEPS, Watchdog
from forewarn.saved_state import checked_state, is_unsaved, unsaved
from forewarn.snapshots.evidence import Evidence
from forewarn.standing import exit_code, verdict
from forewarn.store.stall_report import report_stall
from forewarn.store.writer import RunWriter
from forewarn.troubles import Troubles
from forewarn.types import Action, Alert, AlertState, Block, Distribution, Outcome, RunEnd, RunInfo, RunStart, Severity
from forewarn.views import View
from forewarn.views.view_set import ViewSet

if TYPE_CHECKING:
    from forewarn.preflight_checks.result import Preflight

_log = logging.getLogger("forewarn")

_CLOSED = "the monitor is closed; call forewarn.watch for a new one (resume=True continues its run)"

_QUIET = Outcome()
"""The outcome of most steps."""


class Monitor:
    """Watches one training run. Created by `forewarn.watch`."""

    def __init__(
        self,
        *,
        loop: Loop,
        probes: dict[str, Probe],
        stopwatch: Stopwatch,
        cadence: Cadence,
        config: Config,
        rule_set: RuleSet,
        info: RunInfo,
        writer: RunWriter | None,
        views: Sequence[View],
        recovery: Callable[[TaskLosses], Recovery] | None = None,
        optimizers: Sequence[Optimizer] = (),
        scaler: Any = None,
        evidence: Evidence,
        exchange: Exchange | None = None,
    ) -> None:
        self.config = config
        self.info = info
        self.at = 0
        """The current step; the next call of `step` completes it."""
        self.history = rule_set.history(info)
        self._judge = Judge(rule_set, info)
        self._ledger = Ledger(rule_set.rules)
        self._curve = LossCurve()
        self._loop = loop
        self._probes = probes
        self._stopwatch = stopwatch
        self._tasks = TaskLosses(probes, loop, config.balancing, exchange)
        self._schedule = cadence.schedule
        self._cadence = cadence
        self._writer = writer
        self._views = ViewSet(views, loop.failures)
        self._recovery = None if recovery is None else recovery(self._tasks)
        self._optimizers = tuple(optimizers)
        self._scaler = scaler
        self._evidence = evidence
        self._adjuster = Adjuster(optimizers, exchange)
        self._epoch_ended = -1
        """The last step of the last epoch."""
        self._transfer: Transfer[Collected] = Transfer()
        self._exchange = exchange
        self._resumed_at = -1
        """The first step after a resume."""
        self._patience = Patience(config.early_stopping_patience, config.early_stopping_min_delta)
        self._stop = False
        self._has_loss = False
        self._closed = False
        self._troubles = Troubles(loop.failures, self._views, evidence, exchange)
        self._num_rules = len(rule_set.rules)
        self._loop.measured = self._schedule.measured(0)
        self._watchdog: Watchdog | None = None
        if config.stall_seconds and writer is not None and not hasattr(sys, "ps1"):  # a session may rest between cells
            self._watchdog = Watchdog(stopwatch, weakref.WeakMethod(self._stalled), config.stall_seconds)
        # A monitor that nobody references any more must stop measuring; the thread of its watchdog then ends itself.
        self._finalizer = weakref.finalize(self, loop.close)
        if exchange is not None:
            weakref.finalize(self, exchange.finish)
            self._at_exit = functools.partial(_left_open, weakref.ref(self))
            atexit.register(self._at_exit)

    def begin(self, instead_of: Path | None = None) -> None:
        """Tell the views that the run begins, and which path was requested if it was taken."""
        if self._writer is not None:
            self._views.begin(RunStart(self._writer.path, self.info, self._num_rules, instead_of))

    @property
    def path(self) -> Path | None:
        """The directory of the run; None in a process that does not record, such as rank 1 of a distributed run."""
        return None if self._writer is None else self._writer.path

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """All alerts of the run that have fired, in that order."""
        return self._ledger.alerts

    @property
    def firing(self) -> tuple[Alert, ...]:
        """The open alerts, most important first: a cause comes before its symptoms."""
        try:
            return self._ledger.firing
        except Exception as error:
            self._failed(error)
            return ()

    @property
    def should_stop(self) -> bool:
        """Whether training should stop, by the policy or by early stopping. By default, both are off."""
        return self._stop

    def step(self, loss: Tensor | float | None = None, **extra: Tensor | float) -> Outcome:
        """Complete one optimizer step. `extra` values are recorded as `train/NAME`.

        The numbers of `tokens` and `samples` in this step give `speed/tokens_per_second` and so on instead.

        On an accelerator, the outcome covers the steps whose values have arrived: usually the previous step.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        outcome = _QUIET
        try:
            with self._stopwatch:
                self._give(loss, extra)
                at_once = self._exchange is None and self._transfer.is_empty
                collected = Collected(self.at, time.time(), *self._loop.collect(at_once))
                if self._exchange is not None:
                    collected = collected._replace(wishes=self._exchange.wishes())
                if at_once and not collected.pending:
                    outcome = self._conclude([(collected, [])])
                else:
                    self._transfer.send(collected, collected.tensors)
                    if any(collected.wishes or ()):
                        self._hand_in()
                    outcome = self._conclude(self._arrived())
        except _WrongArgument as error:
            raise error.cause from None
        except Exception as error:
            self._failed(error)
            self._troubles.told.clear()  # reports of this step may have been lost with it
        finally:
            self.at += 1
        try:
            if self._loop.kept is not None:
                self._loop.kept.end_step(self.at - 1)
            if self._exchange is not None:
                self._follow_ranks(self._exchange)
                if self._tasks.learns:
                    self._hand_in()
                    self._tasks.learn(self.at - 1)
            if self._cadence.budget is not None and self._writer is not None:
                is_measured, spent = self._loop.measured, self._stopwatch.spent
                self._cadence.keep_to(self._cadence.budget, self.at - 1, spent, is_measured=is_measured)
            if self._recovery is not None:
                outcome = self._recover(self._recovery, outcome)
            self._loop.measured = self._schedule.measured(self.at)
            if self._stopwatch.num_steps == FIRST_STEPS and self._watchdog is not None:
                self._watchdog.start()
        except Exception as error:  # a user-defined schedule
            self._failed(error)
        return outcome

    def pause(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """`with monitor.pause("eval"):` — time that belongs to no step: evaluation, a checkpoint, generated samples.

        It counts neither as time of a step nor for the speed, and is recorded as `speed/pause_seconds` by its kind.
        """
        if not isinstance(kind, str) or not kind:
            raise TypeError(f"the kind of a pause must be a word, such as 'eval', not {kind!r}")
        return self._stopwatch.pause(kind)

    def watch_loader(self, loader: Any) -> Any:
        """The loader of the training data, watched: the time inside its `next()` is the phase `data` of a step.

        What it returns behaves like the loader itself in every other way.
        """
        if not hasattr(loader, "__iter__"):
            raise TypeError(f"loader must be something to iterate over, such as a DataLoader, not {loader!r}")
        self._stopwatch.watch_loader()
        if self._recovery is not None:
            loader = self._recovery.parts.follow(loader)
        return watched(loader, self._stopwatch)

    def end_epoch(self, *, train_loss: Tensor | float | None = None, val_loss: Tensor | float | None = None) -> Outcome:
        """Complete an epoch: record and judge its results, at the last completed step.

        `train_loss` defaults to the mean of the losses passed to `step` since the last epoch. With
        `Config(early_stopping_patience=…)`, a validation loss that no longer improves sets `should_stop`.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        probe = self._probes["evaluation"]
        assert isinstance(probe, EvaluationProbe)
        try:
            with self._stopwatch:
                _checked(probe.give, train_loss, val_loss)
                if val_loss is None and "validation" not in self._troubles.told:
                    self._troubles.told.add("validation")
                    _log.warning("%s", NO_VALIDATION_LOSS)
                elif val_loss is not None and self._patience.is_over(float(as_scalar("val_loss", val_loss))):
                    self._ask_to_stop()
                self.at = max(self.at, self._epoch_ended + 2)  # an epoch without steps needs its own step number
                self._epoch_ended = self.at - 1
                return self._keep((self._probes["loss"], probe), Step(ends_epoch=True), wait=True)
        except _WrongArgument as error:
            raise error.cause from None
        except Exception as error:
            self._failed(error)
            return Outcome()

    def adjust(self, scheduler: Any = None) -> tuple[Action, ...]:
        """Apply the advice of open warnings about epochs, and return the actions taken.

        It can lower the learning rate and raise the weight decay, once per finding. Pass the learning-rate `scheduler`,
        if there is one, so that its base learning rate is lowered too.

        In a distributed run, call it on every rank after the same step: they wait for each other, and all of them do
        what rank 0 decides. If they are not in contact, nothing is changed.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        if scheduler is not None and not hasattr(scheduler, "step"):
            raise TypeError(f"scheduler must be a torch learning-rate scheduler, not {scheduler!r}")
        step = max(0, self.at - 1)
        actions: tuple[Action, ...] = ()
        try:
            self._hand_in()
            actions = self._adjuster.adjust(step, self.firing, scheduler)
            if actions:
                self._show(step, actions)
        except Exception as error:
            self._failed(error)
        return actions

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients with `torch.nn.utils.clip_grad_norm_` and reuse its norm, which saves a second pass.

        Under FSDP1 that is the method of the same name of `FullyShardedDataParallel`: call it on every rank.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        if not hasattr(max_norm, "__float__"):
            raise TypeError(_not_a_limit(max_norm))
        if self._recovery is not None:
            max_norm = self._recovery.clip(float(max_norm))
        norm = clip_grad_norm_(self._loop.model, max_norm, error_if_nonfinite=error_if_nonfinite)
        try:
            if self._recovery is not None and self._recovery.guard is not None:
                self._recovery.guard.clipped(norm)
            self.clipped(norm, max_norm)
        except Exception as error:  # the gradients are clipped, whatever becomes of their norm
            self._failed(error)
        return norm

    def clipped(self, norm: Tensor | float | None, max_norm: float) -> None:
        """Report gradients that were clipped elsewhere: their norm before it, which is reused, and the limit.

        If the norm is None, it is measured.
        Call it between `backward()` and `optimizer.step()`. Without it the limit is found from two measured steps.
        """
        if not hasattr(max_norm, "__float__"):
            raise TypeError(_not_a_limit(max_norm))
        try:
            gradients = self._probes.get("gradients")
            if isinstance(gradients, GradientProbe):  # not with Measure(gradients=False)
                self._loop.guard(gradients, gradients.clipped, norm, max_norm)
        except Exception as error:
            self._failed(error)

    def preflight(
        self,
        data: Any,
        loss: Any = None,
        *,
        steps: int = 100,
        find_lr: bool = True,
        clip: float | None = None,
        accumulate: int = 1,
        total_steps: int | None = None,
    ) -> Preflight:
        """`forewarn.preflight` on the watched model and its optimizers, with the settings of this monitor.

        It runs on a copy: the model, the optimizers and this run are left as they are.
        """
        from forewarn.preflight_checks.inspection import preflight

        model = self._loop.model
        return preflight(
            children_of(model) if isinstance(model, Models) else model, self._optimizers, data, loss,
            steps=steps, find_lr=find_lr, clip=clip, scaler=self._scaler, accumulate=accumulate,
            total_steps=total_steps, config=self.config,
        )  # fmt: skip

    def batch(self, inputs: Any, targets: Any = None) -> None:
        """Report the batch of this step, if the model's arguments do not show it; call it before `monitor.step`.

        It is read on measured steps only. Integer targets are taken for classes. Snapshots with `keep_batches` save it.
        """
        kept = self._loop.kept
        if self._closed or not (self._loop.measured or kept is not None):
            return
        try:
            if kept is not None:
                kept.give(inputs, targets)
            if not self._loop.measured:
                return
            probe = self._probes.get("batch")
            if isinstance(probe, BatchProbe):  # not with Measure(activations=False)
                self._loop.guard(probe, probe.give, inputs, targets)
        except Exception as error:
            self._failed(error)

    def snapshot(self, reason: str = "") -> Path | None:
        """Save what is needed to debug this step to `RUN/snapshots/step-000123/`, and return that folder.

        It holds the readings of the last steps, the settings and the environment, and what `Config.snapshots` adds: the
        batch, random states, weights. `forewarn replay` runs the step again. Call it before `monitor.step` for the step
        under way (with `keep_batches`), or afterwards for the completed one. The training waits until it is written.
        Returns None in a process that does not record, and if it cannot be written, which the log says.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a string, not {reason!r}")
        kept = self._loop.kept
        if self._writer is None:
            return None
        step = self.at if kept is not None and kept.is_open else max(0, self.at - 1)
        return self._evidence.save(self._writer, step, self.at, self.history, reason)

    def combine_losses(
        self,
        losses: Mapping[str, Tensor],
        *,
        shared: Shared = None,
        weights: Mapping[str, float | Tensor] | None = None,
        every: int | None = None,
        balance: str | None = None,
    ) -> Tensor:
        """The weighted sum of several losses, to call `backward()` on. Every N steps, the tasks are compared.

        - `losses`: one scalar loss per task name, before `backward()`.
        - `shared`: the parameters on which to compare the tasks: a regular expression over parameter names, a module or
          parameters. Default: the last layer that every loss reaches. Each comparison runs a backward pass down to it.
        - `weights`: one weight per task, 1 by default. The sum is bit-identical to `w_a * loss_a + w_b * loss_b`.
        - `every`: compare every N steps. Default: 10, or 1 with `balance="gradnorm"`, which needs the comparison.
        - `balance`: `"gradnorm"` or `"uncertainty"` adjusts the weights automatically, starting from `weights`. This is
          the only argument with which a monitor changes the training.

        `shared`, `every` and `balance` are fixed by the first call.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        try:
            with self._stopwatch:
                checked = _checked(self._tasks.prepare, losses, shared, weights, every, balance)
                return self._tasks.combine(self.at, *checked)
        except _WrongArgument as error:
            raise error.cause from None
        except Exception as error:
            self._failed(error)
            declared = weights or {}
            parts = [declared.get(name, 1.0) * loss for name, loss in losses.items()]
            return functools.reduce(operator.add, parts)

    def log(self, name: str, value: Tensor | float, scope: str = "", *, completed: bool = False) -> None:
        """Record your own value under a name such as `eval/accuracy`.

        It belongs to the current step, or with `completed=True` to the last completed one.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        user = self._probes["user"]
        assert isinstance(user, UserProbe)
        try:
            _checked(user.log, name, value, scope)
            if completed:
                self._keep_what_was_logged()
        except _WrongArgument as error:
            raise error.cause from None
        except Exception as error:
            self._failed(error)

    def forecast(self, at: int | None = None, target: float | None = None) -> Forecast:
        """Forecast the loss at step `at` (default: twice the current step), and when it reaches `target`."""
        return forecast(self._curve, at, target, self.firing)

    def close(self, reason: str = "completed") -> None:
        """Remove all hooks, judge the remaining steps and write the end of the run.

        It may be called again: a second call finishes one that was interrupted.
        """
        parts: list[Callable[[], None]] = [self._loop.close]
        if self._watchdog is not None:
            parts.append(self._watchdog.stop)
        if not self._closed:
            self._closed = True
            parts.append(functools.partial(self._judge_the_rest, reason))
        parts.append(self._close_views)
        if self._writer is not None:
            parts.append(functools.partial(self._writer.close, reason))
        parts.append(self._loop.close)  # again, in case the first call failed or was interrupted
        if self._loop.kept is not None:
            parts.append(self._loop.kept.release)
        interrupt: BaseException | None = None
        for part in parts:
            try:
                part()
            except Exception:
                _log.exception("the monitor failed while closing")
            except BaseException as error:  # close the other parts before raising it
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt
        self._finalizer.detach()
        if self._exchange is not None:
            atexit.unregister(self._at_exit)

    def _judge_the_rest(self, reason: str) -> None:
        with self._stopwatch:
            self._conclude(self._arrived(wait=True))
            self._keep_what_was_logged()
            self._end_exchange(reason, sys.exception())
            speed, step = self._speed, max(0, self.at - 1)
            step, last = last_readings(step, reason, speed.stalls, sys.exception())
            if self._recovery is not None and (outcomes := self._recovery.finish()):
                self._show(max(0, self.at - 1), outcomes)
            if last and self.history.names():  # a run without steps stays empty, so that the next try replaces it
                self._keep_now([(speed, Pending(decode=lambda _: last))], Step(), wait=True, step=step)

    def _end_exchange(self, reason: str, error: BaseException | None) -> None:
        if self._exchange is not None:
            rest = self._exchange.finish(reason, has_failed=error is not None)
            self._conclude(rest if self._exchange.records else ())

    @property
    def _speed(self) -> SpeedProbe:
        probe = self._probes["speed"]
        assert isinstance(probe, SpeedProbe)
        return probe

    def _stalled(self, phase: str, seconds: float) -> None:
        """Report that the run hangs; called by the thread of the watchdog."""
        assert self._writer is not None
        self._speed.stalls[phase] = seconds
        try:
            report_stall(self._writer, self.at, phase, seconds)
        except Exception as error:
            self._failed(error)

    def _close_views(self) -> None:
        end = None
        try:
            end = self._end()
        finally:
            self._views.close(end)

    def _end(self) -> RunEnd | None:
        """The end of the run for the views; None if nothing was stored."""
        if self._writer is None:
            return None
        alerts = self._ledger.ranked(self.alerts)
        loss, separate = (self.history.series(name) for name in ("train/loss", "update/separate_losses"))
        is_falling = objective.is_falling(self._curve, loss, separate, self.info)
        return RunEnd(
            self._writer.path, verdict(alerts, is_falling), exit_code(alerts, is_falling), self.at, self._num_rules,
            alerts, self._curve.first, loss.last,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("completed" if kind is None else f"{kind.__name__}: {error}".rstrip(": "))

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to continue seamlessly, as plain values and tensors."""
        try:
            portable: dict[str, Any] = to_tensors(self._state())
        except Exception as error:
            self._failed(error)
            return unsaved(self.at, error)
        return portable

    def _state(self) -> dict[str, Any]:
        self._conclude(self._arrived(wait=True))
        return {
            "at": self.at,
            "schedule": self._schedule.state_dict(),
            "history": self.history.state_dict(),
            "ledger": self._ledger.state_dict(),
            "curve": self._curve.state_dict(),
            "failed_rules": sorted(self._judge.failed),
            "epoch_ended": self._epoch_ended,
            "patience": self._patience.state_dict(),
            "adjusted": self._adjuster.state(),
            "balance": self._tasks.state_dict(),
            "policy": {} if self._recovery is None else self._recovery.state_dict(),
            "unavailable": self._loop.availability.state_dict(),
            "probes": {name: self._loop.guard(probe, probe.state_dict) or {} for name, probe in self._probes.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Stored steps from that point on are discarded."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        if is_unsaved(state):
            self.at = self._resumed_at = int(state["at"])
            return
        state = checked_state(state)
        self.at = self._resumed_at = int(state["at"])
        schedule = state["schedule"]
        self._schedule.load_state_dict(schedule if self._cadence.budget is not None else schedule | {"stretched": ()})
        self.history.load_state_dict(state["history"])
        self._ledger.load_state_dict(state["ledger"])
        self._curve.load_state_dict(state["curve"])
        self._judge.failed = set(state["failed_rules"])
        self._epoch_ended = int(state["epoch_ended"])
        self._patience.load_state_dict(state["patience"])
        self._adjuster.load_state(state["adjusted"])
        self._tasks.load_state_dict(state["balance"])
        if self._recovery is not None:
            self._recovery.load_state_dict(state["policy"], self.at)
        for name, probe in self._probes.items():
            if state["probes"].get(name):
                self._loop.guard(probe, probe.load_state_dict, state["probes"][name])
        self._loop.availability.load_state_dict(state["unavailable"])
        if self._loop.kept is not None:
            self._loop.kept.release()
        if self._writer is not None and self._writer.failure is None:
            self._writer.close("rewound")
            self._writer = RunWriter(self._writer.path, info=self.info, config=self.config.to_dict(), resume_at=self.at)
        self._loop.measured = self._schedule.measured(self.at)

    def recall(self, steps: Iterable[tuple[int, Sequence[Block]]], last_ema: float) -> None:
        """Continue after stored steps without a saved state: they are judged again but not recorded."""
        for step, blocks in steps:
            self._curve.take(step, blocks)
            self._ledger.update(self._judge(step, self.history, self.history.append(blocks)), self.history, self.info)
            self.at = step + 1
        self._resumed_at = self.at
        loss = self._probes["loss"]
        assert isinstance(loss, LossProbe)
        if self.at:
            loss.course.recall(last_ema, self.history.series("evaluation/start_loss").last)
        epochs = self.history.series("evaluation/epoch")
        if len(epochs):
            validation = self.history.series("eval/loss").finite()[-1:]
            self._probes["evaluation"].load_state_dict({"epoch": epochs.last, "validation": validation.tolist()})
        self._epoch_ended = epochs.at
        self._adjuster.leave(self._ledger.firing)
        self._loop.measured = self._schedule.measured(self.at)

    def _give(self, loss: Any, extra: dict[str, Any]) -> None:
        """Pass on the loss. A wrong one raises at the first step; later it is skipped, because the run matters more."""
        probe = self._probes["loss"]
        assert isinstance(probe, LossProbe)
        counts = {name: extra.pop(name) for name in COUNTED if name in extra} if extra else {}
        try:
            probe.give(loss, extra)
            if counts:
                self._speed.give(counts)
            self._has_loss = True
        except (TypeError, ValueError) as error:  # it is the user's
            if not self._has_loss and not self.history.names():
                raise _WrongArgument(error) from None
            _log.warning("step %d: %s; the value is not recorded", self.at, error)

    def _arrived(self, wait: bool = False) -> list[tuple[Collected, list[Array]]]:
        """The steps whose values have arrived: from the device and, in a distributed run, from all ranks.

        On ranks that do not record there are none.
        """
        if self._exchange is None:
            return self._transfer.receive(wait)
        self._hand_in(wait)
        records = self._exchange.records
        combined = self._exchange.receive(wait and records and not self._closed)
        return combined if records else []

    def _hand_in(self, wait: bool = True) -> None:
        """Give the exchange what has arrived from the device.

        Before ranks wait for each other, each of them must have given all of its steps: an accelerator may lag on one.
        """
        if self._exchange is None:
            return
        for step, arrays in self._transfer.receive(wait):
            (self._exchange.keep if step.is_late else self._exchange.send)(step, arrays)

    def _describe(self, info: RunInfo) -> None:
        """Take the stages of a pipeline for one model; no step of this process has been recorded before."""
        failed = self._judge.failed
        self.info, self._judge = info, Judge(self._judge.rule_set, info)
        self._judge.failed = failed
        if self._writer is not None:
            self._writer.describe(info)

    def _follow_ranks(self, exchange: Exchange) -> None:
        """Do what the ranks have agreed to do at this step."""
        self._cadence.follow(exchange)
        self._stop = exchange.stops_now() or self._stop

    def _ask_to_stop(self) -> None:
        """Stop; in a distributed run at a step on which all ranks agree, and not at all without the others."""
        if self._exchange is None:
            self._stop = True
        elif self._exchange.records:
            self._exchange.ask_to_stop()

    def _conclude(self, arrived: Iterable[tuple[Collected, list[Array]]]) -> Outcome:
        """Record, judge, act and show the steps whose values have arrived."""
        outcome = _QUIET
        stages = None if self._exchange is None else self._exchange.stages
        if stages is not None and self.info is not stages.info:
            self._describe(stages.info)
        for step, arrays in arrived:
            changed, actions = self._conclude_one(step, arrays)
            if changed or actions:
                outcome = Outcome(outcome.alerts + changed, outcome.actions + actions)
        return outcome

    def _conclude_one(self, step: Collected, arrays: list[Array]) -> tuple[tuple[Alert, ...], tuple[Action, ...]]:
        blocks, distributions = self._recorded(step, arrays)
        blocks = self.history.append(blocks)
        self._curve.take(step.step, blocks)
        judgement = self._judge(step.step, self.history, blocks)
        changed = self._ledger.update(judgement, self.history, self.info)
        actions = () if self._recovery is None else self._decide(self._recovery, step.step, blocks)
        if changed and any(_asks_for_detail(alert) for alert in changed):
            self._cadence.escalate(step.step)
        elif any(map(_waits_for_detail, self._ledger.pending(step.step))) and self._cadence.schedule.measured(
            step.step
        ):
            self._cadence.look_again(step.step)
        if self._writer is not None:
            self._writer.append(step.step, blocks, distributions)
            if changed or actions or self._ledger.reworded:
                findings, told = [alert.finding for alert in changed], [*self._ledger.reworded, *changed]
                self._writer.record(step.step, findings=findings, alerts=told, actions=actions)
            if changed:
                self._evidence.save_critical(
                    self._writer, step.step, self.at, self.history, changed, self._ledger.ranked
                )
        self._views.show(step.step, blocks, distributions, changed, actions)
        return changed, actions

    def _decide(self, recovery: Recovery, step: int, blocks: Sequence[Block]) -> tuple[Action, ...]:
        """What the policy does about a judged step; a failure must not lose the step."""
        try:
            actions = recovery.conclude(step, self._ledger.firing, blocks, self.history)
            if any(action.action == "stop" and not action.dry_run for action in actions):
                self._ask_to_stop()
        except Exception as error:
            self._failed(error)
            return ()
        return actions

    def _recover(self, recovery: Recovery, outcome: Outcome) -> Outcome:
        """Carry out what the policy has decided."""
        try:
            with self._stopwatch:
                actions = recovery.carry_out(self, self._rewind)
            if actions:
                self._show(max(0, self.at - 1), actions)
        except Exception as error:
            self._failed(error)
            return outcome
        return Outcome(outcome.alerts, outcome.actions + actions)

    def _show(self, step: int, actions: Sequence[Action]) -> None:
        """Record and show actions, and outcomes of earlier ones."""
        if self._writer is not None:
            self._writer.record(step, actions=actions)
        self._views.show(step, [], [], (), actions)

    def _rewind(self, state: dict[str, Any], actions: Sequence[Action]) -> None:
        """Return to an earlier state, and record again what was done in the steps that are given up."""
        self._transfer.receive(wait=True)
        if self._exchange is not None:
            self._exchange.receive(wait=True)
        self.load_state_dict(state)
        self._resumed_at = -1  # it is the same process
        if self._writer is not None:
            self._writer.record(max(0, self.at - 1), actions=actions)

    def _recorded(self, step: Collected, arrays: list[Array]) -> tuple[Sequence[Block], list[Distribution]]:
        """The readings of one step as blocks and histograms."""
        readings = step.readings(arrays, self._loop.guard)
        readings += self._loop.unavailable(step.context)
        if self._troubles.any(self._writer):
            readings += self._troubles.readings(self._writer)
        if step.step == self._resumed_at:
            readings.append(Reading("monitor/resumed", ONE, 1.0))
        if self._cadence.new_interval is not None:
            readings.append(Reading("monitor/detail_interval", ONE, float(self._cadence.new_interval)))
            self._cadence.new_interval = None
        return recorded(step.step, step.time, readings)

    def _keep_what_was_logged(self) -> None:
        """Add values logged since the last step to that step."""
        self._keep((self._probes["user"],), Step(), wait=self._closed)

    def _keep(self, probes: Sequence[Probe], context: Step, wait: bool) -> Outcome:
        """Add values given to these probes since the last step to that step."""
        pending = self._loop.collect_from(probes, context)
        return self._keep_now(pending, context, wait) if pending else Outcome()

    def _keep_now(
        self, pending: list[tuple[Probe, Pending]], context: Step, wait: bool, step: int | None = None
    ) -> Outcome:
        """Add readings to a step that is not the next one: by default, to the last that was completed."""
        late = Collected(max(0, self.at - 1) if step is None else step, time.time(), context, pending, is_late=True)
        self._transfer.send(late, late.tensors)
        return self._conclude(self._arrived(wait))

    def _failed(self, error: Exception) -> None:
        """Report a failure of the monitor itself; training always continues."""
        with contextlib.suppress(Exception):  # a user's logger may raise, and then nobody is left to tell
            self._loop.report("monitor itself", "monitor", error)


def _left_open(monitor: weakref.ref[Monitor]) -> None:
    """At exit, record what the other ranks have sent last to a monitor that was not closed."""
    left = monitor()
    if left is None or left._closed:
        return
    error = getattr(sys, "last_value", None)
    try:
        left._end_exchange("not closed" if error is None else f"{type(error).__name__}: {error}", error)
    except Exception as failure:
        left._failed(failure)


def _asks_for_detail(alert: Alert) -> bool:
    """Whether the steps after it are measured in detail; that says nothing about the speed, and takes time itself."""
    return alert.state is AlertState.FIRING and _waits_for_detail(alert)


def _waits_for_detail(alert: Alert) -> bool:
    return alert.severity >= Severity.WARNING and family_of(alert.code) is not Family.PERFORMANCE


class _WrongArgument(Exception):  # noqa: N818 - carries the error that the user sees
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _checked(call: Callable[..., Any], *args: Any) -> Any:
    """Call a function that checks user arguments: a TypeError or ValueError is the user's, any other error ours."""
    try:
        return call(*args)
    except (TypeError, ValueError) as error:
        raise _WrongArgument(error) from None


def _not_a_limit(max_norm: Any) -> str:
    return f"max_norm must be a number, the largest allowed norm, not {max_norm!r}"
