"""Faults of one rank on real processes: named with the rank, and the layer or phase."""

import time

import pytest
import torch
from torch import nn

import forewarn
from tests.processes import in_processes
from tests.rank_runs import batch, made, split

NUM_RANKS = 3
ONSET = 8


def train(rank, folder, fault):
    model = made()
    called = split(model, "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began = time.monotonic()
    with forewarn.watch(called, optimizer, f"{folder}/{fault}", every=1, views=[]) as monitor:
        for step in range(100 if fault == "data" else 14):
            x, y = batch(step, "ddp", rank, NUM_RANKS)
            is_faulty = rank == 1 and step >= ONSET
            if step == ONSET:
                usual = (time.monotonic() - began) / ONSET  # however busy this machine is
            if fault == "slow" and is_faulty:
                time.sleep(max(0.4, 5 * usual))
            if fault == "data" and rank == 1:
                y = (y + step) % 5  # no rank can learn these
            if fault == "nan" and is_faulty:
                x = x * float("nan")
            loss = nn.functional.cross_entropy(called(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if fault == "changed" and rank == 1 and step == ONSET:
                model.blocks[0].up.weight.data += 0.1
            monitor.step(loss)


def every_fault(rank, folder):
    for fault in ("healthy", "slow", "changed", "nan", "data"):
        train(rank, folder, fault)


@pytest.mark.ci
def test_a_slow_a_changed_a_non_finite_and_an_odd_rank_are_named(tmp_path):
    in_processes(NUM_RANKS, every_fault, str(tmp_path))
    found = {}
    for fault in ("healthy", "slow", "changed", "nan", "data"):
        with forewarn.open_run(tmp_path / fault) as run:
            alerts = [alert for alert in run.alerts() if alert.code.startswith("R")]
            found[fault] = {alert.name: alert for alert in alerts if fault != "slow" or alert.scope == "rank_1"}
            assert run.scopes("rank/loss") == ("rank_0", "rank_1", "rank_2")
    assert not found["healthy"].keys() - {"straggler"}  # another process may hold up a rank for real
    slow = found["slow"]["straggler"]
    assert (slow.scope, slow.finding.evidence["phase"]) == ("rank_1", "before the forward pass, as when it loads data")
    assert slow.fired <= ONSET + 2
    changed = found["changed"]["rank-desync"]
    assert (changed.scope, changed.finding.evidence["rank"]) == ("blocks.0.up.weight", 1)
    assert changed.fired == ONSET
    nan = found["nan"]["rank-non-finite"]
    assert (nan.scope, nan.finding.evidence["rank"], nan.fired) == ("embed", 1, ONSET)
    assert found["data"]["rank-loss-apart"].scope == "rank_1"
