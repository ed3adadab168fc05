"""Under a GradScaler every reading is that of the unscaled gradient, or says that it is unavailable."""

import copy
import math

import pytest
import torch
from torch import nn

from forewarn.types import Reason, Severity
from tests.conftest import last

SCALE = 1024.0


def make(fused: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10_000)


def true_norms(model, x):
    """The unscaled gradients by an untouched twin."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(x).square().mean().backward()
    norms = {name: parameter.grad.norm().item() for name, parameter in twin.named_parameters()}
    return norms, math.hypot(*norms.values())


def one_step(model, optimizer, scaler, monitor, *, unscale=False, clip=None, poison=False):
    x = torch.linspace(-1, 1, 12).view(3, 4)
    loss = model(x).square().mean()
    scaler.scale(loss * (math.inf if poison else 1)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    if clip:
        monitor.clip_grad_norm_(clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    monitor.step(loss)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("declared", [False, True])
def test_readings_are_unscaled_or_unavailable(watch, fused, unscale, declared):
    model, optimizer, scaler = make(fused)
    monitor = watch(model, optimizer, scaler=scaler if declared else None)
    for _ in range(3):
        norms, total = true_norms(model, torch.linspace(-1, 1, 12).view(3, 4))
        one_step(model, optimizer, scaler, monitor, unscale=unscale)
        for name, norm in norms.items():
            assert last(monitor, "gradient/norm", name) == pytest.approx(norm, rel=1e-4)
        if "gradient/global_norm" in monitor.history:
            assert last(monitor, "gradient/global_norm") == pytest.approx(total, rel=1e-4)
        else:
            assert not declared
            assert last(monitor, "monitor/unavailable", "gradient/global_norm") == Reason.SCALED_GRADIENTS
    assert not [alert for alert in monitor.alerts if alert.code != "X103"]


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_through_the_monitor_after_unscaling_reads_the_true_norm(watch, fused):
    model, optimizer, scaler = make(fused)
    monitor = watch(model, optimizer, scaler=scaler)
    _, total = true_norms(model, torch.linspace(-1, 1, 12).view(3, 4))
    one_step(model, optimizer, scaler, monitor, unscale=True, clip=0.01)
    assert last(monitor, "gradient/global_norm") == pytest.approx(total, rel=1e-4)
    assert last(monitor, "gradient/global_norm_clipped") == pytest.approx(min(0.01, total), rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_skipped_step_is_told_from_a_missing_one_and_gives_no_gradient(watch, fused, unscale):
    model, optimizer, scaler = make(fused)
    monitor = watch(model, optimizer, scaler=scaler)
    one_step(model, optimizer, scaler, monitor, unscale=unscale)
    assert last(monitor, "update/skipped") == 0
    before = last(monitor, "gradient/global_norm")
    one_step(model, optimizer, scaler, monitor, unscale=unscale, poison=True)
    assert last(monitor, "update/skipped") == 1
    assert last(monitor, "update/optimizer_steps") == 0
    assert last(monitor, "train/loss_scale") == SCALE / 2
    assert last(monitor, "gradient/global_norm") == before, "no reading was added"
    assert last(monitor, "monitor/unavailable", "gradient/global_norm") == Reason.STEP_SKIPPED
    assert math.isnan(last(monitor, "update/ratio", "0.weight"))
    one_step(model, optimizer, scaler, monitor, unscale=unscale)
    assert last(monitor, "update/skipped") == 0
    assert last(monitor, "monitor/unavailable", "gradient/global_norm") == Reason.AVAILABLE
    assert last(monitor, "update/ratio", "0.weight") > 0
    assert not [alert for alert in monitor.alerts if alert.code != "X103"]


def test_an_optimizer_that_nobody_steps_is_not_taken_for_a_skip(watch):
    model, optimizer, scaler = make(False)
    monitor = watch(model, optimizer, scaler=scaler)
    for _ in range(5):
        loss = model(torch.ones(2, 4)).square().mean()
        scaler.scale(loss).backward()
        optimizer.zero_grad()
        monitor.step(loss)
    assert last(monitor, "update/skipped") == 0
    assert "U105" in {alert.code for alert in monitor.alerts}


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_the_very_first_step_is_a_skip_as_well(watch, fused):
    model, optimizer, scaler = make(fused)
    monitor = watch(model, optimizer, scaler=scaler, policy="stop")
    one_step(model, optimizer, scaler, monitor, poison=True)
    assert last(monitor, "update/skipped") == 1
    assert not monitor.should_stop
    assert not [alert for alert in monitor.alerts if alert.code != "X103"]


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_nobody_declared_is_found_even_where_torch_clips(watch, fused):
    model, optimizer, scaler = make(fused)
    monitor = watch(model, optimizer)
    for _ in range(3):
        _, total = true_norms(model, torch.linspace(-1, 1, 12).view(3, 4))
        loss = model(torch.linspace(-1, 1, 12).view(3, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.013)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        monitor.step(loss)
        assert last(monitor, "gradient/global_norm") == pytest.approx(total, rel=1e-4)
        assert last(monitor, "train/loss_scale") == SCALE
    assert not monitor.alerts


@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_at_first_under_a_scaler_that_nobody_declared_is_information(watch, unscale):
    model, optimizer, scaler = make(fused=False)
    monitor = watch(model, optimizer)
    one_step(model, optimizer, scaler, monitor, unscale=unscale, poison=True)
    for _ in range(10):
        one_step(model, optimizer, scaler, monitor, unscale=unscale)
    assert all(alert.severity is Severity.INFO for alert in monitor.alerts)
    assert {alert.code for alert in monitor.alerts} <= {"G101", "D103"}  # every step has the same batch
    assert all(parameter.isfinite().all() for parameter in model.parameters())
