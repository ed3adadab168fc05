"""What each family costs is measured beside a monitor without it."""

from benchmarks.overhead.families import FAMILIES, families, without
from benchmarks.overhead.page import page
from forewarn.lab.bench import rounds
from forewarn.lab.bench.measurements import this_machine
from forewarn.measure.options import Measure


def test_each_family_is_timed_on_each_workload_and_told_on_the_page(small_workload, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "LEAST_TURN_SECONDS", 0.0)  # short turns: no figure is looked at
    told = []
    (costs,) = families([small_workload], 3, tmp_path, told.append)
    assert told == [f"small, without {family}" for family in FAMILIES]
    assert costs.bare_seconds > 0
    assert set(costs.shares) == set(FAMILIES)
    lines = page("command", this_machine(()), [], (), None, [costs]).splitlines()
    assert "## What each family costs" in lines
    assert sum(line.startswith("| `") for line in lines) == len(FAMILIES)


def test_without_a_family_all_others_are_measured():
    for family in FAMILIES:
        assert without(family) != Measure()
        assert without(family).to_dict() | {family: getattr(Measure(), family)} == Measure().to_dict()
