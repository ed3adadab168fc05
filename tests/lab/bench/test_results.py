import statistics
from dataclasses import replace

import pytest

from forewarn.lab.bench.cells import duration, heading, machine_sentences, share, size
from forewarn.lab.bench.measurements import Machine, Spread, this_machine
from tests.lab.bench.conftest import workload_result


def test_a_spread_is_the_median_with_its_quartiles():
    values = [5.0, 1.0, 4.0, 2.0, 9.0, 3.0, 7.0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    assert Spread.of(values) == Spread(median, low, high)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (duration(2.5), "2.5 s"),
        (duration(0.0123), "12.3 ms"),
        (duration(-4.2e-5), "−42 µs"),
        (share(0.031), "+3.1%"),
        (share(-0.002), "−0.2%"),
        (share(0.0), "0%"),
        (share(-0.0001), "0%"),
        (share(1.5), "+150%"),
        (size(1_234_000), "1.23 MB"),
        (size(-53), "−53 B"),
    ],
)
def test_numbers_for_a_person(words, expected):
    assert words == expected


def test_a_busy_machine_is_called_shared_and_nothing_is_said_of_accelerators():
    busy = Machine("x", 2, 1, 3.5, "2026-01-01", {})
    assert busy.is_shared
    assert any("shared with other work" in sentence for sentence in machine_sentences(busy))
    calm = Machine("x", 2, 1, 0.3, "2026-01-01", {})
    assert not calm.is_shared
    assert not any("shared" in sentence for sentence in machine_sentences(calm))
    assert "say nothing about an accelerator" in machine_sentences(calm)[-1]
    assert not Machine("x", 2, 1, None, "2026-01-01", {}).is_shared


def test_this_machine_tells_the_versions_of_what_is_installed():
    machine = this_machine(["torch", "no-such-package"])
    assert set(machine.versions) == {"python", "torch"}
    assert machine.cores >= 1
    assert machine.processor


def test_one_round_is_not_rounds():
    result = workload_result("gpt12")
    assert "1 round of 3 timed steps with either of two models." in heading(replace(result, rounds=1))
    assert "3 rounds of 3 timed steps with either of two models." in heading(result)
