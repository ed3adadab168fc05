"""Rules about the routers of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise, lower_lr
from forewarn.judge.series import Panel
from forewarn.settings import Settings, between
from forewarn.types import Finding, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadExpert(Settings):
    """When `dead-expert` fires."""

    share: float = between(0.02, 0.0, 1.0)
    """Fraction of an even load at or below which an expert counts as dead."""
    window: int = between(8, 1, counts="readings")
    """Number of recent readings over which the load is summed."""
    tokens: int = between(64, 1)
    """Minimum number of tokens per expert in that window, if the load were even."""


@rule(
    "A109", "dead-expert", reads=("router/tokens", "router/load_share"), per_scope=True, keep=200,
    explains=("U103", "G103"),
    settings=DeadExpert,
    message=Message(
        "{dead_experts} of {experts} experts get almost no tokens in {scope}",
        "share of tokens {value:%} · expected above {bound:%} · least used {emptiest}",
    ),
    remedies=(
        advise("balance_loads", "Add a load-balancing loss with weight {weight}",
               "it gives the router a reason to use every expert (Switch Transformer)", scope_is="router", weight=0.01),
        advise("add_router_noise", "Add noise to the logits of {scope}",
               "the router then tries experts again that it never picks", scope_is="router"),
        lower_lr(0.5, "a router that settles too early ignores some experts for good"),
    ),
)  # fmt: skip
def dead_expert(tokens: Panel, loads: Panel, settings: DeadExpert) -> Iterator[Finding]:
    """An expert gets almost no tokens.

    ## Why is this bad?
    An expert without tokens gets no gradient, so it never becomes worth choosing. You pay for its parameters without
    using them, and the other experts carry its load. A load that is merely uneven does not fire. There is one alert
    per router; its evidence counts the dead experts and names the least used one.

    ## Example
    fires: router/tokens{gate} 64x8 | router/load_share{gate.expert_0} 1x8 | router/load_share{gate.expert_1} 0x8
    quiet: router/tokens{gate} 64x8 | router/load_share{gate.expert_0} 0.9x8 | router/load_share{gate.expert_1} 0.1x8
    quiet: router/tokens{gate} 8x8 | router/load_share{gate.expert_0} 1x8 | router/load_share{gate.expert_1} 0x8
    """
    if len(loads) < settings.window or len(tokens) < settings.window or loads.at != tokens.at:
        return
    owners = np.array([scope.rpartition(".expert_")[0] for scope in loads.scopes], object)
    for index, router in enumerate(tokens.scopes):
        experts = np.flatnonzero(owners == router)
        counts = tokens.values[-settings.window :, index].astype(np.float64)
        total = counts.sum()
        if len(experts) < 2 or not settings.tokens <= total / len(experts) < np.inf:
            continue
        shares = (counts[:, None] * loads.values[-settings.window :, experts].astype(np.float64)).sum(axis=0) / total
        bound = settings.share / len(experts)
        dead = np.flatnonzero(shares <= bound)
        if len(dead):
            emptiest = experts[np.argmin(shares)]
            yield finding(
                Severity.WARNING, float(np.min(shares)), bound, router,
                experts=len(experts), dead_experts=len(dead), emptiest=loads.scopes[emptiest],
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RouterThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    dead_expert: DeadExpert = DeadExpert()
