"""Automatic loss weights: GradNorm's resting point, learned uncertainty, and a starved task that learns again."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import forewarn
from forewarn.act.task_weights import WIDEST, GradNorm, Uncertainty
from forewarn.config import Balancing
from tests.conftest import last
from tests.real_runs import dual_task_lstm
from tests.test_no_host_sync import Counting


def losses(**values):
    return {name: torch.tensor(float(value)) for name, value in values.items()}


@pytest.mark.parametrize("asymmetry", [0.0, 0.5, 1.5])
def test_gradnorm_rests_where_weighted_norms_follow_the_training_rates(asymmetry):
    balancer = GradNorm(Balancing(asymmetry=asymmetry))
    bare = torch.tensor([40.0, 0.5, 2.0])
    first, now = losses(a=2, b=4, c=1), losses(a=1, b=3, c=0.9)
    for _ in range(400):
        weights = balancer.weights(now, {"a": 10.0, "b": 1.0, "c": 1.0})
        balancer.update(now, first, bare * torch.stack(list(weights.values())))
    pull = bare * torch.stack(list(weights.values()))
    left = torch.tensor([1 / 2, 3 / 4, 0.9])
    rates = left / left.mean()
    wanted = rates**asymmetry
    assert torch.allclose(pull / pull.sum(), wanted / wanted.sum(), rtol=1e-3)
    assert float(sum(weights.values())) == pytest.approx(3.0)


def test_gradnorm_stands_still_on_what_is_no_number_or_has_no_gradient():
    balancer = GradNorm(Balancing())
    now = losses(a=1, b=1)
    balancer.weights(now, {"a": 1.0, "b": 1.0})
    for norms in (torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0]), torch.tensor([0.0, 0.0])):
        balancer.update(now, now, norms)
    balancer.update(losses(a=math.nan, b=1), now, torch.tensor([1.0, 1.0]))
    assert {name: float(weight) for name, weight in balancer.weights(now, {}).items()} == {"a": 1.0, "b": 1.0}


def test_uncertainty_comes_to_rest_at_one_over_the_loss():
    balancer = Uncertainty(Balancing())
    now = losses(a=50, b=0.02)
    for _ in range(400):
        weights = balancer.weights(now, {"a": 1.0, "b": 1.0})
        balancer.update(now, now, None)
    assert float(weights["a"]) == pytest.approx(1 / 50, rel=1e-2)
    assert float(weights["b"]) == pytest.approx(1 / 0.02, rel=1e-2)


def test_uncertainty_of_a_task_without_loss_stays_in_bounds():
    balancer = Uncertainty(Balancing())
    for _ in range(1000):
        weights = balancer.weights(losses(a=0), {"a": 1.0})
        balancer.update(losses(a=0), losses(a=1), None)
    assert float(weights["a"]) == pytest.approx(WIDEST, rel=1e-3)
    balancer.update(losses(a=math.nan), losses(a=1), None)
    assert math.isfinite(float(balancer.weights(losses(a=1), {})["a"]))


def test_uncertainty_of_a_loss_below_zero_stands_still_and_goes_on_above():
    balancer = Uncertainty(Balancing())
    weights = [balancer.weights(losses(a=1), {"a": 1.0})["a"]]
    for value in [0.25] * 30 + [-0.25] * 30 + [4.0] * 30:
        balancer.update(losses(a=value), losses(a=1), None)
        weights.append(balancer.weights(losses(a=1), {})["a"])
    weights = [float(each) for each in weights]
    assert weights[30] > 1.2
    assert weights[60] == weights[30]
    assert weights[90] < weights[60]


def test_a_loss_that_starts_below_zero_is_refused_by_uncertainty(watch):
    model = nn.Linear(2, 2)
    monitor = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    output = model(torch.ones(3, 2))
    given = {"a": output[:, 0].square().mean(), "likelihood": output[:, 1].square().mean() - 100}
    with pytest.raises(ValueError, match=r"task 'likelihood' has a loss of -\d+.*; use balance='gradnorm'"):
        monitor.combine_losses(given, balance="uncertainty")


@pytest.fixture
def shared(watch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model, optimizer, monitor, **settings):
    output = model(torch.linspace(-1, 1, 32).reshape(8, 4))
    loss = monitor.combine_losses(
        {"a": output[:, 0].square().mean(), "b": (output[:, 1] - 1).square().mean()},
        weights={"a": 100.0},
        **settings,
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)
    return loss


@pytest.mark.parametrize("balance", ["gradnorm", "uncertainty"])
def test_weights_move_are_recorded_and_go_on_after_a_resume(shared, watch, balance):
    model, optimizer = shared
    monitor = watch(model, optimizer)
    for _ in range(20):
        step(model, optimizer, monitor, balance=balance)
    before = last(monitor, "task/weight", "a")
    state = monitor.state_dict()
    weights, optimizer_state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    expected = [float(step(model, optimizer, monitor, balance=balance).detach()) for _ in range(3)]
    assert monitor.history.panel("task/weight").values[0, 0] != before

    model.load_state_dict(weights)
    optimizer.load_state_dict(optimizer_state)
    other = watch(model, optimizer)
    other.load_state_dict(state)
    assert [float(step(model, optimizer, other, balance=balance).detach()) for _ in range(3)] == expected


@pytest.mark.parametrize("balance", ["gradnorm", "uncertainty"])
def test_balancing_never_waits_for_the_device(shared, watch, balance):
    model, optimizer = shared
    monitor = watch(model, optimizer, every=lambda step: False)
    for _ in range(2):
        step(model, optimizer, monitor, balance=balance)
    with Counting() as counting:
        step(model, optimizer, monitor, balance=balance)
    assert counting.syncs == 0


def test_without_the_argument_weights_are_what_was_given(shared, watch):
    model, optimizer = shared
    monitor = watch(model, optimizer)
    for _ in range(15):
        step(model, optimizer, monitor)
    assert set(monitor.history.panel("task/weight").values[:, 0].tolist()) == {100.0}


CHANCE = math.log(3)


def test_a_task_that_weighs_a_thousandth_stays_at_chance_and_learns_with_gradnorm(tmp_path):
    weights = {"pointer": 1000.0}
    starved = dual_task_lstm(0, tmp_path / "starved" / "run", task_weights=weights)
    balanced = dual_task_lstm(0, tmp_path / "balanced" / "run", task_weights=weights, balance="gradnorm")
    assert min(epoch.held_out["type"] for epoch in starved.epochs) > 0.93 * CHANCE
    assert starved.epochs[-1].held_out["pointer"] < 0.05
    assert balanced.epochs[-1].held_out["type"] < 0.4 * CHANCE
    assert balanced.epochs[-1].held_out["pointer"] < 0.06
    loud = {alert.code for alert in starved.monitor.alerts if alert.severity is forewarn.Severity.CRITICAL}
    assert "T102" in loud
    assert not {alert.code for alert in balanced.monitor.alerts} & {"T102"}, "it was on its way"


def noisy_pair(seed):
    """Two regressions of one bottleneck, each with a noise floor: the setting that learned uncertainty is made for."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1500, 8, generator=generator)
    noise = 0.3 * torch.randn(1500, 2, generator=generator)
    return x, torch.stack([torch.sin(2 * x[:, 0]), torch.sin(2 * x[:, 1])], dim=1) + noise


@pytest.mark.parametrize(("balance", "learns"), [(None, False), ("uncertainty", True), ("gradnorm", True)])
def test_a_starved_task_with_a_noise_floor_learns_with_either_balance(watch, balance, learns):
    torch.manual_seed(0)
    x, y = noisy_pair(0)
    trunk = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
    model = nn.ModuleDict({"trunk": trunk, "a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    monitor = watch(model, optimizer, every=lambda step: False)
    generator = torch.Generator().manual_seed(0)

    def both(which):
        shared = trunk(x[which])
        return {name: functional.mse_loss(model[name](shared)[:, 0], y[which, at]) for at, name in enumerate("ab")}

    for _ in range(900):
        batch = both(torch.randint(1000, (64,), generator=generator))
        loss = monitor.combine_losses(batch, weights={"a": 1000.0}, balance=balance, shared="trunk.2")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    with torch.no_grad():
        held_out = {name: float(loss) for name, loss in both(torch.arange(1000, 1500)).items()}
    chance = float(y[1000:].var(dim=0)[1])
    assert held_out["a"] < 0.5 * chance, held_out
    assert (held_out["b"] < 0.5 * chance) is learns, held_out
    if not learns:
        assert held_out["b"] > 0.9 * chance
