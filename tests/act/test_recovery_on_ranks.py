"""The same actions on two ranks: taken by all of them after the same step, or by none."""

import contextlib
import os
from typing import Any

import pytest
import torch

import forewarn
from tests.act.recovery_runs import STEPS, assert_it_was_done, in_turn, train
from tests.processes import in_processes, skip_without_fsdp2
from tests.rank_runs import made

ACTIONS = ["notify", "snapshot", "skip_batch", "lower_lr", "lower_clip", "raise_clip", "rebalance", "roll_back", "stop"]


@pytest.mark.ci
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_every_action_is_taken_on_all_ranks_after_the_same_step(tmp_path, how):
    if how == "fsdp2":
        skip_without_fsdp2()
    in_processes(2, in_turn, 2, how, ACTIONS, str(tmp_path))
    for action in ACTIONS:
        ranks = [torch.load(tmp_path / f"{how}-{action}-{rank}.pt") for rank in range(2)]
        healthy = [torch.load(tmp_path / f"{how}-roll_back-healthy-{rank}.pt") for rank in range(2)]
        for seen, usual in zip(ranks, healthy, strict=True):
            assert_it_was_done(action, seen, usual)
        for what in ("lr", "moved", "weights", "stopped_at"):
            assert ranks[0][what] == ranks[1][what], f"{what} after {action}"
        if how == "ddp":
            assert all(torch.equal(a, b) for a, b in zip(ranks[0]["model"], ranks[1]["model"], strict=True))
        with forewarn.open_run(tmp_path / f"{how}-{action}") as run:
            (recorded,) = [one for one in run.actions() if one.action == action]
            assert recorded.failed == ""
            clips = run.series("train/clip").values.tolist() if "train/clip" in run.names() else []
            if action in ("lower_clip", "raise_clip"):
                assert (clips[0], clips[-1]) == (1.0, {"lower_clip": 0.5, "raise_clip": 2.0}[action])


def without_a_norm(rank: int, folder: str) -> None:
    """FSDP2 without clipping: nobody knows the norm of all shards."""
    policy = {"rules": {"gradient-spike": "skip_batch"}}
    train(rank, 2, "fsdp2", "no-norm", folder, policy)


@pytest.mark.ci
def test_sharded_gradients_that_are_not_clipped_cannot_be_skipped(tmp_path):
    skip_without_fsdp2()
    in_processes(2, without_a_norm, str(tmp_path))
    assert all(torch.load(tmp_path / f"fsdp2-no-norm-{rank}.pt")["moved"] == [True] * STEPS for rank in range(2))


def refuses(rank: int, monitor: forewarn.Monitor) -> None:
    """Rank 1 loses its checkpoints."""
    if rank == 1:
        monitor._recovery._checkpoints.get = lambda step: None


def one_refuses(rank: int, folder: str) -> None:
    policy = {"rules": {"Z901": "roll_back"}, "roll_back": {"every": 10}}
    train(rank, 2, "ddp", "refused", folder, policy, fails=refuses)


@pytest.mark.ci
def test_if_one_rank_cannot_return_none_does(tmp_path):
    in_processes(2, one_refuses, str(tmp_path))
    ranks = [torch.load(tmp_path / f"ddp-refused-{rank}.pt") for rank in range(2)]
    assert all(len(seen["moved"]) == STEPS for seen in ranks)
    assert all(torch.equal(a, b) for a, b in zip(ranks[0]["model"], ranks[1]["model"], strict=True))
    with forewarn.open_run(tmp_path / "ddp-refused") as run:
        (action,) = run.actions()
        assert action.failed == "there is no checkpoint yet"


def cannot_write_late(rank: int, monitor: forewarn.Monitor) -> None:
    """The disk of rank 1 becomes full."""
    checkpoints = monitor._recovery._checkpoints
    written = checkpoints._written

    def full(step: int, *rest: Any) -> Any:
        if rank == 1 and step >= 30:
            raise OSError("no space left on device")
        return written(step, *rest)

    checkpoints._written = full


def one_lacks_the_last(rank: int, folder: str) -> None:
    policy = {"rules": {"Z901": "roll_back"}, "roll_back": {"every": 10, "where": "disk"}}
    train(rank, 2, "ddp", "roll_back", folder, policy, fails=cannot_write_late)
    train(rank, 2, "ddp", "roll_back", folder, is_faulty=False)


@pytest.mark.ci
def test_all_ranks_return_to_the_newest_checkpoint_that_each_of_them_could_write(tmp_path):
    in_processes(2, one_lacks_the_last, str(tmp_path))
    for rank in range(2):
        seen = torch.load(tmp_path / f"ddp-roll_back-{rank}.pt")
        assert_it_was_done("roll_back", seen, torch.load(tmp_path / f"ddp-roll_back-healthy-{rank}.pt"))
    with forewarn.open_run(tmp_path / "ddp-roll_back") as run:
        (action,) = run.actions()
        assert action.parameters["to"] < 30


def dies(rank: int, monitor: forewarn.Monitor) -> None:
    """Rank 1 dies in the middle of the return."""
    if rank == 1:
        monitor._recovery._return = lambda *_: os._exit(0)


def one_dies(rank: int, folder: str) -> None:
    policy = {"rules": {"Z901": "roll_back"}, "roll_back": {"every": 10}}
    with contextlib.suppress(RuntimeError):  # rank 0 cannot train on alone
        train(rank, 2, "ddp", "died", folder, policy, fails=dies)
    os._exit(0)  # the group is broken


@pytest.mark.ci
def test_a_rank_that_dies_in_the_middle_leaves_a_run_that_can_go_on(tmp_path):
    in_processes(2, one_dies, str(tmp_path))
    path = tmp_path / "ddp-died"
    with forewarn.open_run(path) as run:
        assert [action.action for action in run.actions()] == ["roll_back"]
        last = run.last_step
    assert last < STEPS
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with forewarn.watch(model, optimizer, path, views=[], resume=True) as monitor:
        assert monitor.at == last + 1
        monitor.step(1.0)
