"""How each attention head spreads its attention, from its queries and keys, a block of queries at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forewarn.measure.engine.portable import wide

MAX_LOGITS = 2**22
"""Maximum number of logits held at a time if `block` is not given: 16 MB in float32."""

SHUT_OUT = -1e4
"""An additive mask at or below this value hides a key. Models write minus infinity differently: −1e4 in the first BERT,
the lowest float in transformers. Next to any other key, the weight e^−1e4 is zero even in double precision."""


@dataclass(frozen=True, slots=True)
class AttentionSummary:
    """Sums per head over all queries that see a key, so that micro-batches add up exactly.

    The mean entropy is `entropy_sum / rows`; as a share of its maximum, `entropy_sum / log_context_sum`.
    Each field is a tensor [heads] on the device of the queries.
    """

    entropy_sum: Tensor
    """Sum of the entropies of each query's attention weights, in nats: 0 for one key, ln(keys) if all are equal."""

    log_context_sum: Tensor
    """Sum of ln(number of keys that a query sees)."""

    max_logit: Tensor
    """The largest input of the softmax; −inf for a head that sees no key."""

    rows: Tensor
    """Number of queries that see at least one key; the others are not counted."""

    def merge(self, other: AttentionSummary) -> AttentionSummary:
        """The summary of both micro-batches together."""
        return AttentionSummary(
            self.entropy_sum + other.entropy_sum,
            self.log_context_sum + other.log_context_sum,
            torch.maximum(self.max_logit, other.max_logit),
            self.rows + other.rows,
        )


def attention_summary(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    block: int | None = None,
) -> AttentionSummary:
    """Entropy and largest logit of each head of `scaled_dot_product_attention(query, key, …)`.

    `query` is [..., heads, queries, width] and `key` [..., heads or a divisor of them, keys, width]. `mask` broadcasts
    to [..., heads, queries, keys]: True where a key is seen, or a number added to the logit. Like torch, `causal`
    lets query i see the keys 0 to i, and `scale` is 1/√width unless given. At most `block` queries are held at a time.

    Computed in at least float32, even under autocast. Draws no random numbers, needs no host sync, keeps nothing for
    backward.
    """
    query, key = (tensor.detach() if tensor.dim() > 2 else tensor.detach().unsqueeze(0) for tensor in (query, key))
    num_heads, num_queries, width = query.shape[-3:]
    if num_heads % key.shape[-3]:
        raise ValueError(f"{num_heads} query heads do not share {key.shape[-3]} key heads evenly")
    if not query.numel() or not key.numel():
        return _nothing(num_heads, query.device)
    summary: AttentionSummary | None = None
    if block is None:
        block = max(1, MAX_LOGITS // (query.shape[:-2].numel() * key.shape[-2]))
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        precise = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
        key = key.to(precise)
        for start in range(0, num_queries, block):
            stop = min(start + block, num_queries)
            # Keys that no query of the block may see are left out of the multiplication.
            num_keys = min(stop, key.shape[-2]) if causal else key.shape[-2]
            scaled = query[..., start:stop, :].to(precise) * (1 / math.sqrt(width) if scale is None else scale)
            logits = _logits(scaled, key[..., :num_keys, :])
            visible = torch.ones(stop - start, num_keys, dtype=torch.bool, device=query.device)
            if causal:
                visible = visible.tril(start)
            if mask is not None:
                bias = _part(mask.detach(), start, stop, num_keys)
                visible = visible & (bias if bias.dtype == torch.bool else bias > SHUT_OUT)
                if bias.dtype != torch.bool:
                    logits += bias.where(bias > SHUT_OUT, 0.0)
            part = _summarize(logits, visible)
            summary = part if summary is None else summary.merge(part)
    assert summary is not None
    return summary


def _logits(query: Tensor, key: Tensor) -> Tensor:
    """[..., heads, queries, keys]; heads that share a key become more rows, so that no key is repeated."""
    *batch, num_heads, num_queries, width = query.shape
    shared = query.reshape(*batch, key.shape[-3], -1, width)
    return (shared @ key.transpose(-2, -1)).view(*batch, num_heads, num_queries, key.shape[-2])


def _part(mask: Tensor, start: int, stop: int, num_keys: int) -> Tensor:
    """The part of a mask for some queries and the first keys, where it does not broadcast over them."""
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., start:stop, :]
    return mask[..., :num_keys]


def _summarize(logits: Tensor, visible: Tensor) -> AttentionSummary:
    """The summary of a block of queries; overwrites the logits.

    Logits of hidden keys must be finite, or the entropy is NaN, like the output of torch's own attention then. With m
    the largest logit, the entropy −Σ p ln p is −ln p(m) − Σ p · (l − m), in which large numbers cancel out.
    """
    num_seen = visible.sum(-1)
    sees = num_seen > 0
    shut = torch.zeros(visible.shape, dtype=logits.dtype, device=logits.device).masked_fill_(~visible, -math.inf)
    masked = logits + shut
    most = masked.amax(-1)
    weights = masked.softmax(-1)
    logits -= most.where(sees, 0.0).unsqueeze(-1)
    entropy = (-weights.amax(-1).log() - torch.linalg.vecdot(weights, logits)).where(sees, 0.0)

    def by_head(numbers: Tensor) -> Tensor:
        return numbers.expand(most.shape).movedim(-2, 0).flatten(1)

    precise = wide(logits.device)
    return AttentionSummary(
        by_head(entropy).sum(1, dtype=precise),
        by_head(num_seen.clamp(min=1).to(logits.dtype).log()).sum(1, dtype=precise),
        by_head(most).amax(1).to(precise),
        by_head(sees).sum(1, dtype=precise),
    )


def _nothing(num_heads: int, device: torch.device) -> AttentionSummary:
    """The summary before any query was read."""
    zeros = torch.zeros(num_heads, dtype=wide(device), device=device)
    return AttentionSummary(zeros, zeros, zeros - math.inf, zeros)
