"""Metrics of an attention operation, logged from the module that calls it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forewarn.measure.engine import attention_summary
from forewarn.measure.hidden_from_checkpointing import hidden_from_checkpointing
from forewarn.standalone.module_monitor import ModuleMonitor


def monitor_scaled_dot_product_attention(
    monitor: ModuleMonitor,
    module: str | nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    activation: Tensor | None = None,
    is_reference: bool = False,
) -> None:
    """Log the metrics of each head's queries, keys and values, and the mean entropy of its attention weights.

    Call it with the arguments of `torch.nn.functional.scaled_dot_product_attention`, and its result as `activation`. It
    logs `activation/{module}.head_{i}.query|key|value|activation/{metric}` and `attention_entropy/{module}.head_{i}`.
    The entropy is in nats: 0 if every query attends to one key, ln(keys) if it attends to all keys equally. Queries
    that see no key are left out. Weights are taken before dropout, so `dropout_p` has no effect and no random number is
    drawn.

    Logits are recomputed for one block of queries at a time, so memory grows with the length of the sequence, not with
    its square.
    """
    if torch._C._current_graph_task_id() != -1:  # activation checkpointing repeats a forward
        return
    name, is_reference = monitor.name_of(module, is_reference)
    if not monitor.is_monitoring(is_reference) or monitor.excluded(name):
        return
    parts = {"query": query, "key": key, "value": value}
    if activation is not None:
        parts["activation"] = activation
    parts = {part: tensor.unsqueeze(0) if tensor.dim() == 2 else tensor for part, tensor in parts.items()}
    num_heads = parts["query"].shape[-3]
    for part, tensor in parts.items():
        num_sharing = num_heads // tensor.shape[-3]  # grouped-query heads share a key and a value
        for head in range(num_heads):
            of_head = tensor[..., head // num_sharing, :, :]
            monitor.monitor_activations(f"{name}.head_{head}.{part}", of_head, is_reference)
    if is_reference:
        return
    with hidden_from_checkpointing():
        summary = attention_summary(query, key, mask=attn_mask, causal=is_causal, scale=scale)
    for head, numbers in enumerate(torch.stack([summary.entropy_sum, summary.rows], dim=1)):
        monitor.log_tensor(f"attention_entropy/{name}.head_{head}", numbers, _mean)


def _mean(sums_and_rows: Tensor) -> Tensor:
    """The mean entropy of all micro-batches; 0 where no query saw a key."""
    entropy, rows = sums_and_rows.view(-1, 2).sum(0)
    mean: Tensor = entropy / rows.clamp(min=1)
    return mean
