"""Every metric that forewarn records, declared once, with its properties.

Probes, rules and views share these names. `python -m forewarn.metrics docs/metrics.md` updates the documentation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from forewarn.catalogue import Cadence, Catalogue, Metric, Reduce, Scope
from forewarn.types import RunInfo

(
    RUN, MODEL, MONITOR, GROUP, OPTIMIZER, PARAMETER, MODULE, HEAD, BLOCK, EXPERT, TASK, TASK_PAIR, PHASE, METRIC,
    PROBE, RULE, RANK, VARIABLE,
) = Scope  # fmt: skip
EVERY_STEP, MEASURED, EPOCH, EVENT = Cadence
SUM, MEAN, MIN, MAX, L2, SAME, DERIVED = Reduce
ZERO = (0.0, 0.0)
TRAINING_PHASES = ("data", "forward", "backward", "optimizer")
"""The phases of a step in which a loop does nothing but train; in the others it may do anything."""


def _of_tensors(family: str, whose: str) -> tuple[Metric, ...]:
    """The metrics of every gradient and every weight."""
    return (
        Metric(f"{family}/norm", PARAMETER, MEASURED, "", L2, f"L2 norm of {whose}."),
        Metric(f"{family}/mean", PARAMETER, MEASURED, "", DERIVED, f"Mean of {whose}."),
        Metric(f"{family}/std", PARAMETER, MEASURED, "", DERIVED, f"Standard deviation of {whose}."),
        Metric(f"{family}/min", PARAMETER, MEASURED, "", MIN, f"Smallest value in {whose}."),
        Metric(f"{family}/max", PARAMETER, MEASURED, "", MAX, f"Largest value in {whose}."),
        Metric(f"{family}/zero_fraction", PARAMETER, MEASURED, "share", DERIVED,
               f"Fraction of values in {whose} that are exactly zero.", words="zero fraction"),
        Metric(f"{family}/nonfinite", PARAMETER, MEASURED, "count", SUM,
               f"Number of values in {whose} that are NaN or infinite; the other statistics skip them.",
               healthy=ZERO, words="non-finite"),
        *(Metric(f"{family}/p{percent:02}", PARAMETER, MEASURED, "", DERIVED, f"Percentile {percent} of {whose}.")
          for percent in (1, 25, 50, 75, 95, 99)),
        Metric(f"{family}/shape", PARAMETER, MEASURED, "code", DERIVED, f"Shape of the distribution of {whose}."),
        Metric(f"{family}/histogram", PARAMETER, MEASURED, "count", SUM,
               f"Number of values in {whose} by sign and power of two; a distribution, not a series."),
    )  # fmt: skip


def _over_tensors(name: str, of: str, aggregates: str = "median p95 min max") -> tuple[Metric, ...]:
    """Aggregates over all tensors of the model."""
    words = {"median": "Median", "p95": "95th percentile", "min": "Smallest", "max": "Largest"}
    return tuple(
        Metric(f"monitor/{name}_{aggregate}", MODEL, MEASURED, "", DERIVED, f"{words[aggregate]} of the {of}.")
        for aggregate in aggregates.split()
    )


_CATALOGUE = (
    Metric("train/loss", RUN, EVERY_STEP, "", MEAN, "The loss passed to `monitor.step`.", words="loss"),
    Metric("train/loss_ema", RUN, EVERY_STEP, "", DERIVED,
           "Exponential moving average of the loss with decay 0.99; starts at the first loss, skips non-finite ones.",
           words="EMA", heading="loss, moving average"),
    Metric("train/loss_level", RUN, EVENT, "", DERIVED,
           "The first loss, then the median of every 32 losses; used to judge trends."),
    Metric("train/lr", GROUP, EVERY_STEP, "", SAME,
           "Learning rate used by the optimizer, before a scheduler changed it.", words="lr", heading="learning rate"),
    Metric("train/lr_plan", GROUP, EVERY_STEP, "", SAME, "Planned learning rate, if there is a plan.",
           heading="planned learning rate"),
    Metric("train/weight_decay", GROUP, EVENT, "", SAME,
           "Weight decay of each parameter group, at the first step and when it changes.", words="weight decay"),
    Metric("train/beta2", GROUP, EVENT, "", SAME,
           "Second beta of Adam and its relatives, at the first step and when it changes."),
    Metric("train/clip", RUN, EVERY_STEP, "", SAME,
           "Norm to which gradients are clipped: through the monitor, or as two measured steps show it.",
           heading="clipping norm"),
    Metric("train/loss_scale", RUN, EVERY_STEP, "", SAME, "Scale of the `GradScaler`, if there is one.",
           heading="loss scale"),
    Metric("train/applied_twice", RUN, MEASURED, "code", MAX,
           "1 if the loss applies softmax to a softmax, 2 if it applies sigmoid to a sigmoid, 0 otherwise."),
    Metric("train/paired_outputs", RUN, MEASURED, "", MAX,
           "Number of outputs that the loss compares with all targets, since their shapes differ; 0 otherwise."),
    Metric("train/*", RUN, EVERY_STEP, "", MEAN,
           "Your own value: extra keyword arguments of `monitor.step` are recorded as `train/NAME`.", loggable=True),
    Metric("gradient/global_norm", MODEL, EVERY_STEP, "", L2,
           "L2 norm of all gradients together, before clipping.", words="gradient norm"),
    Metric("gradient/optimizer_norm", OPTIMIZER, EVERY_STEP, "", L2,
           "L2 norm of the gradients that one optimizer uses, before clipping; only if there are several."),
    Metric("gradient/global_norm_clipped", MODEL, EVERY_STEP, "", L2,
           "L2 norm of all gradients used by the optimizer; only on measured steps if `train/clip` is unknown.",
           heading="gradient norm, after clipping"),
    Metric("gradient/residual_norm", MODEL, MEASURED, "", L2,
           "L2 norm of earlier gradients still in `.grad` when a backward pass begins; 0 if `zero_grad` was called.",
           healthy=ZERO),
    Metric("gradient/backward_passes", MODEL, MEASURED, "count", SAME,
           "Number of backward passes since the last optimizer step: the micro-batches of a step."),
    Metric("gradient/accumulation_growth", MODEL, MEASURED, "", DERIVED,
           "Gradient norm of all k micro-batches divided by that of the first: k if they agree, √k if they are noise."),
    Metric("gradient/noise_scale", MODEL, MEASURED, "", DERIVED,
           "Gradient noise scale, in backward passes over all ranks; larger batches than this hardly help."),
    Metric("gradient/share_of_start", MODEL, MEASURED, "", DERIVED,
           "Global norm divided by its median over the first 10 steps."),
    Metric("gradient/block_norm", BLOCK, MEASURED, "", L2, "L2 norm of the gradients of all parameters in a block."),
    Metric("gradient/missing", PARAMETER, MEASURED, "flag", MAX,
           "1 if a trainable parameter in an optimizer has no gradient.", healthy=ZERO),
    *_of_tensors("gradient", "the gradient"),
    Metric("weight/global_norm", MODEL, MEASURED, "", L2, "L2 norm of all weights together.",
           heading="weight norm, all tensors"),
    *_of_tensors("weight", "the tensor after the step"),
    Metric("update/ratio", PARAMETER, MEASURED, "", DERIVED,
           "Measured ‖Δw‖ / (‖w‖ + 1e-12); for large tensors, over 1024 sampled weights. None for a step away from 0."),
    Metric("update/ratio_estimate", PARAMETER, MEASURED, "", DERIVED,
           "lr · ‖g‖ / ‖w‖, as other tools estimate the update ratio: exact for plain SGD, far off for Adam."),
    Metric("update/norm", PARAMETER, MEASURED, "", L2, "‖Δw‖, scaled up from the sample."),
    Metric("update/stopped_by", PARAMETER, MEASURED, "code", MIN,
           "What would stop the parameter at this check, even if it moved; NaN on steps its optimizer skips."),
    Metric("update/frozen_cause", PARAMETER, MEASURED, "code", MIN, "Why the parameter does not move.", words="moves"),
    Metric("update/optimizer_steps", MODEL, EVERY_STEP, "count", SAME,
           "Number of optimizer steps since the last `monitor.step`."),
    Metric("update/separate_losses", MODEL, MEASURED, "code", MAX,
           "1 if an optimizer stepped with gradients that came after another one's step, as in a GAN; 2 if the model "
           "ran several times without gradients, as when a policy acts."),
    Metric("update/shared_tensors", MODEL, MEASURED, "count", MAX,
           "Number of parameters that two optimizers moved with the same gradient; read where there are several."),
    Metric("update/skipped", MODEL, EVERY_STEP, "flag", MAX, "1 if the `GradScaler` or the policy skipped the step."),
    Metric("guard/skipped", MODEL, EVERY_STEP, "flag", SAME,
           "1 if the policy skipped the batch, or would have in a dry run; recorded if it may."),
    Metric("guard/checked_norm", MODEL, EVERY_STEP, "", SAME,
           "Gradient norm before clipping that decides about the batch."),
    Metric("guard/norm_limit", MODEL, EVERY_STEP, "", SAME, "Norm above which a batch is skipped."),
    Metric("gain/block", BLOCK, MEASURED, "", DERIVED,
           "‖∂L/∂input‖ / ‖∂L/∂output‖ of a block; above 1, gradients grow on their way back through it.",
           heading="gain of each block"),
    Metric("gain/mean", MODEL, MEASURED, "", DERIVED, "Mean gain of the blocks.", heading="mean gain"),
    Metric("gain/mean_ma", MODEL, MEASURED, "", DERIVED, "Average of `gain/mean` over the last 10 checks."),
    Metric("gain/drift", MODEL, MEASURED, "", DERIVED,
           "`gain/mean` divided by the oldest of the last 10 checks, minus 1."),
    Metric("gain/amplification", MODEL, MEASURED, "", DERIVED, "Product of the gains of all blocks."),
    Metric("activation/mean", MODULE, MEASURED, "", DERIVED, "Mean of the module's output."),
    Metric("activation/std", MODULE, MEASURED, "", DERIVED, "Standard deviation of the module's output.",
           heading="spread of the activations"),
    Metric("activation/min", MODULE, MEASURED, "", MIN, "Smallest value of the module's output."),
    Metric("activation/max", MODULE, MEASURED, "", MAX, "Largest value of the module's output."),
    Metric("activation/abs_max", MODULE, MEASURED, "", MAX, "Largest magnitude in the module's output.",
           heading="largest activation"),
    Metric("activation/zero_fraction", MODULE, MEASURED, "share", DERIVED,
           "Fraction of the module's output that is exactly zero."),
    Metric("activation/kurtosis", MODULE, MEASURED, "", DERIVED,
           "Fourth central moment divided by the squared variance: 3 for a normal distribution, more with outliers."),
    Metric("activation/nonfinite", MODULE, MEASURED, "count", SUM,
           "Number of values in the module's output that are NaN or infinite.", healthy=ZERO),
    Metric("activation/dead_fraction", MODULE, MEASURED, "share", DERIVED,
           "Fraction of units in a ReLU-like layer with only zeros over ten measured steps."),
    Metric("activation/saturated_fraction", MODULE, MEASURED, "share", DERIVED,
           "Fraction of tanh or sigmoid units, or of softmax rows, at an end of their range."),
    Metric("activation/channel_mean_spread", MODULE, MEASURED, "", DERIVED,
           "Standard deviation of the channel means of a normalization layer."),
    Metric("activation/channel_std_spread", MODULE, MEASURED, "", DERIVED,
           "Standard deviation of the channel standard deviations of a normalization layer."),
    Metric("activation/row_cosine", MODULE, MEASURED, "", DERIVED,
           "Mean cosine between the input rows of the last linear layer."),
    Metric("activation/effective_rank", MODULE, MEASURED, "", DERIVED,
           "Number of directions in which the input rows of the last linear layer differ."),
    Metric("activation/batchnorm_state", MODULE, MEASURED, "code", MAX,
           "What a batch norm does with its running statistics."),
    Metric("activation/log_z", RUN, MEASURED, "", MEAN,
           "Mean log Σ exp over the rows of the model's output, if the output is logits."),
    Metric("activation/probability_rows", RUN, MEASURED, "share", MEAN,
           "Fraction of the rows of the model's output, the input of a softmax loss, that are probabilities already."),
    Metric("activation/reversed_rows", RUN, MEASURED, "share", MEAN,
           "Fraction of the output's rows that the gradient of a softmax loss pushes away from their target."),
    Metric("batch/input_mean", MODULE, MEASURED, "", MEAN, "Mean of the input of the first layer."),
    Metric("batch/input_rms", MODULE, MEASURED, "", MEAN, "Root mean square of the input of the first layer."),
    Metric("batch/repeated", RUN, MEASURED, "flag", MAX, "1 if the inputs are those of the last measured step."),
    Metric("batch/nan_at_failure", VARIABLE, EVENT, "count", MAX,
           "Number of NaN in each variable of the loop when it ended with an error."),
    Metric("batch/num_targets", RUN, MEASURED, "count", SUM,
           "Number of targets, from `monitor.batch` or the gradient of a softmax loss."),
    Metric("batch/num_classes", RUN, MEASURED, "count", DERIVED,
           "Number of different classes among these targets; with classes above 1,023, the largest number of all "
           "ranks."),
    Metric("batch/middle_class", RUN, MEASURED, "", DERIVED, "The middle one of these targets in order."),
    Metric("attention/entropy", HEAD, MEASURED, "share", DERIVED,
           "Entropy of the attention weights, as a fraction of the maximum that the mask allows.",
           heading="attention entropy"),
    Metric("attention/max_logit", HEAD, MEASURED, "", MAX, "Largest attention logit."),
    Metric("attention/layer_entropy", MODULE, MEASURED, "share", DERIVED,
           "Entropy of the attention weights over all heads of a layer, as a fraction of the maximum."),
    Metric("attention/layer_max_logit", MODULE, MEASURED, "", MAX,
           "Largest attention logit over all heads of a layer.", heading="largest attention logit"),
    Metric("router/load_share", EXPERT, MEASURED, "share", DERIVED,
           "Fraction of tokens routed to this expert, for modules that match `Measure(router=…)`."),
    Metric("router/entropy", MODULE, MEASURED, "share", MEAN,
           "Mean entropy of the router's choice, as a fraction of ln(experts); 1 means undecided."),
    Metric("router/tokens", MODULE, MEASURED, "count", SUM, "Number of tokens routed."),
    Metric("task/loss", TASK, EVERY_STEP, "", MEAN, "Loss of the task."),
    Metric("task/weight", TASK, EVERY_STEP, "", SAME, "Weight of the task's loss in the sum."),
    Metric("task/gradient_norm", TASK, MEASURED, "", DERIVED,
           "L2 norm of the task's weighted gradient on the shared parameters."),
    Metric("task/share", TASK, MEASURED, "share", DERIVED,
           "The task's gradient norm divided by the sum over all tasks.", heading="share of the gradient"),
    Metric("task/remaining", TASK, MEASURED, "", DERIVED, "The task's loss divided by its first nonzero loss.",
           heading="what is left of each loss"),
    Metric("task/rate", TASK, MEASURED, "", DERIVED,
           "`task/remaining` divided by its mean over all tasks; above 1, the task learns slower than the others."),
    Metric("task/ratio", TASK_PAIR, MEASURED, "", DERIVED,
           "Gradient norm of the first task divided by that of the second."),
    Metric("task/cosine", TASK_PAIR, MEASURED, "", DERIVED,
           "Cosine between the gradients of both tasks; below 0, the tasks conflict.",
           heading="agreement of the tasks"),
    Metric("eval/loss", RUN, EPOCH, "", MEAN,
           "Validation loss, from `monitor.end_epoch` or from `monitor.log` between epochs.",
           words="validation", loggable=True, heading="validation loss"),
    Metric("eval/task_loss", TASK, EPOCH, "", MEAN,
           "Validation loss of each task, logged by `forewarn train multitask`.", loggable=True),
    Metric("eval/accuracy", RUN, EPOCH, "share", MEAN,
           "Fraction of validation samples classified correctly, logged by `forewarn train multitask` or by you.",
           loggable=True),
    Metric("eval/*", RUN, EPOCH, "", MEAN, "Your own value, from `monitor.log`.", loggable=True),
    Metric("evaluation/epoch", RUN, EPOCH, "count", SAME, "Number of the completed epoch, starting at 1."),
    Metric("evaluation/train_loss", RUN, EPOCH, "", MEAN,
           "Training loss passed to `monitor.end_epoch`, or else the mean of the epoch's losses."),
    Metric("evaluation/improvement_rate", RUN, EPOCH, "", DERIVED,
           "(previous − current) / previous validation loss, from the second epoch on."),
    Metric("evaluation/train_val_gap", RUN, EPOCH, "", DERIVED, "(validation − training) / training loss."),
    Metric("evaluation/plateau_detected", RUN, EPOCH, "flag", DERIVED,
           "1 if the validation loss changed by less than 1% in each of the last three epochs."),
    Metric("evaluation/start_loss", RUN, EPOCH, "", DERIVED,
           "Starting loss: the median of the first 16 losses, or the first loss if they rose."),
    Metric("evaluation/end_loss", RUN, EPOCH, "", DERIVED,
           "Median of the epoch's last 16 losses, if it has at least 32 steps."),
    Metric("evaluation/peak_loss", RUN, EPOCH, "", DERIVED, "Highest median of 16 consecutive losses in the epoch."),
    Metric("rank/loss", RANK, EVERY_STEP, "", DERIVED,
           "The loss of each rank; on measured steps only if there are more than 16 ranks.",
           heading="loss of each rank"),
    Metric("rank/step_seconds", RANK, MEASURED, "s", DERIVED, "Time of the step on each rank.",
           heading="step time of each rank"),
    Metric("rank/data_seconds", RANK, MEASURED, "s", DERIVED,
           "Time on each rank from the end of the last step to the first forward pass."),
    Metric("rank/forward_seconds", RANK, MEASURED, "s", DERIVED,
           "Time on each rank from the first forward pass to the first backward pass."),
    Metric("rank/update_seconds", RANK, MEASURED, "s", DERIVED,
           "Time on each rank from the last optimizer step to `monitor.step`."),
    Metric("rank/desynced_tensors", MODEL, MEASURED, "count", DERIVED,
           "Number of parameters that should be the same on all ranks and are not; of each, 64 values are compared.",
           healthy=ZERO),
    Metric("rank/desync", PARAMETER, EVENT, "code", DERIVED,
           "The first such parameter: the rank that differs from the others, or -1 if it cannot be told."),
    Metric("rank/nonfinite", MODULE, EVENT, "code", DERIVED,
           "The rank that alone has NaN or infinite values, at the first module whose output has them."),
    Metric("speed/step_seconds", RUN, EVERY_STEP, "s", MAX,
           "Time from one `monitor.step` to the next, without pauses.", heading="step time"),
    Metric("speed/phase_seconds", PHASE, EVERY_STEP, "s", MAX,
           "Time of each phase of a step, mean since the reading before; read on measured steps and once per second.",
           heading="step time by phase"),
    Metric("speed/pause_seconds", PHASE, EVENT, "s", MAX,
           "Time of the pauses since the step before, by kind; it counts in no step.", heading="pauses"),
    Metric("speed/stall_seconds", PHASE, EVENT, "s", MAX,
           "Time for which the run hung, by the phase in which it did."),
    Metric("speed/tokens_per_second", RUN, EVERY_STEP, "tokens/s", SUM,
           "Tokens per second, from `monitor.step(loss, tokens=…)`; mean over the same steps as the phases.",
           words="tok/s", loggable=True, heading="tokens per second"),
    Metric("speed/samples_per_second", RUN, EVERY_STEP, "samples/s", SUM,
           "Samples per second, from `monitor.step(loss, samples=…)`; mean over the same steps as the phases.",
           loggable=True, heading="samples per second"),
    Metric("speed/flops_utilization", RUN, EVERY_STEP, "share", MEAN,
           "Model FLOPs utilization: tokens per second × declared `flops_per_token` / declared `peak_flops`.",
           heading="model FLOPs utilization"),
    Metric("system/process_memory_bytes", RUN, EVERY_STEP, "bytes", MAX,
           "Resident memory of the process, read at most once per second.", heading="memory of the process"),
    Metric("system/private_memory_bytes", RUN, EVERY_STEP, "bytes", MAX,
           "Resident memory of the process without shared pages, such as those of mapped files.",
           heading="private memory of the process"),
    Metric("system/children_memory_bytes", RUN, EVERY_STEP, "bytes", MAX,
           "Resident memory of the process's children, such as workers of a loader, read every 10 s.",
           heading="memory of child processes"),
    Metric("system/host_memory_share", RUN, EVERY_STEP, "share", MAX,
           "Fraction of the host's memory, or of what its control group allows, that all processes use.",
           heading="host memory in use"),
    Metric("system/own_memory_share", RUN, EVERY_STEP, "share", MAX,
           "Fraction of the same memory that the process and its children hold."),
    Metric("system/cuda_allocated_bytes", RUN, EVERY_STEP, "bytes", MAX,
           "Memory of tensors on the CUDA device, read at most once per second.", heading="CUDA memory allocated"),
    Metric("system/cuda_reserved_bytes", RUN, EVERY_STEP, "bytes", MAX,
           "Memory that torch's allocator holds on the CUDA device.", heading="CUDA memory reserved"),
    Metric("system/cuda_peak_bytes", RUN, EVERY_STEP, "bytes", MAX,
           "Highest memory of tensors on the CUDA device so far.", heading="CUDA memory, peak"),
    Metric("system/cuda_retries", RUN, EVERY_STEP, "count", SUM,
           "Number of allocations so far that worked only after cached memory was freed."),
    Metric("system/cuda_memory_share", RUN, EVERY_STEP, "share", MAX,
           "Highest memory of tensors so far as a fraction of the CUDA device's memory."),
    Metric("system/gpu_utilization_share", RUN, EVERY_STEP, "share", MEAN,
           "Fraction of the time in which the GPU ran a kernel, from its driver, read every 10 s.",
           heading="GPU utilization"),
    Metric("system/gpu_memory_bytes", RUN, EVERY_STEP, "bytes", MAX,
           "Memory in use on the GPU, by all processes.", heading="GPU memory"),
    Metric("system/gpu_temperature", RUN, EVERY_STEP, "°C", MAX, "Temperature of the GPU."),
    Metric("system/gpu_power", RUN, EVERY_STEP, "W", SUM, "Power draw of the GPU."),
    Metric("system/out_of_memory", RUN, EVENT, "flag", MAX,
           "1 at the last step of a run that ended because memory could not be allocated."),
    *_over_tensors("grad", "gradient norms of all tensors"),
    Metric("monitor/update_ratio_median", MODEL, MEASURED, "", DERIVED,
           "Median update ratio of the tensors that moved; it falls over a run.",
           healthy=(1e-5, 1e-2), words="update ratio", heading="update ratio, median"),
    *_over_tensors("update_ratio", "update ratios of the tensors that moved", "p95 min max"),
    Metric("monitor/vanishing_count", MODEL, MEASURED, "count", DERIVED,
           "Number of tensors with a gradient norm below 1e-7."),
    Metric("monitor/exploding_count", MODEL, MEASURED, "count", DERIVED,
           "Number of tensors with a gradient norm above 100."),
    Metric("monitor/frozen_count", MODEL, MEASURED, "count", DERIVED,
           "Number of tensors frozen, except on purpose; an expert that rests now and then does not count."),
    Metric("monitor/overhead_share", MONITOR, EVERY_STEP, "share", MAX,
           "Fraction of the step time that the monitor spent on the host.", heading="cost of watching"),
    Metric("monitor/detail_interval", MONITOR, EVENT, "count", SAME,
           "Steps between detailed measurements from here on, if `watch(budget=…)` changed it."),
    Metric("monitor/resumed", MONITOR, EVENT, "flag", SAME, "1 at the first step after a resume."),
    Metric("monitor/unavailable", METRIC, EVENT, "code", MAX, "Why a metric has no reading."),
    Metric("monitor/probe_failed", PROBE, EVENT, "flag", MAX,
           "1 at the step where a probe raised an error and was turned off.", healthy=ZERO),
    Metric("monitor/rule_failed", RULE, EVENT, "flag", MAX,
           "1 if a rule raised an error and was turned off; raises an alert and is not stored.", healthy=ZERO),
    Metric("monitor/store_failed", MONITOR, EVENT, "flag", MAX,
           "1 at the step where writing the run failed, 0 where it worked again.", healthy=ZERO),
    Metric("monitor/notify_failed", MONITOR, EVENT, "flag", MAX,
           "1 when a notification could not be delivered, 0 when one is delivered again."),
    Metric("monitor/tracker_failed", MONITOR, EVENT, "flag", MAX,
           "1 when a tracker such as W&B no longer took all readings, 0 when it does again."),
    Metric("monitor/snapshot_failed", MONITOR, EVENT, "flag", MAX,
           "1 when a debug snapshot could not be written, 0 when one is written again."),
    Metric("monitor/ranks_unconnected", MONITOR, EVENT, "code", MAX,
           "From here on, readings are those of rank 0 alone: 1 if not every rank is watched, 2 if contact was lost.",
           healthy=ZERO),
    Metric("monitor/topk_grad", PARAMETER, MEASURED, "", L2,
           "In trackers only: gradient norm of the tensors with a tag."),
    Metric("monitor/topk_frozen", PARAMETER, MEASURED, "", DERIVED,
           "In trackers only: update ratio of the frozen tensors with a tag."),
    *(Metric(f"{kind}_metric/*", scope, MEASURED, "", MEAN,
             f"Your own metric of every {subject}, from `watch(metrics=[…])`.")
      for kind, scope, subject in (
          ("activation", MODULE, "module's output"), ("parameter", PARAMETER, "parameter"),
          ("gradient", PARAMETER, "gradient"),
          ("activation_difference", MODULE, "module's output and its reference"),
          ("parameter_difference", PARAMETER, "parameter and its reference"))),
)  # fmt: skip

BUILT_IN = Catalogue(_CATALOGUE)
FAMILIES = BUILT_IN.families
find, label, is_reserved, unknown = BUILT_IN.find, BUILT_IN.label, BUILT_IN.is_reserved, BUILT_IN.unknown

SWITCHES: Mapping[str, Sequence[str]] = {
    "histograms": ("gradient/shape", "gradient/histogram", "weight/shape", "weight/histogram"),
    "gain": ("gain/*", "gradient/block_norm"),
    "gradients": (
        "gradient/*", "train/clip", "update/ratio_estimate", "monitor/grad_*", "monitor/vanishing_count",
        "monitor/exploding_count",
    ),
    "weights": ("weight/*",),
    "updates": (
        "update/ratio*", "update/norm", "update/stopped_by", "update/frozen_cause", "monitor/update_ratio_*",
        "monitor/frozen_count",
    ),
    "activations": ("activation/*", "batch/*"),
    "attention": ("attention/*",),
}  # fmt: skip
"""By setting of `Measure`: the metrics of the family that it switches."""


def switched_off(metric: str, measure: Mapping[str, Any]) -> str:
    """What a run switched off that the metric belongs to, such as `Measure(gain=False)`, by the run's settings."""
    for family, patterns in SWITCHES.items():
        setting = measure.get(family)
        if setting in (False, "off") and any(fnmatchcase(metric, pattern) for pattern in patterns):
            return f"Measure({family}={setting!r})".replace("'", '"')
    return ""


def all_metrics() -> tuple[Metric, ...]:
    """Every built-in metric, by family."""
    return BUILT_IN.metrics


def catalogue_of(info: RunInfo) -> Catalogue:
    """The catalogue of a run, including metrics of the user's own probes if they can be read."""
    declared = [metric for plain in info.probe_metrics if (metric := _from_plain(plain)) is not None]
    return BUILT_IN.extended(declared) if declared else BUILT_IN


def _from_plain(plain: Mapping[str, Any]) -> Metric | None:
    """A metric stored in a run; None if it cannot be read, for example because the run is from a newer version."""
    try:
        return Metric(**plain)
    except (TypeError, ValueError):
        return None


_TABLE = re.compile(r"(<!-- metrics: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """A documentation page with its table for each family filled in."""
    return _TABLE.sub(lambda place: f"{place[1]}{_table(place[2])}{place[3]}", page)


def _table(family: str) -> str:
    """A table of all metrics in a family; `metric` stands for all families of user metrics."""
    head = ("name", "scope", "when", "unit", "healthy", "what it is")
    rows = [
        (f"`{metric.name}`", metric.scope, metric.cadence, metric.unit, _range(metric.healthy), metric.meaning)
        for metric in all_metrics()
        if family in (metric.family, metric.family.rpartition("_")[2])
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def _range(healthy: tuple[float | None, float | None] | None) -> str:
    if healthy is None:
        return ""
    low, high = ("" if bound is None else f"{bound:g}".replace("e-0", "e-") for bound in healthy)
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m forewarn.metrics PAGE")
    Path(sys.argv[1]).write_text(with_tables(Path(sys.argv[1]).read_text()))
