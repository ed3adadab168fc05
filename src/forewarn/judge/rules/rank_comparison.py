"""Rules about the ranks of a distributed run: one of them is unlike the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import NO_BOUND, finding, rule
from forewarn.judge.remedies import advise
from forewarn.judge.series import Bools, Floats, Panel, nanmedian
from forewarn.judge.upcoming import Upcoming, any_of
from forewarn.settings import Settings, between
from forewarn.types import Finding, Severity


@rule(
    "R101", "rank-desync", reads=("rank/desync", "rank/desynced_tensors"), when=("rank/desynced_tensors",),
    per_scope=True, keep=200,
    message=(
        Message("Rank {rank} has other values of {scope} than the others", "parameters that differ {tensors}"),
        Message("The ranks have different values of {scope}", "parameters that differ {tensors}"),
    ),
    remedies=(
        advise("train_all_ranks_alike", "Change parameters on all ranks, or on none, and call forward through DDP",
               "only gradients of a backward pass through the DDP module are averaged", scope_is="parameter"),
        advise("restart_from_checkpoint", "Load the same checkpoint on every rank",
               "copies that have come apart stay apart, because only gradients are averaged", scope_is="parameter"),
        advise("step_all_ranks_alike", "Call monitor.step on every rank after each optimizer step",
               "if one rank leaves a call out, its weights are compared with those of another step",
               scope_is="parameter"),
    ),
)  # fmt: skip
def rank_desync(desync: Panel, tensors: Panel) -> Iterator[Finding]:
    """Parameters that should be the same on all ranks differ.

    ## Why is this bad?
    Every rank then trains a model of its own, with gradients that were averaged over different models. The checkpoint
    of rank 0 is none of them, and the loss says nothing about it. Usual causes are code that changes weights on one
    rank only, a random initialization after the model was wrapped, a forward pass that goes around the wrapper, or
    broken memory. A sample of each parameter is compared on measured steps, bit by bit. If all parameters differ from
    one step on but the training is sound, one rank has left out a call of `monitor.step`.

    ## Example
    fires: rank/desync{layer.weight} 1 | rank/desynced_tensors 2
    fires: rank/desync{layer.weight} -1 | rank/desynced_tensors 1
    quiet: rank/desynced_tensors 0
    """
    if not tensors.last.max(initial=0.0) > 0 or desync.at != tensors.at:
        return
    for index in np.flatnonzero(np.isfinite(desync.last)):
        rank = {"rank": desync.last[index]} if desync.last[index] >= 0 else {}
        yield finding(
            Severity.CRITICAL, desync.last[index], NO_BOUND, desync.scopes[index], tensors=tensors.last.max(), **rank
        )


_PHASES = ("data", "forward", "update")
_WORDS = {
    "data": "before the forward pass, as when it loads data",
    "forward": "in the forward pass",
    "update": "after the optimizer step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler(Settings):
    """When `straggler` fires."""

    share: float = between(0.3, 0.0)
    """Time that a rank takes longer than the median of the others, as a fraction of the step time.

    A rank that takes twice as long as the others holds all of them up for about half of every step.
    """
    seconds: float = between(0.03, 0.0)
    """Minimum of that time in seconds."""
    checks: int = between(2, 1, counts="readings")
    """Number of measured steps in a row."""


@rule(
    "R102", "straggler",
    reads=("rank/data_seconds", "rank/forward_seconds", "rank/update_seconds", "rank/step_seconds"),
    when=("rank/step_seconds",), per_scope=True, keep=200, settings=Straggler,
    message=Message(
        "All ranks wait for {scope:words}", "behind the others by {value:%} of a step · limit {bound:%}",
        "it takes longer {phase}",
    ),
    remedies=(
        advise("look_at_rank", "Look at the input pipeline and the machine of this rank",
               "all ranks wait for the slowest one on every step", scope_is="rank"),
    ),
)  # fmt: skip
def straggler(data: Panel, forward: Panel, update: Panel, whole: Panel, settings: Straggler) -> Iterator[Finding]:
    """One rank takes longer than the others.

    ## Why is this bad?
    The ranks wait for each other on every step, so the slowest one sets the speed of all. Its time before and after the
    backward pass is compared with the median of the others: within the backward pass, every rank waits. Slow storage, a
    data set that is divided unevenly, work that only one rank does, a hot or shared machine are the usual causes.

    ## Example
    fires: rank/data_seconds{a} 0.1x3 | rank/data_seconds{b} 1.1x3 | rank/step_seconds{a} 1x3 | rank/step_seconds{b} 1x3
    quiet: rank/data_seconds{a} 0.1x3 | rank/data_seconds{b} 0.3x3 | rank/step_seconds{a} 1x3 | rank/step_seconds{b} 1x3
    """
    num, steps = settings.checks, whole.values[-settings.checks :].astype(float)
    if len(steps) < num or steps.shape[1] < 2:
        return
    longest = nanmedian(steps.T)
    for name, phase in zip(_PHASES, (data, forward, update), strict=True):
        if phase.scopes != whole.scopes or phase.at != whole.at or len(phase) < num:
            continue
        times = phase.values[-num:].astype(float)
        for rank, scope in enumerate(phase.scopes):
            excess = times[:, rank] - nanmedian(np.delete(times, rank, axis=1).T)
            if (excess >= np.maximum(settings.share * longest, settings.seconds)).all() and (longest > 0).all():
                share = (excess / longest).min()
                yield finding(Severity.WARNING, share, settings.share, scope, phase=_WORDS[name])


_DAMAGE = "the batch of this rank is damaged, or its hardware"


@rule(
    "R103", "rank-non-finite", reads=("rank/loss", "rank/nonfinite"), per_scope=True, keep=200,
    lookahead=lambda _settings, _info: lambda metric, upcoming: (
        None if "rank/nonfinite" in upcoming else any_of(~np.isfinite(upcoming.columns[metric].values))
    ),
    explains=("L101", "G101", "W101", "A103"),
    message=(
        Message("NaN or infinite values in {scope} on rank {rank} alone", "", _DAMAGE),
        Message("A NaN or infinite loss on {scope:words} alone", "", _DAMAGE),
    ),
    remedies=(
        advise("look_at_batch", "Look at the batch that this rank had at this step",
               "the average of the gradients spreads one bad value to all ranks", scope_is="place"),
    ),
)  # fmt: skip
def rank_non_finite(losses: Panel, layers: Panel) -> Iterator[Finding]:
    """A NaN or infinite value appeared on one rank.

    ## Why is this bad?
    The next average of the gradients gives it to every rank, and the run is lost. Where it came from can only be seen
    before that: this is the rank, and on a measured step the first layer, in which it appeared. A damaged batch of this
    rank is the usual cause, and broken hardware if it is the same rank again.

    ## Example
    fires: rank/loss{rank_0} 2.0x3 | rank/loss{rank_1} 2.0 2.0 nan
    fires: rank/nonfinite{blocks.3} _ _ 1 | rank/loss{rank_0} 2.0x3 | rank/loss{rank_1} 2.0 2.0 nan
    quiet: rank/loss{rank_0} 2.0x3 | rank/loss{rank_1} 2.0x3
    """
    now = max(losses.at, layers.at)
    if layers.at == now:
        for index in np.flatnonzero(np.isfinite(layers.last)):
            rank = layers.last[index]
            yield finding(Severity.CRITICAL, rank, NO_BOUND, layers.scopes[index], rank=rank)
    elif losses.at == now and len(losses.scopes) > 1:
        bad = ~np.isfinite(losses.last)
        if 0 < bad.sum() < len(bad):
            for index in np.flatnonzero(bad):
                yield finding(Severity.CRITICAL, float(index), NO_BOUND, losses.scopes[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLossApart(Settings):
    """When `rank-loss-apart` fires."""

    window: int = between(32, 8, counts="readings")
    """Number of losses compared."""
    share: float = between(0.25, 0.0)
    """Distance of a rank's loss from the median of the others, as a fraction of it."""
    deviations: float = between(1.5, 0.0)
    """The same in median deviations of that distance; over 32 losses, chance hardly moves their median that far."""


def _others(losses: Floats) -> Floats:
    """For each rank, the median loss of the others at each step."""
    return np.stack([np.median(np.delete(losses, rank, axis=1), axis=1) for rank in range(losses.shape[1])], axis=1)


def _upcoming_apart(metric: str, upcoming: Upcoming, settings: RankLossApart) -> Bools | None:
    """Where a rank has been apart from the others over a window, whatever the deviations."""
    losses, num_new = upcoming.joined(metric), len(upcoming.columns[metric].steps)
    if losses is None or len(losses) < num_new + settings.window or len(losses.scopes) < 2:
        return None
    values = losses.values[-num_new - settings.window + 1 :].astype(np.float64)
    if not np.isfinite(values).all():
        return None
    others = _others(values)
    middles = np.median(np.lib.stride_tricks.sliding_window_view(values - others, settings.window, axis=0), axis=-1)
    levels = np.median(np.lib.stride_tricks.sliding_window_view(others, settings.window, axis=0), axis=-1)
    return any_of(np.abs(middles) > settings.share * np.abs(levels))


@rule(
    "R104", "rank-loss-apart", reads=("rank/loss",), per_scope=True, keep=200, settings=RankLossApart,
    lookahead=lambda settings, _info: lambda metric, upcoming: _upcoming_apart(metric, upcoming, settings),
    message=Message(
        "The loss of {scope:words} is unlike that of the others", "median {value} · others {others}",
        "this rank trains on other data",
    ),
    remedies=(
        advise("check_sampler", "Check how the data is divided between the ranks",
               "every rank should draw from the same distribution; DistributedSampler with shuffle=True does",
               scope_is="rank"),
    ),
)  # fmt: skip
def rank_loss_apart(losses: Panel, settings: RankLossApart) -> Iterator[Finding]:
    """The loss of one rank stays away from that of the others.

    ## Why is this bad?
    All ranks have the same weights, so a different loss means different data: a shard of another source or language, a
    sorted data set that was cut into parts, labels that do not fit, or other preprocessing. The average gradient then
    follows a mixture that nobody chose.

    ## Example
    fires: rank/loss{rank_0} 2.0x40 | rank/loss{rank_1} 3.0x40
    quiet: rank/loss{rank_0} 2.0x40 | rank/loss{rank_1} 2.1x40
    """
    values = losses.values[-settings.window :].astype(float)
    if len(values) < settings.window or values.shape[1] < 2 or not np.isfinite(values).all():
        return
    others = _others(values)
    distances = values - others
    middles = np.median(distances, axis=0)
    rank = len(middles) - 1 - int(np.abs(middles[::-1]).argmax())  # the others are apart only because of this one
    middle, level = abs(middles[rank]), float(np.median(others[:, rank]))
    deviation = np.median(np.abs(distances[:, rank] - middles[rank]))
    if middle > settings.share * abs(level) and middle > settings.deviations * deviation:
        yield finding(Severity.WARNING, np.median(values[:, rank]), level, losses.scopes[rank], others=level)


@dataclass(frozen=True, kw_only=True)
class RankThresholds(Settings):
    """The thresholds of these rules."""

    straggler: Straggler = Straggler()
    rank_loss_apart: RankLossApart = RankLossApart()
