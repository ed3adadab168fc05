"""Alerts as lines on standard error; the default view of `watch`."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import IO, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from forewarn.standing import NOT_FALLING, alert_words, open_words
from forewarn.types import Action, Alert, AlertState, Block, RunEnd, RunStart, Severity, counted
from forewarn.views.depth import depth_profile
from forewarn.views.wording import (
    CRITICAL,
    HEALTHY,
    INFORMATION,
    STYLES,
    WARNING,
    AlertGroup,
    deed,
    fit_for,
    grouped,
    literal,
    losses,
    mark,
    model_words,
    short,
    steps_of,
    thing_to_do,
)

MOST_CAUSES = 3
"""Maximum number of alerts per step shown in full; the others share a line."""
Identity = tuple[str, str]

QUIET_STEPS = 20
"""Steps after an alert during which the same kind at no higher severity is not shown again."""
_WIDEST = 100
"""Maximum columns, even on a wider terminal: longer lines are hard to read."""


class AlertLines:
    """Prints the start of the run, its alerts as they fire and resolve, and the end.

    Notes are stored with the run and shown by `forewarn check`; with `verbose`, they are printed too.
    """

    def __init__(self, stream: IO[str] | None = None, verbose: bool = False) -> None:
        self._console = plain_console(stream, stderr=True)
        self._news = News(Severity.INFO if verbose else Severity.WARNING)

    def begin(self, start: RunStart) -> None:
        print_lines(self._console, start_lines(start))

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        print_lines(self._console, self._news.lines(step, blocks, changed, taken))

    def end(self, end: RunEnd) -> None:
        print_lines(self._console, end_lines(end))

    def close(self) -> None:
        """Nothing is buffered, so there is nothing to do."""


class LogLines:
    """The same as `AlertLines` through `logging`, one record per message; the default logger is `forewarn`."""

    def __init__(self, logger: str = "forewarn", verbose: bool = False) -> None:
        self._log = logging.getLogger(logger)
        self._news = News(Severity.INFO if verbose else Severity.WARNING)

    def begin(self, start: RunStart) -> None:
        self._say(logging.INFO, start_lines(start))

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        firing = [alert.severity for alert in changed if alert.state is AlertState.FIRING]
        levels = {Severity.WARNING: logging.WARNING, Severity.CRITICAL: logging.ERROR}
        lines = self._news.lines(step, blocks, changed, taken)
        if lines:
            self._say(levels.get(max(firing, default=Severity.INFO), logging.INFO), lines)

    def end(self, end: RunEnd) -> None:
        self._say((logging.INFO, logging.WARNING, logging.ERROR)[end.exit_code], end_lines(end))

    def close(self) -> None:
        """Nothing is buffered, so there is nothing to do."""

    def _say(self, level: int, lines: Sequence[Line]) -> None:
        self._log.log(level, "%s", "\n".join(line.plain for line in lines))


class Line(NamedTuple):
    """A line of text for a terminal, a file or a log."""

    text: Text
    hang: int = 2
    """Indentation of continuation lines if the line is wrapped."""
    aside: str = ""
    """Text at the right edge if there is room, else on a line below; in a file, in parentheses at the end."""

    @property
    def plain(self) -> str:
        """The whole line as plain text, for a file."""
        return self.text.plain + (f" ({self.aside})" if self.aside else "")


class News:
    """Turns the changes of a step into lines, and remembers them so that nothing is repeated.

    A cause is shown in full. Its symptoms share a line; those that follow within `QUIET_STEPS` wait for the next line.
    """

    def __init__(self, lowest: Severity = Severity.WARNING) -> None:
        self._lowest = lowest
        self._said: dict[str, _Saying] = {}
        """When each code was last shown."""
        self._symptoms: dict[str, _Symptoms] = {}
        """By the code of their cause."""
        self._firing: dict[Identity, Alert] = {}
        self._over: list[Alert] = []
        """Resolved, but not shown yet."""

    def lines(
        self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]
    ) -> list[Line]:
        """The news of a step, most important first."""
        wanted = {(action.code, action.scope) for action in taken if action.action == "notify"}
        shown = [alert for alert in changed if alert.severity >= self._lowest or alert.identity in wanted]
        news = [group for group in grouped(alert for alert in shown if alert.state is AlertState.FIRING)
                if self._is_news(group.worst, step)]  # fmt: skip
        for group in news:
            self._said[group.worst.code] = _Saying(group.worst.severity, step, group.worst.name)
        causes = [group for group in news if group.worst.follows not in self._said and not self._is_open(group)]
        lines = [line for group in causes[:MOST_CAUSES] for line in alert_lines(step, group)]
        profile = depth_profile(blocks, [group.worst for group in causes])
        lines += [] if profile is None else [Line(Text(f"  {profile}"))]
        if also := causes[MOST_CAUSES:]:
            lines.append(_line(step, also[0].worst, f"Also: {', '.join(map(_name_and_place, also))}"))
        for group in news:
            if group.worst.follows not in self._said and self._is_open(group):
                lines.append(_line(step, group.worst, f"Also {_name_and_place(group)}"))
        lines += self._symptom_lines(step, [group for group in news if group.worst.follows in self._said])
        lines += self._resolved_lines(step, shown)
        taken = [action for action in taken if action.action != "notify"]  # the alert itself is shown
        for action in taken[:MOST_CAUSES]:
            at_step = step if action.watched_steps else max(step, action.step)  # it may have led to an earlier step
            lines.append(Line(Text.assemble(("→", "magenta"), f" step {at_step}  {deed(action)}")))
        if len(taken) > MOST_CAUSES:
            lines.append(Line(Text(f"  and {len(taken) - MOST_CAUSES} more actions")))
        return lines

    def _is_news(self, alert: Alert, step: int) -> bool:
        earlier = self._said.get(alert.code)
        return earlier is None or alert.severity > earlier.severity or step - earlier.step >= QUIET_STEPS

    def _is_open(self, group: AlertGroup) -> bool:
        """Whether the same kind of alert, at least as severe, is already open elsewhere."""
        others = [alert for alert in self._firing.values() if alert.code == group.worst.code]
        return any(alert.severity >= group.worst.severity for alert in others)

    def _symptom_lines(self, step: int, symptoms: Sequence[AlertGroup]) -> list[Line]:
        """One line per cause with new symptoms. A symptom worse than before is shown at once."""
        for group in symptoms:
            self._symptoms.setdefault(group.worst.follows, _Symptoms()).waiting[group.worst.code] = group
        lines = []
        for code, chain in self._symptoms.items():
            worst = max((group.worst for group in chain.waiting.values()), key=attrgetter("severity"), default=None)
            if worst is None or (worst.severity <= chain.severity and step - chain.step < QUIET_STEPS):
                continue
            names = ", ".join(map(_name_and_place, chain.waiting.values()))
            lines.append(_line(step, worst, f"Following {self._said[code].name}: {names}"))
            self._symptoms[code] = _Symptoms(max(worst.severity, chain.severity), step)
        return lines

    def _resolved_lines(self, step: int, shown: Sequence[Alert]) -> list[Line]:
        """Resolved alerts, shown when a cause is resolved or nothing fires any more."""
        for alert in shown:
            if alert.state is AlertState.FIRING:
                self._firing[alert.identity] = alert
            elif self._firing.pop(alert.identity, None) is not None:
                self._over.append(alert)
        is_cause = any(alert.follows not in self._said for alert in self._over)
        if not self._over or (self._firing and not is_cause):
            return []
        names = ", ".join(map(_name_and_place, grouped(self._over)))
        words = f"Resolved: {names} ({steps_of(self._over)})"
        self._over = []
        return [_line(step, None, words)]


class _Saying(NamedTuple):
    severity: Severity
    step: int
    name: str


@dataclass(slots=True)
class _Symptoms:
    """The symptoms of one cause: when they were last shown, and which are waiting."""

    severity: Severity | int = 0
    step: int = 0
    waiting: dict[str, AlertGroup] = field(default_factory=dict)
    """By code."""


def alert_lines(step: int, group: AlertGroup) -> list[Line]:
    """One kind of alert in full: what happened, its numbers, why, and what to do first."""
    worst = group.worst
    lines = [_line(step, worst, group.headline, aside=worst.name)]
    if numbers := group.numbers:
        lines.append(Line(Text(f"  {numbers}", style="dim")))
    if worst.cause:
        lines.append(_labelled("cause", worst.cause))
    if worst.remedies and worst.severity > Severity.INFO:
        lines.append(_labelled("do", thing_to_do(worst.remedies[0])))
    return lines


def start_lines(start: RunStart) -> list[Line]:
    """What is watched, how often it is measured, and where it is stored."""
    every = start.info.every
    detail = {0: "detail on the steps you chose", 1: "detail on every step"}.get(every, f"detail every {every} steps")
    place = f"stored in {short(str(start.path))}"
    if start.instead_of is not None:
        place += f", because {short(str(start.instead_of))} already holds a run"
    words = [*model_words(start.info), detail, f"{start.num_rules} rules", place]
    return [Line(Text.assemble(("forewarn", "bold"), f"  {' · '.join(words)}"), hang=10)]


def end_lines(end: RunEnd) -> list[Line]:
    """The verdict on one line; if something is wrong, also its cause, what to do first, and the next command."""
    sign, style = ((HEALTHY, "green"), (WARNING, "yellow"), (CRITICAL, "bold red"))[end.exit_code]
    if end.verdict == NOT_FALLING:
        sign, style = INFORMATION, "yellow"
    run = short(str(end.path))
    serious = [alert for alert in end.alerts if alert.severity > Severity.INFO]
    is_firing = any(alert.state is AlertState.FIRING for alert in serious)
    words = [f"{run}: {open_words(serious) if is_firing else end.verdict}", f"{end.num_steps} steps"]
    words += [alert_words(serious)] if serious and not is_firing else []
    words += [f"{end.num_rules} rules"] if not serious else []
    words += losses(end.first_loss, end.last_loss)
    words += [notes] if (notes := counted([alert for alert in end.alerts if alert.severity is Severity.INFO])) else []
    lines = [Line(Text.assemble((f"{sign} forewarn", style), f"  {literal(' · '.join(words))}"), hang=12)]
    if end.exit_code and serious:
        first = serious[0]
        told = f"{first.headline or first.name} (step {first.fired}, {first.name})"
        lines.append(_labelled("cause", told))
        if first.remedies:
            lines.append(_labelled("do", thing_to_do(first.remedies[0])))
    if serious:
        lines.append(_labelled("next", f"forewarn check {shlex.quote(str(end.path))}"))
    return lines


def _line(step: int, alert: Alert | None, words: str, aside: str = "") -> Line:
    """A line that begins with a sign and the step; without an alert, the sign for healthy."""
    sign, style = (HEALTHY, "green") if alert is None else (mark(alert.severity), STYLES[alert.severity])
    start = f"{sign} step {step}"
    return Line(Text.assemble((start, style), "  ", (words, "bold" if aside else "")), hang=2, aside=aside)


def _labelled(label: str, words: str) -> Line:
    return Line(Text.assemble((f"  {label:<6} ", "dim"), literal(words)), hang=9)


def _name_and_place(group: AlertGroup) -> str:
    return f"{group.worst.name} {group.place}".rstrip()


class _PlainConsole(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Segments that the stream can write. Control characters are escaped, so a name cannot control the terminal."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\n" or (segment.text.isprintable() and segment.text.isascii()):
                yield segment
            else:
                words = "\n".join(map(literal, segment.text.split("\n")))
                yield Segment(fit_for(self.file, words), segment.style)

    def on_broken_pipe(self) -> None:
        """Stop printing; rich would end the process, and with it the training run."""
        self.quiet = True


def plain_console(stream: IO[str] | None = None, stderr: bool = False) -> Console:
    """A console that prints text literally: no markup, emoji codes or automatic highlighting."""
    return _PlainConsole(file=stream, stderr=stderr, markup=False, emoji=False, highlight=False)


def print_lines(console: Console, lines: Sequence[Line | Text]) -> None:
    """Print lines unwrapped, so that a log can be searched; on a terminal, wrap and indent them.

    Goes through tqdm if it shows a progress bar, so that the bar stays intact.
    """
    if not lines:
        return
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if bars is None or not getattr(bars, "_instances", None):
        _print(console, lines)
        return
    with console.capture() as captured:
        _print(console, lines)
    bars.write(captured.get(), file=console.file, end="")


def _print(console: Console, lines: Sequence[Line | Text]) -> None:
    parts: list[Text] = []
    for line in lines:
        line = line if isinstance(line, Line) else Line(line, hang=4)
        if (spelled := fit_for(console.file, line.text.plain)) != line.text.plain:
            line = line._replace(text=Text(spelled))
        is_seen = console.is_terminal or console.is_jupyter
        parts += _fitted(console, line, min(console.width, _WIDEST)) if is_seen else [Text(line.plain)]
    console.print(Text("\n").join(parts), soft_wrap=True)  # all at once: a notebook puts space between outputs


def _fitted(console: Console, line: Line, width: int) -> list[Text]:
    """The line split into parts that fit the terminal."""
    parts = [line.text.wrap(console, width)[0]]
    rest = line.text[len(parts[0].plain) :]
    rest = rest[len(rest.plain) - len(rest.plain.lstrip()) :]
    if rest.plain:
        parts += [Text(" " * line.hang) + part for part in rest.wrap(console, max(20, width - line.hang))]
    for part in parts:
        part.rstrip()
    if line.aside:
        room = width - parts[-1].cell_len - len(line.aside)
        if room < 2:
            parts.append(Text())
            room = width - len(line.aside)
        parts[-1] = Text.assemble(parts[-1], " " * max(room, 0), (line.aside, "dim"))
    return parts
