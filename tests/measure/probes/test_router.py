"""Routers of experts: loads and entropy as counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import forewarn
from forewarn.measure.probes.router import router_logits
from tests.conftest import last


class Mixture(nn.Module):
    """Tokens go to the experts that the router prefers, weighed by its softmax."""

    def __init__(self, experts: int = 4, top_k: int = 1, width: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.top_k = top_k

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        every = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (weights.unsqueeze(-1) * every.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, x.shape[-1]))).sum(
            -2
        )


class Model(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"mixture": mixture})
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.block["mixture"](x))


def one_step(model, watch, batches, **measure):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer, config=forewarn.Config(measure=forewarn.Measure(router=r"router$", **measure)))
    for batch in batches:
        model(batch).square().mean().backward()
    optimizer.step()
    monitor.step(1.0)
    return monitor


def by_hand(logits, top_k):
    logits = logits.detach().double().numpy().reshape(-1, logits.shape[-1])
    chosen = np.argsort(-logits, axis=-1)[:, :top_k]
    loads = np.array([(chosen == expert).sum() for expert in range(logits.shape[-1])])
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return loads / loads.sum(), -(weights * np.log(weights)).sum(-1).mean() / np.log(logits.shape[-1])


def readings(monitor):
    return monitor.history.panel("router/load_share").last, last(monitor, "router/entropy", "block.mixture.router")


@pytest.mark.parametrize("top_k", [1, 2])
def test_loads_and_entropy_are_those_of_the_tokens(top_k, watch):
    torch.manual_seed(0)
    model, x = Model(Mixture(top_k=top_k)), 3 * torch.randn(5, 9, 6)
    monitor = one_step(model, watch, [x], router_top_k=top_k)
    loads, entropy = by_hand(model.block["mixture"].router(x), top_k)
    np.testing.assert_allclose(readings(monitor)[0], loads, rtol=1e-6)
    assert readings(monitor)[1] == pytest.approx(entropy, rel=1e-6)
    assert last(monitor, "router/tokens", "block.mixture.router") == 45
    scopes = tuple(f"block.mixture.router.expert_{at}" for at in range(4))
    assert monitor.history.panel("router/load_share").scopes == scopes


def test_micro_batches_of_any_size_add_up_to_the_whole_batch(watch):
    torch.manual_seed(0)
    model, x = Model(Mixture()), torch.randn(40, 6)
    loads, entropy = by_hand(model.block["mixture"].router(x), 1)
    monitor = one_step(model, watch, [x[:3], x[3:29], x[29:]])
    np.testing.assert_allclose(readings(monitor)[0], loads, rtol=1e-6)
    assert readings(monitor)[1] == pytest.approx(entropy, rel=1e-6)


def test_what_checkpointing_recomputes_is_not_counted_twice(watch):
    class Checkpointed(Model):
        def forward(self, x):
            return self.head(checkpoint(self.block["mixture"], x, use_reentrant=False))

    monitor = one_step(Checkpointed(Mixture()), watch, [torch.randn(40, 6)])
    assert last(monitor, "router/tokens", "block.mixture.router") == 40


def test_probabilities_are_taken_as_they_are(watch):
    class Soft(Mixture):
        def __init__(self):
            super().__init__()
            self.router = nn.Sequential(self.router, nn.Softmax(-1))

    torch.manual_seed(0)
    model, x = Model(Soft()), torch.randn(40, 6)
    monitor = one_step(model, watch, [x])
    logits = model.block["mixture"].router[0](x)
    assert readings(monitor)[1] == pytest.approx(by_hand(logits, 1)[1], rel=1e-5)


def test_logits_are_found_among_what_a_router_gives():
    logits, scores, chosen = torch.ones(5, 8), torch.ones(5, 2), torch.ones(5, 9, dtype=torch.long)
    assert router_logits(logits) is logits
    assert router_logits((scores, chosen, logits)) is logits
    assert router_logits({"scores": scores, "logits": logits}) is logits
    for nothing in (None, chosen, torch.ones(5, 1), torch.ones(0, 4), torch.ones(4), [scores[:, :1]]):
        assert router_logits(nothing) is None


def test_a_large_batch_is_read_in_evenly_spaced_tokens(watch, monkeypatch):
    monkeypatch.setattr("forewarn.measure.probes.router._MAX_VALUES", 80)
    torch.manual_seed(0)
    model, x = Model(Mixture()), torch.randn(60, 6)
    monitor = one_step(model, watch, [x])
    loads, _ = by_hand(model.block["mixture"].router(x[::3]), 1)
    np.testing.assert_allclose(readings(monitor)[0], loads, rtol=1e-6)


def test_a_name_that_is_found_nowhere_is_an_error_at_once(watch):
    model = Model(Mixture())
    with pytest.raises(ValueError, match=r"router='gate\$' matches no module name of this Model"):
        watch(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            config=forewarn.Config(measure=forewarn.Measure(router="gate$")),
        )


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_router_is_unavailable_and_says_so_once(watch):
    model = Model(Mixture())
    model.block["mixture"].compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, config=forewarn.Config(measure=forewarn.Measure(router="router$")))
    for _ in range(3):
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        monitor.step(1.0)
    assert "router/load_share" not in monitor.history
    told = monitor.history.series("monitor/unavailable", "router/load_share").values
    assert [int(each) for each in told if np.isfinite(each)] == [forewarn.types.Reason.COMPILED]
