"""Answers the page's requests for the data of a run: the server and the report use the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from numpy.typing import NDArray

from forewarn.store import Run
from forewarn.views.page.maps import heat_map, histogram_map, profile
from forewarn.views.page.packing import packed
from forewarn.views.page.reduction import in_order, kept_points

MOST_SERIES = 500
"""Maximum number of series in one request."""
MOST_COLUMNS = 4000
MOST_STEP = 2**32 - 1
"""Steps are sent as uint32."""

Query = Mapping[str, Sequence[str]]


class BadRequestError(ValueError):
    """A request that cannot be answered; its message is for the person who made it."""


def answer(run: Run, request: str) -> bytes:
    """The binary answer to a request such as `/api/map?metric=gradient/norm&columns=400`."""
    parts = urlsplit(request)
    return ANSWERS[parts.path](run, parse_qs(parts.query, keep_blank_values=True))


def series(run: Run, query: Query) -> bytes:
    """Series `name@scope`, each reduced to what `columns` pixels can show; with `times`, in seconds since the first."""
    wanted = query.get("series", [])
    if len(wanted) > MOST_SERIES:
        raise BadRequestError(f"{len(wanted)} series are too many for one request; ask for {MOST_SERIES} at most")
    start, end, columns = _range(query, 1000)
    scopes: dict[str, frozenset[str]] = {}
    names = frozenset(run.names())
    headers: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for number, item in enumerate(wanted):
        name, _, scope = item.partition("@")
        if name not in scopes:
            scopes[name] = frozenset(run.scopes(name)) if name in names else frozenset()
        steps, values, times = np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0)
        if scope in scopes[name]:
            stored = run.series(name, scope)
            times = np.maximum.accumulate(in_order(stored.steps, stored.times)[1])  # a clock may be set back
            steps, values = in_order(stored.steps, stored.values)
        ends = (int(steps[0]), int(steps[-1])) if len(steps) else (None, None)
        selected = slice(
            0 if start is None else int(np.searchsorted(steps, start)),
            None if end is None else int(np.searchsorted(steps, end, side="right")),
        )
        steps, values, times = steps[selected], values[selected], times[selected] - times[:1]
        kept = kept_points(steps, values, columns)
        headers.append(
            {
                "name": name, "scope": scope, "points": len(kept), "reduced": len(kept) < len(steps),
                "first": ends[0], "last": ends[1], "count": len(steps),
            }
        )  # fmt: skip
        arrays[f"steps:{number}"] = np.clip(steps[kept], 0, MOST_STEP)
        arrays[f"values:{number}"] = values[kept]
        if "times" in query:
            arrays[f"times:{number}"] = times[kept].astype(np.float32)
    return packed({"series": headers}, arrays)


def map_of(run: Run, query: Query) -> bytes:
    return heat_map(run, _text(query, "metric"), *_range(query, 400), _number(query, "rows"))


def histograms_of_tensor(run: Run, query: Query) -> bytes:
    return histogram_map(run, _text(query, "metric"), _text(query, "scope"), *_range(query, 120))


def profile_of(run: Run, query: Query) -> bytes:
    step = _number(query, "step")
    return profile(run, _text(query, "metric"), MOST_STEP if step is None else step)


ANSWERS = {
    "/api/series": series,
    "/api/map": map_of,
    "/api/histograms": histograms_of_tensor,
    "/api/profile": profile_of,
}


def _range(query: Query, columns: int) -> tuple[int | None, int | None, int]:
    """The first and last step, and the number of columns."""
    given = _number(query, "columns")
    columns = columns if given is None else given
    if not 1 <= columns <= MOST_COLUMNS:
        raise BadRequestError(f"columns={columns} must be from 1 to {MOST_COLUMNS}")
    return _number(query, "from"), _number(query, "to"), columns


def _number(query: Query, name: str) -> int | None:
    text = query.get(name, [""])[-1]
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadRequestError(f"{name}={text[:40]!r} must be a whole number")
    return int(text)


def _text(query: Query, name: str) -> str:
    if name not in query:
        raise BadRequestError(f"the request needs {name}=…")
    return query[name][-1]
