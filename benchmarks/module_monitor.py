"""What metrics of one's own cost, next to the public package torch-module-monitor on the same training.

    python benchmarks/module_monitor.py

The example GPT, monitored on every step: mean and std of every activation, norms of all parameters and gradients. The
variants take turns step by step in one process on one thread; times are medians of the differences of processor time
within a round. Without torch-module-monitor (pip install torch-module-monitor) only forewarn is measured.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import forewarn
from forewarn.bench.counting import Operations
from forewarn.trainer.gpt import GPT, GPTConfig, token_loss

ROUNDS = 40
SHAPE = GPTConfig(vocab_size=256, context=64, depth=6, heads=4, width=128)
BATCH = 8


class Training:
    """One model that trains, with or without a monitor."""

    def __init__(self, monitor: Any = None) -> None:
        torch.manual_seed(0)
        self.model = GPT(SHAPE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.monitor = monitor
        self.at = 0
        if monitor is not None:
            monitor.set_module(self.model)

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.at)
        tokens = torch.randint(SHAPE.vocab_size, (BATCH, SHAPE.context + 1), generator=generator)
        if self.monitor is not None:
            self.monitor.begin_step(self.at)
        token_loss(self.model(tokens[:, :-1]), tokens[:, 1:]).backward()
        if self.monitor is not None:
            self.monitor.monitor_parameters()
            self.monitor.monitor_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.end_step()
        self.at += 1


def with_functions(kind: Callable[..., Any]) -> Any:
    monitor = kind(monitor_step_fn=lambda step: True)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_activation_metric("std", lambda x: x.std())
    monitor.add_parameter_metric("norm", lambda x: x.norm())
    monitor.add_gradient_metric("norm", lambda x: x.norm())
    return monitor


def with_built_in_names() -> forewarn.ModuleMonitor:
    monitor = forewarn.ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.add_activation_metric("mean")
    monitor.add_activation_metric("std")
    monitor.add_parameter_metric("norm")
    monitor.add_gradient_metric("norm")
    return monitor


def peak_bytes(training: Training) -> int:
    """The most memory that one step holds at a time, beyond what was there when it began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training.step()
    held = most = 0
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def main() -> None:
    torch.set_num_threads(1)
    variants = {"bare": Training()}
    if importlib.util.find_spec("torch_module_monitor") is None:
        print("torch-module-monitor is not installed (pip install torch-module-monitor): forewarn stands alone.")
    else:
        from torch_module_monitor import ModuleMonitor

        variants["torch-module-monitor"] = Training(with_functions(ModuleMonitor))
    variants["forewarn, functions"] = Training(with_functions(forewarn.ModuleMonitor))
    variants["forewarn, built-in names"] = Training(with_built_in_names())

    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for at in range(ROUNDS + 3):
        for name, training in variants.items():
            begin = time.process_time()
            training.step()
            if at >= 3:  # the first steps build what later ones use
                seconds[name].append(time.process_time() - begin)
    bare = statistics.median(seconds["bare"])
    print(
        f"{len(list(variants['bare'].model.parameters()))} parameters, {ROUNDS} rounds; bare step {1e3 * bare:.1f} ms"
    )
    print(f"{'':28}{'ms added':>10}{'% of step':>11}{'operations added':>18}{'host syncs':>12}{'MB added at peak':>18}")
    counted = {}
    for name, training in variants.items():
        with Operations() as operations:
            training.step()
        counted[name] = (operations.count, operations.syncs, peak_bytes(training))
    added: dict[str, float] = {}
    for name, times in seconds.items():
        added[name] = statistics.median(each - own for each, own in zip(times, seconds["bare"], strict=True))
        count, syncs, peak = (one - own for one, own in zip(counted[name], counted["bare"], strict=True))
        print(
            f"{name:28}{1e3 * added[name]:10.2f}{100 * added[name] / bare:11.1f}{count:18}{syncs:12}{peak / 1e6:18.2f}"
        )
    if "torch-module-monitor" in added:
        for name in ("forewarn, functions", "forewarn, built-in names"):
            print(
                f"{name}: {added[name] / added['torch-module-monitor']:.2f} × the time that torch-module-monitor adds"
            )


if __name__ == "__main__":
    main()
