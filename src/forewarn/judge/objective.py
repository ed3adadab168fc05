"""Whether the training loss is what the run minimizes."""

from __future__ import annotations

import numpy as np

from forewarn.judge.forecast import LossCurve
from forewarn.judge.series import Bools, Series
from forewarn.types import RunInfo

_WINDOW = 64
"""Number of recent losses in which changes of sign are counted."""

_SIGN_CHANGES = 6
"""Number of sign changes from which a loss has no sign of its own: one that falls through zero has a few."""
_OWN_SIGN = 32
"""Losses in a row of one sign, and of the other at another time, of a loss that only travels through zero."""


_GAME = 1
"""What `update/separate_losses` says of a game."""


def is_game(separate: Series, info: RunInfo) -> bool:
    """Whether each of several optimizers has a loss of its own, as in a GAN or with an actor and a critic."""
    return info.objective != "loss" and bool((separate.finite() == _GAME).any())


def is_objective(loss: Series, separate: Series, info: RunInfo) -> bool:
    """Whether a rise of the loss means that the model gets worse.

    It does not in reinforcement learning, where the loss follows the data that the policy finds, or in a game, where
    each side has a loss of its own. `separate` shows both. A policy loss also keeps changing its sign. So does a noisy
    log-likelihood while it passes through zero, but it has a sign before and after.
    """
    if info.objective != "auto":
        return info.objective == "loss"
    if separate.finite().any():
        return False
    signs = np.sign(loss.finite(_WINDOW))
    if np.count_nonzero(np.diff(signs)) < _SIGN_CHANGES:
        return True
    losses = loss.finite(None)
    return _holds_for(losses > 0, _OWN_SIGN) and _holds_for(losses < 0, _OWN_SIGN)


def is_falling(curve: LossCurve, loss: Series, separate: Series, info: RunInfo) -> bool | None:
    """Whether the loss has fallen; None if the run is too short to tell, or improves something else."""
    return curve.is_falling if is_objective(loss, separate, info) else None


def _holds_for(flags: Bools, count: int) -> bool:
    """Whether so many flags in a row are set."""
    if len(flags) < count:
        return False
    sums = np.cumsum(np.append(0, flags))
    return bool((sums[count:] - sums[:-count]).max() == count)
