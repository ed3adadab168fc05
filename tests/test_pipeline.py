"""The stages of a pipeline are one run: all readings of one process, whatever moves the micro-batches."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import forewarn
from forewarn.measure.stages import Role, stages_of
from tests.pipeline_runs import FAULTS, in_turn, train
from tests.processes import in_processes, skip_without_fsdp2
from tests.rank_runs import alerts
from tests.test_every_rank import assert_the_same


def watched_and_not(rank, folder):
    plain = train(rank, "by hand", "frozen", folder, watched=False)
    watched = train(rank, "by hand", "frozen", folder)
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))


def test_stages_by_hand_are_read_as_one_model_and_trained_bit_identically(tmp_path):
    train(0, "one", "frozen", str(tmp_path))
    in_processes(2, watched_and_not, str(tmp_path))
    assert_the_same(tmp_path, "by hand", "frozen")
    assert {alert[1] for alert in alerts(tmp_path / "by hand-frozen")} == {"blocks.3.up.weight", "blocks.3.up.bias"}
    with forewarn.open_run(tmp_path / "by hand-frozen") as run, forewarn.open_run(tmp_path / "one-frozen") as one:
        assert run.info.parameters == one.info.parameters
        assert run.info.blocks == one.info.blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


CASES = [
    (2, [*(("by hand", fault) for fault in FAULTS), ("gpipe", "healthy"), ("gpipe", "nan"), ("1f1b", "frozen")]),
    (4, [("by hand+ddp", "healthy"), ("by hand+ddp", "frozen"), ("1f1b+fsdp2", "healthy"), ("1f1b+fsdp2", "frozen")]),
]


OF_PASSES = {
    "gradient/accumulation_growth", "gradient/backward_passes", "gradient/global_norm", "gradient/share_of_start",
}  # fmt: skip
"""Torch's schedules have FSDP2 reduce the gradients after the backward passes, so they are read at the step."""


@pytest.mark.ci
@pytest.mark.parametrize(("num_ranks", "cases"), CASES)
def test_however_stages_are_run_readings_and_alerts_are_those_of_one_process(tmp_path, num_ranks, cases):
    skip_without_fsdp2()
    for fault in {fault for _, fault in cases}:
        train(0, "one", fault, str(tmp_path))
    in_processes(num_ranks, in_turn, cases, str(tmp_path))
    for how, fault in cases:
        assert_the_same(tmp_path, how, fault, OF_PASSES if "fsdp2" in how else frozenset())


def train_alike(rank, folder, how):
    """Stages whose parameters have the same names: in a pipeline of three, or as models of their own."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank) if how == "pipeline" else 0.1)
    monitor = forewarn.watch(model, optimizer, f"{folder}/{how}-{rank if how == 'apart' else ''}", every=1, views=[])
    last = dist.get_world_size() - 1
    squares = torch.zeros(1)
    for step in range(3):
        x, loss = torch.randn(2, 4, generator=torch.Generator().manual_seed(step)), None
        if how == "pipeline":
            if rank:
                dist.recv(x, rank - 1)
                x.requires_grad_()
            output = model(x)
            if rank < last:
                dist.send(output.detach(), rank + 1)
                gradient = torch.empty_like(output)
                dist.recv(gradient, rank + 1)
                output.backward(gradient)
            else:
                loss = output.square().mean()
                loss.backward()
            if rank:
                dist.send(x.grad, rank - 1)
        else:
            loss = model(x).square().mean()
            loss.backward()
        squares = sum(parameter.grad.double().square().sum() for parameter in model.parameters()).reshape(1)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    monitor.close()
    if how == "apart":
        assert not monitor._exchange.stages
        return
    dist.all_reduce(squares)
    if rank == 0:
        history = monitor.history
        assert run_scopes(history) == [f"stage{stage}.0.{name}" for stage in range(3) for name in ("weight", "bias")]
        assert history.series("gradient/global_norm").last == pytest.approx(squares.sqrt().item(), rel=1e-5)
        assert len(history.series("train/loss")) == 3
        assert history.panel("train/lr").last.tolist() == pytest.approx([0.1, 0.2, 0.3])
        assert [monitor.info.parameters[f"stage{stage}.0.weight"].group for stage in range(3)] == [0, 1, 2]
        assert not monitor.alerts, monitor.alerts


def run_scopes(history):
    return list(history.panel("gradient/norm").scopes)


@pytest.mark.ci
def test_names_that_two_stages_share_begin_with_the_stage(tmp_path):
    in_processes(3, train_alike, str(tmp_path), "pipeline")


@pytest.mark.ci
def test_models_that_have_a_loss_each_are_not_taken_for_stages(tmp_path):
    in_processes(2, train_alike, str(tmp_path), "apart")


FIRST, MIDDLE, LAST = Role(1, 1), Role(2, 2, is_fed=True), Role(3, 3, is_fed=True, has_loss=True)
ALONE = Role(1, 1, has_loss=True)


@pytest.mark.parametrize(
    ("roles", "stages"),
    [
        ([FIRST, LAST], ((0,), (1,))),
        ([FIRST, FIRST, LAST, LAST], ((0, 1), (2, 3))),
        ([LAST, FIRST, MIDDLE], ((1,), (2,), (0,))),
        ([ALONE, Role(4, 4, has_loss=True)], ()),
        ([ALONE, ALONE], ()),
        ([FIRST, ALONE], ()),
        ([FIRST, Role(5, 5)], ()),
        ([ALONE, LAST], ()),
        ([LAST, LAST], ()),
        ([FIRST, Role(6, 6), LAST], ()),
        ([Role(1, 0, (0,), 2), Role(1, 0, (1,), 2)], ((0,), (1,))),
        ([Role(1, 0, (1, 3), 4), Role(1, 0, (0, 2), 4)], ((1,), (0,))),
        ([Role(1, 0, (0,), 3), Role(1, 0, (1,), 3)], ()),
        ([Role(1, 0, (0,), 2), Role(1, 0, (0,), 2)], ()),
        ([Role(1, 0, (0,), 2), LAST], ()),
    ],
)
def test_stages_are_recognized_by_their_numbers_or_by_their_edges(roles, stages):
    assert stages_of(roles) == stages
