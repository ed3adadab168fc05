"""The language model of the examples: its shapes, its first loss, and that it learns."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch.nn import functional

from forewarn.lab.data import TokenBatches, stdlib_text
from forewarn.lab.gpt import GPT, GPTConfig

SMALL = GPTConfig(context=16, depth=2, heads=2, width=32)


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def some_tokens(length: int = 16) -> torch.Tensor:
    return torch.randint(256, (3, length))


def test_it_gives_one_logit_per_token_and_symbol() -> None:
    assert GPT(SMALL)(some_tokens()).shape == (3, 16, 256)
    assert GPT(SMALL)(some_tokens(length=5)).shape == (3, 5, 256)


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, tokens, targets = GPT(SMALL), some_tokens(), some_tokens()
    log_probabilities = functional.log_softmax(model(tokens), dim=-1)
    expected = -log_probabilities.gather(-1, targets.unsqueeze(-1)).mean()
    torch.testing.assert_close(model(tokens, targets), expected)


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    assert GPT(SMALL)(some_tokens(), some_tokens()).item() == pytest.approx(math.log(256), abs=0.05)


def test_a_token_never_sees_the_tokens_after_it() -> None:
    model, tokens = GPT(SMALL), some_tokens()
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    torch.testing.assert_close(model(tokens)[:, :9], model(changed)[:, :9])
    assert not torch.allclose(model(tokens)[:, 9:], model(changed)[:, 9:])


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_one_parameter(tied: bool) -> None:
    model = GPT(replace(SMALL, tied=tied))
    names = {name for name, _ in model.named_parameters()}
    assert (model.head.weight is model.token_embedding.weight) == tied
    assert ("head.weight" in names) != tied


def test_the_number_of_parameters_is_the_closed_form() -> None:
    width = SMALL.width
    block = 12 * width**2 + 13 * width  # four attention and eight feed-forward squares; nine biases, four norm vectors
    expected = (256 + SMALL.context) * width + SMALL.depth * block + 2 * width
    assert sum(parameter.numel() for parameter in GPT(SMALL).parameters()) == expected


def test_layers_that_feed_the_residual_stream_start_smaller() -> None:
    block = GPT(replace(SMALL, depth=8, width=128)).blocks[0]
    for layer in (block.attention.output, block.mlp.output):
        assert layer.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert block.mlp.input.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_qk_norm_makes_attention_ignore_the_scale_of_queries_and_keys() -> None:
    model, tokens = GPT(replace(SMALL, qk_norm=True)), some_tokens()
    before = model(tokens)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[: 2 * SMALL.width] *= 100
    # The norm's epsilon, next to queries that start small, leaves a little of the scale.
    torch.testing.assert_close(model(tokens), before, rtol=0, atol=1e-3)


def test_dropout_acts_only_while_training() -> None:
    model, tokens = GPT(replace(SMALL, dropout=0.5)), some_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_a_model_built_without_memory_starts_like_any_other() -> None:
    with torch.device("meta"):
        model = GPT(replace(SMALL, qk_norm=True))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    model.init_weights()
    assert model(some_tokens(), some_tokens()).item() == pytest.approx(math.log(256), abs=0.05)


def test_wrong_sizes_are_explained() -> None:
    with pytest.raises(ValueError, match="width 32 does not split into 5 heads"):
        replace(SMALL, heads=5)
    with pytest.raises(ValueError, match="17 tokens exceed the context of 16"):
        GPT(SMALL)(some_tokens(length=17))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_it_learns_python_source(qk_norm: bool) -> None:
    config = GPTConfig(context=32, depth=2, heads=2, width=64, qk_norm=qk_norm)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = TokenBatches(stdlib_text(), batch_size=16, context=config.context, seed=0)
    losses = []
    for inputs, targets in islice(batches, 60):
        loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5.3
    assert sum(losses[-10:]) / 10 < 3.2
