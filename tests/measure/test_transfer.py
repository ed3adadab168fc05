"""The accelerator's path, its logic tested with a device that is slow on purpose."""

import numpy as np
import torch

from forewarn.measure import transfer
from forewarn.measure.transfer import Transfer


class FakeEvent:
    """An event that happens when the test says so."""

    made: list["FakeEvent"] = []  # noqa: RUF012 - the test looks at all of them

    def __init__(self):
        self.happened = False
        self.recorded = False
        FakeEvent.made.append(self)

    def record(self):
        self.recorded = True

    def query(self):
        return self.happened

    def synchronize(self):
        self.happened = True


def _as_if_far_away(numbers):
    return transfer._UnderWay(torch.device("cpu"), [torch.as_tensor(each) for each in numbers])


def slow_device(monkeypatch):
    """Send CPU tensors as if they were on an accelerator."""
    FakeEvent.made = []
    monkeypatch.setattr(transfer, "new_event", lambda device: FakeEvent())
    monkeypatch.setattr(transfer, "_Here", _as_if_far_away)


def test_values_on_the_cpu_arrive_at_once_and_unchanged():
    line: Transfer[str] = Transfer()
    line.send("a", [torch.tensor(2.5), torch.arange(6.0).view(2, 3), torch.tensor([1.0], dtype=torch.bfloat16)])
    ((label, arrays),) = line.receive()
    assert label == "a"
    assert arrays[0] == 2.5
    np.testing.assert_array_equal(arrays[1], np.arange(6.0).reshape(2, 3))
    assert arrays[2].tolist() == [1.0]


def test_what_a_tensor_holds_is_copied_and_an_array_handed_over():
    line: Transfer[str] = Transfer()
    tensor, array = torch.zeros(3, dtype=torch.float64), np.zeros(3)
    line.send("a", [tensor, array])
    tensor += 1  # as the training goes on
    ((_, (of_tensor, of_array)),) = line.receive()
    assert of_tensor.tolist() == [0, 0, 0]
    assert of_array is array


def test_values_on_the_way_are_polled_and_never_waited_for(monkeypatch):
    slow_device(monkeypatch)
    line: Transfer[int] = Transfer()
    line.send(0, [torch.tensor(1.0), torch.ones(2, 2)])
    line.send(1, [torch.tensor(2.0)])
    assert line.receive() == []
    FakeEvent.made[1].happened = True
    assert line.receive() == [], "a later parcel waits for the earlier one, so that steps stay in order"
    FakeEvent.made[0].happened = True
    received = line.receive()
    assert [label for label, _ in received] == [0, 1]
    np.testing.assert_array_equal(received[0][1][1], np.ones((2, 2)))
    assert all(event.recorded for event in FakeEvent.made)


def test_one_parcel_is_one_copy_however_many_tensors(monkeypatch):
    slow_device(monkeypatch)
    line: Transfer[int] = Transfer()
    line.send(0, [torch.tensor(float(at)) for at in range(100)])
    assert len(FakeEvent.made) == 1
    ((_, arrays),) = line.receive(wait=True)
    assert [float(array) for array in arrays] == list(range(100))


def test_a_tensor_that_changes_after_sending_is_read_as_it_was_sent(monkeypatch):
    slow_device(monkeypatch)
    line: Transfer[int] = Transfer()
    loss = torch.tensor(1.0)
    line.send(0, [loss])
    loss.fill_(99.0)
    assert float(line.receive(wait=True)[0][1][0]) == 1.0


def test_a_step_without_tensors_keeps_its_turn(monkeypatch):
    slow_device(monkeypatch)
    line: Transfer[int] = Transfer()
    line.send(0, [torch.tensor(1.0)])
    line.send(1, [])
    assert line.receive() == []
    assert [label for label, _ in line.receive(wait=True)] == [0, 1]


def test_a_monitor_on_a_slow_device_judges_a_step_late_and_loses_none(monkeypatch, small, watch):
    slow_device(monkeypatch)
    monkeypatch.setattr(Transfer, "is_empty", False)  # numbers that are known would not take the line
    monitor = watch(*small, every=lambda step: False)
    for loss in (1.0, 2.0, 3.0):
        monitor.step(loss)
        for event in FakeEvent.made:
            event.happened = True
    assert monitor.history.series("train/loss").steps.tolist() == [0, 1]
    monitor.close()
    assert monitor.history.series("train/loss").values.tolist() == [1.0, 2.0, 3.0]
