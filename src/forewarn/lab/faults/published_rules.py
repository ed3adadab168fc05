"""The rules that others have published, at their defaults, judged from the readings of the same runs.

They are written from their documentation or source. Where a rule needs something that these runs do not record, its
docstring says what stands in for it. They are baselines for detection and false warnings: none of them ranks causes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forewarn.codec import Noun
from forewarn.store.reader import Run
from forewarn.types import RunInfo

Floats = NDArray[np.float64]
Warnings = Iterator[tuple[int, str]]
"""The step and the name of each warning."""


@dataclass(frozen=True, slots=True)
class Remark(Noun):
    """What a published rule set said about a run."""

    rules: str
    first: int
    """The step of its first warning."""
    last: int
    what: str
    """The name of the first warning."""


class Readings:
    """The readings of a run by metric, in the order of their steps."""

    def __init__(self, run: Run) -> None:
        self.info: RunInfo = run.info
        self._blocks: dict[str, list[tuple[int, tuple[str, ...], Floats]]] = {}
        for step, blocks in run.steps():
            for block in blocks:
                values = np.asarray(block.values, np.float64)
                self._blocks.setdefault(block.name, []).append((step, block.scopes, values))

    def of(self, name: str) -> list[tuple[int, tuple[str, ...], Floats]]:
        """The step, scopes and values of each reading of a metric."""
        return self._blocks.get(name, [])

    def series(self, name: str) -> list[tuple[int, float]]:
        """The steps and values of a metric of the whole run."""
        return [(step, float(values[0])) for step, _, values in self.of(name)]

    def sizes(self, scopes: Sequence[str]) -> Floats:
        """The number of values of each parameter; 1 if it is not known."""
        parameters = self.info.parameters
        return np.array(
            [math.prod(parameters[scope].shape) if scope in parameters else 1 for scope in scopes], np.float64
        )


def _not_finite(readings: Readings) -> Warnings:
    """Steps with a NaN or an infinity in the loss, a gradient, a weight or a layer's output."""
    for step, loss in readings.series("train/loss"):
        if not math.isfinite(loss):
            yield step, "NaN or infinite loss"
    for name in ("gradient/nonfinite", "weight/nonfinite", "activation/nonfinite"):
        for step, _, values in readings.of(name):
            if np.nansum(values) > 0:
                yield step, "NaN or infinite tensor"


def _vanishing(readings: Readings, threshold: float) -> Warnings:
    """Gradients whose mean magnitude is below a threshold.

    The root mean square stands in for the mean magnitude, which is not recorded and is never larger.
    """
    for step, scopes, norms in readings.of("gradient/norm"):
        if np.any(norms / np.sqrt(readings.sizes(scopes)) < threshold):
            yield step, "vanishing gradient"


def sagemaker_tensor_rules(readings: Readings) -> Warnings:
    """SageMaker Debugger's VanishingGradient, ExplodingTensor, WeightUpdateRatio, DeadRelu and Overfit.

    Defaults as documented at docs.aws.amazon.com/sagemaker/latest/dg/debugger-built-in-rules.html: a mean gradient
    magnitude below 1e-7; any NaN or infinity; an update ratio above 10 or below 1e-8; more than 50% of a layer's ReLUs
    inactive; a validation loss more than 0.1 of the training loss above it, with a patience of 1.
    """
    yield from _vanishing(readings, 1e-7)
    yield from _not_finite(readings)
    for step, _, ratios in readings.of("update/ratio"):
        if np.any(ratios > 10) or np.any(ratios < 1e-8):
            yield step, "weight update ratio"
    for step, _, shares in readings.of("activation/dead_fraction"):
        if np.any(shares > 0.5):
            yield step, "dead ReLU"
    for step, gap in readings.series("evaluation/train_val_gap"):
        if gap > 0.1:
            yield step, "overfit"


def sagemaker(readings: Readings) -> Warnings:
    """The same and LossNotDecreasing: every 10 steps, the loss must have fallen by 0.1% (`num_steps`, `diff_percent`).

    Documented at docs.aws.amazon.com/sagemaker/latest/dg/loss-not-decreasing.html.
    """
    yield from sagemaker_tensor_rules(readings)
    losses = readings.series("train/loss")
    for (_, before), (step, now) in zip(losses[::10], losses[10::10], strict=False):
        if not before - now >= 0.001 * abs(before):
            yield step, "loss not decreasing"


def olmo_core(readings: Readings) -> Warnings:
    """OLMo-core's SkipStepOptimizer: a loss or gradient norm 6 standard deviations above the mean of 128 steps.

    `rolling_interval_length=128`, `sigma_factor=6`, in `olmo_core/optim/skip_step_optimizer.py`. It begins when half of
    the interval has been seen.
    """
    for name, what in (("train/loss", "loss"), ("gradient/global_norm", "gradient norm")):
        recent: deque[float] = deque(maxlen=128)
        for step, value in readings.series(name):
            if len(recent) >= 64:
                mean, spread = float(np.mean(recent)), float(np.std(recent, ddof=1))
                if not value - mean <= 6 * spread:
                    yield step, f"{what} 6 standard deviations up"
            recent.append(value)


def lightning(readings: Readings) -> Warnings:
    """Lightning's SpikeDetection: a loss that rose and is 3 times the mean of the last 10, or is not finite.

    `window=10`, `warmup=1`, `rtol=2.0`, `finite_only=True` in `lightning/fabric/utilities/spike.py`.
    """
    recent: deque[float] = deque(maxlen=10)
    last = 0.0
    for index, (step, loss) in enumerate(readings.series("train/loss")):
        if index >= 1 and recent:
            mean = sum(recent) / len(recent)
            if not math.isfinite(loss) or (loss > last and abs(loss - mean) >= abs(2.0 * mean)):
                yield step, "loss spike"
                continue
        recent.append(loss)
        last = loss


def zclip(readings: Readings) -> Warnings:
    """ZClip: a gradient norm whose z-score against its moving average is above 2.5 (Kumar et al. 2025).

    `alpha=0.97`, `z_thresh=2.5`, `warmup_steps=25`, `clip_option="adaptive_scaling"` in github.com/bluorion-com/ZClip.
    A norm that it would clip counts as a warning.
    """
    start: list[float] = []
    mean = variance = math.nan
    for step, norm in readings.series("gradient/global_norm"):
        if not math.isfinite(norm):
            yield step, "gradient norm not finite"
            continue
        if len(start) < 25:
            start.append(norm)
            mean, variance = float(np.mean(start)), float(np.var(start))
            continue
        spread = math.sqrt(variance) + 1e-6
        score = (norm - mean) / spread
        if score > 2.5:
            yield step, "gradient norm z-score"
            norm = mean + 2.5**2 / score * spread
        mean = 0.97 * mean + 0.03 * norm
        variance = 0.97 * variance + 0.03 * (norm - mean) ** 2


def deep_diagnosis(readings: Readings) -> Warnings:
    """DeepDiagnosis (Wardat et al. 2022): its symptoms, checked on measured steps instead of at the end of an epoch.

    From `callback/callbacks.py` in github.com/DeepDiagnosis/ICSE2022: any NaN or infinity; a mean gradient magnitude
    below 1e-7; more than half of a tanh or sigmoid layer saturated; at the last check, 70% of a ReLU layer's outputs
    at zero; a loss that is the same five times in a row. The saturation is that of `activation/saturated_fraction`.
    """
    yield from _not_finite(readings)
    yield from _vanishing(readings, 1e-7)
    for step, _, shares in readings.of("activation/saturated_fraction"):
        if np.any(shares > 0.5):
            yield step, "saturated activation"
    rectified = {scope for _, scopes, _ in readings.of("activation/dead_fraction") for scope in scopes}
    for step, scopes, shares in readings.of("activation/zero_fraction")[-1:]:
        if any(scope in rectified and share >= 0.7 for scope, share in zip(scopes, shares, strict=True)):
            yield step, "dead node"
    losses = readings.series("train/loss")
    for index in range(4, len(losses)):
        if len({loss for _, loss in losses[index - 4 : index + 1]}) == 1:
            yield losses[index][0], "loss not decreasing"


def auto_trainer(readings: Readings) -> Warnings:
    """AutoTrainer (Zhang et al. 2021): vanishing, exploding and dying gradients.

    From `AutoTrainer/utils/monitor.py` in github.com/shiningrain/AUTOTRAINER: the gradient norm of the first layer
    below 1e-3 of the last one's and below 1e-4, or above 70 times the last one's; 70% of all gradient values zero; any
    NaN or infinity. Its conditions on accuracy are left out, because these runs report none.
    """
    yield from _not_finite(readings)
    for step, scopes, norms in readings.of("gradient/norm"):
        matrices = [index for index, scope in enumerate(scopes) if _is_matrix(readings.info, scope)]
        if len(matrices) < 2 or not norms[matrices[-1]] > 0:
            continue
        first, last = norms[matrices[0]], norms[matrices[-1]]
        if first < 1e-3 * last and first < 1e-4:
            yield step, "vanishing gradient"
        elif first > 70 * last:
            yield step, "exploding gradient"
    for step, scopes, shares in readings.of("gradient/zero_fraction"):
        sizes = readings.sizes(scopes)
        if float(np.nansum(shares * sizes)) >= 0.7 * float(sizes.sum()):
            yield step, "dying ReLU"


def _is_matrix(info: RunInfo, scope: str) -> bool:
    return scope in info.parameters and len(info.parameters[scope].shape) >= 2


PUBLISHED: dict[str, Callable[[Readings], Warnings]] = {
    "SageMaker Debugger": sagemaker,
    "SageMaker Debugger without LossNotDecreasing": sagemaker_tensor_rules,
    "OLMo-core (6 sigma, 128 steps)": olmo_core,
    "Lightning SpikeDetection": lightning,
    "ZClip": zclip,
    "DeepDiagnosis": deep_diagnosis,
    "AutoTrainer": auto_trainer,
}
"""The rule sets by name."""


def remarks_about(run: Run) -> tuple[Remark, ...]:
    """What each published rule set says about a run; those that say nothing are left out."""
    readings = Readings(run)
    with np.errstate(all="ignore"):
        said = {name: sorted(warn(readings)) for name, warn in PUBLISHED.items()}
    return tuple(Remark(name, warned[0][0], warned[-1][0], warned[0][1]) for name, warned in said.items() if warned)
