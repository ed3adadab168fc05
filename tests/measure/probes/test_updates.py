import math

import numpy as np
import pytest
import torch
from torch import nn

import forewarn
from forewarn import FrozenCause, WeightUpdateMonitor
from tests.conftest import last


def model_of(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers)


def train(model, optimizer, monitor, steps=4, after_backward=lambda: None, step=True):
    for _ in range(steps):
        loss = model(torch.linspace(-1, 1, 8).view(2, 4).to(next(model.parameters()).dtype)).square().mean()
        loss.backward()
        after_backward()
        if step:
            optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)


def cause_of(monitor, scope):
    return FrozenCause(int(last(monitor, "update/frozen_cause", scope)))


def test_the_update_ratio_of_sgd_is_exact(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    before = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    train(model, optimizer, monitor, steps=1)
    for name, parameter in model.named_parameters():
        step = (parameter.detach().double() - before[name]).norm()
        assert last(monitor, "update/norm", name) == pytest.approx(step.item(), rel=1e-5)
        assert last(monitor, "update/ratio", name) == pytest.approx((step / before[name].norm()).item(), rel=1e-5)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_estimated_ratio_is_lr_times_gradient_over_weight_and_exact_for_sgd_alone(clip, watch):
    ratios = {}
    for make in (torch.optim.SGD, torch.optim.AdamW):
        model = model_of(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = make([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}], lr=0.01)
        monitor = watch(model, optimizer)
        inputs = torch.linspace(-1, 1, 8).view(2, 4)
        model(inputs).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        lr = {name: 0.05 if name.startswith("2") else 0.01 for name, _ in model.named_parameters()}
        expected = {
            name: lr[name] * (parameter.grad.double().norm() / parameter.detach().double().norm()).item()
            for name, parameter in model.named_parameters()
        }
        optimizer.step()
        monitor.step(1.0)
        estimates = {name: last(monitor, "update/ratio_estimate", name) for name in expected}
        assert estimates == pytest.approx(expected, rel=1e-5)
        ratios[make] = {name: last(monitor, "update/ratio", name) / estimates[name] for name in expected}
    assert ratios[torch.optim.SGD] == pytest.approx(dict.fromkeys(expected, 1.0), rel=1e-3)
    assert all(ratio > 2 for ratio in ratios[torch.optim.AdamW].values()), (
        "the first step of Adam has the size of the lr"
    )


def test_the_estimate_does_not_see_that_low_precision_rounds_the_step_away(watch):
    model = model_of(nn.Linear(4, 4, bias=False)).bfloat16()
    model[0].weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor, steps=1)
    assert last(monitor, "update/ratio", "0.weight") == 0
    assert last(monitor, "update/ratio_estimate", "0.weight") > 1e-6


def test_the_update_norm_is_that_of_the_whole_tensor_though_a_sample_is_read(watch):
    model = model_of(nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer, config=forewarn.Config(measure=forewarn.Measure(sample_size=256)))
    model[0].weight.sum().backward()  # a gradient of ones: every weight moves by the learning rate
    optimizer.step()
    monitor.step(1.0)
    assert last(monitor, "update/norm", "0.weight") == pytest.approx(0.01 * math.sqrt(64 * 64), rel=1e-3)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, whose second half starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 6).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(6, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize(("make", "lr"), [(torch.optim.SGD, 0.1), (torch.optim.AdamW, 1e-3)])
def test_a_weight_has_no_ratio_until_it_has_moved_away_from_zero(make, lr, watch):
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(6, 2))
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad], lr=lr)
    monitor = watch(model, optimizer)
    for step in range(20):
        before = model[0].b.detach().double().clone()
        train(model, optimizer, monitor, steps=1)
        moved = (model[0].b.detach().double() - before).norm().item()
        assert last(monitor, "update/norm", "0.b") == pytest.approx(moved, rel=1e-5)
        ratio = moved / before.norm().item() if step else math.nan
        assert last(monitor, "update/ratio", "0.b") == pytest.approx(ratio, rel=1e-5, nan_ok=True)
        assert last(monitor, "monitor/update_ratio_max") < 3
    assert {alert.code for alert in monitor.alerts} <= {"D103"}  # every step has the same batch


def test_a_zero_that_does_not_move_is_still_frozen(watch):
    model = model_of(nn.Linear(4, 4), nn.Linear(4, 2))
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}], 0.1)
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor)
    assert last(monitor, "update/ratio", "1.weight") == 0
    assert cause_of(monitor, "1.weight") is FrozenCause.ZERO_LR


def test_a_healthy_run_freezes_nothing(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor)
    assert (monitor.history.panel("update/frozen_cause").last == FrozenCause.MOVING).all()
    assert last(monitor, "monitor/frozen_count") == 0


def test_a_layer_frozen_on_purpose_before_the_run_is_no_alert(small, watch):
    model, optimizer = small
    model[0].requires_grad_(False)
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor, steps=8)
    assert cause_of(monitor, "0.weight") is FrozenCause.ON_PURPOSE
    assert math.isnan(last(monitor, "update/ratio", "0.weight"))
    assert {alert.code for alert in monitor.alerts} <= {"U114"}  # the share that is frozen, as information


def test_a_parameter_in_no_optimizer_group_is_named_at_once(watch):
    model = model_of(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor, steps=1)
    assert cause_of(monitor, "1.weight") is FrozenCause.NOT_IN_OPTIMIZER
    assert monitor.firing[0].code == "U106"


@pytest.mark.parametrize("closure", [False, True])
def test_a_target_network_is_left_alone_and_a_forgotten_layer_is_not(watch, closure):
    """Neither is in the optimizer, but no gradient reaches the target network."""
    model = nn.ModuleDict(
        {
            "online": model_of(nn.Linear(4, 4)),
            "target": model_of(nn.Linear(4, 4)),
            "forgotten": model_of(nn.Linear(4, 1)),
        }
    )
    optimizer = torch.optim.SGD(model["online"].parameters(), lr=0.1)
    monitor = watch(model, optimizer)

    def loss_of(x):
        loss = (model["forgotten"](model["online"](x)) - model["target"](x).detach()).square().mean()
        model.zero_grad()
        loss.backward()
        return loss

    for x in torch.randn(4, 8, 4):
        loss = optimizer.step(lambda x=x: loss_of(x)) if closure else loss_of(x)
        if not closure:
            optimizer.step()
        monitor.step(loss)
    assert cause_of(monitor, "target.0.weight") is FrozenCause.ON_PURPOSE
    assert cause_of(monitor, "forgotten.0.weight") is FrozenCause.NOT_IN_OPTIMIZER
    assert {alert.scope for alert in monitor.firing if alert.code == "U106"} == {
        "forgotten.0.weight",
        "forgotten.0.bias",
    }


def test_a_parameter_added_to_the_optimizer_later_is_no_longer_an_orphan(watch):
    model = model_of(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor, steps=2)
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.05})
    train(model, optimizer, monitor, steps=2)
    assert cause_of(monitor, "1.weight") is FrozenCause.MOVING
    np.testing.assert_allclose(monitor.history.panel("train/lr").last, [0.1, 0.05])


def break_requires_grad(model, optimizer):
    model[0].requires_grad_(False)


def break_lr(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.0


@pytest.mark.parametrize(
    ("breakage", "cause"), [(break_requires_grad, FrozenCause.REQUIRES_GRAD_OFF), (break_lr, FrozenCause.ZERO_LR)]
)
def test_what_is_broken_on_the_way_is_named_after_three_checks(watch, breakage, cause):
    model = model_of(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor, steps=2)
    breakage(model, optimizer)
    train(model, optimizer, monitor, steps=2)
    assert cause_of(monitor, "0.weight") is FrozenCause.MOVING
    train(model, optimizer, monitor, steps=1)
    assert cause_of(monitor, "0.weight") is cause
    assert cause_of(monitor, "1.weight") is FrozenCause.MOVING
    frozen = [alert for alert in monitor.firing if alert.code == "U101"]
    assert {alert.scope for alert in frozen} == {"0.weight", "0.bias"}


def test_a_detached_layer_has_no_gradient(watch):
    class Detached(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x).detach())

    torch.manual_seed(0)
    model = Detached(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor)
    assert cause_of(monitor, "0.weight") is FrozenCause.NO_GRADIENT
    assert monitor.firing[0].code == "G108"


def test_a_gradient_of_exactly_zero_is_named(watch):
    model = model_of(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(model[0].bias, -100.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor)
    assert cause_of(monitor, "0.weight") is FrozenCause.ZERO_GRADIENT


def test_an_optimizer_that_is_never_stepped_is_named(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor, step=False)
    assert cause_of(monitor, "0.weight") is FrozenCause.OPTIMIZER_NOT_STEPPED
    assert monitor.firing[0].code == "U105"


def test_an_update_that_low_precision_rounds_away_is_named(watch):
    model = model_of(nn.Linear(4, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor)
    assert cause_of(monitor, "0.weight") is FrozenCause.ROUNDED_AWAY


def test_weights_changed_by_the_loop_after_the_step_are_part_of_the_update(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    monitor.step(loss)
    assert last(monitor, "update/ratio", "0.weight") > 0.4


def test_an_optimizer_that_steps_less_often_freezes_nothing(watch):
    model = model_of(nn.Linear(4, 4), nn.Linear(4, 2))
    often = torch.optim.SGD(model[0].parameters(), lr=0.01)
    seldom = torch.optim.SGD(model[1].parameters(), lr=0.01)
    monitor = watch(model, [often, seldom])
    for step in range(20):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        often.step()
        if step % 5 == 0:
            seldom.step()
        model.zero_grad()
        monitor.step(loss)
    assert "U101" not in {alert.code for alert in monitor.alerts}
    stopped = monitor.history.series("update/stopped_by", "1.weight").values
    rests = [step % 5 != 0 for step in range(20)][-len(stopped) :]
    assert np.isnan(stopped).tolist() == rests
    assert not np.isnan(monitor.history.series("update/stopped_by", "0.weight").values).any()


def test_what_stops_a_tensor_is_recorded_at_every_check_whether_or_not_it_moves(watch):
    model = model_of(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor, steps=1)
    assert last(monitor, "update/stopped_by", "0.weight") == FrozenCause.MOVING
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    train(model, optimizer, monitor, steps=4)
    assert last(monitor, "update/stopped_by", "0.weight") == FrozenCause.ZERO_GRADIENT
    assert last(monitor, "update/ratio", "0.weight") > 0, "momentum goes on"
    assert cause_of(monitor, "0.weight") is FrozenCause.MOVING
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, monitor, steps=1)
    assert last(monitor, "update/stopped_by", "0.weight") == FrozenCause.ZERO_LR
    assert cause_of(monitor, "0.weight") is FrozenCause.MOVING, "patience is the rule's"


class TestWeightUpdateMonitor:
    def run(self, model, optimizer, monitor, step=True):
        model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean().backward()
        gradients = monitor.check_gradients(model, optimizer)
        if step:
            optimizer.step()
        updates = monitor.check_updates(model, optimizer)
        optimizer.zero_grad()
        return gradients, updates

    def test_it_measures_what_the_probe_measures(self, small, watch):
        model, optimizer = small
        monitor = watch(model, optimizer)
        alone = WeightUpdateMonitor()
        loss = model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean()
        loss.backward()
        gradients = alone.check_gradients(model, optimizer)
        optimizer.step()
        updates = alone.check_updates(model, optimizer)
        monitor.step(loss)
        for name, each in updates.items():
            assert np.float32(each.update_ratio) == last(monitor, "update/ratio", name)
            assert np.float32(gradients[name]["grad_norm"]) == last(monitor, "gradient/norm", name)

    def test_frozen_means_three_checks_in_a_row_and_names_the_cause(self, small):
        model, optimizer = small
        monitor = WeightUpdateMonitor()
        optimizer.param_groups[0]["lr"] = 0.0
        found = [self.run(model, optimizer, monitor)[1]["0.weight"] for _ in range(3)]
        assert [each.is_frozen for each in found] == [False, False, True]
        assert found[2].cause is FrozenCause.ZERO_LR
        optimizer.param_groups[0]["lr"] = 0.1
        assert not self.run(model, optimizer, monitor)[1]["0.weight"].is_frozen

    def test_an_optimizer_that_did_not_step_is_told_from_rounding(self, small):
        model, optimizer = small
        monitor = WeightUpdateMonitor(frozen_patience_steps=1)
        _, updates = self.run(model, optimizer, monitor, step=False)
        assert {each.cause for each in updates.values()} == {FrozenCause.OPTIMIZER_NOT_STEPPED}

    def test_groups_with_their_own_lr_are_told_apart(self):
        model = model_of(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(
            [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters()}], lr=0.1
        )
        monitor = WeightUpdateMonitor(frozen_patience_steps=1)
        _, updates = self.run(model, optimizer, monitor)
        assert updates["0.weight"].cause is FrozenCause.ZERO_LR
        assert updates["1.weight"].cause is FrozenCause.MOVING

    def test_flags_follow_the_thresholds(self, small):
        model, optimizer = small
        monitor = WeightUpdateMonitor(vanishing_grad_threshold=1e9, exploding_grad_threshold=1e-9)
        gradients, _ = self.run(model, optimizer, monitor)
        assert all(each.is_vanishing and each.is_exploding for each in gradients.values())

    def test_aggregates_use_ceil_and_count(self):
        def one(norm):
            return forewarn.standalone.weight_update_monitor.GradientDiagnostic(norm, True, norm < 2, norm > 99, 0)

        diagnostics = {f"p{at}": one(float(at)) for at in range(1, 101)}
        stats = WeightUpdateMonitor.aggregate_gradient_stats(diagnostics)
        assert stats == {
            "count": 100, "median": 50.5, "p95": 95.0, "min": 1.0, "max": 100.0,
            "vanishing_count": 1, "exploding_count": 1,
        }  # fmt: skip
        assert WeightUpdateMonitor.top_k_largest_gradients(diagnostics, 2) == [("p100", 100.0), ("p99", 99.0)]

    def test_aggregates_of_nothing_are_counts_of_zero(self):
        stats = WeightUpdateMonitor.aggregate_update_stats({})
        assert stats["count"] == stats["frozen_count"] == 0
        assert math.isnan(stats["median"])

    def test_the_smallest_updates_come_first(self, small):
        model, optimizer = small
        _, updates = self.run(model, optimizer, WeightUpdateMonitor())
        top = WeightUpdateMonitor.top_k_smallest_updates(updates, 2)
        assert [ratio for _, ratio in top] == sorted(each.update_ratio for each in updates.values())[:2]

    def test_memory_is_eight_bytes_a_sample_and_not_a_copy_of_the_model(self):
        model = nn.Linear(1000, 1000, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = WeightUpdateMonitor(sample_size=256)
        model(torch.ones(1, 1000)).sum().backward()
        monitor.check_gradients(model, optimizer)
        assert monitor.num_bytes == 256 * 8

    def test_checking_updates_first_says_what_to_do(self, small):
        with pytest.raises(RuntimeError, match="call that before"):
            WeightUpdateMonitor().check_updates(*small)

    def test_settings_out_of_range_are_refused(self):
        with pytest.raises(ValueError, match="sample_size must be at least 1"):
            WeightUpdateMonitor(sample_size=0)


@pytest.mark.parametrize("event", ["before_update", "after_update", "collect"])
def test_weights_are_not_called_frozen_when_it_is_unknown_whether_the_optimizer_stepped(event, small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)

    def explode(*args):
        raise RuntimeError("broken on purpose")

    setattr(monitor._probes["stepping"], event, explode)
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert {alert.name for alert in monitor.alerts} == {"probe-failed", "unavailable"}
    assert "update/frozen_cause" not in monitor.history.names()
    unavailable = {alert.scope: alert.finding.evidence["reason"] for alert in monitor.alerts if alert.code == "X103"}
    assert unavailable["update/frozen_cause"] == "the probe it builds on failed"


def test_an_optimizer_that_is_never_stepped_beside_another_is_named(watch):
    model = model_of(nn.Linear(4, 4), nn.Linear(4, 2))
    used, forgotten = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    monitor = watch(model, [used, forgotten], every=1)
    for _ in range(110):
        loss = model(torch.ones(2, 4)).square().mean()
        for optimizer in (used, forgotten):
            optimizer.zero_grad()
        loss.backward()
        used.step()
        monitor.step(loss)
    assert cause_of(monitor, "0.weight") is FrozenCause.MOVING
    assert cause_of(monitor, "1.weight") is FrozenCause.OPTIMIZER_NOT_STEPPED
