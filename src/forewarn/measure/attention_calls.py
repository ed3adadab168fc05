"""Intercepts attention: a stand-in for torch's function, and the inputs of `nn.MultiheadAttention`."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

Listener = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Receives the arguments of an attention call."""

_log = logging.getLogger("forewarn")


@dataclass(frozen=True, slots=True)
class Attended:
    """The inputs of one attention call, without the values."""

    query: Tensor
    """[..., heads, queries, width]."""
    key: Tensor
    """[..., heads or a divisor of them, keys, width]."""
    mask: Tensor | None
    """Broadcasts to [..., heads, queries, keys]: True where a key is seen, or a number added to the logit."""
    causal: bool
    scale: float | None


def sampled(attention: Attended, max_logits: int, fewest_queries: int = 16) -> Attended:
    """The same attention for evenly spaced sequences and queries, so that at most `max_logits` are computed.

    At least one query of one sequence stays, and always the last query of each sequence, since it sees the most keys.
    Whole sequences are dropped once fewer than `fewest_queries` of each would be read: one query says little about a
    head.
    """
    query, key, mask = attention.query, attention.key, attention.mask
    batch = query.shape[:-3]
    if key.shape[:-3] != batch:
        batch = torch.broadcast_shapes(batch, key.shape[:-3])
        query, key = query.expand(*batch, *query.shape[-3:]), key.expand(*batch, *key.shape[-3:])
    num_queries, per_query = query.shape[-2], query.shape[:-2].numel() * key.shape[-2]
    if num_queries * per_query <= max_logits:
        return replace(attention, query=query, key=key)
    if len(batch) > 0:
        num_sequences = max_logits // (min(fewest_queries, num_queries) * (per_query // batch[0]))
        every = -(-batch[0] // max(1, num_sequences))
        if mask is not None and mask.dim() == query.dim() and len(mask) > 1:
            mask = mask[::every]
        query, key = query[::every], key[::every]
    per_query = query.shape[:-2].numel() * key.shape[-2]
    every = -(-num_queries // max(1, max_logits // per_query))
    first = (num_queries - 1) % every
    query = query[..., first::every, :]
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., first::every, :]
    if attention.causal:
        positions = torch.arange(first, num_queries, every, device=query.device)
        mask = torch.arange(key.shape[-2], device=query.device) <= positions.unsqueeze(-1)
    return Attended(query, key, mask, False, attention.scale)


class StandIn:
    """Replaces `torch.nn.functional.scaled_dot_product_attention` while anyone listens.

    It calls the original with the same arguments, so results stay bit-identical, dropout included, and then passes them
    to the listeners of this thread. All monitors share one, since they come and go in any order. Code that holds a copy
    of the name (`from torch.nn.functional import …`) bypasses it.
    """

    def __init__(self) -> None:
        self._listeners: list[tuple[int, object, Listener]] = []
        """Each with its thread id and its owner."""
        self._put: Callable[..., Tensor] | None = None
        self._original: Callable[..., Tensor] | None = None

    def add(self, owner: object, listener: Listener) -> None:
        """Listen to the calls of this thread until `remove(owner)`."""
        self.remove(owner)
        if self._put is None:
            self._original = functional.scaled_dot_product_attention
            self._put = self._replacement(self._original)
            functional.scaled_dot_product_attention = self._put
        self._listeners.append((threading.get_ident(), owner, listener))

    def remove(self, *owners: object) -> None:
        """Stop listening; the last listener restores the original, unless someone else has replaced it since.

        Safe to call again: it finishes what an interrupt left half done.
        """
        if self._put is None:
            return
        mine = set(map(id, owners))
        self._listeners = [entry for entry in self._listeners if id(entry[1]) not in mine]
        if not self._listeners:
            if functional.scaled_dot_product_attention is self._put and self._original is not None:
                functional.scaled_dot_product_attention = self._original
            self._put = None

    def _replacement(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
            output = original(*args, **kwargs)
            if not torch.compiler.is_compiling() and self._put is scaled_dot_product_attention:
                try:
                    self._pass_on(args, kwargs)
                except Exception:
                    _log.exception("the monitor failed to measure an attention call; training goes on")
            return output

        return scaled_dot_product_attention

    def _pass_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:  # activation checkpointing repeats a forward
            return
        current_thread = threading.get_ident()
        for thread, _, listener in list(self._listeners):
            if thread == current_thread:
                listener(args, kwargs)


STAND_IN = StandIn()


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attended:
    """The arguments of `scaled_dot_product_attention` by name, with a head dimension added if it is missing.

    Of DTensors, the heads and batches that this rank holds.
    """
    query, key = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (query, key))
    if attn_mask is not None and hasattr(attn_mask, "to_local"):
        attn_mask = attn_mask.to_local()
    if query.dim() == 3:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
    return Attended(query, key, attn_mask, is_causal, scale)


def is_multihead(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether a module runs the forward of `nn.MultiheadAttention`, which a subclass may override."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def multihead_attended(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Attended:
    """The inputs of the attention in `nn.MultiheadAttention`, recomputed from its arguments; call with no gradients."""
    query, key = (_batch_first(tensor, module.batch_first) for tensor in (query, key))
    if module._qkv_same_embed_dim:
        query_weight, key_weight, _ = module.in_proj_weight.chunk(3)
    else:
        query_weight, key_weight = module.q_proj_weight, module.k_proj_weight
    query_bias, key_bias, _ = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    queries = _by_head(functional.linear(query, query_weight, query_bias), module.num_heads)
    projected = functional.linear(key, key_weight, key_bias)
    if module.bias_k is not None:
        projected = torch.cat([projected, module.bias_k.to(projected.dtype).expand(len(projected), 1, -1)], dim=1)
    keys = _by_head(projected, module.num_heads)
    if module.add_zero_attn:
        keys = torch.cat([keys, torch.zeros_like(keys[..., :1, :])], dim=-2)
    mask = _added([_over_heads(attn_mask, module.num_heads), _over_batch(key_padding_mask)], queries.dtype)
    if mask is not None:
        mask = functional.pad(mask, (0, keys.shape[-2] - mask.shape[-1]))
    return Attended(queries, keys, mask, False, None)


def _batch_first(tensor: Tensor, already: bool) -> Tensor:
    """Rearrange to [batch, length, features]; a missing batch dimension is added."""
    if tensor.dim() == 2:
        return tensor.unsqueeze(0)
    return tensor if already else tensor.transpose(0, 1)


def _by_head(tensor: Tensor, num_heads: int) -> Tensor:
    parted: Tensor = tensor.unflatten(-1, (num_heads, -1))
    return parted.transpose(1, 2)


def _over_heads(mask: Tensor | None, num_heads: int) -> Tensor | None:
    """Reshape [batch · heads, queries, keys] to [batch, heads, queries, keys]; leave [queries, keys] unchanged."""
    if mask is None or mask.dim() == 2:
        return mask
    parted: Tensor = mask.unflatten(0, (-1, num_heads))
    return parted


def _over_batch(mask: Tensor | None) -> Tensor | None:
    """Reshape [batch, keys] or [keys] to [batch, 1, 1, keys]."""
    return None if mask is None else mask.reshape(-1, 1, 1, mask.shape[-1])


def _added(masks: list[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """Combine both masks into an additive one; True means hidden, unlike in `scaled_dot_product_attention`."""
    total: Tensor | None = None
    for mask in masks:
        if mask is not None:
            hidden = mask.dtype is torch.bool
            number = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf) if hidden else mask
            total = number if total is None else total + number
    return total
