"""Several tasks: what is recorded of them equals what is computed by hand, and nothing else changes."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import forewarn
from forewarn.measure.shared_layer import last_shared_layer, obstacle
from forewarn.types import Reason
from tests.conftest import last


class TwoTasks(nn.Module):
    """The heads are registered before the trunk, so that the order of the model says nothing."""

    def __init__(self):
        super().__init__()
        self.where = nn.Linear(8, 1)
        self.what = nn.Linear(8, 3)
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())

    def forward(self, x):
        shared = self.trunk(x)
        return self.where(shared), self.what(shared)


def losses_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, generator=generator)
    where, what = model(x)
    return {"where": (where[:, 0] - x[:, 0]).square().mean(), "what": functional.cross_entropy(what, (x[:, 1] > 0) * 1)}


@pytest.fixture
def two():
    torch.manual_seed(0)
    model = TwoTasks()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def by_hand(model, parameters, seed=0):
    """The gradient of each task alone, by backward() on a fresh graph."""
    found = {}
    for name in ("where", "what"):
        model.zero_grad()
        losses_of(model, seed)[name].backward()
        parts = [np.zeros(p.shape) if p.grad is None else p.grad.double().numpy() for p in parameters]
        found[name] = np.concatenate([part.reshape(-1) for part in parts])
    model.zero_grad()
    return found


def step(model, optimizer, monitor, seed=0, **settings):
    loss = monitor.combine_losses(losses_of(model, seed), **settings)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)


@pytest.mark.parametrize(
    ("shared", "chosen"),
    [
        (None, lambda model: list(model.trunk[2].parameters())),
        (r"^trunk\.", lambda model: list(model.trunk.parameters())),
        ("module", lambda model: list(model.trunk[0].parameters())),
        ("parameters", lambda model: [model.trunk[0].weight, model.trunk[2].bias]),
    ],
)
def test_norm_ratio_cosine_and_share_are_those_of_separate_backward_passes(two, watch, shared, chosen):
    model, optimizer = two
    parameters = chosen(model)
    if shared == "module":
        shared = model.trunk[0]
    elif shared == "parameters":
        shared = iter(parameters)
    gradients = by_hand(model, parameters)
    a, b = 3.0 * gradients["where"], 0.5 * gradients["what"]
    monitor = watch(model, optimizer)
    step(model, optimizer, monitor, shared=shared, weights={"where": 3.0, "what": 0.5})
    norms = np.linalg.norm(a), np.linalg.norm(b)
    assert last(monitor, "task/gradient_norm", "where") == pytest.approx(norms[0], rel=1e-5)
    assert last(monitor, "task/gradient_norm", "what") == pytest.approx(norms[1], rel=1e-5)
    assert last(monitor, "task/ratio", "where/what") == pytest.approx(norms[0] / norms[1], rel=1e-5)
    assert last(monitor, "task/cosine", "where/what") == pytest.approx(a @ b / norms[0] / norms[1], abs=1e-5)
    assert last(monitor, "task/share", "what") == pytest.approx(norms[1] / sum(norms), rel=1e-5)
    assert (last(monitor, "task/weight", "where"), last(monitor, "task/weight", "what")) == (3.0, 0.5)


def test_loss_what_is_left_of_it_and_the_relative_rate(two, watch):
    model, optimizer = two
    monitor = watch(model, optimizer)
    seen = []
    for seed in range(3):
        seen.append({name: loss.item() for name, loss in losses_of(model, seed).items()})
        step(model, optimizer, monitor, seed, every=1)
    left = {name: seen[-1][name] / seen[0][name] for name in seen[0]}
    for name in left:
        assert last(monitor, "task/loss", name) == pytest.approx(seen[-1][name])
        assert last(monitor, "task/remaining", name) == pytest.approx(left[name], rel=1e-5)
        assert last(monitor, "task/rate", name) == pytest.approx(left[name] / np.mean(list(left.values())), rel=1e-5)


def test_a_loss_of_zero_is_no_beginning_and_one_that_was_never_more_has_nothing_left(two, watch):
    model, optimizer = two
    monitor = watch(model, optimizer)
    for share in (0.0, 1.0, 0.5):
        what, where = losses_of(model).values()
        monitor.combine_losses({"what": share * what, "where": 0.0 * where}, every=1).backward()
        monitor.step()
        assert last(monitor, "task/remaining", "what") == pytest.approx(share)
        assert last(monitor, "task/remaining", "where") == 0.0


def test_three_tasks_have_three_pairs(two, watch):
    model, optimizer = two
    monitor = watch(model, optimizer)
    losses = losses_of(model)
    losses["size"] = sum(parameter.square().sum() for parameter in model.trunk.parameters())
    monitor.step(monitor.combine_losses(losses))
    assert monitor.history.panel("task/ratio").scopes == ("where/what", "where/size", "what/size")
    assert monitor.history.panel("task/share").last.sum() == pytest.approx(1.0)


def test_it_compares_on_every_nth_step_and_records_losses_on_each(two, watch):
    model, optimizer = two
    monitor = watch(model, optimizer)
    for _ in range(25):
        step(model, optimizer, monitor)
    assert monitor.history.panel("task/ratio").steps.tolist() == [0, 10, 20]
    assert monitor.history.panel("task/loss").steps.tolist() == list(range(17, 25))  # what no rule reads is short


def test_batches_of_an_accumulation_are_averaged_and_compared_once(two, watch):
    model, optimizer = two
    monitor = watch(model, optimizer)
    expected = np.mean([losses_of(model, seed)["where"].item() for seed in range(3)])
    for seed in range(3):
        (monitor.combine_losses(losses_of(model, seed), every=1) / 3).backward()
    monitor.step()
    assert last(monitor, "task/loss", "where") == pytest.approx(expected, rel=1e-6)
    assert len(monitor.history.panel("task/ratio")) == 1


def test_gradients_are_left_alone_and_no_probe_takes_the_pass_for_a_backward_pass(two, watch):
    model, optimizer = two
    monitor = watch(model, optimizer)
    told = []
    gradients = monitor._probes["gradients"]
    gradients.backward_begins = gradients.backward_ended = told.append
    loss = monitor.combine_losses(losses_of(model))
    assert told == []
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()
    assert len(told) == 2, "the pass of the training run is still seen"


def test_the_global_norm_is_that_of_the_weighted_sum(two, watch):
    model, optimizer = two
    parameters = list(model.parameters())
    gradients = by_hand(model, parameters)
    monitor = watch(model, optimizer)
    step(model, optimizer, monitor, weights={"what": 2.0})
    expected = np.linalg.norm(gradients["where"] + 2.0 * gradients["what"])
    assert last(monitor, "gradient/global_norm") == pytest.approx(expected, rel=1e-5)


def test_a_task_of_weight_zero_is_off_and_one_without_gradient_is_starved(two, watch):
    model, optimizer = two
    monitor = watch(model, optimizer)
    step(model, optimizer, monitor, weights={"what": 0.0}, every=1)
    assert last(monitor, "task/gradient_norm", "what") == 0
    assert "task/ratio" not in monitor.history
    with torch.no_grad():
        model.what.weight.zero_()
    step(model, optimizer, monitor, every=1)
    assert last(monitor, "task/ratio", "where/what") == math.inf


def test_validation_under_no_grad_gives_the_sum_and_records_nothing(two, watch):
    model, optimizer = two
    monitor = watch(model, optimizer)
    with torch.no_grad():
        losses = losses_of(model)
        assert monitor.combine_losses(losses, weights={"what": 2.0}) == losses["where"] + 2.0 * losses["what"]
    monitor.step()
    assert "task/loss" not in monitor.history


def test_the_last_shared_layer_is_the_last_of_the_forward_pass_that_has_a_matrix(two):
    model, _ = two
    name, parameters = last_shared_layer(list(losses_of(model).values()), model)
    assert name == "trunk.2"
    assert [id(each) for each in parameters] == [id(each) for each in model.trunk[2].parameters()]


@pytest.mark.parametrize("of_both", [True, False])
def test_a_weight_that_is_tied_to_the_input_is_not_the_last_shared_layer(of_both):
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.middle = nn.Linear(4, 4)
            self.other = nn.Linear(5 if of_both else 4, 2)

        def forward(self, tokens):
            hidden = torch.tanh(self.middle(self.embedding(tokens)))
            words = hidden @ self.embedding.weight.T
            return words, self.other(words if of_both else hidden)

    model = Tied()
    words, other = model(torch.tensor([0, 1, 2]))
    assert last_shared_layer([words.square().mean(), other.square().mean()], model)[0] == "middle"


def test_a_shared_layer_that_is_frozen_on_the_way_makes_room_for_the_one_before(two, watch):
    model, optimizer = two
    monitor = watch(model, optimizer)
    step(model, optimizer, monitor, every=1)
    assert monitor._probes["tasks"].layer == "trunk.2"
    model.trunk[2].requires_grad_(False)
    step(model, optimizer, monitor, every=1)
    assert monitor._probes["tasks"].layer == "trunk.0"


def test_tasks_without_anything_in_common_are_unavailable(watch):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    x = torch.ones(3, 2)
    loss = monitor.combine_losses({"a": model[0](x).sum(), "b": model[1](x).sum()})
    loss.backward()
    monitor.step(loss)
    assert last(monitor, "monitor/unavailable", "task/gradient_norm") == Reason.NO_SHARED_LAYER
    assert "task/gradient_norm" not in monitor.history
    assert last(monitor, "task/loss", "a") == pytest.approx(model[0](x).sum().item())


def test_two_unavailable_readings_of_one_step_are_both_told(watch):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    monitor = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        x = torch.ones(3, 2)
        monitor.step(monitor.combine_losses({"a": model[0](x).sum(), "b": model[1](x).sum()}, every=1))
    told = {alert.scope for alert in monitor.firing if alert.code == "X103"}
    assert told == {"gradient/global_norm", "task/gradient_norm"}


class Checkpointed(TwoTasks):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        shared = checkpoint(self.trunk, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.where(shared), self.what(shared)


def test_under_re_entrant_checkpointing_it_is_unavailable_and_training_goes_on(watch):
    torch.manual_seed(0)
    model = Checkpointed(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = watch(model, optimizer)
    step(model, optimizer, monitor)
    assert last(monitor, "monitor/unavailable", "task/gradient_norm") == Reason.REENTRANT_CHECKPOINT
    assert monitor._loop.failures == {}


def test_under_checkpointing_that_is_not_re_entrant_it_measures_the_same(two, watch):
    plain, _ = two
    torch.manual_seed(0)
    model = Checkpointed(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    expected = by_hand(plain, list(plain.trunk.parameters()))
    monitor = watch(model, optimizer)
    step(model, optimizer, monitor, shared="trunk")
    assert last(monitor, "task/gradient_norm", "what") == pytest.approx(np.linalg.norm(expected["what"]), rel=1e-5)


def test_compiled_code_is_recognised_by_its_node():
    class CompiledFunction(torch.autograd.Function):  # named as torch names what it compiles
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    layer = nn.Linear(2, 1)
    loss = CompiledFunction.apply(layer(torch.ones(1, 2))).sum()
    assert obstacle([loss], layer) is Reason.COMPILED


def test_a_scaler_keeps_small_gradients_from_rounding_to_zero(watch):
    torch.manual_seed(0)
    model = TwoTasks().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    scaler.scale(torch.zeros(1))  # makes its scale a tensor
    reference = TwoTasks().double()
    reference.load_state_dict(model.state_dict())

    def tiny(model, dtype):
        where, what = model(torch.linspace(-1, 1, 8, dtype=dtype).reshape(2, 4))
        return {"where": where.square().mean() * 1e-7, "what": what.square().mean() * 1e-7}

    true = torch.autograd.grad(tiny(reference, torch.float64)["what"], list(reference.trunk[2].parameters()))
    monitor = watch(model, optimizer, scaler=scaler)
    loss = monitor.combine_losses(tiny(model, torch.float16), every=1)
    monitor.step(loss)
    norm = math.sqrt(sum(float(each.square().sum()) for each in true))
    assert last(monitor, "task/gradient_norm", "what") == pytest.approx(norm, rel=0.1)


def test_first_losses_survive_a_resume(two, watch):
    model, optimizer = two
    monitor = watch(model, optimizer)
    step(model, optimizer, monitor)
    first = float(monitor._probes["tasks"].first["where"])
    other = watch(model, optimizer)
    other.load_state_dict(monitor.state_dict())
    step(model, optimizer, other, seed=1, every=1)
    assert last(other, "task/remaining", "where") == pytest.approx(last(other, "task/loss", "where") / first, rel=1e-6)


@pytest.mark.parametrize(
    ("losses", "settings", "words"),
    [
        ({}, {}, "map the name of each task to"),
        ({"a/b": None}, {}, "without a slash"),
        ({"a": 1.0}, {}, "must be a tensor of one number"),
        (None, {"weights": {"wher": 1.0}}, "did you mean 'where'"),
        (None, {"weights": {"where": -1.0}}, "at least 0"),
        (None, {"weights": [1.0, 2.0]}, "map the name of each task to"),
        (None, {"shared": "nothing"}, "matches no parameter"),
        (None, {"shared": "("}, "is not a regular expression"),
        (None, {"shared": [torch.zeros(2)]}, "not a parameter of the watched model"),
        (None, {"shared": "^where"}, "'what' depends on none of the shared"),
        (None, {"every": 0}, "at least 1"),
        (None, {"balance": "magic"}, "'gradnorm', 'uncertainty' or None"),
        (None, {"balance": "gradnorm", "weights": {"where": 0.0}}, "needs positive weights"),
    ],
)
def test_a_wrong_argument_is_one_clear_sentence(two, watch, losses, settings, words):
    model, optimizer = two
    monitor = watch(model, optimizer)
    with pytest.raises((TypeError, ValueError), match=words):
        monitor.combine_losses(losses_of(model) if losses is None else losses, **settings)


def test_the_name_of_a_task_metric_is_not_for_users(small, watch):
    monitor = watch(*small)
    with pytest.raises(ValueError, match="the monitor already records"):
        monitor.log("task/loss", 1.0)


def test_a_probe_that_fails_leaves_the_sum(two, watch, caplog):
    model, optimizer = two
    monitor = watch(model, optimizer)

    def explode(*args):
        raise RuntimeError("broken on purpose")

    monitor._probes["tasks"].compare = explode
    losses = losses_of(model)
    assert monitor.combine_losses(losses) == losses["where"] + losses["what"]
    monitor.step()
    assert ("X101", "tasks") in {alert.identity for alert in monitor.alerts}
    assert isinstance(monitor, forewarn.Monitor)
