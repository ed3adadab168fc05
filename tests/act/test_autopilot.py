"""Autopilot saves a run with a fault, and leaves a healthy one alone."""

import statistics

import pytest
import torch

import forewarn
from forewarn.cli import demo
from forewarn.lab.faults.cases import Case, trained
from forewarn.lab.faults.sets import FIRST_SEED, WORKLOADS
from forewarn.policy import HARMLESS

STEPS = 300


def final_loss(path, seed, fault_at, policy, steps=STEPS):
    """The final loss of the demo's training, by the median of its last losses."""
    torch.set_num_threads(1)
    return statistics.median(demo._train(path, steps, fault_at, seed, [], policy=policy).losses[-20:])


def actions_of(path):
    with forewarn.open_run(path) as run:
        return [action for action in run.actions() if action.action not in HARMLESS]


@pytest.mark.ci
def test_the_fault_of_the_demo_ends_at_the_loss_of_its_healthy_twin(tmp_path):
    healthy = final_loss(tmp_path / "healthy", 0, None, "autopilot", 200)
    assert actions_of(tmp_path / "healthy") == []
    saved = final_loss(tmp_path / "saved", 0, 66, "autopilot", 200)
    assert {action.action for action in actions_of(tmp_path / "saved")} == {"lower_lr"}
    assert saved < 1.03 * healthy


@pytest.mark.slow
def test_over_many_seeds_it_ends_within_the_spread_of_healthy_runs(tmp_path):
    seeds = range(8)
    healthy = [final_loss(tmp_path / f"healthy-{seed}", seed, None, "observe") for seed in seeds]
    lost = [final_loss(tmp_path / f"lost-{seed}", seed, STEPS // 3, "observe") for seed in seeds]
    saved = [final_loss(tmp_path / f"saved-{seed}", seed, STEPS // 3, "autopilot") for seed in seeds]
    assert statistics.mean(saved) - statistics.mean(healthy) < statistics.stdev(healthy)
    assert min(lost) > max(saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        (workload.name, FIRST_SEED[which] + 500 + more)
        for more in range(2)
        for which, workloads in WORKLOADS.items()
        for workload in workloads
    ][:40],
)
def test_a_healthy_run_stays_as_it_is_to_the_last_bit(tmp_path, name, seed):
    torch.set_num_threads(1)
    case = Case(name, "", seed)
    _, score, _, _ = trained(case, tmp_path / "run", policy="autopilot")
    assert actions_of(tmp_path / "run") == []
    assert score == trained(case, None)[1]


SGD = {"optimizer": "SGD", "lr": 2e-3, "momentum": 0.9}


def regression(path, bad=None, optimizer="AdamW", scaler=None, accumulate=1, before=None, **settings):
    """Train under autopilot; `bad` multiplies the inputs of a step, `before` is called before each. The last losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), **{"lr": 1e-2} | settings)
    losses = []
    with forewarn.watch(model, optimizer, path, every=10, views=[], policy="autopilot", scaler=scaler) as monitor:
        for step in range(150):
            if before is not None:
                before(step, model, optimizer)
            for part in range(accumulate):
                x = torch.randn(32, 8, generator=torch.Generator().manual_seed(2 * step + part))
                outputs = model(x * (bad or {}).get(step, 1.0))
                loss = ((outputs - x.sum(1, keepdim=True)) ** 2).mean() / accumulate
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            monitor.step(loss)
            losses.append(float(loss.detach()))
    return statistics.median(losses[-10:])


@pytest.mark.parametrize("settings", [{}, SGD | {"accumulate": 2}])
def test_a_few_bad_batches_do_not_end_a_run(tmp_path, settings):
    assert regression(tmp_path / "run", {80: 1e4, 100: float("nan")}, **settings) < 0.1
    assert [(action.action, action.step) for action in actions_of(tmp_path / "run")] == [
        ("skip_batch", 80),
        ("skip_batch", 100),
    ]


def breaks_weights(step, model, optimizer):
    if step == 80:
        with torch.no_grad():
            model[2].bias.fill_(float("nan"))


def test_a_run_that_no_batch_can_help_goes_back_after_a_few_even_if_it_has_lived_with_a_warning(tmp_path):
    assert regression(tmp_path / "run", before=breaks_weights, **SGD | {"lr": 1e-2}) < 1.0
    lowered, *skipped, last = actions_of(tmp_path / "run")
    assert (lowered.action, lowered.step) == ("lower_lr", 4)
    assert {action.action for action in skipped} <= {"skip_batch"}
    assert len(skipped) <= 4
    assert (last.action, last.parameters["to"]) == ("roll_back", 10)


def test_a_batch_that_the_scaler_skips_needs_no_other_action(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    assert regression(tmp_path / "run", {80: float("nan"), 81: float("nan")}, scaler=scaler) < 0.1
    assert actions_of(tmp_path / "run") == []
    assert scaler.get_scale() == 16.0


def raises_rate(step, model, optimizer):
    if step == 80:
        optimizer.param_groups[0]["lr"] *= 100


def test_a_learning_rate_that_jumps_is_set_back(tmp_path):
    assert regression(tmp_path / "run", before=raises_rate, **SGD) < 0.1
    lowered = next(action for action in actions_of(tmp_path / "run") if action.action == "lower_lr")
    assert lowered.parameters["to"] == pytest.approx(SGD["lr"])
