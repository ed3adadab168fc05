"""A run in TensorBoard: one event per step, a limited number of curves, and alerts as text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forewarn.store import manifest
from forewarn.types import Action, Alert, AlertState, Block, Counts, Distribution, RunEnd, RunStart
from forewarn.views.tracked import MOST_PLACES, Curves, Detail, buckets, hyperparameters, optional, tag_of
from forewarn.views.wording import AlertGroup, advice, deed, grouped, literal, short

FACTS = "forewarn-run.json"
FLUSH_SECONDS = 10
"""Well below the 30 seconds after which TensorBoard reloads by default."""
QUEUED_EVENTS = 100
"""Maximum number of queued events before a step has to wait; far more than the dense start of a run needs."""
_NOT_IN_MARKDOWN = re.compile(r"[&<>`|*~\[\]\\]|_(?![^\W_])")
"""Characters that markdown or HTML interprets. An underscore before a letter is harmless, and common in names."""


class TensorBoardView:
    """Writes a run where `tensorboard --logdir` finds it.

    With `detail="aggregates"`, the curves are the metrics of the whole run and up to `topk` tensors with the largest
    gradients, and as many frozen ones. `detail="full"` adds every scoped reading as `family/scope/quantity`, such as
    `gradient/blocks.0.attn.weight/norm`. For 2,000 values this takes about 2 ms on a measured step, plus about 15 ms in
    the writer's thread, where Python computes checksums. `forewarn.views.tracked.Curves` says more.

    Histograms have the format of torch's `add_histogram_raw`, with one bucket per power of two on both sides of zero
    and one for zero. `gradient/histogram` and `weight/histogram` cover all tensors together. `detail="full"` adds one
    per tensor, such as `gradient/blocks.0.attn.weight/histogram`, at about 30 µs each.

    With `detail="full"`, a copy of the run's `run.json` lies beside the events as `forewarn-run.json`, where `forewarn
    import` finds what rules know of the model.

    NaN is not written. Alerts are text, with one tag per rule, such as `alerts/L102-loss-spike`; so are actions and, at
    the end, the `verdict`. The hyper-parameters are in the tab HPARAMS. A resumed run adds an event file to the same
    folder and keeps its tags, which are stored there in `forewarn-topk.json`.
    """

    _is_complete = False
    """Whether NaN, metrics that hardly ever change and empty histograms are written too."""

    def __init__(self, folder: str | Path, *, topk: int = 5, detail: Detail = "aggregates") -> None:
        self._folder = str(folder)
        Curves(topk, detail)  # wrong arguments are an error before anything is created
        self._new_writer = _part("summary.writer.event_file_writer").EventFileWriter
        self._new_event = _part("compat.proto.event_pb2").Event
        self._new_tensor = _part("util.tensor_util").make_tensor_proto
        self._text = _part("plugins.text.metadata").create_summary_metadata("", "")
        self._hparams = _part("plugins.hparams.summary_v2").hparams_pb
        self._files = _part("compat").tf.io.gfile  # as the event writer does: a folder may be on remote storage
        self._files.makedirs(self._folder)  # fail here, not at the first step
        self._writer: Any = None
        self._start: RunStart | None = None
        """The beginning of the run, until its hyper-parameters are written."""
        self._last_step = 0
        self._histograms: list[Distribution] = []
        self._memory = f"{self._folder}/forewarn-topk.json"
        self._copies_facts = detail == "full"
        self._curves = Curves(topk, detail, self._remembered(), complete=self._is_complete)

    def begin(self, start: RunStart) -> None:
        """Keep the hyper-parameters until there is something to write: a run without steps leaves no event file."""
        self._start = start
        if self._copies_facts and (start.path / manifest.NAME).exists():
            with suppress(OSError), self._files.GFile(f"{self._folder}/{FACTS}", "w") as file:
                file.write((start.path / manifest.NAME).read_text())

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        measured = [block.time for block in blocks[:1]] or [part.time for part in self._histograms[:1]]
        event = self._new_event(wall_time=measured[0] if measured else time.time(), step=step)
        add = event.summary.value.add
        num_listed = self._curves.num_listed
        for tag, value in self._curves.scalars(blocks):
            add(tag=tag, simple_value=value)
        if self._curves.num_listed > num_listed:
            self._remember()
        for tag, counts, zeros in self._curves.histograms(self._histograms):
            _fill(add(tag=tag).histo, counts, zeros)
        self._histograms = []
        for tag, text in _texts(changed, taken):
            add(tag=tag, metadata=self._text, tensor=self._new_tensor(text))
        if event.summary.value:
            self._write(event)

    def show_histograms(self, step: int, distributions: Sequence[Distribution]) -> None:
        """Keep the histograms until `show` writes the event of their step."""
        self._histograms = list(distributions)

    def end(self, end: RunEnd) -> None:
        """Write the verdict."""
        if self._writer is not None:
            event = self._new_event(wall_time=time.time(), step=self._last_step)
            event.summary.value.add(tag="verdict", metadata=self._text, tensor=self._new_tensor(_escaped(end.verdict)))
            self._write(event)

    def close(self) -> None:
        """Write queued events and close the file; may be called twice."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _write(self, event: Any) -> None:
        if self._writer is None:  # created late, because only rank 0 shows anything
            self._writer = self._new_writer(self._folder, QUEUED_EVENTS, FLUSH_SECONDS)
        if self._start is not None:
            start, self._start = self._start, None
            summary = self._hparams(hyperparameters(start.info), str(start.path), start.info.started)
            self._writer.add_event(self._new_event(wall_time=time.time(), step=0, summary=summary))
        self._last_step = max(self._last_step, event.step)
        self._writer.add_event(event)

    def _remember(self) -> None:
        with self._files.GFile(self._memory, "w") as file:
            file.write(json.dumps(self._curves.listed))

    def _remembered(self) -> Mapping[str, list[str]]:
        """The tensors that had a tag before a resume; an unreadable file counts as none."""
        if not self._files.exists(self._memory):
            return {}
        try:
            with self._files.GFile(self._memory, "r") as file:
                return {name: [str(scope) for scope in scopes] for name, scopes in json.loads(file.read()).items()}
        except (ValueError, TypeError, AttributeError):
            return {}


def _fill(proto: Any, counts: Counts, zeros: int) -> None:
    """Fill in a TensorBoard histogram: counts by upper bucket edge, and moments.

    The moments assume evenly filled buckets.
    """
    line, edges = buckets(counts, zeros)
    low, high = edges[:-1], edges[1:]
    proto.min, proto.max, proto.num = edges[0], edges[-1], line.sum()
    proto.sum, proto.sum_squares = line @ (low + high) / 2, line @ (low**2 + low * high + high**2) / 3
    proto.bucket_limit.extend(high.tolist())
    proto.bucket.extend(line.tolist())


def _texts(changed: Sequence[Alert], taken: Sequence[Action]) -> Iterator[tuple[str, str]]:
    """Tags and markdown: one tag per rule and one for all actions."""
    for group in grouped(alert for alert in changed if alert.state is not AlertState.PENDING):
        yield tag_of(f"alerts/{group.worst.code}-{group.worst.name}"), _markdown(group)
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
    """A module of the tensorboard package, which has no types."""
    return optional(f"tensorboard.{name}", "TensorBoardView")
