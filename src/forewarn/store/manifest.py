"""run.json: the fixed facts about a run, and the journal mode of its database."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forewarn.files import read_regular, replacing
from forewarn.store.errors import RunError
from forewarn.store.plain import decoded, encoded
from forewarn.types import RunInfo

NAME = "run.json"

FORMAT = 2
"""The version of the run directory, raised when older readers would misread newer runs.

2: histograms are packed without zlib. Runs of format 1 are read, and become 2 when they are resumed.
"""

_MOST_BYTES = 16 << 20
"""Maximum size of run.json; a model with 100,000 tensors comes close to it."""
_MOST_VALUES = 1_500_000
"""Maximum number of values: a small value takes far more memory than its text."""


@dataclass(frozen=True, slots=True)
class Manifest:
    info: RunInfo
    config: Mapping[str, Any]
    journal: str
    """The journal mode of SQLite: `WAL` on a local disk, `TRUNCATE` on a network file system."""


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
    if _is_too_large(content := text.encode() + b"\n"):
        raise OSError(errno.EFBIG, f"{NAME} would be too large to be read: shorten the hyperparameters or the config")
    with replacing(directory / NAME) as file:
        file.write(content)


def _is_too_large(content: bytes) -> bool:
    return len(content) > _MOST_BYTES or sum(map(content.count, (b",", b"[", b"{"))) > _MOST_VALUES


def read_manifest(directory: Path) -> Manifest:
    path = directory / NAME
    try:
        content = read_regular(path, _MOST_BYTES)
        if _is_too_large(content):
            raise RunError(f"{path} is damaged: it holds more than {_MOST_VALUES} values; restore it from a copy")
        plain = decoded(content.decode("utf-8"))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except RunError:
        raise
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
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error!r:.200}); restore it from a copy") from error
