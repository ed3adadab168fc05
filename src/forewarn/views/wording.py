"""Alerts in words: grouped by code, with numbers, and with names that are safe to print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import IO, Any

from rich.text import Text

from forewarn.judge.headlines import SEPARATOR, cut
from forewarn.types import (
    Action,
    Alert,
    AlertState,
    BatchNormState,
    Finding,
    FrozenCause,
    Reason,
    Remedy,
    RunInfo,
    Severity,
    Shape,
    figure,
    figures,
    in_words,
)

HEALTHY, WARNING, CRITICAL, INFORMATION = "✓", "⚠", "✖", "·"
"""The signs in front of a line."""

STYLES = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}


def literal(text: str) -> str:
    """Text that is safe to print: control characters are escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def short(name: str) -> str:
    """A name made literal, and cut in the middle if it is long."""
    return cut(literal(name))


_IN_ASCII = str.maketrans(
    {
        "✓": "+", "⚠": "!", "✖": "x", "✗": "x", "·": "-", "→": "->", "×": "x", "–": "-", "−": "-", "…": "...",
        "∞": "inf", "‖": "|", "∂": "d", "Δ": "d", "σ": "s", "≤": "<=", "≥": ">=", "µ": "u", "²": "^2", "√": "sqrt ",
        "▲": "^", "─": "-",
    }
    | dict(zip("▁▂▃▄▅▆▇█", "_.,-=+*#", strict=True))
    | {chr(code): "*" for code in range(0x2800, 0x2900)}  # the frames of a spinner
)  # fmt: skip


def fit_for(stream: IO[str], text: str) -> str:
    """Text that a stream can write; symbols that it cannot encode are replaced by similar ASCII."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_IN_ASCII).encode(encoding, "replace").decode(encoding)
    return text


@dataclass(frozen=True, slots=True)
class AlertGroup:
    """All alerts of one code: the same problem in one or more places."""

    alerts: tuple[Alert, ...]

    @property
    def worst(self) -> Alert:
        """Firing before resolved, then the most severe, then the furthest beyond its limit."""
        return max(self.alerts, key=_weight)

    @property
    def headline(self) -> str:
        """What happened, in words; in the worst place if there are several."""
        return literal(self.worst.headline or self.worst.name)

    @property
    def numbers(self) -> str:
        """The numbers of the worst place, and the number of places."""
        places = len({alert.scope for alert in self.alerts})
        numbers = literal(self.worst.numbers)
        if places == 1:
            return numbers
        return f"{numbers}{SEPARATOR}the worst of {places} places" if numbers else f"in {places} places"

    @property
    def place(self) -> str:
        """The scope, or the number of scopes if there are several; empty for the whole run."""
        scopes = {alert.scope for alert in self.alerts}
        if len(scopes) > 1:
            return f"in {len(scopes)} places"
        return f"in {short(self.worst.place or self.worst.scope)}" if self.worst.scope else ""

    @property
    def is_firing(self) -> bool:
        return any(alert.state is AlertState.FIRING for alert in self.alerts)


def grouped(alerts: Iterable[Alert]) -> list[AlertGroup]:
    """Alerts by code, in the order in which the codes first appear."""
    by_code: dict[str, list[Alert]] = {}
    for alert in alerts:
        by_code.setdefault(alert.code, []).append(alert)
    return [AlertGroup(tuple(members)) for members in by_code.values()]


def with_symptoms(
    ranked: Sequence[Alert], causes: Mapping[tuple[str, int], str]
) -> list[tuple[AlertGroup, list[AlertGroup]]]:
    """Each kind of alert that is a root cause, with its symptoms; most important first.

    `causes` maps a code and its first step to the code of the root cause. If the episodes of one kind have different
    causes, the most important episode decides.
    """
    trees: dict[str, tuple[AlertGroup, list[AlertGroup]]] = {}
    for group in grouped(ranked):
        first = group.alerts[0]
        cause = causes.get((first.code, first.since))
        if cause in trees:
            trees[cause][1].append(group)
        else:
            trees[first.code] = (group, [])
    return list(trees.values())


def news_of(alert: Alert) -> Finding:
    """The finding with which the alert fired or last got worse; before that, the newest finding."""
    return alert.announced or alert.finding


def mark(severity: Severity) -> str:
    """The sign of an alert."""
    return {Severity.INFO: INFORMATION, Severity.WARNING: WARNING, Severity.CRITICAL: CRITICAL}[severity]


def advice(remedy: Remedy) -> Text:
    """What to do and why: two sentences."""
    why = reason(remedy)
    return Text.assemble((f"{thing_to_do(remedy)}.", "bold"), f" {why}" if why else "")


def reason(remedy: Remedy) -> str:
    """Why a remedy helps, as a sentence."""
    why = literal(remedy.why)
    return f"{why[:1].upper()}{why[1:]}." if why else ""


def thing_to_do(remedy: Remedy) -> str:
    """A remedy as a sentence without a period."""
    return literal(remedy.do or str(remedy))


_CODES: dict[str, type[IntEnum]] = {
    "update/frozen_cause": FrozenCause,
    "update/stopped_by": FrozenCause,
    "activation/batchnorm_state": BatchNormState,
    "gradient/shape": Shape,
    "weight/shape": Shape,
    "monitor/unavailable": Reason,
}
"""The enum behind each metric whose values are codes."""


def value_words(metric: str, value: float) -> str:
    """A value of a metric in words if it is a code, else as a number."""
    kind = _CODES.get(metric)
    return str(kind(int(value))) if kind is not None and value in set(map(float, kind)) else figure(value)


def steps_of(alerts: Iterable[Alert]) -> str:
    """The steps from the first to the last time any of them was seen: `steps 250–252`."""
    alerts = list(alerts)
    since, last = min(alert.since for alert in alerts), max(alert.last for alert in alerts)
    return f"step {since}" if since == last else f"steps {since}–{last}"


def losses(first: float, last: float) -> list[str]:
    """`loss 2.3 → 0.004`; empty if there was no loss."""
    return [] if math.isnan(first) else [f"loss {' → '.join(figures(first, last))}"]


def model_words(info: RunInfo) -> list[str]:
    """`GPT`, `0.8 million parameters`, `AdamW`."""
    size = info.num_parameters
    count = f"{size / 1e9:.3g} billion" if size >= 1e9 else f"{size / 1e6:.3g} million" if size >= 1e6 else f"{size:,}"
    words = [short(info.model), f"{count} parameters" if size else "", *map(short, info.optimizers)]
    return [word for word in words if word]


_DEEDS = {
    "notify": ("Sent this alert", "send this alert"),
    "snapshot": ("Wrote a snapshot to {path}", "write a snapshot"),
    "skip_batch": ("Skipped the batch", "skip the batch"),
    "lower_lr": ("Lowered the learning rate from {from} to {to}", "lower the learning rate from {from} to {to}"),
    "raise_clip": ("Raised the clipping norm from {from} to {to}", "raise the clipping norm from {from} to {to}"),
    "lower_clip": ("Lowered the clipping norm from {from} to {to}", "lower the clipping norm from {from} to {to}"),
    "roll_back": ("Rolled back from step {from} to step {to}", "roll back"),
    "rebalance": ("Changed the weight of task {task} from {from} to {to}", "change the weight of task {task}"),
    "raise_weight_decay": ("Raised the weight decay from {from} to {to}", "raise the weight decay"),
    "stop": ("Asked the loop to stop", "ask the loop to stop"),
}
"""Each action when it was taken, and when it was not."""


def deed(action: Action) -> str:
    """The action taken and why; if its outcome is known, that instead."""
    numbers = {name: in_words(value) for name, value in action.parameters.items()}
    done, undone = _DEEDS.get(action.action, (str(Remedy(action.action, action.parameters, "")),) * 2)
    try:
        done = done.format(**numbers)
    except (KeyError, IndexError, ValueError):  # a run of another version
        done = str(Remedy(action.action, action.parameters, ""))
    try:
        undone = undone.format(**numbers)
    except (KeyError, IndexError, ValueError):
        undone = undone.partition(" from {")[0]  # it was not taken, so there may be no numbers
        undone = action.action.replace("_", " ") if "{" in undone else undone
    is_word = action.reason.partition(" ")[0][1:].islower()  # not NaN
    why = action.reason[:1].lower() + action.reason[1:] if is_word else action.reason
    if "norm" in numbers:
        why += f": norm {numbers['norm']}" + (f", limit {numbers['limit']}" if "limit" in numbers else "")
    cause = f"because of {action.code}" + (f" in {short(action.scope)}" if action.scope else "")
    cause += f" ({why})" if why else ""
    if action.watched_steps:
        return literal(f"{done if not action.dry_run else f'Would {undone}'} at step {action.step}: {outcome(action)}")
    if action.failed:
        return literal(f"Could not {undone} {cause}: {action.failed}")
    return literal(f"{f'Dry run: would {undone}' if action.dry_run else done}, {cause}")


def outcome(action: Action) -> str:
    """What came of an action, once that is known."""
    if action.failed or not action.watched_steps:
        return ""
    steps = f"within {action.watched_steps} steps"
    came_from, to = action.parameters.get("from"), action.parameters.get("to")
    if action.resolved_after is not None:
        alert = f"{action.code} resolved {_after(action.resolved_after)}"
    elif action.action == "roll_back" and action.watched_steps < _number(came_from) - _number(to):
        alert = f"{action.code} may return: step {in_words(came_from)} was not reached again {steps}"
    else:
        alert = f"{action.code} not resolved {steps}"
    loss = f"the loss came back {_after(action.recovered_after)}" if action.recovered_after is not None else (
        f"the loss did not come back {steps}")  # fmt: skip
    return f"{alert}, {loss}"


def _number(value: Any) -> float:
    """NaN for what is no number."""
    return float(value) if isinstance(value, int | float) else math.nan


def _after(steps: int) -> str:
    return f"after {steps} step{'s' * (steps != 1)}"


def _weight(alert: Alert) -> tuple[bool, Severity, float, float]:
    """Sort key for alerts of one code; the distance from the limit counts in either direction."""
    value, bound = abs(news_of(alert).value), abs(news_of(alert).bound)
    if not math.isfinite(value):
        value = excess = math.inf
    else:
        excess = abs(math.log(value / bound)) if value and bound else math.inf
    return (alert.state is AlertState.FIRING, alert.severity, excess, value)
