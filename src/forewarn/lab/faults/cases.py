"""One case of the benchmark: a workload, what is changed in it, and a seed; and what happened when it ran."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from forewarn.codec import Noun
from forewarn.config import Config
from forewarn.judge.diagnosis import Diagnosis, replay
from forewarn.judge.ledger import began_at
from forewarn.lab.faults.change import Change, Draw
from forewarn.lab.faults.fingerprint import rules_hash
from forewarn.lab.faults.hard_negatives import HARD_NEGATIVES
from forewarn.lab.faults.injected import FAULTS
from forewarn.lab.faults.published_rules import Remark, remarks_about
from forewarn.lab.faults.remedying import LOWER, as_change, random_remedy
from forewarn.lab.faults.session import Session
from forewarn.lab.faults.sets import find_workload
from forewarn.store.reader import open_run
from forewarn.types import Alert, AlertState, Remedy, Severity

MOST_ALERTS = 12
"""Alerts that are kept of a run, most important first."""
DIGITS = 5


@dataclass(frozen=True, slots=True)
class Case(Noun):
    """What is to be run."""

    workload: str
    change: str
    """The name of a fault or of a hard negative; empty for the script as it is."""
    seed: int

    @property
    def key(self) -> str:
        return f"{self.workload}/{self.change or 'healthy'}/{self.seed}"

    @property
    def is_fault(self) -> bool:
        return self.change in FAULTS

    @property
    def is_plain(self) -> bool:
        return not self.change


@dataclass(frozen=True, slots=True)
class Warned(Noun):
    """An alert of a run, as far as the scores need it."""

    code: str
    name: str
    severity: int
    fired: int
    since: int
    """When it began, by its own evidence: a loss that never fell is seen late."""
    is_open: bool
    cause: str
    """The cause in its evidence, such as `not_in_optimizer`."""
    text: str
    """Its name, headline and cause: what a person reads."""
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True, slots=True)
class Record(Noun):
    """What happened in a case."""

    case: Case
    num_steps: int
    onset: int
    score: float
    """What the model was worth in the end; lower is better, infinity if the run was lost."""
    objective: tuple[float, ...]
    """What is to fall, at each step."""
    warned: tuple[Warned, ...]
    """Most important first."""
    num_warnings: int
    """Alerts of severity warning or critical that fired."""
    published: tuple[Remark, ...]
    """What the rules of others said."""
    remedied: Mapping[str, float | None] = field(default_factory=dict)
    """The score of the run with a remedy, by who chose it; None if no code can carry the remedy out."""
    error: str = ""
    """Why the script ended early, or why `watch` refused."""
    seconds: float = 0.0
    rules: str = ""
    """The hash of the rules that judged it."""


FIRST, CHANCE, LOWERED, TWIN = "first remedy", "random remedy", "lower the lr", "healthy twin"


def run_case(case: Case, folder: Path | None = None, *, remedies: bool = True) -> Record:
    """Run a case with the monitor; then, if it is a fault, again with each remedy and without the monitor."""
    began = time.monotonic()
    with _directory(folder, case) as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and numpy warn about what is wrong here on purpose
        session, score, error, onset = trained(case, directory)
        warned, num_warnings, published = ((), 0, ()) if session.refusal else judged(directory)
    if session.refusal:
        warned = (Warned("refused", "watch-refused", Severity.CRITICAL, 0, 0, True, "", session.refusal),)
        num_warnings = 1
    remedied = _remedied(case, warned, onset, {}) if remedies else {}
    objective = tuple(_rounded(value) for value in session.objective)
    return Record(
        case, session.step, onset, score, objective, warned, num_warnings, published, remedied, error,
        time.monotonic() - began, rules_hash(),
    )  # fmt: skip


def judged(directory: Path) -> tuple[tuple[Warned, ...], int, tuple[Remark, ...]]:
    """What the rules, and those that others published, say about a recorded run."""
    with open_run(directory) as run:
        diagnosis = replay(run, Config().rule_set())  # a kept run has the thresholds of its time
        published = remarks_about(run)
    loud = [alert for alert in diagnosis.ranked if alert.severity >= Severity.WARNING]
    return _most_important(diagnosis, loud), len(loud), published


def _most_important(diagnosis: Diagnosis, loud: Sequence[Alert]) -> tuple[Warned, ...]:
    quiet = [alert for alert in diagnosis.ranked if alert.severity < Severity.WARNING]
    return tuple(_warned(alert) for alert in [*loud[:MOST_ALERTS], *quiet[:MOST_ALERTS]])


def _warned(alert: Alert) -> Warned:
    told = alert.announced or alert.finding
    cause = str(told.evidence.get("cause", ""))
    began = min(alert.since, began_at(told))
    return Warned(
        alert.code, alert.name, int(alert.severity), alert.fired or 0, began, alert.state is AlertState.FIRING,
        cause, f"{alert.name}: {alert.headline}. {alert.cause}", alert.remedies[:3],
    )  # fmt: skip


def _change(case: Case, num_steps: int) -> Change | None:
    if not case.change:
        return None
    make = FAULTS[case.change].make if case.is_fault else HARD_NEGATIVES[case.change].make
    return make(Draw(case.change, case.workload, case.seed, num_steps))


def trained(
    case: Case, directory: Path | None, *more: Change, policy: str = "observe"
) -> tuple[Session, float, str, int]:
    """The session, score, error and onset of one run of the script."""
    workload = find_workload(case.workload)
    change = _change(case, workload.num_steps)
    changes = [one for one in (change, *more) if one is not None]
    session = Session(case.seed, workload.num_steps, changes, directory, policy=policy)
    torch.manual_seed(case.seed)
    error = ""
    try:
        score = workload.script(session)
    except (RuntimeError, ValueError) as failure:  # as a script that meets NaN
        session.close()  # while the error is handled, as a monitor that is a context manager
        score, error = math.inf, str(failure).partition("\n")[0]
    finally:
        session.close()
    return session, score if math.isfinite(score) else math.inf, error or session.refusal, change.onset if change else 0


def judged_again(record: Record, runs: Path, *, remedies: bool = True) -> Record:
    """The record with what the present rules say about its kept run. Remedies that are new are carried out."""
    directory = runs / record.case.key
    if not directory.exists():
        return record
    warned, num_warnings, published = judged(directory)
    is_same = _first_remedy(warned) == _first_remedy(record.warned)
    remedied = {who: score for who, score in record.remedied.items() if is_same or who in (CHANCE, LOWERED)}
    if remedies:
        remedied = _remedied(record.case, warned, record.onset, remedied)
    return replace(
        record, warned=warned, num_warnings=num_warnings, published=published, remedied=remedied, rules=rules_hash()
    )


def _remedied(
    case: Case, warned: Sequence[Warned], onset: int, earlier: Mapping[str, float | None]
) -> dict[str, float | None]:
    """The scores of a fault with remedies: one by chance, a lower rate, and the one that is named first."""
    if not case.is_fault:
        return {}
    first = _first_remedy(warned)
    seen = first[1] if first else onset
    scores = dict(earlier)
    for who, remedy in ((CHANCE, random_remedy(case.key)), (LOWERED, LOWER)):
        if who not in scores:
            scores[who] = _with(case, remedy, seen)
    return scores if FIRST in scores else scores | _with_first_remedy(case, warned)


def _first_remedy(warned: Sequence[Warned]) -> tuple[Remedy, int] | None:
    """The remedy that a person reads first, and the step at which the trouble began."""
    loud = [alert for alert in warned if alert.severity >= Severity.WARNING]
    return (loud[0].remedies[0], loud[0].since) if loud and loud[0].remedies else None


def _with_first_remedy(case: Case, warned: Sequence[Warned]) -> dict[str, float | None]:
    """The scores of the case, and of its healthy twin, with the first remedy; empty if there is none."""
    if (first := _first_remedy(warned)) is None:
        return {}
    score = _with(case, *first)
    return {FIRST: score} if score is None else {FIRST: score, TWIN: _with(Case(case.workload, "", case.seed), *first)}


def _with(case: Case, remedy: Remedy, seen: int) -> float | None:
    change = as_change(remedy, seen, find_workload(case.workload).num_steps, is_twin=case.is_plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return None if change is None else trained(case, None, change)[1]


@contextlib.contextmanager
def _directory(folder: Path | None, case: Case) -> Iterator[Path]:
    """Where the run is recorded; it is deleted if no folder is named."""
    if folder is not None:
        path = folder / case.key
        shutil.rmtree(path, ignore_errors=True)
        yield path
    else:
        with tempfile.TemporaryDirectory(prefix="forewarn-faults-") as temporary:
            yield Path(temporary) / "run"


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
