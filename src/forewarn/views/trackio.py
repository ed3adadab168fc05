"""A run in trackio: readings as rows, alerts as alerts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forewarn.catalogue import TRACKER_PREFIX
from forewarn.types import Severity
from forewarn.views.notify import harmless
from forewarn.views.sending import Row, Sender, TrackerView
from forewarn.views.tracked import Announcement, Detail, hyperparameters, optional

_LEVELS = {Severity.INFO: "INFO", Severity.WARNING: "WARN", Severity.CRITICAL: "ERROR"}


class TrackioView(TrackerView):
    """Writes into the trackio run of the thread that trains, or into the given one.

    Each step is a row at the same step, with names such as `forewarn/gradient/global_norm`. The steps that trackio
    counts for `trackio.log` without `step=` do not change. Alerts are trackio alerts, which it also prints. `topk` and
    `detail` are those of `TensorBoardView`.
    """

    tracker = "trackio"
    _advice = "call trackio.init() first, or pass TrackioView(run)"

    def __init__(self, run: Any = None, *, topk: int = 5, detail: Detail = "aggregates") -> None:
        super().__init__(run, topk, detail)
        optional("trackio", "TrackioView")  # imported now, and not in the thread that sends
        self._counting: _OwnCount | None = None

    def _find(self) -> Any:
        from trackio.context_vars import current_run

        return current_run.get()

    def _open(self) -> Sender | None:
        sender = super()._open()
        if sender is not None and self._start is not None:  # before the run sends its configuration, with its first row
            described = {"run": str(self._start.path.absolute()), **hyperparameters(self._start.info)}
            self._run.config[TRACKER_PREFIX.rstrip("/")] = described
        return sender

    def _write(self, rows: Sequence[Row]) -> None:
        import trackio

        counting = self._counting = self._counting or _OwnCount(self._run)
        for row in rows:
            histograms = {tag: trackio.Histogram(np_histogram=histogram) for tag, histogram in row.histograms.items()}
            type(self._run).log(counting, {**row.values, **histograms}, step=row.step)

    def _announce(self, announcement: Announcement) -> None:
        from trackio import AlertLevel

        title, text = harmless(announcement.title), harmless(" · ".join(announcement.lines))
        self._run.alert(title, text, AlertLevel[_LEVELS[announcement.severity]], step=announcement.step)

    def _note(self, name: str, text: str) -> None:
        """Nothing: trackio has no text about a run as a whole, and shows its alerts with their history."""


class _OwnCount:
    """A trackio run that counts steps on its own, so that those of the user go on as if nothing had been logged.

    It also sends the configuration with its first row, although the run has already sent it.
    """

    def __init__(self, run: Any) -> None:
        vars(self).update(_run=run, _next_step=0, _config_logged=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_run"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(vars(self)["_run"], name, value)
