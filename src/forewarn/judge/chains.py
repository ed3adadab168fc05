"""Chains of cause and symptom among the alerts of a run."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from forewarn.judge.families import Phase
from forewarn.types import Alert, Severity

_since, _until, _began = attrgetter("since"), attrgetter("until"), attrgetter("began")


@dataclass(frozen=True, slots=True)
class Episode:
    """A range of steps in which a rule found something."""

    code: str
    phase: Phase
    since: int
    began: int
    """When it began according to its own evidence: a slow rise is seen long after it began."""
    until: int
    """The last step at which it can still be a cause."""
    severity: Severity


class Episodes:
    """The episodes of each code, in order. Alerts of one code that were open at the same time share an episode.

    A run may have thousands of alerts, so those of a range of steps are found without a look at all of them.
    """

    def __init__(self) -> None:
        self._by_code: dict[str, list[Episode]] = {}
        """Those of one code do not overlap, so that `since` and `until` both rise."""
        self._lead: dict[str, int] = {}
        """By code: the largest number of steps from the beginning of an episode to when it was seen."""

    def copy(self) -> Episodes:
        other = Episodes()
        other._by_code = {code: list(episodes) for code, episodes in self._by_code.items()}
        other._lead = dict(self._lead)
        return other

    def add(self, new: Episode) -> None:
        """Add what one alert is about; it is joined with the episodes of its code that it overlaps."""
        episodes = self._by_code.setdefault(new.code, [])
        first = bisect_left(episodes, new.since, key=_until)
        end = bisect_right(episodes, new.until, first, key=_since)
        if together := episodes[first:end]:
            together.append(new)
            new = Episode(
                new.code, new.phase, min(map(_since, together)), min(map(_began, together)),
                max(map(_until, together)), max(episode.severity for episode in together),
            )  # fmt: skip
        episodes[first:end] = [new]
        self._lead[new.code] = max(self._lead.get(new.code, 0), new.since - new.began)

    def of(self, alert: Alert) -> Episode:
        """The episode of an alert that was added."""
        episodes = self._by_code[alert.code]
        return episodes[bisect_left(episodes, alert.since, key=_until)]

    def before(self, symptom: Episode, codes: Iterable[str]) -> Iterator[Episode]:
        """Those of these codes that began before the symptom was seen and were not over when it began."""
        for code in codes:
            if episodes := self._by_code.get(code):
                first = bisect_left(episodes, symptom.began, key=_until)
                end = bisect_right(episodes, symptom.since + self._lead[code], first, key=_since)
                yield from (episode for episode in episodes[first:end] if episode.began <= symptom.since)


def chains_of(
    episodes: Iterable[Episode], all_episodes: Episodes, explaining: Mapping[str, Collection[str]]
) -> dict[Episode, tuple[Episode, int]]:
    """For each of these episodes, and those that they may follow: its root cause, and the number of links to it.

    `explaining` holds the codes of the possible causes of each code.

    A cause explains the symptom's code, began no later, and was not over when the symptom began. If two appear at the
    same step, the one in the earlier phase of the step is the cause: a non-finite loss makes the gradients of its step
    non-finite, but such gradients affect the loss only in the next step. Of two that explain each other, the one that
    began first is the cause. An episode that nothing explains may cause one in an earlier phase, as when weights were
    changed from outside. Information never causes a warning.
    """

    def explains(cause: Episode, symptom: Episode) -> bool:
        return cause.code in explaining.get(symptom.code, ()) and not cause.severity is Severity.INFO < symptom.severity

    def starts(episode: Episode) -> tuple[int, Phase]:
        return (episode.began, episode.phase)

    def order(episode: Episode) -> tuple[int, Phase, str, int]:
        return (episode.began, episode.phase, episode.code, episode.since)

    causes: dict[Episode, Episode | None] = {}
    waiting = list(episodes)
    while waiting:
        symptom = waiting.pop()
        if symptom in causes:
            continue
        possible = all_episodes.before(symptom, explaining.get(symptom.code, ()))
        candidates = [cause for cause in possible if explains(cause, symptom)]
        earlier = (
            cause
            for cause in candidates
            if not (explains(symptom, cause) and starts(symptom) < starts(cause))
            and (cause.began < symptom.since or cause.phase <= symptom.phase)
        )
        causes[symptom] = min(earlier, key=order, default=None)
        waiting += candidates
    in_order = sorted(causes, key=order)
    roots = {
        began: list(together)
        for began, together in groupby((episode for episode in in_order if causes[episode] is None), _began)
    }
    for symptom in [episode for together in roots.values() for episode in together]:
        outside = (episode for episode in roots.get(symptom.since, ()) if explains(episode, symptom))
        causes[symptom] = next(outside, None)

    def trace(episode: Episode) -> tuple[Episode, int]:
        below = 0
        while (cause := causes[episode]) is not None and below <= len(causes):
            episode, below = cause, below + 1
        return episode, below

    return {episode: trace(episode) for episode in in_order}
