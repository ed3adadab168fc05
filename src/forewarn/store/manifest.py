"""run.json: the fixed facts about a run, and how its database is journalled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forewarn.store.errors import RunError
from forewarn.store.plain import decoded, encoded
from forewarn.types import RunInfo

NAME = "run.json"

FORMAT = 2
"""The version of the run directory; raised when an older reader would misread a newer run.

2: histograms are packed without zlib. Runs of format 1 are read, and become 2 when they are resumed.
"""


@dataclass(frozen=True, slots=True)
class Manifest:
    info: RunInfo
    config: Mapping[str, Any]
    journal: str
    """How SQLite journals: `WAL` on a local disk, `TRUNCATE` on a network file system."""


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write run.json atomically, so that no reader ever sees half of it."""
    text = encoded(
        {
            "format": FORMAT,
            "journal": manifest.journal,
            "facts": manifest.info.to_json(enums=int),
            "config": manifest.config,
        }
    )
    draft = directory / f"{NAME}.{os.getpid()}.draft"
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(directory / NAME)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_manifest(directory: Path) -> Manifest:
    path = directory / NAME
    try:
        plain = decoded(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is not JSON ({error}); restore it from a copy") from error
    if not isinstance(plain, dict) or not isinstance(plain.get("format"), int):
        raise RunError(f"{path} was not written by forewarn: it names no format version")
    if plain["format"] > FORMAT:
        raise RunError(
            f"{path} has format {plain['format']}, and this forewarn reads up to {FORMAT}: "
            "it was written by a newer version, so upgrade with pip install -U forewarn"
        )
    try:
        info = RunInfo.from_json(plain["facts"])
        return Manifest(info, dict(plain["config"]), str(plain["journal"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error!r}); restore it from a copy") from error
