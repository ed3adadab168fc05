"""The gradient noise scale, against gradients whose covariance is known."""

import io
import math

import numpy as np
import pytest
import torch

from forewarn.measure.noise_scale import NoiseScale
from forewarn.types import Reason
from tests.conftest import last
from tests.measure.test_accumulation import Slope

SIZE = 500
SIGMA = 0.3
DISTANCE = 5.0
"""Of the weights from the minimum, which is the norm of the true gradient."""


class Quadratic(Slope):
    """½ |w + x|² over examples x of mean c and variance σ² each: its gradient is w + mean(x), its noise σ²."""

    def forward(self, x):
        return 0.5 * (self.weight + x).square().sum(dim=1).mean()


def noise_scale(watch, *, passes, batch, clip=False, divide=False, steps=200, sigma=SIGMA):
    """What is recorded after so many steps without a learning rate, so that the truth stays where it is."""
    torch.manual_seed(0)
    model = Quadratic(SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    center = torch.full((SIZE,), DISTANCE / math.sqrt(SIZE))
    for _ in range(steps):
        for _ in range(passes):
            loss = model(center + sigma * torch.randn(batch, SIZE)) / (passes if divide else 1)
            loss.backward()
        if clip:
            monitor.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    return monitor


@pytest.mark.parametrize(
    ("passes", "batch", "clip", "divide"), [(2, 1, False, True), (4, 2, True, False), (8, 1, True, True)]
)
def test_on_a_quadratic_with_gaussian_noise_it_is_the_closed_form(watch, passes, batch, clip, divide):
    monitor = noise_scale(watch, passes=passes, batch=batch, clip=clip, divide=divide)
    in_examples = SIZE * SIGMA**2 / DISTANCE**2
    assert last(monitor, "gradient/noise_scale") == pytest.approx(in_examples / batch, rel=0.2)


def test_noise_of_many_micro_batches_is_found_too(watch):
    monitor = noise_scale(watch, passes=8, batch=1, sigma=1.0)
    assert last(monitor, "gradient/noise_scale") == pytest.approx(SIZE / DISTANCE**2, rel=0.2)


def test_without_noise_it_is_zero(watch):
    assert last(noise_scale(watch, passes=3, batch=2, sigma=0.0, steps=12), "gradient/noise_scale") < 1e-5


def test_one_pass_per_step_or_too_few_steps_give_none(watch):
    monitor = noise_scale(watch, passes=1, batch=4, steps=20)
    assert "gradient/noise_scale" not in monitor.history
    assert last(monitor, "monitor/unavailable", "gradient/noise_scale") == Reason.ONE_BATCH
    assert "X103" not in {alert.code for alert in monitor.alerts}
    assert "gradient/noise_scale" not in noise_scale(watch, passes=2, batch=4, steps=9).history
    assert "gradient/noise_scale" in noise_scale(watch, passes=2, batch=4, steps=10).history


def test_two_losses_of_one_forward_pass_are_not_two_batches(watch):
    model = Quadratic(SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    for _ in range(15):
        loss = model(torch.randn(2, SIZE))
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    assert last(monitor, "gradient/accumulation_growth") == pytest.approx(3, rel=1e-5)
    assert "gradient/noise_scale" not in monitor.history


def synthetic(noise, ratios, levels, num_passes=4, size=400):
    """Feeds the norms of sums of Gaussian micro-batches with these noise scales, the true gradients of these norms."""
    rng = np.random.default_rng(0)
    for ratio, level in zip(ratios, levels, strict=True):
        passes = level * (np.eye(1, size) + rng.normal(0, math.sqrt(ratio / size), (num_passes, size)))
        noise.update(num_passes, float(np.linalg.norm(passes[0])), float(np.linalg.norm(passes.sum(axis=0))))
    return noise.value


def test_gradients_that_fall_a_thousandfold_do_not_blur_it():
    assert synthetic(NoiseScale(), [3.0] * 150, np.geomspace(1000, 1, 150)) == pytest.approx(3, rel=0.2)


def test_it_follows_a_noise_scale_that_grows_while_gradients_fall():
    noise = NoiseScale()
    assert synthetic(noise, [0.3] * 60, np.geomspace(100, 10, 60)) == pytest.approx(0.3, rel=0.2)
    assert synthetic(noise, [8.0] * 100, [1.0] * 100) == pytest.approx(8, rel=0.25)


def test_a_step_that_is_not_finite_is_left_out():
    noise, other = NoiseScale(), NoiseScale()
    for step in range(12):
        noise.update(4, 2.0, 5.0)
        other.update(4, 2.0, 5.0)
        if step == 5:
            other.update(4, math.inf, 5.0)
            other.update(4, 2.0, math.nan)
    assert noise.value == other.value
    # by hand: small 4, large (5/4)², variance (4 − 1.5625) / (3/4), signal (4 · 1.5625 − 4) / 3
    assert noise.value == pytest.approx(3.25 / 0.75)


def test_gradients_that_cancel_have_no_noise_scale():
    noise = NoiseScale()
    for _ in range(20):
        noise.update(2, 1.0, 0.0)
    assert math.isnan(noise.value)


def test_averages_survive_a_resume_without_a_seam():
    rng = np.random.default_rng(0)
    norms = (rng.uniform(1, 2, (60, 2)) * [1, 4]).tolist()
    whole, first, second = NoiseScale(), NoiseScale(), NoiseScale()
    for pair in norms:
        whole.update(4, *pair)
    for pair in norms[:25]:
        first.update(4, *pair)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for pair in norms[25:]:
        second.update(4, *pair)
    assert second.value == whole.value
