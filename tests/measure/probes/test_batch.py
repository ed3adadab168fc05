"""What is read of a batch, and of the losses that several optimizers have."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.conftest import last


def step(model, optimizer, monitor, inputs, targets):
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    monitor.step(loss)


def test_the_scale_of_the_first_layers_input_is_that_of_numpy(small, watch):
    model, optimizer = small
    monitor = watch(nn.Sequential(model), optimizer)
    inputs = 3 + 5 * torch.randn(6, 4)
    step(monitor._loop.model, optimizer, monitor, inputs, torch.tensor([0, 1] * 3))
    values = inputs.double().numpy()
    assert last(monitor, "batch/input_mean", "0.0") == pytest.approx(values.mean(), rel=1e-5)
    assert last(monitor, "batch/input_rms", "0.0") == pytest.approx(np.sqrt((values**2).mean()), rel=1e-5)


def test_an_input_that_the_model_scales_itself_is_read_after_that(watch):
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, pixels):
            return self.layer(pixels / 255)

    model = Scaling()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    step(model, optimizer, monitor, torch.full((3, 4), 255.0), torch.tensor([0, 1, 1]))
    assert last(monitor, "batch/input_rms", "layer") == 1.0


class Attending(nn.Module):
    """A layer with a matrix of its own beside a child, as in graph attention."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 2))
        self.activation = nn.LeakyReLU()

    def forward(self, x):
        return self.activation(x @ self.matrix)


class Positioned(nn.Module):
    """A model with a matrix beside its layers, and inputs that it scales itself."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(3, 4))
        self.layer = Attending()

    def forward(self, pixels):
        return self.layer(pixels / 255 + 0 * self.positions)


class Functional(nn.Module):
    """A model that holds all its weights in one list, as for a second order of gradients."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(8, 4), torch.randn(2, 8)])

    def forward(self, x):
        return functional.linear(functional.linear(x, self.weights[0]).relu(), self.weights[1])


@pytest.mark.parametrize(
    ("make", "layer", "size"), [(Attending, "0", 255.0), (Positioned, "0.layer", 1.0), (Functional, "0", 255.0)]
)
def test_a_layer_of_ones_own_sees_the_batch(make, layer, size, watch):
    model = nn.Sequential(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    step(model, optimizer, monitor, torch.full((3, 4), 255.0), torch.tensor([0, 1, 1]))
    assert last(monitor, "batch/input_rms", layer) == pytest.approx(size)


def test_only_the_same_batch_is_a_repetition(small, watch):
    monitor = watch(*small)
    inputs, targets = torch.randn(6, 4), torch.tensor([0, 1] * 3)
    for batch in (inputs, inputs, inputs.flip(0), inputs + 1, inputs + 1):
        step(*small, monitor, batch, targets)
    assert monitor.history.series("batch/repeated").values.tolist() == [1, 0, 0, 1]


def test_a_step_of_several_passes_repeats_another_only_if_all_its_inputs_do(small, watch):
    """As in a game: every one begins in the same state, and goes on in others."""
    model, optimizer = small
    monitor = watch(model, optimizer)
    start, later = torch.ones(1, 4), torch.randn(3, 1, 4)
    for state in (*later, later[2]):
        optimizer.zero_grad()
        loss = model(start).sum() + model(state).sum()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert monitor.history.series("batch/repeated").values.tolist() == [0, 0, 1]


@pytest.mark.parametrize("log_softmax", [False, True])
def test_the_classes_of_the_targets_show_in_the_gradient(log_softmax, watch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LogSoftmax(-1) if log_softmax else nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    optimizer.zero_grad()
    loss = functional.nll_loss if log_softmax else functional.cross_entropy
    loss(model(torch.randn(7, 4)), torch.tensor([4, 4, 2, 2, 2, 0, 4])).backward()
    optimizer.step()
    monitor.step(1.0)
    counted = [last(monitor, f"batch/{name}") for name in ("num_targets", "num_classes", "middle_class")]
    assert counted == [7, 3, 2]


def test_a_loss_with_the_wrong_sign_shows_no_classes(small, watch):
    model, optimizer = small
    wide = nn.Sequential(model, nn.Linear(2, 5))
    monitor = watch(wide, optimizer)
    (-functional.cross_entropy(wide(torch.randn(6, 4)), torch.arange(6) % 5)).backward()
    optimizer.step()
    monitor.step(1.0)
    assert not len(monitor.history.series("batch/num_classes"))


def test_probabilities_are_told_from_logits(small, watch):
    model, optimizer = small
    for outer, share in ((nn.Softmax(-1), 1.0), (nn.Identity(), 0.0)):
        whole = nn.Sequential(model, outer)
        monitor = watch(whole, optimizer)
        step(whole, optimizer, monitor, torch.randn(6, 4), torch.tensor([0, 1] * 3))
        assert last(monitor, "activation/probability_rows") == share


@pytest.mark.parametrize("separate", [True, False])
def test_two_optimizers_play_a_game_if_each_has_a_backward_pass_of_its_own(separate, watch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    monitor = watch(model, [first, second])
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        first.step()
        if separate:
            model.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
        second.step()
        monitor.step(1.0)
    assert (monitor.history.series("update/separate_losses").values == separate).all()
