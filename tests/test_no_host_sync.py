"""The monitor never waits for the device: counted by the operations that it dispatches."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import forewarn
from forewarn.measure.engine import native

SYNCS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_unique2", "masked_select"}


class Counting(TorchDispatchMode):
    """Counts every operation by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def syncs(self) -> int:
        return sum(count for name, count in self.operations.items() if name in SYNCS)


def train(num_layers: int, watch, *, every, clip: bool, steps: int, passes: int = 1, **settings) -> list[Counting]:
    """Per step the operations of optimizer step, clipping and monitor, without those of an unwatched twin."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    monitor = watch(model, optimizer, every=every, **settings) if watch else None
    counts = []
    for _ in range(steps):
        with Counting() as counting:
            for _ in range(passes):
                loss = model(torch.ones(2, 4)).square().mean()
                loss.backward()
            if clip and monitor:
                monitor.clip_grad_norm_(1.0)
            elif clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if monitor:
                monitor.step(loss)
        counts.append(counting)
    return counts


@pytest.mark.parametrize("clip", [True, False])
def test_an_unmeasured_step_adds_a_few_operations_and_no_sync_however_many_parameters(watch, clip):
    added = []
    for num_layers in (2, 20):
        bare = train(num_layers, None, every=None, clip=clip, steps=4)[-1]
        watched = train(num_layers, watch, every=lambda step: False, clip=clip, steps=4)[-1]
        assert watched.syncs == bare.syncs == 0
        added.append(watched.operations.total() - bare.operations.total())
    per_gradient = 0 if clip else 1  # an alias of each gradient, for the one norm that covers all of them
    assert added[1] - added[0] <= per_gradient * 2 * 18
    assert added[0] < 16


@pytest.mark.skipif(not native.available(), reason=native.why_not())
@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("passes", [1, 3])
def test_with_the_native_backend_nothing_is_computed_by_torch(watch, passes, clip, measured):
    bare = train(20, None, every=None, clip=clip, steps=4, passes=passes)[-1]
    tensors_only = forewarn.Config(measure=forewarn.Measure(activations=False, attention=False))
    watched = train(20, watch, every=lambda step: measured, clip=clip, steps=4, passes=passes, config=tensors_only)[-1]
    with Counting() as one:
        torch.zeros(1).detach()  # torch 2.6 counts it twice
    # Numpy is handed an alias of the norm that clipping computed.
    assert watched.operations - bare.operations == Counter(detach=clip * one.operations["detach"])


def test_a_measured_step_makes_the_same_number_of_syncs_however_many_parameters(watch):
    syncs = {num: train(num, watch, every=1, clip=True, steps=3)[-1].syncs for num in (2, 20)}
    assert syncs[2] == syncs[20] == 0


def test_a_loss_on_the_way_is_not_waited_for(watch, small):
    model, optimizer = small
    monitor = watch(model, optimizer, every=lambda step: False)
    loss = torch.tensor(2.5, requires_grad=True) * 1
    with Counting() as counting:
        monitor.step(loss)
    assert counting.syncs == 0
    assert monitor.history.series("train/loss").last == 2.5


def test_comparing_tasks_waits_for_nothing(watch, small):
    model, optimizer = small
    monitor = watch(model, optimizer, every=lambda step: False)
    with Counting() as counting:
        for _ in range(3):
            output = model(torch.ones(2, 4))
            losses = {"a": output[:, 0].square().mean(), "b": (output[:, 1] - 1).square().mean()}
            loss = monitor.combine_losses(losses, weights={"a": 2.0}, every=1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    assert counting.syncs == 0
    assert len(monitor.history.panel("task/ratio")) == 3
