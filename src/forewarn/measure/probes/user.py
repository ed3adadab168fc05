"""The user's own series, logged with `monitor.log`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from forewarn.catalogue import Catalogue, Reduce
from forewarn.measure.engine import Value
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.probe import Array, Pending, Probe, Reading
from forewarn.measure.probes.loss import as_scalar, check_name
from forewarn.measure.step import Step
from forewarn.metrics import BUILT_IN

_HOW = {Reduce.SUM: How.SUM, Reduce.MIN: How.MIN, Reduce.MAX: How.MAX, Reduce.L2: How.L2}


class UserProbe(Probe):
    """Values passed to `monitor.log` since the last step; tensors are transferred with everything else."""

    name = "user"
    on_every_rank = True

    def __init__(self, catalogue: Catalogue = BUILT_IN) -> None:
        self._catalogue = catalogue
        self._given: dict[tuple[str, str], Value] = {}

    def log(self, name: str, value: Any, scope: str = "") -> None:
        """Keep a value for the current step; a second one under the same name and scope replaces the first."""
        check_name(name, self._catalogue)
        number = as_scalar(name, value)
        self._given[name, str(scope)] = number.clone() if isinstance(number, Tensor) else number

    def collect(self, step: Step) -> Pending | None:
        logged, self._given = self._given, {}
        if not logged:
            return None

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            values = dict(zip(logged, map(float, arrays), strict=True))
            for name in dict.fromkeys(name for name, _ in logged):
                scopes = tuple(scope for logged_name, scope in logged if logged_name == name)
                yield Reading(name, scopes, [values[name, scope] for scope in scopes])

        parts = [Part(self._how(name), f"{name} {scope}") for name, scope in logged]
        return Pending(list(logged.values()), decode, parts)

    def _how(self, name: str) -> How:
        """How values that all ranks have logged become one; a value of one rank stays as it is."""
        metric = self._catalogue.find(name)
        return _HOW.get(metric.reduce, How.MEAN) if metric is not None else How.MEAN

    def state_dict(self) -> dict[str, Any]:
        return {"given": [[name, scope, value] for (name, scope), value in self._given.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._given = {(name, scope): as_scalar(name, value) for name, scope, value in state["given"]}
