"""`trainer_state.json` of Hugging Face's Trainer, in an output folder or in each checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forewarn.files import read_regular
from forewarn.importing.log import Log, LogError, number, whole_number

TOOL = "Hugging Face"
NAME = "trainer_state.json"

_MOST_BYTES = 128 << 20
_OF_THE_WHOLE_RUN = "train_runtime"
"""An entry with this name sums up the run: its `train_loss` is the mean over all steps."""
_FACTS = {"max_steps": "total_steps", "num_train_epochs": "epochs", "train_batch_size": "batch_size"}
"""Names in the file, and the hyperparameters that rules know them by."""


def read(paths: Sequence[Path], log: Log) -> None:
    """Add the log history of the newest of these files: each holds the whole run up to its checkpoint."""
    state = max((_state(path) for path in paths), key=lambda state: number(state.get("global_step")) or 0.0)
    for theirs, ours in _FACTS.items():
        value = number(state.get(theirs))
        if value is not None and math.isfinite(value) and value > 0:
            log.hyperparameters[ours] = int(value) if value == int(value) else value
    history = state.get("log_history")
    if not isinstance(history, list):
        raise LogError("it has no log_history, so it is not of a Trainer")
    for entry in history:
        if not isinstance(entry, dict) or _OF_THE_WHOLE_RUN in entry:
            continue
        step = whole_number(entry.get("step"))
        if step is None:
            continue
        for name, value in entry.items():
            reading = number(value)
            if name != "step" and reading is not None:
                log.add(str(name), step, math.nan, reading)


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(read_regular(path, _MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise LogError(f"it is not JSON ({error})") from error
    if not isinstance(state, dict):
        raise LogError("it is not the state of a Trainer: a JSON object is expected")
    return state
