"""All settings in one tree, each field with its own docstring; loads from TOML.

Thresholds stand here and nowhere else: the field of `Thresholds` that belongs to the rule `loss-spike` is `loss_spike`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from forewarn.learning_thresholds import (
    FirstEpochFlat,
    FirstEpochSpike,
    LossBouncing,
    LossNotStarting,
    LossPlateau,
    Overfitting,
    ScheduleMismatch,
    SlowImprovement,
    Underfitting,
    ValidationPlateau,
    ValidationRising,
)
from forewarn.lr_thresholds import LrJumpOnResume, LrNeverDecays, LrOffPlan, LrSpent, WarmUpWithoutEnd
from forewarn.plan import Plan
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
class GradientFadesWithDepth(Settings):
    """G105."""

    share: float = between(0.01, 0.0, 1.0)
    """Share of the last block's gradient norm below which the first block is starved."""
    norm: float = between(1e-4, 0.0)
    """Gradient norm below which a first block is starved in absolute terms; both must hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientImbalance(Settings):
    """G106."""

    factor: float = between(100.0, 1.0)
    """Largest over smallest gradient norm among the blocks."""
    minimum: int = between(8, 1)
    """Checks that must have been seen before anything is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDecay(Settings):
    """G107."""

    share: float = between(0.1, 0.0, 1.0)
    """Share of its starting level below which the global gradient norm has decayed."""
    learning: float = between(0.05, 0.0, 1.0)
    """Share by which the loss must have fallen within memory for the decay to be that of a run that learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GainDrift(Settings):
    """G110."""

    mean_gain_drift_threshold: float = between(0.1, 0.0)
    """Share above the oldest check of the window at which the mean gain has drifted."""
    amplification: float = between(20.0, 1.0)
    """Times that gradients must grow over the whole depth for a drift to matter: a young model drifts as it learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GainTooHigh(Settings):
    """G111."""

    amplification: float = between(30.0, 1.0)
    """Times that a gradient may grow from last to first block; the gain allowed to n blocks is its n-th root."""
    mean_gain_absolute_threshold: float | None = None
    """The allowed mean gain per block, instead of the one that follows from `amplification` and the depth."""


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
class _TaskRatio(Settings):
    """When a ratio of two tasks' gradients is judged, and when the weaker one is left in peace."""

    window: int = between(10, 2)
    """Measured steps whose mean ratio, on a log scale, is judged; so many there must be."""
    solved: float = between(0.2, 0.0, 1.0)
    """Share of its first loss below which a weak task has learned its part, and is not neglected."""
    ahead: float = between(0.8, 0.0, 1.0)
    """The same for a weak task that has less than this share left of what the strong one has left."""
    mending: float = between(1.1, 1.0)
    """Times that its weight has risen against the strong one's where the tasks are being balanced already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImbalance(_TaskRatio):
    """T101."""

    minor: float = between(2.0, 1.0)
    """Ratio of two tasks' gradients, either way round, above which it is information."""
    significant: float = between(3.0, 1.0)
    """The same above which it is a warning."""
    starved: float = between(5.0, 1.0)
    """The same above which it is no longer this but a collapse, which has a rule of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCollapse(_TaskRatio):
    """T102."""

    ratio: float = between(5.0, 1.0)
    """Ratio of two tasks' gradients above which, or below one over which, the weaker one is starved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientConflict(Settings):
    """T103."""

    window: int = between(20, 2)
    """Measured steps that are judged together; so many there must be."""
    cosine: float = between(-0.4, -1.0, 0.0)
    """Mean cosine below which two tasks undo each other's steps in part: information."""
    severe: float = between(-0.6, -1.0, 0.0)
    """Mean cosine below which little is left of either: a warning."""
    negative_share: float = between(0.8, 0.0, 1.0)
    """Of the readings that must be negative for a conflict to be sustained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancing(Settings):
    """How `monitor.tasks(balance=…)` moves the weights of the tasks."""

    rate: float = between(0.05, 0.0, 1.0)
    """Share of the way that a weight goes in one update, on a log scale."""
    asymmetry: float = between(0.12, 0.0, 3.0)
    """GradNorm's alpha: how much harder a task that is behind may pull; the paper's value for real images is 0.12."""


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
    """Magnitude at which to warn: bfloat16 tells logits of this size apart in steps of 0.5, a factor of 1.6."""
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
    loss_plateau: LossPlateau = LossPlateau()
    loss_not_starting: LossNotStarting = LossNotStarting()
    loss_bouncing: LossBouncing = LossBouncing()
    exploding_gradient: ExplodingGradient = ExplodingGradient()
    vanishing_gradient: VanishingGradient = VanishingGradient()
    gradient_spike: GradientSpike = GradientSpike()
    gradient_fades_with_depth: GradientFadesWithDepth = GradientFadesWithDepth()
    gradient_imbalance: GradientImbalance = GradientImbalance()
    gradient_decay: GradientDecay = GradientDecay()
    gain_drift: GainDrift = GainDrift()
    gain_too_high: GainTooHigh = GainTooHigh()
    frozen_weight: FrozenWeight = FrozenWeight()
    update_ratio_high: UpdateRatioHigh = UpdateRatioHigh()
    update_ratio_low: UpdateRatioLow = UpdateRatioLow()
    update_ratio_jump: UpdateRatioJump = UpdateRatioJump()
    optimizer_not_stepping: OptimizerNotStepping = OptimizerNotStepping()
    lr_off_plan: LrOffPlan = LrOffPlan()
    lr_jump_on_resume: LrJumpOnResume = LrJumpOnResume()
    lr_spent: LrSpent = LrSpent()
    warm_up_without_end: WarmUpWithoutEnd = WarmUpWithoutEnd()
    lr_never_decays: LrNeverDecays = LrNeverDecays()
    weight_norm_spike: WeightNormSpike = WeightNormSpike()
    weight_norms_apart: WeightNormsApart = WeightNormsApart()
    weight_shrinking: WeightShrinking = WeightShrinking()
    overfitting: Overfitting = Overfitting()
    slow_improvement: SlowImprovement = SlowImprovement()
    validation_plateau: ValidationPlateau = ValidationPlateau()
    validation_rising: ValidationRising = ValidationRising()
    underfitting: Underfitting = Underfitting()
    first_epoch_flat: FirstEpochFlat = FirstEpochFlat()
    first_epoch_spike: FirstEpochSpike = FirstEpochSpike()
    schedule_mismatch: ScheduleMismatch = ScheduleMismatch()
    task_imbalance: TaskImbalance = TaskImbalance()
    task_collapse: TaskCollapse = TaskCollapse()
    gradient_conflict: GradientConflict = GradientConflict()
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
    """`train/loss_ema` = decay · ema + (1 − decay) · loss; the first value is the first loss. 0.95 to 0.999 are usual:
    on white noise they leave 2.6% to 0.05% of its variance."""
    sample_size: int = between(1024, 1)
    """Weights sampled per tensor for the measured update; 1024 has a 95th-percentile error of 5.5%."""
    histograms: Literal["off", "sampled", "full"] = "sampled"
    """Histograms, percentiles and shapes of every tensor on measured steps: none, of one in four blocks of 4096 values,
    or of all values; docs/distributions.md has what each costs."""
    exact_percentiles: bool = False
    """Whether percentiles come from sorting every tensor: exact, and many times as costly as a histogram."""
    history_window: int = between(1024, 64)
    """Values kept in memory per metric of the run as a whole."""
    detail_window: int = between(64, 16)
    """Checks kept in memory per metric of each tensor that a rule looks at; about 5 bytes each."""
    blocks: str | None = None
    """A regex for the names of the modules that are the blocks of the model; by default they are found."""
    mean_gain_drift_window: int = between(10, 2)
    """Checks over which `gain/mean_ma` is averaged and whose oldest `gain/drift` is measured against."""
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
    plan: Plan = Plan()
    """What the learning rate should be at each step; `forewarn.plan_of(scheduler, total)` reads it off a scheduler."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """What you declare about the run (dropout, total steps, batch size); remedies use it for their numbers."""
    balancing: Balancing = Balancing()
    """How automatic loss weights move; used only where `monitor.tasks(balance=…)` asks for them."""
    thresholds: Thresholds = Thresholds()

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A config from a TOML file, its keys named like the fields here."""
        try:
            with open(path, "rb") as file:
                return cls.from_dict(tomllib.load(file))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path} is not valid TOML: {error}") from error
