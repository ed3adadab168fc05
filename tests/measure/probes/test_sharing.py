"""Parameters that two optimizers move."""

import pytest
import torch
import torch.optim.optimizer as every_optimizer
from torch import nn

import forewarn


def shared(tmp_path, train, watched=1, steps=3):
    """The readings of `update/shared_tensors`; `train` gets the model and both optimizers, and trains one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(model.parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    monitor = forewarn.watch(model, optimizers[:watched], tmp_path / "run", every=1, views=[])
    for _ in range(steps):
        monitor.step(train(model, *optimizers))
    monitor.close()
    with forewarn.open_run(tmp_path / "run") as run:
        name = "update/shared_tensors"
        return run.series(name).values.tolist() if name in run.names() else []


def backward(model, *optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = model(torch.randn(16, 4)).square().mean()
    loss.backward()
    return loss


def one_gradient_for_both(model, one, other):
    loss = backward(model, one, other)
    one.step()
    other.step()
    return loss


def a_loss_for_each(model, one, other):
    backward(model, one, other)
    one.step()
    loss = backward(model, one, other)
    other.step()
    return loss


def test_tensors_that_two_watched_optimizers_move_with_one_gradient_are_counted(tmp_path):
    assert shared(tmp_path, one_gradient_for_both, watched=2) == [2, 2, 2]


def test_an_optimizer_that_is_not_watched_counts_as_well(tmp_path):
    assert shared(tmp_path, one_gradient_for_both) == [0, 2, 2]  # its first step is how it is found


@pytest.mark.parametrize("watched", [1, 2])
def test_optimizers_with_a_backward_pass_of_their_own_may_share_parameters(tmp_path, watched):
    assert set(shared(tmp_path, a_loss_for_each, watched)) == {0}


def test_an_optimizer_inside_another_is_not_a_second_one(tmp_path):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__([{"params": group["params"]} for group in inner.param_groups], {})
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()

    model = nn.Linear(4, 1)
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", every=1, views=[])
    for _ in range(3):
        loss = backward(model, optimizer)
        optimizer.step()
        monitor.step(loss)
    monitor.close()
    with forewarn.open_run(tmp_path / "run") as run:
        assert "update/shared_tensors" not in run.names()


def test_the_hook_on_all_optimizers_is_removed(tmp_path):
    before = dict(every_optimizer._global_optimizer_pre_hooks)
    shared(tmp_path, one_gradient_for_both)
    assert every_optimizer._global_optimizer_pre_hooks == before
