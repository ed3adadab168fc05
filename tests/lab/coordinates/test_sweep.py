"""Real trainings at several widths: standard updates grow with width, those of muP do not."""

import copy
import math

import pytest
import torch
from torch.nn import functional

from forewarn.lab.coordinates.exponents import Term, Trend, unclear, unstable
from forewarn.lab.coordinates.sweep import ADAM_EPS, BATCH_SIZE, CONTEXT, DEPTH, HEADS, check_widths, sweep
from forewarn.lab.data import TokenBatches, stdlib_text
from forewarn.lab.gpt import GPTConfig, token_loss
from forewarn.lab.mup import Parametrization, adam_groups, gpt_at_width

WIDTHS = (32, 64, 128)
NUM_SEEDS = 4  # they train on Python's own sources: with two, some versions leave a layer unclear
HIDDEN = [f"blocks.{block}.{layer}" for block in range(DEPTH) for layer in
          ("attention.qkv", "attention.output", "mlp.input", "mlp.output")]  # fmt: skip


@pytest.fixture(scope="module")
def sweeps():
    told = []
    found = {each: sweep(each, WIDTHS, 4, NUM_SEEDS, 1e-3, told.append) for each in Parametrization}
    assert len(told) == len(Parametrization) * len(WIDTHS) * NUM_SEEDS
    return found


@pytest.mark.ci
def test_standard_updates_of_every_hidden_layer_grow_with_width(sweeps):
    growths = sweeps[Parametrization.STANDARD].growths()
    for layer in [*HIDDEN, "head"]:
        found = growths[layer][Term.UPDATE]
        assert found.exponent - 2 * found.error > 0.3, layer
        assert found.trend is Trend.GROWS
    assert {*HIDDEN, "head"} <= set(unstable(growths))


@pytest.mark.ci
def test_mup_updates_of_every_layer_stay(sweeps):
    growths = sweeps[Parametrization.MUP].growths()
    for layer, terms in growths.items():
        assert abs(terms[Term.UPDATE].exponent) <= 0.25, layer
    assert not unstable(growths)
    assert not unclear(growths)
    assert growths["head"][Term.PASSED_ON].trend is Trend.SHRINKS  # by design: its first weights matter less and less


@pytest.mark.ci
def test_at_the_narrowest_width_both_are_the_same_model(sweeps):
    standard, mup = (sweeps[each] for each in Parametrization)
    assert standard.losses[0] == pytest.approx(mup.losses[0], rel=1e-4)
    assert standard.losses[-1].mean() < mup.losses[-1].mean()  # a wide standard model moves faster
    assert standard.num_steps == mup.num_steps == 4


@pytest.mark.ci
def test_an_embedding_has_its_own_term_only(sweeps):
    values = sweeps[Parametrization.MUP].values
    assert set(values["token_embedding"]) == {Term.UPDATE}
    assert set(values["head"]) == set(Term)
    assert len(values) == 2 + 6 * DEPTH + 2


@pytest.mark.ci
def test_coordinates_equal_those_of_a_training_by_hand(sweeps):
    torch.manual_seed(1)
    width, layer = 64, "blocks.1.mlp.input"
    config = GPTConfig(context=CONTEXT, depth=DEPTH, heads=HEADS, width=width, tied=False)
    model = gpt_at_width(config, 32, Parametrization.MUP)
    first = copy.deepcopy(model)
    optimizer = torch.optim.Adam(adam_groups(model, 1e-3, 32, Parametrization.MUP), eps=ADAM_EPS)
    batches = TokenBatches(stdlib_text(), BATCH_SIZE, CONTEXT, seed=1)
    for _ in range(4):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        token_loss(model(inputs), targets).backward()
        optimizer.step()
    seen = {}
    for name, one in (("t", model), ("0", first)):
        one.get_submodule(layer).register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: args[0]})
        )
    inputs, targets = next(batches)
    with torch.no_grad():
        loss = token_loss(model(inputs), targets)
        first(inputs)
        w_t, w_0 = (one.get_submodule(layer).weight for one in (model, first))
        expected = {
            Term.UPDATE: functional.linear(seen["t"], w_t - w_0),
            Term.PASSED_ON: functional.linear(seen["t"] - seen["0"], w_0),
            Term.INPUT: seen["t"],
            Term.INPUT_CHANGE: seen["t"] - seen["0"],
        }
    found = sweeps[Parametrization.MUP]
    for term, rows in expected.items():
        rms = rows.norm(dim=-1).mean().item() / math.sqrt(rows.shape[-1])
        assert found.values[layer][term][-1, 1, 1] == pytest.approx(rms, rel=1e-4), term
    assert found.losses[1, 1] == pytest.approx(loss.item(), rel=1e-4)


def test_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    sweep(Parametrization.STANDARD, (8, 12, 16), 1, 1, 1e-3, lambda words: None)
    assert torch.equal(state, torch.get_rng_state())


def test_widths_that_tell_nothing_are_refused():
    with pytest.raises(ValueError, match="2 widths are too few"):
        check_widths((32, 64, 64))
    with pytest.raises(ValueError, match="width 30 does not split into 4 attention heads: give multiples of 4"):
        check_widths((30, 64, 128))
