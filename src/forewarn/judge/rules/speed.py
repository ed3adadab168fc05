"""Rules about speed and memory: they judge sustained changes, since the time of single steps is noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.headlines import Message
from forewarn.judge.registry import NO_BOUND, finding, rule
from forewarn.judge.remedies import advise
from forewarn.judge.series import Bools, Floats, Panel, Series, median, usual_levels
from forewarn.judge.upcoming import Upcoming, never
from forewarn.metrics import TRAINING_PHASES
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity

_GIGABYTE = 1e9
"""Messages give memory in this unit."""
_STEPS = 1000
"""Messages give growth per this many steps."""
_SURELY = 0.99
"""A sum below this share of a limit is below it, however it was rounded."""
_MUCH_FASTER = 1.25
"""A step that takes less than the median divided by this is unusual: looking ahead, few steps may be."""


def _seldom(flags: Bools, weights: Floats, readings: int) -> bool:
    """Whether these have less than half of the weight in every part of at least this many readings.

    A longer part consists of parts shorter than twice that many. The first reading of a part counts for a single step.
    """
    total, flagged = np.append(0.0, np.cumsum(weights)), np.append(0.0, np.cumsum(weights * flags))
    return all(
        (flagged[length:] - flagged[:-length] < (total[length:] - total[1 : 1 - length or None]) / 2).all()
        for length in range(readings, min(2 * readings, len(total)))
    )


def _steady(metric: str, upcoming: Upcoming, *without: str) -> tuple[Panel, Floats, Floats, float] | None:
    """The phases in memory and upcoming, the seconds per step in the others, the weight of each, and their median."""
    phases = upcoming.joined(metric)
    if phases is None:
        return None
    _, per_step = _per_step(phases, *without)
    weights = np.where(np.isfinite(per_step), np.diff(phases.steps, prepend=phases.steps[:1] - 1), 0.0)
    return phases, per_step, weights, median(per_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputDrop(Settings):
    """When `throughput-drop` fires."""

    factor: float = between(2.0, 1.0)
    """How many times as long a step takes as it usually did."""
    seconds: float = between(60.0, 0.0)
    """Seconds of training, now and before, that are compared."""
    warning_factor: float = between(3.0, 1.0)
    """The same factor for a warning: a shared machine is often twice as slow."""
    warning_seconds: float = between(300.0, 0.0)
    """Seconds of training that are compared for a warning."""
    readings: int = between(10, 1, counts="readings")
    """Minimum number of readings in each of the two."""


def _no_upcoming_drop(metric: str, upcoming: Upcoming, settings: ThroughputDrop) -> Bools | None:
    """None of the upcoming readings if neither many fast nor many slow ones are close together."""
    steady = _steady(metric, upcoming, "monitor", "between passes")
    if steady is None:
        return None
    _, per_step, weights, usual = steady
    apart = math.sqrt(min(settings.factor, settings.warning_factor))
    is_steady = _seldom(per_step > usual * apart, weights, settings.readings) and _seldom(
        per_step < usual / apart, weights, settings.readings
    )
    return never(metric, upcoming) if is_steady else None


@rule(
    "P101", "throughput-drop",
    reads=("speed/phase_seconds", "speed/tokens_per_second", "speed/samples_per_second"),
    when=("speed/phase_seconds",), per_scope=True, keep=200,
    lookahead=lambda settings, _info: lambda metric, upcoming: _no_upcoming_drop(metric, upcoming, settings),
    settings=ThroughputDrop,
    message=Message(
        "Steps have become slower, most of all in the phase {scope}",
        "seconds per step {value} · limit {bound} · usual {level}",
    ),
    remedies=(
        advise("find_what_grows", "Look for work that grows with every step in the phase {scope}",
               "lists of tensors, graphs that are kept and hooks that pile up make each step slower", scope_is="phase"),
        advise("check_the_machine", "Look for other processes, and for a GPU or CPU that is too hot",
               "`nvidia-smi` and `top` show both"),
        advise("count_tokens", "If the batches have grown, pass their size: monitor.step(loss, tokens=...)",
               "tokens per second then tell whether training is slower"),
    ),
)  # fmt: skip
def throughput_drop(phases: Panel, tokens: Panel, samples: Panel, settings: ThroughputDrop) -> Iterator[Finding]:
    """Training is much slower than it was, for a minute or longer.

    ## Why is this bad?
    Every step costs more than it did. Something grows from step to step, the loader has fallen behind, or the machine
    is slower: it is shared, or too hot. It is a warning if steps take three times as long for five minutes, otherwise
    information. The time of the monitor and of pauses does not count, nor that between passes, where a loop may do
    anything: wait for data, which counts if the loader is watched, or evaluate. If the loop reports its tokens or
    samples, they must have become fewer per second too: longer batches may take longer.

    ## Example
    fires: speed/phase_seconds{forward} 0.5x200 1.5x100 | speed/phase_seconds{data} 0.1x300
    quiet: speed/phase_seconds{forward} 0.5x200 0.9x100 | speed/phase_seconds{data} 0.1x300
    quiet: speed/phase_seconds{forward} 0.5x200 5.0x3 0.5x97 | speed/phase_seconds{data} 0.1x300
    quiet: speed/phase_seconds{forward} 0.5x300 | speed/phase_seconds{between passes} 0.1x200 2.0x100
    quiet: speed/phase_seconds{forward} 0.5x200 1.5x100 | speed/tokens_per_second 1000x300
    """
    if _is_shorter(phases, min(settings.seconds, settings.warning_seconds)):
        return
    columns, per_step = _per_step(phases, "monitor", "between passes")
    if not len(phases) or not np.isfinite(per_step[-1]):
        return
    trained = _trained(phases, per_step)
    rates = [rate for panel in (tokens, samples) if len(rate := panel.series()) and rate.at == phases.at]
    for severity, factor, seconds in (
        (Severity.WARNING, settings.warning_factor, settings.warning_seconds),
        (Severity.INFO, settings.factor, settings.seconds),
    ):
        split = _begin_of_last(trained, seconds)
        before, after = slice(1, split), slice(split, None)
        if min(split - 1, len(phases) - split) < settings.readings or trained[before].sum() < seconds:
            continue
        level, now = (_level(phases, per_step, part) for part in (before, after))
        since = int(phases.steps[split])
        if now > factor * level and not any(_is_kept(rate, since, factor) for rate in rates):
            grown = [_level(phases, phases.values[:, place], after) - _level(phases, phases.values[:, place], before)
                     for place in columns]  # fmt: skip
            scope = phases.scopes[columns[int(np.nanargmax(grown))]]
            yield finding(severity, now, factor * level, scope, level=level, lasting_steps=phases.at - since + 1)
            return


def _is_kept(rate: Series, since: int, factor: float) -> bool:
    """Whether a rate since this step is not that much lower than before."""
    split = int(np.searchsorted(rate.steps, since))
    return not median(rate.values[split:]) * factor < median(rate.values[1:split])


def _per_step(phases: Panel, *without: str) -> tuple[list[int], Floats]:
    """The columns of the other phases, and the seconds per step in all of them; NaN if one is not finite."""
    columns = [place for place, phase in enumerate(phases.scopes) if phase not in without]
    per_step = np.where(np.isfinite(phases.values), phases.values, np.nan)[:, columns].astype(np.float64).sum(axis=1)
    return columns, per_step


def _trained(phases: Panel, per_step: Floats) -> Floats:
    """The seconds of training that each reading stands for; the first one stands for steps that are not known."""
    return np.nan_to_num(np.diff(phases.steps, prepend=phases.steps[:1]) * per_step)


def _is_shorter(phases: Panel, seconds: float) -> bool:
    """Whether all readings stand for less time than this, found quickly; False if that takes a closer look."""
    longest = float(np.add.reduce(phases.values, axis=None, dtype=np.float64)) * phases.longest_gap(len(phases))
    return longest < _SURELY * seconds


def _begin_of_last(trained: Floats, seconds: float) -> int:
    """The index from which on the readings stand for this many seconds; 0 if all of them are too few."""
    enough = np.flatnonzero(np.cumsum(trained[::-1]) >= seconds)
    return len(trained) - 1 - int(enough[0]) if len(enough) else 0


def _level(phases: Panel, values: NDArray[Any], part: slice) -> float:
    return float(usual_levels(phases.steps[part], values[part][:, None])[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStep(Settings):
    """When `slow-step` fires."""

    factor: float = between(10.0, 1.0)
    """How many times the usual time a slow step takes."""
    least: float = between(1.0, 0.0)
    """Minimum number of seconds by which it is slower."""
    lost: float = between(10.0, 0.0)
    """Minimum number of seconds that the slow steps among the recent ones have cost together."""
    readings: int = between(50, 2, counts="readings")
    """Number of steps needed to know the usual time."""


def _upcoming_slow_steps(metric: str, upcoming: Upcoming, settings: SlowStep) -> Bools | None:
    """The upcoming readings of the phases of steps that take many times as long as most others."""
    if "speed/step_seconds" not in upcoming.columns:
        return None
    times, phases = upcoming.joined("speed/step_seconds"), upcoming.columns[metric]
    if times is None or times.scopes != ("",):
        return None
    seconds = times.values[:, 0].astype(np.float64)
    least = median(seconds) / 2
    if not _seldom(seconds < least, np.where(np.isfinite(seconds), 1.0, 0.0), settings.readings):
        least = 0.0
    new = upcoming.columns["speed/step_seconds"]
    slow = seconds[-len(new.rows) :] > max(settings.least, settings.factor * least)
    return np.isin(phases.rows, new.rows[slow])


@rule(
    "P102", "slow-step", reads=("speed/step_seconds", "speed/phase_seconds"), when=("speed/phase_seconds",),
    per_scope=True, keep=200,
    lookahead=lambda settings, _info: lambda metric, upcoming: _upcoming_slow_steps(metric, upcoming, settings),
    settings=SlowStep,
    message=Message(
        "A step took much longer than usual in the phase {scope}",
        "seconds {value} · limit {bound} · usual {level} · slow steps {num_slow} · seconds lost {lost_seconds}",
    ),
    remedies=(
        advise("look_at_the_step", "Look at what happened at step {step}",
               "code may be compiled again for a batch of another shape, or a file system may be slow"),
        advise("look_at_the_loader", "Wrap the loader: loader = monitor.watch_loader(loader)",
               "the phases then show whether the step waited for data"),
    ),
)  # fmt: skip
def slow_step(seconds: Panel, phases: Panel, settings: SlowStep) -> Iterator[Finding]:
    """Single steps take many times as long as usual.

    ## Why is this bad?
    The time is lost: code is compiled again, a worker starts anew, another process takes the machine. It is information
    only. Time between steps does not count, nor what the hooks cannot see: an evaluation that is not marked as a pause,
    a checkpoint, a cell of a notebook that runs later.

    ## Example
    fires: 0.1x60 15.0 | speed/phase_seconds{forward} 0.1x60 15.0
    fires: 0.1x60 4.0x4 | speed/phase_seconds{data} 0.1x60 4.0x4
    quiet: 0.1x60 4.0 | speed/phase_seconds{forward} 0.1x60 4.0
    quiet: 0.1x60 15.0 | speed/phase_seconds{between passes} 0.1x60 15.0
    quiet: 15.0x3 0.1x60 0.5 | speed/phase_seconds{forward} 15.0x3 0.1x60 0.5
    """
    times = seconds.series()
    if not times.last > settings.least or times.at != phases.at:
        return
    usual = times.median(len(times), skip=1)
    limit = max(settings.factor * usual, usual + settings.least)
    if len(times) <= settings.readings or not usual > 0 or not limit < times.last < np.inf:
        return
    slow = times.steps[1:][(times.values[1:] > limit) & np.isfinite(times.values[1:])]
    rows = np.flatnonzero(np.isin(phases.steps, slow))  # a step of a second or more has a reading of its phases
    longest = [phases.scopes[column] for column in np.nan_to_num(phases.values[rows]).argmax(axis=1)]
    inside = {
        int(phases.steps[row]): phase for row, phase in zip(rows, longest, strict=True) if phase in TRAINING_PHASES
    }
    lost = float(times.values[np.isin(times.steps, list(inside))].sum()) - usual * len(inside)
    if times.at in inside and lost >= settings.lost:
        counted = {"num_slow": len(inside), "lost_seconds": lost}
        yield finding(Severity.INFO, times.last, limit, inside[times.at], level=usual, **counted)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStarved(Settings):
    """When `data-starved` fires."""

    share: float = between(0.4, 0.0, 1.0)
    """Fraction of the training's time spent in a watched loader."""
    unsure_share: float = between(0.6, 0.0, 1.0)
    """Fraction spent between passes, if the loader is not watched."""
    seconds: float = between(60.0, 0.0)
    """Seconds of training that are judged."""
    readings: int = between(5, 1, counts="readings")
    """Minimum number of readings among them."""


def _no_upcoming_waiting(metric: str, upcoming: Upcoming, settings: DataStarved) -> Bools | None:
    """None of the upcoming readings if few of them, and of those in memory, show long waiting."""
    steady = _steady(metric, upcoming, "monitor")
    if steady is None:
        return None
    phases, per_step, weights, usual = steady
    least = usual / _MUCH_FASTER
    if not _seldom(per_step < least, weights, settings.readings):
        return None
    for scope, limit in (("data", settings.share), ("between passes", settings.unsure_share)):
        waiting = phases.series(scope).values.astype(np.float64)
        if len(waiting):
            weights = np.where(np.isfinite(waiting), np.diff(phases.steps, prepend=phases.steps[:1] - 1), 0.0)
            if not _seldom(waiting > limit * least, weights, settings.readings):
                return None
    return never(metric, upcoming)


@rule(
    "P103", "data-starved", reads=("speed/phase_seconds",), per_scope=True, keep=200,
    lookahead=lambda settings, _info: lambda metric, upcoming: _no_upcoming_waiting(metric, upcoming, settings),
    explains=("P101", "P102", "P106"),
    settings=DataStarved,
    message=(
        Message(
            "Training waits for data {value:%} of the time",
            "share of the time {value:%} · limit {bound:%} · seconds per step {data_seconds} · of a whole step "
            "{seconds}",
        ),
        Message(
            "{value:%} of the time passes between steps, usually waiting for data",
            "share of the time {value:%} · limit {bound:%} · seconds per step {between_seconds} · of a whole step "
            "{seconds}",
        ),
    ),
    remedies=(
        advise("add_workers", "Raise num_workers of the DataLoader, to 4 or more per device",
               "batches are then loaded while the model trains"),
        advise("pin_and_prefetch", "Set pin_memory=True, prefetch_factor=4 and persistent_workers=True",
               "copies to the device run beside it, and workers do not start again at each epoch"),
        advise("cheaper_samples", "Decode, tokenize and resize before training, not on every step",
               "what is done once per sample need not be done once per epoch"),
        advise("watch_the_loader", "If the loader is not watched: loader = monitor.watch_loader(loader)",
               "its own time is then told apart from the rest of the loop"),
    ),
)  # fmt: skip
def data_starved(phases: Panel, settings: DataStarved, info: RunInfo) -> Iterator[Finding]:
    """A large part of the time is spent waiting for the next batch.

    ## Why is this bad?
    The device idles meanwhile, so the run could be that much faster. It is a warning if `monitor.watch_loader` measures
    it. Without that, the time from `monitor.step` to the next forward pass may also be another model's, as in a GAN,
    and in reinforcement learning it is the environment's, so it is only information.

    ## Example
    fires: speed/phase_seconds{data} 0.8x90 | speed/phase_seconds{forward} 0.3x90
    fires: speed/phase_seconds{between passes} 0.8x90 | speed/phase_seconds{forward} 0.3x90
    quiet: speed/phase_seconds{between passes} 0.5x90 | speed/phase_seconds{forward} 0.5x90
    quiet: speed/phase_seconds{data} 0.1x90 | speed/phase_seconds{forward} 0.9x90
    quiet: speed/phase_seconds{data} 0.1x80 9.0 0.1x80 | speed/phase_seconds{forward} 0.9x161
    quiet: speed/phase_seconds{data} 0.8x20 | speed/phase_seconds{forward} 0.3x20
    """
    if _is_shorter(phases, settings.seconds):
        return
    _, per_step = _per_step(phases, "monitor")
    split = _begin_of_last(_trained(phases, per_step), settings.seconds)
    if not split or len(phases) <= settings.readings:
        return
    recent = slice(min(split, len(phases) - settings.readings), None)
    whole = _level(phases, per_step, recent)
    for scope, name, limit in (
        ("data", "data_seconds", settings.share),
        ("between passes", "between_seconds", settings.unsure_share),
    ):
        waiting = phases.series(scope)
        if not len(waiting) or not np.isfinite(waiting.last) or not whole > 0:
            continue
        spent = _level(phases, waiting.values, recent)
        if spent > limit * whole:
            is_sure = scope == "data" and info.objective != "return"
            severity = Severity.WARNING if is_sure else Severity.INFO
            yield finding(severity, min(spent / whole, 1.0), limit, scope, seconds=whole, **{name: spent})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHigh(Settings):
    """When `memory-high` fires."""

    host: float = between(0.95, 0.0, 1.0)
    """Fraction of the host's memory in use."""
    own: float = between(0.3, 0.0, 1.0)
    """Minimum fraction of it held by this run; less is somebody else's."""
    device: float = between(0.95, 0.0, 1.0)
    """Fraction of the device's memory that tensors held at the highest."""
    readings: int = between(3, 1, counts="readings")
    """Number of readings in a row."""


@rule(
    "P104", "memory-high",
    reads=("system/host_memory_share", "system/own_memory_share", "system/cuda_memory_share", "system/cuda_retries"),
    when=("system/host_memory_share", "system/cuda_memory_share"), keep=500,
    explains=("P107",),
    settings=MemoryHigh,
    message=(
        Message("The memory of the host is nearly full",
                "share in use {value:%} · limit {bound:%} · share of this run {own:%}"),
        Message("The memory of the device is nearly full",
                "highest share {value:%} · limit {bound:%} · allocations retried {retries}"),
    ),
    remedies=(
        advise("smaller_batch", "Halve the batch size and accumulate gradients over 2 batches",
               "activations take memory in proportion to the batch"),
        advise("checkpoint_activations", "Recompute activations: torch.utils.checkpoint",
               "only the inputs of each block are then kept for the backward pass"),
        advise("fewer_workers", "On the host, lower num_workers and prefetch_factor of the DataLoader",
               "each worker has a copy of the dataset and its own batches"),
    ),
)  # fmt: skip
def memory_high(host: Series, own: Series, device: Series, retries: Series, settings: MemoryHigh) -> Finding | None:
    """Memory is close to its limit.

    ## Why is this bad?
    A slightly longer batch, an evaluation or a checkpoint then ends the run. A host without free memory swaps, or the
    kernel kills the process without a word. A device that is nearly full frees its cache and tries again, which is
    slow; as long as it never had to, it is only information. In a container the limit is that of its control group.

    ## Example
    fires: 0.97x4 | system/own_memory_share 0.8x4
    fires: system/cuda_memory_share 0.98x4 | system/cuda_retries 7x4
    quiet: 0.97x4 | system/own_memory_share 0.1x4
    quiet: 0.97 0.9x4 | system/own_memory_share 0.8x5
    """
    newest = max(host.at, device.at)
    if host.at == newest and _stays_above(host, settings.host, settings.readings) and own.last > settings.own:
        return finding(Severity.WARNING, host.last, settings.host, own=own.last)
    if device.at == newest and _stays_above(device, settings.device, settings.readings):
        severity = Severity.WARNING if retries.last > 0 else Severity.INFO
        return finding(severity, device.last, settings.device, retries=retries.last)
    return None


def _stays_above(series: Series, limit: float, readings: int) -> bool:
    return len(series) >= readings and bool((series.values[-readings:] > limit).all()) and np.isfinite(series.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLeak(Settings):
    """When `memory-leak` fires."""

    readings: int = between(300, 12, counts="readings")
    """Number of readings needed; there is at most one per second."""
    skip: int = between(30, 0)
    """Number of readings at the start that are left out: libraries load, caches fill."""
    growth: float = between(0.2, 0.0)
    """Minimum growth, as a fraction of the memory before."""
    least_bytes: float = between(3e8, 0.0)
    """Minimum growth in bytes."""
    rising: float = between(0.75, 0.0, 1.0)
    """Fraction of the time in which memory must rise."""
    parts: int = between(8, 4)
    """Number of parts of the readings whose medians are compared."""


@rule(
    "P105", "memory-leak", reads=("system/private_memory_bytes", "system/cuda_allocated_bytes"),
    when=("system/private_memory_bytes", "system/cuda_allocated_bytes"), keep=500,
    explains=("P101", "P104", "P107"),
    settings=MemoryLeak,
    message=(
        Message("Memory of the process keeps growing",
                "gigabytes {gigabytes} · before {before} · gigabytes per 1000 steps {rate}"),
        Message("Memory of tensors on the device keeps growing",
                "gigabytes {device_gigabytes} · before {before} · gigabytes per 1000 steps {rate}"),
    ),
    remedies=(
        advise("detach", "Add up numbers, not tensors: total += loss.item()",
               "a tensor keeps the graph of its step alive, with all activations"),
        advise("no_grad", "Evaluate under torch.no_grad()", "outputs that are kept then hold no graph"),
        advise("find_what_is_kept", "Compare 2 snapshots of tracemalloc, or of torch.cuda.memory._snapshot",
               "they show which line allocated what is still held"),
    ),
)  # fmt: skip
def memory_leak(process: Series, device: Series, settings: MemoryLeak, info: RunInfo) -> Finding | None:
    """Memory grows steadily and does not level off.

    ## Why is this bad?
    The run will end when memory does, perhaps after days. The usual cause is a tensor that outlives its step. Growth at
    the start that levels off is normal. Pages of mapped files do not count. In reinforcement learning a buffer of
    experience grows too, so it is only information.

    ## Example
    fires: 1e9+5e6x400
    fires: system/cuda_allocated_bytes 1e9+5e6x400
    quiet: 1e9x400
    quiet: 1e9+2e7x100 3e9x300
    """
    newest = max(process.at, device.at)
    severity = Severity.INFO if info.objective == "return" else Severity.WARNING
    for series, name in ((process, "gigabytes"), (device, "device_gigabytes")):
        if series.at != newest or not np.isfinite(series.last) or len(series) < settings.readings:
            continue
        before, growth, rate = _growth(series, settings)
        limit = max(settings.growth * before, settings.least_bytes)
        if growth > limit:
            held: dict[str, Any] = {name: series.last / _GIGABYTE, "before": before / _GIGABYTE}
            return finding(severity, growth, limit, **held, rate=_STEPS * rate / _GIGABYTE)
    return None


def _growth(series: Series, settings: MemoryLeak) -> tuple[float, float, float]:
    """The level before, by how much it grew since and by how much per step; no growth if it levels off."""
    blocks = np.array_split(series.values[settings.skip :].astype(np.float64), settings.parts)
    levels = np.array([median(block) for block in blocks])
    first, second = np.triu_indices(len(levels), 1)
    slope = float(np.median((levels[second] - levels[first]) / (second - first)))
    rises = np.diff(levels)
    goes_on = levels[-1] - levels[-3] > slope and (rises > 0).mean() >= settings.rising
    growth = slope * (len(levels) - 1) if goes_on else 0.0
    covered = max(1, int(series.steps[-1] - series.steps[settings.skip]))
    return float(levels[0]), growth, growth / covered


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUnderused(Settings):
    """When `gpu-underused` fires."""

    share: float = between(0.3, 0.0, 1.0)
    """Fraction of the time in which the GPU does something."""
    readings: int = between(12, 1, counts="readings")
    """Number of readings in the median; there is one every 10 seconds."""


@rule(
    "P106", "gpu-underused", reads=("system/gpu_utilization_share",), keep=500,
    settings=GpuUnderused,
    message=Message("The GPU is idle most of the time", "utilization {value:%} · limit {bound:%}"),
    remedies=(
        advise("look_at_the_phases", "Run forewarn check: it says where the time of a step goes",
               "the longest phase is what the GPU waits for"),
        advise("larger_batch", "Double the batch size, or compile the model with torch.compile",
               "many small kernels keep the host busy and the GPU idle"),
        advise("fewer_syncs", "Log every 100 steps: .item(), .cpu() and print wait for the GPU",
               "the host can then prepare the next step meanwhile"),
    ),
)  # fmt: skip
def gpu_underused(utilization: Series, settings: GpuUnderused) -> Finding | None:
    """The GPU has nothing to do for most of the time.

    ## Why is this bad?
    It waits for data, for the host, or for another rank. A smaller machine would be as fast, or a better loop several
    times as fast. A small model on a large GPU is no fault, so it is only information. The driver counts any running
    kernel, so a high utilization does not mean that the GPU is used well.

    ## Example
    fires: 0.1x12
    quiet: 0.1x3 0.9x9
    quiet: 0.1x11
    """
    level = utilization.median(settings.readings)
    is_known = len(utilization) >= settings.readings and np.isfinite(utilization.last)
    return finding(Severity.INFO, level, settings.share) if is_known and level < settings.share else None


@rule(
    "P107", "out-of-memory",
    reads=(
        "system/out_of_memory", "system/process_memory_bytes", "system/cuda_peak_bytes", "system/cuda_reserved_bytes",
    ),
    when=("system/out_of_memory",),
    message=(
        Message("The run ended out of memory",
                "gigabytes on the device at the highest {peak} · reserved last {reserved} · of the process {process}"),
        Message("The run ended out of memory", "gigabytes of the process {process} · at the start {start}"),
    ),
    remedies=(
        advise("smaller_batch", "Halve the batch size and accumulate gradients over 2 batches",
               "activations take memory in proportion to the batch"),
        advise("checkpoint_activations", "Recompute activations: torch.utils.checkpoint",
               "only the inputs of each block are then kept for the backward pass"),
        advise("mixed_precision", "Train in bfloat16: torch.autocast(..., dtype=torch.bfloat16)",
               "activations take half as much memory"),
        advise("limit_length", "Cut or bucket the longest batches",
               "one batch that is longer than all others decides how much memory is needed"),
    ),
)  # fmt: skip
def out_of_memory(ended: Series, process: Series, peak: Series, reserved: Series) -> Finding | None:
    """The run ended because memory could not be allocated.

    ## Why is this bad?
    Everything since the last checkpoint is lost. If memory grew until then, it is a leak; if it was level, one batch
    was too large. A process that the kernel kills leaves no reading.

    ## Example
    fires: _x5 1 | system/process_memory_bytes 3e9x5
    fires: _x5 1 | system/process_memory_bytes 3e9x5 | system/cuda_peak_bytes 8e10x5 | system/cuda_reserved_bytes 8e10x5
    quiet: _x5 0 | system/process_memory_bytes 3e9x5
    """
    if not ended.last > 0:
        return None
    start = next(iter(process.finite()), np.nan)
    held: dict[str, Any] = {"process": process.last / _GIGABYTE, "start": start / _GIGABYTE}
    if len(peak):
        held |= {"peak": peak.last / _GIGABYTE, "reserved": reserved.last / _GIGABYTE}
    return finding(Severity.CRITICAL, 1.0, NO_BOUND, **held)


@rule(
    "P108", "stalled-run", reads=("speed/stall_seconds",), per_scope=True, keep=200,
    message=Message("The run hung in the phase {scope}", "seconds without a sign {value}"),
    remedies=(
        advise("read_the_stacks", "Read stalled.txt in the run's directory",
               "it holds the stacks of all threads when the run hung", scope_is="phase"),
        advise("mark_the_pause", "Put evaluation and checkpoints into `with monitor.pause(\"eval\"):`",
               "a pause may take as long as it needs"),
    ),
)  # fmt: skip
def stalled_run(seconds: Panel) -> Iterator[Finding]:
    """Nothing happened for minutes in the middle of a step.

    ## Why is this bad?
    A worker of the loader is dead, ranks wait for each other, or a file system does not answer. The phase and the
    stacks say where. Outside of the passes it may also be work that is not marked as a pause, so it is only
    information there. `Config.stall_seconds` sets after how long a run counts as stalled.

    ## Example
    fires: speed/stall_seconds{data} 130
    quiet: speed/stall_seconds{data} nan
    """
    for index in np.flatnonzero(seconds.last > 0):
        phase = seconds.scopes[index]
        severity = Severity.WARNING if phase in TRAINING_PHASES else Severity.INFO
        yield finding(severity, seconds.last[index], NO_BOUND, phase)


@dataclass(frozen=True, kw_only=True)
class SpeedThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    throughput_drop: ThroughputDrop = ThroughputDrop()
    slow_step: SlowStep = SlowStep()
    data_starved: DataStarved = DataStarved()
    memory_high: MemoryHigh = MemoryHigh()
    memory_leak: MemoryLeak = MemoryLeak()
    gpu_underused: GpuUnderused = GpuUnderused()
