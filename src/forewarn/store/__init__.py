"""The run directory: written while a model trains, read live by others."""

from __future__ import annotations

from forewarn.store.errors import ResumedError, RunError
from forewarn.store.histogram_table import StoredHistograms
from forewarn.store.listing import list_runs
from forewarn.store.reader import Run, StoredSeries, open_run
from forewarn.store.records import Change, Event
from forewarn.store.writer import RunWriter

__all__ = [
    "Change",
    "Event",
    "ResumedError",
    "Run",
    "RunError",
    "RunWriter",
    "StoredHistograms",
    "StoredSeries",
    "list_runs",
    "open_run",
]
