"""The dashboard's server: the page, the data of runs, and their changes while they train. Needs starlette."""

from __future__ import annotations

import asyncio
import hmac
import html
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from forewarn.standing import run_state
from forewarn.store import Run, RunError, open_run
from forewarn.store.errors import UnknownSeriesError
from forewarn.store.run_summary import Stamp
from forewarn.views.addresses import host_of, is_loopback, is_own
from forewarn.views.comparison import MOST_RUNS, compare
from forewarn.views.exposition import CONTENT_TYPE, exposition
from forewarn.views.page.answers import ANSWERS, BadRequestError, Query
from forewarn.views.page.built_page import NOT_BUILT, asset, asset_stamp
from forewarn.views.page.folder import Folder, NoRunError, checked_notes, write_notes
from forewarn.views.page.overview import overview
from forewarn.views.page.packing import json_bytes

POLL_SECONDS = 0.5
LIST_SECONDS = 2.0
ALIVE_SECONDS = 15.0
MOST_BODY_BYTES = 1 << 16
LONGEST_QUERY = 3 << 14
"""The HTTP parser of uvicorn takes up to 64 KB."""
COOKIE = "forewarn_token"
TOKEN_HEADER = "x-forewarn-token"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}

Endpoint = Callable[[Request], Awaitable[Response]]


def app(root: Path, token: str, host: str = "127.0.0.1") -> Guarded:
    """The dashboard of the runs in a folder, or of a single run.

    Writing needs the token, and so does everything else if the server is bound to a `host` beyond loopback. Only
    requests to loopback addresses or to that host are answered, so that no other web page can reach the server by a
    name of its own.
    """
    folder = Folder(root)
    dashboard = _Dashboard(folder, token, needs_token=not is_loopback(host))

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        folder.close()

    endpoints: dict[str, Endpoint] = {
        "/": dashboard.index,
        "/page.js": partial(dashboard.file, "page.js", "text/javascript"),
        "/page.css": partial(dashboard.file, "page.css", "text/css"),
        "/metrics": dashboard.metrics,
        "/api/runs": dashboard.runs,
        "/api/run": dashboard.run,
        **{path: partial(dashboard.data, path) for path in ANSWERS},
        "/api/compare": dashboard.comparison,
        "/api/events": dashboard.events,
    }
    routes = [Route(path, partial(_answered, endpoint)) for path, endpoint in endpoints.items()]
    routes.append(Route("/api/note", partial(_answered, dashboard.note), methods=["POST"]))
    answering = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: _not_found, 405: _not_found})
    return Guarded(answering, dashboard, host)


def serve(application: Guarded, listener: socket.socket) -> None:
    """Answer requests until Ctrl-C; pages that still listen for changes do not delay the end."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            application.end_streams()
            await super().shutdown(sockets)

    config = uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=2, access_log=False)
    with suppress(KeyboardInterrupt):  # uvicorn has closed everything by then
        Server(config).run(sockets=[listener])


class Guarded:
    """Answers nobody but the page: checks the host, the token and the size of every request, and sends safe headers."""

    def __init__(self, answering: ASGIApp, dashboard: _Dashboard, host: str) -> None:
        self._answering, self._dashboard, self._host = answering, dashboard, host

    def end_streams(self) -> None:
        """Let every page that listens for changes know that there will be none."""
        self._dashboard.closing.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._answering(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in present)]
            await send(message)

        request = Request(scope, receive)
        refusal = self._refusal(request)
        await (refusal or self._answering)(scope, receive, send_safely)

    def _refusal(self, request: Request) -> Response | None:
        if not is_own(host_of(request.headers.get("host", "")), self._host):
            return _error(403, "this server answers only to its own address")
        if len(request.url.query) > LONGEST_QUERY:
            return _error(414, "the request is too long")
        if self._dashboard.needs_token and not self._dashboard.is_allowed(request):
            return _error(401, "this address needs the token that forewarn serve printed: …/?token=…")
        return None


class _Dashboard:
    """The endpoints."""

    def __init__(self, folder: Folder, token: str, needs_token: bool) -> None:
        self._folder, self._token, self.needs_token = folder, token, needs_token
        self._overviews: dict[str, tuple[Stamp, _Overview]] = {}
        self.closing = asyncio.Event()

    def is_allowed(self, request: Request) -> bool:
        """Whether a request carries the token: in the address, in one of two headers or in the cookie."""
        given = (
            request.headers.get("authorization", "").removeprefix("Bearer "),
            request.query_params.get("token", ""),
            request.headers.get(TOKEN_HEADER, ""),
            request.cookies.get(COOKIE, ""),
        )
        return any(self.is_token(item) for item in given)

    def is_token(self, given: str) -> bool:
        """Whether this is the token, in a time that does not tell how much of it is right."""
        return hmac.compare_digest(self._token.encode(), given.encode("utf-8", "replace"))

    async def index(self, request: Request) -> Response:
        page = asset("index.html")
        if page is None:
            return _error(503, NOT_BUILT)
        meta = f'<meta name="token" content="{html.escape(self._token, quote=True)}">'
        response = Response(page.replace(b"</head>", meta.encode() + b"</head>", 1), media_type="text/html")
        if self.needs_token:
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
        return response

    async def file(self, name: str, kind: str, request: Request) -> Response:
        stamp = asset_stamp(name)
        if stamp is None:
            return _error(503, NOT_BUILT)
        tag = f'"{stamp}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return Response(asset(name), media_type=kind, headers={"etag": tag})

    async def runs(self, request: Request) -> Response:
        rows = await run_in_threadpool(self._folder.rows)
        return _json({"root": str(self._folder.root), "runs": rows})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus: every run that trains, from the summaries that their writers keep."""
        states, runs = await run_in_threadpool(self._folder.exported)
        text = await run_in_threadpool(exposition, runs, states)
        return Response(text.encode(), headers={"content-type": CONTENT_TYPE})

    async def run(self, request: Request) -> Response:
        name = _run_of(request)
        stamp = await run_in_threadpool(self._folder.stamp, name)
        kept = self._overviews.get(name)
        if kept is None or kept[0] != stamp or not kept[1].is_current():
            kept = stamp, await asyncio.wrap_future(self._folder.submit(name, partial(_overview_of, name=name)))
            if len(self._overviews) >= MOST_RUNS:
                self._overviews.pop(next(iter(self._overviews)))
            self._overviews[name] = kept
        return Response(kept[1].body, media_type="application/json")

    async def data(self, path: str, request: Request) -> Response:
        query: Query = parse_qs(request.url.query, keep_blank_values=True)
        body = await asyncio.wrap_future(self._folder.submit(_run_of(request), partial(ANSWERS[path], query=query)))
        return Response(body, media_type="application/octet-stream")

    async def comparison(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(names) <= MOST_RUNS:
            raise BadRequestError(f"choose 2 to {MOST_RUNS} different runs to compare")
        paths = [self._folder.path_of(name) for name in names]
        return _json(await run_in_threadpool(compared, paths, names))

    async def events(self, request: Request) -> Response:
        name = request.query_params.get("run")
        if name is None:
            return _stream(self._changes_of_list())
        await run_in_threadpool(self._folder.path_of, name)
        return _stream(self._changes(name))

    async def _changes(self, name: str) -> AsyncIterator[bytes]:
        """The present state of a run, and again whenever it has changed."""
        before: dict[str, Any] = {}
        async for stamp in self._whenever_changed(partial(self._folder.stamp, name), POLL_SECONDS):
            try:
                now = await asyncio.wrap_future(self._folder.submit(name, _progress))
            except (NoRunError, RunError, OSError) as error:
                yield _event("gone", {"error": str(error)})
                continue
            yield b": alive\n\n" if stamp is None and now == before else _event("changed", now)
            before = now

    async def _changes_of_list(self) -> AsyncIterator[bytes]:
        async for stamp in self._whenever_changed(self._folder.stamps, LIST_SECONDS):
            yield b": alive\n\n" if stamp is None else _event("runs", {"count": len(stamp)})

    async def _whenever_changed(self, look: Callable[[], Any], seconds: float) -> AsyncIterator[Any]:
        """What `look` returns, now and whenever it is something else; None every few seconds without a change."""
        before: Any = None
        quiet = 0.0
        while not self.closing.is_set():
            try:
                now = await run_in_threadpool(look)
            except (NoRunError, OSError):
                now = {}
            if now != before or quiet >= ALIVE_SECONDS:
                yield None if now == before else now
                before, quiet = now, 0.0
            with suppress(TimeoutError):
                await asyncio.wait_for(self.closing.wait(), seconds)
            quiet += seconds

    async def note(self, request: Request) -> Response:
        if not self.is_token(request.headers.get(TOKEN_HEADER, "")):
            return _error(403, f"writing needs the header {TOKEN_HEADER}")
        origin = request.headers.get("origin")
        is_foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host", "")
        if is_foreign or request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return _error(403, "only the dashboard's own page can write")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY_BYTES:
                return _error(413, "the note is too long")
        path = await run_in_threadpool(self._folder.path_of, _run_of(request))
        try:
            notes = checked_notes(json.loads(body))
        except (RecursionError, ValueError) as error:
            raise BadRequestError(str(error)) from error
        await run_in_threadpool(write_notes, path, notes)
        return _json(notes)


def compared(paths: Sequence[Path], names: Sequence[str]) -> dict[str, Any]:
    """The comparison of the runs in these directories."""
    with ExitStack() as stack:
        return compare([stack.enter_context(open_run(path)).freeze() for path in paths], names)


class _Overview(NamedTuple):
    """An overview that was sent before."""

    body: bytes
    state: str
    end: str | None
    updated: float

    def is_current(self) -> bool:
        """Whether it still tells the state of the run, which may change without a new record."""
        return run_state(self.end, self.updated) == self.state


def _overview_of(run: Run, name: str) -> _Overview:
    plain = overview(run, name)
    state = plain["state"]
    end = run.end
    return _Overview(json_bytes(plain), state["word"], None if end is None else end[0], state["updated"])


def _progress(run: Run) -> dict[str, Any]:
    updated, end = run.updated or run.info.started, run.end
    return {
        "last_step": run.last_step,
        "num_steps": run.num_steps,
        "updated": updated,
        "state": run_state(None if end is None else end[0], updated),
        "alerts": run.num_alert_changes,
    }


async def _answered(endpoint: Endpoint, request: Request) -> Response:
    """The answer of an endpoint, or what went wrong in one sentence."""
    try:
        return await endpoint(request)
    except BadRequestError as error:
        return _error(400, str(error))
    except (NoRunError, UnknownSeriesError) as error:
        return _error(404, str(error.args[0]) if error.args else "not found")
    except (RunError, OSError) as error:
        return _error(503, str(error))
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        return _error(500, f"the run cannot be read ({type(error).__name__}: {str(error)[:200]})")


async def _not_found(request: Request, error: Exception) -> Response:
    return _error(404 if getattr(error, "status_code", 404) == 404 else 405, "there is nothing at this address")


def _run_of(request: Request) -> str:
    name = request.query_params.get("run")
    if name is None:
        raise BadRequestError("the request needs run=…")
    return name


def _json(value: Any, status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")


def _error(status: int, sentence: str) -> Response:
    return _json({"error": sentence}, status)


def _event(kind: str, data: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + json_bytes(data) + b"\n\n"


def _stream(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
