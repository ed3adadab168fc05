"""Which series of a run somebody asked for, by names, globs or regular expressions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from forewarn.catalogue import Scope
from forewarn.metrics import catalogue_of
from forewarn.store import Run
from forewarn.store.errors import UnknownSeriesError
from forewarn.suggestions import did_you_mean

OF_THE_RUN = frozenset({Scope.RUN, Scope.MODEL, Scope.MONITOR, Scope.GROUP, Scope.TASK, Scope.TASK_PAIR})
"""Scopes in a frame by default: there are few of these, but thousands of series of single tensors."""

Patterns = str | Sequence[str] | None


def chosen(run: Run, metrics: Patterns, scopes: Patterns, *, of_the_run: bool = False) -> list[tuple[str, str]]:
    """The requested series, in the order in which the run first recorded them.

    Without patterns these are all, or with `of_the_run` those of the run as a whole.
    """
    catalogue = catalogue_of(run.info)
    names = run.names()
    if metrics is not None:
        names = _matching("metric", metrics, {name: catalogue.label(name) for name in names})
    elif scopes is None and of_the_run:
        declared = {name: catalogue.find(name) for name in names}
        names = [name for name, metric in declared.items() if metric is None or metric.scope in OF_THE_RUN]
    keys = [(name, scope) for name in names for scope in run.scopes(name)]
    if scopes is None:
        return keys
    wanted = set(_matching("scope", scopes, {scope: "" for _, scope in keys}))
    return [(name, scope) for name, scope in keys if scope in wanted]


def _matching(kind: str, patterns: str | Sequence[str], names: dict[str, str]) -> list[str]:
    """The names that one of the patterns chooses: as a name, else as a glob, else as a regular expression."""
    wanted: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if pattern in names or not pattern:
            matching = {name for name in names if name == pattern}
        else:
            matching = {name for name in names if fnmatchcase(name, pattern)} or _searched(kind, pattern, names)
        if not matching:
            hint = did_you_mean(pattern, names) or f"the run has {', '.join(map(repr, list(names)[:3])) or 'none'}"
            raise UnknownSeriesError(f"no {kind} matches {pattern!r}; {hint}")
        wanted |= matching
    return [name for name in names if name in wanted]


def _searched(kind: str, pattern: str, names: dict[str, str]) -> set[str]:
    try:
        return set(filter(re.compile(pattern).search, names))
    except re.error as error:
        raise ValueError(f"{pattern!r} is neither a {kind} nor a valid regular expression: {error}") from None
