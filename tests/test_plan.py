"""The plan of the learning rate: declared, or read off a scheduler without touching it."""

import math

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import forewarn
from forewarn.plan import Plan, plan_of

STEPS = 200
SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 30),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.99),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 50),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 20)),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.01, 1, 20), lr_scheduler.CosineAnnealingLR(o, STEPS - 20)], [20]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 10), lr_scheduler.ExponentialLR(o, 0.99)]
    ),
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_read_ahead_and_left_alone(name):
    stepped = optimizer()
    scheduler = SCHEDULERS[name](stepped)
    before = {key: value for key, value in stepped.param_groups[0].items() if key != "params"}
    plan = plan_of(scheduler, STEPS)
    assert {key: value for key, value in stepped.param_groups[0].items() if key != "params"} == before
    peak = max(before.get("initial_lr", 0), before.get("max_lr", 0))
    for step in range(STEPS):
        assert plan.share(step) * peak == pytest.approx(stepped.param_groups[0]["lr"], abs=0.005 * peak)
        stepped.step()
        if step < STEPS - 1:
            scheduler.step()


def test_a_scheduler_that_follows_the_loss_has_no_plan():
    with pytest.raises(ValueError, match="no plan"):
        plan_of(lr_scheduler.ReduceLROnPlateau(optimizer()), 10)
    with pytest.raises(TypeError, match="scheduler"):
        plan_of("cosine", 10)


def two_groups() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(3))], "lr": lr} for lr in (0.1, 0.2)])


def test_groups_that_follow_different_schedules_have_no_one_plan():
    warm_up, constant = lambda step: min(1.0, (step + 1) / 20), lambda step: 1.0
    with pytest.raises(ValueError, match=r"group 1 does not follow the same schedule as group 0"):
        plan_of(lr_scheduler.LambdaLR(two_groups(), [warm_up, constant]), STEPS)
    plan = plan_of(lr_scheduler.LambdaLR(two_groups(), [warm_up, warm_up]), STEPS)
    assert plan.share(9) == pytest.approx(0.5, abs=0.002)


def test_declared_shapes():
    plan = Plan(total=100, warmup=10, floor=0.1)
    assert plan.share(0) == pytest.approx(0.1)
    assert plan.share(9) == 1.0
    assert plan.share(55) == pytest.approx(0.1 + 0.9 * 0.5)
    assert math.isnan(plan.share(100))
    assert Plan(total=100, warmup=10, shape="linear").share(55) == pytest.approx(0.5)
    assert Plan(total=100, shape="constant").share(99) == 1.0
    assert Plan(total=100, warmup=4, shape="inverse_sqrt").share(15) == pytest.approx(0.5)
    assert Plan(total=100, shape="knots", knots="0:0 10:1 90:0.5").share(50) == pytest.approx(0.75)
    assert math.isnan(Plan().share(0))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"total": 10, "warmup": 20}, "less than"),
        ({"total": 10, "shape": "knots"}, "go together"),
        ({"total": 10, "shape": "knots", "knots": "0:1 banana"}, "step:share"),
        ({"total": 10, "shape": "knots", "knots": "5:1 0:1"}, "rise"),
        ({"total": 10, "shape": "cosinus"}, "one of"),
    ],
)
def test_a_wrong_plan_is_an_error(wrong, match):
    with pytest.raises(ValueError, match=match):
        Plan(**wrong)


def test_the_plan_is_recorded_beside_the_rate(tmp_path):
    model = torch.nn.Linear(2, 1)
    stepped = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1)
    config = forewarn.Config(plan=Plan(total=4, shape="linear"))
    with forewarn.watch(model, stepped, tmp_path / "run", config=config, views=[]) as monitor:
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
            stepped.step()
            stepped.zero_grad()
            monitor.step(1.0)
    with forewarn.open_run(tmp_path / "run") as run:
        np.testing.assert_allclose(run.series("train/lr_plan", "1").values, [0.2, 0.15, 0.1, 0.05], rtol=1e-6)
        assert forewarn.Config.from_dict(run.config).plan == config.plan
    assert [(alert.name, alert.scope) for alert in monitor.alerts if alert.code == "U107"] == [
        ("lr-off-plan", "0"),
        ("lr-off-plan", "1"),
    ]


@pytest.mark.parametrize("every", [1, 10])
def test_cycles_and_restarts_of_several_groups_are_no_jump(tmp_path, every):
    schedulers = {
        "cycles": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=20, cycle_momentum=False),
        "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 40),
    }
    for name, scheduled in schedulers.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-2}]
        stepped = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
        scheduler = scheduled(stepped)
        with forewarn.watch(model, stepped, tmp_path / name, every=every, views=[]) as monitor:
            for _ in range(130):
                x = torch.randn(32, 8)
                loss = (model(x)[:, 0] - x[:, 0]).square().mean()
                loss.backward()
                stepped.step()
                stepped.zero_grad()
                scheduler.step()
                monitor.step(loss)
        assert [alert for alert in monitor.alerts if alert.code == "U104"] == [], name
