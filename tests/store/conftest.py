"""Writers that are closed at the end, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forewarn.store import RunWriter
from forewarn.types import RunInfo


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., RunWriter]]:
    """A writer of the run in `tmp_path/run`, or in another path."""
    made: list[RunWriter] = []

    def start(path: Path | None = None, **options: Any) -> RunWriter:
        writer = RunWriter(path or tmp_path / "run", **{"info": RunInfo(), "config": {}, **options})
        made.append(writer)
        return writer

    yield start
    for writer in made:
        writer.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact every few rows and merge every few chunks, so that short runs have chunks of all levels."""
    monkeypatch.setattr("forewarn.store.background.TAIL_ROWS", 5)
    monkeypatch.setattr("forewarn.store.background._PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("forewarn.store.compaction.MOST_ROWS", 5)
    monkeypatch.setattr("forewarn.store.merging._NEIGHBOURS", 3)
    monkeypatch.setattr("forewarn.store.merging.MOST_ROWS", 60)
    monkeypatch.setattr("forewarn.store.chunks._BAND_VALUES", 64)
    monkeypatch.setattr("forewarn.store.replay._WINDOW_ROWS", 13)
