"""What several ranks cost: time and bytes of a measured step against the number of tensors and of ranks.

`python -m benchmarks.ranks --out docs/scaling.md` runs FSDP2 on the CPU with 1, 2 and 4 processes, in which every
tensor is sharded, and computes from that what larger runs send.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

import forewarn

TENSORS = (100, 1000, 3000)
RANKS = (1, 2, 4)
STEPS = 8
SIDE = 32
LARGE = {"7B": 291}
"""Number of tensors of a model with 32 blocks of 9 tensors, an embedding, a norm and a head."""
LARGE_RANKS = (64, 1024)
QUIET = {"escalation_steps": 0}
"""An alert must not make unmeasured steps measured ones."""


class Many(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(SIDE, SIDE) / SIDE) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.stack(list(self.weights)).mean(0)


def work(rank: int, num_ranks: int, port: int, num_tensors: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model: Any = fully_shard(Many(num_tensors))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> float:
        """Train one step; returns the processor time of this thread."""
        began = time.thread_time()
        loss = model(torch.ones(4, SIDE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss)
        return time.thread_time() - began

    monitor = None
    plain = median([train() for _ in range(STEPS)][2:])
    monitor = forewarn.watch(model, optimizer, f"{folder}/run", every=lambda step: step < STEPS, views=[], config=QUIET)
    exchange = monitor._exchange
    sent, spent, watched = [0], [0.0], []
    for _ in range(STEPS + 2):  # the last two are not measured
        watched.append(train())
        if exchange is not None and exchange._latest is not None:
            exchange._latest.done.wait(60)  # so that each step's own cost is seen
            sent.append(exchange.bytes_sent)
            spent.append(exchange.thread_seconds)
    monitor.close()
    if rank == 0:
        messages = [b - a for a, b in pairwise(sent)]
        result = {
            "main": (median(watched[2:STEPS]) - plain) * 1e3,
            "thread": median(b - a for a, b in list(pairwise(spent))[:STEPS]) * 1e3 if messages else 0.0,
            "bytes": messages[STEPS - 1] if messages else 0,
            "word": messages[-1] if messages else 0,
        }
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def measured(num_ranks: int, num_tensors: int) -> dict[str, Any]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (num_ranks, store.port, num_tensors, folder), nprocs=num_ranks)
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return result


def page(results: Sequence[tuple[int, int, dict[str, Any]]]) -> str:
    word = max(result["word"] for _, _, result in results)
    per_tensor = max(result["bytes"] / num_tensors for ranks, num_tensors, result in results if ranks > 1)
    rows = "".join(
        f"| {tensors:,} | {ranks} | {result['main']:.1f} | {result['thread']:.1f} | {result['bytes'] / 1e3:,.0f} |\n"
        for ranks, tensors, result in results
    )
    computed = "".join(
        f"| {name} | {ranks:,} | {num * per_tensor / 1e3:,.0f} | {ranks * word / 1e3:,.0f} |\n"
        for name, num in LARGE.items()
        for ranks in LARGE_RANKS
    )
    return f"""# What several ranks cost

`python -m benchmarks.ranks --out docs/scaling.md` writes this page. How ranks are combined is in [ranks](ranks.md).

## Measured

FSDP2 with gloo on a CPU of two cores that had much other work to do, float32, all tensors of {SIDE} × {SIDE} values,
all of them sharded, all metrics on, on rank 0. Times are processor times, medians of the last steps.

- Main thread: that of a measured step less that of a step without a monitor, with recording and judging. One rank has
  no exchange, but is slower: its DTensors are read by torch operations, not by the native library as local shards are.
- Thread: that of the background thread for one exchange.
- Sent: what a rank hands to the exchange on a measured step, with sampled histograms: rows, counts and samples.

| tensors | ranks | main thread, ms | thread, ms | sent, kB |
|---|---|---|---|---|
{rows}
An unmeasured step sends {word} bytes per rank.

## Computed from these

What is sent on a measured step depends on the number of tensors only, not on their size or on the number of ranks:
{per_tensor / 1e3:.1f} kB per tensor, of which 2 kB are histograms (`Measure(histograms="off")` saves them). A ring
reduction moves about twice that over each rank's connection. The first message of every step comes from each rank to
all of them. Not included are 64 rows of the last hidden state (8 bytes per value, at most 2 MB), 8 kB of classes, and
131 kB per task where tasks are compared. Nothing here was run.

| model | ranks | sent on a measured step, kB | received on every step, kB |
|---|---|---|---|
{computed}"""


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(out: Path | None) -> None:
    results = []
    for num_tensors in TENSORS:
        for num_ranks in RANKS:
            results.append((num_ranks, num_tensors, measured(num_ranks, num_tensors)))
            click.echo(f"{num_tensors} tensors, {num_ranks} ranks: {results[-1][2]}")
    if out is not None:
        out.write_text(page(results))


if __name__ == "__main__":
    main()
