"""`preflight`: a checklist before a long run, from a few steps on a copy of the model and its optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from forewarn.attach import checked_model, checked_optimizers
from forewarn.config import Config
from forewarn.measure.module_tree import Models, children_of, named_parameters, unwrapped
from forewarn.measure.peers import num_ranks
from forewarn.preflight_checks import one_batch, watched_steps
from forewarn.preflight_checks.convention import Batches, ConventionError, first_batches, loss_function
from forewarn.preflight_checks.data_checks import check_batches, input_words
from forewarn.preflight_checks.expense import memory_check, time_check
from forewarn.preflight_checks.first_pass import (
    FirstPass,
    check_labels,
    check_start,
    check_step,
    error_words,
    first_pass,
)
from forewarn.preflight_checks.one_batch import check_one_batch, learn_one_batch
from forewarn.preflight_checks.parameter_checks import check_groups, check_mode, frozen_note
from forewarn.preflight_checks.range_test import check_rate, present_rate, range_test
from forewarn.preflight_checks.result import Preflight, PreflightCheck, RateCurve, State
from forewarn.preflight_checks.twin import (
    LossFunction,
    Twin,
    buffers_kept,
    everything_kept,
    prepare_lazy,
    twin_of,
    unnoted_peaks,
)

WATCHED_STEPS = 30
"""Number of steps under all rules: enough for rules that wait for 20 readings."""
SCHEDULED_STEPS = 10_000
"""Number of steps in which a schedule reaches its peak, if the length of the run is not given."""
SEARCH_PASSES = 10
"""How many times fewer steps are taken with LBFGS, which runs up to 20 passes in each."""
NUM_BATCHES = 8
"""Maximum number of batches that are read."""
ORDER = (
    "parameters in optimizer", "frozen parameters", "training mode", "batches differ", "inputs' scale",
    "labels in range", "a step runs", "loss at the start", "gradients reach all", "every parameter moves",
    "activations over depth", "one batch overfits", "the first steps", "learning rate", "memory", "time",
)  # fmt: skip
"""The checks in the order in which they are shown."""
_BEST_FIRST = (State.PASS, State.UNKNOWN, State.LOOK, State.FAIL)


def preflight(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    data: Any,
    loss: Any = None,
    *,
    steps: int = 100,
    find_lr: bool = True,
    clip: float | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    total_steps: int | None = None,
    config: Config | Mapping[str, Any] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Preflight:
    """Try a model, its optimizer and its data for a few steps before a long run. Print the result: it is a checklist.

    Everything runs on a copy. The model, the optimizer, the batches and all random states stay bit for bit as they are.

    - `data`: the loader, a list of batches, a function that returns the next batch, or one batch. At most 8 are read.
    - `loss`: a function of (model, batch) that returns the loss, or a criterion of outputs and targets such as
      `nn.MSELoss()`. It is not needed if the model returns its loss, or for pairs of inputs and class numbers.
    - `steps`: the number of steps on one batch, and of the learning-rate sweep. 30 more are watched by all rules.
    - `find_lr`: whether to sweep learning rates for a suggestion.
    - `clip`: the norm to which your loop clips gradients, if it does.
    - `scaler`: your `GradScaler`, if you use one. The steps use a copy of it.
    - `accumulate`: how many batches go into one optimizer step.
    - `total_steps`: the length of the run, for its expected duration.
    - `config`: settings of the rules, as in `watch`.
    - `tell`: a function that is called with what is done next, once per step.
    """
    if num_ranks() > 1:
        raise RuntimeError(
            "preflight runs in one process; call it before the process group is made, or in a run of one"
        )
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a number of steps, at least 1, not {steps!r}")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a number of batches, at least 1, not {accumulate!r}")
    root, optimizers = checked_model(model), checked_optimizers(optimizer, scaler)
    settings = replace(Config.of(config), notify=(), stall_seconds=0.0)
    with everything_kept(data), buffers_kept(root):
        batches = first_batches(data, NUM_BATCHES, time.perf_counter)
        return _Flight(
            root, optimizers, batches, loss, steps, find_lr, clip, scaler, accumulate, total_steps, settings, tell,
            unnoted_peaks(optimizers, total_steps or SCHEDULED_STEPS),
        ).result()  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Flight:
    root: nn.Module
    optimizers: tuple[Optimizer, ...]
    data: Batches
    loss: Any
    steps: int
    find_lr: bool
    clip: float | None
    scaler: Any
    accumulate: int
    total_steps: int | None
    config: Config
    tell: Callable[[str], None] | None
    peaks: Mapping[int, float]

    def result(self) -> Preflight:
        """All checks that can be made, in their order."""
        root = unwrapped(self.root)
        checks = [check_groups(root, self.optimizers), check_mode(root), check_batches(self.data)]
        checks += [note] if (note := frozen_note(root)) else []
        curve: RateCurve | None = None
        if isinstance(root, Models) and self.loss is None:
            checks.append(
                PreflightCheck("a step runs", State.UNKNOWN, "several models and no loss=: no step was tried")
            )
        else:
            tried, curve = self._tried(is_held=checks[0].state is not State.FAIL)
            overruled = {check.name for check in tried}
            checks = [check for check in checks if check.name not in overruled] + tried
        name = " + ".join(children_of(root)) if isinstance(root, Models) else type(root).__name__
        return Preflight(name, tuple(sorted(checks, key=lambda check: ORDER.index(check.name))), curve)

    def _tried(self, is_held: bool) -> tuple[list[PreflightCheck], RateCurve | None]:
        """The checks that need steps, and the curve of learning rates."""
        batches = self.data.batches
        first = batches[0]
        twin = self._twin()
        try:
            function = loss_function(twin, first, self.loss)
        except ConventionError:
            raise
        except Exception as error:  # the model's own
            return [PreflightCheck("a step runs", State.FAIL, error_words(error))], None
        originals = {id(parameter) for _, parameter in named_parameters(self.root)}
        seen = first_pass(twin, function, first, originals)
        failed = check_step(seen)
        checks = [check_labels(seen)]
        if failed is not None and not (seen.error and checks[0].state is State.FAIL):
            checks.append(failed)
        if failed is None:
            checks.append(check_start(seen))
        if failed is not None or not is_held:
            return checks, None
        curve = None
        if self.find_lr and not twin.searches:
            sweep = self._told("trying learning rates")
            curve = range_test(self._twin(function, first), function, batches, self.steps, sweep, self.accumulate)
        watched = self._watched(function, None)
        if curve is not None and watched.losses:
            checks.append(check_rate(curve, watched.losses))
            if checks[-1].state in (State.LOOK, State.FAIL) and curve.suggested > 0:
                watched = self._watched(function, curve.suggested)  # a wrong rate is not to look like other faults
        checks += watched_steps.checks(watched, input_words(self.data))
        learned, expenses = self._learned(function, first, curve, seen)
        if watched.objective == "return":
            learned = PreflightCheck(one_batch.NAME, State.UNKNOWN, "the run is for a return, not for its loss")
        return [*checks, learned, *expenses], curve

    def _watched(self, function: LossFunction, rate: float | None) -> watched_steps.Watched:
        twin = self._twin(function, self.data.batches[0])
        num_steps = self._share_of(WATCHED_STEPS, twin)
        told = self._told("watching")
        return watched_steps.watched_steps(
            twin, function, self.data.batches, num_steps, rate, self.config, told, self.accumulate
        )

    @staticmethod
    def _share_of(steps: int, twin: Twin) -> int:
        """Fewer steps if each of them runs many passes."""
        return -(-steps // SEARCH_PASSES) if twin.searches else steps

    def _learned(
        self, function: LossFunction, batch: Any, curve: RateCurve | None, seen: FirstPass
    ) -> tuple[PreflightCheck, list[PreflightCheck]]:
        """Steps on one batch, at the suggested rate and, if that is not enough, at the optimizer's own.

        Also the checks of what such steps take.
        """
        held = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        lowest = math.inf if curve is None else curve.lowest
        checks: list[PreflightCheck] = []
        for is_own in (False, True):
            twin = self._twin(function, batch)
            present = present_rate(twin)
            rate = present if is_own or curve is None or not curve.suggested > 0 else curve.suggested
            if twin.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(twin.device)
            seconds: list[float] = []
            num_steps = self._share_of(self.steps, twin)
            told = _timed(self._told("learning one batch"), seconds)
            checks.append(
                check_one_batch(learn_one_batch(twin, function, batch, num_steps, rate, seen, told), seen, lowest)
            )
            if rate == present or checks[-1].state not in (State.LOOK, State.FAIL):
                break
        peak = torch.cuda.max_memory_allocated(twin.device) - held if twin.device.type == "cuda" else None
        best = min(checks, key=lambda check: (_BEST_FIRST.index(check.state), check.numbers["last"]))
        return best, [
            memory_check(twin, function, batch, peak),
            time_check(seconds, self.data.seconds, self.total_steps, self.accumulate),
        ]

    def _twin(self, function: LossFunction | None = None, batch: Any = None) -> Twin:
        twin = twin_of(self.root, self.optimizers, self.clip, self.scaler)
        for place, peak in self.peaks.items():
            twin.groups[place]["initial_lr"] = peak
        if function is not None:
            prepare_lazy(twin, function, batch)
        return twin

    def _told(self, words: str) -> Callable[[], None]:
        tell = self.tell
        return (lambda: None) if tell is None else (lambda: tell(words))


def _timed(tell: Callable[[], None], seconds: list[float]) -> Callable[[], None]:
    """A function to call after each step: it notes the time since the last call."""
    last = time.perf_counter()

    def told() -> None:
        nonlocal last
        now = time.perf_counter()
        seconds.append(now - last)
        tell()
        last = time.perf_counter()

    return told
