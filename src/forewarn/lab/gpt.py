"""A small decoder-only transformer, the language model of the examples."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

INIT_STD = 0.02  # GPT-2 (Radford et al. 2019); logits start near zero, and so the loss near ln(vocab_size)


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a `GPT`; the defaults train on a CPU."""

    vocab_size: int = 256
    """Number of different tokens; 256 reads any text byte by byte."""

    context: int = 64
    """Number of tokens that the model can see."""

    depth: int = 4
    """Number of blocks."""

    heads: int = 4
    """Number of attention heads in each block; divides `width`."""

    width: int = 128
    """Number of features that each token carries from block to block."""

    dropout: float = 0.0
    """Share of the attention weights and of the block outputs set to zero while training."""

    qk_norm: bool = False
    """Normalize queries and keys, which bounds the attention logits (Henry et al. 2020)."""

    tied: bool = True
    """Use the token embedding as the output head too: one parameter in two places."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads: choose a multiple of heads")


class Attention(nn.Module):
    """Causal self-attention: each token reads from itself and the tokens before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        head_width = config.width // config.heads
        self.heads = config.heads
        self.dropout = config.dropout
        self.scale: float | None = None  # of the logits; None is 1/√head_width
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.query_norm = nn.RMSNorm(head_width) if config.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(head_width) if config.qk_norm else nn.Identity()
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, context, 3 · width] → three tensors of [batch, heads, context, head_width]
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            self.query_norm(query),
            self.key_norm(key),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.scale,
        )
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return output


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, applied to each token separately."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.width, 4 * config.width)
        self.output = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.output(functional.gelu(self.input(x)))
        return output


class Block(nn.Module):
    """Attention, then feed-forward, each normalized before and added to the residual stream after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = x + self.dropout(self.attention(self.attention_norm(x)))
        output: Tensor = attended + self.dropout(self.mlp(self.mlp_norm(attended)))
        return output


class GPT(nn.Module):
    """A pre-norm decoder in the manner of GPT-2, with learned positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Draw new weights from the global generator, as needed after `to_empty()` on a meta model."""
        # Each block adds twice to the residual stream: smaller additions keep its variance from growing with depth.
        residual_std = INIT_STD / math.sqrt(2 * self.config.depth)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_residual = name.startswith("blocks.") and name.endswith(".output")
                nn.init.normal_(module.weight, std=residual_std if is_residual else INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits `[batch, length, vocab_size]`; given targets, the mean cross-entropy instead, in nats per token."""
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ValueError(
                f"{length} tokens exceed the context of {self.config.context}: shorten them or raise context"
            )
        x: Tensor = self.token_embedding(tokens) + self.position_embedding(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over all positions, for use as `criterion(model(inputs), targets)`."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
