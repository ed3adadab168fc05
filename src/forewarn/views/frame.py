"""A stored run as a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from forewarn.store import Run, StoredSeries
from forewarn.views.chosen_series import Patterns, chosen

if TYPE_CHECKING:
    import pandas as pd

Bounds = tuple[int | None, int | None] | None


def frame(run: Run, metrics: Patterns, scopes: Patterns, steps: Bounds, long: bool) -> pd.DataFrame:
    """See `Run.to_pandas`."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        if error.name != "pandas":  # pandas is installed, but one of its dependencies is not
            raise
        raise ModuleNotFoundError("Run.to_pandas needs pandas: pip install 'forewarn[pandas]'", name="pandas") from None
    keys = chosen(run, metrics, scopes, of_the_run=True)
    series = [_between(run.series(name, scope), steps) for name, scope in keys]
    if long:
        counts = [len(one) for one in series]
        names, places = (np.repeat(np.array(column, dtype=object), counts) for column in _columns(keys))
        numbers, times, values = (_joined([getattr(one, field) for one in series]) for field in _FIELDS)
        table = {"step": numbers.astype(np.int64), "time": pd.to_datetime(times, unit="s", utc=True, errors="coerce")}
        table |= {"metric": names, "scope": places, "value": values}
        return pd.DataFrame(table).sort_values("step", kind="stable", ignore_index=True)
    rows = np.unique(_joined([one.steps for one in series])).astype(np.int64)
    values = np.full((len(rows), len(series)), np.nan, np.float32)
    for index, one in enumerate(series):
        values[np.searchsorted(rows, one.steps), index] = one.values  # of a step recorded twice, the last value wins
    columns = pd.MultiIndex.from_arrays(_columns(keys), names=["metric", "scope"])
    return pd.DataFrame(values, index=pd.Index(rows, name="step"), columns=columns)


_FIELDS = ("steps", "times", "values")


def _between(series: StoredSeries, steps: Bounds) -> StoredSeries:
    """The readings of these steps, the first and the last included."""
    if steps is None:
        return series
    first, last = steps
    wanted = np.ones(len(series), np.bool_) if first is None else series.steps >= first
    wanted = wanted if last is None else wanted & (series.steps <= last)
    return StoredSeries(series.steps[wanted], series.times[wanted], series.values[wanted])


def _columns(keys: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    keys = list(keys)
    return [name for name, _ in keys], [scope for _, scope in keys]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0)
