"""Snapshots of a training run: written atomically, and read without executing code."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch

from forewarn.files import replacing
from forewarn.measure.portable_state import to_tensors

_log = logging.getLogger("forewarn")

_NAME = re.compile(r"step-(\d{8})\.pt")


class Snapshots:
    """The snapshots of one run in a folder; older ones are deleted once a newer one is safe."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def save(self, step: int, state: dict[str, Any]) -> Path | None:
        """Write a snapshot; None if writing fails, in which case all older snapshots are still there."""
        target = self.folder / f"step-{step:08d}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(target) as file:
                torch.save(to_tensors(state), file)
        except (OSError, RuntimeError) as error:  # torch turns disk errors into a RuntimeError
            _log.error("the snapshot of step %d could not be saved (%s); training goes on", step, error)
            return None
        for old in self.all()[: -self._keep]:
            old.unlink(missing_ok=True)
        return target

    def all(self) -> list[Path]:
        """Every snapshot, oldest first."""
        return sorted(path for path in self.folder.glob("step-*.pt") if _NAME.fullmatch(path.name))

    def newest(self) -> dict[str, Any] | None:
        """The contents of the newest readable snapshot; None if there is none. Damaged ones are skipped."""
        for path in reversed(self.all()):
            try:
                return load_snapshot(path)
            except ValueError as error:
                _log.error("%s", error)
        return None

    def delete(self) -> None:
        """Delete all of them."""
        for path in self.all():
            path.unlink(missing_ok=True)


def load_snapshot(path: Path) -> dict[str, Any]:
    """The contents of a snapshot. Only tensors and plain values are read, so a file cannot run code."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, pickle and zipfile raise many kinds for a damaged file
        raise ValueError(f"{path} is not a readable snapshot ({type(error).__name__}: {error})") from error
    if not isinstance(state, dict) or "step" not in state:
        raise ValueError(f"{path} is not a snapshot of a training run")
    return state
