"""Which batches are kept, for how long, and from which loops."""

import pytest
import torch
from torch import nn

from forewarn.measure.kept_batches import KeptBatches
from forewarn.measure.packed import unpack


class Inner(nn.Module):
    """As a LightningModule: the loop calls a method, which calls a part of the model."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch):
        return self.net(batch).mean()


def kept(monitor):
    return monitor._loop.kept


def arguments(call):
    return unpack(call.arguments.structure, call.arguments.tensors)


def stepped(model, monitor, optimizer, inputs, passes=1):
    for part in inputs.chunk(passes):
        loss = model(part).mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)


@pytest.fixture
def linear(watch):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, watch(model, optimizer, every=1000, config={"snapshots": {"keep_batches": 2}})


def test_older_batches_are_let_go(linear):
    model, optimizer, monitor = linear
    for step in range(12):  # the last ones are not measured in detail
        stepped(model, monitor, optimizer, torch.full((4, 3), float(step)))
    steps = kept(monitor).steps(11)
    assert [one.step for one in steps] == [10, 11]
    assert [float(arguments(one.calls[0])[0][0][0, 0]) for one in steps] == [10.0, 11.0]
    monitor.close()
    assert kept(monitor).steps(11) == []


def test_every_pass_of_an_accumulated_step_is_kept_but_no_evaluation(linear):
    model, optimizer, monitor = linear
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 3))
    model.train()
    stepped(model, monitor, optimizer, torch.randn(6, 3), passes=3)
    (step,) = kept(monitor).steps(0)
    assert [tuple(arguments(call)[0][0].shape) for call in step.calls] == [(2, 3)] * 3


def test_a_loop_that_reuses_its_buffer_is_noticed_and_copied_from_then_on(linear):
    model, _, monitor = linear
    buffer = torch.empty(4, 3)
    for step in range(4):
        buffer.fill_(step)
        loss = model(buffer).mean()
        loss.backward()
        if step == 0:
            buffer.fill_(-1.0)  # before the step ends
        monitor.step(loss)
    steps = kept(monitor).steps(3)
    assert [float(arguments(one.calls[0])[0][0][0, 0]) for one in steps] == [2.0, 3.0]
    assert not any(one.is_changed for one in steps)


def test_the_part_that_the_loop_calls_is_kept_by_its_name(watch):
    model = Inner()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer, config={"snapshots": {"keep_batches": 1}})
    for _ in range(3):
        loss = model.training_step(torch.ones(2, 3))
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    (step,) = kept(monitor).steps(2)
    assert [kept(monitor).name_of(call.module) for call in step.calls] == ["net"]


def test_where_a_step_is_judged_late_one_more_is_kept():
    model = nn.Linear(3, 1)
    keeping = KeptBatches(model, [], 1, keep_weights=False, is_late=True)
    for step in range(4):
        keeping.take(model, (torch.ones(1, 3),), {})
        if step:
            assert [one.step for one in keeping.steps(step - 1)][-1] == step - 1
        keeping.end_step(step)
    assert [one.step for one in keeping.steps(3)] == [2, 3]


def test_weights_of_before_the_update_are_kept_of_as_few_steps_as_needed(watch):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer, config={"snapshots": {"keep_batches": 3, "weights": "before"}})
    for _ in range(3):
        before = model.weight.detach().clone()
        stepped(model, monitor, optimizer, torch.randn(4, 3))
    *earlier, last = kept(monitor).steps(2)
    assert torch.equal(last.weights["weight"], before)
    assert [one.weights for one in earlier] == [None, None]
    monitor.close()
    assert not optimizer._optimizer_step_pre_hooks


def test_what_cannot_be_kept_does_not_reach_the_training(watch, monkeypatch):
    def failing(*args):
        raise ArithmeticError("not today")

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer, config={"snapshots": {"keep_batches": 1}})
    monkeypatch.setattr(KeptBatches, "take", failing)
    for _ in range(2):
        stepped(model, monitor, optimizer, torch.randn(4, 3))
    assert kept(monitor) is None
    assert [alert.scope for alert in monitor.alerts if alert.code == "X101"] == ["batches"]
    assert monitor.snapshot() is not None
