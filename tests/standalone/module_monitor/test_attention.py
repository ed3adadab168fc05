"""Metrics of attention heads, against attention written by hand and against the public package."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import forewarn
from forewarn import ModuleMonitor, MonitorMixin, monitor_scaled_dot_product_attention
from tests.measure.engine.test_attention import Largest


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def monitored():
    monitor = ModuleMonitor(lambda step: True, strict=True)
    monitor.set_module(nn.Identity())
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.begin_step(0)
    return monitor


def measured(monitor):
    monitor.end_step()
    return monitor.get_step_metrics()


def entropies(query, key, visible, scale=None):
    """Mean entropy per head by numpy in double precision, one query at a time; `visible` is [queries, keys]."""
    query, key = query.double().numpy(), key.double().numpy()
    group = query.shape[1] // key.shape[1]
    found = []
    for head in range(query.shape[1]):
        rows = []
        for b, i in np.ndindex(query.shape[0], query.shape[2]):
            logits = key[b, head // group][visible[i]] @ query[b, head, i]
            if len(logits):
                weights = np.exp(logits * (query.shape[-1] ** -0.5 if scale is None else scale))
                weights /= weights.sum()
                rows.append(-(weights * np.log(weights)).sum())
        found.append(np.mean(rows))
    return found


@pytest.mark.parametrize("num_key_heads", [4, 2, 1])
@pytest.mark.parametrize("num_keys", [6, 9])
def test_heads_equal_numpy_whatever_heads_share_and_however_long_the_keys_are(num_key_heads, num_keys):
    query, key, value = (
        draw(2, 4, 6, 8),
        draw(2, num_key_heads, num_keys, 8, seed=1),
        draw(2, num_key_heads, num_keys, 5),
    )
    activation = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    monitor = monitored()
    monitor_scaled_dot_product_attention(
        monitor, "attn", query, key, value, enable_gqa=True, activation=activation, scale=0.7
    )
    found = measured(monitor)
    expected = entropies(query, key, np.ones((6, num_keys), bool), scale=0.7)
    for head in range(4):
        shared = head // (4 // num_key_heads)
        parts = {"query": query[:, head], "key": key[:, shared], "value": value[:, shared]}
        for part, tensor in {**parts, "activation": activation[:, head]}.items():
            name = f"activation/attn.head_{head}.{part}/mean"
            assert found.pop(name) == pytest.approx(tensor.double().mean().item(), rel=1e-5, abs=1e-6)
        assert found.pop(f"attention_entropy/attn.head_{head}") == pytest.approx(expected[head], rel=1e-5)
    assert not found


def test_a_causal_a_boolean_and_an_additive_mask_of_the_same_meaning_agree():
    query, key, value = draw(2, 2, 7, 4), draw(2, 2, 7, 4, seed=1), draw(2, 2, 7, 4, seed=2)
    lower = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = entropies(query, key, lower.numpy())
    ways = [{"is_causal": True}, {"attn_mask": lower}, {"attn_mask": torch.zeros(7, 7).masked_fill(~lower, -math.inf)}]
    for way in ways:
        monitor = monitored()
        monitor_scaled_dot_product_attention(monitor, "attn", query, key, value, **way)
        found = measured(monitor)
        assert [found[f"attention_entropy/attn.head_{head}"] for head in (0, 1)] == pytest.approx(expected, rel=1e-5)


def test_fully_masked_queries_make_no_nan_and_have_no_say():
    query, key, value = draw(1, 2, 5, 4), draw(1, 2, 5, 4, seed=1), draw(1, 2, 5, 4, seed=2)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[3] = False
    monitor = monitored()
    monitor_scaled_dot_product_attention(monitor, "some", query, key, value, attn_mask=mask)
    monitor_scaled_dot_product_attention(monitor, "none", query, key, value, attn_mask=torch.zeros_like(mask))
    found = measured(monitor)
    expected = entropies(query, key, mask.numpy())
    assert [found[f"attention_entropy/some.head_{head}"] for head in (0, 1)] == pytest.approx(expected, rel=1e-5)
    assert found["attention_entropy/none.head_0"] == 0


def test_micro_batches_of_unlike_sizes_count_by_their_queries():
    query, key, value = draw(6, 1, 5, 4), draw(6, 1, 5, 4, seed=1), draw(6, 1, 5, 4, seed=2)
    monitor = monitored()
    for part in (slice(0, 1), slice(1, 6)):
        monitor_scaled_dot_product_attention(monitor, "attn", query[part], key[part], value[part])
        monitor.after_micro_batch()
    [expected] = entropies(query, key, np.ones((5, 5), bool))
    assert measured(monitor)["attention_entropy/attn.head_0"] == pytest.approx(expected, rel=1e-5)


def test_a_sequence_of_8192_is_never_held_as_a_square():
    query, key, value = (draw(1, 4, 8192, 4, seed=seed) for seed in range(3))
    monitor = monitored()
    with Largest() as largest:
        monitor_scaled_dot_product_attention(monitor, "attn", query, key, value, is_causal=True)
    assert largest.num_bytes <= 16 * 2**20  # 4 · 8192² floats are 1 GB
    assert not largest.operations & {"_local_scalar_dense", "is_nonzero", "nonzero", "native_dropout", "bernoulli_"}
    assert 7 < measured(monitor)["attention_entropy/attn.head_0"] < math.log(8192)


class Attention(nn.Module, MonitorMixin):
    """As in the README of the public package."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5, is_causal=True)
        if self.is_monitoring:
            monitor_scaled_dot_product_attention(
                self.get_module_monitor(), self, query, key, value, dropout_p=0.5, is_causal=True, activation=mixed
            )
        return mixed.transpose(1, 2).flatten(-2)


def test_no_random_number_is_drawn_and_training_stays_the_same():
    outputs = []
    for is_monitored in (False, True):
        torch.manual_seed(0)
        model = Attention()
        monitor = ModuleMonitor(lambda step: True)
        if is_monitored:
            monitor.set_module(model)
            monitor.add_activation_metric("mean", lambda x: x.mean())
            monitor.begin_step(0)
        x = draw(2, 5, 8)
        y = model(x)
        y.square().sum().backward()
        outputs.append((y, model.qkv.weight.grad, torch.rand(3)))
    for bare, watched in zip(*outputs, strict=True):
        assert torch.equal(bare, watched)
    assert "attention_entropy/[root module].head_1" in measured(monitor)


def test_a_recomputed_forward_is_not_logged_again():
    model = Attention()
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    seen = []
    monitor.add_activation_metric("seen", lambda x: seen.append(x) or x.mean(), r".*head_0\.query")
    monitor.begin_step(0)
    checkpoint(model, draw(2, 5, 8).requires_grad_(), use_reentrant=False).sum().backward()
    assert len(seen) == 1


def test_heads_are_compared_with_those_of_a_reference_and_the_entropy_stays_that_of_the_model():
    torch.manual_seed(0)
    model, reference = Attention(), Attention()
    monitor = ModuleMonitor(lambda step: True, strict=True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("l2", lambda x, y: (x - y).norm(), r".*head_1\.key")
    monitor.begin_step(0)
    x = draw(2, 5, 8)
    reference(x)
    model(x)
    found = measured(monitor)
    query, keys, _ = model.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).detach()
    others = reference.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)[1]
    expected = (keys - others)[:, 1].norm().item()
    assert found["activation_difference/[root module].head_1.key/l2"] == pytest.approx(expected, rel=1e-5)
    expected = entropies(query, keys, np.tril(np.ones((5, 5), bool)))
    assert found["attention_entropy/[root module].head_1"] == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.parametrize("way", [{}, {"is_causal": True}, {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril(2)},
                                 {"attn_mask": draw(6, 6, seed=9)}, {"scale": 0.3}, {"enable_gqa": True}])  # fmt: skip
def test_every_key_equals_that_of_the_public_package(way):
    public = pytest.importorskip("torch_module_monitor")
    num_key_heads = 2 if "enable_gqa" in way else 4
    found = []
    for package in (public, forewarn):
        monitor = package.ModuleMonitor(lambda step: True)
        monitor.set_module(nn.Identity())
        monitor.add_activation_metric("mean", lambda x: x.mean())
        monitor.add_activation_metric("std", lambda x: x.std(), r".*query")
        monitor.begin_step(0)
        for seed in range(3):
            query, key, value = (draw(2, heads, 6, 4, seed=seed + heads) for heads in (4, num_key_heads, num_key_heads))
            package.monitor_scaled_dot_product_attention(monitor, "attn", query, key, value, activation=query, **way)
            monitor.after_micro_batch()
        monitor.end_step()
        found.append(copy.copy(monitor.get_step_metrics()))
    theirs, ours = found
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
