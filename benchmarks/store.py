"""What recording a run costs, and how fast it is read back.

    python benchmarks/store.py

Prints the cost of `append` on the training thread of a loop that computes, what a step measured in detail costs there
and on the thread that writes, the throughput and size of the store, and the time to read one series. Everything is
written to a temporary directory; put it on another disk with TMPDIR.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from forewarn.store import RunWriter, open_run
from forewarn.types import Block, Distribution, ParameterInfo, RunInfo

_RANDOM = np.random.default_rng(0)


def main() -> None:
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
