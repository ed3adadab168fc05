"""One way to say that something cannot be measured: once, and once when it can be again."""

import pytest
import torch

from forewarn.measure.availability import Availability
from forewarn.types import Reason


def said(availability, **reasons):
    return [
        dict(zip(reading.scopes, reading.values, strict=True))
        for reading in availability.news({name.replace("_", "/"): reason for name, reason in reasons.items()})
    ]


def test_a_reason_is_said_when_it_changes_and_taken_back_once():
    one = Availability()
    assert said(one, gain_block=Reason.AVAILABLE) == []
    assert said(one, gain_block=Reason.COMPILED) == [{"gain/block": Reason.COMPILED}]
    assert said(one, gain_block=Reason.COMPILED) == []
    assert said(one, gain_block=Reason.PROVIDER_FAILED) == [{"gain/block": Reason.PROVIDER_FAILED}]
    assert said(one, gain_block=Reason.AVAILABLE) == [{"gain/block": Reason.AVAILABLE}]
    assert said(one, gain_block=Reason.AVAILABLE) == []


def test_metrics_are_told_apart_and_said_together():
    one = Availability()
    said(one, a_a=Reason.COMPILED)
    assert said(one, a_a=Reason.COMPILED, b_b=Reason.COMPILED, c_c=Reason.ONE_BATCH) == [
        {"b/b": Reason.COMPILED, "c/c": Reason.ONE_BATCH}
    ]


@pytest.mark.parametrize("reason", [Reason.STEP_SKIPPED, Reason.NO_BACKWARD_SEEN])
def test_what_holds_for_a_step_is_said_on_each(reason):
    one = Availability()
    assert said(one, a_a=reason) == said(one, a_a=reason) == [{"a/a": reason}]


def test_after_a_resume_nothing_is_said_twice():
    one, other = Availability(), Availability()
    said(one, a_a=Reason.COMPILED, b_b=Reason.ONE_BATCH)
    other.load_state_dict(one.state_dict())
    assert said(other, a_a=Reason.COMPILED, b_b=Reason.AVAILABLE) == [{"b/b": Reason.AVAILABLE}]


def test_a_probe_that_failed_before_a_resume_is_there_again_after_it(small, watch):
    failed, resumed = watch(*small), watch(*small)

    def broken(step):
        raise RuntimeError("broken on purpose")

    failed._probes["stepping"].collect = broken
    train(*small, failed)
    assert "X103" in {alert.code for alert in failed.firing}
    resumed.load_state_dict(failed.state_dict())
    train(*small, resumed)
    assert "X103" not in {alert.code for alert in resumed.firing}


def train(model, optimizer, monitor, steps=5):
    for _ in range(steps):
        loss = model(torch.ones(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)


def test_every_reason_has_words():
    assert str(Reason.PROVIDER_FAILED) == "the probe it builds on failed"
    assert all(str(reason) for reason in Reason)
