"""Small models of many kinds, each with its optimizer, its data and, where it needs one, its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 24


def classes(count: int = 192, width: int = 12, num_classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, width)
    return inputs, (inputs @ torch.randn(width, num_classes)).argmax(1)


def loader(*tensors: torch.Tensor, batch_size: int = 24, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size, shuffle=True, **options)


def mlp(outputs: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


def adam(model: nn.Module, lr: float = 2e-3) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr)


def mlp_with_dropout() -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))
    return model, adam(model), loader(*classes())


def convolution_with_batch_norm() -> tuple[Any, ...]:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4)
    )
    labels = torch.randint(4, (96,))
    images = torch.randn(4, 1, 8, 8)[labels] + torch.randn(96, 1, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-4)
    return model, optimizer, loader(images, labels), nn.CrossEntropyLoss()


def sequences() -> torch.Tensor:
    """Cyclic sequences that skip by one to four."""
    starts, strides = torch.randint(VOCABULARY, (64, 1)), torch.randint(1, 5, (64, 1))
    return (starts + strides * torch.arange(13)) % VOCABULARY


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(VOCABULARY, 16), nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return logits


def lstm() -> tuple[Any, ...]:
    model, tokens = Recurrent(), sequences()
    return model, adam(model, 5e-3), loader(tokens[:, :-1], tokens[:, 1:])


class Transformer(nn.Module):
    """With tied weights; returns its logits and its loss, as minGPT does."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.embedding, self.position = nn.Embedding(VOCABULARY, 16), nn.Parameter(torch.randn(12, 16) * 0.02)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.head(self.encoder(self.embedding(tokens) + self.position, mask=mask, is_causal=True))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tied_transformer() -> tuple[Any, ...]:
    model, tokens = Transformer(), sequences()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 50))  # it starts at 0
    return model, optimizer, loader(tokens[:, :-1], tokens[:, 1:])


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.kind, self.size = (
            nn.Sequential(nn.Linear(12, 32), nn.ReLU()),
            nn.Linear(32, 5),
            nn.Linear(32, 1),
        )

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(inputs)
        return self.kind(hidden), self.size(hidden)


def two_tasks() -> tuple[Any, ...]:
    model, (inputs, kinds) = TwoOutputs(), classes()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        kind, size = model(batch[0])
        return functional.cross_entropy(kind, batch[1]) + functional.mse_loss(size, batch[2])

    return model, adam(model), loader(inputs, kinds, inputs[:, :2].sum(1, keepdim=True)), loss


class Output:
    def __init__(self, loss: torch.Tensor, logits: torch.Tensor) -> None:
        self.loss, self.logits = loss, logits


class HuggingFaceStyle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Recurrent()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.body(input_ids)
        return Output(functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


def hugging_face_style() -> tuple[Any, ...]:
    model, tokens = HuggingFaceStyle(), sequences()
    return model, adam(model, 5e-3), [{"input_ids": part, "labels": part} for part in tokens.split(16)]


def policy() -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    batch = (torch.randn(64, 4), torch.randint(2, (64,)), torch.randn(64))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        chosen = functional.log_softmax(model(batch[0]), 1).gather(1, batch[1][:, None])[:, 0]
        return -(chosen * batch[2]).mean()

    return model, adam(model, 1e-2), batch, loss


def game() -> tuple[Any, ...]:
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return {"G": generator, "D": discriminator}, [adam(generator), adam(discriminator)], torch.randn(32, 2)


def regression() -> tuple[Any, ...]:
    model, inputs = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 1)), torch.randn(128, 6)
    return model, adam(model), loader(inputs, inputs[:, :1] * inputs[:, 1:2]), nn.MSELoss()


def frozen_trunk() -> tuple[Any, ...]:
    model = mlp()
    model[0].requires_grad_(False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.Adam(trainable, 2e-3), loader(*classes())


HEALTHY: dict[str, Callable[[], tuple[Any, ...]]] = {
    make.__name__: make
    for make in (
        mlp_with_dropout, convolution_with_batch_norm, lstm, tied_transformer, two_tasks, hugging_face_style, policy,
        game, regression, frozen_trunk,
    )
}  # fmt: skip
