"""Three small classifiers for the generated data: for feature vectors, images and sequences."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of the given sizes, input and output included, with an activation between each two."""

    def __init__(self, sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(f"sizes {tuple(sizes)} make no layer: give at least the input and the output size")
        layers: list[nn.Module] = []
        for num_inputs, num_outputs in pairwise(sizes):
            layers += [nn.Linear(num_inputs, num_outputs), activation()]
        self.layers = nn.Sequential(*layers[:-1])  # the last layer returns logits

    def forward(self, features: Tensor) -> Tensor:
        """Logits `[batch, sizes[-1]]` of features `[batch, sizes[0]]`."""
        logits: Tensor = self.layers(features)
        return logits


class CNN(nn.Module):
    """Stages of convolution, batch normalization, ReLU and pooling; `channels` starts with the image's own."""

    def __init__(self, channels: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(_stage(before, after) for before, after in pairwise(channels)))
        self.head = nn.Linear(channels[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[batch, num_classes]` of images `[batch, channels[0], height, width]`."""
        features: Tensor = self.stages(images)
        logits: Tensor = self.head(features.mean(dim=(-2, -1)))
        return logits


def _stage(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False),  # BatchNorm would cancel a bias
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class LSTMClassifier(nn.Module):
    """An LSTM that reads a sequence to its end and classifies it by the last state."""

    def __init__(self, num_features: int, width: int, num_classes: int, depth: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_features, width, num_layers=depth, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, sequences: Tensor) -> Tensor:
        """Logits `[batch, num_classes]` of sequences `[batch, length, num_features]`."""
        states, _ = self.lstm(sequences)
        logits: Tensor = self.head(states[:, -1])
        return logits
