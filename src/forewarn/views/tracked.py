"""What a tracker is told about a run: curves, histograms, hyper-parameters, and alerts in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from forewarn.catalogue import Scope
from forewarn.histograms import in_line, line_edges, over_scopes, used_bins
from forewarn.metrics import find
from forewarn.random_states import random_states_kept
from forewarn.types import (
    Alert,
    AlertState,
    Block,
    Counts,
    Distribution,
    FrozenCause,
    RunInfo,
    Severity,
    Values,
    spelled_out,
)
from forewarn.views.wording import AlertGroup, advice, grouped, literal, short, thing_to_do

TOPK_GRADIENTS, TOPK_FROZEN = "monitor/topk_grad", "monitor/topk_frozen"

Detail = Literal["aggregates", "full"]

MOST_PLACES = 20
"""Maximum number of places that one alert lists; the rest are counted."""
MOST_GROUPS = 8
"""Maximum number of optimizer groups whose differing settings are listed."""
LEAD = 2.0
"""A tensor gets a reserved tag if its gradient is this many times larger than any with a tag."""

_LEFT_OUT = {"update/optimizer_steps", "gradient/residual_norm"}
"""Almost always exactly 1 and 0, and alerts report any exception. `update/skipped` and `monitor/overhead_share` stay:
people look at how often a scaler skips a step and what the monitor costs."""

_NOT_IN_A_TAG = re.compile(r"[^\w.\-]")
"""As in torch's SummaryWriter, except for the slash: in a tensor's name it would start another level."""


class Curves:
    """Which readings become curves and histograms, and under which tags.

    With `detail="aggregates"`, the curves are the metrics of the whole run (loss and its average, learning rate, global
    norms, speed, values you logged without a scope, aggregates over tensors) and two short lists:

    - `monitor/topk_grad/{tensor}`: the gradient norm of up to `topk` tensors. Half of the tags, rounded up, go to the
      largest gradients at the first measured step. The rest are reserved for tensors whose gradient becomes twice as
      large as any with a tag, so a tensor that explodes at step 50,000 still gets its curve.
    - `monitor/topk_frozen/{tensor}`: the update ratio of up to `topk` frozen weights. The first to freeze get the tags;
      of those that freeze together, the ones that move least. Weights frozen on purpose do not count.

    A tensor keeps its tag and is written at every measured step, so curves have no gaps and a run has at most `topk`
    tags of each kind. `detail="full"` adds every scoped reading as `family/scope/quantity`, such as
    `gradient/blocks.0.attn.weight/norm`. NaN is left out.
    """

    def __init__(
        self,
        topk: int,
        detail: Detail,
        listed: Mapping[str, Sequence[str]] | None = None,
        *,
        complete: bool = False,
    ) -> None:
        """`listed`: the tensors that had a tag before a resume, by list. `complete`: leave nothing out."""
        if topk < 0:
            raise ValueError(f"topk must be the number of tensors, at least 0, not {topk}")
        if detail not in ("aggregates", "full"):
            raise ValueError(f"detail must be 'aggregates' or 'full', not {detail!r}")
        listed = listed or {}
        self._full = detail == "full"
        self._complete = complete
        self._tags = _Tags(full=self._full, left_out=set() if complete else _LEFT_OUT)
        self._gradients = _Picks(topk, topk // 2, listed.get(TOPK_GRADIENTS, []))
        self._frozen = _Picks(topk, 0, listed.get(TOPK_FROZEN, []))

    @property
    def listed(self) -> dict[str, list[str]]:
        """The tensors with a tag, by list."""
        return {TOPK_GRADIENTS: list(self._gradients.scopes), TOPK_FROZEN: list(self._frozen.scopes)}

    @property
    def num_listed(self) -> int:
        return len(self._gradients.scopes) + len(self._frozen.scopes)

    def scalars(self, blocks: Iterable[Block]) -> Iterator[tuple[str, float]]:
        """Tags and values of one step; the lists of tensors may grow at it."""
        measured = {}
        for block in blocks:
            measured[block.name] = block
            tags = self._tags.of(block)
            if tags:
                for tag, value in zip(tags, block.values.tolist(), strict=True):
                    if tag and (value == value or self._complete):
                        yield tag, value
        for tag, value in self._topk(measured):
            if value == value:
                yield tag, value

    def histograms(self, distributions: Iterable[Distribution]) -> Iterator[tuple[str, Counts, int]]:
        """Tags, counts and zeros of all tensors together and, in full detail, of each non-empty tensor."""
        for distribution in distributions:
            together = [] if self._complete else [over_scopes(distribution)]
            for part in [*together, *([distribution] if self._full else [])]:
                for scope, counts, zeros in zip(part.scopes, part.counts, part.zeros.tolist(), strict=True):
                    if zeros or counts.any() or self._complete:
                        yield self._tags.one(part.name, scope), counts, zeros

    def _topk(self, measured: Mapping[str, Block]) -> Iterator[tuple[str, float]]:
        """Tags and values of the tensors in both top-k lists."""
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


class _Tags:
    """Unique tags of readings, each created once."""

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
            tag = tag_of(name, scope)
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


def tag_of(name: str, scope: str = "") -> str:
    """`family/scope/quantity`, so that trackers group by layer; the top-k lists use `name/scope`."""
    name = "/".join(_NOT_IN_A_TAG.sub("_", part) for part in name.split("/"))
    if not scope:
        return name
    scope = _NOT_IN_A_TAG.sub("_", scope)
    return f"{name}/{scope}" if name in (TOPK_GRADIENTS, TOPK_FROZEN) else spelled_out(name, scope)


def buckets(counts: Counts, zeros: int) -> tuple[Counts, NDArray[np.float64]]:
    """A histogram as numpy has it, from the first to the last value: counts, and one edge more."""
    bins = used_bins(counts[None])
    line, edges = in_line(counts[None, :, bins], np.array([zeros]))[0], line_edges(bins)
    if bins.start == bins.stop:  # only zeros: put them in a bucket with an edge on either side
        edges = np.array([-0.5, 0.5])
    first, last = np.flatnonzero(line)[[0, -1]].tolist()
    return line[first : last + 1], edges[first : last + 2]


def hyperparameters(info: RunInfo) -> dict[str, float | str]:
    """What the user declared, the model, and the settings of the optimizer, under names without slashes.

    A setting that differs between parameter groups has the number of its group: `lr.0`, `lr.1`.
    """
    settings: dict[str, float | str] = {"model": info.model, "num_parameters": info.num_parameters}
    settings |= {"optimizer": ", ".join(info.optimizers)} if info.optimizers else {}
    for name in dict.fromkeys(name for group in info.groups for name in group):
        values = [group.get(name) for group in info.groups]
        if len(set(values)) == 1:
            settings[name] = info.groups[0][name]
        else:
            settings |= {
                f"{name}.{group}": value for group, value in enumerate(values[:MOST_GROUPS]) if value is not None
            }
    declared = {
        name: value if isinstance(value, int | float | str) else str(value)
        for name, value in info.hyperparameters.items()
    }
    return {_NOT_IN_A_TAG.sub("_", name): value for name, value in (settings | declared).items()}


@dataclass(frozen=True, slots=True)
class Announcement:
    """All alerts of one rule that fired, got worse or were resolved at one step."""

    step: int
    tag: str
    """`L102-loss-spike`."""
    severity: Severity
    is_firing: bool
    title: str
    """`L102 loss-spike: Training loss above its usual level`."""
    lines: tuple[str, ...]
    """Its numbers, where, what to do, and where to read more."""

    @classmethod
    def of(cls, group: AlertGroup, step: int) -> Self:
        worst = group.worst
        label = f"{worst.code} {worst.name}"
        if not group.is_firing:
            place = f" ({group.place})" if group.place else ""
            return cls(
                step, alert_tag(worst), Severity.INFO, False, f"{label}: resolved", (f"{group.headline}{place}",)
            )
        places = [short(alert.place or alert.scope) for alert in group.alerts if alert.scope]
        more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
        lines = [
            literal(worst.numbers),
            f"where: {', '.join(places[:MOST_PLACES])}{more}" if places else "",
            *(f"do: {advice(remedy).plain}" for remedy in worst.remedies[:1]),
            f"why: forewarn explain {worst.name}",
        ]
        return cls(
            step, alert_tag(worst), worst.severity, True, f"{label}: {group.headline}", tuple(filter(None, lines))
        )


def announcements(step: int, changed: Iterable[Alert]) -> list[Announcement]:
    """The news of one step: one announcement per rule, in which no alert is still pending."""
    told = [alert for alert in changed if alert.state is not AlertState.PENDING]
    return [Announcement.of(group, step) for group in grouped(told)]


class Standing:
    """All alerts of a run so far, as one line per rule: `critical: The training loss is NaN · since step 12`."""

    def __init__(self) -> None:
        self._alerts: dict[tuple[str, str], Alert] = {}

    def lines(self, changed: Iterable[Alert]) -> dict[str, str]:
        """The lines of the rules whose alerts have changed, by tag."""
        told = [alert for alert in changed if alert.state is not AlertState.PENDING]
        self._alerts |= {alert.identity: alert for alert in told}
        codes = {alert.code for alert in told}
        groups = grouped(alert for alert in self._alerts.values() if alert.code in codes)
        return {alert_tag(group.worst): _standing(group) for group in groups}


def alert_tag(alert: Alert) -> str:
    return tag_of(f"{alert.code}-{alert.name}")


def _standing(group: AlertGroup) -> str:
    worst = group.worst
    if not group.is_firing:
        return f"resolved: {group.headline} · last seen at step {max(alert.last for alert in group.alerts)}"
    firing = AlertGroup(tuple(alert for alert in group.alerts if alert.state is AlertState.FIRING))
    since = min(alert.since for alert in firing.alerts)
    words = [
        group.headline,
        firing.place,
        f"since step {since}",
        *(thing_to_do(remedy) for remedy in worst.remedies[:1]),
    ]
    return f"{worst.severity}: {' · '.join(filter(None, words))}"


def optional(module: str, view: str) -> Any:
    """A module of an optional package, which has the name of its extra. Importing it draws no random numbers."""
    package = module.partition(".")[0]
    try:
        with random_states_kept():
            import_module(package)
            return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(f"{view} needs {package}: pip install 'forewarn[{package}]'", name=package) from None
