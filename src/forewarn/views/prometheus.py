"""A run for Prometheus: a small server to scrape, or a file for node_exporter."""

from __future__ import annotations

import http.server
import logging
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path

from forewarn.catalogue import Catalogue
from forewarn.files import replacing
from forewarn.metrics import BUILT_IN, catalogue_of
from forewarn.standing import RUNNING
from forewarn.store.newest import NewestReadings, newest_of
from forewarn.types import Action, Alert, AlertState, Block, RunEnd, RunStart
from forewarn.views.addresses import host_of, is_loopback, is_own
from forewarn.views.exposition import CONTENT_TYPE, Exported, exposition

TEXTFILE_SECONDS = 15.0
ENDED = "ended"

_log = logging.getLogger("forewarn")


class Prometheus:
    """Exports the newest readings of the run as a whole, its largest gradients and updates, and its open alerts.

    `Prometheus(port=9400)` serves them at `http://127.0.0.1:9400/metrics` while the run lasts; port 0 takes a free one,
    and `address` says which. With `host="0.0.0.0"` other machines can read it, without a password.

    `Prometheus(textfile="/var/lib/node_exporter/forewarn.prom")` writes them every 15 seconds, and once more at the
    end, for the textfile collector of node_exporter. Use one file for each run.

    The training only hands its readings over; text is made when somebody asks. If the port is taken or the folder
    cannot be written, training continues. After a run that was killed, the file stays as it was.
    """

    def __init__(self, port: int | None = None, *, host: str = "127.0.0.1", textfile: str | Path | None = None) -> None:
        if (port is None) == (textfile is None):
            raise ValueError("Prometheus needs either a port to serve, such as 9400, or a textfile to write")
        if port is not None and not 0 <= port < 1 << 16:
            raise ValueError(f"port must be from 0 to 65535, not {port}")
        if textfile is not None and not str(textfile).endswith(".prom"):
            raise ValueError(f"node_exporter reads only files that end in .prom, not {str(textfile)!r}")
        self.address = ""
        """Where the metrics are served, once the run has begun."""
        self._port, self._host = port, host
        self._textfile = None if textfile is None else Path(textfile)
        self._lock = threading.Lock()
        self._run, self._state = "", RUNNING
        self._catalogue: Catalogue = BUILT_IN
        self._step: int | None = None
        self._updated = time.time()
        self._newest = NewestReadings(BUILT_IN)
        self._firing: dict[tuple[str, str], Alert] = {}
        self._server: http.server.ThreadingHTTPServer | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, start: RunStart) -> None:
        self._run, self._catalogue = start.path.as_posix(), catalogue_of(start.info)
        self._newest = NewestReadings(self._catalogue)

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        with self._lock:
            self._step = step
            for block in blocks:
                self._newest.take(block.name, block.scopes, block.values)
            if blocks:
                self._updated = blocks[0].time
            for alert in changed:
                self._firing.pop(alert.identity, None)
                if alert.state is AlertState.FIRING:
                    self._firing[alert.identity] = alert
        if self._thread is None:  # started late, because only rank 0 shows anything
            self._start()

    def end(self, end: RunEnd) -> None:
        self._state = ENDED

    def close(self) -> None:
        """Stop the server, or write the file once more; may be called twice."""
        self._closing.set()
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if self._thread is not None:
            self._thread.join(5)

    def text(self) -> str:
        """The metrics as they are now, in the text format of Prometheus."""
        with self._lock:
            newest = newest_of(self._newest.readings(), self._firing.values())
            step, updated = self._step, self._updated
        return exposition([Exported(self._run, self._state, step, updated, newest)], catalogue=self._catalogue)

    def _start(self) -> None:
        work: Callable[[], object] = self._keep_written
        if self._port is not None:
            self._server = _Server((self._host, self._port), self)
            self.address = f"http://{self._host}:{self._server.server_address[1]}/metrics"
            work = self._server.serve_forever
        self._thread = threading.Thread(target=work, name="forewarn prometheus", daemon=True)
        self._thread.start()

    def _keep_written(self) -> None:
        """Write the file now, every few seconds, and when the run is over."""
        failed = ""
        is_over = False
        while not is_over:
            is_over = self._closing.is_set()
            try:
                self._write()
                failed = ""
            except OSError as error:
                if failed != str(error):
                    _log.warning("%s cannot be written: %s", self._textfile, error.strerror)
                failed = str(error)
            self._closing.wait(TEXTFILE_SECONDS)

    def _write(self) -> None:
        assert self._textfile is not None
        with replacing(self._textfile, durable=False) as file:
            file.write(self.text().encode())


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], view: Prometheus) -> None:
        self.view = view
        super().__init__(address, _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    server_version = "forewarn"
    timeout = 10

    def do_GET(self) -> None:
        bound = str(self.server.server_address[0])
        if is_loopback(bound) and not is_own(host_of(self.headers.get("host", "")), bound):
            self.send_error(HTTPStatus.FORBIDDEN, "this server answers only to its own address")
        elif self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "the metrics are at /metrics")
        else:
            body = self.server.view.text().encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("content-type", CONTENT_TYPE)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal belongs to the training."""
