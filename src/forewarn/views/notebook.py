"""The repr and HTML of a run and an alert, for prompts and notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from forewarn.judge.diagnosis import has_loss, recorded_alerts, stored_is_falling
from forewarn.judge.ledger import Ledger
from forewarn.judge.rules import all_rules
from forewarn.standing import NO_ALERTS, UNCERTAIN, exit_code, verdict
from forewarn.store import Run
from forewarn.store.run_summary import summary_of
from forewarn.types import Alert, AlertState, Remedy, Severity, figure, num_words
from forewarn.views.wording import (
    CRITICAL,
    HEALTHY,
    INFORMATION,
    WARNING,
    AlertGroup,
    literal,
    losses,
    mark,
    reason,
    short,
    thing_to_do,
    with_symptoms,
)

MOST_REMEDIES = 2
MOST_ALERTS = 3
_COLOURS = {Severity.INFO: "#0891b2", Severity.WARNING: "#d97706", Severity.CRITICAL: "#dc2626"}
"""Readable on light and dark pages; everything else has the color of the page."""
_GREEN = "#16a34a"
_CARD = (
    "border: 1px solid rgba(128, 128, 128, .4); border-radius: 6px; padding: .6em .9em; margin: .3em 0; max-width: 52em"
)
_DIM = "opacity: .75; font-size: 90%"
_WIDTH, _HEIGHT, _MARGIN = 640, 110, 44
"""Size of the loss curve and of its left margin for labels, in SVG units."""
_MOST_POINTS = 400


def run_words(run: Run) -> str:
    """`<Run runs/demo: GPT, 222 steps, loss 5.4 → 2.6, completed, 1 warning>`; never an error."""
    try:
        return f"<Run {run_title(run)}>"
    except Exception as error:  # a repr must never raise in a debugger or a log
        reason = "closed" if "closed" in str(error) else "it cannot be read"
        return f"<Run {short(str(run.path))}: {reason}>"


def run_title(run: Run) -> str:
    """A run on one line: its path, model, progress and status."""
    return f"{short(str(run.path))}: {state_words(run)}"


def state_words(run: Run) -> str:
    """`GPT, 222 steps, loss 5.45 → 2.9, completed, 1 warning`."""
    summary = summary_of(run)
    words = [short(summary.model)] if summary.model else []
    words += [f"{summary.num_steps} step" + "s" * (summary.num_steps != 1), *_losses(run), summary.state]
    words.append(num_words(summary.num_alerts) or NO_ALERTS)
    return ", ".join(words)


def alert_words(alert: Alert) -> str:
    """`<Alert L102 loss-spike, warning, firing since step 181: The training loss is 4.25× its usual level>`."""
    where = f" in {short(alert.place or alert.scope)}" if alert.scope else ""
    when = f"{alert.state} since step {alert.since}"
    if alert.state is AlertState.RESOLVED:
        when = f"resolved, steps {alert.since}–{alert.last}"
    headline = f": {literal(alert.headline)}" if alert.headline else ""
    return f"<Alert {literal(alert.code)} {short(alert.name)}{where}, {alert.severity}, {when}{headline}>"


def fired_alerts(run: Run) -> list[tuple[AlertGroup, list[AlertGroup]]]:
    """The alerts of a run that have fired, as causes with their symptoms, most important first."""
    ledger, alerts = Ledger(all_rules()), recorded_alerts(run)
    return with_symptoms(ledger.ranked(alerts), ledger.causes(alerts))


def alert_html(alert: Alert) -> str:
    """An alert in full, in the colors of the page."""
    group = AlertGroup((alert,))
    title = f"{_sign(mark(alert.severity), _COLOURS[alert.severity])} <b>{_text(group.headline)}</b>"
    lines = [f"{title} <span style='{_DIM}'>{_text(alert.code)} {_text(alert.name)}, step {alert.fired or alert.since}"
             f", {alert.state}</span>"]  # fmt: skip
    lines += [f"<span style='{_DIM}'>{_text(group.numbers)}</span>"] if group.numbers else []
    lines += [f"<b>cause</b> {_text(alert.cause)}"] if alert.cause else []
    body = "".join(f"<div>{line}</div>" for line in lines) + _remedies(alert.remedies)
    return f"<div style='{_CARD}; border-left: 4px solid {_COLOURS[alert.severity]}'>{body}</div>"


def run_html(run: Run) -> str:
    """The verdict, the loss, the most important alerts and what to do, in the colors of the page."""
    try:
        fired = fired_alerts(run)
        serious = [(cause, symptoms) for cause, symptoms in fired if cause.worst.severity > Severity.INFO]
        title, curve = run_title(run), _curve(run, [cause for cause, _ in serious])
    except Exception:
        return f"<code>{_text(run_words(run))}</code>"
    alerts = [alert for tree in fired for group in (tree[0], *tree[1]) for alert in group.alerts]
    is_falling = stored_is_falling(run)
    code = exit_code(alerts, is_falling)
    colour = (_GREEN, _COLOURS[Severity.WARNING], _COLOURS[Severity.CRITICAL])[code]
    words = verdict(alerts, is_falling, has_loss=has_loss(run))
    sign = INFORMATION if words in UNCERTAIN else (HEALTHY, WARNING, CRITICAL)[code]
    lines = [f"{_sign(f'{sign} {words}', colour)} <span style='{_DIM}'>{_text(title)}</span>", curve]
    for cause, symptoms in serious[:MOST_ALERTS]:
        sign = _sign(mark(cause.worst.severity), _COLOURS[cause.worst.severity])
        lines.append(f"{sign} step {cause.worst.fired} <b>{_text(cause.headline)}</b>"
                     f" <span style='{_DIM}'>{_text(cause.worst.name)}</span>")  # fmt: skip
        if symptoms:
            names = ", ".join(symptom.worst.name for symptom in symptoms)
            lines.append(f"<span style='{_DIM}'>symptoms: {_text(names)}</span>")
    if len(serious) > MOST_ALERTS:
        lines.append(f"<span style='{_DIM}'>and {len(serious) - MOST_ALERTS} more kinds of alerts</span>")
    body = "".join(f"<div>{line}</div>" for line in lines if line)
    return f"<div style='{_CARD}'>{body}{_remedies(serious[0][0].worst.remedies) if serious else ''}</div>"


def _remedies(remedies: Sequence[Remedy]) -> str:
    """The first remedies as a numbered list."""
    items = [f"<li><b>{_text(thing_to_do(remedy))}.</b> <span style='{_DIM}'>{_text(reason(remedy))}</span></li>"
             for remedy in remedies[:MOST_REMEDIES]]  # fmt: skip
    return f"<ol style='margin: .3em 0 0 0'>{''.join(items)}</ol>" if items else ""


def _curve(run: Run, causes: Sequence[AlertGroup]) -> str:
    """The loss as an inline SVG, with a line where each cause first fired; empty if there is no loss to draw."""
    loss = _loss(run)
    if loss is None:
        return ""
    steps, values = (array[np.isfinite(loss[1])].astype(np.float64) for array in loss)
    if len(values) < 2 or steps.max() == steps.min():
        return ""
    is_logarithmic = values.min() > 0 and values.max() / values.min() > 20
    heights = np.log(values) if is_logarithmic else values
    span = np.ptp(heights) or 1.0
    x = _MARGIN + (steps - steps.min()) / np.ptp(steps) * (_WIDTH - _MARGIN - 4)
    y = 8 + (heights.max() - heights) / span * (_HEIGHT - 30)
    kept = _extremes(y)
    points = " ".join(f"{left:.1f},{top:.1f}" for left, top in zip(x[kept], y[kept], strict=True))
    marks = []
    for group in causes:
        fired = min(alert.fired or 0 for alert in group.alerts)
        if steps.min() <= fired <= steps.max():
            left = _MARGIN + (fired - steps.min()) / np.ptp(steps) * (_WIDTH - _MARGIN - 4)
            colour = _COLOURS[group.worst.severity]
            marks.append(f"<line x1='{left:.1f}' x2='{left:.1f}' y1='4' y2='{_HEIGHT - 18}' stroke='{colour}'"
                         " stroke-dasharray='3 2'/>")  # fmt: skip
    labels = [(4, 14, "start", figure(float(values.max()))), (4, _HEIGHT - 20, "start", figure(float(values.min()))),
              (_MARGIN, _HEIGHT - 4, "start", f"step {int(steps.min())}"),
              (_WIDTH - 4, _HEIGHT - 4, "end", str(int(steps.max())))]  # fmt: skip
    texts = "".join(f"<text x='{left}' y='{top}' text-anchor='{anchor}'>{_text(words)}</text>"
                    for left, top, anchor, words in labels)  # fmt: skip
    scale = " (log scale)" if is_logarithmic else ""
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='100%' style='max-width: {_WIDTH}px; display: block' role='img'"
        f" font-size='11' fill='currentColor'><title>loss over steps{scale}</title><g opacity='.75'>{texts}</g>"
        f"<polyline points='{points}' fill='none' stroke='currentColor' stroke-width='1.3'/>{''.join(marks)}</svg>"
    )


def _extremes(heights: np.ndarray) -> np.ndarray:
    """Indices of a few hundred points at most: the lowest and highest of each part, so that no spike is lost."""
    if len(heights) <= _MOST_POINTS:
        return np.arange(len(heights))
    parts = np.array_split(np.arange(len(heights)), _MOST_POINTS // 2)
    kept = [part[index] for part in parts for index in (heights[part].argmin(), heights[part].argmax())]
    return np.unique([0, *kept, len(heights) - 1])


def _losses(run: Run) -> list[str]:
    loss = _loss(run)
    if loss is None or not len(loss[1]):
        return []
    return losses(float(loss[1][0]), float(loss[1][-1]))


def _loss(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    if "train/loss" not in run.names() or "" not in run.scopes("train/loss"):
        return None
    series = run.series("train/loss")
    return series.steps, series.values


def _sign(words: str, colour: str) -> str:
    return f"<b style='color: {colour}'>{_text(words)}</b>"


def _text(words: str) -> str:
    """Text escaped for HTML, including control characters."""
    return html.escape(literal(words), quote=True)
