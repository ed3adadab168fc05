"""Memory of the host and the device, and the load of the GPU."""

import os
from types import SimpleNamespace

import psutil
import pytest
import torch

from forewarn.measure.probes import system
from forewarn.measure.probes.system import SystemProbe
from forewarn.measure.step import Step

GPU = torch.device("cuda", 0)


class FakeCuda:
    """What `torch.cuda` says about a device of 100 bytes."""

    def is_initialized(self):
        return True

    def memory_stats(self, device):
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
        return {**dict(zip(names, (40, 60, 90), strict=True)), "num_alloc_retries": 2}

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=100)

    def utilization(self, device):
        return 25

    def device_memory_used(self, device):
        return 70

    def temperature(self, device):
        return 65

    def power_draw(self, device):
        return 300_000


class WithoutDriver(FakeCuda):
    def utilization(self, device):
        raise ModuleNotFoundError("pynvml does not seem to be installed")


def read(probe):
    pending = probe.collect(Step())
    return {} if pending is None else {reading.name: float(reading.values) for reading in pending.decode([])}


def test_memory_of_the_process_is_what_psutil_says():
    seen, process = read(SystemProbe()), psutil.Process(os.getpid()).memory_info()
    assert seen["system/process_memory_bytes"] == pytest.approx(process.rss, rel=0.2)
    assert 0 < seen["system/private_memory_bytes"] <= seen["system/process_memory_bytes"]
    assert 0 < seen["system/own_memory_share"] < 1
    assert 0 < seen["system/host_memory_share"] < 1
    assert not any(name.startswith(("system/cuda", "system/gpu")) for name in seen)


def test_a_device_is_read_without_asking_it():
    seen = read(SystemProbe(GPU, FakeCuda()))
    of_device = {name.removeprefix("system/"): value for name, value in seen.items() if "cuda" in name or "gpu" in name}
    assert of_device == {
        "cuda_allocated_bytes": 40, "cuda_reserved_bytes": 60, "cuda_peak_bytes": 90, "cuda_retries": 2,
        "cuda_memory_share": 0.9, "gpu_utilization_share": 0.25, "gpu_memory_bytes": 70, "gpu_temperature": 65,
        "gpu_power": 300,
    }  # fmt: skip


def test_without_the_package_of_the_driver_only_its_readings_are_missing():
    seen = read(SystemProbe(GPU, WithoutDriver()))
    assert seen["system/cuda_memory_share"] == 0.9
    assert "system/gpu_utilization_share" not in seen


def test_what_is_dear_is_read_every_ten_seconds_only():
    now = [0.0]
    probe = SystemProbe(clock=lambda: now[0])
    around = []
    for second in range(25):
        now[0] = second + 0.5
        seen = read(probe)
        assert "system/process_memory_bytes" in seen
        around.append("system/host_memory_share" in seen)
        now[0] += 0.3
        assert read(probe) == {}
    assert [second for second, there in enumerate(around) if there] == [0, 10, 20]


def test_a_limit_of_the_control_group_counts_without_cached_files(tmp_path):
    own, group = tmp_path / "self", tmp_path / "group" / "job"
    group.mkdir(parents=True)
    own.write_text("0::/job\n")
    for name, text in (("max", "1000\n"), ("current", "900\n"), ("stat", "anon 500\ninactive_file 300\n")):
        (group / f"memory.{name}").write_text(text)
    assert list(system._control_groups(tmp_path / "group", own)) == [(600, 1000)]
    (group / "memory.max").write_text("max\n")
    assert list(system._control_groups(tmp_path / "group", own)) == []
    assert list(system._control_groups(tmp_path / "group", tmp_path / "missing")) == []
