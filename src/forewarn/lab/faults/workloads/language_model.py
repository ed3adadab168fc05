"""A small GPT on characters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import text, windows
from forewarn.lab.faults.workload import Trait, workload

WIDTH, HEADS, DEPTH, CONTEXT = 48, 4, 2, 32


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = CausalAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    def __init__(self, num_symbols: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(num_symbols, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, num_symbols, bias=False)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


@workload(
    "gpt", num_steps=200,
    traits={Trait.TARGETS, Trait.TOKENS, Trait.ATTENTION, Trait.WARM_UP, Trait.ADAM, Trait.WEIGHT_DECAY,
            Trait.ACCUMULATION, Trait.CLASSES},
)  # fmt: skip
def gpt(session: Session) -> float:
    """A decoder with two blocks learns characters; AdamW, warm-up and cosine by hand, two micro-batches, clipping."""
    train, held_out, num_symbols = text()
    model = GPT(session.count("num_symbols", num_symbols))
    session.built(model)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=session.number("lr", 3e-3), betas=(0.9, 0.95),
    )  # fmt: skip
    session.optimizer(optimizer)
    monitor = session.watch(model, optimizer)
    warm_up, micro = session.number("warm_up", 20), 2
    size = session.count("batch_size", 8)
    for step in range(session.num_steps):
        rate = session.number("lr", 3e-3)
        if step < warm_up:
            rate *= (step + 1) / (warm_up + 1)
        else:
            progress = (step - warm_up) / (session.num_steps - warm_up)
            rate *= 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        running = 0.0
        for _ in range(micro):
            x, y = session.batch(*windows(train, size, CONTEXT))
            logits = model(x)
            loss = session.loss(functional.cross_entropy(logits.flatten(0, 1), y.flatten()))
            loss = loss / session.number("divisor", micro)
            loss.backward()
            running += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), session.number("clip", 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        monitor.step(running)
    torch.manual_seed(0)
    with evaluating(model):
        x, y = windows(held_out, 128, CONTEXT)
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
