"""Finding the runs below a directory."""

from __future__ import annotations

import os
from pathlib import Path

from forewarn.store import database, manifest

_DEPTH = 4
"""How many directories deep to search: enough for runs, but not a whole home directory."""


def list_runs(root: str | Path, depth: int = _DEPTH) -> list[Path]:
    """Run directories at or below `root`, most recently written first; empty if there is no such directory."""
    runs = _runs_below(Path(root), depth, {})
    return [path for _, path in sorted(runs, key=lambda run: run[0], reverse=True)]


def _runs_below(directory: Path, depth: int, visited: dict[tuple[int, int], int]) -> list[tuple[float, Path]]:
    try:
        status = os.stat(directory)
        identity = status.st_dev, status.st_ino
        if visited.get(identity, -1) >= depth:  # links may lead in circles
            return []
        visited[identity] = depth
        entries = {entry.name: entry for entry in os.scandir(directory)}
    except OSError:  # deleted meanwhile, or not readable
        return []
    if manifest.NAME in entries and database.NAME in entries:
        return [(_written(entries), directory)]
    if depth == 0:
        return []
    below = [Path(entry.path) for name, entry in entries.items() if not name.startswith(".") and _is_directory(entry)]
    return [run for path in below for run in _runs_below(path, depth - 1, visited)]


def _written(entries: dict[str, os.DirEntry[str]]) -> float:
    newest = 0.0
    for name in (manifest.NAME, database.NAME, f"{database.NAME}-wal"):
        try:
            newest = max(newest, entries[name].stat().st_mtime)
        except (KeyError, OSError):  # the log comes and goes
            continue
    return newest


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
