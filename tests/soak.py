"""A long run of a tiny model under the monitor as it is by default, in a process of its own: `python -m tests.soak`.

Prints one line of JSON for every thousand steps. With `--resume-every` the monitor is closed every so many steps and
a new one goes on with the run. `--leak` plants what a flat run must not have, to see that it is noticed.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

import forewarn

INTERVAL = 1000
MEMORY_BYTES, DISK_BYTES = 6 << 20, 4 << 20
"""Growth that may be chance: of the allocator, and of SQLite's log."""
TIMES = 1.5
"""How much slower the second half of a run may be: other processes take turns on the machine."""


def uneven(readings):
    """What is not flat, each in a sentence: the second half of the readings compared with the first by medians.

    The first tenth is left out, because caches and windows fill up there.
    """
    readings = readings[len(readings) // 10 :]
    half = len(readings) // 2
    first, second = readings[:half], readings[-half:]

    def median(part, name):
        return statistics.median(reading[name] for reading in part)

    for name in ("threads", "files"):
        if median(second, name) > median(first, name):
            yield f"{name}: {median(first, name)} in the first half, {median(second, name)} in the second"
    grown = median(second, "memory") - median(first, "memory")
    if grown > MEMORY_BYTES:
        yield f"memory: {grown / 1e6:.1f} MB more in the second half"
    if median(second, "seconds") > TIMES * median(first, "seconds"):
        yield f"time: {median(first, 'seconds'):.3f} s for {INTERVAL} steps, then {median(second, 'seconds'):.3f}"
    sizes = [(part[-1]["disk"] - part[0]["disk"]) for part in (first, second)]
    if sizes[1] > TIMES * max(sizes[0], 0) + DISK_BYTES:
        yield f"disk: {sizes[0] / 1e6:.1f} MB in the first half, {sizes[1] / 1e6:.1f} MB in the second"


def run(path, steps, resume_every=0, leak=""):
    """Train, and print a reading for every interval."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(512, 8)
    targets = (torch.nn.Linear(8, 4)(inputs) + 0.3 * torch.randn(512, 4)).detach()
    monitor = forewarn.watch(model, optimizer, run=path)
    process, kept, began = psutil.Process(), [], time.process_time()
    for step in range(steps):
        batch = torch.randint(0, 512, (16,))
        loss = ((model(inputs[batch]) - targets[batch]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
        _leak(leak, step, path, kept)
        if step % INTERVAL == INTERVAL - 1:
            seconds = time.process_time() - began
            if resume_every and (step + 1) % resume_every == 0:
                monitor.close()
                monitor = forewarn.watch(model, optimizer, run=path, resume=True)
            print(json.dumps(_reading(process, path, seconds)), flush=True)
            began = time.process_time()
    monitor.close()


def _reading(process, path, seconds):
    return {
        "memory": process.memory_info().rss,
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "disk": sum(entry.stat().st_size for entry in os.scandir(path)),
        "seconds": seconds,
    }


def _leak(kind, step, path, kept):
    """A small leak: what a step leaves behind."""
    if kind == "memory":
        kept.append(bytearray(400))
    elif kind == "time":
        sum(range(6 * step))
    elif kind == "disk":
        with open(Path(path) / "leak", "ab") as file:
            file.write(bytes(step // 10))
    elif step % INTERVAL == 0 and kind == "threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif step % INTERVAL == 0 and kind == "files":
        kept.append(open(os.devnull))  # noqa: SIM115 - it is a leak


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("steps", type=int)
    parser.add_argument("--resume-every", type=int, default=0)
    parser.add_argument("--leak", choices=("", "memory", "time", "disk", "threads", "files"), default="")
    given = parser.parse_args()
    run(given.path, given.steps, given.resume_every, given.leak)
    sys.stdout.flush()
