"""What is said about the outputs of layers, against forward passes written out by hand."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import forewarn
from forewarn.measure.layers import is_leaf
from forewarn.measure.nested import nested_tensors
from forewarn.types import Reason
from tests.conftest import last
from tests.test_no_host_sync import Counting


def step(model, optimizer, monitor, *batches):
    loss = torch.zeros(())
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)


def sgd(model, lr=0.0):
    return torch.optim.SGD(model.parameters(), lr=lr)


def batch(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def values(monitor, quantity, scope):
    return last(monitor, f"activation/{quantity}", scope)


def check(monitor, scope, expected):
    expected = np.asarray(expected, np.float64)
    centred = expected - expected.mean()
    wanted = {
        "mean": expected.mean(), "std": expected.std(), "min": expected.min(), "max": expected.max(),
        "abs_max": np.abs(expected).max(), "zero_fraction": (expected == 0).mean(), "nonfinite": 0,
        "kurtosis": (centred**4).mean() / (centred**2).mean() ** 2,
    }  # fmt: skip
    for quantity, value in wanted.items():
        assert values(monitor, quantity, scope) == pytest.approx(value, rel=1e-4, abs=1e-6), quantity


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def by_hand(model, x):
    hidden = x @ model[0].weight.T + model[0].bias
    return hidden.detach().numpy(), hidden.clamp(min=0).detach().numpy()


def test_every_leaf_is_described_as_a_forward_pass_by_hand_says(watch):
    model, x = net(), batch(20, 6)
    monitor = watch(model, optimizer := sgd(model))
    step(model, optimizer, monitor, x)
    hidden, rectified = by_hand(model, x)
    check(monitor, "0", hidden)
    check(monitor, "1", rectified)
    assert monitor.history.panel("activation/mean").scopes == ("0", "1", "2", "3")


def test_micro_batches_of_any_size_are_merged_exactly(watch):
    model, x = net(), batch(20, 6)
    monitor = watch(model, optimizer := sgd(model))
    step(model, optimizer, monitor, x[:3], x[3:15], x[15:])
    for scope, expected in zip(("0", "1"), by_hand(model, x), strict=True):
        check(monitor, scope, expected)


def test_a_layer_that_is_called_twice_is_one_layer(watch):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(self.layer(x))

    model, x = Shared(), batch(7, 4)
    monitor = watch(model, optimizer := sgd(model))
    step(model, optimizer, monitor, x)
    with torch.no_grad():
        first = x @ model.layer.weight.T + model.layer.bias
        second = first @ model.layer.weight.T + model.layer.bias
    check(monitor, "layer", torch.cat([first, second]).numpy())


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_recomputes_is_not_counted_twice(watch, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = net()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model, x = Checkpointed(), batch(20, 6).requires_grad_()
    monitor = watch(model, optimizer := sgd(model))
    step(model, optimizer, monitor, x)
    hidden, rectified = by_hand(model.block, x)
    check(monitor, "block.0", hidden)
    check(monitor, "block.1", rectified)


def test_an_output_that_is_changed_in_place_is_read_as_it_was(watch):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    monitor, x = watch(model, optimizer := sgd(model)), batch(20, 6)
    step(model, optimizer, monitor, x)
    assert values(monitor, "min", "0") == pytest.approx(by_hand(model, x)[0].min(), rel=1e-5)
    assert values(monitor, "min", "1") == 0


def test_a_large_output_is_read_in_every_odd_number_of_rows(watch):
    model, x = nn.Sequential(nn.Linear(6, 8)), batch(10, 31, 6)
    config = forewarn.Config(measure=forewarn.Measure(activation_rows=50))
    monitor = watch(model, optimizer := sgd(model), config=config)
    step(model, optimizer, monitor, x)
    check(monitor, "0", by_hand(model, x)[0].reshape(310, 8)[::7])


def test_tensors_in_tuples_mappings_and_dataclasses_are_found_by_their_place(watch):
    @dataclass
    class Kept:
        state: torch.Tensor

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return {"out": x * self.weight, "more": (x + 1, Kept(x + 2)), "index": x.argmax(), "none": None}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.several = nn.LSTM(3, 3), Several()

        def forward(self, x):
            return self.several(self.lstm(x)[0])["out"]

    model = Model()
    monitor = watch(model, optimizer := sgd(model))
    step(model, optimizer, monitor, batch(5, 3))
    scopes = monitor.history.panel("activation/mean").scopes
    assert scopes[:3] == ("lstm[0]", "lstm[1][0]", "lstm[1][1]")
    assert [each for each in scopes if each.startswith("several") and np.isfinite(values(monitor, "mean", each))] == [
        "several[out]", "several[more][0]", "several[more][1][state]",
    ]  # fmt: skip
    assert values(monitor, "mean", "several[more][0]") == pytest.approx(values(monitor, "mean", "lstm[0]") + 1)


def test_what_is_a_leaf():
    normal = parametrizations.weight_norm(nn.Linear(2, 2))
    model = nn.ModuleDict({"linear": normal, "attention": nn.MultiheadAttention(4, 2), "same": nn.Identity()})
    model["gated"] = nn.Sequential(nn.ReLU())
    for module in (model, model["gated"]):
        module.register_parameter("gate", nn.Parameter(torch.ones(2)))
    leaves = [name for name, module in model.named_modules() if is_leaf(name, module)]
    assert leaves == ["linear", "attention", "attention.out_proj", "gated", "gated.0"]


def test_deeply_nested_outputs_are_not_followed_for_ever():
    nested = torch.ones(1)
    for _ in range(5):
        nested = [nested]
    assert list(nested_tensors(nested)) == []


# ---- units ----


def dead_net(num_dead):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    with torch.no_grad():
        model[0].bias[:num_dead] = -100.0
        model[0].bias[num_dead:] = 0.0
    return model


def test_dead_units_are_those_that_never_fire_in_the_window(watch):
    model = dead_net(4)
    monitor = watch(model, optimizer := sgd(model))
    for seed in range(11):
        step(model, optimizer, monitor, batch(40, 6, seed=seed))
    share = monitor.history.series("activation/dead_fraction", "1")
    assert np.isnan(share.values[:9]).all(), "ten measured steps are the window"
    assert share.last == pytest.approx(0.4)
    with torch.no_grad():
        model[0].bias[0] = 100.0
    step(model, optimizer, monitor, batch(40, 6))
    assert values(monitor, "dead_fraction", "1") == pytest.approx(0.3), "one that fires again is alive at once"


def test_a_unit_that_fires_once_in_the_window_is_not_dead(watch):
    model = dead_net(4)
    optimizer = sgd(model)
    monitor = watch(model, optimizer)
    for at in range(12):
        with torch.no_grad():
            model[0].bias[0] = 100.0 if at == 5 else -100.0
        step(model, optimizer, monitor, batch(64, 6, seed=at))
    assert values(monitor, "dead_fraction", "1") == pytest.approx(0.3)


def test_few_samples_make_no_unit_dead(watch):
    model = dead_net(4)
    monitor = watch(model, optimizer := sgd(model))
    for seed in range(30):
        step(model, optimizer, monitor, batch(2, 6, seed=seed))
    assert values(monitor, "dead_fraction", "1") == 0


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "one_dimension"])
def test_units_of_convolutions_are_their_channels(watch, layout):
    dims = 1 if layout == "one_dimension" else 2
    conv = (nn.Conv1d if dims == 1 else nn.Conv2d)(2, 8, 3)
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4**dims, 2))
    with torch.no_grad():
        conv.bias[:6] = -100.0
        conv.bias[6:] = 1.0
    monitor = watch(model, optimizer := sgd(model))
    for seed in range(10):
        x = batch(20, 2, *[6] * dims, seed=seed)
        x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
        step(model, optimizer, monitor, x)
    assert values(monitor, "dead_fraction", "1") == pytest.approx(6 / 8)


def test_dead_units_go_on_where_a_resumed_run_left_off(watch):
    model = dead_net(4)
    monitor = watch(model, optimizer := sgd(model))
    for seed in range(7):
        step(model, optimizer, monitor, batch(40, 6, seed=seed))
    state = monitor.state_dict()
    other = watch(model, optimizer)
    monitor.close()
    other.load_state_dict(state)
    for seed in range(7, 10):
        step(model, optimizer, other, batch(40, 6, seed=seed))
    assert values(other, "dead_fraction", "1") == pytest.approx(0.4)


@pytest.mark.parametrize(("activation", "inside"), [(nn.Tanh, 0.0), (nn.Sigmoid, 0.0)])
def test_saturated_units_are_those_at_either_end_of_their_range(watch, activation, inside):
    model = nn.Sequential(nn.Linear(6, 10), activation(), nn.Linear(10, 3))
    with torch.no_grad():
        model[0].weight[:7] *= 1e5
        model[0].weight[7:] *= 0.01
        model[0].bias.fill_(inside)
    monitor = watch(model, optimizer := sgd(model))
    for seed in range(12):
        step(model, optimizer, monitor, batch(40, 6, seed=seed))
    assert values(monitor, "saturated_fraction", "1") == pytest.approx(0.7)


def test_rows_of_a_softmax_that_put_all_on_one_entry_are_counted(watch):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.softmax, self.out = nn.Parameter(torch.ones(())), nn.Softmax(dim=-1), nn.Linear(5, 2)

        def forward(self, x):
            return self.out(self.softmax(self.scale * x))

    x = torch.zeros(8, 5)
    x[:6, 0] = 100.0
    model = Attending()
    monitor = watch(model, optimizer := sgd(model))
    step(model, optimizer, monitor, x)
    assert values(monitor, "saturated_fraction", "softmax") == pytest.approx(6 / 8)


@pytest.mark.parametrize("answer", [nn.Sigmoid(), nn.Softmax(dim=-1)])
def test_the_answer_of_a_model_may_be_sure(watch, answer):
    model = nn.Sequential(nn.Linear(6, 4), answer)
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    monitor = watch(model, optimizer := sgd(model))
    for seed in range(12):
        step(model, optimizer, monitor, batch(40, 6, seed=seed))
    assert "activation/saturated_fraction" not in monitor.history.names()


def test_further_modules_are_chosen_by_name_and_their_zero_units_are_seen(watch):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            return torch.cat([self.inner(x), x[:, :2] * 0], dim=1)

    model = nn.Sequential(Gate(), nn.Linear(8, 2))
    monitor = watch(model, optimizer := sgd(model), config=forewarn.Config(measure=forewarn.Measure(modules=r"^0$")))
    for seed in range(10):
        step(model, optimizer, monitor, batch(40, 6, seed=seed))
    assert values(monitor, "dead_fraction", "0") == pytest.approx(2 / 8)


@pytest.mark.parametrize(
    ("norm", "shape", "axes"),
    [
        (nn.BatchNorm2d(4), (10, 4, 3, 3), (0, 2, 3)),
        (nn.GroupNorm(2, 4), (10, 4, 3, 3), (0, 2, 3)),
        (nn.LayerNorm(6), (10, 3, 6), (0, 1)),
        (nn.RMSNorm(6), (10, 3, 6), (0, 1)),
    ],
)
def test_the_channels_of_a_normalisation_are_compared(watch, norm, shape, axes):
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1.0, 1 + len(norm.weight)))
    model = nn.Sequential(norm)
    monitor, x = watch(model, optimizer := sgd(model)), batch(*shape)
    step(model, optimizer, monitor, x)
    found = norm(x).detach().double().numpy()
    assert values(monitor, "channel_mean_spread", "0") == pytest.approx(found.mean(axis=axes).std(), rel=1e-4, abs=1e-6)
    assert values(monitor, "channel_std_spread", "0") == pytest.approx(found.std(axis=axes).std(), rel=1e-4)


# ---- what cannot be seen, and what it costs ----


def unavailable(monitor):
    series = monitor.history.series("monitor/unavailable", "activation/mean")
    return [Reason(int(value)) for value in series.values if np.isfinite(value)]


@pytest.mark.parametrize("how", ["wrapped", "in_place"])
def test_a_compiled_model_says_once_that_its_layers_are_hidden(watch, how):
    model = net()
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    monitor = watch(model, optimizer := sgd(model))
    for _ in range(3):
        step(model, optimizer, monitor, batch(4, 6))
    assert unavailable(monitor) == [Reason.COMPILED]
    assert "activation/mean" not in monitor.history.names()


def test_a_forward_pass_that_is_bypassed_and_a_model_left_in_evaluation_mode_are_told_and_taken_back(watch):
    model = net()
    monitor = watch(model, optimizer := sgd(model))
    model.forward(batch(4, 6)).sum().backward()
    optimizer.step()
    monitor.step(1.0)
    step(model.eval(), optimizer, monitor, batch(4, 6))
    step(model.train(), optimizer, monitor, batch(4, 6))
    assert unavailable(monitor) == [Reason.NO_FORWARD_SEEN, Reason.EVALUATION_MODE, Reason.AVAILABLE]


def test_switched_off_nothing_is_measured(watch):
    model = net()
    monitor = watch(model, optimizer := sgd(model), config=forewarn.Config(measure=forewarn.Measure(activations=False)))
    step(model, optimizer, monitor, batch(4, 6))
    assert not [name for name in monitor.history.names() if name.startswith("activation/")]


def test_a_layer_more_adds_no_torch_operation_and_no_host_sync(watch):
    counted = {}
    for on in (False, True):
        for num in (2, 12):
            layers = [layer for _ in range(num) for layer in (nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Tanh())]
            model = nn.Sequential(*layers, nn.Linear(4, 2))
            monitor = watch(
                model, optimizer := sgd(model), config=forewarn.Config(measure=forewarn.Measure(activations=on))
            )
            step(model, optimizer, monitor, batch(4, 4))
            with Counting() as counting:
                step(model, optimizer, monitor, batch(4, 4))
            assert counting.syncs == 0
            counted[on, num] = counting.operations.total()
    assert counted[True, 12] - counted[False, 12] == counted[True, 2] - counted[False, 2]
    assert counted[True, 2] - counted[False, 2] <= 110, (  # 108 in torch 2.6
        "what compares the rows of the last hidden state, and looks at the logits, targets and inputs"
    )


def test_integers_and_empty_outputs_are_passed_over(watch):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.weight)[:0], x.argmax(-1), x[0, 0] * self.weight[0]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd = Odd()

        def forward(self, x):
            return self.odd(x)[2]

    model = Model()
    monitor = watch(model, optimizer := sgd(model))
    step(model, optimizer, monitor, batch(4, 3))
    assert monitor._loop.failures == {}
    assert np.isnan(values(monitor, "mean", "odd[0]"))
    assert np.isnan(values(monitor, "mean", "odd[1]"))
    assert np.isfinite(values(monitor, "mean", "odd[2]"))
