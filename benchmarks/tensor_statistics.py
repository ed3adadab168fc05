"""What the statistics of all gradients cost, next to one streaming read of the same memory.

    python benchmarks/tensor_statistics.py

One thread; the variants take turns in one process, and the table shows medians of processor time. Needs a C compiler,
for the function that only reads.
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forewarn.measure.engine import ALL_BLOCKS, distributions, native, portable, sample_indices

ROUNDS = 31
SAMPLE_SIZE = 1024

READING = """
#include <stdint.h>
uint64_t read_all(int64_t num_tensors, const uint64_t *const *data, const int64_t *num_words)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < num_tensors; i++) {
        for (int64_t k = 0; k < num_words[i]; k++) {
            sum += data[i][k];
        }
    }
    return sum;
}
"""


def main() -> None:
    if not native.available():
        sys.exit(native.why_not())
    torch.set_num_threads(1)
    reading = compiled_reading()
    print(f"code paths: {', '.join(native.paths())}; {ROUNDS} rounds, medians")
    compare("a GPT of 12 layers", gpt_shapes(), reading)
    compare("a thousand small tensors", [(32, 17), (32,), (17, 32), (17,)] * 250, reading)


def gpt_shapes(width: int = 384, depth: int = 12, vocabulary: int = 8192, context: int = 256) -> list[tuple[int, ...]]:
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    attention: list[tuple[int, ...]] = [(3 * width, width), (3 * width,), (width, width), (width,)]
    feed_forward: list[tuple[int, ...]] = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *(norm + attention + norm + feed_forward) * depth, *norm]


def compare(title: str, shapes: list[tuple[int, ...]], reading: Callable[[list[Tensor]], Callable[[], object]]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [1e-3 * torch.randn(shape, generator=generator) for shape in shapes]
    moved = [tensor * 1.001 for tensor in tensors]
    drawn = [sample_indices(str(index), tensor.numel(), SAMPLE_SIZE) for index, tensor in enumerate(tensors)]
    places, offsets = np.concatenate(drawn), np.cumsum([0, *map(len, drawn)])
    rows, counts, _ = native.measure(tensors, histogram_blocks=16)
    if counts is None:
        sys.exit("the library has counted nothing")
    variants: dict[str, Callable[[], object]] = {
        "one streaming read": reading(tensors),
        "rows": lambda: native.measure(tensors),
        "rows, histogram of 16 blocks": lambda: native.measure(tensors, histogram_blocks=16),
        "rows, full histogram": lambda: native.measure(tensors, histogram_blocks=ALL_BLOCKS),
        "sampled update, both visits": lambda: native.gather_diff(
            moved, places, offsets, native.gather(tensors, places, offsets)
        ),
        "asking `supports`": lambda: all(map(native.supports, tensors)),
        "percentiles and shapes": lambda: native.spread_of(counts, rows),
        "percentiles and shapes, numpy": lambda: distributions.spread_of(counts, rows),
        "rows, plain C path": lambda: native.measure(tensors, path="portable"),
        "rows, torch operations": lambda: portable.measure(tensors),
    }
    seconds = taken_in_turn(variants)
    size = sum(tensor.numel() for tensor in tensors)
    read = seconds["one streaming read"]
    print(f"\n{title}: {len(tensors)} tensors, {size / 1e6:.2f} M elements")
    for name, spent in seconds.items():
        print(
            f"  {name:36} {1e3 * spent:8.3f} ms {spent / read:8.2f} × {1e6 * spent / len(tensors):9.2f} µs per tensor"
        )


def taken_in_turn(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, variant in variants.items():
            begin = time.process_time()
            variant()
            seconds[name].append(time.process_time() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def compiled_reading() -> Callable[[list[Tensor]], Callable[[], object]]:
    """A function that only reads, as fast as a compiler makes it."""
    compiler = shutil.which("cc")
    if compiler is None:
        sys.exit("there is no C compiler (cc) for the function to compare with")
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory) / "reading.c", Path(directory) / "reading.so"
        source.write_text(READING)
        subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
        function = ctypes.CDLL(str(library)).read_all
    function.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]

    def of(tensors: list[Tensor]) -> Callable[[], object]:
        pointers = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        num_words = np.array([tensor.numel() * tensor.element_size() // 8 for tensor in tensors], np.int64)
        return lambda: function(len(tensors), pointers.ctypes.data, num_words.ctypes.data)

    return of


if __name__ == "__main__":
    main()
