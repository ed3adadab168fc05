"""Batches that are skipped: nothing in the model or the optimizer moves, whatever the optimizer is."""

import copy

import pytest
import torch
from torch import nn

import forewarn

SKIPPING = {"gradient-spike": "skip_batch"}
WARM_UP = 30

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.9, centered=True, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, weight_decay=0.1),
    "Adafactor": lambda p: (
        getattr(torch.optim, "Adafactor", None) and torch.optim.Adafactor(p, lr=0.01, weight_decay=0.1)
    ),
    "Muon": lambda p: getattr(torch.optim, "Muon", None) and torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))


def backward(net: nn.Module, seed: int, scale: float = 1.0) -> torch.Tensor:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
    loss = ((net(x) - x[:, :2]) ** 2).mean()
    (loss * scale).backward()
    return loss


def state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def assert_same(one, other) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    else:
        assert one == other


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_batch_moves_neither_weights_nor_optimizer_state(tmp_path, name):
    net = model()
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    if optimizer is None:
        pytest.skip(f"this torch has no {name}")
    skipped = []
    with forewarn.watch(net, optimizer, tmp_path / "run", views=[], policy=SKIPPING) as monitor:
        for step in range(WARM_UP):
            loss = backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
        for scale in (1e6, float("nan"), 1.0):
            before = state(net, optimizer)
            loss = backward(net, WARM_UP, scale)
            gradients = [parameter.grad.clone() for parameter in net.parameters()]
            optimizer.step()
            if scale == 1.0:
                with pytest.raises(AssertionError):
                    assert_same(before, state(net, optimizer))
            else:
                assert_same(before, state(net, optimizer))
            for gradient, parameter in zip(gradients, net.parameters(), strict=True):
                assert torch.equal(gradient.nan_to_num(), parameter.grad.nan_to_num())  # as after any other step
            assert "found_inf" not in vars(optimizer)
            optimizer.zero_grad()
            actions = monitor.step(loss).actions
            skipped.append("skip_batch" in [action.action for action in actions if not action.watched_steps])
    assert skipped == [True, True, False]
    with forewarn.open_run(tmp_path / "run") as run:
        assert run.series("guard/skipped").values.tolist() == [0.0] * WARM_UP + [1.0, 1.0, 0.0]


def trained(path, scales, policy=SKIPPING, clip=None, scaler=None, make=OPTIMIZERS["AdamW"], steps=60):
    """A run whose losses are multiplied by a factor at some steps; returns the model and all actions."""
    net = model()
    optimizer = make(list(net.parameters()))
    with forewarn.watch(net, optimizer, path, views=[], policy=policy, scaler=scaler) as monitor:
        for step in range(steps):
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
            loss = ((net(x) - x[:, :2]) ** 2).mean() * scales.get(step, 1.0)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if clip is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                monitor.clip_grad_norm_(clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            monitor.step(loss)
    with forewarn.open_run(path) as run:
        return net, [action for action in run.actions() if action.action == "skip_batch"]


@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW"], OPTIMIZERS["AdamW fused"]])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_gradient_scaler_goes_on_as_before(tmp_path, make, clip):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    _, actions = trained(tmp_path / "run", {40: 1e4}, clip=clip, scaler=scaler, make=make)
    assert [action.step for action in actions] == [40]
    assert actions[0].parameters["norm"] > actions[0].parameters["limit"]
    assert actions[0].parameters["norm"] < 1e6  # without the loss scale
    assert scaler.get_scale() == 2.0**8


def test_a_dry_run_says_what_it_would_have_skipped_and_changes_nothing(tmp_path):
    policy = {"rules": SKIPPING, "skip_batch": {"dry_run": True}}
    dry, actions = trained(tmp_path / "dry", {40: 1e4}, policy)
    plain, _ = trained(tmp_path / "plain", {40: 1e4}, "observe")
    assert [(action.step, action.dry_run) for action in actions] == [(40, True)]
    assert_same(dry.state_dict(), plain.state_dict())


def test_a_new_level_of_the_norm_is_accepted_after_a_few_batches(tmp_path):
    _, actions = trained(tmp_path / "run", dict.fromkeys(range(40, 60), 1e4))
    assert [action.step for action in actions] == [40, 41, 42]


def test_the_budget_ends_the_skipping(tmp_path):
    policy = {"rules": SKIPPING, "skip_batch": {"times": 2}}
    net, actions = trained(tmp_path / "run", dict.fromkeys(range(40, 45), float("nan")), policy)
    assert [action.step for action in actions] == [40, 41]
    assert net[0].weight.isnan().all()


def test_what_is_skipped_is_recorded_with_its_reason_and_outcome(tmp_path):
    _, (action,) = trained(tmp_path / "run", {40: 1e4})
    assert (action.code, action.reason) == ("G104", "The gradient norm is far above its usual level")
    assert (action.resolved_after, action.recovered_after) == (1, 5)


def test_an_optimizer_with_a_closure_cannot_skip_and_says_so(tmp_path, caplog):
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    with forewarn.watch(net, optimizer, tmp_path / "run", views=[], policy=SKIPPING) as monitor:

        def closure():
            optimizer.zero_grad()
            return backward(net, 0)

        monitor.step(optimizer.step(closure))
    assert "batches cannot be skipped: LBFGS computes its gradients within the step" in caplog.text


def test_an_optimizer_that_raises_keeps_its_gradients(tmp_path):
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("out of luck")
            return super().step(closure)

    net = model()
    optimizer = Failing(net.parameters(), lr=0.01)
    with forewarn.watch(net, optimizer, tmp_path / "run", views=[], policy=SKIPPING) as monitor:
        for step in range(WARM_UP):
            loss = backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
        Failing.fails = True
        loss = backward(net, WARM_UP, 1e6)
        with pytest.raises(RuntimeError, match="out of luck"):
            optimizer.step()
        monitor.step(loss)
        assert all(parameter.grad is not None for parameter in net.parameters())
        Failing.fails = False
        optimizer.zero_grad()
        weights = net[0].weight.clone()
        loss = backward(net, WARM_UP + 1)
        optimizer.step()
        monitor.step(loss)
        assert not torch.equal(weights, net[0].weight)


def test_a_copy_of_the_optimizer_does_not_hold_the_guard(tmp_path):
    net = model()
    optimizer = OPTIMIZERS["AdamW"](list(net.parameters()))
    with forewarn.watch(net, optimizer, tmp_path / "run", views=[], policy=SKIPPING):
        torch.save(copy.deepcopy(optimizer), tmp_path / "optimizer.pt")
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
