"""The scores: how many faults are seen, named and repaired, and how often a healthy run is warned about."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from forewarn.lab.faults.cases import FIRST, TWIN, Record, Warned
from forewarn.lab.faults.fault import Fault
from forewarn.lab.faults.injected import FAULTS
from forewarn.lab.faults.potency import Twins
from forewarn.types import Severity

Z = 1.959964
"""Standard normal quantile of a 95% interval."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many of how many, with the Wilson interval of the proportion (Wilson 1927)."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval; all of [0, 1] if nothing was counted."""
        if not self.total:
            return 0.0, 1.0
        n, p = self.total, self.value
        middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    @classmethod
    def of(cls, answers: Iterable[bool]) -> Share:
        answers = list(answers)
        return cls(sum(answers), len(answers))


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one fault case was judged."""

    record: Record
    fault: Fault
    is_harmful: bool
    detected_at: int | None
    """The step of the first warning at or after the onset; None if there was none."""
    first: Warned | None
    """The alert that is shown first."""
    is_named: bool
    """Whether the first alert names the cause."""
    damage: int | None
    """The step at which the run is visibly worse than its twin."""
    repaired: dict[str, bool | None]
    """Whether the remedied run is no longer harmful, by who chose; None if no code can carry the remedy out."""
    names_fix: bool
    """Whether the first remedy is one that the fault declares as its fix."""

    @property
    def is_detected(self) -> bool:
        return self.detected_at is not None

    @property
    def lead(self) -> int | None:
        """Steps of warning before the damage; negative if the warning came later."""
        return None if self.damage is None or self.detected_at is None else self.damage - self.detected_at


def verdict_on(record: Record, twins: Twins) -> Verdict:
    fault = FAULTS[record.case.change]
    least = Severity.INFO if fault.is_told_as_information else Severity.WARNING
    counted = [alert for alert in record.warned if alert.severity >= least]
    if least < Severity.WARNING:  # information counts where it names the cause
        counted = [alert for alert in counted if alert.severity >= Severity.WARNING or _names(fault, alert)]
    first = counted[0] if counted else None
    fired = [alert.fired for alert in counted if alert.fired >= record.onset]
    is_named = first is not None and _names(fault, first)
    remedy = first.remedies[0].action if first is not None and first.remedies else ""
    repaired = {
        who: None if score is None else not twins.is_harmful(record, score) for who, score in record.remedied.items()
    }
    return Verdict(
        record, fault, twins.is_harmful(record), min(fired, default=None), first, is_named, twins.damage(record),
        repaired, remedy in fault.fixes,
    )  # fmt: skip


def _names(fault: Fault, alert: Warned) -> bool:
    return fault.is_named_by(alert.code, alert.cause, alert.text)


@dataclass(frozen=True, slots=True)
class Healthy:
    """What was said about healthy runs."""

    records: tuple[Record, ...]

    @property
    def warned(self) -> Share:
        """Runs with at least one warning."""
        return Share.of(record.num_warnings > 0 for record in self.records)

    @property
    def per_thousand_steps(self) -> float:
        steps = sum(record.num_steps for record in self.records)
        return 1000 * sum(record.num_warnings for record in self.records) / steps if steps else math.nan

    def published(self, rules: str) -> Share:
        """Runs about which a published rule set warns."""
        return Share.of(any(remark.rules == rules for remark in record.published) for record in self.records)

    def where(self, test: Callable[[Record], bool]) -> Healthy:
        return Healthy(tuple(filter(test, self.records)))


@dataclass(frozen=True, slots=True)
class Scores:
    """All scores of a set of records."""

    healthy: Healthy
    harmful: tuple[Verdict, ...]
    harmless: tuple[Verdict, ...]
    """Faults that did no harm that can be told from chance; they are scored apart."""

    @property
    def detected(self) -> Share:
        return Share.of(verdict.is_detected for verdict in self.harmful)

    @property
    def named(self) -> Share:
        """The right cause first."""
        return Share.of(verdict.is_named for verdict in self.harmful)

    @property
    def leads(self) -> tuple[int, ...]:
        """Steps of warning before the damage, of faults that begin during the run."""
        return tuple(verdict.lead for verdict in self.harmful if verdict.fault.is_dynamic and verdict.lead is not None)

    @property
    def median_lead(self) -> float:
        return statistics.median(self.leads) if self.leads else math.nan

    @property
    def building_up(self) -> Scores:
        """The scores of the faults whose first step is not the damage yet."""
        return self.where(lambda record: not record.case.is_fault or not FAULTS[record.case.change].is_instant)

    def repaired(self, who: str) -> Share:
        """Harmful faults that are repaired, of those where a remedy was carried out."""
        answers = [verdict.repaired.get(who) for verdict in self.harmful]
        return Share.of(answer for answer in answers if answer is not None)

    def where(self, test: Callable[[Record], bool]) -> Scores:
        """The scores of some of the records."""
        return Scores(
            self.healthy.where(test),
            tuple(verdict for verdict in self.harmful if test(verdict.record)),
            tuple(verdict for verdict in self.harmless if test(verdict.record)),
        )

    @property
    def names_fix(self) -> Share:
        """Harmful faults whose first remedy no code can carry out, and is the right one."""
        manual = [
            verdict for verdict in self.harmful if verdict.first is not None and verdict.repaired.get(FIRST) is None
        ]
        return Share.of(verdict.names_fix for verdict in manual)

    @property
    def fixed(self) -> Share:
        """Harmful faults that the first remedy repairs or, where no code can, names."""
        return Share.of(
            verdict.names_fix if (repaired := verdict.repaired.get(FIRST)) is None else repaired
            for verdict in self.harmful
        )

    def published(self, rules: str) -> Share:
        """Harmful faults about which a published rule set warns at or after the onset."""
        return Share.of(
            any(remark.rules == rules and remark.last >= verdict.record.onset for remark in verdict.record.published)
            for verdict in self.harmful
        )

    @property
    def no_harm(self) -> Share:
        """Healthy twins that are no worse for the first remedy of their fault."""
        verdicts = (*self.harmful, *self.harmless)
        return Share.of(answer for one in verdicts if (answer := one.repaired.get(TWIN)) is not None)


def scores(records: Sequence[Record]) -> Scores:
    twins = Twins(records)
    verdicts = [verdict_on(record, twins) for record in records if record.case.is_fault and twins.of(record)]
    return Scores(
        Healthy(tuple(record for record in records if not record.case.is_fault)),
        tuple(verdict for verdict in verdicts if verdict.is_harmful),
        tuple(verdict for verdict in verdicts if not verdict.is_harmful),
    )
