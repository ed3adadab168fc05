"""Rules about attention heads: a layer that has collapsed is told from a head that is sharp on purpose."""

import numpy as np
import torch
from torch.nn import functional
from torch.optim import AdamW

import forewarn
from forewarn.lab.gpt import GPT, GPTConfig
from forewarn.types import Severity
from tests.judge.rules.runs import Run

LAYER, HEADS = "blocks.0.attention", tuple(f"blocks.0.attention.head_{at}" for at in range(4))


def judged(layer, heads=(), checks=3):
    run = Run("A106")
    for _ in range(checks):
        run.feed(
            {"attention/layer_entropy": {LAYER: layer}, "attention/entropy": dict(zip(HEADS, heads, strict=False))}
        )
    return run.ledger.alerts


def test_one_sharp_head_is_information_and_is_named():
    (alert,) = judged(0.4, (0.7, 0.02, 0.5, 0.4))
    assert (alert.scope, alert.severity) == (LAYER, Severity.INFO)
    evidence = alert.finding.evidence
    assert (evidence["sharpest"], evidence["sharp_heads"], evidence["heads"]) == (HEADS[1], 1, 4)


def test_a_layer_of_sharp_heads_is_a_warning():
    (alert,) = judged(0.04, (0.1, 0.02, 0.02, 0.02))
    assert (alert.scope, alert.severity) == (LAYER, Severity.WARNING)
    assert alert.finding.evidence["sharp_heads"] == 3


def test_a_head_must_stay_sharp():
    run = Run("A106")
    for at in range(12):
        run.feed({"attention/layer_entropy": {LAYER: 0.3}, "attention/entropy": {HEADS[0]: 0.01 if at % 3 else 0.3}})
    assert run.ledger.alerts == ()


def test_heads_that_see_too_few_keys_are_left_alone():
    assert judged(np.nan, (np.nan,) * 4) == ()


def test_a_layer_at_the_root_of_a_model_has_heads_too():
    run = Run("A106")
    for _ in range(3):
        run.feed({"attention/layer_entropy": 0.01, "attention/entropy": {"head_0": 0.01}})
    (alert,) = run.ledger.alerts
    assert alert.finding.evidence["sharpest"] == "head_0"


def logits(*values):
    run = Run("A107")
    for value in values:
        run.feed(
            {
                "attention/layer_max_logit": {LAYER: value},
                "attention/max_logit": dict(zip(HEADS, (1.0, value), strict=False)),
            }
        )
    return run.ledger.alerts


def test_growing_logits_are_found_before_the_limit_and_name_the_head():
    (alert,) = logits(*np.geomspace(2, 80, 20))
    assert alert.finding.value < 100
    assert alert.finding.bound == 50
    assert alert.finding.evidence["head"] == HEADS[1]


def test_logits_that_stay_below_the_limit_are_quiet():
    assert logits(*np.geomspace(1, 45, 30)) == ()
    assert logits(*[80.0] * 30) == ()
    assert logits(*np.linspace(52, 99, 200)) == ()


def test_huge_logits_are_critical():
    (alert,) = logits(*np.geomspace(10, 30_000, 20))
    assert alert.severity is Severity.CRITICAL


def test_a_language_model_that_learned_sharp_heads_is_left_in_peace(tmp_path):
    """Halves that repeat teach one layer to look at the token before, and the next to find what followed it."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=32, context=32, depth=2, heads=2, width=64, tied=False))
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    generator = torch.Generator().manual_seed(1)
    with forewarn.watch(model, optimizer, tmp_path / "run", every=5, views=[]) as monitor:
        for _ in range(250):
            tokens = torch.randint(32, (32, 16), generator=generator).repeat(1, 2)
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
            monitor.step(loss)
    assert loss.item() < 1.9, "it has learned to copy"
    assert monitor.history.panel("attention/entropy").last.min() < 0.3
    assert {alert.code for alert in monitor.alerts} & {"A106", "A107", "A108"} == set()
