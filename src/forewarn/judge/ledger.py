"""The ledger: one alert per code and scope, pending → firing → resolved; causes rank above their symptoms."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from forewarn.judge.chains import Episode, Episodes, chains_of
from forewarn.judge.families import Family
from forewarn.judge.headlines import Telling, tell
from forewarn.judge.history import History
from forewarn.judge.judgement import Judgement
from forewarn.judge.registry import Rule
from forewarn.judge.rules import phase_of
from forewarn.types import Alert, AlertState, Finding, Remedy, RunInfo, Severity

_log = logging.getLogger("forewarn")

Identity = tuple[str, str]


class Ledger:
    """Follows every finding from its first appearance to its end."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = {rule.code: rule for rule in rules}
        self._explaining: dict[str, list[str]] = {}
        """By code: the codes of the rules that explain it."""
        for rule in self._rules.values():
            for symptom in rule.explains:
                self._explaining.setdefault(symptom, []).append(rule.code)
        self._open: dict[Identity, Alert] = {}
        self._checks: dict[Identity, int] = {}
        """For pending alerts: number of consecutive checks that saw it."""
        self._passed: set[Identity] = set()
        """Firing alerts that were not seen at the last check."""
        self._closed: list[Alert] = []
        self._past = Episodes()
        """Of the closed alerts."""
        self.reworded: list[Alert] = []
        """Open alerts that say something new since the last update, without having fired or grown worse."""

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every alert of the run that has fired, in the order of firing."""
        return tuple(sorted([*self._closed, *self._firing()], key=lambda alert: (alert.fired, alert.code, alert.scope)))

    def _firing(self) -> list[Alert]:
        return [alert for alert in self._open.values() if alert.state is AlertState.FIRING]

    @property
    def firing(self) -> tuple[Alert, ...]:
        """The alerts that are open now, most important first."""
        return self.ranked(self._firing())

    def pending(self, step: int) -> Iterator[Alert]:
        """The alerts that were seen at this step and wait for another check."""
        return (alert for identity in self._checks if (alert := self._open[identity]).last == step)

    def update(self, judgement: Judgement, history: History, info: RunInfo) -> tuple[Alert, ...]:
        """Add the judgement of one step; returns the alerts that fired, grew worse or were resolved."""
        self.reworded = []
        if not judgement.findings and (
            not self._open or judgement.judged.keys().isdisjoint(code for code, _ in self._open)
        ):
            return ()  # as on most steps
        changed: list[Alert] = []
        seen: set[Identity] = set()
        for finding in judgement.findings:
            identity = (finding.code, finding.scope)
            if finding.code not in self._rules or identity in seen:
                continue
            seen.add(identity)
            changed += self._see(finding, history, info)
        if not self._open:
            return self.ranked(changed) if changed else ()
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
        return self.ranked(self._with_causes(changed)) if changed else ()

    def changes_when_quiet(self) -> Iterator[tuple[Identity, float]]:
        """The open alerts, each with the first step at which a check that finds nothing changes it."""
        for identity, alert in self._open.items():
            is_known = alert.state is AlertState.FIRING and identity in self._passed
            yield identity, alert.last + self._rules[alert.code].keep if is_known else -math.inf

    def _with_causes(self, changed: Sequence[Alert]) -> list[Alert]:
        """These alerts; the firing ones carry the code of their cause, if it is known yet."""
        news = [alert for alert in changed if alert.state is AlertState.FIRING]
        if not news:
            return list(changed)
        all_episodes = self._past.copy()
        for alert in self._firing():
            all_episodes.add(self._episode(alert))
        causes = self._causes(news, all_episodes)
        for index, alert in enumerate(changed := list(changed)):
            if alert.state is AlertState.FIRING and (cause := causes.get((alert.code, alert.since))):
                changed[index] = self._open[alert.identity] = dataclasses.replace(alert, follows=cause)
        return changed

    def _close(self, alert: Alert) -> Alert:
        del self._open[alert.identity]
        self._passed.discard(alert.identity)
        self._keep_closed(dataclasses.replace(alert, state=AlertState.RESOLVED))
        return self._closed[-1]

    def _keep_closed(self, alert: Alert) -> None:
        self._closed.append(alert)
        self._past.add(self._episode(alert))

    def _see(self, finding: Finding, history: History, info: RunInfo) -> Iterator[Alert]:
        """The alert of this finding, if the finding made it fire or grow worse."""
        rule = self._rules[finding.code]
        identity = (finding.code, finding.scope)
        before = self._open.get(identity)
        if before and identity in self._passed and before.severity is Severity.INFO < finding.severity:
            yield self._close(before)  # the earlier information had passed: this is a new alert
            before = None
        self._passed.discard(identity)
        alert = before or Alert(
            finding.code, rule.name, finding.scope, finding.severity, AlertState.PENDING,
            since=finding.step, fired=None, last=finding.step, finding=finding,
        )  # fmt: skip
        # What has not fired yet is as severe as its newest check: the first one may know less than those after it.
        is_worst = alert.state is AlertState.PENDING or finding.severity >= alert.severity
        worst = finding if is_worst else alert.finding
        alert = _seen_again(alert, finding.step, finding.severity if is_worst else alert.severity, worst)
        if alert.state is AlertState.PENDING:
            self._checks[identity] = self._checks.get(identity, 0) + 1
            if self._checks[identity] >= rule.hold:
                del self._checks[identity]
                alert = dataclasses.replace(alert, state=AlertState.FIRING, fired=finding.step)
        news = alert.state is AlertState.FIRING and (
            before is None or before.state is AlertState.PENDING or alert.severity > before.severity
        )
        # Each epoch is shown with its advice, so an open alert about epochs speaks of the newest one.
        is_new_epoch = alert.state is AlertState.FIRING and rule.family is Family.EVALUATION and worst is finding
        if news or is_new_epoch:
            alert = dataclasses.replace(
                alert, announced=worst, remedies=prescribe(rule, worst, history, info),
                **_told(rule, worst, info)._asdict(),
            )  # fmt: skip
        self._open[identity] = alert
        if news:
            yield alert
        elif is_new_epoch:
            self.reworded.append(alert)

    def ranked(self, alerts: Sequence[Alert]) -> tuple[Alert, ...]:
        """Most important first: chains of cause and symptom by their worst open member, the cause first in each chain.

        A cause stays first while a symptom of it is open, even if it is resolved itself: the run still suffers from it.
        """
        all_episodes = self._episodes(alerts)
        episodes = [all_episodes.of(alert) for alert in alerts]
        chains = chains_of(episodes, all_episodes, self._explaining)
        weight: dict[Episode, tuple[bool, Severity]] = {}
        """By root cause: whether anything in its chain is open, and the worst severity of that, or else of all."""
        for alert, episode in zip(alerts, episodes, strict=True):
            root, _ = chains[episode]
            open_then_worst = (alert.state is not AlertState.RESOLVED, alert.severity)
            weight[root] = max(weight.get(root, open_then_worst), open_then_worst)

        def importance(index: int) -> tuple[Any, ...]:
            alert = alerts[index]
            root, depth = chains[episodes[index]]
            is_open, worst = weight[root]
            return (
                not is_open, -worst, root.since, root.code, depth, alert.state is AlertState.RESOLVED, -alert.severity,
                alert.since, episodes[index].phase, alert.code, alert.scope,
            )  # fmt: skip

        return tuple(alerts[index] for index in sorted(range(len(alerts)), key=importance))

    def causes(self, alerts: Sequence[Alert]) -> dict[tuple[str, int], str]:
        """For the code and first step of each symptom: the code of its root cause."""
        return self._causes(alerts, self._episodes(alerts))

    def _causes(self, alerts: Sequence[Alert], all_episodes: Episodes) -> dict[tuple[str, int], str]:
        """The same for these alerts, which are among those of the episodes."""
        episodes = [all_episodes.of(alert) for alert in alerts]
        chains = chains_of(episodes, all_episodes, self._explaining)
        return {
            (alert.code, alert.since): root.code
            for alert, episode in zip(alerts, episodes, strict=True)
            if (root := chains[episode][0]) != episode
        }

    def _episodes(self, alerts: Iterable[Alert]) -> Episodes:
        episodes = Episodes()
        for alert in alerts:
            episodes.add(self._episode(alert))
        return episodes

    def _episode(self, alert: Alert) -> Episode:
        rule = self._rules.get(alert.code)
        phase, keep = (phase_of(alert.code), 0) if rule is None else (rule.family.phase, rule.keep)
        return Episode(alert.code, phase, alert.since, _first_step(alert), alert.last + keep, alert.severity)

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
        self._closed, self._past = [], Episodes()
        for plain in state["closed"]:
            self._keep_closed(Alert.from_json(plain))
        checks = {(code, scope): int(count) for code, scope, count in state["checks"]}
        self._checks = {identity: count for identity, count in checks.items() if identity in self._open}
        self._passed = {(code, scope) for code, scope in state["passed"]} & set(self._open)


def _first_step(alert: Alert) -> int:
    """The step at which an alert began, by its own evidence if that tells."""
    return min([alert.since, *map(began_at, filter(None, (alert.announced, alert.finding)))])


def began_at(finding: Finding) -> int:
    """The step at which it began by its own evidence; its own step if the evidence does not tell."""
    return finding.step + 1 - max(1, int(finding.evidence.get("lasting_steps", 1)))


def _seen_again(alert: Alert, step: int, severity: Severity, finding: Finding) -> Alert:
    """The same alert, last seen at this step; `dataclasses.replace` takes twice as long, and many may be open."""
    return Alert(
        alert.code, alert.name, alert.scope, severity, alert.state, alert.since, alert.fired, step, finding,
        alert.remedies, alert.announced, alert.headline, alert.numbers, alert.cause, alert.place, alert.follows,
    )  # fmt: skip


def _told(rule: Rule, finding: Finding, info: RunInfo) -> Telling:
    """A finding in the words of its rule; just the name of the rule if its message cannot be filled in."""
    try:
        return tell(rule.messages, finding, info)
    except Exception:
        _log.exception("the message of %s %s failed and is left out", rule.code, rule.name)
        return Telling(rule.name, "", "")


def prescribe(rule: Rule, finding: Finding, history: History, info: RunInfo) -> tuple[Remedy, ...]:
    """The remedies for a finding, best first, with numbers from this run; remedies that fail are left out."""
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
