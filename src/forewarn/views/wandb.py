"""A run in Weights & Biases: readings in the rows that the user logs, alerts as alerts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from forewarn.catalogue import TRACKER_PREFIX
from forewarn.random_states import random_states_kept
from forewarn.types import RunStart, Severity
from forewarn.views.notify import harmless
from forewarn.views.sending import Row, TrackerView
from forewarn.views.tracked import Announcement, Detail, optional

_log = logging.getLogger("forewarn")

STEP = f"{TRACKER_PREFIX}step"
"""The x axis of everything that is written."""
MOST_IN_A_TITLE = 63
"""W&B allows fewer than 64 characters in the title of an alert."""
STEPS_WITHOUT_A_ROW = 1000
"""Number of steps after which the user is told that nothing was logged."""

_LEVELS = {Severity.INFO: "INFO", Severity.WARNING: "WARN", Severity.CRITICAL: "ERROR"}


class WandbView(TrackerView):
    """Writes into the W&B run of the process, `wandb.run`, or into the given one.

    The readings are added to the rows that your script logs with `wandb.log`, under names such as
    `forewarn/gradient/global_norm` and with the x axis `forewarn/step`. Your rows and steps stay as they are. If you
    log every 50 steps, a row holds the newest value of each metric.

    With `own_rows=True`, each step is a row of its own, at the W&B step of the same number. It is for scripts that log
    nothing to W&B themselves, that pass the number of the optimizer step as `wandb.log(..., step=...)`, or that draw
    over an x axis of their own. Others would see their own steps change. A step that is sent after
    a row of a later step is part of the next row.

    Alerts are W&B alerts, and lines in the summary of the run. `topk` and `detail` are those of `TensorBoardView`.
    """

    tracker = "W&B"
    _advice = "call wandb.init() first, or pass WandbView(run)"

    def __init__(
        self, run: Any = None, *, topk: int = 5, detail: Detail = "aggregates", own_rows: bool = False
    ) -> None:
        super().__init__(run, topk, detail)
        optional("wandb", "WandbView")
        with random_states_kept(), contextlib.suppress(ImportError):
            import_module("pandas")  # wandb does this at its first histogram, and then in the thread that sends
        self._own_rows = own_rows
        self._num_steps = 0
        self._first_step = 0
        """That of W&B when the first reading was written."""

    def _find(self) -> Any:
        import wandb

        return wandb.run

    def _is_over(self) -> bool:
        return bool(getattr(self._run, "_is_finished", False))

    def _set_up(self, start: RunStart, settings: Mapping[str, float | str]) -> None:
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric(f"{TRACKER_PREFIX}*", step_metric=STEP, step_sync=False)
        described = {"run": str(start.path.absolute()), **settings}
        self._run.config.update({TRACKER_PREFIX.rstrip("/"): described}, allow_val_change=True)

    def _write(self, rows: Sequence[Row]) -> None:
        import wandb

        together: dict[str, Any] = {}
        for row in rows:
            histograms = {tag: wandb.Histogram(np_histogram=histogram) for tag, histogram in row.histograms.items()}
            values = {STEP: row.step, **row.values, **histograms}
            if self._own_rows and row.step >= getattr(self._run, "_local_step", 0):
                self._run.log(values, step=row.step)
            else:
                together |= values
        if together:
            self._run.log(together, commit=False)
        self._notice(len(rows))

    def _notice(self, num_steps: int) -> None:
        """Say it once if no row is logged to which the readings could be added."""
        if self._own_rows or self._num_steps >= STEPS_WITHOUT_A_ROW:
            return
        with contextlib.suppress(Exception):  # a run in shared mode has no step
            if not self._num_steps:
                self._first_step = self._run.step
            self._num_steps += num_steps
            if self._num_steps >= STEPS_WITHOUT_A_ROW and self._run.step <= self._first_step:
                _log.warning(
                    "W&B shows forewarn's readings in the rows of wandb.log, and none was logged in %d steps; "
                    "if your script logs none, pass WandbView(own_rows=True)", self._num_steps
                )  # fmt: skip

    def _announce(self, announcement: Announcement) -> None:
        title, text = announcement.title, "\n".join(announcement.lines)
        if len(title) > MOST_IN_A_TITLE:
            title, text = f"{title[: MOST_IN_A_TITLE - 1]}…", f"{title}\n{text}"
        text = f"{text}\nstep {announcement.step}"
        self._run.alert(harmless(title), harmless(text), _LEVELS[announcement.severity])

    def _note(self, name: str, text: str) -> None:
        self._run.summary[TRACKER_PREFIX + name] = text
