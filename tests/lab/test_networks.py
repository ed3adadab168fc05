"""The small classifiers: their shapes, and that each learns the data generated for it."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab import data
from forewarn.lab.networks import CNN, MLP, LSTMClassifier


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def losses(model: nn.Module, samples: Tensor, labels: Tensor, num_steps: int) -> list[float]:
    """Losses of training on all samples at once."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    values = []
    for _ in range(num_steps):
        loss = functional.cross_entropy(model(samples), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def accuracy(model: nn.Module, samples: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return (model(samples).argmax(dim=-1) == labels).float().mean().item()


CASES = {
    "mlp": (lambda: MLP([16, 64, 64, 4]), lambda: data.classification(1200, num_features=16, num_classes=4)),
    "cnn": (lambda: CNN([1, 8, 16], num_classes=4), lambda: data.images(1200, num_classes=4)),
    "lstm": (lambda: LSTMClassifier(2, width=32, num_classes=4), lambda: data.sequences(1200, 16, num_classes=4)),
}


@pytest.mark.parametrize("case", CASES)
def test_each_network_learns_its_data_where_a_linear_model_does_not(case: str) -> None:
    build, generate = CASES[case]
    (samples, unseen_samples), (labels, unseen_labels) = (data.split(part, 0.25) for part in generate())
    network, linear = build(), nn.Sequential(nn.Flatten(), nn.Linear(samples[0].numel(), 4))

    values = losses(network, samples, labels, num_steps=60)
    losses(linear, samples, labels, num_steps=60)

    assert values[-1] < 0.5 * values[0]
    assert accuracy(network, unseen_samples, unseen_labels) > 0.8
    assert accuracy(linear, unseen_samples, unseen_labels) < 0.65


def test_an_mlp_ends_with_a_linear_layer() -> None:
    layers = MLP([5, 7, 3], activation=nn.Tanh).layers
    assert [type(layer) for layer in layers] == [nn.Linear, nn.Tanh, nn.Linear]
    assert MLP([5, 7, 3])(torch.zeros(2, 5)).shape == (2, 3)


def test_an_mlp_without_a_layer_is_explained() -> None:
    with pytest.raises(ValueError, match="at least the input and the output size"):
        MLP([5])


def test_a_cnn_takes_images_of_any_size() -> None:
    model = CNN([3, 4, 8], num_classes=5)
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 5)
    assert model(torch.zeros(2, 3, 24, 32)).shape == (2, 5)


def test_an_lstm_classifies_sequences_of_any_length() -> None:
    model = LSTMClassifier(num_features=2, width=8, num_classes=3, depth=2)
    assert model(torch.zeros(4, 10, 2)).shape == (4, 3)
    assert model(torch.zeros(4, 1, 2)).shape == (4, 3)
