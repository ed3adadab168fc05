"""How long a stored run takes to open in the dashboard, and the memory for it, beside TensorBoard on the same data.

    python benchmarks/views.py
    python benchmarks/views.py --steps 20000 --tensors 100

Each metric of every tensor is recorded every 100 steps, and ten metrics of the run on every step. Both servers run in a
process of their own and are asked over HTTP. TensorBoard runs only if it is installed; it reads an event file with the
same values, and keeps 1,000 points of a series at most, as it does by default. Its time to open is until it returns the
last loss of the run.

With playwright and chromium, as in .venv-browser, the page is opened as well: a new server and an empty cache each
time, from the click to the last frame of what fits on a screen. It has an alert, so the map of all layers is there.

    python benchmarks/views.py --fleet 2000

Instead, makes a folder of that many runs of 500 steps with 200 tensors, half of which still train as far as a reader
can tell, and asks for the list of runs, for `/metrics` and for one run: first of a server that has just started, then
again with every training run written to in between.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from forewarn.judge.rules import all_rules
from forewarn.store import RunWriter
from forewarn.types import Alert, AlertState, Block, Finding, ParameterInfo, RuleInfo, RunInfo, Severity

EVERY = 100
TENSOR_METRICS = (
    "gradient/norm", "gradient/mean", "gradient/std", "gradient/max", "weight/norm", "weight/mean", "weight/std",
    "weight/max", "update/ratio", "update/norm",
)  # fmt: skip
RUN_METRICS = (
    "train/loss", "train/loss_ema", "train/lr", "train/clip", "gradient/global_norm", "gradient/global_norm_clipped",
    "update/optimizer_steps", "speed/step_seconds", "monitor/overhead_share", "system/process_memory_bytes",
)  # fmt: skip
_SERVE = """
import sys, uvicorn
from pathlib import Path
from forewarn.views.page.server import app
uvicorn.run(app(Path(sys.argv[1]), "token"), port=int(sys.argv[2]), log_level="warning")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--fleet", type=int, metavar="RUNS")
    given = parser.parse_args()
    if given.fleet:
        with tempfile.TemporaryDirectory() as directory:
            _print(_measured_fleet(Path(directory) / "runs", given.fleet))
        return
    points = given.tensors * len(TENSOR_METRICS) * (given.steps // EVERY) + len(RUN_METRICS) * given.steps
    print(
        f"{given.tensors * len(TENSOR_METRICS):,} series every {EVERY} steps and {len(RUN_METRICS)} on every step, ",
        end="",
    )
    print(f"{given.steps:,} steps: {points / 1e6:.1f} million points")
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        scopes = tuple(f"blocks.{number // 10}.layer{number % 10}.weight" for number in range(given.tensors))
        _write(root / "runs" / "large", scopes, given.steps)
        rows = _measured(root / "runs", scopes) + _measured_browser(root / "runs")
        if has_tensorboard:
            _write_events(root / "events", scopes, given.steps)
            rows += _measured_tensorboard(root / "events", given.steps)
    _print(rows)


def _print(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")


Reading = tuple[str, tuple[str, ...], NDArray[np.float32]]


def _readings(scopes: tuple[str, ...], steps: int) -> Iterator[tuple[int, list[Reading]]]:
    """The same random readings each time."""
    random = np.random.default_rng(0)
    for step in range(steps):
        blocks: list[Reading] = [(name, _scopes_of(name), random.random(1, np.float32)) for name in RUN_METRICS]
        if step % EVERY == 0:
            blocks += [(name, scopes, random.random(len(scopes), np.float32)) for name in TENSOR_METRICS]
        yield step, blocks


def _scopes_of(metric: str) -> tuple[str, ...]:
    return ("0",) if metric == "train/lr" else ("",)


def _write(path: Path, scopes: tuple[str, ...], steps: int) -> None:
    parameters = {scope: ParameterInfo((64, 64), "Linear.weight", "float32", 0, True) for scope in scopes}
    num_blocks = math.ceil(len(scopes) / 10)
    info = RunInfo(
        model="Large", num_parameters=4096 * len(scopes), parameters=parameters, optimizers=("AdamW",), every=EVERY,
        groups=({"lr": 1e-3},), blocks=tuple(f"blocks.{number}" for number in range(num_blocks)), started=time.time(),
        rules=tuple(RuleInfo(rule.code, rule.name) for rule in all_rules()),
    )  # fmt: skip
    path.parent.mkdir(parents=True)
    writer = RunWriter(path, info=info, config={})
    for step, readings in _readings(scopes, steps):
        writer.append(step, [Block(step, float(step), *reading) for reading in readings])
        if step % 1000 == 0:
            writer.flush()
    half = steps // 2
    finding = Finding("G104", "", half, Severity.CRITICAL, 9.0, 2.0)
    alert = Alert("G104", "gradient-spike", "", Severity.CRITICAL, AlertState.FIRING, half, half, half, finding)
    writer.record(half, alerts=[alert])
    writer.close("completed")


def _measured(root: Path, scopes: tuple[str, ...]) -> list[tuple[str, str]]:
    port = _free_port()
    rows: list[tuple[str, str]] = []
    started = time.perf_counter()
    with _process([sys.executable, "-c", _SERVE, str(root), str(port)]) as process:
        base = f"http://127.0.0.1:{port}"
        _until(lambda: _get(f"{base}/api/runs"))
        before, start = _megabytes(process), time.perf_counter() - started
        run_series = "&".join(f"series={name}@{_scopes_of(name)[0]}" for name in RUN_METRICS)
        tensor_series = "&".join(f"series=gradient/norm@{scope}" for scope in scopes[:50])
        requests = {
            "/api/run, first": "/api/run?run=large",
            "/api/series, 10 of every step": f"/api/series?run=large&{run_series}",
            "/api/map gradient/norm": "/api/map?run=large&metric=gradient/norm",
            "/api/map update/ratio": "/api/map?run=large&metric=update/ratio",
            "/api/profile": "/api/profile?run=large&metric=gradient/norm&step=50000",
            "/api/run, again": "/api/run?run=large",
            "/api/series, 50 of tensors": f"/api/series?run=large&{tensor_series}",
        }
        total, worked = 0.0, _cpu_seconds(process)
        for number, (name, request) in enumerate(requests.items()):
            begin = time.perf_counter()
            size = len(_get(base + request))
            seconds = time.perf_counter() - begin
            if number < 3:
                total, opening = total + seconds, _cpu_seconds(process) - worked
            rows.append((f"forewarn {name}", f"{1000 * seconds:6.0f} ms  {size / 1e6:6.2f} MB"))
        rows.append(("forewarn opens (the first three)", _both(total, opening)))
        rows.append(("forewarn opens, with starting the server", _both(start + total, worked + opening)))
        rows.append(("forewarn memory, before and after", f"{before:6.0f} MB  {_megabytes(process):6.0f} MB"))
    return rows


FLEET_STEPS, FLEET_TENSORS, FLEET_ROUNDS = 500, 200, 5


def write_fleet(root: Path, num_runs: int) -> list[Path]:
    """A folder of runs, copies of two; returns those that still train as far as a reader can tell."""
    scopes = tuple(f"blocks.{number // 10}.layer{number % 10}.weight" for number in range(FLEET_TENSORS))
    _write(root / "ended" / "0", scopes, FLEET_STEPS)
    training = _fleet_writer(root / "training" / "0", scopes)
    kinds = {"ended": num_runs - num_runs // 2, "training": num_runs // 2}
    for kind, count in kinds.items():
        for number in range(1, count):
            shutil.copytree(root / kind / "0", root / kind / str(number))  # with the times of its files
    training.close()
    return [root / "training" / str(number) for number in range(1, kinds["training"])]


def _fleet_writer(path: Path, scopes: tuple[str, ...]) -> RunWriter:
    """A run that is not closed."""
    now = time.time()
    writer = RunWriter(path, info=RunInfo(model="Large", started=now), config={})
    for step, readings in _readings(scopes, FLEET_STEPS):
        writer.append(step, [Block(step, now, *reading) for reading in readings])
    finding = Finding("G104", "", 9, Severity.CRITICAL, 9.0, 2.0)
    alert = Alert("G104", "gradient-spike", "", Severity.CRITICAL, AlertState.FIRING, 9, 9, 9, finding)
    writer.record(9, alerts=[alert])
    writer.flush()
    return writer


def _measured_fleet(root: Path, num_runs: int) -> list[tuple[str, str]]:
    training = write_fleet(root, num_runs)
    requests = {
        "list of runs": "/api/runs", "/metrics": "/metrics", "a run that ended": "/api/run?run=ended/0",
        "a run that trains": "/api/run?run=training/1",
        "its loss": "/api/series?run=training/1&series=train/loss@&columns=400",
    }  # fmt: skip
    rows = []
    for name, request in requests.items():
        port = _free_port()
        with _process([sys.executable, "-c", _SERVE, str(root), str(port)]) as process:
            base = f"http://127.0.0.1:{port}"
            _until(partial(_get, f"{base}/api/run?run=ended/1"))
            seconds, worked = [], []
            for _ in range(1 + FLEET_ROUNDS):
                begin, before = time.perf_counter(), _cpu_seconds(process)
                size = len(_get(base + request))
                seconds.append(time.perf_counter() - begin)
                worked.append(_cpu_seconds(process) - before)
                _touch(training)
            first = _both(seconds[0], worked[0])
            again = _both(statistics.median(seconds[1:]), statistics.median(worked[1:]))
            value = f"{first}; again {again}; {size / 1e6:.2f} MB, memory {_megabytes(process):.0f} MB"
            rows.append((f"{num_runs:,} runs, {name}", value))
    return rows


def _touch(training: list[Path]) -> None:
    """Make every run look as if its writer had just added a row: its files have changed, and so has its summary."""
    for path in training:
        changed = time.time_ns()
        os.utime(path / "run.db-wal", ns=(changed, changed))
        plain = json.loads((path / "summary.json").read_text())
        plain["files"]["run.db-wal"][1] = changed
        (path / "summary.json").write_text(json.dumps(plain))


_OPENINGS = 5
_WATCH = """
window.opened = { pending: 0, asked: 0 };
const fetched = window.fetch;
window.fetch = (...given) => {
  opened.pending++, opened.asked++;
  const answer = fetched(...given);
  answer.then((response) => response.clone().arrayBuffer()).finally(() => opened.pending--);
  return answer;
};
const look = () => {
  if (!opened.verdict && document.querySelector(".verdict .sign")) opened.verdict = performance.now();
  if (opened.pending) opened.quiet = 0, opened.drawn = NaN;
  else if (opened.asked && ++opened.quiet === 3) opened.drawn = performance.now();
  requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
"""Notes when the verdict was there, and the third frame after the last answer: by then its lines are on the screen."""


def _measured_browser(root: Path) -> list[tuple[str, str]]:
    chromium = shutil.which("chromium")
    if chromium is None or importlib.util.find_spec("playwright") is None:
        return [("forewarn in a browser", "needs chromium and playwright")]
    playwright_api: Any = importlib.import_module("playwright.sync_api")
    times: list[tuple[float, float, float]] = []
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(_OPENINGS):
            port = _free_port()
            with _process([sys.executable, "-c", _SERVE, str(root), str(port)]):
                _until(partial(_get, f"http://127.0.0.1:{port}/page.js"))
                page = browser.new_page(viewport={"width": 1440, "height": 900})
                page.add_init_script(_WATCH)
                worked = _cpu_seconds(psutil.Process())
                page.goto(f"http://127.0.0.1:{port}/#run=large")
                page.wait_for_function("() => opened.verdict && performance.now() - opened.drawn > 1000")
                verdict, drawn = page.evaluate("[opened.verdict, opened.drawn]")
                times.append((verdict, drawn, 1000 * (_cpu_seconds(psutil.Process()) - worked)))
                page.close()  # the server ends when nobody listens any more
        browser.close()
    verdict, drawn, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    return [
        ("forewarn in a browser, to the verdict", f"{verdict:6.0f} ms"),
        ("forewarn in a browser, to the last chart", f"{drawn:6.0f} ms, and {cpu:.0f} ms of CPU in all processes"),
    ]


def _write_events(path: Path, scopes: tuple[str, ...], steps: int) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(path))
    for step, readings in _readings(scopes, steps):
        summary = Summary()
        for name, owners, values in readings:
            for scope, value in zip(owners, values.tolist(), strict=True):
                summary.value.add(tag=f"{name}/{scope}" if scope else name, simple_value=value)
        writer.add_event(Event(wall_time=float(step), step=step, summary=summary))
    writer.close()


def _measured_tensorboard(path: Path, steps: int) -> list[tuple[str, str]]:
    port = _free_port()
    arguments = [sys.executable, "-m", "tensorboard.main", "--logdir", str(path), "--port", str(port)]
    request = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?run=.&tag=train%2Floss"
    begin = time.perf_counter()
    with _process(arguments) as process:
        _until(lambda: json.loads(_get(request))[-1][1] >= steps - 1, seconds=900)
        opened, worked = time.perf_counter() - begin, _cpu_seconds(process)
        begin = time.perf_counter()
        size = len(_get(request))
        again = time.perf_counter() - begin
        return [
            ("TensorBoard opens, with starting the server", _both(opened, worked)),
            ("TensorBoard one series, again", f"{1000 * again:6.0f} ms  {size / 1e6:6.2f} MB"),
            ("TensorBoard memory", f"{_megabytes(process):6.0f} MB"),
        ]


@contextmanager
def _process(arguments: list[str]) -> Iterator[psutil.Process]:
    started = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait()


def _megabytes(process: psutil.Process) -> float:
    """Resident memory of a process and those that it started."""
    family = [process, *process.children(recursive=True)]
    return sum(member.memory_info().rss for member in family) / 1e6


def _cpu_seconds(process: psutil.Process) -> float:
    """The time that a process and those that it started have computed, whatever else the machine does."""
    family = [process, *process.children(recursive=True)]
    return sum(member.cpu_times().user + member.cpu_times().system for member in family)


def _both(seconds: float, cpu_seconds: float) -> str:
    return f"{1000 * seconds:6.0f} ms, of which {1000 * cpu_seconds:.0f} ms of CPU"


def _until(ready: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except (OSError, ValueError, LookupError, urllib.error.URLError):
            pass
        time.sleep(0.05)
    raise SystemExit("the server did not answer in time")


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        content: bytes = answer.read()
        return content


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
