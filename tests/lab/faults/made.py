"""Records made by hand."""

from forewarn.lab.faults.cases import Case, Record, Warned
from forewarn.types import Remedy

LOWER_LR = Remedy("lower_lr", {"from": 1.0, "to": 0.1}, "")


def warned(code="U102", severity=2, fired=10, *, cause="", text="", remedies=(LOWER_LR,)):
    return Warned(code, code, severity, fired, fired, True, cause, text, remedies)


def record(workload="mlp", change="", seed=1, score=1.0, *, alerts=(), onset=0, objective=(1.0,) * 100, **more):
    num_warnings = sum(alert.severity >= 2 for alert in alerts)
    return Record(
        Case(workload, change, seed), len(objective), onset, score, tuple(objective), tuple(alerts), num_warnings,
        more.pop("published", ()), **more,
    )  # fmt: skip


def healthy(*scores, workload="mlp"):
    return [record(workload, seed=seed, score=score) for seed, score in enumerate(scores, start=1)]
