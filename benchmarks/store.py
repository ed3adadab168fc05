"""What recording a run costs, and how fast it is read back.

    python benchmarks/store.py

Prints the cost of `append` on the training thread of a loop that computes, what a step measured in detail costs there
and on the thread that writes, the throughput and size of the store, and the time to read one series. Everything is
written to a temporary directory; put it on another disk with TMPDIR.

    python benchmarks/store.py --compare

Instead, writes the same readings to the stores of TensorBoard, MLflow (files and SQLite) and trackio, as far as they
are installed, and reads them back: each through the calls that its documentation gives for a training loop. The rounds
are interleaved; it prints medians of CPU time, of all threads, as multiples of forewarn's, until everything is on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forewarn.store import RunWriter, open_run
from forewarn.types import Block, Distribution, ParameterInfo, RunInfo

_RANDOM = np.random.default_rng(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true")
    if parser.parse_args().compare:
        with tempfile.TemporaryDirectory() as directory:
            compare(Path(directory))
        return
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        appending(root / "appending")
        measured_steps(root / "small", num_tensors=1000, tensor_size=529)
        measured_steps(root / "large", num_tensors=148, tensor_size=166_000)
        many_series(root / "many", num_series=10_000, num_steps=400)
        one_series(root / "one", num_steps=1_000_000)


def appending(path: Path, num_rounds: int = 5, num_steps: int = 300) -> None:
    """2,000 values a step in 20 metrics of 100 scopes. The loop is pure Python, so it shows every use of the GIL."""
    scopes = tuple(f"blocks.{i // 10}.layer{i % 10}.weight" for i in range(100))
    names = [f"gradient/quantity_{i}" for i in range(20)]
    writer = _writer(path)
    appends: list[float] = []
    without, recorded = [], []
    for number in range(num_rounds):
        begin = time.perf_counter()
        for _ in range(num_steps):
            _step(names, scopes)
        without.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for step in range(number * num_steps, (number + 1) * num_steps):
            values = _step(names, scopes)
            blocks = [Block(step, 1.0, name, scopes, row) for name, row in zip(names, values, strict=True)]
            before = time.perf_counter()
            writer.append(step, blocks)
            appends.append(time.perf_counter() - before)
        recorded.append(time.perf_counter() - begin)
    writer.close()
    appends.sort()
    print(
        f"append of 2,000 values in 20 blocks: median {1e6 * statistics.median(appends):.0f} µs, "
        f"p99 {1e6 * appends[int(0.99 * len(appends))]:.0f} µs on the training thread; "
        f"a step of {1e3 * statistics.median(without) / num_steps:.1f} ms takes "
        f"{statistics.median(recorded) / statistics.median(without):.3f} times as long with it"
    )


def _step(names: list[str], scopes: tuple[str, ...]) -> np.ndarray:
    sum(number * number for number in range(100_000))
    return _RANDOM.random((len(names), len(scopes)), dtype=np.float32)


def measured_steps(path: Path, num_tensors: int, tensor_size: int, num_steps: int = 300) -> None:
    """33 metrics and two histograms of every tensor, six steps a batch as when a step takes about 80 ms."""
    scopes = tuple(f"blocks.{i // 10}.layer{i % 10}.weight" for i in range(num_tensors))
    names = [f"gradient/quantity_{i}" for i in range(33)]
    values = _RANDOM.random((len(names), num_tensors), dtype=np.float32)
    histograms = [_histograms(num_tensors, tensor_size) for _ in range(8)]
    parameter = ParameterInfo((tensor_size,), "Linear.weight", "float32", 0, True)
    writer = RunWriter(path, info=RunInfo(parameters=dict.fromkeys(scopes, parameter)), config={})
    zeros = np.zeros(num_tensors, np.int64)
    elsewhere = np.zeros(4 << 20)
    appends: list[float] = []
    whole, here = time.process_time(), time.thread_time()
    for step in range(num_steps):
        blocks = [Block(step, 1.0, name, scopes, row) for name, row in zip(names, values, strict=True)]
        both = [
            Distribution(step, 1.0, f"{family}/histogram", scopes, histograms[(step + offset) % 8], zeros)
            for offset, family in enumerate(("gradient", "weight"))
        ]
        elsewhere += 1  # flush the caches, as a training step would
        begin = time.perf_counter()
        writer.append(step, blocks, both)
        appends.append(time.perf_counter() - begin)
        if step % 6 == 5:
            writer.flush()
    writer.close()
    behind = time.process_time() - whole - (time.thread_time() - here)
    size = sum(file.stat().st_size for file in path.iterdir())
    with open_run(path) as run:
        stored = run.histograms("gradient/histogram", scopes[num_tensors // 2])
        assert np.array_equal(stored.counts[5], histograms[5][num_tensors // 2])
        reading = _milliseconds(lambda: run.histograms("gradient/histogram", scopes[num_tensors // 3])) / num_steps
    print(
        f"{num_tensors:,} tensors in detail, {values.size:,} values and {2 * num_tensors:,} histograms a step:\n"
        f"  append {1e6 * statistics.median(appends):.0f} µs on the training thread, "
        f"{1e6 * behind / num_steps:.0f} µs of CPU time on the one that writes;\n"
        f"  {size / num_steps / 1e3:.0f} kB a step, of which "
        f"{(size / num_steps - values.nbytes) / (2 * num_tensors):.0f} bytes a histogram; "
        f"one histogram read in {1e3 * reading:.0f} µs"
    )


def _histograms(num_tensors: int, tensor_size: int) -> np.ndarray:
    """Histograms of normal values of different scales, by sign and power of two."""
    edges = [math.erf(2.0**power / math.sqrt(2)) for power in range(-30, 5)]
    shares = np.diff(edges, prepend=0.0)
    counts = np.zeros((num_tensors, 2, 64), np.int64)
    for tensor, shift in enumerate(_RANDOM.integers(0, 8, num_tensors)):
        both = _RANDOM.multinomial(tensor_size, np.concatenate([shares, shares]) / (2 * shares.sum()))
        counts[tensor, :, 10 + shift : 10 + shift + len(shares)] = both.reshape(2, -1)
    return counts


def many_series(path: Path, num_series: int, num_steps: int) -> None:
    scopes = tuple(f"blocks.{i // 10}.layer{i % 10}.weight" for i in range(num_series))
    values = _RANDOM.random((num_steps, num_series), dtype=np.float32)
    writer = _writer(path)
    begin = time.perf_counter()
    for step in range(num_steps):
        writer.append(step, [Block(step, float(step), "gradient/norm", scopes, values[step])])
    writer.flush()
    with open_run(path) as run:
        live = _milliseconds(lambda: run.series("gradient/norm", scopes[num_series // 2]))
    writer.close()
    seconds = time.perf_counter() - begin
    size = sum(file.stat().st_size for file in path.iterdir())
    print(
        f"{num_series:,} series × {num_steps} steps: {values.size / seconds / 1e6:.1f} M values/s until compacted, "
        f"{size / values.size:.2f} bytes/value"
    )
    with open_run(path) as run:
        begin = time.perf_counter()
        series = run.series("gradient/norm", scopes[num_series // 2])
        first = 1e3 * (time.perf_counter() - begin)
        assert np.array_equal(series.values, values[:, num_series // 2])
        again = _milliseconds(lambda: run.series("gradient/norm", scopes[num_series // 3]))
        begin = time.perf_counter()
        num_values = sum(block.values.size for _, blocks in run.steps() for block in blocks)
        replayed = num_values / (time.perf_counter() - begin)
    print(
        f"  one series: {first:.1f} ms the first time, {again:.1f} ms after, {live:.1f} ms while it is written; "
        f"replay {replayed / 1e6:.0f} M values/s"
    )


def one_series(path: Path, num_steps: int) -> None:
    values = _RANDOM.random((num_steps, 1), dtype=np.float32)
    unscoped = ("",)
    writer = _writer(path)
    begin = time.perf_counter()
    for step in range(num_steps):
        writer.append(step, [Block(step, float(step), "train/loss", unscoped, values[step])])
        if step % 50_000 == 0:
            writer.flush()
    seconds = time.perf_counter() - begin
    writer.close()
    size = sum(file.stat().st_size for file in path.iterdir())
    with open_run(path) as run:
        begin = time.perf_counter()
        series = run.series("train/loss")
        first = 1e3 * (time.perf_counter() - begin)
        assert np.array_equal(series.values, values[:, 0])
        again = _milliseconds(lambda: run.series("train/loss"))
        begin = time.perf_counter()
        num_rows = sum(1 for _ in run.steps())
        replayed = num_rows / (time.perf_counter() - begin)
    print(
        f"one series × {num_steps:,} steps: {1e6 * seconds / num_steps:.1f} µs, {size / num_steps:.1f} bytes a step\n"
        f"  read in {first:.1f} ms the first time, {again:.1f} ms after; replay {replayed / 1e6:.2f} M steps/s"
    )


STEPS, EVERY, RUN_SERIES, TENSORS, TENSOR_METRICS = 1000, 50, 10, 100, 2
ROUNDS = 3
Reading = tuple[int, dict[str, float]]
"""A step and its values by series."""


@dataclass(frozen=True)
class Store:
    """Somewhere to record a run, and to read it again."""

    name: str
    package: str
    write: Callable[[Path, list[Reading]], None]
    read: Callable[[Path, list[str]], list[list[float]]]
    """The values of each of these series."""
    prepare: Callable[[Path], object] = lambda path: None
    """Creates an empty store, which is not measured."""


def compare(root: Path, rounds: int = ROUNDS) -> None:
    """Write the same readings to each store and read them back; each round uses new ones."""
    os.environ |= {"TRACKIO_DIR": str(root / "trackio"), "GIT_PYTHON_REFRESH": "quiet"}
    stores = [store for store in STORES if not store.package or importlib.util.find_spec(store.package)]
    readings = _same_readings()
    names = list(readings[0][1])
    num_values = sum(len(values) for _, values in readings)
    print(f"{num_values:,} readings of {len(names):,} series in {STEPS:,} steps")
    kinds = ("write", "read one series", "read all series")
    times: dict[tuple[str, str], list[float]] = {(store.name, kind): [] for store in stores for kind in kinds}
    sizes: dict[str, int] = {}
    for number in range(rounds + 1):  # the first round imports what is needed, and does not count
        for store in stores:
            path = root / f"{store.name}-{number}".replace(" ", "-")
            store.prepare(path)
            works: tuple[Callable[[], Any], ...] = (
                partial(store.write, path, readings),
                partial(store.read, path, ["train/metric_0"]),
                partial(store.read, path, names),
            )
            for kind, work in zip(kinds, works, strict=True):
                before = time.process_time()
                with contextlib.redirect_stdout(io.StringIO()):
                    result = work()
                if number:
                    times[store.name, kind].append(time.process_time() - before)
            expected = [[values[name] for _, values in readings if name in values] for name in names]
            assert np.array_equal(_flat(result), _flat(expected)), store.name
            sizes[store.name] = _size(path if path.exists() else root / "trackio" / f"{path.name}.db")
    medians = {key: statistics.median(seconds) for key, seconds in times.items() if seconds}
    print(f"{'':18}{'bytes a reading':>17}" + "".join(f"{kind:>18}" for kind in kinds))
    for store in stores:
        cells = [f"{sizes[store.name] / num_values:17.1f}"]
        for kind in kinds:
            seconds, own = medians[store.name, kind], medians[stores[0].name, kind]
            cells.append(f"{1000 * seconds:8.0f} ms {seconds / own:5.1f} ×")
        print(f"{store.name:18}{''.join(cells)}")


def _same_readings() -> list[Reading]:
    """Ten series of every step, and two of each of 100 tensors on every fiftieth, as float32 has them."""
    random = np.random.default_rng(0)
    run = [f"train/metric_{number}" for number in range(RUN_SERIES)]
    tensors = [
        f"gradient/blocks.{number // 10}.layer{number % 10}.weight/metric_{kind}"
        for kind in range(TENSOR_METRICS)
        for number in range(TENSORS)
    ]
    return [
        (step, dict(zip(names, random.random(len(names), np.float32).tolist(), strict=True)))
        for step in range(STEPS)
        for names in [run + tensors if step % EVERY == 0 else run]
    ]


def _flat(series: list[list[float]]) -> np.ndarray:
    return np.concatenate([np.array(values, np.float32) for values in series])


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _write_forewarn(path: Path, readings: list[Reading]) -> None:
    writer = _writer(path)
    layouts: dict[tuple[str, ...], list[tuple[str, tuple[str, ...], list[str]]]] = {}
    for step, values in readings:
        names = tuple(values)
        if names not in layouts:
            by_metric: dict[str, dict[str, str]] = {}
            for name in names:
                family, _, rest = name.partition("/")
                scope, _, quantity = rest.rpartition("/")
                by_metric.setdefault(f"{family}/{quantity}", {})[scope] = name
            layouts[names] = [(metric, tuple(its), list(its.values())) for metric, its in by_metric.items()]
        now = time.time()
        blocks = [
            Block(step, now, metric, scopes, np.array([values[name] for name in its], np.float32))
            for metric, scopes, its in layouts[names]
        ]
        writer.append(step, blocks)
    writer.close()


def _read_forewarn(path: Path, names: list[str]) -> list[list[float]]:
    with open_run(path) as run:
        series = []
        for name in names:
            family, _, rest = name.partition("/")
            scope, _, quantity = rest.rpartition("/")
            series.append(run.series(f"{family}/{quantity}", scope).values.tolist())
    return series


def _write_tensorboard(path: Path, readings: list[Reading]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(path))
    for step, values in readings:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    writer.close()


def _read_tensorboard(path: Path, names: list[str]) -> list[list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(path), {"scalars": 0}).Reload()
    return [[event.value for event in board.Scalars(name)] for name in names]


def _mlflow(path: Path, address: str) -> Any:
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    path.mkdir(exist_ok=True)
    mlflow = importlib.import_module("mlflow")
    mlflow.set_tracking_uri(address.format(path))
    with contextlib.redirect_stderr(io.StringIO()):
        mlflow.set_experiment("benchmark")
    return mlflow


def _write_mlflow(address: str, path: Path, readings: list[Reading]) -> None:
    mlflow = _mlflow(path, address)
    with mlflow.start_run():
        for step, values in readings:
            mlflow.log_metrics(values, step=step)


def _read_mlflow(address: str, path: Path, names: list[str]) -> list[list[float]]:
    client = _mlflow(path, address).MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("benchmark").experiment_id])
    return [[metric.value for metric in client.get_metric_history(run.info.run_id, name)] for name in names]


def _write_trackio(path: Path, readings: list[Reading]) -> None:
    trackio = importlib.import_module("trackio")
    trackio.init(path.name, name="run", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    for step, values in readings:
        trackio.log(values, step=step)
    trackio.finish()


def _read_trackio(path: Path, names: list[str]) -> list[list[float]]:
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    logs = storage.get_logs(path.name, "run")
    return [[values[name] for values in logs if name in values] for name in names]


STORES = (
    Store("forewarn", "", _write_forewarn, _read_forewarn),
    Store("TensorBoard", "tensorboard", _write_tensorboard, _read_tensorboard),
    *(
        Store(name, "mlflow", partial(_write_mlflow, at), partial(_read_mlflow, at), partial(_mlflow, address=at))
        for name, at in (("MLflow, files", "file:{}"), ("MLflow, SQLite", "sqlite:///{}/mlflow.db"))
    ),
    Store("trackio", "trackio", _write_trackio, _read_trackio),
)


def _writer(path: Path) -> RunWriter:
    return RunWriter(path, info=RunInfo(), config={})


def _milliseconds(work: Callable[[], object], num_times: int = 5) -> float:
    seconds = []
    for _ in range(num_times):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds)


if __name__ == "__main__":
    main()
