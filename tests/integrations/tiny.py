"""A small model, its data and what a step should read, shared by the tests of the adapters."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import forewarn

VOCABULARY = 24


def llama(**settings) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.2,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes | settings))


def rows(number: int, length: int = 12) -> list[dict[str, Tensor]]:
    """Sequences that count up from a random start; some of their first labels are hidden."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(number):
        start = int(torch.randint(VOCABULARY, (), generator=generator))
        tokens = (start + torch.arange(length)) % VOCABULARY
        labels = tokens.clone()
        labels[: index % 5] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def token_losses(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> Tensor:
    """The loss of every token that counts."""
    logits = torch.cat([model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1) for batch in batches])
    labels = torch.cat([batch["labels"][:, 1:].flatten() for batch in batches])
    return functional.cross_entropy(logits, labels, reduction="none")[labels != -100]


class Float64Step:
    """One optimizer step of a causal language model, in float64: the loss per token and the norm of its gradient."""

    def __init__(self, model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> None:
        twin = copy.deepcopy(model).double()
        for module in twin.modules():
            vars(module).pop("forward", None)  # bound by a library to the model itself, whose weights it would use
        twin.zero_grad()
        loss = token_losses(twin, batches).mean()
        loss.backward()
        self.loss = loss.item()
        gradients = [parameter.grad for parameter in twin.parameters() if parameter.grad is not None]
        self.norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}


def ratios(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    """‖Δw‖ / ‖w‖ of every parameter."""
    return {name: float((after[name] - weight).norm() / weight.norm()) for name, weight in before.items()}


def series(path: Path, name: str, scope: str = "") -> list[float]:
    with forewarn.open_run(path) as run:
        return run.series(name, scope).values.tolist()


def everything(path: Path) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Every reading of a run except for time, memory and plan; NaN as text, so that it equals itself."""
    with forewarn.open_run(path) as run:
        return {
            (name, scope): list(zip(one.steps.tolist(), map(str, one.values.tolist()), strict=True))
            for name in run.names()
            if not name.startswith(("speed/", "system/", "monitor/overhead_share", "monitor/resumed", "train/lr_plan"))
            for scope in run.scopes(name)
            for one in [run.series(name, scope)]
        }
