"""The gradient noise scale: how large a batch must be before averaging more examples gains little."""

from __future__ import annotations

import math

from forewarn.measure.ema import Ema

_DECAY = 0.95
"""Decay of the averages over measured steps: one step says little, but over many the noise scale itself grows."""

_LEVEL_DECAY = 0.7
"""Decay of the gradient level that steps are divided by; it follows the fast fall at the start of a run."""

_FEWEST_STEPS = 10
"""Minimum number of measured steps before a noise scale is reported."""


class NoiseScale:
    """The simple noise scale tr(Σ) / |G|², in backward passes, from the norms of a small and of a large batch.

    G is the true gradient, and Σ the covariance of the gradient of a small batch. The squared norm of a mean over b
    small batches is |G|² + tr(Σ) / b on average. The first pass of a step, or that of one rank, has b = 1; all k passes
    together have b = k. These two equations give |G|² and tr(Σ) without bias (McCandlish et al. 2018, appendix A.1).

    Both are averaged before the ratio is taken, since a mean of ratios would be biased. A factor in all gradients, such
    as a loss divided by k, cancels out. Gradients fall by orders of magnitude over a run, so the first ones would drown
    all others. Each step is therefore divided by the level of the steps before it. Its own level would bring in its own
    noise, and so a bias.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._level = Ema(_LEVEL_DECAY)
        self._variance = Ema(_DECAY)
        self._signal = Ema(_DECAY)

    def update(self, num_batches: int, first: float, total: float, per_pass: int = 1) -> None:
        """Add the gradient norms of one small batch (`first`) and of the sum over all of them (`total`).

        `per_pass` small batches make one pass over all ranks, which is the unit of the noise scale.
        """
        small, large = first**2, (total / num_batches) ** 2
        if not (math.isfinite(small) and math.isfinite(large) and small > 0):
            return
        level = small if math.isnan(self._level.value) else self._level.value
        self._level.update(small)
        self._num_steps += 1
        decay = min(_DECAY, 1 - 1 / self._num_steps)  # a plain mean at first: the first step weighs no more than others
        self._variance.decay = self._signal.decay = decay
        self._variance.update((small - large) / (1 - 1 / num_batches) / level / per_pass)
        self._signal.update((num_batches * large - small) / (num_batches - 1) / level)

    @property
    def value(self) -> float:
        """The noise scale in passes; NaN after too few steps, or while the noise hides the gradient."""
        if self._num_steps < _FEWEST_STEPS or not self._signal.value > 0:
            return math.nan
        return max(0.0, self._variance.value) / self._signal.value

    def state_dict(self) -> dict[str, float]:
        averages = {"level": self._level.value, "variance": self._variance.value, "signal": self._signal.value}
        return {"steps": self._num_steps, **averages}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._num_steps = int(state["steps"])
        self._level.value = float(state["level"])
        self._variance.value, self._signal.value = float(state["variance"]), float(state["signal"])
