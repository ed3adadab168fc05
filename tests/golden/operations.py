"""How many torch operations watching adds to a step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

import forewarn
from tests.real_runs import loss_of, make_gpt
from tests.test_no_host_sync import Counting

STEPS = 4
"""The last of which is counted: what happens once is over by then."""


def added_operations(folder: Path) -> str:
    """By name, on a measured and on a plain step, with and without clipping, of a small GPT with attention."""
    lines = []
    for measured in (True, False):
        for clip in (True, False):
            added = _counted(clip, folder / f"{measured}-{clip}", measured)
            added.subtract(_counted(clip))
            kind = f"{'measured' if measured else 'plain'} step, {'clipped' if clip else 'not clipped'}"
            lines += [
                f"{kind}: {added.total()} operations",
                *(f"    {n} {name}" for name, n in sorted(added.items()) if n),
                "",
            ]
    return "\n".join(lines)


def _counted(clip: bool, run: Path | None = None, measured: bool = False) -> Counter[str]:
    torch.manual_seed(0)
    model, batches, lr = make_gpt(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    monitor = forewarn.watch(model, optimizer, run, every=lambda step: measured, views=[]) if run else None
    for _ in range(STEPS):
        with Counting() as counting:
            loss = loss_of(model, *next(batches))
            loss.backward()
            if clip and monitor:
                monitor.clip_grad_norm_(1.0)
            elif clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if monitor:
                monitor.step(loss)
    if monitor:
        assert monitor.info.versions["statistics"] == "native", "the counts are those of the native backend"
        monitor.close()
    return counting.operations
