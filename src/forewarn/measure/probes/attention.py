"""Attention: how each head spreads its attention and how large its logits are, without touching the model."""

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
from forewarn.measure.probe import Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.probes.speed import Stopwatch
from forewarn.measure.step import Step
from forewarn.types import Reason

MAX_LOGITS = 2**20
"""Logits computed anew for one attention: 4 MB in float32. Beyond, queries are sampled."""

MAX_QUERIES = 256
"""Queries of a head that are looked at: their mean is off by a sixteenth of how far one differs from another."""

_MAX_CALLS = 4
"""Attentions within one call of one module that are told apart; a loop over windows may make thousands."""

_FEWEST_KEYS = 8
"""Keys that a query must see on average for an entropy to mean something: looking at one of three is not sharp."""


@dataclass(slots=True)
class _Frame:
    """A module that is running, and how many attentions it has made itself."""

    name: str
    calls: int = 0


class AttentionProbe(Probe):
    """`attention/entropy` and `attention/max_logit` per head, and per layer; on measured steps only.

    Entropy is a share of the most that the mask allows: 1 looks at all keys alike, 0 at one. It is computed anew from
    queries and keys, before dropout: of some `MAX_QUERIES` evenly spaced queries per head, and no more than
    `MAX_LOGITS` logits per attention. The largest logit is that of these queries.
    """

    name = "attention"

    def __init__(self, model: nn.Module, stopwatch: Stopwatch) -> None:
        self._model = model
        self._stopwatch = stopwatch
        self._compiled = False
        """Whether a part of the model is: what finds another function under its name would be compiled anew."""
        self._modules: dict[str, nn.Module] = {}
        self._places: list[ModuleTap] = []
        """Where these modules are entered and left."""
        self._running: list[_Frame] = []
        """The modules that run now, innermost last; the root is always the first."""
        self._seen: dict[str, AttentionSummary] = {}
        """By the scope of the layer; micro-batches are added up."""
        self._left_out = Reason.AVAILABLE
        self._failure: Exception | None = None

    def forward_begins(self) -> None:
        self._running = [_Frame("")]
        self._compiled = any_compiled(self._model)
        if not self._compiled:
            STAND_IN.add(self._attended)
        elif any(map(_is_attention, self._model.modules())):
            self._left_out = Reason.COMPILED

    def module_taps(self) -> Sequence[ModuleTap]:
        if self._compiled:
            return ()
        modules = hookable_modules(self._model)
        if modules is not self._modules:
            self._modules = modules
            self._places = [self._place(name, each) for name, each in modules.items() if name and _may_attend(each)]
        return self._places

    def forward_ended(self, output: Any) -> None:
        STAND_IN.remove(self._attended)
        self._running = []
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _place(self, name: str, module: nn.Module) -> ModuleTap:
        def entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(_Frame(name))

        def left(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            frame = self._running.pop()
            while frame.name != name:  # a module that raised never left
                frame = self._running.pop()
            # Without weights to return it calls the function that is stood in for, and has been seen there.
            if is_multihead(module) and not frame.calls:
                with torch.no_grad():
                    self._measure(frame, multihead_attended(module, *args, **kwargs))

        return ModuleTap(module, entered, left)

    def _attended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model has just called torch's function; nothing that goes wrong here may reach it."""
        if self._failure is None and self._running:
            with self._stopwatch, hidden_from_checkpointing():
                try:
                    self._measure(self._running[-1], attended(*args, **kwargs))
                except Exception as error:
                    self._failure = error

    def _measure(self, frame: _Frame, given: Attended) -> None:
        frame.calls += 1
        if frame.calls > _MAX_CALLS:
            return
        if not all(map(_is_plain, (given.query, given.key, given.mask))):
            self._left_out = Reason.UNSUPPORTED_TENSOR
            return
        num_heads, num_keys = given.query.shape[-3], given.key.shape[-2]
        few = sampled(given, min(MAX_LOGITS, MAX_QUERIES * num_heads * num_keys))
        found = attention_summary(few.query, few.key, mask=few.mask, causal=few.causal, scale=few.scale)
        scope = _joined(frame.name, f"call_{frame.calls}" if frame.calls > 1 else "")
        known = self._seen.get(scope)
        if known is None or known.rows.shape != found.rows.shape:
            self._seen[scope] = found
        else:
            self._seen[scope] = known.merge(found)

    def collect(self, step: Step) -> Pending | None:
        STAND_IN.remove(self._attended)  # an interrupted pass has no end
        seen, self._seen = self._seen, {}
        reason, self._left_out = self._left_out, Reason.AVAILABLE
        if not step.measured:
            return None
        if seen or reason is not Reason.AVAILABLE:
            step.unavailable("attention/entropy", reason)
        tensors = [
            torch.stack([each.entropy_sum, each.log_context_sum, each.max_logit, each.rows]) for each in seen.values()
        ]

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            if seen:
                yield from _readings(tuple(seen), arrays)

        return Pending(tensors, decode)


def _readings(layers: tuple[str, ...], sums: Sequence[Array]) -> Iterator[Reading]:
    """Per head and per layer, from [4 × heads] sums of each layer."""
    heads = tuple(
        _joined(layer, f"head_{at}") for layer, each in zip(layers, sums, strict=True) for at in range(each.shape[1])
    )
    entropy, context, largest, rows = np.concatenate(sums, axis=1)
    yield Reading("attention/entropy", heads, _entropy(entropy, context, rows))
    yield Reading("attention/max_logit", heads, np.where(rows > 0, largest, np.nan))
    totals = np.array([each.sum(axis=1) for each in sums]).T
    yield Reading("attention/layer_entropy", layers, _entropy(totals[0], totals[1], totals[3]))
    highest = [np.fmax.reduce(np.where(each[3] > 0, each[2], np.nan)) for each in sums]
    yield Reading("attention/layer_max_logit", layers, highest)


def _entropy(entropy: Array, context: Array, rows: Array) -> Array:
    """As a share of what the mask allows; NaN where queries see too few keys to say."""
    enough = (rows > 0) & (context >= rows * math.log(_FEWEST_KEYS))
    return np.where(enough, entropy / np.where(enough, context, 1.0), np.nan)


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _may_attend(module: nn.Module) -> bool:
    """Whether attention may be computed in the module's own forward: not in leaves that torch brings, nor in lists."""
    is_leaf = next(module.children(), None) is None
    listed = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not listed and not (is_leaf and type(module).__module__.startswith("torch.nn."))


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is attention by its class, as far as names tell: all that can be known of compiled ones."""
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether torch operations on a tensor simply compute: no shards, no ragged lengths, nothing symbolic."""
    if tensor is None:
        return True
    wrapped = type(tensor) not in (Tensor, nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not (wrapped or tensor.is_nested or tensor.is_meta)
