"""What came of each action: whether its alert was resolved and the loss came back, and after how many steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forewarn.types import Action

_LEVEL_STEPS = 20
"""Number of losses before an alert whose median is the level to come back to."""
_RECENT_STEPS = 5
"""Number of losses whose median must be back at that level."""
_DEVIATIONS = 2.0
"""How far above its level a loss counts as back, in standard deviations of the losses around that level."""
_DEVIATION = 1.4826
_LEAST_TOLERANCE = 0.02
"""The same as a share of the level, if the losses hardly vary."""


def highest_usual(losses: Sequence[float]) -> float:
    """The highest loss that counts as back at the level of these; NaN if there are none."""
    finite = [loss for loss in losses[-_LEVEL_STEPS:] if math.isfinite(loss)]
    if not finite:
        return math.nan
    level = statistics.median(finite)
    spread = _DEVIATION * statistics.median(abs(loss - level) for loss in finite)
    return level + max(_DEVIATIONS * spread, _LEAST_TOLERANCE * abs(level))


@dataclass(slots=True)
class _Watched:
    action: Action
    highest: float
    """The highest loss that counts as recovered; NaN if that cannot be told."""
    least_steps: int
    """Number of steps before the alert can count as resolved: after a return, as many as lay between."""
    steps: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))


class Outcomes:
    """Follows the actions taken until their outcome is known."""

    def __init__(self, most_steps: int) -> None:
        self._most_steps = most_steps
        self._watched: list[_Watched] = []
        self.taken: dict[tuple[int, str, str, str], Action] = {}
        """Every action of the run, with its outcome if that is known."""

    def add(self, action: Action, highest: float, least_steps: int = 0) -> None:
        """Follow an action that was just taken, or would have been in a dry run."""
        self.taken[action.identity] = action
        if not action.failed and action.action not in ("notify", "stop"):
            self._watched.append(_Watched(action, highest, least_steps))

    def update(self, firing: Collection[tuple[str, str]], loss: float) -> list[Action]:
        """The actions whose outcome is known after one more step."""
        over: list[Action] = []
        for watched in list(self._watched):
            watched.steps += 1
            watched.recent.append(loss)
            action = watched.action
            is_resolved = (action.code, action.scope) not in firing and watched.steps >= watched.least_steps
            if action.resolved_after is None and is_resolved:
                action = replace(action, resolved_after=watched.steps)
            is_back = len(watched.recent) == _RECENT_STEPS and statistics.median(watched.recent) <= watched.highest
            if action.recovered_after is None and is_back:
                action = replace(action, recovered_after=watched.steps)
            watched.action = action
            is_known = action.resolved_after is not None and action.recovered_after is not None
            if is_known or watched.steps >= self._most_steps:
                over.append(self._finish(watched))
        return over

    def finish(self) -> list[Action]:
        """What is known of the other actions at the end of the run."""
        return [self._finish(watched) for watched in list(self._watched)]

    def _finish(self, watched: _Watched) -> Action:
        self._watched.remove(watched)
        action = replace(watched.action, watched_steps=watched.steps)
        self.taken[action.identity] = action
        return action

    def state_dict(self) -> dict[str, Any]:
        return {
            "taken": [action.to_json() for action in self.taken.values()],
            "watched": [
                {"action": watched.action.to_json(), "highest": watched.highest, "least": watched.least_steps,
                 "steps": watched.steps, "recent": list(watched.recent)}
                for watched in self._watched
            ],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        taken = map(Action.from_json, state["taken"])
        self.taken = {action.identity: action for action in taken}
        self._watched = [
            _Watched(
                Action.from_json(plain["action"]), float(plain["highest"]), int(plain["least"]), int(plain["steps"]),
                deque(map(float, plain["recent"]), maxlen=_RECENT_STEPS),
            )
            for plain in state["watched"]
        ]  # fmt: skip
