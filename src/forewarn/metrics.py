"""The catalogue: every metric that forewarn records, declared once, with its properties.

Probes, rules and views meet at these names. `python -m forewarn.metrics docs/metrics.md` fills in that page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forewarn.catalogue import Cadence, Catalogue, Metric, Reduce, Scope
from forewarn.types import RunInfo

RUN, MODEL, MONITOR, GROUP, PARAMETER, MODULE, HEAD, BLOCK, EXPERT, TASK, TASK_PAIR, METRIC, PROBE, RULE = Scope
EVERY_STEP, MEASURED, EPOCH, EVENT = Cadence
SUM, MEAN, MIN, MAX, L2, SAME, DERIVED = Reduce
ZERO = (0.0, 0.0)


def _of_tensors(family: str, whose: str) -> tuple[Metric, ...]:
    """What is recorded of every gradient and of every weight."""
    return (
        Metric(f"{family}/norm", PARAMETER, MEASURED, "", L2, f"L2 norm of {whose}."),
        Metric(f"{family}/mean", PARAMETER, MEASURED, "", DERIVED, f"Mean of {whose}."),
        Metric(f"{family}/std", PARAMETER, MEASURED, "", DERIVED, f"Standard deviation of {whose}."),
        Metric(f"{family}/min", PARAMETER, MEASURED, "", MIN, f"Smallest value of {whose}."),
        Metric(f"{family}/max", PARAMETER, MEASURED, "", MAX, f"Largest value of {whose}."),
        Metric(f"{family}/zero_fraction", PARAMETER, MEASURED, "share", DERIVED,
               f"Share of the values of {whose} that are exactly zero.", words="zero fraction"),
        Metric(f"{family}/nonfinite", PARAMETER, MEASURED, "count", SUM,
               f"How many values of {whose} are NaN or infinite; the other statistics leave them out.",
               healthy=ZERO, words="non-finite"),
        *(Metric(f"{family}/p{percent:02}", PARAMETER, MEASURED, "", DERIVED, f"Percentile {percent} of {whose}.")
          for percent in (1, 25, 50, 75, 95, 99)),
        Metric(f"{family}/shape", PARAMETER, MEASURED, "code", DERIVED, f"Shape of the distribution of {whose}."),
        Metric(f"{family}/histogram", PARAMETER, MEASURED, "count", SUM,
               f"How many values of {whose} there are by sign and power of two; a distribution, not a series."),
    )  # fmt: skip


def _over_tensors(name: str, of: str, aggregates: str = "median p95 min max") -> tuple[Metric, ...]:
    """Aggregates over all tensors of the model."""
    words = {"median": "Median", "p95": "95th percentile", "min": "Smallest", "max": "Largest"}
    return tuple(
        Metric(f"monitor/{name}_{aggregate}", MODEL, MEASURED, "", DERIVED, f"{words[aggregate]} of the {of}.")
        for aggregate in aggregates.split()
    )


_CATALOGUE = (
    Metric("train/loss", RUN, EVERY_STEP, "", MEAN, "The loss given to `monitor.step`.", words="loss"),
    Metric("train/loss_ema", RUN, EVERY_STEP, "", DERIVED,
           "Exponential moving average of the loss, decay 0.99; it starts at the first loss and skips non-finite ones.",
           words="EMA"),
    Metric("train/loss_level", RUN, EVENT, "", DERIVED,
           "The first loss, then the median of every 32 losses: what trends are judged by."),
    Metric("train/lr", GROUP, EVERY_STEP, "", SAME,
           "Learning rate as the optimizer used it, before a scheduler changed it.", words="lr"),
    Metric("train/lr_plan", GROUP, EVERY_STEP, "", SAME, "Learning rate that the plan asks for, if there is a plan."),
    Metric("train/clip", RUN, EVERY_STEP, "", SAME, "The limit given to `monitor.clip_grad_norm_`."),
    Metric("train/loss_scale", RUN, EVERY_STEP, "", SAME, "Scale of the `GradScaler`, if there is one."),
    Metric("train/*", RUN, EVERY_STEP, "", MEAN,
           "Your own value: further keyword arguments of `monitor.step` are recorded as `train/NAME`.", loggable=True),
    Metric("gradient/global_norm", MODEL, EVERY_STEP, "", L2,
           "L2 norm of all gradients together, before clipping.", words="gradient norm"),
    Metric("gradient/global_norm_clipped", MODEL, EVERY_STEP, "", L2,
           "L2 norm of all gradients as the optimizer used them; only on measured steps if you clip through torch."),
    Metric("gradient/residual_norm", MODEL, MEASURED, "", L2,
           "L2 norm of what was left in `.grad` when the first backward pass began; 0 if `zero_grad` was called.",
           healthy=ZERO),
    Metric("gradient/backward_passes", MODEL, MEASURED, "count", SAME,
           "Backward passes that filled gradients since the last optimizer step: the micro-batches of a step."),
    Metric("gradient/accumulation_growth", MODEL, MEASURED, "", DERIVED,
           "Gradient norm of all k micro-batches over that of the first: k if they agree, √k if they are noise."),
    Metric("gradient/noise_scale", MODEL, MEASURED, "", DERIVED,
           "Gradient noise scale in backward passes over all ranks: larger batches than that hardly help."),
    Metric("gradient/share_of_start", MODEL, MEASURED, "", DERIVED,
           "Global norm over its median in the first 10 steps."),
    Metric("gradient/block_norm", BLOCK, MEASURED, "", L2, "L2 norm of the gradients of all parameters in a block."),
    Metric("gradient/missing", PARAMETER, MEASURED, "flag", MAX,
           "1 if a trainable parameter of an optimizer has no gradient.", healthy=ZERO),
    *_of_tensors("gradient", "the gradient"),
    Metric("weight/global_norm", MODEL, MEASURED, "", L2, "L2 norm of all weights together."),
    *_of_tensors("weight", "the tensor after the step"),
    Metric("update/ratio", PARAMETER, MEASURED, "", DERIVED,
           "Measured ‖Δw‖ / (‖w‖ + 1e-12), over 1024 sampled weights of a larger tensor; none for a step away from 0."),
    Metric("update/norm", PARAMETER, MEASURED, "", L2, "‖Δw‖, scaled up from the sample."),
    Metric("update/stopped_by", PARAMETER, MEASURED, "code", MIN,
           "What would stop the parameter at this check, whether it moved or not; NaN while its optimizer rests."),
    Metric("update/frozen_cause", PARAMETER, MEASURED, "code", MIN, "Why the parameter does not move.", words="moves"),
    Metric("update/optimizer_steps", MODEL, EVERY_STEP, "count", SAME,
           "Optimizer steps since the last `monitor.step`."),
    Metric("update/skipped", MODEL, EVERY_STEP, "flag", MAX, "1 if the `GradScaler` skipped the step."),
    Metric("gain/block", BLOCK, MEASURED, "", DERIVED,
           "‖∂L/∂input‖ / ‖∂L/∂output‖ of a block: above 1, gradients grow on their way down."),
    Metric("gain/mean", MODEL, MEASURED, "", DERIVED, "Mean gain of the blocks."),
    Metric("gain/mean_ma", MODEL, MEASURED, "", DERIVED, "Average of `gain/mean` over the last 10 checks."),
    Metric("gain/drift", MODEL, MEASURED, "", DERIVED, "`gain/mean` over the oldest of the last 10 checks, minus 1."),
    Metric("gain/amplification", MODEL, MEASURED, "", DERIVED, "Product of the gains of all blocks."),
    Metric("activation/mean", MODULE, MEASURED, "", DERIVED, "Mean of the module's output."),
    Metric("activation/std", MODULE, MEASURED, "", DERIVED, "Standard deviation of the module's output."),
    Metric("activation/min", MODULE, MEASURED, "", MIN, "Smallest value of the module's output."),
    Metric("activation/max", MODULE, MEASURED, "", MAX, "Largest value of the module's output."),
    Metric("activation/abs_max", MODULE, MEASURED, "", MAX, "Largest magnitude in the module's output."),
    Metric("activation/zero_fraction", MODULE, MEASURED, "share", DERIVED,
           "Share of the module's output that is exactly zero."),
    Metric("activation/kurtosis", MODULE, MEASURED, "", DERIVED,
           "Fourth central moment over the squared variance: 3 for a normal distribution, more with outliers."),
    Metric("activation/nonfinite", MODULE, MEASURED, "count", SUM,
           "How many values of the module's output are NaN or infinite.", healthy=ZERO),
    Metric("activation/dead_fraction", MODULE, MEASURED, "share", DERIVED,
           "Share of the units of a ReLU-like layer that were zero on everything read in ten measured steps."),
    Metric("activation/saturated_fraction", MODULE, MEASURED, "share", DERIVED,
           "Share of the units of a tanh or sigmoid, or of the rows of a softmax, at an end of their range."),
    Metric("activation/channel_mean_spread", MODULE, MEASURED, "", DERIVED,
           "Standard deviation of the channel means of a normalization layer."),
    Metric("activation/channel_std_spread", MODULE, MEASURED, "", DERIVED,
           "Standard deviation of the channel standard deviations of a normalization layer."),
    Metric("activation/row_cosine", MODULE, MEASURED, "", MEAN,
           "Mean cosine between the input rows of the last linear layer."),
    Metric("activation/effective_rank", MODULE, MEASURED, "", MEAN,
           "Number of directions in which the input rows of the last linear layer differ."),
    Metric("activation/batchnorm_state", MODULE, MEASURED, "code", MAX,
           "What a batch normalization does with its running statistics."),
    Metric("activation/log_z", RUN, MEASURED, "", MEAN,
           "Mean log Σ exp over the rows of the model's output, if that is logits."),
    Metric("attention/entropy", HEAD, MEASURED, "share", DERIVED,
           "Entropy of the attention weights as a share of the most that the mask allows."),
    Metric("attention/max_logit", HEAD, MEASURED, "", MAX, "Largest attention logit."),
    Metric("attention/layer_entropy", MODULE, MEASURED, "share", DERIVED, "The entropy over all heads of a layer."),
    Metric("attention/layer_max_logit", MODULE, MEASURED, "", MAX, "Largest attention logit of all heads of a layer."),
    Metric("router/load_share", EXPERT, MEASURED, "share", DERIVED,
           "Share of the tokens that go to this expert, for the modules that `Measure(router=…)` names."),
    Metric("router/entropy", MODULE, MEASURED, "share", MEAN,
           "Mean entropy of the router's choice as a share of ln(experts): 1 is undecided."),
    Metric("router/tokens", MODULE, MEASURED, "count", SUM, "Tokens that the router has routed."),
    Metric("task/loss", TASK, EVERY_STEP, "", MEAN, "Loss of the task."),
    Metric("task/weight", TASK, EVERY_STEP, "", SAME, "Weight of the task's loss in the sum."),
    Metric("task/gradient_norm", TASK, MEASURED, "", MEAN,
           "L2 norm of the task's weighted gradient on the shared parameters."),
    Metric("task/share", TASK, MEASURED, "share", DERIVED, "The task's gradient norm over the sum of all tasks'."),
    Metric("task/remaining", TASK, MEASURED, "", DERIVED, "The task's loss over its first loss that was not 0."),
    Metric("task/rate", TASK, MEASURED, "", DERIVED,
           "`task/remaining` over its mean of all tasks: above 1, the task learns slower than the others."),
    Metric("task/ratio", TASK_PAIR, MEASURED, "", DERIVED, "Gradient norm of the first task over that of the second."),
    Metric("task/cosine", TASK_PAIR, MEASURED, "", MEAN,
           "Cosine of the angle between the gradients of both tasks; below 0 they pull against each other."),
    Metric("eval/loss", RUN, EPOCH, "", MEAN,
           "Validation loss, from `monitor.end_epoch` or from `monitor.log` between epochs.",
           words="validation", loggable=True),
    Metric("eval/task_loss", TASK, EPOCH, "", MEAN,
           "Validation loss of each task, logged by `forewarn train multitask`.", loggable=True),
    Metric("eval/accuracy", RUN, EPOCH, "share", MEAN,
           "Share of the validation samples classified correctly, logged by `forewarn train multitask` or by you.",
           loggable=True),
    Metric("eval/*", RUN, EPOCH, "", MEAN, "Your own value, from `monitor.log`.", loggable=True),
    Metric("evaluation/epoch", RUN, EPOCH, "count", SAME, "Which epoch has ended, from 1 on."),
    Metric("evaluation/train_loss", RUN, EPOCH, "", MEAN,
           "Training loss given to `monitor.end_epoch`, else the mean of the epoch's losses."),
    Metric("evaluation/improvement_rate", RUN, EPOCH, "", DERIVED,
           "(previous − validation) / previous, from the second epoch on."),
    Metric("evaluation/train_val_gap", RUN, EPOCH, "", DERIVED, "(validation − train) / train."),
    Metric("evaluation/plateau_detected", RUN, EPOCH, "flag", DERIVED,
           "1 if the validation loss changed by less than 1% in each of the last three epochs."),
    Metric("evaluation/start_loss", RUN, EPOCH, "", DERIVED,
           "Where the run started: the median of its first 16 losses, or the very first if they rose."),
    Metric("evaluation/end_loss", RUN, EPOCH, "", DERIVED,
           "Median of the epoch's last 16 losses, if it has 32 steps or more."),
    Metric("evaluation/peak_loss", RUN, EPOCH, "", DERIVED, "Highest median of 16 losses in a row in the epoch."),
    Metric("speed/step_seconds", RUN, EVERY_STEP, "s", MAX, "Time from one `monitor.step` to the next."),
    Metric("speed/tokens_per_second", RUN, EVERY_STEP, "tokens/s", SUM,
           "Targets of a step (tokens of a language model) over the time it took, logged by the reference trainer.",
           words="tok/s", loggable=True),
    Metric("system/process_memory_bytes", RUN, EVERY_STEP, "bytes", MAX,
           "Resident memory of the process, at most once a second."),
    *_over_tensors("grad", "gradient norms of all tensors"),
    Metric("monitor/update_ratio_median", MODEL, MEASURED, "", DERIVED,
           "Median of the update ratios of the tensors that moved; it falls as a run goes on.",
           healthy=(1e-5, 1e-2), words="update ratio"),
    *_over_tensors("update_ratio", "update ratios of the tensors that moved", "p95 min max"),
    Metric("monitor/vanishing_count", MODEL, MEASURED, "count", DERIVED, "Tensors whose gradient norm is below 1e-7."),
    Metric("monitor/exploding_count", MODEL, MEASURED, "count", DERIVED, "Tensors whose gradient norm is above 100."),
    Metric("monitor/frozen_count", MODEL, MEASURED, "count", DERIVED, "Tensors that are frozen, but not on purpose."),
    Metric("monitor/overhead_share", MONITOR, EVERY_STEP, "share", MAX,
           "Share of the step's time that the monitor spent on the host."),
    Metric("monitor/resumed", MONITOR, EVENT, "flag", SAME, "1 at the first step after a resume."),
    Metric("monitor/unavailable", METRIC, EVENT, "code", MAX, "Why a metric has no reading."),
    Metric("monitor/probe_failed", PROBE, EVENT, "flag", MAX,
           "1 at the step at which a probe raised an error and was turned off.", healthy=ZERO),
    Metric("monitor/rule_failed", RULE, EVENT, "flag", MAX,
           "1 if a rule raised an error and was turned off: an alert, of which no reading is stored.", healthy=ZERO),
    Metric("monitor/store_failed", MONITOR, EVENT, "flag", MAX,
           "1 at the step from which the run could not be written, 0 at that from which it could again.", healthy=ZERO),
    Metric("monitor/topk_grad", PARAMETER, MEASURED, "", L2,
           "In TensorBoard only: the gradient norm of the tensors that have a tag."),
    Metric("monitor/topk_frozen", PARAMETER, MEASURED, "", DERIVED,
           "In TensorBoard only: the update ratio of the frozen tensors that have a tag."),
    *(Metric(f"{kind}_metric/*", scope, MEASURED, "", MEAN,
             f"Your own metric of every {subject}, as given to `watch(metrics=[…])`.")
      for kind, scope, subject in (
          ("activation", MODULE, "module's output"), ("parameter", PARAMETER, "parameter"),
          ("gradient", PARAMETER, "gradient"),
          ("activation_difference", MODULE, "module's output and its reference"),
          ("parameter_difference", PARAMETER, "parameter and its reference"))),
)  # fmt: skip

BUILT_IN = Catalogue(_CATALOGUE)
FAMILIES = BUILT_IN.families
find, label, is_reserved, unknown = BUILT_IN.find, BUILT_IN.label, BUILT_IN.is_reserved, BUILT_IN.unknown


def all_metrics() -> tuple[Metric, ...]:
    """Every metric that forewarn records by itself, by family."""
    return BUILT_IN.metrics


def catalogue_of(info: RunInfo) -> Catalogue:
    """The catalogue of a run: with what probes of the user's own record in it, as far as that can be read."""
    declared = [metric for plain in info.probe_metrics if (metric := _from_plain(plain)) is not None]
    return BUILT_IN.extended(declared) if declared else BUILT_IN


def _from_plain(plain: Mapping[str, Any]) -> Metric | None:
    """A metric as a run has stored it; None if it cannot be read, as in a run of a later version."""
    try:
        return Metric(**plain)
    except (TypeError, ValueError):
        return None


_TABLE = re.compile(r"(<!-- metrics: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """A page of documentation with the table of each family that it has a place for filled in."""
    return _TABLE.sub(lambda place: f"{place[1]}{_table(place[2])}{place[3]}", page)


def _table(family: str) -> str:
    """Every metric of a family; `metric` stands for all families of the user's own metrics."""
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
