"""Alerts as messages to people: Slack, e-mail, Discord, webhooks and many more services, through apprise."""

from __future__ import annotations

import logging
import shlex
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forewarn.random_states import random_states_kept
from forewarn.types import Action, Alert, AlertState, Block, RunEnd, RunStart, Severity
from forewarn.views.console import Line, News

_log = logging.getLogger("forewarn")

SECONDS_APART, MOST_SECONDS_APART = 60.0, 600.0
"""Least time between two messages; what happens in between is in the second one. It doubles while news keep coming."""
PAUSES = (2.0, 10.0, 30.0)
"""Seconds before each new attempt."""
SECONDS_AT_THE_END = 10.0
"""How long the end of a run waits for the last message."""
MOST_SECONDS_OF_ATTEMPT = 60.0
"""After which a service that still answers, a byte now and then, counts as dead."""
MOST_LINES = 40
"""Maximum lines of a message."""

_TALKATIVE = ("apprise", "urllib3.connectionpool", "requests")
"""Loggers that may write the URL of a service, besides those that exist by then."""

Level = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class Service:
    """Somewhere to send messages. Its URL is a secret that is never shown: it may hold a token or a password."""

    name: str
    send: Callable[..., bool]
    """Sends a `title` and a `body`; returns whether that worked."""


class Notifier:
    """Sends alerts of at least a severity, and when they resolve, from a thread of its own.

    The training never waits for a service. A message that cannot be delivered is tried again a few times.
    """

    def __init__(
        self, services: Sequence[Service], lowest: Level = "critical", *, pauses: Sequence[float] | None = None,
        seconds_apart: float = SECONDS_APART,
    ) -> None:  # fmt: skip
        self.undelivered = ""
        """The services that did not take the last message, and why; empty if all did."""
        self._services = tuple(services)
        self._pauses, self._apart = PAUSES if pauses is None else tuple(pauses), seconds_apart
        self._news = News(Severity[lowest.upper()])
        self._run: Path | None = None
        self._waiting: list[str] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin(self, start: RunStart) -> None:
        self._run = start.path

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        if changed or taken:
            self._say(self._news.lines(step, (), changed, taken))

    def end(self, end: RunEnd) -> None:
        """Nothing: alerts at the end of a run have been sent like all others."""

    def close(self) -> None:
        """Send what is waiting, for a few seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(SECONDS_AT_THE_END)
            if self._thread.is_alive():
                _log.warning("the last notification was not delivered within %.0f s", SECONDS_AT_THE_END)

    def _say(self, lines: Sequence[Line]) -> None:
        if not lines:
            return
        with self._changed:
            self._waiting += [line.plain for line in lines]
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="forewarn notify", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        apart = self._apart
        while lines := self._next():
            self._deliver(*message(self._run, lines))
            self._pause(apart)
            apart = min(2 * apart, MOST_SECONDS_APART) if self._waiting else self._apart

    def _next(self) -> list[str]:
        """All lines that are waiting, as soon as there are any; none once the run is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            lines, self._waiting = self._waiting, []
            return lines

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)

    def _deliver(self, title: str, text: str) -> None:
        """Send to all services, and again to those that did not take it."""
        left: dict[Service, str] = dict.fromkeys(self._services, "")
        for pause in (0.0, *self._pauses):
            self._pause(pause)
            left = deliver(tuple(left), title, text)
            if not left or (self._closing and pause):
                break
        undelivered = "; ".join(f"{service.name}: {failure}" for service, failure in left.items())
        if undelivered and not self.undelivered:
            _log.warning("a notification was not delivered (%s); training continues", undelivered)
        self.undelivered = undelivered


class Listener:
    """Calls a function with each alert that fires, gets worse or resolves."""

    def __init__(self, function: Callable[[Alert], Any]) -> None:
        self._function = function

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        for alert in changed:
            if alert.state is not AlertState.PENDING:
                self._function(alert)

    def close(self) -> None:
        """Nothing is buffered, so there is nothing to do."""


def message(run: Path | None, lines: Sequence[str]) -> tuple[str, str]:
    """The title and the text of a message: the run, what happened, and where to look."""
    more = [f"and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    name = "a run" if run is None else run.name
    look = [] if run is None else [f"forewarn check {shlex.quote(str(run))}   (on {socket.gethostname()})"]
    return f"forewarn: {harmless(name)}", harmless("\n".join([*lines[:MOST_LINES], *more, *look]))


def services(urls: Sequence[str]) -> list[Service]:
    """The services behind these URLs. Raises ValueError if apprise does not know one, without showing it."""
    try:
        with random_states_kept():
            import apprise
    except ModuleNotFoundError as error:
        if error.name != "apprise":
            raise
        raise ModuleNotFoundError("notify needs apprise: pip install 'forewarn[notify]'", name="apprise") from None
    asset = apprise.AppriseAsset(app_id="forewarn", app_desc="forewarn")
    asset.http_redirects = False  # a redirect drops the message and passes the URL's secrets on to another host
    targets = []
    for place, url in enumerate(urls, 1):
        name = str(url).partition(":")[0] if "://" in str(url) else ""
        with _silenced(), random_states_kept(), warnings.catch_warnings(action="ignore"):  # it imports old modules
            target: Any = apprise.Apprise.instantiate(url, asset=asset) if isinstance(url, str) else None
        if target is None:
            kind = f"; its service is {name!r}" if name.isidentifier() else ""
            raise ValueError(
                f"URL {place} of notify is not valid{kind} (it is not shown because it may hold a secret); "
                "https://appriseit.com/services lists the form of each service's URL"
            )
        target.notify_format = apprise.NotifyFormat.TEXT
        targets.append(Service(name, target.notify))  # it sends in the thread that calls it
    return targets


def deliver(services: Sequence[Service], title: str, text: str) -> dict[Service, str]:
    """Send a message; returns what went wrong by service, in words that cannot hold a URL."""
    outcomes = {service: _in_time(service, title, text) for service in services}
    return {service: failure for service, failure in outcomes.items() if failure}


def _in_time(service: Service, title: str, text: str) -> str:
    """What went wrong. Timeouts of sockets are per byte, so the attempt as a whole has one of its own."""
    failures: list[str] = []
    attempt = threading.Thread(
        target=lambda: failures.append(_attempt(service, title, text)), name="forewarn notify", daemon=True
    )
    try:
        attempt.start()
    except RuntimeError:  # the interpreter shuts down
        return _attempt(service, title, text)
    attempt.join(MOST_SECONDS_OF_ATTEMPT)
    return failures[0] if failures else f"no answer within {MOST_SECONDS_OF_ATTEMPT:.0f} s"


def _attempt(service: Service, title: str, text: str) -> str:
    try:
        with _silenced():
            return "" if service.send(title=title, body=text) else "it was not reached, or did not accept the message"
    except Exception as error:
        return type(error).__name__


def harmless(text: str) -> str:
    """Text in which no chat service finds a mention such as `@everyone` or `<!channel>`: names come from models."""
    return text.replace("@", "@\u2060").replace("<", "‹").replace(">", "›")


class _FromThread(logging.Filter):
    """Drops the records of one thread."""

    def __init__(self, thread: int) -> None:
        super().__init__()
        self._thread = thread

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


@contextmanager
def _silenced() -> Iterator[None]:
    """Nothing that this thread does is logged by the libraries that send: they would write URLs."""
    own = _FromThread(threading.get_ident())
    existing = [one for one in list(logging.root.manager.loggerDict.values()) if isinstance(one, logging.Logger)]
    loggers = {logging.root, *existing, *(logging.getLogger(name) for name in _TALKATIVE)}
    for logger in loggers:
        logger.addFilter(own)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(own)
