"""Attention: what is read of it is what the model computed, and the model never notices."""

from __future__ import annotations

import contextlib
import functools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import forewarn
from forewarn.lab.gpt import GPT, GPTConfig
from forewarn.measure.attention_calls import Attended, sampled
from forewarn.measure.engine.attention_heads import attention_summary
from forewarn.measure.probes import attention
from tests.conftest import last
from tests.test_no_host_sync import Counting

ORIGINAL = functional.scaled_dot_product_attention
TOKENS = torch.arange(24).reshape(2, 12) % 7


@pytest.fixture(autouse=True)
def _put_back():
    """Whatever a test does, torch is as it was at its end."""
    yield
    assert functional.scaled_dot_product_attention is ORIGINAL


class OneLayer(nn.Module):
    """Self-attention by `nn.MultiheadAttention`, however it is called."""

    def __init__(self, **settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **{"batch_first": True, **settings})
        self.weights = None

    def forward(self, x, *others, **how):
        mixed, self.weights = self.attention(x, *(others or (x, x)), average_attn_weights=False, **how)
        return mixed


class Functional(nn.Module):
    """An attention of its own: two layers to make queries and keys, and whatever `attend` makes of them."""

    def __init__(self, attend, width=8):
        super().__init__()
        self.inner = nn.ModuleDict({"query": nn.Linear(width, width), "key": nn.Linear(width, width)})
        self.attend = attend

    def forward(self, x):
        return self.attend(self.inner["query"](x), self.inner["key"](x), x)


class Root(nn.Module):
    """Some part, and a head so that there is something beside it."""

    def __init__(self, part, width=8):
        super().__init__()
        self.part = part
        self.head = nn.Linear(width, 3)

    def forward(self, *args, **kwargs):
        return self.head(self.part(*args, **kwargs))


def one_step(model, watch, *inputs, **settings):
    """The readings of one training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer, **settings)
    for args, kwargs in inputs:
        model(*args, **kwargs).square().mean().backward()
    optimizer.step()
    monitor.step(1.0)
    return monitor


def expected(weights, seen=None):
    """Entropy by head as a share of what is allowed, from weights [batch, heads, queries, keys]."""
    weights = np.asarray(weights, np.float64)
    seen = weights > 0 if seen is None else np.broadcast_to(seen, weights.shape)
    entropy = -np.where(weights > 0, weights * np.log(np.where(weights > 0, weights, 1.0)), 0.0).sum(-1)
    context = np.log(np.maximum(seen.sum(-1), 1))
    return entropy.sum((0, 2)) / context.sum((0, 2))


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def entropies(monitor, scope="part.attention", heads=2):
    return [last(monitor, "attention/entropy", f"{scope}.head_{at}") for at in range(heads)]


def test_a_gpt_is_read_by_head_and_by_layer(watch):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=7, context=12, depth=2, heads=2, width=8))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(60.0)
    mixed = {}
    for name, module in model.named_modules():
        if name.endswith("qkv"):
            module.register_forward_hook(lambda m, args, out, name=name: mixed.update({name: out.detach()}))
    monitor = one_step(model, watch, ((TOKENS,), {}))
    for name, qkv in mixed.items():
        query, key = (each.double().unflatten(-1, (2, 4)).transpose(1, 2).numpy() for each in qkv.chunk(3, -1)[:2])
        logits = query @ key.swapaxes(-1, -2) / math.sqrt(4)
        seen = np.tri(12, dtype=bool)
        weights = softmax(np.where(seen, logits, -np.inf))
        layer = name.removesuffix(".qkv")
        # twelve queries see 5.3 keys on average, too few for entropy to be given
        assert np.isnan(entropies(monitor, layer)).all()
        assert math.isnan(last(monitor, "attention/layer_entropy", layer))
        highest = np.where(seen, logits, -np.inf).max((0, 2, 3))
        found = [last(monitor, "attention/max_logit", f"{layer}.head_{at}") for at in range(2)]
        assert found == pytest.approx(highest, rel=1e-5)
        assert last(monitor, "attention/layer_max_logit", layer) == pytest.approx(highest.max(), rel=1e-5)
        assert weights.sum() == pytest.approx(2 * 2 * 12)
    assert functional.scaled_dot_product_attention is ORIGINAL


FAR_ONES = torch.ones(16, 16).triu(9).bool()
PADDING = torch.arange(16) >= torch.tensor([[16], [11], [13]])
LAST_HIDDEN = torch.zeros(3, 16).index_fill(1, torch.tensor([15]), -math.inf)
CALLS = {
    "plain": ({}, lambda x: {}),
    "without weights": ({}, lambda x: {"need_weights": False}),
    "padding": ({}, lambda x: {"key_padding_mask": PADDING}),
    "padding as numbers": ({}, lambda x: {"key_padding_mask": LAST_HIDDEN}),
    "hidden pairs": ({}, lambda x: {"attn_mask": FAR_ONES}),
    "numbers": ({}, lambda x: {"attn_mask": torch.linspace(-3, 2, 256).reshape(16, 16)}),
    "by head": ({}, lambda x: {"attn_mask": torch.linspace(-3, 2, 6 * 256).reshape(6, 16, 16)}),
    "both": ({}, lambda x: {
        "attn_mask": FAR_ONES,
        "key_padding_mask": PADDING,
    }),
    "no bias": ({"bias": False}, lambda x: {}),
    "further keys": ({"add_bias_kv": True, "add_zero_attn": True}, lambda x: {"attn_mask": FAR_ONES}),
    "further key without weights": ({"add_zero_attn": True}, lambda x: {"need_weights": False}),
    "batch second": ({"batch_first": False}, lambda x: {}),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "how"), CALLS.values(), ids=CALLS)
def test_multihead_attention_is_read_as_its_own_weights_say(settings, how, watch):
    torch.manual_seed(0)
    model = Root(OneLayer(**settings))
    x = torch.randn(3, 16, 8) * 2
    if settings.get("batch_first") is False:
        x = x.transpose(0, 1)
    monitor = one_step(model, watch, ((x,), how(x)))
    with torch.no_grad():
        model.part(x, **{**how(x), "need_weights": True})
    assert entropies(monitor) == pytest.approx(expected(model.part.weights), rel=1e-4)
    assert monitor.history.panel("attention/entropy").scopes == ("part.attention.head_0", "part.attention.head_1")
    assert len(monitor.history.panel("attention/entropy")) == 1


def test_keys_of_another_width_and_a_single_sequence_are_read(watch):
    torch.manual_seed(0)
    model = Root(OneLayer(kdim=5, vdim=6))
    inputs = torch.randn(9, 8), torch.randn(16, 5), torch.randn(16, 6)
    monitor = one_step(model, watch, (inputs, {}))
    assert entropies(monitor) == pytest.approx(expected(model.part.weights.detach()[None]), rel=1e-4)


def heads_of(query, key, value, **how):
    parted = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in (query, key, value))
    return functional.scaled_dot_product_attention(*parted, **how).transpose(1, 2).flatten(-2)


def test_the_scale_and_the_mask_of_a_call_count(watch):
    torch.manual_seed(0)
    mask = torch.rand(3, 1, 16, 16) > 0.4
    mask[..., 0] = True
    attend = functools.partial(heads_of, attn_mask=mask, scale=1.7)
    model, x = Root(Functional(attend)), torch.randn(3, 16, 8)
    monitor = one_step(model, watch, ((x,), {}))
    query, key = (
        model.part.inner[name](x).detach().double().unflatten(-1, (2, 4)).transpose(1, 2).numpy()
        for name in ("query", "key")
    )
    logits = np.where(mask.numpy(), 1.7 * query @ key.swapaxes(-1, -2), -np.inf)
    assert entropies(monitor, "part") == pytest.approx(expected(softmax(logits), mask.numpy()), rel=1e-5)
    found = [last(monitor, "attention/max_logit", f"part.head_{at}") for at in range(2)]
    assert found == pytest.approx(logits.max((0, 2, 3)), rel=1e-5)


def test_of_a_large_batch_a_few_hundred_queries_of_each_head_are_looked_at(watch, monkeypatch):
    looked_at = []

    def noting(query, key, **how):
        looked_at.append((query.shape, key.shape))
        return attention_summary(query, key, **how)

    monkeypatch.setattr(attention, "attention_summary", noting)
    monitor = one_step(Root(Functional(heads_of)), watch, ((torch.randn(20, 64, 8),), {}))
    [(query, key)] = looked_at
    assert 128 <= query[0] * query[2] <= attention.MAX_QUERIES
    assert key[2] == 64, "each of them sees all keys"
    assert all(0 < each <= 1 for each in entropies(monitor, "part"))


def test_heads_that_share_keys_and_calls_without_heads_are_read(watch):
    def grouped(query, key, value):
        query, key, value = (each.unflatten(-1, (4, 2)).transpose(1, 2) for each in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key[:, :2], value[:, :2], enable_gqa=True)
        return mixed.transpose(1, 2).flatten(-2)

    torch.manual_seed(0)
    monitor = one_step(Root(Functional(grouped)), watch, ((torch.randn(3, 16, 8),), {}))
    assert len(monitor.history.panel("attention/entropy").scopes) == 4
    plain = Functional(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v))
    monitor = one_step(Root(plain), watch, ((torch.randn(5, 16, 8),), {}))
    assert monitor.history.panel("attention/entropy").scopes == ("part.head_0",), "five sequences, not five heads"


def test_several_attentions_of_one_module_are_numbered_up_to_a_few(watch):
    def thrice(query, key, value):
        for _ in range(7):
            value = heads_of(query, key, value)
        return value

    monitor = one_step(Root(Functional(thrice)), watch, ((torch.randn(2, 16, 8),), {}))
    layers = ("part", "part.call_2", "part.call_3", "part.call_4")
    assert monitor.history.panel("attention/layer_entropy").scopes == layers
    assert "part.call_3.head_1" in monitor.history.panel("attention/entropy").scopes


def test_a_module_that_raises_and_is_caught_gives_its_place_back_when_its_parent_ends(watch):
    class Fragile(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    class Careful(Functional):
        def __init__(self):
            super().__init__(heads_of)
            self.fragile = Fragile()

        def forward(self, x):
            with contextlib.suppress(ValueError):
                self.fragile(x)
            return super().forward(x)

    monitor = one_step(Root(nn.Sequential(Careful(), Functional(heads_of))), watch, ((torch.randn(2, 16, 8),), {}))
    assert monitor.history.panel("attention/layer_entropy").scopes == ("part.0.fragile", "part.1")


def test_micro_batches_of_any_size_add_up_to_the_whole_batch(watch):
    torch.manual_seed(0)
    model, x = Root(Functional(heads_of)), torch.randn(7, 16, 8)
    whole = one_step(model, watch, ((x,), {}))
    parts = one_step(model, watch, ((x[:1],), {}), ((x[1:6],), {}), ((x[6:],), {}))
    for name in ("attention/entropy", "attention/max_logit", "attention/layer_entropy", "attention/layer_max_logit"):
        np.testing.assert_allclose(parts.history.panel(name).last, whole.history.panel(name).last, rtol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_reading(watch, reentrant):
    class Checkpointed(Root):
        def forward(self, x):
            return self.head(checkpoint(self.part, x, use_reentrant=reentrant))

    torch.manual_seed(0)
    part, x = Functional(heads_of), torch.randn(3, 16, 8, requires_grad=True)
    plain = one_step(Root(part), watch, ((x,), {}))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attention_summary", lambda *a, **k: seen.append(1) or attention_summary(*a, **k))
        again = one_step(Checkpointed(part), watch, ((x,), {}))
    assert len(seen) == 1
    assert entropies(again, "part") == entropies(plain, "part")


@pytest.mark.parametrize("watched", [False, True])
def test_gradients_survive_selective_checkpointing(watch, watched):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

    def policy(context, operation, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(Root):
        def forward(self, x):
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return self.head(checkpoint(self.part, x, use_reentrant=False, context_fn=contexts))

    def gradients(model):
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    torch.manual_seed(0)
    x = torch.randn(3, 16, 8)
    part = nn.Sequential(Functional(heads_of), OneLayer())
    model = Selective(part)
    plain = Root(part)
    plain.head = model.head
    bare = gradients(plain)
    if watched:
        monitor = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = gradients(model)
    assert all(torch.equal(one, other) for one, other in zip(bare, found, strict=True))
    if watched:
        monitor.step(1.0)
        assert len(monitor.history.panel("attention/entropy").scopes) == 4


def train(make, watch, *, steps=30):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = watch(model, optimizer, every=2) if watch else None
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor.step(loss)
        losses.append(loss.item())
    return losses, model.state_dict(), torch.get_rng_state(), monitor


class CheckpointedDropout(Root):
    def forward(self, x):
        return self.head(checkpoint(self.part, x, use_reentrant=False))


MODELS = {
    "function with dropout": lambda: Root(Functional(functools.partial(heads_of, dropout_p=0.3))),
    "multihead with dropout": lambda: Root(OneLayer(dropout=0.3)),
    "encoder layer": lambda: Root(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)),
    "checkpointed dropout": lambda: CheckpointedDropout(
        nn.Sequential(Functional(functools.partial(heads_of, dropout_p=0.3)), OneLayer(dropout=0.3))
    ),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_training_with_dropout_is_bit_identical(make, watch):
    bare, watched = train(make, None), train(make, watch)
    assert bare[0] == watched[0]
    assert all(torch.equal(bare[1][key], watched[1][key]) for key in bare[1])
    assert torch.equal(bare[2], watched[2])
    assert len(watched[3].history.panel("attention/entropy")) > 10
    assert "X101" not in {alert.code for alert in watched[3].alerts}


def test_nothing_waits_for_the_device(watch):
    counts = {}
    for watching in (False, True):
        model, x = Root(nn.Sequential(Functional(heads_of), OneLayer())), torch.randn(2, 16, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = watch(model, optimizer) if watching else None
        with Counting() as counting:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            if monitor:
                monitor.step(loss)
        counts[watching] = counting
    assert counts[True].syncs == counts[False].syncs == 0
    assert counts[True].operations["bmm"] > counts[False].operations["bmm"], "it was measured under the counter"


class Broken(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.error = error

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "keyboard"])
def test_torchs_function_is_back_after_a_pass_that_was_broken_off(error, watch):
    model = Root(nn.Sequential(Functional(heads_of), Broken(error)))
    monitor = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(type(error)):
        model(torch.randn(2, 16, 8))
    model.part[1].error = None
    model(torch.randn(2, 16, 8)).sum().backward()
    assert functional.scaled_dot_product_attention is ORIGINAL
    model.part[1].error = error
    with pytest.raises(type(error)):
        model(torch.randn(2, 16, 8))
    monitor.close()
    assert functional.scaled_dot_product_attention is ORIGINAL
    assert not any(module._forward_hooks for module in model.modules())


def test_a_replacement_of_somebody_else_stays_and_only_passes_on(watch):
    calls = []

    def replacing(query, key, value):
        mine = functional.scaled_dot_product_attention

        def theirs(*args, **kwargs):
            calls.append(1)
            return mine(*args, **kwargs)

        functional.scaled_dot_product_attention = theirs
        return heads_of(query, key, value)

    model = Root(Functional(replacing))
    monitor = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(2, 16, 8))
    theirs, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, ORIGINAL
    assert theirs is not ORIGINAL
    rows = monitor._probes["attention"]._seen["part"].rows.tolist()
    theirs(*torch.randn(3, 2, 2, 16, 4))
    assert len(calls) == 2
    assert monitor._probes["attention"]._seen["part"].rows.tolist() == rows


def test_what_fails_while_measuring_switches_the_probe_off_and_leaves_the_run_alone(watch, monkeypatch, caplog):
    bare = train(MODELS["function with dropout"], None)

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(attention, "attention_summary", broken)
    watched = train(MODELS["function with dropout"], watch)
    assert bare[0] == watched[0]
    assert ("X101", "attention") in {alert.identity for alert in watched[3].alerts}
    assert functional.scaled_dot_product_attention is ORIGINAL


def test_it_can_be_left_out(watch):
    model = Root(Functional(heads_of))
    monitor = one_step(
        model, watch, ((torch.randn(2, 16, 8),), {}), config=forewarn.Config(measure=forewarn.Measure(attention=False))
    )
    assert "attention/entropy" not in monitor.history


def test_tensors_that_do_not_simply_compute_are_left_out_and_told_once(watch):
    class Own(torch.Tensor):
        """A tensor of somebody else's making."""

    def of_another_kind(query, key, value):
        return heads_of(query.as_subclass(Own), key, value).as_subclass(torch.Tensor)

    model = Root(Functional(of_another_kind))
    monitor = one_step(model, watch, ((torch.randn(2, 16, 8),), {}))
    assert "attention/entropy" not in monitor.history
    reason = forewarn.types.Reason(int(last(monitor, "monitor/unavailable", "attention/entropy")))
    assert reason is forewarn.types.Reason.UNSUPPORTED_TENSOR


@pytest.mark.filterwarnings("ignore")
def test_compiled_attention_is_unavailable_and_never_compiled_anew(watch):
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    model = GPT(GPTConfig(vocab_size=7, context=12, depth=2, heads=2, width=8))
    for block in model.blocks:
        block.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, every=lambda step: step % 2 == 1, config=forewarn.Config(escalation_steps=0))
    compiled = []
    for _ in range(6):
        model(TOKENS).square().mean().backward()
        optimizer.step()
        monitor.step(1.0)
        compiled.append(len(frames))
    assert compiled[0] == compiled[-1] > 0
    assert "attention/entropy" not in monitor.history
    told = monitor.history.series("monitor/unavailable", "attention/entropy")
    assert np.isfinite(told.values).sum() == 1
    assert forewarn.types.Reason(int(np.nanmax(told.values))) is forewarn.types.Reason.COMPILED


@pytest.mark.filterwarnings("ignore")
def test_everything_that_compiled_code_hides_is_told_of_at_the_same_step(watch):
    model = GPT(GPTConfig(vocab_size=7, context=12, depth=2, heads=2, width=8))
    for block in model.blocks:
        block.compile(backend="eager")
    monitor = one_step(model, watch, ((TOKENS,), {}))
    hidden = {alert.scope for alert in monitor.alerts if alert.name == "unavailable"}
    assert {"attention/entropy", "activation/mean"} <= hidden


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_without_attention_has_nothing_to_tell(watch):
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), backend="eager")
    monitor = one_step(model, watch, ((torch.randn(2, 8),), {}))
    assert not len(monitor.history.series("monitor/unavailable", "attention/entropy"))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_in_a_watched_model_still_computes_the_same(watch):
    attend = torch.compile(heads_of, backend="eager")
    model, x = Root(Functional(attend)), torch.randn(2, 16, 8)
    bare = model(x)
    monitor = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(model(x), bare)
    monitor.step(1.0)
    assert "X101" not in {alert.code for alert in monitor.alerts}


def given(batch=6, heads=2, queries=40, keys=40, **others):
    torch.manual_seed(0)
    query, key = torch.randn(batch, heads, queries, 4), torch.randn(batch, heads, keys, 4)
    return Attended(query, key, others.pop("mask", None), others.pop("causal", False), None)


def test_a_small_attention_is_read_whole():
    whole = given()
    assert sampled(whole, 6 * 2 * 40 * 40).query is not None
    assert sampled(whole, 6 * 2 * 40 * 40).query.shape == whole.query.shape


@pytest.mark.parametrize("bound", [1, 100, 1000, 4000, 9000])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "numbers by head"])
def test_a_large_attention_is_read_in_evenly_spaced_queries_as_they_are(bound, kind):
    mask = {"mask": torch.rand(6, 1, 40, 40) > 0.3, "numbers by head": torch.randn(2, 40, 40)}.get(kind)
    whole = given(mask=mask, causal=kind == "causal")
    part = sampled(whole, bound)
    size = part.query.shape[:-1].numel() * part.key.shape[-2]
    assert size <= max(bound, 2 * 40), "at least one query of one sequence"
    taken = (whole.query[:, :, :, None] == part.query[:1, :, None]).all(-1)[0, 0].any(1).nonzero().flatten().tolist()
    assert taken[-1] == 39
    assert len(set(np.diff(taken))) <= 1
    sequences = range(0, 6, -(-6 // len(part.query)))
    assert len(sequences) == len(part.query)
    visible = torch.ones(40, 40).tril().bool() if kind == "causal" else torch.ones(40, 40).bool()
    visible = visible.expand(6, 2, 40, 40)
    if kind == "mask":
        visible = visible & mask
    bias = mask.expand(6, 2, 40, 40) if kind == "numbers by head" else torch.zeros(6, 2, 40, 40)
    logits = (whole.query.double() @ whole.key.double().mT / 2 + bias).masked_fill(~visible, -math.inf)
    rows = [(b, h, q) for b in sequences for h in range(2) for q in taken]
    summary = attention_summary(part.query, part.key, mask=part.mask, causal=part.causal)
    for head in range(2):
        own = torch.stack([logits[b, h, q] for b, h, q in rows if h == head])
        seen = torch.stack([visible[b, h, q] for b, h, q in rows if h == head]).sum(-1)
        entropy = torch.special.entr(own.softmax(-1)).sum()
        assert summary.rows[head] == len(own)
        assert float(summary.entropy_sum[head]) == pytest.approx(float(entropy), rel=1e-4)
        assert float(summary.max_logit[head]) == pytest.approx(float(own.max()), rel=1e-5)
        assert float(summary.log_context_sum[head]) == pytest.approx(float(seen.log().sum()), rel=1e-5)


def test_one_batch_of_queries_for_many_of_keys_is_read():
    many = given()
    part = sampled(Attended(many.query[:1], many.key, None, False, None), 10**9)
    assert part.query.shape == many.query.shape


def test_two_monitors_of_one_model_both_see_it(watch):
    model, x = Root(Functional(heads_of)), torch.randn(2, 16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitors = [watch(model, optimizer) for _ in range(2)]
    model(x).sum().backward()
    assert functional.scaled_dot_product_attention is ORIGINAL
    for monitor in monitors:
        monitor.step(1.0)
    assert entropies(monitors[0], "part") == entropies(monitors[1], "part")
