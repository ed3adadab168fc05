"""Entropy and largest logit per head, against attention written by hand in double precision."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forewarn.measure.engine.attention_heads import attention_summary


def by_hand(query, key, *, mask=None, causal=False, scale=None):
    """Per head: sums of entropy and of ln(keys seen), largest logit, queries that see a key; one query at a time."""
    query, key = (each.double().numpy() for each in (query, key))
    batch, heads, num_queries, width = query.shape
    num_keys = key.shape[-2]
    group = heads // key.shape[1]
    if mask is not None:
        mask = np.broadcast_to(mask.numpy(), (batch, heads, num_queries, num_keys))
    rows = {name: np.zeros(heads) for name in ("entropy_sum", "log_context_sum", "rows")}
    rows["max_logit"] = np.full(heads, -np.inf)
    for b, h, i in np.ndindex(batch, heads, num_queries):
        logits = key[b, h // group] @ query[b, h, i] * (width**-0.5 if scale is None else scale)
        seen = np.ones(num_keys, dtype=bool)
        if causal:
            seen[i + 1 :] = False
        if mask is not None and mask.dtype == bool:
            seen &= mask[b, h, i]
        elif mask is not None:
            seen &= mask[b, h, i] > -1e4
            logits = logits + mask[b, h, i]
        logits = logits[seen]
        if not len(logits):
            continue
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        weights = weights[weights > 0]
        rows["entropy_sum"][h] -= (weights * np.log(weights)).sum()
        rows["log_context_sum"][h] += np.log(len(logits))
        rows["max_logit"][h] = max(rows["max_logit"][h], logits.max())
        rows["rows"][h] += 1
    return rows


def check(summary, expected, rtol=1e-5):
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(summary, name).numpy(), values, rtol=rtol, atol=1e-5, err_msg=name)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


MASKS = {
    "none": None,
    "keys of each batch entry": draw(2, 1, 1, 7, seed=3) > 0,
    "pairs": draw(5, 7, seed=3) > -0.5,
    "per head": draw(2, 4, 5, 7, seed=4) > 0,
    "added": draw(4, 5, 7, seed=5),
    "added, with −inf": draw(2, 1, 5, 7, seed=6).masked_fill(draw(2, 1, 5, 7, seed=7) > 0.3, -math.inf),
    "added, with the least float": torch.zeros(2, 1, 1, 7).masked_fill(
        draw(2, 1, 1, 7, seed=8) > 0.3, torch.finfo(torch.float32).min
    ),
}


@pytest.mark.parametrize("block", [None, 1, 2, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_every_head_equals_attention_by_hand(key_heads, mask, causal, block):
    query, key = draw(2, 4, 5, 3), draw(2, key_heads, 7, 3, seed=1) * 2
    check(
        attention_summary(query, key, mask=mask, causal=causal, block=block),
        by_hand(query, key, mask=mask, causal=causal),
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.booleans(),
    st.sampled_from([None, 0.1, 3.0, 100.0]), st.integers(0, 99),
)  # fmt: skip
def test_any_shape_scale_and_block_equals_attention_by_hand(batch, heads, queries, keys, block, causal, scale, seed):
    query, key = draw(batch, heads, queries, 4, seed=seed), draw(batch, heads, keys, 4, seed=seed + 100)
    found = attention_summary(query, key, causal=causal, scale=scale, block=block)
    check(found, by_hand(query, key, causal=causal, scale=scale), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_is_read_in_float32_even_under_autocast(dtype):
    query, key = draw(1, 2, 6, 8, dtype=dtype), draw(1, 2, 6, 8, seed=1, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(attention_summary(query, key, causal=True), by_hand(query, key, causal=True))


def test_a_query_that_sees_no_key_counts_nowhere_and_makes_no_nan():
    query, key = draw(2, 3, 4, 5), draw(2, 3, 4, 5, seed=1)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    mask[0, :, 1] = False
    for given_mask in (mask, torch.zeros(mask.shape).masked_fill(~mask, -math.inf)):
        found = attention_summary(query, key, mask=given_mask)
        assert found.rows.tolist() == [7, 7, 7]
        check(found, by_hand(query, key, mask=mask))
    nothing = attention_summary(query, key, mask=torch.zeros_like(mask))
    assert nothing.rows.tolist() == nothing.entropy_sum.tolist() == nothing.log_context_sum.tolist() == [0, 0, 0]
    assert nothing.max_logit.tolist() == [-math.inf] * 3


def test_what_is_not_a_number_is_not_hidden():
    query = draw(1, 2, 4, 3)
    query[0, 1, 2, 0] = math.nan
    found = attention_summary(query, draw(1, 2, 4, 3), causal=True)
    assert found.entropy_sum.isnan().tolist() == found.max_logit.isnan().tolist() == [False, True]


def test_equal_keys_reach_all_of_the_log_context_and_one_far_key_none():
    equal = attention_summary(draw(1, 2, 9, 4), torch.ones(1, 2, 9, 4), causal=True)
    torch.testing.assert_close(equal.entropy_sum, equal.log_context_sum, rtol=1e-6, atol=1e-6)
    sharp = attention_summary(torch.eye(9)[None, None] * 1e4, torch.eye(9)[None, None])
    assert sharp.entropy_sum.item() == 0


def test_micro_batches_add_up_to_the_batch():
    query, key = draw(6, 2, 5, 3), draw(6, 2, 5, 3, seed=1)
    whole = attention_summary(query, key, causal=True)
    parts = [attention_summary(query[at], key[at], causal=True) for at in (slice(0, 1), slice(1, 6))]
    merged = parts[0].merge(parts[1])
    check(merged, {name: getattr(whole, name).numpy() for name in ("entropy_sum", "rows", "max_logit")}, rtol=1e-12)


def test_no_batch_dimension_and_no_rows_are_fine():
    query, key = draw(1, 3, 5, 4), draw(1, 3, 5, 4, seed=1)
    check(attention_summary(query[0], key[0]), by_hand(query, key))
    check(attention_summary(query[0, 0], key[0, 0]), by_hand(query[:, :1], key[:, :1]))
    assert attention_summary(query[:0], key[:0]).rows.tolist() == [0, 0, 0]


def test_heads_that_do_not_share_evenly_are_named():
    with pytest.raises(ValueError, match="6 query heads do not share 4 key heads evenly"):
        attention_summary(draw(1, 6, 2, 2), draw(1, 4, 2, 2))


class Largest(TorchDispatchMode):
    """The largest storage that any operation gives back, and whether one waits for the device or draws a number."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0
        self.operations = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.operations.add(func._schema.name.removeprefix("aten::"))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self.num_bytes = max(self.num_bytes, each.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("key_heads", [4, 1])
def test_a_long_sequence_is_never_held_as_a_square(key_heads):
    query, key = draw(1, 4, 8192, 8), draw(1, key_heads, 8192, 8, seed=1)
    with Largest() as largest:
        found = attention_summary(query, key, causal=True)
    assert found.rows.tolist() == [8192] * 4
    assert largest.num_bytes <= 16 * 2**20  # a 64th of what 4 · 8192² floats take
    assert not largest.operations & {"_local_scalar_dense", "is_nonzero", "nonzero", "bernoulli_", "native_dropout"}


def test_nothing_is_kept_for_backward_and_nothing_changes():
    query, key, mask = draw(1, 2, 4, 3).requires_grad_(), draw(1, 2, 4, 3, seed=1), draw(4, 4, seed=2)
    copies = [each.detach().clone() for each in (query, key, mask)]
    state = torch.get_rng_state()
    assert not attention_summary(query, key, mask=mask).entropy_sum.requires_grad
    assert torch.equal(state, torch.get_rng_state())
    for each, copy in zip((query, key, mask), copies, strict=True):
        assert torch.equal(each, copy)
