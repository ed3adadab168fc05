"""How long `forewarn check` takes for a long run, and `forewarn ls` for many.

    python benchmarks/long_runs.py [STEPS] [RUNS]

Writes a run that is measured in detail every 100 steps, times the phases of every tenth and has a spike every 200, and
copies of a short one, to a temporary directory; prints seconds of CPU time and the largest memory of each command.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from forewarn.config import Config
from forewarn.store import RunWriter
from forewarn.types import Block, ParameterInfo, RunInfo

NUM_TENSORS = 20
WHOLE = ("",)
PHASES = ("data", "forward", "backward", "optimizer", "between passes", "monitor")


def write(path: Path, num_steps: int) -> None:
    """Light readings on every step, detail on every hundredth."""
    rng = np.random.default_rng(0)
    scopes = tuple(f"blocks.{index}.weight" for index in range(NUM_TENSORS))
    parameter = ParameterInfo((64, 64), "Linear.weight", "float32", 0, True)
    info = RunInfo(model="GPT", parameters=dict.fromkeys(scopes, parameter), groups=({"lr": 1e-3},))
    writer = RunWriter(path, info=info, config=Config().to_dict())
    losses = 2.0 * np.exp(0.05 * rng.normal(size=num_steps))
    norms = np.exp(0.1 * rng.normal(size=num_steps))
    norms[199::200] *= 30
    losses[200::200] *= 4
    for step in range(num_steps):
        light = {
            "train/lr": 1e-3, "update/optimizer_steps": 1.0, "train/loss": losses[step],
            "gradient/global_norm": norms[step], "speed/step_seconds": 0.1,
        }  # fmt: skip
        if step % 32 == 31:
            light["train/loss_level"] = float(np.median(losses[step - 31 : step + 1]))
        blocks = [
            Block(step, float(step), name, ("0",) if name == "train/lr" else WHOLE, np.array([value], np.float32))
            for name, value in light.items()
        ]
        if step % 10 == 0:
            phases = np.array([0.01, 0.03, 0.04, 0.01, 0.01, 0.0], np.float32) * np.float32(rng.uniform(0.9, 1.1))
            blocks.append(Block(step, float(step), "speed/phase_seconds", PHASES, phases))
        if step % 100 == 0:
            noise = np.exp(0.1 * rng.normal(size=(3, NUM_TENSORS))).astype(np.float32)
            for name, scale, row in zip(
                ("gradient/norm", "weight/norm", "update/ratio"), (0.1, 1.0, 1e-3), noise, strict=True
            ):
                blocks.append(Block(step, float(step), name, scopes, np.float32(scale) * row))
        writer.append(step, blocks)
        if step % 5000 == 0:
            writer.flush()
    writer.close()


def report(words: str, *arguments: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "forewarn", *arguments], stdout=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{words}: {seconds:.1f} s of CPU time, at most {after.ru_maxrss / 1000:.0f} MB so far")


def main(num_steps: int, num_runs: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write(root / "short", 200)
        for number in range(num_runs):
            shutil.copytree(root / "short", root / "runs" / f"run-{number:04}")  # keeps the times of the files
        report(f"ls of {num_runs:,} runs", "ls", str(root / "runs"))
        write(root / "long", num_steps)
        report(f"check of {num_steps:,} steps", "check", str(root / "long"))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ("200000", "2000")))
