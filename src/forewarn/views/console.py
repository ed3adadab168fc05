"""Alerts as lines on standard error; the default view of `watch`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from forewarn.types import Action, Alert, AlertState, Block, Severity
from forewarn.views.depth import depth_profile
from forewarn.views.wording import STYLES, AlertGroup, advice, deed, grouped, literal, numbers

MOST_GROUPS = 3
"""Most kinds of alert with a line of their own at one step; the others share one."""
MOST_REMEDIES = 3
MOST_EVIDENCE = 4
"""Numbers beside a value and its bound; `forewarn check` shows all."""
QUIET_STEPS = 20
"""Steps after an alert during which the same kind at no higher severity is not shown again."""

_INDENT = "    "


class AlertLines:
    """Prints alerts as they fire and resolve, in a few lines per step for any number of layers."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._console = plain_console(stream, stderr=True)
        self._news = News()

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        print_lines(self._console, self._news.lines(step, blocks, changed, taken))

    def close(self) -> None:
        """Nothing is held back, so there is nothing to do."""


class News:
    """Turns the changes of a step into lines, and remembers them so that nothing is repeated."""

    def __init__(self) -> None:
        self._said: dict[str, _Saying] = {}
        """The last line of each code."""
        self._advised: _Saying | None = None
        """The last advice, whatever it was about."""

    def lines(
        self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]
    ) -> list[Text]:
        """About ten lines at most, the most important first."""
        fired = [alert for alert in changed if alert.state is AlertState.FIRING]
        over = [alert for alert in changed if alert.state is AlertState.RESOLVED and alert.severity > Severity.INFO]
        news = [group for group in grouped(fired) if _is_news(group.worst, step, self._said.get(group.worst.code))]
        lines = [_headline(step, group) for group in news[:MOST_GROUPS]]
        if len(news) > MOST_GROUPS:
            lines.append(_line(step, "also", "dim", ", ".join(group.title for group in news[MOST_GROUPS:])))
        profile = depth_profile(blocks, [group.worst for group in news])
        lines += [] if profile is None else [Text(f"{_INDENT}{profile}")]
        if news:
            lines += self._advice(news[0].worst, step)
        if over:
            lines.append(_line(step, "resolved", "green", ", ".join(group.where for group in grouped(over))))
        lines += [_line(step, "done", "magenta", deed(action)) for action in taken[:MOST_GROUPS]]
        if len(taken) > MOST_GROUPS:
            lines.append(_line(step, "done", "magenta", f"{len(taken) - MOST_GROUPS} more actions"))
        self._said |= {group.worst.code: _Saying(group.worst.severity, step) for group in news}
        return lines

    def _advice(self, alert: Alert, step: int) -> list[Text]:
        """What to do, once per kind of alert; recent advice is replaced only by advice on something worse."""
        earlier = self._said.get(alert.code)
        repeated = earlier is not None and alert.severity <= earlier.severity
        if alert.severity is Severity.INFO or repeated or not _is_news(alert, step, self._advised):
            return []
        self._advised = _Saying(alert.severity, step)
        remedies = enumerate(alert.remedies[:MOST_REMEDIES], 1)
        lines = [Text(f"{_INDENT}{rank}. {advice(remedy)}") for rank, remedy in remedies]
        return [*lines, Text(f"{_INDENT}why: forewarn explain {alert.name}", style="dim")]


@dataclass(frozen=True, slots=True)
class _Saying:
    severity: Severity
    step: int


def _is_news(alert: Alert, step: int, earlier: _Saying | None) -> bool:
    return earlier is None or alert.severity > earlier.severity or step - earlier.step >= QUIET_STEPS


class _PlainConsole(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Segments without control characters: whatever a name holds, it does not reach the terminal as a command."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\n" or segment.text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(map(literal, segment.text.split("\n"))), segment.style)

    def on_broken_pipe(self) -> None:
        """Stop printing; rich would end the process, and with it the training run."""
        self.quiet = True


def plain_console(stream: IO[str] | None = None, stderr: bool = False) -> Console:
    """A console that takes text literally: no markup, no emoji codes, no guessed highlights."""
    return _PlainConsole(file=stream, stderr=stderr, markup=False, emoji=False, highlight=False)


def print_lines(console: Console, lines: Sequence[Text]) -> None:
    """Print lines unwrapped, so that a log can be searched; on a terminal, wrap and indent them."""
    for line in lines:
        if not console.is_terminal:
            console.print(line, soft_wrap=True)
            continue
        first, *continuation = line.wrap(console, max(20, console.width - len(_INDENT)))
        console.print(first)
        for part in continuation:
            console.print(Text(_INDENT) + part)


def _headline(step: int, group: AlertGroup) -> Text:
    worst = group.worst
    words = f"{group.where}: {numbers(worst.finding, MOST_EVIDENCE)}"
    return _line(step, str(worst.severity), STYLES[worst.severity], words)


def _line(step: int, label: str, style: str, words: str) -> Text:
    return Text.assemble((f"forewarn step {step}: ", "dim"), (label, style), f" {words}")
