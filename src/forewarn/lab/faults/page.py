"""The benchmark as a Markdown page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from forewarn.lab.faults.cases import CHANCE, FIRST, LOWERED, Record
from forewarn.lab.faults.fingerprint import rules_hash, test_runs
from forewarn.lab.faults.hard_negatives import HARD_NEGATIVES
from forewarn.lab.faults.injected import FAULTS
from forewarn.lab.faults.potency import LEAST_SPREAD, SPREADS
from forewarn.lab.faults.published_rules import PUBLISHED
from forewarn.lab.faults.remedying import CHECKPOINT_EVERY
from forewarn.lab.faults.scoring import Healthy, Scores, Share, Verdict, scores
from forewarn.lab.faults.session import EVERY
from forewarn.lab.faults.sets import WORKLOADS, Set, find_workload, set_of
from forewarn.lab.faults.workload import Trait
from forewarn.types import figure

UNLIKE_SUPERVISED = {Trait.REINFORCEMENT, Trait.PLAYERS}
"""Traits of workloads whose loss is not the objective."""


LOOKED_AT = (
    "The validation set has been looked at: at that time 34% (12 of 35) of its healthy runs had a warning, 91% (31 of "
    "34) of its harmful faults were detected and 68% (23 of 34) had the right cause first. Rules were mended after it."
)
"""What a reader must know about the validation set."""
MENDED = (
    "After the test set was run, one rule was mended by what it showed: 17 of the 18 warnings about healthy "
    "reinforcement learning were `representation-collapse` in a critic with a single output, which is information now. "
    "The rules have not been judged on the test set again, and PPO is no longer a kind that they have not seen."
)
"""What a reader must know about a test set that was run with earlier rules."""
WIDENED = "The words of `corrupt-batches` and `saturated-tanh` were widened after runs of the development set."


def page(records: Sequence[Record], machine: Iterable[str]) -> str:
    """The whole page. `machine` are sentences about where it was run."""
    return "\n".join(_lines(records, machine)) + "\n"


def is_supervised(record: Record) -> bool:
    """Whether the loss of a workload is what it is to minimize."""
    return not UNLIKE_SUPERVISED & find_workload(record.case.workload).traits


def _is_in(which: Set) -> Callable[[Record], bool]:
    return lambda record: set_of(record.case.workload) is which


def _is_of(kind: str) -> Callable[[Record], bool]:
    return lambda record: find_workload(record.case.workload).kind == kind


def cell(share: Share) -> str:
    """A share with its interval: `90% (45 of 50; 79 to 96)`."""
    if not share.total:
        return "not run"
    low, high = share.interval
    return f"{share.value:.0%} ({share.hits} of {share.total}; {100 * low:.0f} to {100 * high:.0f})"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(str(value).replace('|', '/') for value in row)} |"
    yield ""


def _lines(records: Sequence[Record], machine: Iterable[str]) -> Iterator[str]:
    result = scores(records)
    present = [which for which in Set if any(set_of(record.case.workload) is which for record in records)]
    by_set = {which: result.where(_is_in(which)) for which in present}
    yield "# Fault benchmark\n"
    yield "<!-- Made by `forewarn faults --page docs/benchmark.md`. Edit `src/forewarn/lab/faults` instead. -->\n"
    yield from _introduction(records, by_set, machine)
    yield from _score_tables(by_set)
    yield from _baselines(by_set)
    yield from _repairs(by_set)
    yield from _kinds(by_set)
    yield from _hard_negatives(result)
    yield from _faults(result)
    yield from _misses(result)
    yield from _harmless(result)
    yield from _catalogue()


def _introduction(records: Sequence[Record], by_set: dict[Set, Scores], machine: Iterable[str]) -> Iterator[str]:
    names = " and ".join(by_set)
    hours = sum(record.seconds for record in records) / 3600
    runs = test_runs()
    yield (
        "Small training scripts of many kinds are run as they are, with changes that are no faults, and with faults. "
        f"Each is watched with `forewarn.watch(..., every={EVERY})` and judged by the rules at their defaults.\n"
    )
    yield f"- **Sets on this page: {names}.** " + (
        "The test set is not among them: it is run for a release only."
        if Set.TEST not in by_set
        else "Rules are tuned on the development set only."
    )
    if Set.VALIDATION in by_set:
        yield f"- {LOOKED_AT}"
    num_faults = sum(record.case.is_fault for record in records)
    yield f"- {len(records) - num_faults} healthy runs and {num_faults} runs with a fault; {hours:.1f} process hours."
    pairs = {(record.case.change, record.case.workload) for record in records if record.case.is_fault}
    possible = sum(fault.fits(one) for fault in FAULTS.values() for which in by_set for one in WORKLOADS[which])
    yield (
        f"- All {possible} pairs of a fault and a workload that it fits."
        if len(pairs) == possible
        else f"- Sample: {len(pairs)} of the {possible} pairs of a fault and a workload that it fits, chosen by chance."
    )
    for which, one in by_set.items():
        num_tried = sum(bool(verdict.record.remedied) for verdict in one.harmful)
        if num_tried < len(one.harmful):
            yield (
                f"- Remedies were carried out for {num_tried} of the {len(one.harmful)} harmful faults of the {which} "
                "set. For the others, the first remedy counts if the fault declares it as its fix."
            )
    judged_by = {which: {record.rules for record in records if _is_in(which)(record)} for which in by_set}
    named = ", ".join(f"{which} `{'` `'.join(sorted(used))}`" for which, used in judged_by.items())
    yield f"- Rules, as a hash of the source and thresholds of all of them: {named}."
    if Set.TEST in judged_by and judged_by[Set.TEST] != {rules_hash()}:
        yield f"- {MENDED}"
    yield f"- The test set has been run with {len(runs)} set{'s' * (len(runs) != 1)} of rules so far" + (
        f": {', '.join(run['rules'] for run in runs)}.\n" if runs else ".\n"
    )
    yield " ".join(machine) + "\n"
    yield (
        "A fault is **harmful** if the score of its run on clean held-out data is worse than that of its healthy twin, "
        f"the same script with the same seed, by more than {SPREADS:g} standard deviations over seeds (at least "
        f"{LEAST_SPREAD:.0%} of the score). Faults that do no harm are scored apart. **Detected** means a warning "
        "at or after the onset. **Right cause first** means that the alert shown first names the cause, by a rule or "
        f"by words that the fault declares in its source. {WIDENED} **The damage** is the first step from which the "
        "objective, averaged over ten steps, stays worse than the twin's. Some faults do it with their first step, as "
        "a batch of NaN does, and no warning can come before them. Their source declares that by what they do. The "
        "declaration is younger than the first runs. Intervals are Wilson's, at 95%.\n"
    )


def _score_tables(by_set: dict[Set, Scores]) -> Iterator[str]:
    rows: list[tuple[str, Callable[[Scores], str]]] = [
        ("supervised and generative: healthy runs with a warning",
         lambda one: cell(one.healthy.where(is_supervised).warned)),
        ("reinforcement learning and GANs: healthy runs with a warning",
         lambda one: cell(one.healthy.where(lambda record: not is_supervised(record)).warned)),
        ("warnings per 1,000 healthy steps", lambda one: figure(one.healthy.per_thousand_steps)),
        ("harmful faults detected", lambda one: cell(one.detected)),
        ("right cause first", lambda one: cell(one.named)),
        ("median steps of warning before the damage, faults that begin during the run",
         lambda one: f"{figure(one.median_lead)} ({len(one.leads)} runs)"),
        ("the same without faults whose first step is the damage",
         lambda one: f"{figure(one.building_up.median_lead)} ({len(one.building_up.leads)} runs)"),
        ("first remedy repairs it, where code can carry it out", lambda one: cell(one.repaired(FIRST))),
        ("healthy twins that are no worse for the first remedy", lambda one: cell(one.no_harm)),
    ]  # fmt: skip
    yield "## Scores\n"
    yield from table(["", *by_set], [[name, *map(value, by_set.values())] for name, value in rows])


def _baselines(by_set: dict[Set, Scores]) -> Iterator[str]:
    yield "## Beside the published rules of others\n"
    yield (
        "Their rules at their defaults, written from their documentation, judged from the readings of the same runs. "
        "`src/forewarn/lab/faults/published_rules.py` gives the source of each number. A healthy run counts as warned "
        "about if any of the rules fires once.\n"
    )
    head = ["rules", *(f"{name}: {what}" for name in by_set for what in ("detected", "healthy runs with a warning"))]
    rows = [["**forewarn**", *(cell(share) for one in by_set.values() for share in (one.detected, one.healthy.warned))]]
    rows += [
        [
            name,
            *(cell(share) for one in by_set.values() for share in (one.published(name), one.healthy.published(name))),
        ]
        for name in PUBLISHED
    ]
    yield from table(head, rows)


def _repairs(by_set: dict[Set, Scores]) -> Iterator[str]:
    yield "## Repairs\n"
    yield (
        "The first remedy of the alert shown first is carried out and the script runs again, from the last checkpoint "
        f"before the trouble began, as the alert tells it (every {CHECKPOINT_EVERY} steps). A fault is repaired if it "
        "does no harm any more. A remedy that only a person can carry out counts if the fault declares it as its fix. "
        "An undetected fault counts as not repaired. A healthy twin gets the number that the remedy advises, unless it "
        "has it already. Remedies are mended on the development set, so its figures here are not of unseen runs.\n"
    )
    rows = [
        ["forewarn: repaired, or the fix named", *(cell(one.fixed) for one in by_set.values())],
        ["forewarn: the fix named, where only a person can do it", *(cell(one.names_fix) for one in by_set.values())],
        ["a random remedy", *(cell(one.repaired(CHANCE)) for one in by_set.values())],
        ["always lower the learning rate to a tenth", *(cell(one.repaired(LOWERED)) for one in by_set.values())],
        ["do nothing", *(cell(Share(0, len(one.harmful))) for one in by_set.values())],
    ]
    yield from table(["all harmful faults", *by_set], rows)


def _kinds(by_set: dict[Set, Scores]) -> Iterator[str]:
    yield "## By kind of model\n"
    yield "A kind belongs to one set, so each row outside the development set is a kind that no rule was tuned on.\n"
    rows = []
    for which, result in by_set.items():
        for kind in dict.fromkeys(workload.kind for workload in WORKLOADS[which]):
            one = result.where(_is_of(kind))
            rows.append([kind, which, cell(one.healthy.warned), cell(one.detected), cell(one.named)])
    yield from table(["kind", "set", "healthy runs with a warning", "detected", "right cause first"], rows)


def _hard_negatives(result: Scores) -> Iterator[str]:
    yield "## Healthy runs that look odd\n"
    rows: list[list[object]] = [
        ["as it is", "The script without a change.", cell(result.healthy.where(lambda one: one.case.is_plain).warned)]
    ]
    for name, negative in HARD_NEGATIVES.items():
        ones = tuple(record for record in result.healthy.records if record.case.change == name)
        rows.append([name, negative.summary, cell(Healthy(ones).warned)])
    yield from table(["", "what it is", "runs with a warning"], rows)


def _faults(result: Scores) -> Iterator[str]:
    yield "## By fault\n"
    rows = []
    for name, fault in FAULTS.items():
        harmful = [verdict for verdict in result.harmful if verdict.fault.name == name]
        harmless = sum(verdict.fault.name == name for verdict in result.harmless)
        leads = [str(verdict.lead) for verdict in harmful if fault.is_dynamic and verdict.lead is not None]
        detected = sum(verdict.is_detected for verdict in harmful)
        named = sum(verdict.is_named for verdict in harmful)
        rows.append([name, len(harmful), harmless, detected, named, ", ".join(leads)])
    yield from table(["fault", "harmful", "harmless", "detected", "right cause first", "steps of warning"], rows)


def _misses(result: Scores) -> Iterator[str]:
    yield "## Every miss\n"
    missed = [verdict for verdict in result.harmful if not verdict.is_detected]
    yield f"Harmful faults without a warning ({len(missed)}):\n"
    yield from (f"- `{verdict.record.case.key}`: {_reason(verdict)}" for verdict in missed)
    wrong = [verdict for verdict in result.harmful if verdict.is_detected and not verdict.is_named]
    yield f"\nDetected, with another alert first ({len(wrong)}):\n"
    yield from (f"- `{verdict.record.case.key}`: {_reason(verdict)}" for verdict in wrong)
    false = [record for record in result.healthy.records if record.num_warnings]
    yield f"\nHealthy runs with a warning ({len(false)}):\n"
    for record in false:
        first = record.warned[0]
        yield f"- `{record.case.key}`: {first.code} at step {first.fired}, {first.text.strip()}" + (
            f" ({record.num_warnings} warnings)" if record.num_warnings > 1 else ""
        )
    yield ""


def _reason(verdict: Verdict) -> str:
    """What was said instead of the cause."""
    record, first = verdict.record, verdict.first
    if verdict.is_detected and first is not None:
        rest = [alert for alert in record.warned[1:] if verdict.fault.is_named_by(alert.code, alert.cause, alert.text)]
        later = f"; the cause came later as {rest[0].code}" if rest else ""
        return f"{first.code} at step {first.fired}, {first.text.strip()}{later}"
    if first is not None:
        said = f"only before the onset at step {record.onset}: {first.code} at step {first.fired}"
    else:
        notes = sorted({alert.code for alert in record.warned})
        said = "no rule fired" + (f"; only notes: {', '.join(notes)}" if notes else "")
    return said + (f"; the script itself failed at step {record.num_steps}: {record.error}" if record.error else "")


def _harmless(result: Scores) -> Iterator[str]:
    yield "## Faults that did no harm\n"
    detected = Share.of(verdict.is_detected for verdict in result.harmless)
    named = Share.of(verdict.is_named for verdict in result.harmless)
    yield f"They are scored apart: detected {cell(detected)}, right cause first {cell(named)}.\n"
    for verdict in result.harmless:
        said = "nothing" if verdict.first is None else f"{verdict.first.code} at step {verdict.first.fired}"
        yield f"- `{verdict.record.case.key}`: {said}"
    yield ""


def _catalogue() -> Iterator[str]:
    yield "## Workloads\n"
    rows = [[one.name, which, one.num_steps, one.summary] for which, ones in WORKLOADS.items() for one in ones]
    yield from table(["name", "set", "steps", "what trains"], rows)
    yield "## Faults\n"
    yield "The cause is named by one of the rules, or by words in the alert's name, headline or cause.\n"
    faults = [
        [one.name, one.summary, " ".join(one.causes), f"`{one.words}`".replace("|", "or") if one.words else ""]
        for one in FAULTS.values()
    ]
    yield from table(["fault", "what is wrong", "rules", "words"], faults)
