"""What must be known while a run is measured; it is stored with the run and cannot be changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forewarn.plan import Plan
from forewarn.settings import Settings, between, pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure(Settings):
    """What is read from a training loop, and how."""

    enable_ema_loss: bool = True
    """Whether `train/loss_ema` is recorded beside the loss."""
    ema_decay: float = between(0.99, 0.0, 0.99999)
    """`train/loss_ema` = decay · ema + (1 − decay) · loss; the first value is the first loss. 0.95 to 0.999 are usual:
    on white noise they leave 2.6% to 0.05% of its variance."""
    plan: Plan = Plan()
    """What the learning rate should be at each step; `forewarn.Plan.from_scheduler(scheduler, total)` makes one."""
    sample_size: int = between(1024, 1)
    """Weights sampled per tensor for the measured update; 1024 has a 95th-percentile error of 5.5%."""
    histograms: Literal["off", "sampled", "full"] = "sampled"
    """Histograms, percentiles and shapes of every tensor on measured steps: none, of up to 16 blocks of 4096 values
    each and one block in 16 of larger ones, or of all values; docs/distributions.md has what each costs."""
    exact_percentiles: bool = False
    """Whether percentiles come from sorting every tensor: exact, and many times as costly as a histogram."""
    blocks: str = pattern()
    """A regular expression for the whole names of the modules that are the blocks of the model; else they are found."""
    mean_gain_drift_window: int = between(10, 2, counts="readings")
    """Checks over which `gain/mean_ma` is averaged and whose oldest `gain/drift` is measured against."""
    activations: bool = True
    """Whether the outputs of layers are measured: statistics, dead and saturated units, last hidden state, logits."""
    modules: str = pattern()
    """A regular expression found in the names of further modules whose outputs are measured, dead units included."""
    activation_rows: int = between(256, 8)
    """Rows (tokens; images count for 8) of an output that are read; of a larger one every k-th, the first always."""
    dead_unit_window: int = between(10, 1, counts="readings")
    """Measured steps in a row on which a unit must have been zero everywhere to count as dead."""
    dead_unit_positions: int = between(256, 1)
    """Positions (tokens, pixels, samples) that it must have been read at in that time."""
    saturation_level: float = between(0.99, 0.5, 1.0)
    """Share of its range beyond which an output is saturated: a tanh above 0.99, a sigmoid below 0.01."""
    attention: bool = True
    """Whether the entropy and the logits of attention heads are measured."""
    router: str = pattern()
    """A regular expression found in the names of the modules that give router logits, in a mixture of experts."""
    router_top_k: int = between(1, 1)
    """How many experts a token goes to."""
