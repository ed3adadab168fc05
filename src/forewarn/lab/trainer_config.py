"""Everything that can be set about a training run, each field with its own docstring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from forewarn.config import Config
from forewarn.settings import Settings, between


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(Settings):
    """Settings of a `Trainer`; values out of range are refused when it is made."""

    model_name: str = "model"
    """Results go to `result_dir / model_name`."""
    result_dir: str = "results"
    """The directory of all results."""
    device: str = "cpu"
    """The device of the model and the batches."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Mixed precision by autocast; fp16 comes with a gradient scaler."""
    epochs: int = between(1, 1)
    """Passes over the training data."""
    steps_per_epoch: int | None = between(None, 1)
    """Number of optimizer steps in an epoch, for endless data; None: until the data ends."""
    max_steps: int | None = between(None, 1)
    """Optimizer steps after which training ends, whatever the epoch."""
    accumulation_steps: int = between(1, 1)
    """Number of batches whose gradients are accumulated for one optimizer step."""
    gradient_clip: float | None = between(1.0, 0.0)
    """Global gradient norm above which gradients are scaled down; 0 or None: never."""
    log_interval: int = between(100, 1)
    """Number of steps between lines on the console."""

    log_layers: int = between(0, 0)
    """Print every layer's gradient norm, mean and std and its update ratio every this many steps; 0: never."""
    snapshot_interval: int | None = between(None, 0)
    """Number of steps between snapshots; 0 or None: only at epochs."""
    snapshot_per_epoch: bool = True
    """A snapshot at the end of every epoch."""
    keep_last_n_snapshots: int = between(3, 1)
    """Older snapshots are deleted once a newer one is safe on disk."""
    delete_snapshots_after_training: bool = False
    """Delete the snapshots of a run that has completed; the run and its readings stay."""

    monitor: Config | None = None
    """All other settings of the monitor, thresholds included. Settings below that differ from their defaults win."""
    enable_weight_monitor: bool = False
    """Measure every tensor's gradient, weight and update every `weight_monitor_interval` steps.

    Without it only loss, learning rate, the norm that clipping computes anyway and the time of a step are read.
    """
    weight_monitor_interval: int = between(100, 1)
    """Number of steps between measurements of every tensor, after the first 10 steps."""
    weight_monitor_sample_size: int = between(1024, 1)
    """Weights sampled per tensor for the measured update."""
    monitor_topk: int = between(5, 0)
    """Number of tensors to name in the list of frozen parameters and as tags in TensorBoard."""
    vanishing_grad_threshold: float = between(1e-7, 0.0)
    """Gradient norm of a tensor below which it vanishes."""
    exploding_grad_threshold: float = between(1e2, 0.0)
    """Gradient norm above which gradients explode."""
    frozen_update_ratio_threshold: float = between(1e-12, 0.0)
    """Update ratio at or below which a weight does not move."""
    frozen_patience_steps: int = between(3, 1)
    """Number of checks in a row at or below it that make a weight frozen."""
    enable_ema_loss: bool = True
    """Whether the moving average of the loss is recorded and shown."""
    ema_decay: float = between(0.99, 0.0, 0.99999)
    """The weight of the old value: `ema = decay · ema + (1 − decay) · loss`."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """What you declare about the model and the run (dropout, width, depth); remedies use it for their numbers."""
    tensorboard: bool = False
    """Write TensorBoard events beside the run."""
    tensorboard_detail: Literal["aggregates", "full"] = "aggregates"
    """`full` adds a tag for every reading of every tensor."""

    def __post_init__(self) -> None:
        super(TrainerConfig, self).__post_init__()
        if Path(self.model_name).name != self.model_name or self.model_name in ("", ".", ".."):
            raise ValueError(f"TrainerConfig.model_name must be a plain name without slashes, not {self.model_name!r}")

    @property
    def directory(self) -> Path:
        """Where this model's results are."""
        return Path(self.result_dir) / self.model_name

    def monitor_config(self, hyperparameters: Mapping[str, float | str | bool]) -> Config:
        """The settings of the monitor: those of `monitor`, and what was changed here."""
        config = self.monitor or Config()
        bounds = config.thresholds
        warning = self._changed("exploding_grad_threshold", bounds.exploding_gradient.warning)
        return replace(
            config,
            measure=replace(
                config.measure,
                enable_ema_loss=self._changed("enable_ema_loss", config.measure.enable_ema_loss),
                ema_decay=self._changed("ema_decay", config.measure.ema_decay),
                sample_size=self._changed("weight_monitor_sample_size", config.measure.sample_size),
            ),
            escalation_steps=config.escalation_steps if self.enable_weight_monitor else 0,
            hyperparameters={**hyperparameters, **config.hyperparameters, **self.hyperparameters},
            thresholds=replace(
                bounds,
                vanishing_gradient=replace(
                    bounds.vanishing_gradient,
                    tensor_norm=self._changed("vanishing_grad_threshold", bounds.vanishing_gradient.tensor_norm),
                ),
                exploding_gradient=replace(
                    bounds.exploding_gradient,
                    warning=warning,
                    critical=max(warning, bounds.exploding_gradient.critical),
                ),
                frozen_weight=replace(
                    bounds.frozen_weight,
                    ratio=self._changed("frozen_update_ratio_threshold", bounds.frozen_weight.ratio),
                    patience=self._changed("frozen_patience_steps", bounds.frozen_weight.patience),
                ),
            ),
        )

    def _changed(self, name: str, otherwise: Any) -> Any:
        """A setting of this class if it is not its default, else the monitor's."""
        value = getattr(self, name)
        default = next(setting.default for setting in fields(self) if setting.name == name)
        return otherwise if value == default else value
