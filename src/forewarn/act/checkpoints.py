"""The last healthy checkpoints of a run, in memory or on disk, to which it can return."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forewarn.act.training_state import Parts, TrainingState, copied
from forewarn.files import replacing
from forewarn.policy import RollBack

_log = logging.getLogger("forewarn")

FOLDER = "checkpoints"
_LARGE = ("tensors", "optimizers")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run after some steps."""

    step: int
    """Number of completed steps."""
    monitor: dict[str, Any]
    training: TrainingState
    file: Path | None = None
    """What holds the tensors, if they are on disk."""

    def load(self) -> TrainingState:
        """The state. Only tensors and plain values are read, so a file cannot run code."""
        if self.file is None:
            return self.training
        return TrainingState(self.training.state | torch.load(self.file, map_location="cpu", weights_only=True))

    def delete(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)


class Checkpoints:
    """A few checkpoints, the newest last. Each rank keeps those of its own part of the run."""

    def __init__(self, settings: RollBack, rank: int) -> None:
        self._settings = settings
        self._rank = rank
        self._kept: list[Checkpoint] = []
        self.last_step = -1
        """Number of completed steps at the last attempt to take one."""

    @property
    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self._kept]

    def take(self, step: int, monitor: dict[str, Any], parts: Parts, directory: Path | None) -> None:
        """Keep a checkpoint; if that fails, the earlier ones are still there."""
        self.last_step = step
        try:
            training = TrainingState.capture(parts)
            file = self._written(step, training, directory) if self._settings.where == "disk" else None
        except (OSError, RuntimeError, MemoryError) as error:  # torch turns disk errors into a RuntimeError
            _log.warning("the checkpoint of step %d could not be kept (%s); training goes on", step, error)
            return
        self._kept = [checkpoint for checkpoint in self._kept if checkpoint.step < step]
        self._kept.append(Checkpoint(step, copied(monitor), training, file))
        while len(self._kept) > self._settings.keep:
            self._kept.pop(0).delete()

    def _written(self, step: int, training: TrainingState, directory: Path | None) -> Path:
        """The file to which the large parts of the state were moved."""
        if directory is None:
            raise OSError("the run has no directory")
        target = directory / FOLDER / f"step-{step:08d}-rank-{self._rank}.pt"
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            torch.save({name: training.state[name] for name in _LARGE}, file)
        for name in _LARGE:
            del training.state[name]
        return target

    def before(self, began: int) -> int | None:
        """The newest checkpoint from before a step, else the oldest one; None if there is none."""
        earlier = [step for step in self.steps if step <= began]
        return earlier[-1] if earlier else min(self.steps, default=None)

    def get(self, step: int) -> Checkpoint | None:
        return next((checkpoint for checkpoint in self._kept if checkpoint.step == step), None)

    def returned_to(self, step: int) -> None:
        """Drop the checkpoints of steps that are given up."""
        self.last_step = max((one.step for one in self._kept if one.step <= step), default=-1)
        self.drop([checkpoint for checkpoint in self._kept if checkpoint.step > step])

    def leave(self, steps: Collection[int]) -> None:
        """Drop all checkpoints but those of these steps."""
        self.drop([checkpoint for checkpoint in self._kept if checkpoint.step not in steps])

    def drop(self, given_up: Sequence[Checkpoint] | None = None) -> None:
        """Delete some of them, or all."""
        for checkpoint in list(self._kept if given_up is None else given_up):
            checkpoint.delete()
            self._kept.remove(checkpoint)
