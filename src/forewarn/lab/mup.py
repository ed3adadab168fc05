"""The example GPT at any width, in standard parametrization or in muP (Yang et al. 2022, Tensor Programs V).

A parametrization says how initial weights, learning rates and multipliers change with width. At the base width both are
the example GPT itself. In a wider model, standard keeps the size of the first activations. muP also keeps the size of
the updates, so that the best learning rate of a narrow model suits a wide one.

| with growth = width / base width | standard          | muP                  |
|----------------------------------|-------------------|----------------------|
| initial std of embeddings        | as it is          | as it is             |
| initial std of hidden weights    | / √growth         | / √growth            |
| initial std of the head          | / √growth         | as it is             |
| logits                           | as they are       | / growth             |
| attention logits                 | q·k / √head_width | q·k / head_width · √(base head width) |
| Adam's lr of hidden weights      | as it is          | / growth             |
| Adam's lr of all else            | as it is          | as it is             |
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from forewarn.lab.gpt import GPT, Attention, GPTConfig


class Parametrization(StrEnum):
    """How a model changes with its width."""

    STANDARD = "standard"
    MUP = "mup"


class Readout(nn.Linear):
    """An output head without bias whose logits are multiplied by `multiplier`."""

    def __init__(self, in_features: int, out_features: int, multiplier: float) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.multiplier = multiplier

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.multiplier


def gpt_at_width(config: GPTConfig, base_width: int, parametrization: Parametrization) -> GPT:
    """A new GPT whose weights are drawn from the global generator, scaled to its width."""
    if config.tied:
        raise ValueError("an embedding that is also the head cannot be scaled for both: set tied=False")
    model = GPT(config)
    growth = config.width / base_width
    is_mup = parametrization is Parametrization.MUP
    with torch.no_grad():
        for weight in hidden_weights(model):
            weight.div_(math.sqrt(growth))
        if not is_mup:
            model.head.weight.div_(math.sqrt(growth))
    if is_mup:
        head = Readout(config.width, config.vocab_size, 1 / growth)
        head.weight = model.head.weight
        model.head = head
        head_width = config.width // config.heads
        for module in model.modules():
            if isinstance(module, Attention):
                module.scale = math.sqrt(head_width / growth) / head_width
    return model


def adam_groups(model: GPT, lr: float, base_width: int, parametrization: Parametrization) -> list[dict[str, Any]]:
    """Parameter groups for Adam or AdamW: hidden weights, and all others."""
    growth = model.config.width / base_width
    hidden = hidden_weights(model)
    hidden_ids = {id(weight) for weight in hidden}
    hidden_lr = lr / growth if parametrization is Parametrization.MUP else lr
    return [
        {"params": hidden, "lr": hidden_lr},
        {"params": [parameter for parameter in model.parameters() if id(parameter) not in hidden_ids], "lr": lr},
    ]


def hidden_weights(model: GPT) -> list[Tensor]:
    """The matrices whose two dimensions both grow with the width."""
    return [module.weight for module in model.blocks.modules() if isinstance(module, nn.Linear)]
