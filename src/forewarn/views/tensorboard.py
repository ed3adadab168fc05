"""A run in TensorBoard: one event per step, a limited number of curves, and alerts as text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forewarn.catalogue import Scope
from forewarn.histograms import in_line, line_edges, over_scopes, used_bins
from forewarn.metrics import find
from forewarn.random_states import random_states_kept
from forewarn.store import manifest
from forewarn.types import (
    Action,
    Alert,
    AlertState,
    Block,
    Counts,
    Distribution,
    FrozenCause,
    RunEnd,
    RunStart,
    Values,
    spelled_out,
)
from forewarn.views.wording import AlertGroup, advice, deed, grouped, literal, short

TOPK_GRADIENTS, TOPK_FROZEN = "monitor/topk_grad", "monitor/topk_frozen"

FACTS = "forewarn-run.json"
FLUSH_SECONDS = 10
"""Well below the 30 seconds after which TensorBoard reloads by default."""
QUEUED_EVENTS = 100
"""Maximum number of queued events before a step has to wait; far more than the dense start of a run needs."""
MOST_PLACES = 20
"""Maximum rows in the table of one alert; the rest are counted."""
LEAD = 2.0
"""A tensor gets a reserved tag if its gradient is this many times larger than any with a tag."""

_LEFT_OUT = {"update/optimizer_steps", "gradient/residual_norm"}
"""Almost always exactly 1 and 0, and alerts report any exception. `update/skipped` and `monitor/overhead_share` stay:
people look at how often a scaler skips a step and what the monitor costs."""

_NOT_IN_A_TAG = re.compile(r"[^\w.\-]")
"""As in torch's SummaryWriter, except for the slash: in a tensor's name it would start another level."""
_NOT_IN_MARKDOWN = re.compile(r"[&<>`|*~\[\]\\]|_(?![^\W_])")
"""Characters that markdown or HTML interprets. An underscore before a letter is harmless, and common in names."""


class TensorBoardView:
    """Writes a run where `tensorboard --logdir` finds it.

    With `detail="aggregates"`, the curves are the metrics of the whole run (loss and its average, learning rate, global
    norms, speed, values you logged without a scope, aggregates over tensors) and two short lists:

    - `monitor/topk_grad/{tensor}`: the gradient norm of up to `topk` tensors. Half of the tags, rounded up, go to the
      largest gradients at the first measured step. The rest are reserved for tensors whose gradient becomes twice as
      large as any with a tag, so a tensor that explodes at step 50,000 still gets its curve.
    - `monitor/topk_frozen/{tensor}`: the update ratio of up to `topk` frozen weights. The first to freeze get the tags;
      of those that freeze together, the ones that move least. Weights frozen on purpose do not count.

    A tensor keeps its tag and is written at every measured step, so curves have no gaps and a run has at most `topk`
    tags of each kind. `detail="full"` adds every scoped reading as `family/scope/quantity`, such as
    `gradient/blocks.0.attn.weight/norm`. For 2,000 values this takes about 2 ms on a measured step, plus about 15 ms in
    the writer's thread, where Python computes checksums.

    Histograms have the format of torch's `add_histogram_raw`, with one bucket per power of two on both sides of zero
    and one for zero. `gradient/histogram` and `weight/histogram` cover all tensors together. `detail="full"` adds one
    per tensor, such as `gradient/blocks.0.attn.weight/histogram`, at about 30 µs each.

    With `detail="full"`, a copy of the run's `run.json` lies beside the events as `forewarn-run.json`, where `forewarn
    import` finds what rules know of the model.

    NaN is not written. Alerts are text, with one tag per rule, such as `alerts/L102-loss-spike`. A resumed run adds an
    event file to the same folder and keeps its tags, which are stored there in `forewarn-topk.json`.
    """

    _leaves_out = True
    """Whether NaN and metrics that hardly ever change are left out."""

    def __init__(
        self, folder: str | Path, *, topk: int = 5, detail: Literal["aggregates", "full"] = "aggregates"
    ) -> None:
        if topk < 0:
            raise ValueError(f"topk must be the number of tensors, at least 0, not {topk}")
        if detail not in ("aggregates", "full"):
            raise ValueError(f"detail must be 'aggregates' or 'full', not {detail!r}")
        self._folder = str(folder)
        self._new_writer = _part("summary.writer.event_file_writer").EventFileWriter
        self._new_event = _part("compat.proto.event_pb2").Event
        self._new_tensor = _part("util.tensor_util").make_tensor_proto
        self._text = _part("plugins.text.metadata").create_summary_metadata("", "")
        self._files = _part("compat").tf.io.gfile  # as the event writer does: a folder may be on remote storage
        self._files.makedirs(self._folder)  # fail here, not at the first step
        self._writer: Any = None
        self._full = detail == "full"
        self._histograms: list[Distribution] = []
        self._tags = _Tags(full=detail == "full", left_out=_LEFT_OUT if self._leaves_out else set())
        self._memory = f"{self._folder}/forewarn-topk.json"
        earlier = self._remembered()
        self._gradients = _Picks(topk, topk // 2, earlier.get(TOPK_GRADIENTS, []))
        self._frozen = _Picks(topk, 0, earlier.get(TOPK_FROZEN, []))

    def begin(self, start: RunStart) -> None:
        """Copy what rules know of the run besides its readings, if it is stored."""
        if self._full and (start.path / manifest.NAME).exists():
            with suppress(OSError), self._files.GFile(f"{self._folder}/{FACTS}", "w") as file:
                file.write((start.path / manifest.NAME).read_text())

    def end(self, end: RunEnd) -> None:
        """Nothing is left to be told."""

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        measured = [block.time for block in blocks[:1]] or [part.time for part in self._histograms[:1]]
        event = self._new_event(wall_time=measured[0] if measured else time.time(), step=step)
        add = event.summary.value.add
        for block in blocks:
            tags = self._tags.of(block)
            if tags:
                for tag, value in zip(tags, block.values.tolist(), strict=True):
                    if tag and (value == value or not self._leaves_out):
                        add(tag=tag, simple_value=value)
        for tag, value in self._topk({block.name: block for block in blocks}):
            if value == value:
                add(tag=tag, simple_value=value)
        for distribution in self._histograms:
            for tag, counts, zeros in self._histogram_tags(distribution):
                _fill(add(tag=tag).histo, counts, zeros)
        self._histograms = []
        for tag, text in _texts(changed, taken):
            add(tag=tag, metadata=self._text, tensor=self._new_tensor(text))
        if not event.summary.value:
            return
        if self._writer is None:  # created late, because only rank 0 shows anything
            self._writer = self._new_writer(self._folder, QUEUED_EVENTS, FLUSH_SECONDS)
        self._writer.add_event(event)

    def show_histograms(self, step: int, distributions: Sequence[Distribution]) -> None:
        """Keep the histograms until `show` writes the event of their step."""
        self._histograms = list(distributions)

    def close(self) -> None:
        """Write queued events and close the file; may be called twice."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _histogram_tags(self, distribution: Distribution) -> Iterator[tuple[str, Counts, int]]:
        """Tags, counts and zeros of all tensors together and, in full detail, of each non-empty tensor."""
        distributions = [over_scopes(distribution), *([distribution] if self._full else [])]
        for part in distributions:
            for scope, counts, zeros in zip(part.scopes, part.counts, part.zeros.tolist(), strict=True):
                if zeros or counts.any():
                    yield self._tags.one(part.name, scope), counts, zeros

    def _topk(self, measured: Mapping[str, Block]) -> Iterator[tuple[str, float]]:
        """Tags and values of the tensors in both top-k lists, which may grow at this step."""
        num_given = len(self._gradients.scopes) + len(self._frozen.scopes)
        norm = measured.get("gradient/norm")
        if norm is not None:
            largest = max((value for _, value in self._gradients.read(norm) if value == value), default=0.0)
            self._gradients.give(norm.scopes, norm.values, above=LEAD * largest)
            for scope, value in self._gradients.read(norm):
                yield self._tags.one(TOPK_GRADIENTS, scope), value
        ratio, cause = measured.get("update/ratio"), measured.get("update/frozen_cause")
        if ratio is not None and cause is not None and ratio.scopes == cause.scopes:
            stillness = np.where(cause.values > FrozenCause.ON_PURPOSE.value, -ratio.values, np.nan)
            self._frozen.give(ratio.scopes, stillness, above=-np.inf)
            for scope, value in self._frozen.read(ratio):
                yield self._tags.one(TOPK_FROZEN, scope), value
        if len(self._gradients.scopes) + len(self._frozen.scopes) > num_given:
            self._remember()

    def _remember(self) -> None:
        with self._files.GFile(self._memory, "w") as file:
            file.write(json.dumps({TOPK_GRADIENTS: self._gradients.scopes, TOPK_FROZEN: self._frozen.scopes}))

    def _remembered(self) -> dict[str, list[str]]:
        """The tensors that had a tag before a resume; an unreadable file counts as none."""
        if not self._files.exists(self._memory):
            return {}
        try:
            with self._files.GFile(self._memory, "r") as file:
                return {name: [str(scope) for scope in scopes] for name, scopes in json.loads(file.read()).items()}
        except (ValueError, TypeError, AttributeError):
            return {}


class _Tags:
    """Unique TensorBoard tags of readings, each created once."""

    def __init__(self, *, full: bool, left_out: set[str]) -> None:
        self._full = full
        self._left_out = left_out
        self._layouts: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        """The scopes and tags of each metric's last block."""
        self._made: dict[tuple[str, str], str] = {}
        self._used: set[str] = set()

    def of(self, block: Block) -> tuple[str, ...]:
        """A tag for each value of a block, empty for a value that is not shown; no tags if none is shown."""
        layout = self._layouts.get(block.name)
        if layout is None or (layout[0] is not block.scopes and layout[0] != block.scopes):
            tags = tuple(self._shown(block.name, scope, len(block.scopes)) for scope in block.scopes)
            layout = self._layouts[block.name] = (block.scopes, tags if any(tags) else ())
        return layout[1]

    def one(self, name: str, scope: str) -> str:
        tag = self._made.get((name, scope))
        if tag is None:
            tag = _tag(name, scope)
            while tag in self._used:  # two names may differ only in replaced characters
                tag += "_"
            self._used.add(tag)
            self._made[name, scope] = tag
        return tag

    def _shown(self, name: str, scope: str, num_scopes: int) -> str:
        metric = find(name)
        if metric is not None and metric.scope is Scope.GROUP:  # there are few groups; a single one needs no name
            return self.one(name, scope if num_scopes > 1 else "")
        is_shown = self._full if scope else name not in self._left_out
        return self.one(name, scope) if is_shown else ""


class _Picks:
    """The tensors with a top-k tag: at most `most`, and none ever loses its tag."""

    def __init__(self, most: int, reserved: int, scopes: Sequence[str]) -> None:
        self.scopes = list(scopes[:most])
        self._most = most
        self._reserved = reserved
        """Tags held back the first time."""
        self._layout: tuple[str, ...] = ()
        self._places: dict[str, int] = {}

    def give(self, scopes: tuple[str, ...], scores: Values, above: float) -> None:
        """Give free tags to the tensors with the highest scores above a limit."""
        num_free = self._most - len(self.scopes) - (0 if self.scopes else self._reserved)
        if num_free <= 0:
            return
        able = np.flatnonzero(scores > above)
        best = able[np.argsort(-scores[able], kind="stable")].tolist()
        new = [scopes[index] for index in best[: self._most] if scopes[index] not in self.scopes]
        self.scopes += new[:num_free]

    def read(self, block: Block) -> list[tuple[str, float]]:
        """The tensors with a tag and their values, as far as the block has them."""
        if block.scopes is not self._layout:
            self._layout = block.scopes
            self._places = {scope: index for index, scope in enumerate(block.scopes)}
        places = self._places
        return [(scope, float(block.values[places[scope]])) for scope in self.scopes if scope in places]


def _tag(name: str, scope: str) -> str:
    """`family/scope/quantity`, so that TensorBoard groups by layer; the top-k lists use `name/scope`."""
    name = "/".join(_NOT_IN_A_TAG.sub("_", part) for part in name.split("/"))
    if not scope:
        return name
    scope = _NOT_IN_A_TAG.sub("_", scope)
    return f"{name}/{scope}" if name in (TOPK_GRADIENTS, TOPK_FROZEN) else spelled_out(name, scope)


def _fill(proto: Any, counts: Counts, zeros: int) -> None:
    """Fill in a TensorBoard histogram: counts by upper bucket edge, and moments.

    The moments assume evenly filled buckets.
    """
    bins = used_bins(counts[None])
    line, edges = in_line(counts[None, :, bins], np.array([zeros]))[0], line_edges(bins)
    if bins.start == bins.stop:  # only zeros: put them in a bucket with an edge on either side
        edges = np.array([-0.5, 0.5])
    first, last = np.flatnonzero(line)[[0, -1]].tolist()
    line, edges = line[first : last + 1], edges[first : last + 2]
    low, high = edges[:-1], edges[1:]
    proto.min, proto.max, proto.num = edges[0], edges[-1], line.sum()
    proto.sum, proto.sum_squares = line @ (low + high) / 2, line @ (low**2 + low * high + high**2) / 3
    proto.bucket_limit.extend(high.tolist())
    proto.bucket.extend(line.tolist())


def _texts(changed: Sequence[Alert], taken: Sequence[Action]) -> Iterator[tuple[str, str]]:
    """Tags and markdown: one tag per rule and one for all actions."""
    for group in grouped(alert for alert in changed if alert.state is not AlertState.PENDING):
        yield _tag(f"alerts/{group.worst.code}-{group.worst.name}", ""), _markdown(group)
    if taken:
        yield "actions", "\n".join(f"- {_escaped(deed(action))}" for action in taken)


def _markdown(group: AlertGroup) -> str:
    """What is wrong, where, its numbers, and what to do."""
    worst = group.worst
    alerts = [worst, *(alert for alert in group.alerts if alert is not worst)]
    lines = [f"**{worst.severity if group.is_firing else worst.state}** {_escaped(group.headline)}", ""]
    lines += ["| where | severity | state | since step | numbers |", "|---|---|---|---|---|"]
    for alert in alerts[:MOST_PLACES]:
        place = _escaped(short(alert.scope)) or "the run"
        words = _escaped(literal(alert.numbers))
        lines.append(f"| {place} | {alert.severity} | {alert.state} | {alert.since} | {words} |")
    if len(alerts) > MOST_PLACES:
        lines += ["", f"and {len(alerts) - MOST_PLACES} more"]
    if group.is_firing:
        lines += ["", *(f"{rank}. {_escaped(advice(remedy).plain)}" for rank, remedy in enumerate(worst.remedies, 1))]
        lines += ["", f"why: forewarn explain {_escaped(worst.name)}"]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Text that any markdown dialect shows literally: special characters become numbered entities."""
    return _NOT_IN_MARKDOWN.sub(lambda match: f"&#{ord(match[0])};", text)


def _part(name: str) -> Any:
    """A module of the tensorboard package, which is optional and has no types."""
    try:
        with random_states_kept():
            import_module("tensorboard")
            return import_module(f"tensorboard.{name}")
    except ModuleNotFoundError as error:
        if error.name != "tensorboard":
            raise
        raise ModuleNotFoundError(
            "TensorBoardView needs tensorboard: pip install 'forewarn[tensorboard]'", name="tensorboard"
        ) from None
