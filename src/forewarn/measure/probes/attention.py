"""Attention: how widely each head attends and how large its logits are, without touching the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forewarn.measure.attention_calls import STAND_IN, Attended, attended, is_multihead, multihead_attended, sampled
from forewarn.measure.engine.attention_heads import AttentionSummary, attention_summary
from forewarn.measure.forward import any_compiled, hookable_modules
from forewarn.measure.hidden_from_checkpointing import hidden_from_checkpointing
from forewarn.measure.hooks import Hook
from forewarn.measure.module_tree import children_of, named_modules
from forewarn.measure.over_ranks import How, Part, in_place
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.measure.stopwatch import Stopwatch
from forewarn.types import Reason

MAX_LOGITS = 2**20
"""Maximum number of logits recomputed per attention call: 4 MB in float32. Above that, queries are sampled."""

MAX_QUERIES = 256
"""Maximum number of queries read per head: the error of their mean is 1/16 of their standard deviation."""

_MAX_CALLS = 4
"""Maximum number of attention calls measured within one call of a module; a loop over windows may make thousands."""

_FEWEST_KEYS = 8
"""Keys that a query must see on average for a meaningful entropy: attending to one of three is not sharp."""


_OF_NO_HEAD = np.array([[0.0], [0.0], [-np.inf], [0.0]])
"""What a rank adds to the sums of a head that another one computes."""


@dataclass(slots=True)
class _Frame:
    """A running module, and the number of attention calls it has made itself."""

    name: str
    layer: str = ""
    """The name of this module, or of the nearest around it that has parameters."""
    calls: int = 0


class AttentionProbe(Probe):
    """`attention/entropy` and `attention/max_logit` per head, and per layer; on measured steps only.

    Entropy is a fraction of the maximum that the mask allows: 1 means equal attention to all keys, 0 attention to one
    key. It is recomputed from queries and keys, before dropout, for up to `MAX_QUERIES` evenly spaced queries per head
    and `MAX_LOGITS` logits per call. The largest logit is taken over the same queries.
    """

    name = "attention"
    only_measured = True
    on_every_rank = True
    from_modules = ("attention/entropy",)

    def __init__(self, parameter_index: ParameterIndex, stopwatch: Stopwatch) -> None:
        self._parameter_index = parameter_index
        self._model = parameter_index.called
        self._stopwatch = stopwatch
        self._compiled = False
        """Whether any part of the model is compiled: replacing a function would trigger recompilation."""
        self._modules: dict[str, nn.Module] = {}
        self._places: list[ModuleTap] = []
        """The taps on these modules."""
        self._running: list[_Frame] = []
        """The modules running now, innermost last; the root is always first."""
        self._seen: dict[str, AttentionSummary] = {}
        """By the layer's scope; micro-batches are added up."""
        self._layer: dict[str, str] = {}
        """By the same scope, the module with parameters that made the call, or the nearest around it."""
        self._left_out = Reason.AVAILABLE
        self._failure: Exception | None = None

    def forward_begins(self) -> None:
        self._running = [_Frame("")]
        self._compiled = any_compiled(self._model)
        if not self._compiled:
            STAND_IN.add(self, Hook(self._attended, self._fail))
        elif any(_is_attention(module) for _, module in named_modules(self._model)):
            self._left_out = Reason.COMPILED

    def module_taps(self) -> Sequence[ModuleTap]:
        if self._compiled:
            return ()
        modules = hookable_modules(self._model)
        if modules is not self._modules:
            self._modules = modules
            self._places = [
                self._place(name, module) for name, module in modules.items() if name and _may_attend(module)
            ]
        return self._places

    def forward_ended(self, output: Any) -> None:
        STAND_IN.remove(self)
        self._running = []
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _place(self, name: str, module: nn.Module) -> ModuleTap:
        has_parameters = any(True for _ in module.parameters())

        def entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(_Frame(name, name if has_parameters else self._running[-1].layer))

        def left(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            frame = self._running.pop()
            while frame.name != name:  # a module that raised never left
                frame = self._running.pop()
            # When it returns no weights, it calls the replaced function and was measured there.
            if is_multihead(module) and not frame.calls:
                with torch.no_grad():
                    self._measure(frame, multihead_attended(module, *args, **kwargs))

        return ModuleTap(module, entered, left)

    def _attended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measure a call of torch's function that the model has just made."""
        if self._failure is None and self._running:
            with self._stopwatch, hidden_from_checkpointing():
                self._measure(self._running[-1], attended(*args, **kwargs))

    def _fail(self, error: Exception) -> None:
        self._failure = error

    def _measure(self, frame: _Frame, attention: Attended) -> None:
        frame.calls += 1
        if frame.calls > _MAX_CALLS:
            return
        if not all(map(_is_plain, (attention.query, attention.key, attention.mask))):
            self._left_out = Reason.UNSUPPORTED_TENSOR
            return
        num_heads, num_keys = attention.query.shape[-3], attention.key.shape[-2]
        sample = sampled(attention, min(MAX_LOGITS, MAX_QUERIES * num_heads * num_keys))
        summary = attention_summary(
            sample.query, sample.key, mask=sample.mask, causal=sample.causal, scale=sample.scale
        )
        scope = _joined(frame.name, f"call_{frame.calls}" if frame.calls > 1 else "")
        self._layer.setdefault(scope, frame.layer)
        earlier = self._seen.get(scope)
        if earlier is None or earlier.rows.shape != summary.rows.shape:
            self._seen[scope] = summary
        else:
            self._seen[scope] = earlier.merge(summary)

    def collect(self, step: Step) -> Pending | None:
        summaries, self._seen = self._seen, {}
        reason, self._left_out = self._left_out, Reason.AVAILABLE
        if not step.measured:
            return None
        if summaries or reason is not Reason.AVAILABLE:
            step.unavailable("attention/entropy", reason)
        tensors = [
            torch.stack([summary.entropy_sum, summary.log_context_sum, summary.max_logit, summary.rows])
            for summary in summaries.values()
        ]

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            if summaries:
                yield from _readings(tuple(summaries), arrays)

        over_ranks = [Part(How.HEADS, scope) for scope in summaries]
        shards = self._parameter_index.shards
        if shards is None or shards.tensor_part[1] == 1:
            return Pending(tensors, decode, over_ranks)
        parts = [shards.part_of(self._modules.get(self._layer[scope], self._model)) for scope in summaries]

        def settle(arrays: Sequence[Array]) -> Pending:
            heads = [in_place(array, part, _OF_NO_HEAD) for array, part in zip(arrays, parts, strict=True)]
            return Pending(heads, decode, over_ranks)

        return Pending(tensors, decode, over_ranks, settle)


def _readings(layers: tuple[str, ...], sums: Sequence[Array]) -> Iterator[Reading]:
    """Readings per head and per layer, from the [4 × heads] sums of each layer."""
    heads = tuple(
        _joined(layer, f"head_{head}")
        for layer, layer_sums in zip(layers, sums, strict=True)
        for head in range(layer_sums.shape[1])
    )
    entropy, context, largest, rows = np.concatenate(sums, axis=1)
    yield Reading("attention/entropy", heads, _entropy(entropy, context, rows))
    yield Reading("attention/max_logit", heads, np.where(rows > 0, largest, np.nan))
    totals = np.array([layer_sums.sum(axis=1) for layer_sums in sums]).T
    yield Reading("attention/layer_entropy", layers, _entropy(totals[0], totals[1], totals[3]))
    highest = [np.fmax.reduce(np.where(layer_sums[3] > 0, layer_sums[2], np.nan)) for layer_sums in sums]
    yield Reading("attention/layer_max_logit", layers, highest)


def _entropy(entropy: Array, context: Array, rows: Array) -> Array:
    """Entropy as a fraction of what the mask allows; NaN where queries see too few keys."""
    enough = (rows > 0) & (context >= rows * math.log(_FEWEST_KEYS))
    return np.where(enough, entropy / np.where(enough, context, 1.0), np.nan)


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _may_attend(module: nn.Module) -> bool:
    """Whether the module's own forward may compute attention: torch's own leaves and lists do not."""
    is_leaf = not children_of(module)
    listed = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not listed and not (is_leaf and type(module).__module__.startswith("torch.nn."))


def _is_attention(module: nn.Module) -> bool:
    """Whether a module's class name mentions attention: nothing else is known about compiled modules."""
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether this is an ordinary tensor: not sharded, nested, symbolic or on the meta device."""
    if tensor is None:
        return True
    wrapped = type(tensor) not in (Tensor, nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not (wrapped or tensor.is_nested or tensor.is_meta)
