"""The ledger: one alert per (code, scope), pending → firing → resolved, the root cause ranked above its symptoms."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forewarn.judge.families import Phase
from forewarn.judge.history import History
from forewarn.judge.judgement import Judgement
from forewarn.judge.registry import Rule
from forewarn.judge.rules import phase_of
from forewarn.types import Alert, AlertState, Finding, Remedy, RunInfo, Severity

_log = logging.getLogger("forewarn")

Identity = tuple[str, str]


class Ledger:
    """Follows every finding from the first sight of it to its end."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = {rule.code: rule for rule in rules}
        self._open: dict[Identity, Alert] = {}
        self._checks: dict[Identity, int] = {}
        """For pending alerts: checks in a row in which it was seen."""
        self._passed: set[Identity] = set()
        """Firing alerts that were not seen at the last check."""
        self._closed: list[Alert] = []

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every alert of the run that has fired, in the order in which they did."""
        fired = [*self._closed, *(alert for alert in self._open.values() if alert.state is AlertState.FIRING)]
        return tuple(sorted(fired, key=lambda alert: (alert.fired, alert.code, alert.scope)))

    @property
    def firing(self) -> tuple[Alert, ...]:
        """The alerts that are open now, most important first."""
        return self.ranked([alert for alert in self._open.values() if alert.state is AlertState.FIRING])

    def update(self, judgement: Judgement, history: History, info: RunInfo) -> tuple[Alert, ...]:
        """Take in what the rules said of one step; returns the alerts that fired, grew worse or were resolved."""
        changed: list[Alert] = []
        seen: set[Identity] = set()
        for finding in judgement.findings:
            identity = (finding.code, finding.scope)
            if finding.code not in self._rules or identity in seen:
                continue
            seen.add(identity)
            changed += self._see(finding, history, info)
        covered = {code: judgement.covered(code) for code in {alert.code for alert in self._open.values()}}
        for identity, alert in list(self._open.items()):
            if identity in seen or alert.scope not in covered[alert.code]:
                continue
            if alert.state is AlertState.PENDING:
                del self._open[identity], self._checks[identity]
            elif judgement.step - alert.last >= self._rules[alert.code].keep:
                changed.append(self._close(alert))
            else:
                self._passed.add(identity)
        return self.ranked(changed) if changed else ()

    def _close(self, alert: Alert) -> Alert:
        del self._open[alert.identity]
        self._passed.discard(alert.identity)
        self._closed.append(dataclasses.replace(alert, state=AlertState.RESOLVED))
        return self._closed[-1]

    def _see(self, finding: Finding, history: History, info: RunInfo) -> Iterator[Alert]:
        """The alert of this finding if it fired or grew worse by it."""
        rule = self._rules[finding.code]
        identity = (finding.code, finding.scope)
        before = self._open.get(identity)
        if before and identity in self._passed and before.severity is Severity.INFO < finding.severity:
            yield self._close(before)  # information that had passed is not how this began
            before = None
        self._passed.discard(identity)
        alert = before or Alert(
            finding.code, rule.name, finding.scope, finding.severity, AlertState.PENDING,
            since=finding.step, fired=None, last=finding.step, finding=finding,
        )  # fmt: skip
        worst = finding if before is None or finding.severity >= before.severity else before.finding
        alert = dataclasses.replace(
            alert, last=finding.step, finding=worst, severity=max(alert.severity, finding.severity)
        )
        if alert.state is AlertState.PENDING:
            self._checks[identity] = self._checks.get(identity, 0) + 1
            if self._checks[identity] >= rule.hold:
                del self._checks[identity]
                alert = dataclasses.replace(alert, state=AlertState.FIRING, fired=finding.step)
        news = alert.state is AlertState.FIRING and (
            before is None or before.state is AlertState.PENDING or alert.severity > before.severity
        )
        if news:
            alert = dataclasses.replace(alert, announced=worst, remedies=prescribe(rule, worst, history, info))
        self._open[identity] = alert
        if news:
            yield alert

    def ranked(self, alerts: Sequence[Alert]) -> tuple[Alert, ...]:
        """Most important first: chains of cause and symptom by their worst member, in each chain the cause first."""
        episodes = self._episodes(alerts)
        chains = _chains(list(dict.fromkeys(episodes)), self._explained)
        worst: dict[_Episode, Severity] = {}
        for episode, (root, _) in chains.items():
            worst[root] = max(worst.get(root, Severity.INFO), episode.severity)

        def importance(at: int) -> tuple[Any, ...]:
            alert = alerts[at]
            root, depth = chains[episodes[at]]
            return (
                alert.state is AlertState.RESOLVED, -worst[root], root.since, root.code, depth, -alert.severity,
                alert.since, episodes[at].phase, alert.code, alert.scope,
            )  # fmt: skip

        return tuple(alerts[at] for at in sorted(range(len(alerts)), key=importance))

    def cause_of(self, alert: Alert, among: Sequence[Alert]) -> str | None:
        """The code of the alert among these that is at the root of this one, if any."""
        episodes = self._episodes([alert, *among])
        root, _ = _chains(list(dict.fromkeys(episodes)), self._explained)[episodes[0]]
        return None if root == episodes[0] else root.code

    def _episodes(self, alerts: Sequence[Alert]) -> list[_Episode]:
        """The episode of each alert: those of one code that were open at the same time are one, whatever the scopes."""
        made: list[_Episode] = []
        number = [0] * len(alerts)
        for at in sorted(range(len(alerts)), key=lambda at: (alerts[at].code, alerts[at].since)):
            alert = alerts[at]
            rule = self._rules.get(alert.code)
            until = alert.last + (0 if rule is None else rule.keep)
            lasting = alert.finding.evidence.get("lasting_steps", 0)
            began = min(alert.since, alert.finding.step + 1 - int(lasting)) if lasting else alert.since
            phase = phase_of(alert.code) if rule is None else rule.family.phase
            new = _Episode(alert.code, phase, alert.since, began, until, alert.severity)
            if made and made[-1].code == new.code and new.since <= made[-1].until:
                earlier = made.pop()
                new = _Episode(
                    new.code, phase, earlier.since, min(earlier.began, new.began), max(earlier.until, new.until),
                    max(earlier.severity, new.severity),
                )  # fmt: skip
            made.append(new)
            number[at] = len(made) - 1
        return [made[each] for each in number]

    def _explained(self, code: str) -> tuple[str, ...]:
        rule = self._rules.get(code)
        return () if rule is None else rule.explains

    def state_dict(self) -> dict[str, Any]:
        return {
            "open": [alert.to_json() for alert in self._open.values()],
            "closed": [alert.to_json() for alert in self._closed],
            "checks": [[code, scope, checks] for (code, scope), checks in self._checks.items()],
            "passed": [list(identity) for identity in sorted(self._passed)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        opened = map(Alert.from_json, state["open"])
        self._open = {alert.identity: alert for alert in opened if alert.code in self._rules}
        self._closed = [Alert.from_json(plain) for plain in state["closed"]]
        checks = {(code, scope): int(count) for code, scope, count in state["checks"]}
        self._checks = {identity: count for identity, count in checks.items() if identity in self._open}
        self._passed = {(code, scope) for code, scope in state["passed"]} & set(self._open)


@dataclass(frozen=True, slots=True)
class _Episode:
    """A stretch of steps in which a rule had something to say."""

    code: str
    phase: Phase
    since: int
    began: int
    """Since when it has been so by its own evidence: a slow rise is seen long after it began."""
    until: int
    """The last step at which it can still have been the reason for something."""
    severity: Severity


def _chains(
    episodes: Sequence[_Episode], explained: Callable[[str], tuple[str, ...]]
) -> dict[_Episode, tuple[_Episode, int]]:
    """For each episode the one at the root of it, and how many steps of explanation lie between.

    A cause explains the symptom's code, began no later, and was not over when the symptom was first seen. Of two that
    appear at the same step, the one that a training step meets first counts: a loss that is not finite makes such
    gradients within its own step, such gradients make such a loss only in the next. What nothing explains may be the
    cause of what comes before it within a step: weights that were changed from outside. Information is no reason for a
    warning.
    """
    in_order = sorted(episodes, key=lambda episode: (episode.began, episode.phase, episode.code))

    def explains(cause: _Episode, symptom: _Episode) -> bool:
        return symptom.code in explained(cause.code) and not cause.severity is Severity.INFO < symptom.severity

    causes: dict[_Episode, _Episode | None] = {}
    for symptom in in_order:
        able = [cause for cause in in_order if explains(cause, symptom) and cause.began <= symptom.since <= cause.until]
        earlier = (each for each in able if each.began < symptom.since or each.phase <= symptom.phase)
        causes[symptom] = next(earlier, None)
    roots = {episode for episode, cause in causes.items() if cause is None}
    for symptom in roots:
        outside = (each for each in in_order if each in roots and explains(each, symptom))
        causes[symptom] = next((each for each in outside if each.began == symptom.since), None)

    def trace(episode: _Episode, below: int = 0) -> tuple[_Episode, int]:
        cause = causes[episode]
        return (episode, below) if cause is None or below > len(causes) else trace(cause, below + 1)

    return {episode: trace(episode) for episode in in_order}


def prescribe(rule: Rule, finding: Finding, history: History, info: RunInfo) -> tuple[Remedy, ...]:
    """What to do about a finding, best first, with the numbers of this run; advice that fails is left out."""
    remedies: list[Remedy] = []
    for make in rule.remedies:
        try:
            remedy = make(finding, history, info)
        except Exception:
            _log.exception("a remedy of %s %s failed and is left out", rule.code, rule.name)
            continue
        if remedy is not None:
            remedies.append(remedy)
    return tuple(remedies)
