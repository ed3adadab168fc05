"""The measured update ratio beside the usual estimate lr · ‖g‖ / ‖w‖, for several optimizers.

python benchmarks/update_ratio.py    # writes the table of docs/update_ratio.md to standard output
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch.optim import SGD, AdamW, Optimizer

import forewarn
from forewarn.lab.data import TokenBatches, stdlib_text
from forewarn.lab.gpt import GPT, GPTConfig
from forewarn.types import figure

STEPS, LAST = 200, 8
OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, 0.1),
    "SGD, weight decay 0.1": lambda parameters: SGD(parameters, 0.1, weight_decay=0.1),
    "SGD, momentum 0.9": lambda parameters: SGD(parameters, 0.1, momentum=0.9),
    "AdamW": lambda parameters: AdamW(parameters, 1e-3, weight_decay=0.0),
    "AdamW, weight decay 0.1": lambda parameters: AdamW(parameters, 1e-3, weight_decay=0.1),
    "AdamW, weight decay 10": lambda parameters: AdamW(parameters, 1e-3, weight_decay=10.0),
}


def ratios(make: Callable[[Iterable[torch.Tensor]], Optimizer], run: Path) -> tuple[np.ndarray, np.ndarray]:
    """The measured and the estimated ratio of every matrix of a small GPT on the last measured steps."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=32, depth=2, heads=2, width=48))
    optimizer = make(model.parameters())
    batches = TokenBatches(stdlib_text(400_000), batch_size=8, context=32, seed=0)
    config = forewarn.Config(measure=forewarn.Measure(sample_size=1_000_000))  # every weight, not a sample
    with forewarn.watch(model, optimizer, run, every=1, config=config, views=[]) as monitor:
        for _ in range(STEPS):
            inputs, targets = next(batches)
            loss = model(inputs, targets)
            loss.backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    shapes = [monitor.info.parameters[scope].shape for scope in monitor.history.panel("update/ratio").scopes]
    matrices = [index for index, shape in enumerate(shapes) if len(shape) > 1]
    measured, estimated = (monitor.history.panel(name).values for name in ("update/ratio", "update/ratio_estimate"))
    return measured[-LAST:, matrices], estimated[-LAST:, matrices]


def main() -> None:
    print("| optimizer | measured | lr · ‖g‖ / ‖w‖ | measured / estimate | its range over tensors |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, make) in enumerate(OPTIMIZERS.items()):
            measured, estimated = ratios(make, Path(folder) / str(number))
            factors = np.median(measured / estimated, axis=0)
            cells = [np.median(measured), np.median(estimated), np.median(factors)]
            print(f"| {name} | {' | '.join(map(figure, cells))} | {figure(factors.min())} to {figure(factors.max())} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
