"""What recording a run costs, and how fast it is read back.

    python benchmarks/store.py

Prints the cost of `append` on the training thread of a loop that computes, the throughput and size of the store, and
the time to read one series. Everything is written to a temporary directory; put it on another disk with TMPDIR.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from forewarn.store import RunWriter, open_run
from forewarn.types import Block, Facts

_RANDOM = np.random.default_rng(0)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        appending(root / "appending")
        many_series(root / "many", num_series=10_000, num_steps=400)
        one_series(root / "one", num_steps=1_000_000)


def appending(path: Path, num_rounds: int = 5, num_steps: int = 300) -> None:
    """2,000 values a step in 20 metrics of 100 scopes, in a loop of interpreted work: it feels every use of the GIL."""
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
        found = run.series("gradient/norm", scopes[num_series // 2])
        first = 1e3 * (time.perf_counter() - begin)
        assert np.array_equal(found.values, values[:, num_series // 2])
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
        found = run.series("train/loss")
        first = 1e3 * (time.perf_counter() - begin)
        assert np.array_equal(found.values, values[:, 0])
        again = _milliseconds(lambda: run.series("train/loss"))
        begin = time.perf_counter()
        num_rows = sum(1 for _ in run.steps())
        replayed = num_rows / (time.perf_counter() - begin)
    print(
        f"one series × {num_steps:,} steps: {1e6 * seconds / num_steps:.1f} µs, {size / num_steps:.1f} bytes a step\n"
        f"  read in {first:.1f} ms the first time, {again:.1f} ms after; replay {replayed / 1e6:.2f} M steps/s"
    )


def _writer(path: Path) -> RunWriter:
    return RunWriter(path, facts=Facts(), config={})


def _milliseconds(work: Callable[[], object], num_times: int = 5) -> float:
    seconds = []
    for _ in range(num_times):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds)


if __name__ == "__main__":
    main()
