"""Rows to append, and how two of them are compared: by their bits, for a NaN is not equal to itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forewarn.store import Run, RunWriter
from forewarn.types import Block

Row = tuple[int, list[Block]]

LAYERS = tuple(f"blocks.{i}.weight" for i in range(50))


def bits(rows: Iterable[Row]) -> list[object]:
    """Everything about the rows in a form that can be compared."""
    return [
        (step, [(one.step, one.time, one.name, one.scopes, one.values.tobytes()) for one in blocks])
        for step, blocks in rows
    ]


def training(num_steps: int, every: int = 10, first: int = 0) -> list[Row]:
    """What a run gives: the loss of every step, and of every so many steps the norms of all layers."""
    random = np.random.default_rng(first)
    rows = []
    for step in range(first, first + num_steps):
        blocks = [Block(step, 1e9 + step, "train/loss", ("",), random.random(1, dtype=np.float32))]
        if step % every == 0:
            norms = random.random(len(LAYERS), dtype=np.float32)
            blocks.insert(0, Block(step, 1e9 + step, "gradient/norm", LAYERS, norms))
        rows.append((step, blocks))
    return rows


def append_all(writer: RunWriter, rows: Iterable[Row]) -> None:
    for step, blocks in rows:
        writer.append(step, blocks)


def check_against(run: Run, rows: list[Row]) -> None:
    """Replay and every series of the run, compared with what was appended."""
    assert bits(run.steps()) == bits(rows)
    series: dict[tuple[str, str], list[tuple[int, float, bytes]]] = {}
    for step, blocks in rows:
        for block in blocks:
            seen = set()
            for scope, value in zip(block.scopes, block.values, strict=True):
                if scope not in seen:
                    seen.add(scope)
                    series.setdefault((block.name, scope), []).append((step, block.time, value.tobytes()))
    for (name, scope), expected in series.items():
        found = run.series(name, scope)
        values = [value.tobytes() for value in found.values]
        assert list(zip(found.steps.tolist(), found.times.tolist(), values, strict=True)) == expected
    assert {(name, scope) for name in run.names() for scope in run.scopes(name)} >= set(series)
