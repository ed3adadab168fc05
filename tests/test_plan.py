"""The plan of the learning rate: declared, or read off a scheduler without touching it."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import forewarn
from forewarn.config import Config
from forewarn.judge.diagnosis import replay
from forewarn.plan import Plan
from forewarn.types import peak_lr

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
    plan = Plan.from_scheduler(scheduler, STEPS)
    assert {key: value for key, value in stepped.param_groups[0].items() if key != "params"} == before
    peak = max(before.get("initial_lr", 0), before.get("max_lr", 0))
    for step in range(STEPS):
        assert plan.share(step) * peak == pytest.approx(stepped.param_groups[0]["lr"], abs=0.005 * peak)
        stepped.step()
        if step < STEPS - 1:
            scheduler.step()


def test_reading_ahead_gives_no_warnings():
    def share(step):  # such as SequentialLR of torch 2.6 at its milestones
        warnings.warn("deprecated", UserWarning, stacklevel=1)
        return 1.0 - step / STEPS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = lr_scheduler.LambdaLR(optimizer(), share)
    assert Plan.from_scheduler(scheduler, STEPS).share(50) == pytest.approx(0.75)


def test_a_scheduler_that_follows_the_loss_has_no_plan():
    with pytest.raises(ValueError, match="no plan"):
        Plan.from_scheduler(lr_scheduler.ReduceLROnPlateau(optimizer()), 10)
    with pytest.raises(TypeError, match="scheduler"):
        Plan.from_scheduler("cosine", 10)


def two_groups() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(3))], "lr": lr} for lr in (0.1, 0.2)])


def warm_up(step):
    return min(1.0, (step + 1) / 20)


def switched_off(step):
    return 1.0 if step < 60 else 0.0


DIFFERENT = {
    "a function for each": lambda o: lr_scheduler.LambdaLR(o, [warm_up, switched_off]),
    "one floor for two peaks": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.05),
    "two peaks of a cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.3], STEPS, base_momentum=0, max_momentum=0),
    "one after the other": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LambdaLR(o, [warm_up, lambda _: 1.0]), lr_scheduler.StepLR(o, 50)], [40]
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_groups_that_follow_different_schedules_have_a_plan_each(name):
    stepped = two_groups()
    scheduler = DIFFERENT[name](stepped)
    plan = Plan.from_scheduler(scheduler, STEPS)
    assert plan.num_groups == (None if name == "two peaks of a cycle" else 2)  # shares of the peaks are the same there
    assert Plan.from_dict(plan.to_dict()) == plan
    peaks = [max(group["initial_lr"], group.get("max_lr", 0)) for group in stepped.param_groups]
    for step in range(STEPS):
        for at, (group, peak) in enumerate(zip(stepped.param_groups, peaks, strict=True)):
            assert plan.share(step, at) * peak == pytest.approx(group["lr"], abs=0.005 * peak)
        stepped.step()
        if step < STEPS - 1:
            scheduler.step()


def test_groups_that_follow_the_same_schedule_have_one_plan():
    plan = Plan.from_scheduler(lr_scheduler.LambdaLR(two_groups(), [warm_up, warm_up]), STEPS)
    assert plan.num_groups is None
    assert plan.share(9) == plan.share(9, 1) == pytest.approx(0.5, abs=0.002)


def test_several_optimizers_have_the_plans_of_their_schedulers():
    cosine = lr_scheduler.CosineAnnealingLR(optimizer(), STEPS)
    both = lr_scheduler.LambdaLR(two_groups(), [warm_up, switched_off])
    plan = Plan.from_scheduler([cosine, both], STEPS)
    assert plan.num_groups == 3
    assert [plan.share(100, group) for group in range(3)] == pytest.approx([0.5, 1.0, 0.0], abs=0.005)
    with pytest.raises(TypeError, match="empty list"):
        Plan.from_scheduler([], STEPS)


def train_two_groups(tmp_path, scheduled, told, steps=STEPS, resume_at=0, **hyperparameters):
    """The alerts about the learning rate of a small network whose two layers are groups, under a plan."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "lr": 0.02}]
    stepped = torch.optim.SGD(groups)
    scheduler = scheduled(stepped)
    config = forewarn.Config(
        measure=forewarn.Measure(plan=Plan.from_scheduler(told(stepped), STEPS)), hyperparameters=hyperparameters
    )
    monitor = forewarn.watch(model, stepped, tmp_path / "run", config=config, views=[])
    for step in range(steps):
        if resume_at and step == resume_at:
            state = monitor.state_dict()
            monitor.close()
            monitor = forewarn.watch(model, stepped, tmp_path / "run", config=config, views=[], resume=True)
            monitor.load_state_dict(state)
        x = torch.randn(32, 8)
        loss = (model(x)[:, 0] - x[:, 0]).square().mean()
        loss.backward()
        stepped.step()
        stepped.zero_grad()
        if step < STEPS - 1:
            scheduler.step()
        monitor.step(loss)
    monitor.close()
    with forewarn.open_run(tmp_path / "run") as run:
        replayed = replay(run, Config.from_stored(run.config).rule_set()).alerts
    found = [(alert.code, alert.scope) for alert in monitor.alerts if alert.code in ABOUT_RATES]
    assert found == [(alert.code, alert.scope) for alert in replayed if alert.code in ABOUT_RATES]
    return found


ABOUT_RATES = {"U107", "U108", "U109", "U110", "U111"}


def steady_then_off(optimizer):
    """The first layer learns for 60 steps; the second goes on at its peak."""
    return lr_scheduler.LambdaLR(optimizer, [switched_off, lambda _: 1.0])


def swapped(optimizer):
    return lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 0.5 if step > 100 else 1.0])


def test_each_group_is_judged_by_its_own_plan(tmp_path):
    keep = {"total_steps": STEPS}
    assert train_two_groups(tmp_path / "as planned", steady_then_off, steady_then_off, **keep) == []
    found = train_two_groups(tmp_path / "one is off", steady_then_off, swapped, **keep)
    assert sorted(found) == [("U107", "0"), ("U107", "1"), ("U109", "0"), ("U111", "1")]


def test_a_fall_by_plan_at_the_step_of_a_resume_is_no_jump(tmp_path):
    def falls(optimizer):
        return lr_scheduler.LambdaLR(optimizer, [lambda step: 0.1 if step >= 50 else 1.0, lambda _: 1.0])

    def steady(optimizer):
        return lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    assert train_two_groups(tmp_path / "planned", falls, falls, steps=80, resume_at=50) == []
    found = train_two_groups(tmp_path / "not planned", falls, steady, steps=80, resume_at=50)
    assert ("U108", "") in found
    assert ("U107", "0") in found
    assert ("U107", "1") not in found


def test_a_plan_for_other_groups_is_an_error_when_the_monitor_is_attached(tmp_path):
    plan = Plan.from_scheduler(lr_scheduler.LambdaLR(two_groups(), [warm_up, switched_off]), STEPS)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="schedules for 2 parameter groups, but the optimizers have 1"):
        forewarn.watch(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            config=forewarn.Config(measure=forewarn.Measure(plan=plan)),
        )


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
        ({"total": 10, "shape": "knots"}, "belong together"),
        ({"total": 10, "shape": "knots", "knots": "0:1 banana"}, "step:share"),
        ({"total": 10, "shape": "knots", "knots": "5:1 0:1"}, "must increase"),
        ({"total": 10, "shape": "knots", "knots": "0:1 | "}, "group without"),
        ({"total": 10, "shape": "cosinus"}, "one of"),
    ],
)
def test_a_wrong_plan_is_an_error(wrong, match):
    with pytest.raises(ValueError, match=match):
        Plan(**wrong)


def test_the_plan_is_recorded_beside_the_rate(tmp_path):
    model = torch.nn.Linear(2, 1)
    stepped = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1)
    config = forewarn.Config(measure=forewarn.Measure(plan=Plan(total=4, shape="linear")))
    with forewarn.watch(model, stepped, tmp_path / "run", config=config, views=[]) as monitor:
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
            stepped.step()
            stepped.zero_grad()
            monitor.step(1.0)
    with forewarn.open_run(tmp_path / "run") as run:
        np.testing.assert_allclose(run.series("train/lr_plan", "1").values, [0.2, 0.15, 0.1, 0.05], rtol=1e-6)
        assert forewarn.Config.from_dict(run.config).measure == config.measure
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


def test_a_schedule_that_is_not_finite_is_an_error_that_names_the_step():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else math.inf)
    with pytest.raises(ValueError, match="not finite at step 3"):
        Plan.from_scheduler(scheduler, 10)


def test_a_state_of_other_groups_leaves_the_plan_to_the_present_ones(tmp_path):
    def started(num_groups, name):
        groups = [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(num_groups)]
        model = torch.nn.ParameterList(each for group in groups for each in group["params"])
        optimizer = torch.optim.SGD(groups, lr=0.1)
        plan = Plan(total=100, shape="knots", knots=" | ".join(["0:1 99:0", "0:1 50:1 99:0", "0:1 99:1"][:num_groups]))
        config = forewarn.Config(measure=forewarn.Measure(plan=plan))
        return forewarn.watch(model, optimizer, tmp_path / name, every=1, views=[], config=config), optimizer

    before, _ = started(3, "before")
    state = before.state_dict()
    before.close()
    monitor, optimizer = started(2, "after")
    monitor.load_state_dict(state)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(2)
    optimizer.step()
    monitor.step(1.0)
    assert monitor._loop.failures == {}
    assert monitor.history.panel("train/lr_plan").last == pytest.approx([0.1, 0.1])
    monitor.close()


@pytest.mark.parametrize(
    ("group", "peak"),
    [
        ({"lr": 0.1}, 0.1),
        ({"lr": 0.3, "initial_lr": 0.1}, 0.1),
        ({"lr": 0.01, "initial_lr": 0.01, "max_lr": 0.2, "min_lr": 1e-6}, 0.2),
        ({"lr": torch.tensor(0.5)}, 0.5),
        ({"weight_decay": 0.1}, math.nan),
    ],
)
def test_the_peak_of_a_group_is_what_its_scheduler_has_noted_else_its_rate(group, peak):
    assert peak_lr(group) == pytest.approx(peak, nan_ok=True)
