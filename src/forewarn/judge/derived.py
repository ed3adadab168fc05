"""Readings computed from others and the bounds of rules when a step is judged, both live and in replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from forewarn.judge.epochs import is_plateau
from forewarn.judge.history import Derivation, History
from forewarn.judge.rules.evaluation import ValidationPlateau
from forewarn.judge.rules.frozen import FrozenWeight, resting
from forewarn.judge.rules.gradients import ExplodingGradient, VanishingGradient
from forewarn.judge.series import Bools, aligned
from forewarn.types import Block, FrozenCause, Values

if TYPE_CHECKING:
    from forewarn.judge.judgement import RuleSet

_MOVING, _ON_PURPOSE, _NOT_IN_OPTIMIZER, _ROUNDED_AWAY, _SKIPPED, _NOT_STEPPED = np.array(
    [
        FrozenCause.MOVING, FrozenCause.ON_PURPOSE, FrozenCause.NOT_IN_OPTIMIZER, FrozenCause.ROUNDED_AWAY,
        FrozenCause.STEP_SKIPPED, FrozenCause.OPTIMIZER_NOT_STEPPED,
    ],
    np.float32,
)  # fmt: skip


def derivations(rule_set: RuleSet) -> tuple[Derivation, ...]:
    """All derivations, with the settings of these rules."""
    return (
        GradientCounts(rule_set.settings_of(VanishingGradient), rule_set.settings_of(ExplodingGradient)),
        FrozenCauses(rule_set.settings_of(FrozenWeight)),
        Plateau(rule_set.settings_of(ValidationPlateau)),
    )


class GradientCounts(Derivation):
    """The number of tensors with a vanishing or exploding gradient."""

    rule = "vanishing-gradient"
    sources = ("gradient/norm",)
    gives = ("monitor/vanishing_count", "monitor/exploding_count")

    def __init__(self, vanishing: VanishingGradient, exploding: ExplodingGradient) -> None:
        self._vanishing = vanishing
        self._exploding = exploding

    def derive(self, history: History, blocks: Mapping[str, Block]) -> Iterator[Block]:
        norms = blocks["gradient/norm"].values.astype(np.float64)
        yield _count("monitor/vanishing_count", norms < self._vanishing.tensor_norm, blocks["gradient/norm"])
        yield _count("monitor/exploding_count", norms > self._exploding.warning, blocks["gradient/norm"])


class FrozenTracker:
    """Counts for how many checks in a row each tensor has not moved."""

    def __init__(self, checks: Mapping[str, int] | None = None) -> None:
        self._scopes = tuple(checks or ())
        self._checks = np.array(list((checks or {}).values()), np.int64)

    @property
    def checks(self) -> dict[str, int]:
        """By scope: the number of checks in a row without a move, if not 0."""
        return {self._scopes[index]: int(self._checks[index]) for index in np.flatnonzero(self._checks)}

    def update(self, scopes: tuple[str, ...], still: Bools, stopped_by: Values, patience: int) -> Values:
        """The `FrozenCause` of each tensor after one more check. A tensor with a NaN `stopped_by` is not counted."""
        if scopes is not self._scopes:
            earlier = self.checks
            self._scopes, self._checks = scopes, np.array([earlier.get(scope, 0) for scope in scopes], np.int64)
        judged = ~np.isnan(stopped_by)
        self._checks = np.where(judged, np.where(still, self._checks + 1, 0), self._checks)
        frozen = judged & still & (self._checks >= patience)
        frozen |= still & (stopped_by == _NOT_IN_OPTIMIZER)
        frozen |= stopped_by == _ON_PURPOSE
        causes: Values = np.where(frozen, np.where(stopped_by == _MOVING, _ROUNDED_AWAY, stopped_by), _MOVING)
        return causes


class FrozenCauses(Derivation):
    """Which tensors have not moved for the patience of `frozen-weight`, and why."""

    rule = "frozen-weight"
    sources = ("update/ratio", "update/stopped_by")
    gives = ("update/frozen_cause", "monitor/frozen_count")

    def __init__(self, settings: FrozenWeight) -> None:
        self._settings = settings
        self._tracker = FrozenTracker()

    def derive(self, history: History, blocks: Mapping[str, Block]) -> Iterator[Block]:
        stopped = blocks["update/stopped_by"]
        ratios = blocks["update/ratio"].values.astype(np.float64)
        without_step = (stopped.values == _SKIPPED) | (stopped.values == _NOT_STEPPED)
        some_step = (stopped.values == _MOVING).any()
        still = (ratios <= self._settings.ratio) | (without_step if some_step else without_step.any())
        causes = self._tracker.update(stopped.scopes, still, stopped.values, self._settings.patience)
        yield Block(stopped.step, stopped.time, "update/frozen_cause", stopped.scopes, causes)
        frozen = causes > _ON_PURPOSE
        if frozen.any():
            now_and_then = resting(causes, stopped.scopes, history.panel("update/ratio"), self._settings)
            frozen &= [scope not in now_and_then for scope in stopped.scopes]
        yield _count("monitor/frozen_count", frozen, stopped)

    def state_dict(self) -> dict[str, Any]:
        return self._tracker.checks

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tracker = FrozenTracker({scope: int(checks) for scope, checks in state.items()})


class Plateau(Derivation):
    """Whether the validation loss has stood still over the last epochs."""

    rule = "validation-plateau"
    sources = ("evaluation/epoch", "eval/loss")
    gives = ("evaluation/plateau_detected",)

    def __init__(self, settings: ValidationPlateau) -> None:
        self._settings = settings

    def derive(self, history: History, blocks: Mapping[str, Block]) -> Iterator[Block]:
        _, (losses, _) = aligned(history.series("eval/loss"), history.series("evaluation/epoch"))
        if len(losses) and np.isfinite(losses[-1]):
            finite = losses[np.isfinite(losses)].tolist()
            is_still = is_plateau(finite, self._settings.change, self._settings.window)
            yield _count("evaluation/plateau_detected", np.array([is_still]), blocks["eval/loss"])


def _count(name: str, flags: Bools, source: Block) -> Block:
    """How many are true, as a reading of the run as a whole."""
    return Block(source.step, source.time, name, ("",), np.array([np.count_nonzero(flags)], np.float32))
