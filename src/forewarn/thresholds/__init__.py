"""Every bound that a rule compares with, one file per family."""

from __future__ import annotations

from dataclasses import dataclass

from forewarn.settings import Settings
from forewarn.thresholds.activations import (
    AttentionEntropyCollapse,
    DeadExpert,
    DeadUnits,
    ExplodingActivation,
    LogitGrowth,
    OutputLogitDrift,
    RepresentationCollapse,
    SaturatedUnits,
)
from forewarn.thresholds.evaluation import (
    FirstEpochFlat,
    FirstEpochSpike,
    Overfitting,
    ScheduleMismatch,
    SlowImprovement,
    Underfitting,
    ValidationPlateau,
    ValidationRising,
)
from forewarn.thresholds.gradients import (
    ExplodingGradient,
    GainDrift,
    GainTooHigh,
    GradientDecay,
    GradientFadesWithDepth,
    GradientImbalance,
    GradientSpike,
    VanishingGradient,
)
from forewarn.thresholds.loss import LossBouncing, LossDivergence, LossNotStarting, LossPlateau, LossSpike
from forewarn.thresholds.lr import LrJumpOnResume, LrNeverDecays, LrOffPlan, LrSpent, WarmUpWithoutEnd
from forewarn.thresholds.metrics import MetricJump
from forewarn.thresholds.tasks import GradientConflict, TaskCollapse, TaskImbalance
from forewarn.thresholds.updates import (
    FrozenWeight,
    OptimizerNotStepping,
    UpdateRatioHigh,
    UpdateRatioJump,
    UpdateRatioLow,
)
from forewarn.thresholds.weights import WeightNormsApart, WeightNormSpike, WeightShrinking


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
    metric_jump: MetricJump = MetricJump()
