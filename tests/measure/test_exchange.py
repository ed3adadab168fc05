"""Readings of several processes meet in the background; whatever happens to one of them, the training goes on."""

import time
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import forewarn
from forewarn.measure import exchange as module
from forewarn.measure.exchange import Exchange
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.probe import Pending, Probe
from forewarn.measure.recording import Collected
from forewarn.measure.step import Step
from tests.judge import test_epochs as epochs
from tests.processes import in_two_processes

LONGEST = 300.0
LIMIT = 100_000
"""Steps after which a test gives up."""


def collected(step, *parts):
    probe = Probe()
    probe.name = "probe"
    return Collected(step, 0.0, Step(), [(probe, Pending([torch.empty(0)] * len(parts), parts=parts))])


def until(condition):
    """Wait for something that another thread does."""
    end = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def drained(exchange, num):
    received = []
    until(lambda: received.extend(exchange.receive()) or len(received) >= num)
    return received


def made(rank, name):
    return Exchange(name, rank, 2, lambda: None)


def every_case(rank):
    for case in (
        in_order,
        different_layouts,
        late_values,
        all_stop_at_one_step,
        windows,
        different_steps,
        closed_early,
        ended_by_an_error,
    ):
        case(rank, made(rank, case.__name__))
        dist.barrier()


def in_order(rank, exchange):
    """A long vector needs a message of its own; the others travel within the first."""
    parts = Part(How.MEAN, "loss"), Part(How.SUM, "long")
    for step in range(50):
        arrays = [np.array(float(step + rank)), np.full(100 if step % 2 else 1, float(rank + 1))]
        exchange.send(collected(step, *parts), arrays)
    received = drained(exchange, 50) if rank == 0 else exchange.finish()
    assert [step.step for step, _ in received] == list(range(50))
    if rank == 0:
        assert [float(mean) for _, (mean, _) in received] == [step + 0.5 for step in range(50)]
        assert all((total == 3.0).all() for _, (_, total) in received)
        assert exchange.finish() == []


def different_layouts(rank, exchange):
    """What only one rank has stays its own; a shard without the others is left out, and that is said."""
    own = Part(How.SUM, f"of rank {rank}")
    for step in range(4):
        exchange.send(collected(step, Part(How.SUM, "of both"), own), [np.ones(1), np.full(1, 5.0)])
    shard = Part(How.SUM, "gradient/norm", is_sharded=True)
    exchange.send(collected(4, *([shard] if rank == 0 else [])), [np.ones(1)] * (rank == 0))
    received = drained(exchange, 5)
    if rank == 0:
        assert [[float(array) for (array,) in arrays] for _, arrays in received] == [[2.0, 5.0]] * 4 + [[]]
        assert received[-1][0].context.reasons["gradient/norm"] is forewarn.types.Reason.NOT_ON_EVERY_RANK
    exchange.finish()


def late_values(rank, exchange):
    """What one rank logs alone keeps its place and needs no other rank."""
    exchange.send(collected(0, Part(How.SUM)), [np.ones(1)])
    if rank == 0:
        exchange.keep(collected(0, Part(How.SUM)), [np.full(1, 7.0)])
    exchange.send(collected(1, Part(How.SUM)), [np.ones(1)])
    received = drained(exchange, 3 if rank == 0 else 2)
    if rank == 0:
        assert [float(array) for _, ((array,),) in received] == [2.0, 7.0, 2.0]
    exchange.finish()


def all_stop_at_one_step(rank, exchange):
    stopped = -1
    for step in range(LIMIT):
        exchange.send(collected(step, Part(How.SUM)), [np.ones(1)])
        if rank == 0 and step == 3:
            exchange.ask_to_stop()
        if exchange.stops_now():
            stopped = step
            break
        exchange.receive()
        dist.barrier()  # training keeps ranks within a step of each other
    steps = [None, None]
    dist.all_gather_object(steps, stopped)
    assert steps[0] == steps[1] > 3
    exchange.finish()


def windows(rank, exchange):
    for step in range(3):
        if rank == 0 and step == 1:
            exchange.escalate(90)
            exchange.stretch(1000, 200)
        exchange.send(collected(step, Part(How.SUM)), [np.ones(1)])
    drained(exchange, 3)
    agreed = [None, None]
    dist.all_gather_object(agreed, exchange.intervals())
    assert agreed == [[(1000, 200)]] * 2
    dist.all_gather_object(agreed, exchange.windows())
    ((first, last),) = agreed[0]
    assert agreed[0] == agreed[1]
    assert last == 90
    assert first > 2
    exchange.finish()


def different_steps(rank, exchange):
    exchange.send(collected(0, Part(How.SUM)), [np.ones(1)])
    exchange.send(collected(1 + rank, Part(How.SUM)), [np.ones(1)])
    received = drained(exchange, 2)
    assert "different steps: 1, 2" in exchange.off
    assert exchange.is_lost
    assert received[1][1] == [np.ones(1)]  # its own
    exchange.send(collected(2, Part(How.SUM)), [np.ones(1)])
    assert len(exchange.receive()) == 1  # at once


def closed_early(rank, exchange):
    exchange.send(collected(0, Part(How.SUM)), [np.ones(1)])
    if rank == 1:
        exchange.finish()
    else:
        exchange.send(collected(1, Part(How.SUM)), [np.ones(1)])
        drained(exchange, 2)
        assert exchange.off == "RuntimeError: rank 1 has closed its monitor"


def ended_by_an_error(rank, exchange):
    """Nobody waits for a message that will never come."""
    exchange.send(collected(0, Part(How.SUM)), [np.ones(1)])
    drained(exchange, 1)
    if rank == 1:
        exchange.send(collected(1, Part(How.SUM)), [np.ones(1)])
        with mock.patch.multiple(module, _SECONDS_AT_THE_END=LIMIT, _SECONDS_FOR_LAST=LIMIT):
            assert len(exchange.finish("ValueError", has_failed=True)) == 1


def test_messages_are_combined_in_order_and_never_mixed():
    in_two_processes(every_case)


def train(rank, folder, how):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = None
    if how != "one rank" or rank == 0:
        monitor = forewarn.watch(model, optimizer, f"{folder}/{how}", every=1, views=[])
    if how == "stops":
        until(lambda: monitor._exchange.has_met)
    for step in range(60):
        time.sleep(0.01)  # longer together than a rank may be behind
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None and not (how == "stops" and rank == 1 and step > 10):
            monitor.step(loss)
    if rank == 0:
        monitor.close()
        alerts = {alert.name: alert for alert in monitor.alerts}
        severity = forewarn.Severity.INFO if how == "one rank" else forewarn.Severity.WARNING
        assert alerts["ranks-unconnected"].severity is severity
        assert len(monitor.history.series("train/loss")) == 60


def stop_together(rank, folder):
    """A critical alert, and a validation loss that stays, stop all ranks at the same step."""
    for how in ("policy", "patience"):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = forewarn.Config(early_stopping_patience=2 if how == "patience" else 0)
        policy = "stop" if how == "policy" else "observe"
        monitor = forewarn.watch(model, optimizer, f"{folder}/{how}", every=1, views=[], policy=policy, config=config)
        until(lambda exchange=monitor._exchange: exchange.has_met)
        step = 0
        while not monitor.should_stop and step < LIMIT:
            bad = float("nan") if how == "policy" and step == 5 else 1.0
            loss = model(torch.ones(2, 4) * bad).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
            if how == "patience" and step % 3 == 2:
                monitor.end_epoch(val_loss=1.0 + rank)
            step += 1
        steps = [None, None]
        dist.all_gather_object(steps, step)
        assert steps[0] == steps[1]
        assert 5 < step < LIMIT, how
        monitor.close()


def adjust_together(rank, folder):
    """All ranks do what rank 0 decides; without contact to the others, nothing is changed."""
    for how in ("connected", "alone"):
        model, optimizer = epochs.made()
        monitor = forewarn.watch(model, optimizer, f"{folder}/adjust {how}", every=1, views=[])
        if how == "connected" or rank == 0:
            epochs.train(monitor, model, optimizer, epochs.TEXTBOOK["lr too high late"])
        if how == "connected":
            assert [(action.code, action.action) for action in monitor.adjust()] == [("E102", "lower_lr")]
            assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
            assert monitor.adjust() == ()
        else:
            monitor.close() if rank else until(lambda exchange=monitor._exchange: exchange.off)
            assert rank or monitor.adjust() == ()
            assert optimizer.param_groups[0]["lr"] == 3e-4
        monitor.close()


def unwatched(rank, folder):
    stop_together(rank, folder)
    adjust_together(rank, folder)
    with mock.patch.object(module, "_SECONDS_BEHIND", 0.2), mock.patch.object(module, "_SECONDS_AT_THE_END", 1.0):
        for how in ("one rank", "stops"):
            train(rank, folder, how)
            dist.barrier()


@pytest.mark.ci
def test_ranks_act_at_one_step_and_go_on_alone_if_another_is_not_watched_or_no_longer(tmp_path):
    in_two_processes(unwatched, str(tmp_path))


def leave(rank, folder):
    """Exit with everything open, rank 1 earlier, so that a message of rank 0 is under way when both exit."""
    global left_open
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left_open = forewarn.watch(model, optimizer, f"{folder}/run", every=1, views=[])
    for _ in range(8 if rank == 0 else 4):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        left_open.step(loss)
        until(lambda: left_open._exchange.has_met)  # the first step shows that these are no stages of a pipeline
    raise SystemExit(0)


def test_processes_that_close_nothing_exit_as_they_would_alone(tmp_path):
    in_two_processes(leave, str(tmp_path), start="spawn")  # an abort would be raised here
    with forewarn.open_run(tmp_path / "run") as run:
        assert run.series("train/loss").steps.tolist() == list(range(8))
        assert run.end[0] == "not closed"


def test_one_process_has_no_exchange(tmp_path):
    model = nn.Linear(2, 2)
    with forewarn.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "run", views=[]) as monitor:
        assert monitor._exchange is None
