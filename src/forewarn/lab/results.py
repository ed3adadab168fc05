"""The directory that holds the results of one model."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from pathlib import Path
from typing import Any

from torch import nn

from forewarn.files import read_regular, replacing

_MOST_BYTES = 64 << 20

_log = logging.getLogger("forewarn")


class ResultDirectory:
    """The results of one model, identified by the shapes of its parameters in `model.json`."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        self.path = path
        self._shapes = {name: list(value.shape) for name, value in model.state_dict().items()}

    def check(self, resume: bool) -> None:
        """Refuse a directory that holds the results of another model, or of a run that is not to be resumed."""
        file = self.path / "model.json"
        if not file.exists():
            return
        if self._stored(file) != self._shapes:
            raise ValueError(
                f"{self.path} holds the results of a different model; name another result_dir or model_name"
            )
        if not resume:
            raise FileExistsError(
                f"{self.path} already holds a run; go on with it by resume (--resume), or name another result_dir or "
                "model_name"
            )

    def _stored(self, file: Path) -> Any:
        try:
            return json.loads(read_regular(file, _MOST_BYTES))
        except (OSError, RecursionError, ValueError) as error:
            raise ValueError(f"{file} cannot be read ({error}); name another result_dir or model_name") from error

    def claim(self) -> None:
        """Write down whose results these are; the monitor reports a directory that cannot be written."""
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
