"""An action that an optimizer, a disk or another rank interrupts leaves a run that goes on, or can be resumed."""

import contextlib
import math
import os
import resource
import signal

import pytest
import torch

import forewarn
from tests.act.recovery_runs import ONSET, STEPS, BrokenError, train
from tests.processes import in_processes, skip_without_fsdp2
from tests.rank_runs import made

ACTIONS = ["notify", "snapshot", "skip_batch", "lower_lr", "lower_clip", "raise_clip", "rebalance", "roll_back", "stop"]
AT_ONCE = ("notify", "skip_batch", "stop")
"""Actions that are not carried out together with the other ranks at the end of a step."""

pytestmark = pytest.mark.ci


def policy(action: str) -> dict:
    return {
        "rules": {"Z901": action, "non-finite-loss": "notify"},
        "roll_back": {"every": 10, "where": "disk"}, "skip_batch": {"factor": 5.0, "deviations": 4.0},
    }  # fmt: skip


class Failing(torch.optim.AdamW):
    """It raises in the step of the fault, in those before and after it, and when its learning rate is set."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.calls = 0
        self.param_groups[0] = Refusing(self.param_groups[0])

    def step(self, closure=None):
        self.calls += 1
        Refusing.refuses = self.calls in (ONSET + 1, ONSET + 2)
        if ONSET <= self.calls <= ONSET + 2:
            raise BrokenError("out of memory")
        return super().step(closure)


class Refusing(dict):
    """A parameter group whose rate cannot be scaled for a while."""

    refuses = False

    def __setitem__(self, name, value):
        if Refusing.refuses and name == "initial_lr":
            raise BrokenError("this rate is fixed")
        super().__setitem__(name, value)


@pytest.mark.parametrize("action", ACTIONS)
def test_an_optimizer_that_fails_leaves_a_run_that_goes_on(tmp_path, action):
    seen = train(0, 1, "one", action, str(tmp_path), policy(action), make=Failing)
    with forewarn.open_run(tmp_path / f"one-{action}") as run:
        taken = [one for one in run.actions() if one.action == action]
    if action == "stop":
        assert seen["stopped_at"] >= ONSET
        return
    assert max(seen["losses"]) == STEPS - 1
    assert all(math.isfinite(loss) for loss in seen["losses"].values())
    assert all(seen["moved"][-10:])
    if action in ("lower_lr", "roll_back"):
        assert taken[0].failed == "BrokenError: this rate is fixed"
        assert seen["lr"][-1] > 0.004, "none of its groups was changed"
    elif action != "skip_batch":  # nothing was left to be skipped
        assert taken[0].failed == ""


class FullDisk:
    """From the step of the fault on, no file can grow."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, rank: int, monitor: forewarn.Monitor) -> None:
        inner, limits = monitor.step, resource.getrlimit(resource.RLIMIT_FSIZE)

        def step(*args, **options):
            if monitor.at == ONSET:
                monitor._writer.flush()  # on a fast machine, nothing may have been written so far
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            outcome = inner(*args, **options)
            if monitor.at == ONSET + self.steps:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            return outcome

        def close():
            closed()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        closed = monitor.close
        monitor.step, monitor.close = step, close


def with_a_full_disk(rank: int, folder: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails, as on a full disk
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for action in ACTIONS:
        try:
            train(0, 1, "one", action, folder, policy(action), fails=FullDisk(4))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def test_a_full_disk_leaves_a_run_that_goes_on(tmp_path):
    in_processes(1, with_a_full_disk, str(tmp_path))
    for action in ACTIONS:
        seen = torch.load(tmp_path / f"one-{action}-0.pt")
        if action != "stop":
            assert max(seen["losses"]) == STEPS - 1, action
            assert all(seen["moved"][-10:]), action
        assert math.isfinite(seen["losses"][max(seen["losses"])])
        goes_on(tmp_path / f"one-{action}")


def goes_on(path) -> None:
    """A run whose processes have ended is continued by another one."""
    with forewarn.open_run(path) as run:
        last = run.last_step
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with forewarn.watch(model, optimizer, path, views=[], resume=True) as monitor:
        assert monitor.at == last + 1
        for _ in range(3):
            monitor.step(1.0)
    with forewarn.open_run(path) as run:
        assert run.last_step == last + 3


class Dies:
    """Rank 1 dies in the middle of the action."""

    def __init__(self, action: str) -> None:
        self.action = action

    def __call__(self, rank: int, monitor: forewarn.Monitor) -> None:
        if rank != 1:
            return
        if self.action in AT_ONCE:
            step = monitor.step
            monitor.step = lambda *args: os._exit(0) if monitor.at == ONSET else step(*args)
        else:
            done = monitor._recovery._done
            monitor._recovery._done = lambda decision, host: (
                done(decision, host) if decision.action == "checkpoint" else os._exit(0)
            )


def one_dies(rank: int, how: str, action: str, folder: str) -> None:
    with contextlib.suppress(RuntimeError):  # rank 0 cannot train on alone
        train(rank, 2, how, action, folder, policy(action), fails=Dies(action))
    os._exit(0)  # the group is broken


@pytest.mark.parametrize(
    ("how", "action"), [*(("ddp", action) for action in ACTIONS), ("fsdp2", "skip_batch"), ("fsdp2", "roll_back")]
)
def test_a_rank_that_dies_in_the_middle_leaves_a_run_that_can_go_on(tmp_path, how, action):
    if how == "fsdp2":
        skip_without_fsdp2()
    in_processes(2, one_dies, how, action, str(tmp_path))
    goes_on(tmp_path / f"{how}-{action}")
