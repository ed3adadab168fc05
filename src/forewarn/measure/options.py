"""Settings of the measurement; they are stored with the run and cannot be changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forewarn.plan import Plan
from forewarn.settings import Settings, between, pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure(Settings):
    """What to measure in a training loop, and how."""

    enable_ema_loss: bool = True
    """Whether to record `train/loss_ema` beside the loss."""
    ema_decay: float = between(0.99, 0.0, 0.99999)
    """Decay of `train/loss_ema`: decay · ema + (1 − decay) · loss, starting from the first loss. Usual values are 0.95
    to 0.999, which leave 2.6% to 0.05% of the variance of white noise."""
    plan: Plan = Plan()
    """The planned learning rate at each step; `forewarn.Plan.from_scheduler(scheduler, total)` creates a plan."""
    gradients: bool = True
    """Whether to measure gradients: the global norm on every step, each tensor's statistics on measured steps."""
    weights: bool = True
    """Whether to measure the statistics of every weight tensor."""
    updates: bool = True
    """Whether to measure how far each weight tensor moves, and why some do not. Without `gradients`, a tensor that
    stands still for an unknown cause is not reported."""
    sample_size: int = between(1024, 1)
    """Number of weights sampled per tensor to measure the update; with 1024, the 95th-percentile error is 5.5%."""
    histograms: Literal["off", "sampled", "full"] = "sampled"
    """How to compute histograms, percentiles and shapes of every tensor on measured steps: not at all, from a sample,
    or from all values. A sample has up to 16 blocks of 4096 values, or one block in 16 of larger tensors. For the cost
    of each, see docs/distributions.md."""
    exact_percentiles: bool = False
    """Whether to compute percentiles by sorting every tensor: exact, but many times as costly as a histogram."""
    gain: bool = True
    """Whether to follow gradients through the model's blocks: the gain of each block, and the gradient norm of its
    parameters."""
    blocks: str = pattern()
    """Regular expression that matches the whole names of the model's blocks; by default they are detected."""
    mean_gain_drift_window: int = between(10, 2, counts="readings")
    """Number of checks averaged in `gain/mean_ma`; `gain/drift` compares with the oldest of them."""
    activations: bool = True
    """Whether to measure batches and layer outputs: statistics, dead and saturated units, last hidden state, logits."""
    modules: str = pattern()
    """Regular expression to find in module names: the outputs of these modules are measured too, with dead units."""
    activation_rows: int = between(256, 8)
    """Maximum number of rows read from one output (tokens; an image counts as 8); larger outputs are sampled evenly."""
    dead_unit_window: int = between(10, 1, counts="readings")
    """Number of consecutive measured steps on which a unit must be zero everywhere to count as dead."""
    dead_unit_positions: int = between(256, 1)
    """Minimum number of positions (tokens, pixels, samples) read in that window before a unit can count as dead."""
    saturation_level: float = between(0.99, 0.5, 1.0)
    """Fraction of its range beyond which an output is saturated: a tanh above 0.99, a sigmoid below 0.01."""
    attention: bool = True
    """Whether to measure the entropy and the logits of attention heads."""
    router: str = pattern()
    """Regular expression to find in module names: these modules return router logits, in a mixture of experts."""
    router_top_k: int = between(1, 1)
    """Number of experts that each token goes to."""

    def __post_init__(self) -> None:
        super(Measure, self).__post_init__()
        if self.modules and not self.activations:
            raise ValueError(
                f"Measure.modules={self.modules!r} chooses outputs to measure, but Measure.activations is False; "
                "remove one of them"
            )
