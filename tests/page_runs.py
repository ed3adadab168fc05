"""Runs made by hand, a page of three small files, and a real server for them."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from numpy.typing import NDArray

from forewarn.config import Config
from forewarn.judge.rules import all_rules
from forewarn.store import RunWriter
from forewarn.types import Alert, Block, Distribution, ParameterInfo, RuleInfo, RunInfo
from forewarn.views.page import built_page
from forewarn.views.page.server import app
from tests.views.made import alert

HOSTILE = "<img src=x onerror=alert(1)>"
LAYERS = ("blocks.0.weight", "blocks.1.weight", HOSTILE)
TOKEN = "the-token"
SPIKE = 57
"""The step of the only high loss."""
INFO = RunInfo(
    model=HOSTILE,
    num_parameters=192,
    parameters={scope: ParameterInfo((8, 8), "Linear.weight", "float32", 0, True) for scope in LAYERS},
    blocks=("blocks.0", "blocks.1"),
    optimizers=("AdamW",),
    groups=({"lr": 1e-3},),
    hyperparameters={"total_steps": 200},
    device="cpu",
    versions={"forewarn": "0.1.0"},
    started=1.7e9,
    rules=tuple(RuleInfo(rule.code, rule.name) for rule in all_rules()),
)


def blocks_of(step: int, loss: float, now: float | None = None) -> list[Block]:
    now = 1.7e9 + step if now is None else now
    blocks = [
        Block(step, now, "train/loss", ("",), np.array([loss], np.float32)),
        Block(step, now, "speed/step_seconds", ("",), np.array([0.5], np.float32)),
    ]
    if step % 10 == 0:
        norms = np.array([1 + step, 2, 3], np.float32)
        blocks += [Block(step, now, name, LAYERS, norms) for name in ("gradient/norm", "update/ratio")]
    return blocks


def losses(num_steps: int = 100) -> list[float]:
    return [90.0 if step == SPIKE else 5 / (1 + step / 20) for step in range(num_steps)]


def written(
    path: Path,
    values: list[float] | None = None,
    alerts: tuple[Alert, ...] = (),
    info: RunInfo = INFO,
    end: str = "completed",
) -> Path:
    writer = RunWriter(path, info=info, config=Config().to_dict())
    for step, loss in enumerate(losses() if values is None else values):
        counts = np.zeros((1, 2, 64), np.int64)
        counts[0, :, 40] = [step, 4]
        histogram = Distribution(step, 1.7e9 + step, "gradient/histogram", LAYERS[:1], counts, np.array([4]))
        writer.append(step, blocks_of(step, loss), [histogram] if step % 10 == 0 and step else [])
    for one in alerts:
        writer.record(one.fired or 0, alerts=[one])
    writer.close(end)
    return path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    spike = alert("L102", value=90.0, bound=12.0)
    written(folder / "runs" / "faulty", alerts=(spike, alert("G103", HOSTILE)))
    written(folder / "runs" / "more" / "healthy", [5 / (1 + step / 20) for step in range(100)])
    written(folder / "secret")
    return folder


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A folder with a faulty run, a healthy run in a folder of its own, and a secret beside it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "runs"


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built page."""
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "index.html").write_text(
        '<!doctype html><html><head><title>forewarn</title><script type="module" crossorigin src="./page.js"></script>'
        '<link rel="stylesheet" crossorigin href="./page.css"></head><body></body></html>'
    )
    (folder / "page.js").write_text('console.log("</script><b>")')
    (folder / "page.css").write_text("body { margin: 0 }")
    monkeypatch.setattr(built_page, "BUILT", folder)
    return folder


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Client:
    """Asks a server as a browser would."""

    port: int

    def get(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        """Headers are given with underscores: `host="evil.example"`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names)
        answer = connection.getresponse()
        given = {name.lower(): value for name, value in answer.getheaders()}
        try:
            return Answer(answer.status, given, answer.read())
        finally:
            connection.close()

    @contextmanager
    def events(self, path: str) -> Iterator[Iterator[tuple[str, Any]]]:
        """The events of a stream, each with its data."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200

        def read() -> Iterator[tuple[str, Any]]:
            kind = ""
            while line := answer.readline().decode().rstrip():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield kind, json.loads(line.removeprefix("data: "))
                    answer.readline()

        yield read()
        connection.close()


@contextmanager
def serving(root: Path, host: str = "127.0.0.1") -> Iterator[Client]:
    """A server of these runs on a port of this machine, which takes itself to be at `host`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        application = app(root, TOKEN, host)
        server = uvicorn.Server(uvicorn.Config(application, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Client(listener.getsockname()[1])
        finally:
            application.end_streams()
            server.should_exit = True
            thread.join()


@pytest.fixture
def client(root: Path, built: Path) -> Iterator[Client]:
    with serving(root) as asking:
        yield asking


def unpacked(body: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The header and the arrays of a binary answer, as the page reads them."""
    size = int.from_bytes(body[:4], "little")
    header: dict[str, Any] = json.loads(body[4 : 4 + size])
    arrays, begin = {}, 4 + size
    for array in header["arrays"]:
        kind = "<u4" if array["type"] == "uint32" else "<f4"
        arrays[array["name"]] = np.frombuffer(body, kind, array["length"], begin)
        begin += 4 * array["length"]
    return header, arrays


def growing(path: Path) -> RunWriter:
    """A run that is still written."""
    writer = RunWriter(path, info=INFO, config=Config().to_dict())
    for step in range(20):
        writer.append(step, blocks_of(step, 5.0, time.time()))
    writer.flush()
    return writer
