"""Rules about attention heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.growth import LogitGrowth, severity_of, too_large
from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise, clip_gradient, lower_lr, warm_up
from forewarn.judge.series import Bools, Panel
from forewarn.settings import Settings, between
from forewarn.types import Finding, Severity

_NORMALIZE = advise(
    "normalize_queries_and_keys",
    "Normalize the queries and keys of {scope}",
    "this bounds the logits, however large the weights become (Dehghani et al. 2023)",
    scope_is="layer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionEntropyCollapse(Settings):
    """When `attention-entropy-collapse` fires."""

    entropy: float = between(0.05, 0.0, 1.0)
    """Fraction of the maximum entropy at or below which a head attends to a single key."""
    checks: int = between(3, 1, counts="readings")
    """Number of checks in a row at or below it."""


@rule(
    "A106", "attention-entropy-collapse", reads=("attention/layer_entropy", "attention/entropy"), per_scope=True,
    keep=100, explains=("L102", "L103", "L107", "G102", "G103", "G104"),
    settings=AttentionEntropyCollapse,
    message=(
        Message(
            "Heads in {scope} attend to a single key",
            "mean entropy {value:%} of maximum · limit {bound:%} · sharp heads {sharp_heads} of {heads} · "
            "sharpest {sharpest}",
        ),
        Message("Heads in {scope} attend to a single key", "mean entropy {value:%} of maximum · limit {bound:%}"),
    ),
    remedies=(
        _NORMALIZE,
        advise("check_attention_scale", "Divide the logits of {scope} by √head_dim, once",
               "a missing scale or a temperature that is too low makes every head attend to one key",
               scope_is="layer"),
        lower_lr(0.5, "queries and keys grow with the learning rate; a softmax that has settled passes no gradient"),
        warm_up(),
    ),
)  # fmt: skip
def attention_entropy_collapse(layers: Panel, heads: Panel, settings: AttentionEntropyCollapse) -> Iterator[Finding]:
    """All heads of an attention layer attend to a single key.

    ## Why is this bad?
    A softmax that puts all its weight on one key passes no gradient to its queries and keys. The layer can no longer
    learn where to look, and training stalls or becomes unstable (Zhai et al. 2023). The rule judges the mean over the
    heads of a layer, as a fraction of the entropy that its mask allows. It skips layers whose queries see few keys.

    One sharp head among others is information, not a warning. Healthy language models have heads that copy the previous
    token or rest on the first one.

    ## Example
    fires: attention/layer_entropy{attention} 0.9x5 0.04x3
    fires: attention/layer_entropy{attention} 0.5x3 | attention/entropy{attention.head_0} 0.01x3
    quiet: attention/layer_entropy{attention} 0.9x5 0.04x2 0.1
    quiet: attention/layer_entropy{attention} 0.5x3 | attention/entropy{attention.head_0} 0.2x3
    """
    together = heads.at == layers.at
    collapsed = _stays_below(layers, settings)
    sharp = _stays_below(heads, settings) if together else np.zeros(len(heads.scopes), np.bool_)
    for layer in np.flatnonzero(collapsed | _has(layers, heads, sharp)):
        layer_heads = _heads_of(layers.scopes[layer], heads) if together else np.empty(0, np.intp)
        evidence: dict[str, float | str] = {"heads": len(layer_heads), "sharp_heads": int(sharp[layer_heads].sum())}
        if len(layer_heads):
            sharpest = layer_heads[np.argmin(np.nan_to_num(heads.last[layer_heads], nan=np.inf))]
            evidence |= {"sharpest": heads.scopes[sharpest], "its_entropy": heads.last[sharpest]}
        yield finding(
            Severity.WARNING if collapsed[layer] else Severity.INFO,
            layers.last[layer], settings.entropy, layers.scopes[layer], **evidence,
        )  # fmt: skip


def _stays_below(entropy: Panel, settings: AttentionEntropyCollapse) -> Bools:
    """Which scopes have been at or below the limit for long enough."""
    if len(entropy) < settings.checks:
        return np.zeros(len(entropy.scopes), np.bool_)
    below: Bools = np.logical_and.reduce(entropy.values[-settings.checks :] <= np.float32(settings.entropy), axis=0)
    return below


def _has(layers: Panel, heads: Panel, chosen: Bools) -> Bools:
    """Which layers own one of these heads."""
    owners = {_layer_of(heads.scopes[head]) for head in np.flatnonzero(chosen)}
    return np.array([layer in owners for layer in layers.scopes] if owners else [False] * len(layers.scopes), np.bool_)


def _heads_of(layer: str, heads: Panel) -> NDArray[np.intp]:
    return np.array([index for index, head in enumerate(heads.scopes) if _layer_of(head) == layer], np.intp)


def _layer_of(head: str) -> str:
    """`blocks.0.attention` for `blocks.0.attention.head_3`; empty if the model itself is the layer."""
    return head.rpartition(".head_")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLogitGrowth(LogitGrowth):
    """When `attention-logit-growth` fires."""


@rule(
    "A107", "attention-logit-growth", reads=("attention/layer_max_logit", "attention/max_logit"), per_scope=True,
    hold=3, keep=200, explains=("A106", "L101", "L102", "L103", "L107", "L108", "E107", "G101", "G102", "G103", "G104"),
    settings=AttentionLogitGrowth,
    message=Message(
        "Attention logits in {scope} are too large",
        "largest logit {value} · limit {bound} · earlier {began_at}",
    ),
    remedies=(
        _NORMALIZE,
        lower_lr(0.5, "logits are queries times keys, so they grow twice as fast as either"),
        advise("clip_query_and_key_weights", "Scale down query and key weights until logits are below {limit}",
               "scaling both by √(limit / logit) brings the logits back to the limit at once (MuonClip)",
               scope_is="layer", limit=100),
        warm_up(),
        clip_gradient(),
    ),
)  # fmt: skip
def attention_logit_growth(layers: Panel, heads: Panel, settings: AttentionLogitGrowth) -> Iterator[Finding]:
    """Attention logits are too large, or growing fast.

    ## Why is this bad?
    Nothing in attention bounds the product of queries and keys. Growing logits sharpen the softmax, which sends larger
    gradients to fewer places, which makes the logits grow further. This is the best-known way for large transformers to
    diverge, and it begins long before the loss shows it. In bfloat16, logits above 100 are also too coarse for a
    softmax. The finding is about a layer; the evidence names its worst head.

    ## Example
    fires: attention/layer_max_logit{attention} 8.0x5 150.0x3
    fires: attention/layer_max_logit{attention} 10.0+5x16
    quiet: attention/layer_max_logit{attention} 60.0+0.1x50
    quiet: attention/layer_max_logit{attention} 8.0x5 150.0x2 9.0x5
    """
    if not len(layers):
        return
    for index in np.flatnonzero(too_large(layers.values, settings)):
        layer, value = layers.scopes[index], float(layers.last[index])
        evidence: dict[str, float | str] = {"began_at": layers.values[-settings.window :][0, index]}
        layer_heads = _heads_of(layer, heads) if heads.at == layers.at else np.empty(0, np.intp)
        if len(layer_heads):
            worst = layer_heads[np.argmax(np.nan_to_num(heads.last[layer_heads], nan=-np.inf))]
            evidence["head"] = heads.scopes[worst]
        bound = settings.limit if value > settings.limit else settings.growing_limit
        yield finding(severity_of(value, settings), value, bound, layer, **evidence)


@dataclass(frozen=True, kw_only=True)
class AttentionThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    attention_entropy_collapse: AttentionEntropyCollapse = AttentionEntropyCollapse()
    attention_logit_growth: AttentionLogitGrowth = AttentionLogitGrowth()
