"""How the example GPT changes with its width, in standard parametrisation and in muP."""

import math

import pytest
import torch
from torch.nn import functional

from forewarn.lab.gpt import GPT, GPTConfig
from forewarn.lab.mup import Parametrization, adam_groups, gpt_at_width

BASE = 32
TOKENS = torch.arange(8).view(1, 8)


def make(width: int, parametrization: Parametrization) -> GPT:
    torch.manual_seed(0)
    return gpt_at_width(GPTConfig(width=width, depth=2, context=8, tied=False), BASE, parametrization)


@pytest.mark.parametrize("parametrization", Parametrization)
def test_at_the_base_width_it_is_the_example_gpt(parametrization):
    model = make(BASE, parametrization)
    torch.manual_seed(0)
    torch.testing.assert_close(model(TOKENS), GPT(model.config)(TOKENS), rtol=1e-6, atol=1e-7)
    assert [group["lr"] for group in adam_groups(model, 1e-3, BASE, parametrization)] == [1e-3, 1e-3]


@pytest.mark.parametrize(
    ("parametrization", "head", "hidden_lr"),
    [(Parametrization.STANDARD, 0.01, 1e-3), (Parametrization.MUP, 0.02, 2.5e-4)],
)
def test_at_four_times_the_width_weights_and_learning_rates_are_scaled(parametrization, head, hidden_lr):
    model = make(4 * BASE, parametrization)
    expected = {"blocks.0.attention.qkv": 0.01, "blocks.1.mlp.input": 0.01, "blocks.1.mlp.output": 0.01 / 2,
                "token_embedding": 0.02, "head": head}  # fmt: skip
    for name, std in expected.items():
        assert model.get_submodule(name).weight.std().item() == pytest.approx(std, rel=0.05)
    hidden, others = adam_groups(model, 1e-3, BASE, parametrization)
    assert (hidden["lr"], others["lr"]) == (hidden_lr, 1e-3)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(hidden["params"]) + len(others["params"]) == len(named)
    assert all(
        "blocks." in named[id(each)] and named[id(each)].endswith(".weight") and each.dim() == 2
        for each in hidden["params"]
    )
    assert {named[id(each)] for each in others["params"] if each.dim() == 2} == {
        "token_embedding.weight", "position_embedding.weight", "head.weight",
    }  # fmt: skip


def test_mup_divides_logits_by_the_growth_and_attention_logits_by_the_head_width():
    model = make(4 * BASE, Parametrization.MUP)
    x = torch.randn(1, 8, 4 * BASE)
    torch.testing.assert_close(model.head(x), functional.linear(x, model.head.weight) / 4)
    attention = model.blocks[0].attention
    query, key, value = attention.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    logits = query @ key.transpose(-2, -1) / 32 * math.sqrt(8)  # head width 32, at the base width 8
    hidden = torch.ones(8, 8, dtype=torch.bool).triu(1)
    mixed = logits.masked_fill(hidden, -math.inf).softmax(-1) @ value
    torch.testing.assert_close(attention(x), attention.output(mixed.transpose(1, 2).flatten(-2)))


def test_a_tied_head_is_refused():
    with pytest.raises(ValueError, match="tied=False"):
        gpt_at_width(GPTConfig(width=BASE), BASE, Parametrization.MUP)
