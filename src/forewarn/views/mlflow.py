"""A run in MLflow: readings as metrics, hyper-parameters as parameters, alerts as tags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forewarn.catalogue import TRACKER_PREFIX
from forewarn.types import RunStart
from forewarn.views.sending import Row, TrackerView
from forewarn.views.tracked import Detail, optional

MOST_IN_A_BATCH = 1000
"""Maximum number of metrics in one request."""
MOST_PARAMETERS = 100
"""Maximum number of parameters in one request."""
MOST_IN_A_TAG = 5000
"""Characters that every store takes in a tag; in a parameter, some take 500."""
MOST_IN_A_PARAMETER = 500


class MLflowView(TrackerView):
    """Writes into the active MLflow run of the thread that trains, `mlflow.active_run()`, or into the one with this id.

    Readings are metrics such as `forewarn/gradient/global_norm`, at the steps of forewarn. Hyper-parameters are
    parameters. Alerts are tags such as `forewarn/alerts/L102-loss-spike`, which say whether they are still open. MLflow
    has no histograms. `topk` and `detail` are those of `TensorBoardView`.

    What happens within a second is one request. `client` is the `MlflowClient` to use, if it is not the default one.
    """

    tracker = "MLflow"
    _advice = "call mlflow.start_run() first, or pass MLflowView(run_id)"
    _seconds_apart = 1.0

    def __init__(
        self, run_id: str | None = None, *, topk: int = 5, detail: Detail = "aggregates", client: Any = None
    ) -> None:
        super().__init__(run_id, topk, detail)
        optional("mlflow.entities", "MLflowView")  # imported now, and not in the thread that sends
        self._client = client

    def _find(self) -> str | None:
        import mlflow

        active = mlflow.active_run()
        return None if active is None else str(active.info.run_id)

    def _set_up(self, start: RunStart, settings: Mapping[str, float | str]) -> None:
        import mlflow

        if self._client is None:
            self._client = mlflow.MlflowClient()
        written = self._client.get_run(self._run).data.params  # a parameter can never be changed
        params = [
            mlflow.entities.Param(TRACKER_PREFIX + name, str(value)[:MOST_IN_A_PARAMETER])
            for name, value in settings.items()
            if TRACKER_PREFIX + name not in written
        ]
        for part in _batches(params, MOST_PARAMETERS):
            self._client.log_batch(self._run, params=part, synchronous=True)
        self._note("run", str(start.path.absolute()))

    def _write(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(tag, value, int(row.time * 1000), row.step) for row in rows for tag, value in row.values.items()
        ]
        for part in _batches(metrics, MOST_IN_A_BATCH):
            self._client.log_batch(self._run, metrics=part, synchronous=True)

    def _note(self, name: str, text: str) -> None:
        self._client.set_tag(self._run, TRACKER_PREFIX + name, text[:MOST_IN_A_TAG], synchronous=True)


def _batches(values: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), most):
        yield values[start : start + most]
