"""Which metric of the catalogue a name in another tool's log stands for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from forewarn.catalogue import TRACKER_PREFIX, Scope
from forewarn.importing.log import Log, LogError
from forewarn.metrics import BUILT_IN
from forewarn.suggestions import did_you_mean
from forewarn.types import is_metric_name

LOSS, LR, NORM, EVALUATION = "train/loss", "train/lr", "gradient/global_norm", "eval/loss"
EPOCH_LOSS, STEP_TIME, TOKENS = "evaluation/train_loss", "speed/step_seconds", "speed/tokens_per_second"

_TRAIN = ("", "train/", "train_", "training/", "training_", "trainer/", "optim/", "optimizer/")
_HELD_OUT = ("eval", "val", "valid", "validation", "dev", "evaluation")
_HELD_OUT_NAME = re.compile(rf"(?:^|[/_ ])(?:{'|'.join(_HELD_OUT)}|test)(?:$|[/_ ])")
_LOSSES = (
    "train/loss", "train_loss_step", "train/loss_step", "loss_step", "train_step_loss", "train/step_loss", "step_loss",
    "train_loss", "training_loss", "training/loss", "loss/train", "loss_train", "loss_metrics/global_avg_loss",
    "train/crossentropyloss", "train/ce_loss", "train/lm_loss", "lm_loss", "lm_loss_training/lm_loss", "loss",
    "total_loss", "train/total_loss", "batch_loss", "train/batch_loss", "nll_loss", "train/nll_loss",
)  # fmt: skip
_ALIASES: dict[str, tuple[str, ...]] = {
    LOSS: _LOSSES,
    EVALUATION: tuple(
        name.format(part)
        for name in (
            "{}/loss", "{}_loss", "loss/{}", "loss_{}", "{}_loss_epoch", "{}/loss_epoch", "{}_lm_loss_value",
            "lm_loss_{}/lm_loss", "{}_metrics/loss", "{}_metrics/global_avg_loss", "{}/crossentropyloss", "{}/lm_loss",
            "{}/total_loss", "{}_total_loss", "{}",
        )
        for part in _HELD_OUT
        if name != "{}" or part in ("val_loss",)
    ),
    NORM: (
        *(prefix + name for prefix in _TRAIN for name in (
            "grad_norm", "gradient_norm", "gradnorm", "total_grad_norm", "grad_norm_total", "global_grad_norm",
            "grad_norm/total", "grad_norm/global",
        )), "grad/norm", "grads/norm", "grad_2_0_norm_total", "grad_2_norm_total", "norm",
    ),
    LR: tuple(prefix + name for prefix in _TRAIN for name in ("learning_rate", "lr")),
    EPOCH_LOSS: ("train_loss_epoch", "train/loss_epoch", "train/epoch_loss", "train_epoch_loss", "epoch_loss"),
    STEP_TIME: (
        "step_time", "time_per_step", "iter_time", "time_per_iteration", "elapsed_time_per_iteration", "step_time_s",
        "time_metrics/end_to_end(s)", "train/step_time", "seconds_per_step", "step_time_ms",
    ),
    TOKENS: ("tokens_per_second", "tokens_per_sec", "tok/s", "throughput/tokens_per_second", "train/tokens_per_second"),
}  # fmt: skip
"""Normalized names by metric, the surest first."""
_BY_NAME = {name: (metric, rank) for metric, names in _ALIASES.items() for rank, name in enumerate(names)}

_LR_OF_GROUP = re.compile(r"(?:\w+/)?(?:lr|learning_rate)[-/](.+)")
_NO_RATE = ("momentum", "weight_decay", "weight-decay", "betas")
_PER_TENSOR = (
    (re.compile(r"grad(?:ient)?s?_2(?:\.0)?_norm/(.+)"), "gradient/norm"),
    (re.compile(r"(?:grad(?:ient)?s?|grad(?:ient)?_norms?)/(.+?\..+?)(?:[./]norm)?"), "gradient/norm"),
    (re.compile(r"(?:weight|param(?:eter)?)s?_norms?/(.+\..+)"), "weight/norm"),
    (re.compile(r"(?:weight|param(?:eter)?)s?/(.+\..+)[./]norm"), "weight/norm"),
    (re.compile(r"updates?/(.+)/ratio"), "update/ratio"),
)
"""Names with the name of a tensor in them, as in Lightning's `grad_norm`, OLMo and `wandb.watch`."""
_SCALES = {"ms": 1e-3}
_NOT_TO_KEEP = re.compile(r"(train/)?epochs?|monitor/topk_\w+/.+")
"""Names that are used, or of which there is another copy."""
_ILLEGAL = re.compile(r"[^A-Za-z0-9_.\-/]+")
MOST_SUGGESTED = 5


class Place(NamedTuple):
    """What a name stands for."""

    metric: str
    scope: str = ""
    factor: float = 1.0


@dataclass(slots=True)
class Naming:
    """What each name of a log stands for, and what a person should know about that."""

    places: dict[str, Place] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def taken(self) -> dict[Place, str]:
        """The name behind each place, whatever its factor."""
        return {place._replace(factor=1.0): name for name, place in self.places.items()}


def naming_of(log: Log, given: Mapping[str, str]) -> Naming:
    """What the names of this log stand for; `given` are the user's own answers, by name.

    Of several names for one metric, forewarn's own is taken, or the one with the most readings, then the surest. The
    others, and all names that are not known, are kept as the user's own metrics. Raises LogError if an answer cannot be
    used.
    """
    naming = Naming({name: _given(log, name, metric) for name, metric in given.items()})
    taken = naming.taken()
    ranked = sorted(
        ((name, *found_place) for name in log.tracks if name not in given and (found_place := _recognized(name, log))),
        key=lambda entry: (entry[2] > 0, not entry[0].startswith(TRACKER_PREFIX), -len(log.tracks[entry[0]]), entry[2]),
    )
    losers: dict[str, list[str]] = {}
    for name, place, _ in ranked:
        identity = place._replace(factor=1.0)
        if identity in taken:
            losers.setdefault(taken[identity], []).append(name)
        else:
            taken[identity] = name
            naming.places[name] = place
    for winner, names in losers.items():
        metric, enough = naming.places[winner].metric, len(log.tracks[winner]) / 2
        close = [name for name in names if len(log.tracks[name]) >= enough]
        if close and not winner.startswith(TRACKER_PREFIX):
            naming.notes.append(
                f"{metric} is {winner!r}; {_some(close)} would fit too: choose with --map NAME={metric}"
            )
    used = set(taken)
    for name in log.tracks:
        if name not in naming.places and not _NOT_TO_KEEP.fullmatch(name.lower().removeprefix(TRACKER_PREFIX)):
            own = Place(_own_name(name, is_loser=any(name in names for names in losers.values())))
            while own in used:
                own = Place(f"{own.metric}_")
            used.add(own)
            naming.places[name] = own
    _settle_groups(naming)
    if Place(LOSS) not in used:
        naming.notes.append(_no_loss(log))
    return naming


def _given(log: Log, name: str, metric: str) -> Place:
    """The place that the user names for a name."""
    if name not in log.tracks:
        hint = did_you_mean(name, list(log.tracks)) or f"it has {_some(list(log.tracks))}"
        raise LogError(f"it has no {name!r}, which --map names; {hint}")
    place = _catalogued(metric)
    if place is not None:
        return place._replace(factor=_scale(name, place.metric, log))
    if not is_metric_name(metric) or BUILT_IN.is_reserved(metric):
        known_names = [one.name for one in BUILT_IN.metrics if "*" not in one.name]
        hint = did_you_mean(metric, known_names) or "docs/metrics.md lists them, and own names are my/quantity"
        raise LogError(f"--map {name}={metric}: {metric!r} is no name of a metric; {hint}")
    return Place(metric)


def _recognized(name: str, log: Log) -> tuple[Place, int] | None:
    """What a name stands for and how unsure that is, from 0; None if it is not known."""
    name = name.removeprefix(TRACKER_PREFIX)
    if place := _catalogued(name):
        return place, 0
    plain = re.sub(r"[\s\-.]+", "_", name.strip().lower())
    if plain in _BY_NAME:
        metric, rank = _BY_NAME[plain]
        return Place(metric, "0" if metric == LR else "", _scale(name, metric, log)), rank + 1
    if plain == "time" and log.units.get(name) in ("ms", "s"):
        return Place(STEP_TIME, "", _scale(name, STEP_TIME, log)), len(_ALIASES[STEP_TIME]) + 1
    if (group := _LR_OF_GROUP.fullmatch(name)) and not group[1].endswith(_NO_RATE):
        return Place(LR, group[1]), 1
    for pattern, metric in _PER_TENSOR:
        if match := pattern.fullmatch(name):
            return Place(metric, match[1]), 1
    return None


def _catalogued(name: str) -> Place | None:
    """The place of a name as forewarn itself writes it: `family/quantity` or `family/scope/quantity`."""
    metric = BUILT_IN.find(name)
    if metric is not None and metric.name == name:
        if metric.scope is Scope.GROUP:
            return Place(name, "0")
        return Place(name) if _is_of_the_whole(metric.scope) else None
    family, _, rest = name.partition("/")
    scope, _, quantity = rest.rpartition("/")
    metric = BUILT_IN.find(f"{family}/{quantity}")
    if scope and metric is not None and metric.name == f"{family}/{quantity}" and not _is_of_the_whole(metric.scope):
        return Place(metric.name, scope)
    return None


def _is_of_the_whole(scope: Scope) -> bool:
    return scope in (Scope.RUN, Scope.MODEL, Scope.MONITOR)


def _scale(name: str, metric: str, log: Log) -> float:
    unit = log.units.get(name, "ms" if name.endswith(("_ms", "(ms)")) else "")
    return _SCALES.get(unit, 1.0) if metric == STEP_TIME else 1.0


def _own_name(name: str, *, is_loser: bool) -> str:
    """The name under which a metric of the user is kept: its own if that is legal and free."""
    if is_metric_name(name) and not BUILT_IN.is_reserved(name):
        return name
    legal = _ILLEGAL.sub("_", name.strip()).strip("/_") or "unnamed"
    head, _, rest = legal.partition("_")
    family = "eval" if head in _HELD_OUT else "train" if head == "train" else ""
    if family and rest and not is_loser and not BUILT_IN.is_reserved(own := f"{family}/{rest}") and is_metric_name(own):
        return own
    own = f"logged/{legal.strip('/')}"
    return own if is_metric_name(own) else f"logged/{_ILLEGAL.sub('_', legal.replace('/', '_'))}"


def _settle_groups(naming: Naming) -> None:
    """Call a single learning rate group 0, as in a run that was watched."""
    groups = [name for name, place in naming.places.items() if place.metric == LR]
    if len(groups) == 1:
        naming.places[groups[0]] = naming.places[groups[0]]._replace(scope="0")


def _no_loss(log: Log) -> str:
    losses = sorted((name for name in log.tracks if "loss" in name.lower()), key=len)
    candidates = [name for name in losses if not _HELD_OUT_NAME.search(name.lower())]
    if not candidates:
        return f"no training loss was found among {_some(list(log.tracks))}: name it with --map NAME={LOSS}"
    example = shlex.quote(f"{candidates[0]}={LOSS}")
    return f"no name is certainly the training loss; {_some(candidates)} may be: --map {example}"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    words = ", ".join(repr(name[:60]) for name in names[:MOST_SUGGESTED])
    return words + (f" and {len(names) - MOST_SUGGESTED} more" if len(names) > MOST_SUGGESTED else "")
