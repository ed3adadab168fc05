"""A few watched steps on the copy, and what forewarn's own rules say about them."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forewarn.attach import watch
from forewarn.config import Config
from forewarn.judge.families import Family
from forewarn.judge.headlines import place
from forewarn.judge.rules import family_of
from forewarn.judge.rules.frozen import FrozenWeight
from forewarn.measure.module_tree import Models, children_of
from forewarn.preflight_checks.convention import classes_of, inputs_of, targets_of
from forewarn.preflight_checks.first_pass import error_words
from forewarn.preflight_checks.parameter_checks import named
from forewarn.preflight_checks.range_test import scale_rates
from forewarn.preflight_checks.result import PreflightCheck, State
from forewarn.preflight_checks.twin import LossFunction, Twin, ramp
from forewarn.store.reader import Run, open_run
from forewarn.types import Alert, FrozenCause, Severity, figure
from forewarn.views.wording import AlertGroup, grouped, thing_to_do

GRADIENTS, MOVES, DEPTH, INPUTS, MODE, REST = (
    "gradients reach all", "every parameter moves", "activations over depth", "inputs' scale", "training mode",
    "the first steps",
)  # fmt: skip

PATIENCE = FrozenWeight().patience
"""Number of readings before a weight that stands still is called frozen."""
MOST_HEADLINES = 2
"""Maximum number of alerts in the words of a check."""

_CHECK_OF = {
    **dict.fromkeys(("G108",), GRADIENTS),
    **dict.fromkeys(("U101", "U103"), MOVES),
    **dict.fromkeys(("W108", "A101", "A102", "A103", "G105", "G106", "G111"), DEPTH),
    "D101": INPUTS,
    "A105": MODE,
}
"""The check that a rule's alert belongs to; all others belong to the last."""

_LEFT_OUT = ("D102", "D103", "G107", "U104", "U106", "U107", "U109", "U110", "U111")
"""Rules about what other checks see (the optimizer's groups, equal batches), and about changes during a run: these few
steps warm up and visit few batches."""

_FAMILIES_LEFT_OUT = (Family.PERFORMANCE, Family.EVALUATION, Family.MONITOR, Family.RANKS)


@dataclass(frozen=True, slots=True)
class Watched:
    """What the watched steps showed."""

    losses: tuple[float, ...] = ()
    alerts: tuple[Alert, ...] = ()
    num_steps: int = 0
    num_tensors: int = 0
    """Number of trainable tensors."""
    unmoved: tuple[str, ...] = ()
    """The trainable tensors in an optimizer that never moved."""
    unreached: tuple[str, ...] = ()
    """Those among them that never got a gradient."""
    spreads: Mapping[str, float] | None = None
    """Standard deviation of each layer's output at the first step, in the order of the model."""
    error: str = ""
    """Why the steps ended early."""
    objective: str = "auto"
    """What the run improves: its `loss`, its `return`, or `auto` if that is not known."""


def watched_steps(
    twin: Twin,
    function: LossFunction,
    batches: Sequence[Any],
    num_steps: int,
    rate: float | None,
    config: Config,
    tell: Callable[[], None],
    accumulate: int = 1,
) -> Watched:
    """Train the copy for a few steps of some batches each, under a monitor that records to a temporary directory.

    `rate` is the highest learning rate of the groups, if it is not to be that of the optimizer.
    """
    model = children_of(twin.root) if isinstance(twin.root, Models) else twin.root
    set_share, error = ramp(twin), ""
    losses: list[float] = []
    if rate is not None:
        scale_rates(twin, rate)
    with tempfile.TemporaryDirectory(prefix="forewarn-preflight-") as folder, _no_notifications():
        monitor = watch(
            model, twin.optimizers, Path(folder) / "run", every=1, views=[], config=config, scaler=twin.scaler
        )
        with monitor:
            for number in range(num_steps):
                places = range(number * accumulate, (number + 1) * accumulate)
                together = [batches[place % len(batches)] for place in places]
                if rate is None:
                    set_share((number + 1) / num_steps)
                try:
                    loss = twin.step(function, *together)
                except Exception as failure:
                    error = f"step {number + 1} raised {error_words(failure)}"
                    break
                for batch in together:
                    monitor.batch(inputs_of(batch), classes_of(targets_of(batch)))
                monitor.step(loss)
                tell()
                losses.append(float(loss))
                if not math.isfinite(losses[-1]):
                    break
        with open_run(Path(folder) / "run") as run:
            return _read(run, monitor.alerts, tuple(losses), error)


@contextlib.contextmanager
def _no_notifications() -> Iterator[None]:
    """Nobody is to be told about a trial: watch() takes the services of the environment unless there are none."""
    urls = os.environ.pop("FOREWARN_NOTIFY", None)
    try:
        yield
    finally:
        if urls is not None:
            os.environ["FOREWARN_NOTIFY"] = urls


def _read(run: Run, alerts: Sequence[Alert], losses: tuple[float, ...], error: str) -> Watched:
    names = run.names()
    causes = {
        scope: run.series("update/frozen_cause", scope).values
        for scope in (run.scopes("update/frozen_cause") if "update/frozen_cause" in names else ())
    }
    beside = {float(FrozenCause.ON_PURPOSE), float(FrozenCause.NOT_IN_OPTIMIZER)}
    settled = {scope: values[PATIENCE:] for scope, values in causes.items() if len(values) > PATIENCE}
    judged = {scope: values for scope, values in settled.items() if float(values[0]) not in beside}
    spreads = {}
    for scope in run.scopes("activation/std") if "activation/std" in names else ():
        values = run.series("activation/std", scope).values
        if len(values) and np.isfinite(values[0]):
            spreads[place(scope, run.info)] = float(values[0])
    return Watched(
        losses=losses,
        alerts=tuple(alert for alert in alerts if _counts(alert)),
        num_steps=run.num_steps,
        num_tensors=len(judged),
        unmoved=tuple(scope for scope, values in judged.items() if (values != FrozenCause.MOVING.value).all()),
        unreached=tuple(scope for scope, values in judged.items() if (values == FrozenCause.NO_GRADIENT.value).all()),
        spreads=spreads,
        error=error,
        objective=run.info.objective,
    )


def _counts(alert: Alert) -> bool:
    in_no_group = alert.code == "U101" and alert.finding.evidence.get("cause") == "not_in_optimizer"
    is_left_out = alert.code in _LEFT_OUT or family_of(alert.code) in _FAMILIES_LEFT_OUT or in_no_group
    return alert.severity >= Severity.WARNING and not is_left_out


def checks(watched: Watched, inputs: str) -> list[PreflightCheck]:
    """The checks that the watched steps decide; `inputs` are the inputs' numbers in words."""
    present = {alert.code for alert in watched.alerts}
    groups: dict[str, list[AlertGroup]] = {}
    for group in grouped(alert for alert in watched.alerts if alert.follows not in present):
        groups.setdefault(_CHECK_OF.get(group.worst.code, REST), []).append(group)
    reached, moved = (watched.num_tensors - len(missing) for missing in (watched.unreached, watched.unmoved))
    details = {
        GRADIENTS: f"{reached} of {watched.num_tensors} trainable tensors, in {watched.num_steps} steps",
        MOVES: f"{moved} of {watched.num_tensors} trainable tensors",
        DEPTH: _depth_words(watched.spreads or {}),
        INPUTS: inputs,
        REST: f"{watched.num_steps} steps with all rules, no warnings",
    }
    results = []
    for name, detail in details.items():
        missing = {GRADIENTS: watched.unreached, MOVES: watched.unmoved}.get(name, ())
        if name in groups:
            results.append(_from_alerts(name, groups[name], watched))
        elif missing:
            results.append(_about_missing(name, detail, missing, watched))
        elif name == REST and watched.error:
            results.append(PreflightCheck(name, State.FAIL, watched.error))
        else:
            results.append(PreflightCheck(name, State.PASS if detail else State.UNKNOWN, detail or "no data"))
    if MODE in groups:
        results.append(_from_alerts(MODE, groups[MODE], watched))
    return results


def _about_missing(name: str, detail: str, missing: Sequence[str], watched: Watched) -> PreflightCheck:
    """Tensors that no rule warns about. One without a gradient is not used; one that stands still may cancel out."""
    words = f"{detail}; not {named(missing)}"
    if name == GRADIENTS:
        return PreflightCheck(name, State.LOOK, words, "Use these layers in forward, remove them or freeze them")
    return PreflightCheck(name, State.LOOK if set(missing) & set(watched.unreached) else State.INFO, words)


def _from_alerts(name: str, groups: Sequence[AlertGroup], watched: Watched) -> PreflightCheck:
    worst = max(groups, key=lambda group: group.worst.severity).worst
    everything = watched.num_tensors > 0 and len(watched.unmoved) == watched.num_tensors
    is_lost = worst.severity is Severity.CRITICAL or (name in (GRADIENTS, MOVES) and everything)
    words = [group.headline for group in groups[:MOST_HEADLINES]]
    if name in (GRADIENTS, MOVES):
        scopes = [alert.scope for group in groups for alert in group.alerts if alert.scope]
        words = [f"not {named(dict.fromkeys(scopes))}"] if scopes else words
        words += [cause for cause in dict.fromkeys(group.worst.cause for group in groups) if cause]
    else:
        words += [f"{len(groups) - MOST_HEADLINES} more"] if len(groups) > MOST_HEADLINES else []
        words += [numbers for numbers in [groups[0].numbers] if numbers]
    advice = next((thing_to_do(remedy) for remedy in worst.remedies), "")
    return PreflightCheck(name, State.FAIL if is_lost else State.LOOK, "; ".join(words), advice)


def _depth_words(spreads: Mapping[str, float]) -> str:
    present = {scope: spread for scope, spread in spreads.items() if spread > 0}
    if not present:
        return ""
    low, high = min(present, key=lambda scope: present[scope]), max(present, key=lambda scope: present[scope])
    return f"standard deviation {figure(present[low])} in {low} to {figure(present[high])} in {high}"
