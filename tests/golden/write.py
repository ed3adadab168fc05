"""Writes every golden text file: `python -m tests.golden.write`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.golden.api import config_keys, public_names
from tests.golden.command_line import HERE, RUNS, helps, rules, said_of
from tests.golden.operations import added_operations
from tests.golden.screens import screens

GROUPS: dict[str, Callable[[Path], dict[str, str]]] = {
    "api.txt": lambda folder: {"api.txt": public_names()},
    "config.txt": lambda folder: {"config.txt": config_keys()},
    "operations.txt": lambda folder: {"operations.txt": added_operations(folder)},
    "help": lambda folder: helps(),
    "rules": lambda folder: rules(),
    "screens": screens,
    **{f"stored/{run}": partial(said_of, run) for run in RUNS},
}
"""By file or folder, what makes the texts in it, by their paths; it may use an empty folder to work in."""


def stored(group: str) -> dict[str, str]:
    """The texts of a group as they are on disk, by their paths."""
    place = HERE / group
    files = [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else [place]
    return {path.relative_to(HERE).as_posix(): path.read_text() for path in files}


if __name__ == "__main__":
    for group, made in GROUPS.items():
        with tempfile.TemporaryDirectory() as folder:
            texts = made(Path(folder))
        shutil.rmtree(HERE / group, ignore_errors=True)
        for name, text in texts.items():
            (HERE / name).parent.mkdir(parents=True, exist_ok=True)
            (HERE / name).write_text(text)
