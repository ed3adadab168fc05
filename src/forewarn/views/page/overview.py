"""A stored run as the page shows it: its state, verdict, alerts with their evidence, and what it recorded."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from forewarn.config import Config
from forewarn.judge.diagnosis import Diagnosis, diagnose
from forewarn.judge.headlines import place
from forewarn.judge.own_rules import own_rules
from forewarn.judge.registry import Rule
from forewarn.judge.remedies import declared
from forewarn.metrics import all_metrics, catalogue_of
from forewarn.standing import COMPLETED, FAILED, RUNNING, UNCERTAIN, run_state
from forewarn.store import Run, StoredSeries
from forewarn.store.snapshot_folders import replay_command
from forewarn.types import Action, Alert, Remedy, Severity, in_words, spelled_out
from forewarn.views.comparison import configuration, environment
from forewarn.views.conclusions import change_words, folded, summary_words, things_to_do
from forewarn.views.page.maps import model_order
from forewarn.views.wording import (
    AlertGroup,
    deed,
    literal,
    losses,
    model_words,
    news_of,
    outcome,
    reason,
    short,
    thing_to_do,
)

USUAL_READINGS = 30
FEWEST_USUAL = 5
MOST_ACTIONS = 100
"""The newest actions that are shown."""
_USUAL = (5.0, 95.0)
_SAFETY = {"notify": "by hand", "safe": "safe", "opt_in": "changes training"}
_LOGARITHMIC = re.compile(
    r"(^gain/(block|amplification)|^train/lr|norm(_clipped)?|ratio(_\w+)?|std|abs_max|max_logit)$"
)
"""Names of metrics whose size matters more than their difference."""


WHOLE_RUN = "the whole run"


def overview(run: Run, name: str) -> dict[str, Any]:
    """Everything about a run but its series. `name` is how the page asks for it."""
    own = own_rules()
    rule_set = Config.from_stored(run.config, own).rule_set(own)
    diagnosis = diagnose(run, rule_set)
    rules = {rule.code: rule for rule in (*rule_set.rules, *rule_set.disabled)}
    counts = run.num_readings()
    scopes = {metric: model_order(run, run.scopes(metric)) for metric in counts}
    return {
        "run": name,
        "path": str(run.path),
        "words": " · ".join([*model_words(run.info), *([short(run.info.device)] if run.info.device else [])]),
        "state": _state(run, num_steps := run.num_steps),
        "verdict": {**_verdict(diagnosis), "course": _course(run, num_steps)},
        "remedies": [remedy_row(remedy) for remedy in things_to_do(diagnosis)],
        "alerts": _Evidence(run, rules, scopes).rows(diagnosis),
        "actions": [action_row(action) for action in run.actions()[-MOST_ACTIONS:]],
        "checklist": [dataclasses.asdict(check) for check in diagnosis.checklist],
        "epochs": [{**dataclasses.asdict(epoch), "words": epoch.words()} for epoch in diagnosis.epochs],
        "metrics": _metrics(run, list(counts)),
        "series": [{"name": metric, "scopes": scopes[metric], "count": counts[metric]} for metric in counts],
        "layers": _layers(run),
        "blocks": list(run.info.blocks),
        "histograms": {metric: model_order(run, of) for metric, of in run.distributions().items()},
        "config": configuration(run),
        "environment": environment(run) | _snapshot(run),
        "cost": _cost(run),
    }


def _snapshot(run: Run) -> dict[str, str]:
    """How to run the step of a debug snapshot again, if there is one."""
    command = replay_command(run.path)
    return {} if command is None else {"debug snapshot": literal(command)}


def _state(run: Run, num_steps: int) -> dict[str, Any]:
    end, updated, last, planned = run.end, run.updated or run.info.started, run.last_step, declared_steps(run)
    word = run_state(None if end is None else end[0], updated)
    seconds = _values(run, "speed/step_seconds")
    seconds = seconds[np.isfinite(seconds)]
    return {
        "word": word,
        "sentence": _state_sentence(word, num_steps, last, planned, end[0] if end else None),
        "end": None if end is None else {"reason": literal(end[0]), "time": end[1]},
        "last_step": last,
        "num_steps": num_steps,
        "updated": updated,
        "started": run.info.started,
        "planned_steps": planned,
        "step_seconds": float(np.median(seconds[-1000:])) if len(seconds) else None,
    }


def _state_sentence(word: str, num_steps: int, last: int | None, planned: int | None, end: str | None) -> str:
    where = "no step yet" if last is None else f"step {last}" + (f" of {planned}" if planned else "")
    if word == RUNNING:
        return f"Live · {where}"
    steps = f"{num_steps} step" + "s" * (num_steps != 1)
    told = [word.capitalize(), steps if word == COMPLETED else where]
    return " · ".join([*told, *([short(end)] if end not in (None, word) else [])])


def declared_steps(run: Run) -> int | None:
    """The number of steps that the run is to take, if it says so."""
    steps = declared(run.info, "total_steps", "max_steps", "steps", "num_steps")
    return int(steps) if math.isfinite(steps) and steps > 0 else None


def _verdict(diagnosis: Diagnosis) -> dict[str, Any]:
    trees = folded(diagnosis)
    serious = [tree for tree in trees if max(alert.severity for alert in tree[0].alerts) > Severity.INFO]
    severity = ("healthy", "warning", "critical")[diagnosis.exit_code]
    if severity == "healthy" and diagnosis.verdict in UNCERTAIN:
        severity = "info"
    told: dict[str, Any] = dict.fromkeys(("headline", "numbers", "cause", "since", "code", "name", "followed"))
    if serious:
        root, symptoms = serious[0]
        alerts = [alert for symptom in symptoms for alert in symptom.alerts]
        told = {
            "headline": root.headline, "numbers": root.numbers or None, "cause": literal(root.worst.cause) or None,
            "since": min(alert.since for alert in root.alerts), "code": root.worst.code, "name": root.worst.name,
            "followed": _followed(len(symptoms), len({(alert.code, alert.scope) for alert in alerts})),
        }  # fmt: skip
    return {"severity": severity, "word": diagnosis.verdict, "sentence": summary_words(diagnosis), **told}


def _course(run: Run, num_steps: int) -> str:
    """How far the run is and what it reached: `300 steps, loss 5.45 → 2.43`."""
    values = _values(run, "train/loss")
    steps = f"{num_steps} step" + "s" * (num_steps != 1)
    return ", ".join([steps, *(losses(float(values[0]), float(values[-1])) if len(values) else [])])


def _followed(num_kinds: int, num_places: int) -> str | None:
    if not num_kinds:
        return None
    places = f" in {num_places} places" if num_places > num_kinds else ""
    return f"{num_kinds} other alert{'s' * (num_kinds > 1)}{places} followed"


def remedy_row(remedy: Remedy) -> dict[str, Any]:
    """A remedy in words."""
    return {
        "do": thing_to_do(remedy), "change": change_words(remedy), "why": reason(remedy), "safety": remedy.safety,
        "safety_word": _SAFETY.get(remedy.safety, literal(remedy.safety)),
    }  # fmt: skip


def action_row(action: Action) -> dict[str, Any]:
    """What the policy did, in words."""
    return {
        "step": action.step,
        "action": literal(action.action),
        "code": literal(action.code),
        "words": deed(dataclasses.replace(action, watched_steps=0)),
        "outcome": outcome(action),
        "state": FAILED if action.failed else "dry run" if action.dry_run else "done",
        "worked": action.resolved_after is not None and action.recovered_after is not None,
        "to": action.parameters.get("to") if action.action == "roll_back" and not action.failed else None,
    }


class _Evidence:
    """The alerts of a run with the series that their rules judged."""

    def __init__(self, run: Run, rules: Mapping[str, Rule], scopes: Mapping[str, Sequence[str]]) -> None:
        self._run, self._rules, self._scopes = run, rules, scopes

    def rows(self, diagnosis: Diagnosis) -> list[dict[str, Any]]:
        """Each kind of alert: causes first, each followed by its symptoms in the order of first sight."""
        rows = []
        for root, symptoms in folded(diagnosis):
            began = _since(root)
            rows.append(self._row(root, "", began))
            rows += [self._row(symptom, root.worst.code, began) for symptom in sorted(symptoms, key=_since)]
        return rows

    def _row(self, group: AlertGroup, follows: str, began: int) -> dict[str, Any]:
        worst = group.worst
        finding, rule = news_of(worst), self._rules.get(worst.code)
        scopes = list(dict.fromkeys(alert.scope for alert in group.alerts))
        judged = self._judged(worst)
        is_code = judged is not None and self._unit(judged[0]) == "code"  # names a kind of trouble; not a quantity
        has_limit = not is_code and math.isfinite(finding.bound)
        return {
            "key": f"{worst.code}@{worst.scope}",
            "code": literal(worst.code),
            "name": literal(worst.name),
            "severity": str(max(alert.severity for alert in group.alerts)),
            "state": "firing" if group.is_firing else "resolved",
            "headline": group.headline,
            "numbers": group.numbers,
            "cause": literal(worst.cause),
            "place": literal(worst.place),
            "scope": worst.scope,
            "places": [literal(place(scope, self._run.info)) or WHOLE_RUN for scope in scopes],
            "scopes": scopes,
            "since": _since(group),
            "fired": min(alert.fired or alert.since for alert in group.alerts),
            "last": max(alert.last for alert in group.alerts),
            "follows": follows,
            "is_symptom": bool(follows),
            "remedies": [remedy_row(remedy) for remedy in worst.remedies],
            "explanation": explanation(rule) if rule else "",
            "limit": finding.bound if has_limit else None,
            "side": ("above" if finding.value > finding.bound else "below") if has_limit else None,
            "value": None if is_code else finding.value,
            **self._shown(worst, None if is_code else judged, began),
        }

    def _unit(self, metric: str) -> str:
        declared_metric = catalogue_of(self._run.info).find(metric)
        return declared_metric.unit if declared_metric else ""

    def _judged(self, alert: Alert) -> tuple[str, str] | None:
        """The metric and scope that the rule judged: the one with the finding's value, or else the first it reads."""
        rule, finding = self._rules.get(alert.code), news_of(alert)
        if rule is None:
            return None
        candidates = [
            (metric, scope)
            for name in dict.fromkeys((*rule.when, *rule.reads))
            for metric in self._scopes
            if fnmatchcase(metric, name)
            for scope in self._scopes[metric]
            if (spelled_out(metric, scope) if rule.is_about_a_pattern else scope) == alert.scope
        ]
        same = (candidate for candidate in candidates if self._is_at(candidate, finding.step, finding.value))
        return next(same, candidates[0] if candidates else None)

    def _is_at(self, judged: tuple[str, str], step: int, value: float) -> bool:
        series = self._run.series(*judged)
        return bool(np.isclose(series.values[series.steps == step], value, rtol=1e-5, atol=0, equal_nan=True).any())

    def _shown(self, alert: Alert, judged: tuple[str, str] | None, began: int) -> dict[str, Any]:
        finding = news_of(alert)
        if judged is None:
            return {"judged": None, "usual": None, "computed": None}
        is_itself = not math.isfinite(finding.bound) or self._is_at(judged, finding.step, finding.value)
        usual = self._usual(alert, self._run.series(*judged), began) if is_itself else None
        label, names = catalogue_of(self._run.info).label, self._rules[alert.code].reads
        sources = ", ".join(dict.fromkeys(label(name) for name in names if name in self._scopes))
        computed = None if is_itself else f"the value {in_words(finding.value)} is computed from {sources}"
        return {"judged": {"name": judged[0], "scope": judged[1]}, "usual": usual, "computed": computed}

    def _usual(self, alert: Alert, series: StoredSeries, began: int) -> list[float] | None:
        """The usual range: the level in the evidence, or that of the readings before the cause; None past the limit."""
        finding = news_of(alert)
        level = finding.evidence.get("level")
        if isinstance(level, int | float) and math.isfinite(level):
            return [float(level), float(level)]
        before = series.values[series.steps < began]
        before = before[np.isfinite(before)][-USUAL_READINGS:]
        if len(before) < FEWEST_USUAL:
            return None
        low, high = (float(value) for value in np.percentile(before.astype(np.float64), _USUAL))
        is_past = high > finding.bound if finding.value > finding.bound else low < finding.bound
        return None if is_past else [low, high]


def _since(group: AlertGroup) -> int:
    return min(alert.since for alert in group.alerts)


def explanation(rule: Rule) -> str:
    """What a rule means and why it is bad, as plain text."""
    text = rule.documentation.partition("## Example")[0].replace("## Why is this bad?\n", "")
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n\n".join(paragraph.replace("`", "") for paragraph in paragraphs if paragraph)


def _metrics(run: Run, names: Sequence[str]) -> dict[str, Any]:
    catalogue, declared_names = catalogue_of(run.info), {metric.name for metric in all_metrics()}
    rows = {}
    for name in names:
        metric = catalogue.find(name)
        low, high = (metric.healthy if metric else None) or run.info.metrics.get(name) or (None, None)
        rows[name] = {
            "label": catalogue.title(name),
            "unit": metric.unit if metric else "",
            "meaning": metric.meaning.replace("`", "") if metric else "",
            "scope_kind": str(metric.scope) if metric else "",
            "cadence": str(metric.cadence) if metric else "",
            "log": _LOGARITHMIC.search(name) is not None,
            "low": low,
            "high": high,
            "own": name not in declared_names,
        }
    return rows


def _layers(run: Run) -> list[dict[str, Any]]:
    rows, blocks = [], frozenset(run.info.blocks)
    for scope, parameter in run.info.parameters.items():
        block = next((prefix for prefix in _prefixes(scope) if prefix in blocks), None)
        label = scope if block is None else scope.removeprefix(f"{block}.")
        rows.append({"scope": scope, "label": label, "block": block, "shape": list(parameter.shape)})
    return rows


def _prefixes(scope: str) -> Iterator[str]:
    """The modules around a parameter, the innermost first."""
    while "." in scope:
        scope = scope.rpartition(".")[0]
        yield scope


def _cost(run: Run) -> dict[str, Any] | None:
    """What watching costs: the usual share of a step that the monitor takes."""
    shares = _values(run, "monitor/overhead_share")
    shares = shares[np.isfinite(shares)]
    if not len(shares):
        return None
    share = float(shares.mean())
    return {"sentence": f"Watching takes {in_words(100 * share)}% of the time of a step on average.", "share": share}


def _values(run: Run, name: str) -> np.ndarray:
    if name not in run.names() or "" not in run.scopes(name):
        return np.empty(0)
    return run.series(name).values
