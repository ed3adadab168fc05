"""Dead experts: none of the tokens over many checks, not merely few of them."""

import numpy as np

import forewarn
from tests.judge.rules.runs import Run
from tests.real_runs import Breakable, Mixture


def routed(shares, checks=8, tokens=256, router="gate"):
    run = Run("A109")
    for at in range(checks):
        now = shares(at) if callable(shares) else shares
        run.feed({
            "router/tokens": {router: tokens},
            "router/load_share": {f"{router}.expert_{number}": share for number, share in enumerate(now)},
        })  # fmt: skip
    return run.ledger.alerts


def test_dead_experts_are_counted_and_the_emptiest_is_named():
    (alert,) = routed([0.5, 0.002, 0.498, 0.0])
    assert alert.scope == "gate"
    assert alert.finding.evidence == {"experts": 4, "dead_experts": 2, "emptiest": "gate.expert_3"}


def test_an_uneven_load_is_quiet():
    assert routed([0.6, 0.3, 0.08, 0.02]) == ()


def test_an_expert_that_comes_back_within_the_window_is_quiet():
    assert routed(lambda at: [0.9, 0.1] if at % 4 == 0 else [1.0, 0.0], checks=20) == ()


def test_too_few_tokens_say_nothing():
    assert routed([1.0, 0.0], tokens=4) == ()
    assert routed([1.0, 0.0], checks=7) == ()


def test_a_router_that_was_not_used_at_some_checks_says_nothing():
    assert routed(lambda at: [1.0, 0.0] if at else [np.nan, np.nan]) == ()


def test_a_healthy_mixture_is_quiet(tmp_path):
    it = Breakable(tmp_path / "run", Mixture())
    it.config = forewarn.Config(measure=forewarn.Measure(router="router$"))
    monitor = it.train(100)
    assert "A109" not in {alert.code for alert in monitor.alerts}
    assert (monitor.history.panel("router/load_share").values.mean(axis=0) > 0.05).all()
