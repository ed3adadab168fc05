"""A stored run as a pandas DataFrame."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from forewarn.catalogue import Scope
from forewarn.metrics import catalogue_of
from forewarn.store import Run
from forewarn.store.errors import UnknownSeriesError
from forewarn.suggestions import did_you_mean

if TYPE_CHECKING:
    import pandas as pd

OF_THE_RUN = frozenset({Scope.RUN, Scope.MODEL, Scope.MONITOR, Scope.GROUP, Scope.TASK, Scope.TASK_PAIR})
"""Scopes in a frame by default: there are few of these, but thousands of series of single tensors."""

Patterns = str | Sequence[str] | None


def frame(run: Run, metrics: Patterns, scopes: Patterns, long: bool) -> pd.DataFrame:
    """See `Run.to_pandas`."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        if error.name != "pandas":  # pandas is installed, but one of its dependencies is not
            raise
        raise ModuleNotFoundError("Run.to_pandas needs pandas: pip install 'forewarn[pandas]'", name="pandas") from None
    keys = _chosen(run, metrics, scopes)
    series = [run.series(name, scope) for name, scope in keys]
    if long:
        counts = [len(one) for one in series]
        names, places = (np.repeat(np.array(column, dtype=object), counts) for column in _columns(keys))
        steps, times, values = (_joined([getattr(one, field) for one in series]) for field in _FIELDS)
        table = {"step": steps.astype(np.int64), "time": pd.to_datetime(times, unit="s", utc=True, errors="coerce")}
        table |= {"metric": names, "scope": places, "value": values}
        return pd.DataFrame(table).sort_values("step", kind="stable", ignore_index=True)
    steps = np.unique(_joined([one.steps for one in series])).astype(np.int64)
    values = np.full((len(steps), len(series)), np.nan, np.float32)
    for index, one in enumerate(series):
        values[np.searchsorted(steps, one.steps), index] = one.values  # of a step recorded twice, the last value wins
    columns = pd.MultiIndex.from_arrays(_columns(keys), names=["metric", "scope"])
    return pd.DataFrame(values, index=pd.Index(steps, name="step"), columns=columns)


_FIELDS = ("steps", "times", "values")


def _chosen(run: Run, metrics: Patterns, scopes: Patterns) -> list[tuple[str, str]]:
    """The requested series, in the order in which the run first recorded them."""
    catalogue = catalogue_of(run.info)
    names = run.names()
    if metrics is not None:
        names = _matching("metric", metrics, {name: catalogue.label(name) for name in names})
    elif scopes is None:
        declared = {name: catalogue.find(name) for name in names}
        names = [name for name, metric in declared.items() if metric is None or metric.scope in OF_THE_RUN]
    keys = [(name, scope) for name in names for scope in run.scopes(name)]
    if scopes is None:
        return keys
    wanted = set(_matching("scope", scopes, {scope: "" for _, scope in keys}))
    return [(name, scope) for name, scope in keys if scope in wanted]


def _matching(kind: str, patterns: str | Sequence[str], names: dict[str, str]) -> list[str]:
    """The names that equal one of the patterns or, if a pattern is not a name, match it as a regular expression."""
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            is_match = pattern.__eq__ if pattern in names or not pattern else re.compile(pattern).search
        except re.error as error:
            raise ValueError(f"{pattern!r} is neither a {kind} nor a valid regular expression: {error}") from None
        matching = set(filter(is_match, names))
        if not matching:
            hint = did_you_mean(pattern, names) or f"the run has {', '.join(map(repr, list(names)[:3])) or 'none'}"
            raise UnknownSeriesError(f"no {kind} matches {pattern!r}; {hint}")
        chosen |= matching
    return [name for name in names if name in chosen]


def _columns(keys: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    keys = list(keys)
    return [name for name, _ in keys], [scope for _, scope in keys]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0)
