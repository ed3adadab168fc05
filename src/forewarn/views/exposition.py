"""Runs in the text format that Prometheus scrapes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forewarn import __version__
from forewarn.catalogue import Catalogue, Metric, Scope
from forewarn.metrics import BUILT_IN
from forewarn.standing import RUNNING, STALLED
from forewarn.store.newest import Newest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = {
    Scope.GROUP: "group", Scope.OPTIMIZER: "optimizer", Scope.TASK: "task", Scope.TASK_PAIR: "tasks",
    Scope.PHASE: "phase", Scope.RANK: "rank", Scope.PARAMETER: "parameter",
}  # fmt: skip
"""The label that holds a scope, by what the scope is."""
OWN = {
    "build_info": "The version of forewarn; always 1.",
    "runs": "Number of runs in the folder, by state.",
    "run_state": "The state of a run: 1 for the state that it is in.",
    "run_step": "The newest step of a run.",
    "run_updated_timestamp_seconds": "When a run last recorded something, in seconds since the epoch.",
    "alert": "An open alert; always 1.",
    "alerts_open": "Number of open alerts of a run, by severity.",
}
"""What is exported besides metrics of the catalogue: names without the prefix, and their meaning."""
LIVE = (RUNNING, STALLED)
RECENT_SECONDS = 3600.0
"""How long the state of a run is exported after its end."""

_RESERVED = re.compile(r"_(count|sum|bucket|total)$")
"""Endings that have a meaning in Prometheus, which these gauges do not have."""
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@dataclass(frozen=True, slots=True)
class Exported:
    """What is exported of one run."""

    run: str
    state: str
    step: int | None
    updated: float
    newest: Newest = field(default_factory=Newest)


def exported_name(metric: str) -> str:
    """`forewarn_speed_step_seconds` for `speed/step_seconds`."""
    return f"forewarn_{_RESERVED.sub('', _NOT_IN_A_NAME.sub('_', metric))}"


def exposition(
    runs: Sequence[Exported], states: Mapping[str, int] | None = None, catalogue: Catalogue = BUILT_IN
) -> str:
    """All runs as gauges, one family after the other. `states` are the numbers of runs in a folder by state."""
    families: dict[str, list[str]] = {}
    meanings = {f"forewarn_{name}": meaning for name, meaning in OWN.items()}
    owners: dict[str, str] = dict.fromkeys(meanings, "")

    def add(family: str, value: float, labels: Mapping[str, str]) -> None:
        families.setdefault(family, []).append(f"{family}{_in_braces(labels)} {_number(value)}\n")

    add("forewarn_build_info", 1, {"version": __version__})
    for state, count in sorted((states or {}).items()):
        add("forewarn_runs", count, {"state": state})
    for one in runs:
        add("forewarn_run_state", 1, {"run": one.run, "state": one.state})
        add("forewarn_run_updated_timestamp_seconds", one.updated, {"run": one.run})
        if one.step is not None:
            add("forewarn_run_step", one.step, {"run": one.run})
        for severity, count in one.newest.num_open.items():
            add("forewarn_alerts_open", count, {"run": one.run, "severity": severity})
        for alert in dict.fromkeys(one.newest.alerts):  # a long scope may have been cut
            labels = {"code": alert.code, "name": alert.name, "scope": alert.scope, "severity": str(alert.severity)}
            add("forewarn_alert", 1, {"run": one.run, **labels})
        for name, values in one.newest.readings.items():
            family = exported_name(name)
            if owners.setdefault(family, name) != name:  # two names that differ only in replaced characters
                continue
            metric = catalogue.find(name)
            meanings[family] = _meaning(metric, name)
            label = LABELS.get(metric.scope, "scope") if metric else "scope"
            for scope, value in values.items():
                add(family, value, {"run": one.run, label: scope} if scope else {"run": one.run})
    return "".join(
        f"# HELP {family} {_escaped_help(meanings[family])}\n# TYPE {family} gauge\n{''.join(lines)}"
        for family, lines in families.items()
    )


def _meaning(metric: Metric | None, name: str) -> str:
    if metric is None or metric.name != name:
        return f"{name}: a value that the training recorded."
    has_unit = metric.unit not in ("", "count", "flag", "code")
    return f"{metric.meaning} Unit: {metric.unit}." if has_unit else metric.meaning


def _in_braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.encode("utf-8", "replace").decode().translate(_ESCAPES)


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
