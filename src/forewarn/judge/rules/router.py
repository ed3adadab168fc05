"""Rules about the routers of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forewarn.judge.registry import found, rule
from forewarn.judge.remedies import advise, lower_lr
from forewarn.judge.series import Panel
from forewarn.thresholds.activations import DeadExpert
from forewarn.types import Finding, Severity


@rule(
    "A109", "dead-expert", reads=("router/tokens", "router/load_share"), per_scope=True, keep=200,
    explains=("U103", "G103"),
    remedies=(
        advise("balance_loads", "an auxiliary loss on the loads gives the router a reason to use every expert "
               "(Switch Transformer)", scope_is="router", weight=0.01),
        advise("add_router_noise", "noise on the logits lets an expert that is never chosen be tried again",
               scope_is="router"),
        lower_lr(0.5, "a router that settles before its experts differ never looks at some of them"),
    ),
)  # fmt: skip
def dead_expert(tokens: Panel, loads: Panel, config: DeadExpert) -> Iterator[Finding]:
    """Expert that gets next to no tokens.

    ## Why is this bad?
    An expert that no token reaches gets no gradient, so it never becomes worth choosing: its parameters are paid for
    and not used, and the others carry its load. A load that is merely uneven is not reported. The finding is about a
    router; the evidence counts its dead experts and names the emptiest.

    ## Example
    fires: router/tokens{gate} 64x8 | router/load_share{gate.expert_0} 1x8 | router/load_share{gate.expert_1} 0x8
    quiet: router/tokens{gate} 64x8 | router/load_share{gate.expert_0} 0.9x8 | router/load_share{gate.expert_1} 0.1x8
    quiet: router/tokens{gate} 8x8 | router/load_share{gate.expert_0} 1x8 | router/load_share{gate.expert_1} 0x8
    """
    if len(loads) < config.window or len(tokens) < config.window or loads.at != tokens.at:
        return
    owners = np.array([scope.rpartition(".expert_")[0] for scope in loads.scopes], object)
    for at, router in enumerate(tokens.scopes):
        own = np.flatnonzero(owners == router)
        counts = tokens.values[-config.window :, at].astype(np.float64)
        total = counts.sum()
        if len(own) < 2 or not config.tokens <= total / len(own) < np.inf:
            continue
        shares = (counts[:, None] * loads.values[-config.window :, own].astype(np.float64)).sum(axis=0) / total
        bound = config.share / len(own)
        dead = np.flatnonzero(shares <= bound)
        if len(dead):
            emptiest = own[np.argmin(shares)]
            yield found(
                Severity.WARNING, float(np.min(shares)), bound, router,
                experts=len(own), dead_experts=len(dead), emptiest=loads.scopes[emptiest],
            )  # fmt: skip
