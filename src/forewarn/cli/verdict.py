"""A diagnosis as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forewarn.judge.coverage import Coverage
from forewarn.judge.diagnosis import Diagnosis
from forewarn.judge.epochs import NO_VALIDATION_LOSS
from forewarn.judge.families import is_own
from forewarn.standing import COMPLETED, UNCERTAIN, run_state
from forewarn.store import Run
from forewarn.store.rank_logs import LOST_CONTACT, NOT_CLOSED, FirstEnd, first_to_end
from forewarn.store.snapshot_folders import replay_command, snapshots_in
from forewarn.types import Action, Alert, AlertState, Remedy, Severity
from forewarn.views.conclusions import folded, summary_words, things_to_do
from forewarn.views.epoch_lines import advice_lines
from forewarn.views.imported_lines import coverage_part, imported_json, imported_part
from forewarn.views.wording import (
    HEALTHY,
    STYLES,
    AlertGroup,
    advice,
    deed,
    literal,
    mark,
    model_words,
    outcome,
    short,
    steps_of,
)

VERSION = 1
"""Version of the JSON; it rises if a key is removed or means something else."""
MOST_ALERTS, MOST_OF_A_RULE, MOST_ENTRIES, LONGEST_TEXT = 100, 20, 100, 500
"""Limits of the JSON: alerts, alerts of one rule, entries of other lists, characters of a text."""
MOST_EPOCHS = 5
MOST_ACTIONS = 20
VERDICT_STYLES = ("bold green", "bold yellow", "bold red")
_MARKS = {
    "pass": ("✓", "green"), "fail": ("✗", "red"), "notice": ("·", "yellow"), "unknown": ("–", "dim"),
    "info": ("·", "cyan"),
}  # fmt: skip


def as_json(
    run: Run, diagnosis: Diagnosis, covered: Coverage | None = None, most_alerts: int = MOST_ALERTS
) -> dict[str, Any]:
    """The diagnosis as plain values of a bounded size, as `check.schema.json` describes them."""
    end = None if diagnosis.end is None else {"reason": diagnosis.end[0], "time": diagnosis.end[1]}
    actions, snapshots = run.actions(), snapshots_in(run.path)
    severities = Counter(str(alert.severity) for alert in diagnosis.ranked)
    plain = {
        "version": VERSION,
        "run": str(run.path),
        "model": run.info.model,
        "verdict": diagnosis.verdict,
        "exit_code": diagnosis.exit_code,
        "not_judged": [rule.to_json() for rule in diagnosis.not_judged],
        "last_step": diagnosis.last_step,
        "end": end,
        "first_to_end": None if (first := _first_to_end(run)) is None else first.to_json(),
        "counts": {
            "severities": {str(severity): severities[str(severity)] for severity in reversed(Severity)},
            "rules": Counter(alert.code for alert in diagnosis.ranked),
            "epochs": len(diagnosis.epochs),
            "actions": len(actions),
            "snapshots": len(snapshots),
        },
        "alerts": [
            {**alert.to_json(), "follows": diagnosis.cause_of(alert) or ""}
            for alert in _most_important(diagnosis.ranked, most_alerts)
        ],
        "checklist": [dataclasses.asdict(check) for check in diagnosis.checklist],
        "epochs": [dataclasses.asdict(epoch) for epoch in diagnosis.epochs[-MOST_ENTRIES:]],
        "actions": [action.to_json() for action in actions[-MOST_ENTRIES:]],
        "snapshots": [str(path) for path in snapshots[-MOST_ENTRIES:]],
        **({} if covered is None else imported_json(run, covered)),
    }
    return cast(dict[str, Any], _bounded(plain))


def _most_important(ranked: Iterable[Alert], most: int) -> list[Alert]:
    """The first alerts, but not too many of one rule: thousands of layers may have the same problem."""
    taken: Counter[str] = Counter()
    kept: list[Alert] = []
    for alert in ranked:
        taken[alert.code] += 1
        if len(kept) < most and taken[alert.code] <= MOST_OF_A_RULE:
            kept.append(alert)
    return kept


def _bounded(value: Any) -> Any:
    """Plain values whose texts are cut in the middle where they are too long."""
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return f"{value[: LONGEST_TEXT // 2]}…{value[-LONGEST_TEXT // 2 + 1 :]}"
    if isinstance(value, Mapping):
        return {_bounded(key): _bounded(item) for key, item in value.items()}
    return [_bounded(item) for item in value] if isinstance(value, list | tuple) else value


def as_text(
    run: Run, diagnosis: Diagnosis, rule_modules: Sequence[str] = (), covered: Coverage | None = None
) -> RenderableType:
    """The verdict, alerts with their symptoms, what to do, the health checks and the next commands.

    `covered` is known of an imported run, whose log may lack much of what rules read.
    """
    parts: list[RenderableType] = [heading(run), _summary(diagnosis)]
    if first := _first_to_end(run):
        parts.append(Text(_words_of_end(first), style="yellow"))
    if diagnosis.not_judged:
        parts.append(Text(_not_judged(diagnosis), style="yellow"))
    if covered is not None:
        parts.append(imported_part(run))
    parts.append(Text())
    if diagnosis.alerts:
        parts.append(alerts_part(diagnosis))
    if diagnosis.epochs:
        parts += [evaluation_part(diagnosis), Text()]
    if actions := run.actions():
        parts += [actions_part(actions), Text()]
    commands = next_commands(run.path, diagnosis.ranked, rule_modules=rule_modules)
    checks = _checklist(diagnosis) if covered is None else _checklist(diagnosis, only_known=True)
    return Group(*parts, checks, Text(), *([] if covered is None else [coverage_part(covered), Text()]), commands)


def as_summary(run: Run, diagnosis: Diagnosis, rule_modules: Sequence[str] = ()) -> RenderableType:
    """One of many runs: the verdict, and the command that shows the rest."""
    check = shlex.join(
        ["forewarn", "check", str(run.path), *(word for name in rule_modules for word in ("--rules", name))]
    )
    return Group(heading(run), _summary(diagnosis), *([Text(f"  {literal(check)}")] if diagnosis.alerts else []))


def _first_to_end(run: Run) -> FirstEnd | None:
    """The rank of a distributed run that ended first; None if the run was completed."""
    return None if run.end is not None and run_state(*run.end) == COMPLETED else first_to_end(run.path)


def _words_of_end(first: FirstEnd) -> str:
    after = f"after step {first.step}" if first.step >= 0 else "before the first step"
    if not first.ranks and first.reason == LOST_CONTACT:
        return f"one rank ended {after} and others lost contact with it; the output of torchrun names the root cause"
    if not first.ranks:
        return (
            f"all ranks fell silent {after}, and none saw another end: if they are not at work, they were killed "
            "together; the output of torchrun names the root cause"
        )
    ranks = ("rank " if len(first.ranks) == 1 else "ranks ") + ", ".join(map(str, first.ranks))
    words = {"": "killed or crashed", NOT_CLOSED: "without an uncaught error, and its monitor was not closed"}
    return f"{ranks} ended first, {after}: {words.get(first.reason) or short(first.reason)}"


def _not_judged(diagnosis: Diagnosis) -> str:
    """Which rules judged the run live but are missing here, what to do, and whether their alerts count."""
    missing = diagnosis.not_judged
    names = ", ".join(short(f"{rule.code} {rule.name}") for rule in missing)
    codes = {rule.code for rule in missing}
    alerts = sum(alert.code in codes for alert in diagnosis.alerts)
    is_single = len(missing) == 1
    are = "1 rule that judged this run live is" if is_single else f"{len(missing)} rules that judged this run live are"
    without = f"this version of forewarn does not have {'it' if is_single else 'them'}"
    hint = "add --rules MODULE" if any(map(is_own, codes)) else without
    their = "its" if is_single else "their"
    plural = "alert recorded live counts" if alerts == 1 else "alerts recorded live count"
    outcome = f"{their} {alerts} {plural} here" if alerts else f"{'it' if is_single else 'they'} raised no alert live"
    return f"{are} not loaded here: {names}; {hint} ({outcome})"


def alerts_part(diagnosis: Diagnosis) -> RenderableType:
    """What is wrong and what to do about it."""
    parts: list[RenderableType] = []
    for root, symptoms in folded(diagnosis):
        parts += [
            alert_lines(root),
            *(Padding(alert_lines(symptom, is_symptom=True), (0, 0, 0, 3)) for symptom in symptoms),
            Text(),
        ]
    if remedies := things_to_do(diagnosis):
        parts += [what_to_do(remedies), Text()]
    return Group(*parts)


def actions_part(actions: Sequence[Action]) -> RenderableType:
    """What the policy has done, and what came of it."""
    rows = Table.grid(padding=(0, 2))
    for action in actions[-MOST_ACTIONS:]:
        words = deed(dataclasses.replace(action, watched_steps=0))
        rows.add_row(f"  step {action.step}", Text("\n".join(filter(None, [words, outcome(action)]))))
    title = Text("What the policy did", style="bold")
    if len(actions) > MOST_ACTIONS:
        title.append(f" (the last {MOST_ACTIONS} of {len(actions)} actions)", style="not bold")
    return Group(title, rows)


def evaluation_part(diagnosis: Diagnosis) -> RenderableType:
    """The last epochs in words, with the advice of open notes."""
    words = [epoch.words() for epoch in diagnosis.epochs[-MOST_EPOCHS:]]
    if all(math.isnan(epoch.validation_loss) for epoch in diagnosis.epochs):
        words.append(NO_VALIDATION_LOSS)
    lines = (Padding(Text(line), (0, 0, 0, 2)) for line in words)
    quiet = [
        alert for alert in diagnosis.ranked if alert.severity is Severity.INFO and alert.state is AlertState.FIRING
    ]
    return Group(Text("Evaluation", style="bold"), *lines, *map(_hanging, advice_lines(quiet)))


def _hanging(line: Text) -> RenderableType:
    """A line whose continuation is as far to the right as its first word, behind its number."""
    start = len(line.plain) - len(line.plain.lstrip(" 0123456789."))
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(Text(line.plain[:start].rstrip() or " " * (start - 1)), line[start:])
    return table


def heading(run: Run) -> Text:
    """The run in one line: `runs/demo  GPT, 0.8 million parameters, AdamW, 300 steps, completed`."""
    reason = run.end[0] if run.end else None
    state = run_state(reason, run.updated or run.info.started)
    state += f" ({short(reason)})" if reason not in (None, state) else ""
    steps = f"{run.num_steps} steps"
    if run.info.imported_from:
        steps = f"{run.num_steps} logged {'epochs' if run.info.step_is_epoch else 'steps'} up to {run.last_step}"
    return Text.assemble((short(str(run.path)), "bold"), "  ", ", ".join([*model_words(run.info), steps, state]))


def _summary(diagnosis: Diagnosis) -> Text:
    style = "bold yellow" if diagnosis.verdict in UNCERTAIN else VERDICT_STYLES[diagnosis.exit_code]
    return Text.assemble((diagnosis.verdict, style), f": {summary_words(diagnosis)}")


def alert_lines(group: AlertGroup, is_symptom: bool = False) -> RenderableType:
    """One kind of alert: what happened, its rule, its numbers, why, and at which steps."""
    worst = group.worst
    style = STYLES[worst.severity] if group.is_firing else "dim"
    title = Table.grid(expand=True, padding=(0, 2, 0, 0))
    title.add_column(width=1)
    title.add_column(ratio=1)
    title.add_column(justify="right", no_wrap=True)
    title.add_row(
        Text(mark(worst.severity) if group.is_firing else HEALTHY, style=style),
        Text(group.headline, style="" if is_symptom else "bold"),
        Text(f"{worst.name} {worst.code}", style="dim"),
    )
    fired = min(alert.fired for alert in group.alerts if alert.fired is not None)
    last = max(alert.last for alert in group.alerts)
    seen = f", last seen at step {last}" if last > fired else ""
    times = f"open since step {fired}{seen}" if group.is_firing else f"resolved, {steps_of(group.alerts)}"
    lines = [group.numbers, f"cause: {literal(worst.cause)}" if worst.cause else ""]
    details = [Text(line) for line in lines if line]
    return Group(title, Padding(Group(*details, Text(times, style="dim")), (0, 0, 0, 3)))


def what_to_do(remedies: Iterable[Remedy]) -> RenderableType:
    """The remedies as a numbered list."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for rank, remedy in enumerate(remedies, 1):
        table.add_row(f"  {rank}.", advice(remedy))
    return Group(Text("What to do", style="bold"), table)


def _checklist(diagnosis: Diagnosis, *, only_known: bool = False) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in diagnosis.checklist:
        if only_known and check.state == "unknown":
            continue
        mark, style = _MARKS[check.state]
        table.add_row(Text(f"  {mark}", style=style), Text(check.name), Text(check.detail, style="dim"))
    return Group(Text("Health checks", style="bold"), table)


def next_commands(
    path: Path, ranked: tuple[Alert, ...], *first: str, rule_modules: Sequence[str] = ()
) -> RenderableType:
    """The commands to run next."""
    commands = [f"forewarn show {shlex.quote(str(path))}"]
    if ranked:
        worst = ranked[0]
        explain = ["forewarn", "explain", worst.name]
        if is_own(worst.code):
            explain += [word for module in rule_modules or ["MODULE"] for word in ("--rules", module)]
        commands = [f"{commands[0]} --step {worst.fired}", shlex.join(explain)]
    if replay := replay_command(path):
        commands.append(replay)
    return Group(Text("Next", style="bold"), *(Text(f"  {literal(command)}") for command in [*first, *commands]))
