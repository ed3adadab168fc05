import math

import numpy as np
import pytest
import torch
from torch import nn

from forewarn.measure.probes.gradients import is_loss_scale
from forewarn.types import Reason
from tests.conftest import last


def backward(model, scale=1.0):
    loss = scale * model(torch.linspace(-1, 1, 12).view(3, 4)).square().mean()
    loss.backward()
    return loss


def true_norm(model):
    return torch.sqrt(sum(parameter.grad.double().square().sum() for parameter in model.parameters())).item()


def test_weight_decay_and_beta2_are_recorded_at_the_start_and_when_they_change(watch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = [
        torch.optim.AdamW(model[0].parameters(), betas=(0.9, 0.95), weight_decay=0.01),
        torch.optim.SGD(model[1].parameters(), lr=0.1),
    ]
    monitor = watch(model, optimizers)
    for step in range(6):
        if step == 3:
            optimizers[1].param_groups[0]["weight_decay"] = 0.1
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        monitor.step(loss)
    decay, beta2 = (monitor.history.panel(f"train/{name}") for name in ("weight_decay", "beta2"))
    assert (decay.scopes, decay.steps.tolist()) == (("0", "1"), [0, 3])
    np.testing.assert_allclose(decay.values, [[0.01, 0.0], [0.01, 0.1]])
    assert beta2.steps.tolist() == [0]
    np.testing.assert_allclose(beta2.values, [[0.95, math.nan]])


def test_the_global_norm_without_clipping_is_that_of_the_last_backward(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer, every=lambda step: False)
    loss = backward(model)
    norm = true_norm(model)
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)
    assert last(monitor, "gradient/global_norm") == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("through", ["monitor", "torch"])
def test_the_global_norm_is_the_one_before_clipping_whoever_clips(small, watch, through):
    model, optimizer = small
    monitor = watch(model, optimizer)
    for _ in range(3):
        loss = backward(model, 50.0)
        norm = true_norm(model)
        if through == "monitor":
            returned = monitor.clip_grad_norm_(0.25)
            assert returned.item() == pytest.approx(norm, rel=1e-6)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        assert true_norm(model) == pytest.approx(0.25, rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
        assert last(monitor, "gradient/global_norm") == pytest.approx(norm, rel=1e-6)
        assert last(monitor, "gradient/global_norm_clipped") == pytest.approx(0.25, rel=1e-4)
    assert last(monitor, "train/clip") == 0.25
    assert len(monitor.history.series("train/clip").values) == (3 if through == "monitor" else 2)


@pytest.mark.parametrize(
    ("clip", "found"),
    [
        (lambda model, step: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1), 0.1),
        (lambda model, step: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e30), None),
        (lambda model, step: torch.nn.utils.clip_grad_value_(model.parameters(), 20.0), None),
        (lambda model, step: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 if step < 6 else 1e30), None),
        (lambda model, step: None, None),
    ],
    ids=["by norm", "never reached", "by value", "given up", "not at all"],
)
def test_clipping_that_the_loop_does_itself_is_found(small, watch, clip, found):
    model, optimizer = small
    monitor = watch(model, optimizer, every=2)
    for step in range(12):
        loss = backward(model, 50.0)
        clip(model, step)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    now = monitor.history.series("train/clip")
    assert (round(now.last, 6) if now.at == 11 else None) == found


@pytest.mark.parametrize("every", [1, lambda step: False])
def test_if_only_the_limit_of_clipping_is_reported_the_norm_is_measured(small, watch, every):
    model, optimizer = small
    monitor = watch(model, optimizer, every=every)
    loss = backward(model, 50.0)
    norm = true_norm(model)
    monitor.clipped(None, norm / 4)
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm / 4)
    optimizer.step()
    monitor.step(loss)
    assert last(monitor, "gradient/global_norm") == pytest.approx(norm, rel=1e-6)  # a ratio of 4 is no loss scale here
    assert last(monitor, "gradient/global_norm_clipped") == pytest.approx(norm / 4, rel=1e-5)
    assert last(monitor, "train/clip") == pytest.approx(norm / 4)


def test_clipping_reported_by_an_adapter_is_read_as_if_the_monitor_had_clipped(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    for _ in range(2):
        loss = backward(model, 50.0)
        monitor.clipped(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
        assert last(monitor, "train/clip") == 0.25
    with pytest.raises(TypeError, match="max_norm must be"):
        monitor.clipped(1.0, "much")


def test_gradients_accumulated_over_micro_batches_are_read_as_the_optimizer_sees_them(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    for _ in range(4):
        loss = backward(model)
    norm, first = true_norm(model), model[0].weight.grad.norm().item()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)
    assert last(monitor, "gradient/global_norm") == pytest.approx(norm, rel=1e-6)
    assert last(monitor, "gradient/norm", "0.weight") == pytest.approx(first, rel=1e-6)
    assert last(monitor, "gradient/residual_norm") == 0


def test_what_a_forgotten_zero_grad_leaves_behind_is_read_at_the_next_backward(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    monitor.step(backward(model))
    for _ in range(2):
        left = true_norm(model)
        optimizer.step()
        monitor.step(backward(model))
        assert last(monitor, "gradient/residual_norm") == pytest.approx(left, rel=1e-5)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_forward_and_backward_leaves_nothing_behind(small, watch, set_to_none):
    model, optimizer = small
    monitor = watch(model, optimizer)
    for _ in range(3):
        loss = model(torch.ones(1, 4)).sum()
        optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        optimizer.step()
        monitor.step(loss)
        assert last(monitor, "gradient/residual_norm") == 0


def test_a_parameter_without_a_gradient_is_missing_and_the_rest_is_read(watch):
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "detached": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x) + model["detached"](x).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step()
    monitor.step(loss)
    assert last(monitor, "gradient/missing", "detached.weight") == 1
    assert last(monitor, "gradient/missing", "used.weight") == 0
    assert math.isnan(last(monitor, "gradient/norm", "detached.weight"))
    assert last(monitor, "gradient/norm", "used.weight") > 0


def test_tied_parameters_are_counted_once(watch):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    loss = model(torch.ones(1, 3)).sum()
    loss.backward()
    norm = model[0].weight.grad.norm().item()
    optimizer.step()
    monitor.step(loss)
    assert monitor.history.panel("gradient/norm").scopes == ("0.weight",)
    assert last(monitor, "gradient/global_norm") == pytest.approx(norm, rel=1e-6)


def test_sparse_and_half_precision_gradients_are_read(watch):
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4, sparse=True), "low": nn.Linear(4, 2).to(torch.bfloat16)})
    model.forward = lambda x: model["low"](model["embedding"](x).to(torch.bfloat16)).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    loss = model(torch.tensor([[1, 2, 1]])).square().sum()
    loss.backward()
    expected = {name: parameter.grad.to_dense().double().norm().item() if parameter.grad.is_sparse else
                parameter.grad.double().norm().item() for name, parameter in model.named_parameters()}  # fmt: skip
    optimizer.step()
    monitor.step(loss)
    for name, norm in expected.items():
        assert last(monitor, "gradient/norm", name) == pytest.approx(norm, rel=1e-5)
    assert last(monitor, "gradient/global_norm") == pytest.approx(math.hypot(*expected.values()), rel=1e-5)
    assert last(monitor, "gradient/zero_fraction", "embedding.weight") == pytest.approx(0.8)


def test_a_norm_whose_pass_was_not_seen_is_read_at_the_step_and_marked(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    loss = model[2](model[1](model[0](torch.ones(1, 4)))).sum()
    loss.backward()
    norm = true_norm(model)
    optimizer.step()
    monitor.step(loss)
    assert last(monitor, "monitor/unavailable", "gradient/global_norm") == Reason.AFTER_CLIPPING
    assert last(monitor, "gradient/global_norm") == pytest.approx(norm, rel=1e-5)
    assert last(monitor, "gradient/global_norm_clipped") == pytest.approx(norm, rel=1e-5)


def test_lbfgs_and_other_closures_are_read_after_the_step(small, watch):
    model, _ = small
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    monitor = watch(model, optimizer)

    def closure():
        optimizer.zero_grad()
        return backward(model)

    before = model[0].weight.detach().clone()
    for _ in range(2):
        loss = optimizer.step(closure)
        monitor.step(loss)
    after = model[0].weight.detach()
    assert last(monitor, "gradient/norm", "0.weight") == pytest.approx(model[0].weight.grad.norm().item(), rel=1e-5)
    assert last(monitor, "gradient/global_norm") == pytest.approx(true_norm(model), rel=1e-5)
    assert last(monitor, "update/ratio", "0.weight") > 0
    assert not torch.equal(before, after)
    assert not monitor.alerts


def test_gradients_are_read_before_the_optimizer_can_change_them(small, watch):
    model, optimizer = small
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad(set_to_none=False))
    monitor = watch(model, optimizer)
    loss = backward(model)
    norm = model[0].weight.grad.norm().item()
    optimizer.step()
    monitor.step(loss)
    assert last(monitor, "gradient/norm", "0.weight") == pytest.approx(norm, rel=1e-5)


def test_two_optimizers_each_give_their_own_gradients(small, watch):
    model, _ = small
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[2].parameters(), lr=0.01)
    monitor = watch(model, [first, second])
    loss = backward(model)
    norms = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    first.step()
    second.step()
    monitor.step(loss)
    for name, norm in norms.items():
        assert last(monitor, "gradient/norm", name) == pytest.approx(norm, rel=1e-5)
    np.testing.assert_allclose(monitor.history.panel("train/lr").last, [0.1, 0.01])
    assert last(monitor, "update/optimizer_steps") == 2


def test_a_scheduler_that_steps_before_the_monitor_does_not_change_the_lr_read(small, watch):
    model, optimizer = small
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    monitor = watch(model, optimizer)
    loss = backward(model)
    optimizer.step()
    scheduler.step()
    monitor.step(loss)
    assert last(monitor, "train/lr", "0") == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("ratio", "scaled"),
    [(65536.0, True), (1024.0001, True), (1000.0, False), (2.0, False), (math.nan, False), (math.inf, False)],
)
def test_a_loss_scale_is_told_from_clipping(ratio, scaled):
    assert is_loss_scale(ratio) is scaled


def test_what_one_optimizer_used_is_not_overwritten_by_the_backward_pass_of_another(watch):
    """The order of a GAN: the discriminator steps before the generator's loss flows through it."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})
    model.forward = lambda x, fake: model["d"](model["g"](x) if fake else x)
    opt_d = torch.optim.SGD(model["d"].parameters(), lr=0.01)
    opt_g = torch.optim.SGD(model["g"].parameters(), lr=0.01)
    monitor = watch(model, [opt_d, opt_g])
    for _ in range(5):
        opt_d.zero_grad()
        (model(torch.ones(4, 3), False).mean() - model(torch.ones(4, 3), True).mean()).square().backward()
        norm_d = torch.stack([each.grad.norm() for each in model["d"].parameters()]).norm().item()
        opt_d.step()
        opt_g.zero_grad()
        (100 * model(torch.ones(4, 3), True).square().mean()).backward()
        norm_g = torch.stack([each.grad.norm() for each in model["g"].parameters()]).norm().item()
        opt_g.step()
        monitor.step(1.0)
        assert last(monitor, "gradient/global_norm") == pytest.approx(math.hypot(norm_d, norm_g), rel=1e-5)
        assert last(monitor, "gradient/residual_norm") == 0
    assert "G109" not in {alert.code for alert in monitor.alerts}


def test_a_gradient_penalty_does_not_disturb_the_norm(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    for _ in range(4):
        x = torch.ones(2, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = model(x).square().mean() + slope.square().mean()
        loss.backward()
        norm = true_norm(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        torch.autograd.grad(model(torch.ones(1, 4, requires_grad=True)).sum(), model[0].weight)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
        assert last(monitor, "gradient/global_norm") == pytest.approx(norm, rel=1e-5)
    assert "G109" not in {alert.code for alert in monitor.alerts}


def test_a_head_that_is_replaced_is_clipped_and_measured(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    monitor.step(backward(model))
    model[2] = nn.Linear(8, 3)
    optimizer.zero_grad()
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(model.parameters())})
    loss = backward(model, 100.0)
    monitor.clip_grad_norm_(0.01)
    assert true_norm(model) == pytest.approx(0.01, rel=1e-3)
    norm = model[2].weight.grad.norm().item()
    optimizer.step()
    monitor.step(loss)
    assert last(monitor, "gradient/norm", "2.weight") == pytest.approx(norm, rel=1e-5)
    assert last(monitor, "update/ratio", "2.weight") > 0
    assert "X101" not in {alert.code for alert in monitor.alerts}


def test_parameters_of_two_precisions_have_one_norm(watch):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2).double())
    model.forward = lambda x: model[1](model[0](x).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    loss = model(torch.ones(1, 3)).sum()
    loss.backward()
    norm = true_norm(model)
    optimizer.step()
    monitor.step(loss)
    assert last(monitor, "gradient/global_norm") == pytest.approx(norm, rel=1e-6)


def test_a_model_that_passes_a_parameter_on_gathers_no_hooks(watch):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.weight

    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    for _ in range(5):
        loss = model().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    assert len(model.weight._backward_hooks) == 1  # the only sign of a backward pass through this model


def test_an_output_that_can_not_be_looked_at_is_left_alone(watch):
    class Strange(dict):
        def items(self):
            raise RuntimeError("not now")

    class Model(nn.Linear):
        def forward(self, x):
            return Strange(out=super().forward(x))

    model = Model(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    for _ in range(2):
        loss = model(torch.ones(1, 2))["out"].sum()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert ("X101", "backward") in {alert.identity for alert in monitor.alerts}
    assert last(monitor, "train/loss") == pytest.approx(loss.item())


def test_compiling_a_watched_model_into_one_graph_still_works(watch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(1, 4)
    torch.testing.assert_close(compiled(x), model(x))


def test_the_old_gradient_of_a_layer_that_was_frozen_is_not_a_forgotten_zero_grad(small, watch):
    model, optimizer = small
    backward(model)
    model[0].requires_grad_(False)
    monitor = watch(model, optimizer)
    for _ in range(5):
        model[2].zero_grad()
        loss = backward(model)
        optimizer.step()
        monitor.step(loss)
        assert last(monitor, "gradient/residual_norm") == 0
