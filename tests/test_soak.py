"""A long run is flat: memory, threads, open files, bytes on disk and the time of a step do not grow with it."""

import json
import subprocess
import sys

import pytest

from tests.soak import INTERVAL, uneven


def readings_of(path, steps, *options):
    command = [sys.executable, "-m", "tests.soak", str(path), str(steps), *options]
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in finished.stdout.splitlines()]


@pytest.mark.slow
def test_a_hundred_thousand_steps_are_flat(tmp_path):
    readings = readings_of(tmp_path / "run", 100_000)
    assert len(readings) == 100
    assert not list(uneven(readings))


@pytest.mark.slow
def test_a_run_that_is_resumed_many_times_is_flat(tmp_path):
    assert not list(uneven(readings_of(tmp_path / "run", 30_000, "--resume-every", "2000")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "time", "disk", "threads", "files"])
def test_a_planted_leak_is_noticed(tmp_path, kind):
    sentences = list(uneven(readings_of(tmp_path / "run", 50_000, "--leak", kind)))
    assert [sentence for sentence in sentences if sentence.startswith(f"{kind}:")], sentences


def reading(**grown):
    flat = {"memory": 300 << 20, "threads": 3, "files": 9, "disk": 0, "seconds": 1.0}
    return {name: value + grown.get(name, 0) for name, value in flat.items()}


@pytest.mark.parametrize(
    "growth", [{}, {"memory": 400 * INTERVAL}, {"threads": 1}, {"files": 1}, {"seconds": 0.05}], ids=str
)
def test_what_grows_from_step_to_step_is_told_by_name(growth):
    grown = [{name: amount * number for name, amount in growth.items()} for number in range(50)]
    sentences = list(uneven([reading(**amounts) for amounts in grown]))
    names = [sentence.partition(":")[0] for sentence in sentences]
    assert names == ["time" if name == "seconds" else name for name in growth]


def test_a_file_that_grows_by_more_and_more_is_told():
    assert not list(uneven([reading(disk=200_000 * number) for number in range(50)]))
    assert list(uneven([reading(disk=20_000 * number**2) for number in range(50)]))
