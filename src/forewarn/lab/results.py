"""The directory that holds the results of one model."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from pathlib import Path
from typing import Any

from torch import nn

from forewarn.files import read_regular, replacing
from forewarn.lab.snapshots import Snapshots
from forewarn.store.claim import new_directory
from forewarn.store.deletion import delete_run

_MOST_BYTES = 64 << 20

_log = logging.getLogger("forewarn")


def free_results(path: Path) -> Path:
    """The directory, or the next free one of `lm-2`, `lm-3`, … if it holds an earlier run; the log says so."""
    if not any(os.path.exists(path / name) for name in ("model.json", "run/run.json")):
        return path
    free = new_directory(path)
    _log.warning("%s already holds a run; this one is stored in %s", path, free)
    return free


def delete_results(path: Path) -> None:
    """Delete an earlier run with its snapshots and TensorBoard events, if there is one; other files stay.

    Raises FileExistsError if a process is still writing the run, or if forewarn did not write it.
    """
    if not os.path.exists(path / "run" / "run.json"):
        return

    def delete_the_rest() -> None:
        Snapshots(path / "snapshots", keep=1).delete()
        for pattern in ("events.out.tfevents.*", "forewarn-topk.json"):
            for file in (path / "tensorboard").glob(pattern):
                file.unlink(missing_ok=True)

    delete_run(path / "run", delete_the_rest)


class ResultDirectory:
    """The results of one model, identified by the shapes of its parameters in `model.json`."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        self.path = path
        self._shapes = {name: list(value.shape) for name, value in model.state_dict().items()}

    def check(self) -> None:
        """Refuse to continue with the results of another model."""
        file = self.path / "model.json"
        if file.exists() and self._stored(file) != self._shapes:
            raise ValueError(
                f"{self.path} holds the results of a different model; name another result_dir or model_name"
            )

    def _stored(self, file: Path) -> Any:
        try:
            return json.loads(read_regular(file, _MOST_BYTES))
        except (OSError, RecursionError, ValueError) as error:
            raise ValueError(f"{file} cannot be read ({error}); name another result_dir or model_name") from error

    def claim(self) -> None:
        """Record which model these results belong to. The monitor reports a directory that cannot be written."""
        file = self.path / "model.json"
        with contextlib.suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing(file) as draft:
                draft.write(json.dumps(self._shapes).encode())

    def put_run_aside(self) -> None:
        """Rename a run without a snapshot to resume from, so that a new one can begin."""
        run = self.path / "run"
        if run.exists():
            aside = next(path for number in itertools.count(1) if not (path := run.with_name(f"run-{number}")).exists())
            run.rename(aside)
            _log.warning("the earlier run is kept in %s", aside)
