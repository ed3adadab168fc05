"""Rules about speed and memory, on real loops whose clock and device the test makes up."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import forewarn
from forewarn.judge.families import Family
from forewarn.judge.rules import family_of, find_rule
from forewarn.judge.series import Series
from forewarn.measure.probes.system import SystemProbe
from forewarn.types import Severity
from tests.measure.probes.test_system import GPU, FakeCuda


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Timed(nn.Module):
    """A model whose forward pass takes as long as it is told."""

    def __init__(self, clock):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.clock, self.seconds = clock, 0.0
        self.meanwhile = lambda: None

    def forward(self, inputs):
        self.clock.now += self.seconds
        self.meanwhile()
        return self.layers(inputs)


class Run:
    """A small regression on a made-up clock."""

    def __init__(self, path, device=None, **config):
        self.clock = Clock()
        self.model = Timed(self.clock)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.monitor = forewarn.watch(self.model, self.optimizer, path, views=[], config=config)
        self.monitor._stopwatch.clock = self.clock
        self.monitor._stopwatch._since = 0.0
        self.loader = self.batches()
        if device is not None:
            self.monitor._probes["system"].collect = SystemProbe(GPU, device, self.clock).collect

    def batches(self):
        while True:
            self.clock.now += self.data_seconds
            yield torch.randn(32, 8)

    def step(self, forward=0.5, data=0.1, **counts):
        self.data_seconds, self.model.seconds = data, forward
        inputs = next(self.loader)
        loss = (self.model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.monitor.step(loss, **counts)

    def close(self, reason="completed"):
        self.monitor.close(reason)
        return self.monitor


def slower(path: Path) -> forewarn.Monitor:
    run = Run(path)
    for step in range(110):
        run.step(forward=5.0 if step < 80 else 20.0)
    return run.close()


def one_slow_step(path: Path) -> forewarn.Monitor:
    run = Run(path)
    for step in range(80):
        run.step(forward=15.0 if step == 70 else 0.1)
    return run.close()


def starved(path: Path) -> forewarn.Monitor:
    run = Run(path)
    run.loader = run.monitor.watch_loader(run.loader)
    for _ in range(100):
        run.step(forward=0.3, data=0.8)
    return run.close()


class Device(FakeCuda):
    """A device of 80 GB."""

    def __init__(self, allocated=lambda reading: 1e9, peak=2e9, utilization=90, retries=0):
        self.allocated, self.peak, self.percent, self.retries = allocated, peak, utilization, retries
        self.num_readings = 0

    def memory_stats(self, device):
        self.num_readings += 1
        allocated = self.allocated(self.num_readings)
        return {
            "allocated_bytes.all.current": allocated,
            "allocated_bytes.all.peak": self.peak,
            "num_alloc_retries": self.retries,
        }

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=80e9)

    def utilization(self, device):
        return self.percent


def with_device(path: Path, device: Device, steps: int = 150, forward: float = 1.0) -> forewarn.Monitor:
    run = Run(path, device)
    for _ in range(steps):
        run.step(forward=forward)
    return run.close()


def full_device(path: Path) -> forewarn.Monitor:
    return with_device(path, Device(peak=79e9, retries=3))


def leaking_device(path: Path) -> forewarn.Monitor:
    return with_device(path, Device(allocated=lambda reading: 1e9 + 5e6 * reading), steps=340)


def idle_device(path: Path) -> forewarn.Monitor:
    return with_device(path, Device(utilization=10))


def without_memory(path: Path) -> forewarn.Monitor:
    run = Run(path)
    for _ in range(20):
        run.step()
    return run.close("OutOfMemoryError: CUDA out of memory")


def hung(path: Path) -> forewarn.Monitor:
    run = Run(path)
    run.model.meanwhile = run.monitor._watchdog.check
    for step in range(20):
        run.step(forward=130.0 if step == 15 else 0.5)
    return run.close()


FAULTS = {
    "P101": slower, "P102": one_slow_step, "P103": starved, "P104": full_device, "P105": leaking_device,
    "P106": idle_device, "P107": without_memory, "P108": hung,
}  # fmt: skip


def about_performance(monitor: forewarn.Monitor) -> list[str]:
    return [
        f"{alert.name} {alert.finding}"
        for alert in monitor.alerts
        if family_of(alert.code) is Family.PERFORMANCE and alert.severity >= Severity.WARNING
    ]


@pytest.mark.parametrize("step_seconds", [0.0002, 0.3])
def test_a_shared_machine_is_left_in_peace(step_seconds, tmp_path):
    random, run = np.random.default_rng(0), Run(tmp_path / "run")
    for step in range(600):
        neighbours = 1.0 if step < 300 else 2.5  # from then on somebody else trains too
        busy = neighbours * (3.0 if random.random() < 0.1 else 1.0)
        run.step(
            forward=step_seconds * busy * random.lognormal(sigma=0.5),
            data=step_seconds / 5 * random.lognormal(sigma=0.5),
        )
        if step % 100 == 99:
            with run.monitor.pause("eval"):
                run.clock.now += 60.0
        if step % 100 == 49:  # an evaluation that nobody marks
            run.clock.now += 20.0
        if step % 100 == 70:  # a machine that freezes
            run.step(forward=1.5)
    assert about_performance(run.close()) == []


def test_cells_of_a_notebook_and_a_second_model_are_left_in_peace(tmp_path):
    run = Run(tmp_path / "run")
    for step in range(300):
        run.clock.now += 600.0 if step % 50 == 0 else 0.5  # a cell that runs later, or the other network of a GAN
        run.step(forward=0.5, data=0.01)
    assert run.close().alerts == ()


def test_compilation_at_the_start_is_left_in_peace(tmp_path):
    run = Run(tmp_path / "run")
    for step in range(300):
        run.step(forward=60.0 if step < 3 else 0.5)
    assert about_performance(run.close()) == []


@pytest.mark.parametrize("counts_tokens", [True, False])
def test_longer_batches_take_longer_without_being_slower(counts_tokens, tmp_path):
    run = Run(tmp_path / "run")
    for step in range(110):
        length = 512 if step < 80 else 2048
        run.step(forward=0.01 * length, data=0.0, **({"tokens": length} if counts_tokens else {}))
    assert bool(about_performance(run.close())) is not counts_tokens


def test_memory_that_levels_off_is_left_in_peace(tmp_path):
    monitor = with_device(tmp_path / "run", Device(allocated=lambda reading: 1e9 + 2e7 * min(reading, 150)), steps=600)
    assert about_performance(monitor) == []


def test_the_slower_phase_is_named_and_no_more_detail_is_measured(tmp_path):
    monitor = slower(tmp_path / "run")
    (alert,) = monitor.alerts
    assert (alert.name, alert.scope, alert.severity) == ("throughput-drop", "forward", Severity.WARNING)
    assert alert.finding.evidence["level"] == pytest.approx(5.0, rel=0.01)
    assert alert.finding.value == pytest.approx(20.0, rel=0.01)
    measured = monitor.history.series("weight/global_norm").steps
    assert (measured > alert.fired).sum() <= 1, "more detail would take more time"


@pytest.mark.parametrize(
    ("is_watched", "objective", "severity"),
    [(True, "loss", Severity.WARNING), (True, "return", Severity.INFO), (False, "loss", Severity.INFO)],
)
def test_only_a_watched_loader_is_surely_too_slow(is_watched, objective, severity, tmp_path):
    run = Run(tmp_path / "run", objective=objective)
    if is_watched:
        run.loader = run.monitor.watch_loader(run.loader)
    for _ in range(100):
        run.step(forward=0.3, data=0.8)
    monitor = run.close()
    assert [(alert.name, alert.severity) for alert in monitor.alerts] == [("data-starved", severity)]


def test_a_device_that_is_full_but_never_had_to_retry_is_only_information(tmp_path):
    (alert,) = with_device(tmp_path / "run", Device(peak=79e9)).alerts
    assert (alert.name, alert.severity) == ("memory-high", Severity.INFO)


@pytest.mark.parametrize(("other", "fires"), [(0.2, False), (0.5, True)])
def test_a_full_host_is_reported_if_the_run_holds_much_of_it(other, fires):
    rule = find_rule("memory-high")
    found = rule(Series.of([0.97] * 3), Series.of([other] * 3), Series.of([]), Series.of([]), settings=rule.settings())
    assert (found is not None) is fires
