"""All settings in one tree, each field with its own docstring; loads from TOML.

Thresholds stand here and nowhere else: the field of `Thresholds` that belongs to the rule `loss-spike` is `loss_spike`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from forewarn.settings import Settings as Settings
from forewarn.settings import between as between
from forewarn.settings import pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike(Settings):
    """When a value counts as far above its own recent level; judged in log space by median and MAD."""

    k: float = between(6.0, 1.0)
    """How many robust standard deviations (1.4826 × MAD) above the median."""
    floor: float = between(0.1, 0.0)
    """The least excess in natural-log units, whatever the spread: 0.1 is 10%, ln 2 is a doubling."""
    ceiling: float = between(math.log(100.0), 0.0)
    """The excess that is an outlier whatever the spread: a loss that falls fast spreads widely by its trend alone."""
    window: int = between(64, 8)
    """How many accepted values make the level."""
    minimum: int = between(32, 4)
    """How many values must have been seen before anything is judged."""
    readmit_after: int = between(32, 1)
    """After so many outliers in a row the new level is taken as the level."""

    def __post_init__(self) -> None:
        super(Spike, self).__post_init__()
        if self.minimum > self.window:
            raise ValueError(f"Spike.minimum ({self.minimum}) must not exceed Spike.window ({self.window})")
        if self.floor > self.ceiling:
            raise ValueError(f"Spike.floor ({self.floor:g}) must not exceed Spike.ceiling ({self.ceiling:g})")

    @property
    def key(self) -> tuple[float, ...]:
        """The numbers that make a baseline what it is: rules that agree on them share one."""
        return (self.k, self.floor, self.ceiling, self.window, self.minimum, self.readmit_after)

    @staticmethod
    def from_key(key: Sequence[float]) -> Spike:
        k, floor, ceiling, *counts = key
        window, minimum, readmit_after = map(int, counts)
        return Spike(k=k, floor=floor, ceiling=ceiling, window=window, minimum=minimum, readmit_after=readmit_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike(Spike):
    """L102."""

    warning_factor: float = between(10.0, 1.0)
    """Times the recent level at which a single step is a warning."""
    critical_factor: float = between(100.0, 1.0)
    """Times the recent level at which a single step is critical."""
    lasting_steps: int = between(3, 1)
    """Steps in a row after which a spike of any height is a warning."""
    lost_steps: int = between(20, 1)
    """Steps in a row after which the loss counts as not coming back: critical."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Share of the highest loss in memory below which a spike is information: a solved task jumps by large factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDivergence(Settings):
    """L103."""

    window: int = between(32, 8)
    """Steps whose median is the present level; it must have risen from window to window, twice, and within the last."""
    slow_window: int = between(128, 8)
    """The same for a rise that is too slow to be told from noise within the shorter windows."""
    significance: float = between(3.0, 0.0)
    """Standard errors of the median by which each of these rises must exceed the noise; within a window, half of it."""
    factor: float = between(1.5, 1.0)
    """Times the best earlier level above which a rising loss is a warning."""
    critical_factor: float = between(3.0, 1.0)
    """Times the best earlier level above which it is critical."""
    comparable_lr: float = between(0.5, 0.0, 1.0)
    """Share of the present lr that an earlier level must have been reached with, unless the present lr is a peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplodingGradient(Settings):
    """G102."""

    warning: float = between(100.0, 0.0)
    """Global gradient norm before clipping at which to warn."""
    critical: float = between(1000.0, 0.0)
    """Global gradient norm before clipping that is critical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VanishingGradient(Settings):
    """G103."""

    global_norm: float = between(1e-3, 0.0)
    """Global gradient norm below which the run as a whole is starved."""
    tensor_norm: float = between(1e-7, 0.0)
    """Gradient norm of one tensor below which (and above 0) it is starved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSpike(Spike):
    """G104."""

    floor: float = between(math.log(2.0), 0.0)
    lasting_steps: int = between(3, 1)
    """Steps in a row after which a spike is a warning; a single one is information."""
    warning_factor: float = between(10.0, 1.0)
    """Times the recent level at which a single step is a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWeight(Settings):
    """U101."""

    ratio: float = between(1e-12, 0.0)
    """Update ratio at or below which a weight does not move."""
    patience: int = between(3, 1)
    """Checks in a row at or below that ratio after which it counts as frozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRatioHigh(Settings):
    """U102."""

    tensor: float = between(0.1, 0.0)
    """Update ratio of one tensor above which it is rewritten rather than trained."""
    median: float = between(3e-2, 0.0)
    """Median update ratio over tensors at or above which the learning rate is too high."""
    start_steps: int = between(100, 0)
    """For so many steps the bounds are wider: weights start small, and Adam's first steps are its largest."""
    start_ratio: float = between(0.2, 0.0)
    """Both bounds in that time."""
    near_zero_ratio: float = between(10.0, 0.0)
    """A tensor whose very first ratio is above this starts near zero, and is left alone in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRatioLow(Settings):
    """U103."""

    tensor: float = between(1e-7, 0.0)
    """Update ratio of one tensor below which (and above frozen) it barely trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRatioJump(Settings):
    """U104."""

    factor: float = between(3.0, 1.0)
    """Times the median of the window."""
    window: int = between(20, 3)
    """Checks whose median is the level."""
    minimum: int = between(8, 2)
    """Checks that must have been seen before anything is judged."""
    warning_factor: float = between(10.0, 1.0)
    """Times the level at which a single check is a warning, whatever the cause; a jump of the lr always is."""
    lasting_checks: int = between(3, 1)
    """Checks in a row after which a jump of any height is a warning."""
    restart_tolerance: float = between(0.01, 0.0)
    """An lr that jumps to within this share of its earlier peak is a restart by plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerNotStepping(Settings):
    """U105."""

    steps: int = between(3, 1)
    """Calls of `monitor.step` in a row without an optimizer step."""
    skipped_steps: int = between(20, 1)
    """Steps skipped by the gradient scaler in a row; a few are how it finds its scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNormSpike(Settings):
    """W102."""

    factor: float = between(10.0, 1.0)
    """Times the median of the earlier checks."""
    minimum: int = between(8, 2)
    """Earlier checks that must have been seen before anything is judged."""
    growth: float = between(2.0, 1.0)
    """Times its oldest kept norm up to which that median is a level; above, the tensor is growing into place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNormsApart(Settings):
    """W103."""

    factor: float = between(1000.0, 1.0)
    """Largest over smallest root-mean-square weight among layers of the same kind."""
    tensors: int = between(3, 2)
    """Tensors of one kind that there must be to compare."""
    minimum: int = between(8, 2)
    """Checks that must have been seen before anything is judged."""
    growth: float = between(1.5, 1.0)
    """Times its oldest kept norm from which a small tensor counts as still growing into place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShrinking(Settings):
    """W104."""

    share: float = between(0.1, 0.0, 1.0)
    """Share of the norm it had in the oldest kept check below which a tensor counts as shrinking away."""
    minimum: int = between(8, 2)
    """Checks that must have been seen before anything is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadUnits(Settings):
    """A101."""

    share: float = between(0.5, 0.0, 1.0)
    """Share of the units of a layer that are dead at which to warn."""
    critical: float = between(0.99, 0.0, 1.0)
    """The share that is critical: nothing passes through the layer any more."""
    window: int = between(10, 1)
    """Measured steps in a row on which a unit must have been zero everywhere to count as dead."""
    positions: int = between(256, 1)
    """Positions (tokens, pixels, samples) that it must have been read at in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedUnits(Settings):
    """A102."""

    share: float = between(0.5, 0.0, 1.0)
    """Share of the units of a layer, or of the rows of a softmax, that are saturated at which to warn."""
    level: float = between(0.99, 0.5, 1.0)
    """Share of its range beyond which an output is saturated: a tanh above 0.99, a sigmoid below 0.01."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplodingActivation(Settings):
    """A103."""

    magnitude: float = between(3e4, 0.0)
    """Largest magnitude at which to warn, whatever came before: half of what float16 can hold."""
    factor: float = between(10.0, 1.0)
    """Times the median of the earlier checks."""
    lasting_checks: int = between(2, 1)
    """Checks in a row that the growth must last for: a single batch may be absurd."""
    least: float = between(100.0, 0.0)
    """Magnitude below which no growth matters: logits of 10 after a start at 0.1 are what learning looks like."""
    minimum: int = between(8, 2)
    """Earlier checks that must have been seen before growth is judged."""
    growth: float = between(3.0, 1.0)
    """Times its oldest kept value up to which that median is a level; above, the layer is still growing into place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepresentationCollapse(Settings):
    """A104."""

    cosine: float = between(0.999, 0.0, 1.0)
    """Mean cosine of the rows of the last hidden state at which they are all the same."""
    rank: float = between(1.05, 1.0)
    """Effective rank at or below which they differ along one line only."""
    outputs: int = between(3, 1)
    """Outputs that the last layer must have for that line to be too few: two classes need no more."""
    earlier_rank: float = between(2.0, 1.0)
    """Effective rank that there must have been before: what never had more did not collapse."""
    minimum: int = between(10, 1)
    """Checks that must have been seen before anything is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionEntropyCollapse(Settings):
    """A106."""

    entropy: float = between(0.05, 0.0, 1.0)
    """Share of the largest possible entropy at or below which a head looks at one key only."""
    checks: int = between(3, 1)
    """Checks in a row at or below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGrowth(Settings):
    """A107."""

    limit: float = between(100.0, 0.0)
    """Magnitude at which to warn: bfloat16 tells logits of this size apart in steps of 0.5 only, a factor of 1.6."""
    growing_limit: float = between(50.0, 0.0)
    """Magnitude at which to warn of what is still growing."""
    growth: float = between(1.5, 1.0)
    """Times the oldest check of the window from which it counts as growing."""
    window: int = between(16, 2)
    """Checks over which growth is judged."""
    critical: float = between(1e4, 0.0)
    """Magnitude that is critical: attention logits beyond it were met in runs that then diverged (Wortsman 2023)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLogitDrift(LogitGrowth):
    """A108."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadExpert(Settings):
    """A109."""

    share: float = between(0.02, 0.0, 1.0)
    """Share of an even load at or below which an expert is dead."""
    window: int = between(8, 1)
    """Checks over which the load is added up."""
    tokens: int = between(64, 1)
    """Tokens that an even load would have given each expert in that time, below which nothing is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds(Settings):
    """Every bound that a rule compares with, by the rule's name."""

    loss_spike: LossSpike = LossSpike()
    loss_divergence: LossDivergence = LossDivergence()
    exploding_gradient: ExplodingGradient = ExplodingGradient()
    vanishing_gradient: VanishingGradient = VanishingGradient()
    gradient_spike: GradientSpike = GradientSpike()
    frozen_weight: FrozenWeight = FrozenWeight()
    update_ratio_high: UpdateRatioHigh = UpdateRatioHigh()
    update_ratio_low: UpdateRatioLow = UpdateRatioLow()
    update_ratio_jump: UpdateRatioJump = UpdateRatioJump()
    optimizer_not_stepping: OptimizerNotStepping = OptimizerNotStepping()
    weight_norm_spike: WeightNormSpike = WeightNormSpike()
    weight_norms_apart: WeightNormsApart = WeightNormsApart()
    weight_shrinking: WeightShrinking = WeightShrinking()
    dead_units: DeadUnits = DeadUnits()
    saturated_units: SaturatedUnits = SaturatedUnits()
    exploding_activation: ExplodingActivation = ExplodingActivation()
    representation_collapse: RepresentationCollapse = RepresentationCollapse()
    attention_entropy_collapse: AttentionEntropyCollapse = AttentionEntropyCollapse()
    attention_logit_growth: LogitGrowth = LogitGrowth()
    output_logit_drift: OutputLogitDrift = OutputLogitDrift()
    dead_expert: DeadExpert = DeadExpert()


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Settings):
    """Everything that can be set about a monitor beyond the arguments of `watch`."""

    enable_ema_loss: bool = True
    """Whether `train/loss_ema` is recorded beside the loss."""
    ema_decay: float = between(0.99, 0.0, 0.99999)
    """`train/loss_ema` = decay · ema + (1 − decay) · loss; the first value is the first loss."""
    sample_size: int = between(1024, 1)
    """Weights sampled per tensor for the measured update; 1024 has a 95th-percentile error of 5.5%."""
    history_window: int = between(1024, 64)
    """Values kept in memory per metric of the run as a whole."""
    detail_window: int = between(64, 16)
    """Checks kept in memory per metric of each tensor; 4 bytes each."""
    escalation_steps: int = between(20, 0)
    """For so many steps after a warning fires, every step is measured in detail."""
    activations: bool = True
    """Whether the outputs of layers are measured: their statistics, dead and saturated units, the last hidden state."""
    modules: str = pattern()
    """A regular expression found in the names of further modules whose outputs are measured, dead units included."""
    activation_rows: int = between(256, 8)
    """Rows (tokens; images count for 8) of an output that are read; of a larger one every k-th, the first always."""
    attention: bool = True
    """Whether the entropy and the logits of attention heads are measured."""
    router: str = pattern()
    """A regular expression found in the names of the modules that give router logits, in a mixture of experts."""
    router_top_k: int = between(1, 1)
    """How many experts a token goes to."""
    disable: tuple[str, ...] = ()
    """Rules that are not judged, by code or by name."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """What you declare about the run (dropout, total steps, batch size); remedies use it for their numbers."""
    thresholds: Thresholds = Thresholds()

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A config from a TOML file, its keys named like the fields here."""
        try:
            with open(path, "rb") as file:
                return cls.from_dict(tomllib.load(file))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path} is not valid TOML: {error}") from error
