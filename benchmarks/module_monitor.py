"""The cost of custom metrics, next to the public package torch-module-monitor on the same training.

    python benchmarks/module_monitor.py

The example GPT, monitored on every step: mean and std of every activation, norms of all parameters and gradients, as
functions or by their built-in names. The functions alone are the lower limit for any monitor that calls them. The
variants take turns step by step in one process on one thread. Times are medians of the differences in CPU time
within a round. Without torch-module-monitor (pip install torch-module-monitor) only forewarn is measured.

Memory is what torch's allocator was asked for, minus that of the bare step. It is taken at the peak of a step, which is
in the backward pass, where no monitor holds anything. It is also taken at the peak of an evaluation of a plain stack of
layers, where a copy of an activation shows. The last column is the total allocated in a step, held or not.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import forewarn
from forewarn.lab.bench.counting import Operations
from forewarn.lab.gpt import GPT, GPTConfig, token_loss

ROUNDS = 60
SHAPE = GPTConfig(vocab_size=256, context=64, depth=6, heads=4, width=128)
BATCH = 8


class Training:
    """One model that trains, with or without a monitor."""

    def __init__(self, monitor: Any = None) -> None:
        torch.manual_seed(0)
        self.model = GPT(SHAPE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.monitor = monitor
        self.num_steps = 0
        if monitor is not None:
            monitor.set_module(self.model)

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.num_steps)
        tokens = torch.randint(SHAPE.vocab_size, (BATCH, SHAPE.context + 1), generator=generator)
        if self.monitor is not None:
            self.monitor.begin_step(self.num_steps)
        token_loss(self.model(tokens[:, :-1]), tokens[:, 1:]).backward()
        if self.monitor is not None:
            self.monitor.monitor_parameters()
            self.monitor.monitor_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.end_step()
        self.num_steps += 1


class Evaluation:
    """Consecutive layers whose outputs are not kept for a backward pass."""

    def __init__(self, monitor: Any = None) -> None:
        self.model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        self.monitor = monitor
        if monitor is not None:
            monitor.set_module(self.model)

    @torch.no_grad()
    def run(self) -> None:
        if self.monitor is not None:
            self.monitor.begin_step(0)
        self.model(torch.ones(512, 512))
        if self.monitor is not None:
            self.monitor.end_step()


class FunctionsAlone:
    """Without a monitor: hooks that call the same functions and discard the results."""

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []

    def set_module(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        for layer in module.modules():
            layer.register_forward_hook(self.returned)

    def returned(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        with torch.no_grad():
            self.results += [output.mean(), output.std()]

    def begin_step(self, step: int) -> None:
        self.results = []

    def monitor_parameters(self) -> None:
        with torch.no_grad():
            self.results += [parameter.norm() for parameter in self.parameters]

    def monitor_gradients(self) -> None:
        self.results += [parameter.grad.norm() for parameter in self.parameters if parameter.grad is not None]

    def end_step(self) -> None:
        self.results = []


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


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes that torch allocated while the block ran."""

    peak: int
    allocated: int

    @classmethod
    def of(cls, action: Callable[[], None]) -> Memory:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            action()
        held = most = allocated = 0
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
            allocated += max(0, event.nbytes())
        return cls(most, allocated)


def counts(training: Training, evaluation: Evaluation) -> tuple[float, ...]:
    """Operations, host syncs, and megabytes: at the peak of a step, of an evaluation, and allocated in a step."""
    with Operations() as operations:
        training.step()
    step, alone = Memory.of(training.step), Memory.of(evaluation.run)
    megabytes = (step.peak / 1e6, alone.peak / 1e6, step.allocated / 1e6)
    return (operations.count, operations.syncs, *megabytes)


def main() -> None:
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Any]] = {"bare": lambda: None}
    if importlib.util.find_spec("torch_module_monitor") is None:
        print("torch-module-monitor is not installed (pip install torch-module-monitor): forewarn stands alone.")
    else:
        from torch_module_monitor import ModuleMonitor

        makers["torch-module-monitor"] = lambda: with_functions(ModuleMonitor)
    makers["the functions alone"] = FunctionsAlone
    makers["forewarn, functions"] = lambda: with_functions(forewarn.ModuleMonitor)
    makers["forewarn, built-in names"] = with_built_in_names
    variants = {name: Training(make()) for name, make in makers.items()}

    seconds: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for number in range(ROUNDS + 3):
        order = order[1:] + order[:1]  # a fixed order would give each variant the same cache contents
        for name in order:
            begin = time.process_time()
            variants[name].step()
            if number >= 3:  # warm up
                seconds[name].append(time.process_time() - begin)
    bare = statistics.median(seconds["bare"])
    print(
        f"{len(list(variants['bare'].model.parameters()))} parameters, {ROUNDS} rounds; bare step {1e3 * bare:.1f} ms"
    )
    print(f"{'':26}{'time':>18}{'operations':>12}{'host':>7}{'MB at the':>12}{'MB at the':>14}{'MB allocated':>14}")
    print(
        f"{'added by':26}{'ms':>9}{'% step':>9}{'':>12}{'syncs':>7}{'step peak':>12}{'eval. peak':>14}{'in a step':>14}"
    )
    counted = {name: counts(training, Evaluation(makers[name]())) for name, training in variants.items()}
    added: dict[str, float] = {}
    for name, times in seconds.items():
        added[name] = statistics.median(spent - own for spent, own in zip(times, seconds["bare"], strict=True))
        operations, syncs, *megabytes = (one - own for one, own in zip(counted[name], counted["bare"], strict=True))
        shown = "".join(f"{amount:{width}.3f}" for amount, width in zip(megabytes, (12, 14, 14), strict=True))
        print(f"{name:26}{1e3 * added[name]:9.2f}{100 * added[name] / bare:9.1f}{operations:12}{syncs:7}{shown}")
    if "torch-module-monitor" in added:
        for name in ("the functions alone", "forewarn, functions", "forewarn, built-in names"):
            print(
                f"{name}: {added[name] / added['torch-module-monitor']:.2f} × the time that torch-module-monitor adds"
            )


if __name__ == "__main__":
    main()
