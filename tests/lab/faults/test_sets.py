"""The sets share nothing, and every fault has somewhere to be put."""

import dataclasses
import math

import pytest
import torch

from forewarn.judge.rules import all_rules
from forewarn.lab.faults import cases
from forewarn.lab.faults.cases import Case
from forewarn.lab.faults.hard_negatives import HARD_NEGATIVES
from forewarn.lab.faults.injected import FAULTS
from forewarn.lab.faults.selection import FULL, QUICK, SAMPLE
from forewarn.lab.faults.sets import FIRST_SEED, WORKLOADS, Set, find_workload, seeds, set_of
from forewarn.lab.faults.workload import Trait

EVERY = [workload for ones in WORKLOADS.values() for workload in ones]

ONE_SET_ONLY = {
    "discriminator-too-strong": {Set.DEVELOPMENT, Set.TEST},
    "discriminator-too-weak": {Set.DEVELOPMENT, Set.TEST},
    "policy-entropy-collapse": {Set.DEVELOPMENT, Set.TEST},
    "attention-logit-growth": {Set.DEVELOPMENT, Set.TEST},
    "attention-entropy-collapse": {Set.DEVELOPMENT, Set.TEST},
    "divergence-wrong-sign": {Set.DEVELOPMENT},
    "divergence-too-strong": {Set.DEVELOPMENT},
    "task-collapse": {Set.DEVELOPMENT},
    "dead-expert": {Set.TEST},
    "target-network-never-updated": {Set.VALIDATION},
}
"""Faults of a kind of training that is not in every set, because a kind is in one set only."""


def test_no_workload_and_no_kind_is_in_two_sets():
    names = [workload.name for workload in EVERY]
    assert len(set(names)) == len(names) >= 16
    kinds = {which: {workload.kind for workload in ones} for which, ones in WORKLOADS.items()}
    assert sum(map(len, kinds.values())) == len(set.union(*kinds.values())) >= 16


def test_no_seed_is_in_two_sets():
    longest = min(abs(one - other) for one in FIRST_SEED.values() for other in FIRST_SEED.values() if one != other)
    ranges = [set(seeds(which, longest)) for which in Set]
    assert len(set.union(*ranges)) == sum(map(len, ranges))


def test_every_fault_fits_a_workload_of_every_set_that_has_its_kind():
    assert len(FAULTS) >= 40
    where = {name: {set_of(one.name) for one in EVERY if fault.fits(one)} for name, fault in FAULTS.items()}
    assert {name: which for name, which in where.items() if which != set(Set)} == ONE_SET_ONLY
    assert all(any(negative.fits(one) for one in EVERY) for negative in HARD_NEGATIVES.values())


def test_every_fault_declares_how_it_is_named_and_fixed():
    codes = {rule.code for rule in all_rules()}
    for fault in FAULTS.values():
        assert fault.causes or fault.words
        assert {cause.partition(":")[0] for cause in fault.causes} <= codes
        assert fault.fixes
        assert fault.summary.endswith(".")


def test_the_full_selection_has_two_seeds_per_fault_and_200_healthy_runs_in_the_test_set():
    chosen = FULL.cases(Set.TEST)
    assert sum(not case.is_fault for case in chosen) >= 200
    for name, fault in FAULTS.items():
        fitting = sum(fault.fits(workload) for workload in WORKLOADS[Set.TEST])
        assert sum(case.change == name for case in chosen) == 2 * fitting


def test_every_fault_case_has_its_healthy_twin_and_a_spread():
    for selection in (QUICK, SAMPLE, FULL):
        chosen = selection.cases(Set.DEVELOPMENT)
        assert len({case.key for case in chosen}) == len(chosen)
        plain = {(case.workload, case.seed) for case in chosen if case.is_plain}
        assert {(case.workload, case.seed) for case in chosen} <= plain
        assert all(sum(workload == name for workload, _ in plain) >= 3 for name, _ in plain)


def short(monkeypatch, num_steps):
    monkeypatch.setattr(
        cases, "find_workload", lambda name: dataclasses.replace(find_workload(name), num_steps=num_steps)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [workload.name for workload in EVERY])
def test_every_workload_takes_the_steps_it_is_given(monkeypatch, name):
    if name == "moe" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")
    short(monkeypatch, 2)
    session, score, error, _ = cases.trained(Case(name, "", 1), None)
    assert (session.step, error) == (2, "")
    assert math.isfinite(score)
    assert len(session.objective) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "change", ["lr-too-high", "no-step", "wrong-sign", "label-misalignment", "dead-relu", "not-in-optimizer"]
)
def test_a_fault_changes_the_run_and_only_the_run(monkeypatch, change):
    short(monkeypatch, 6)
    plain, broken, again = (cases.trained(Case("mlp", name, 1), None)[0] for name in ("", change, ""))
    assert plain.objective == again.objective != broken.objective


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [workload.name for workload in EVERY])
def test_every_workload_learns(monkeypatch, name):
    torch.set_num_threads(1)
    after = cases.trained(Case(name, "", 7), None)[1]
    short(monkeypatch, 1)
    before = cases.trained(Case(name, "", 7), None)[1]
    assert after < before - 0.05 * abs(before)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [workload.name for workload in (*WORKLOADS[Set.DEVELOPMENT], *WORKLOADS[Set.VALIDATION])]
)
def test_every_fault_takes_effect(monkeypatch, name):
    short(monkeypatch, 60)
    workload = find_workload(name)
    if Trait.REINFORCEMENT in workload.traits:
        pytest.skip("its objective is measured too rarely for 60 steps")
    healthy = cases.trained(Case(name, "", 7), None)[0].objective
    for fault in FAULTS.values():
        if fault.fits(workload):
            assert cases.trained(Case(name, fault.name, 7), None)[0].objective != healthy, fault.name
