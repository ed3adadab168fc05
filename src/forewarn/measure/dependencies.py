"""How probes depend on each other: the order they are called in, and what is missing when one has failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forewarn.measure.probe import Probe
from forewarn.measure.step import Step


class Dependencies:
    """What the probes of one loop provide and need."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self.order = _ordered(probes)
        """Every probe after those it depends on; otherwise in the order given."""

    def lost(self, step: Step, running: Sequence[Probe]) -> Iterator[str]:
        """The metrics of running probes that this step lacks because a probe they depend on failed."""
        broken: set[type] = set()
        for probe in self.order:
            missing = [kind for kind in probe.needs if kind in broken and step.get(kind) is None]
            if probe not in running:
                broken.update(probe.provides)
            elif missing:
                broken.update(probe.provides)
                for kind in missing:
                    yield from probe.needs[kind]


def _ordered(probes: Sequence[Probe]) -> list[Probe]:
    providers: dict[type, Probe] = {}
    for probe in probes:
        for kind in probe.provides:
            if kind in providers:
                raise ValueError(f"probes {providers[kind].name!r} and {probe.name!r} both provide {kind.__name__}")
            providers[kind] = probe
    order: list[Probe] = []
    for probe in probes:
        _append(probe, (), providers, order)
    return order


def _append(probe: Probe, waiting: tuple[Probe, ...], providers: dict[type, Probe], order: list[Probe]) -> None:
    """Append a probe after those it depends on; `waiting` are the probes that depend on it, outermost first."""
    if probe in order:
        return
    if probe in waiting:
        circle = (*waiting[waiting.index(probe) :], probe)
        raise ValueError(
            f"probes depend on each other in a circle: {' needs '.join(repr(member.name) for member in circle)}"
        )
    for kind in probe.needs:
        if kind not in providers:
            raise ValueError(f"probe {probe.name!r} needs {kind.__name__}, which no probe provides")
        _append(providers[kind], (*waiting, probe), providers, order)
    order.append(probe)
