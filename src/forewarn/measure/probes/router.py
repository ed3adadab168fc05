"""Mixtures of experts: how routers distribute the tokens, and how certain they are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forewarn.measure.engine import Numbers
from forewarn.measure.engine.portable import wide
from forewarn.measure.forward import hookable_modules
from forewarn.measure.module_tree import clean_name, named_modules, unwrapped
from forewarn.measure.nested import nested_tensors
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.probe import Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.types import Reason

_MAX_VALUES = 2**20
"""Maximum number of router logits read per call; above that, evenly spaced tokens."""

_SUM_TOLERANCE = 1e-2
"""How far the sum of a row of probabilities may be from 1, also in bfloat16."""


@dataclass(slots=True)
class _Routed:
    """The routing of one router on a measured step, summed over its calls."""

    loads: Tensor
    """Tokens per expert; a token that goes to two experts counts for both."""
    entropy: Tensor
    tokens: int


class RouterProbe(Probe):
    """`router/load_share` per expert, `router/entropy` and `router/tokens` per router, for modules that `router` names.

    A router is a module whose output is, or contains, one number per expert for each token; the token goes to the
    `top_k` highest. Entropy is a fraction of ln(experts): 1 is undecided, 0 is certain.
    """

    name = "router"
    only_measured = True
    on_every_rank = True
    from_modules = ("router/load_share",)

    def __init__(self, model: nn.Module, pattern: str, top_k: int) -> None:
        self._model = model
        self._pattern = re.compile(pattern)
        self._top_k = top_k
        self._routed: dict[str, _Routed] = {}
        if not self._named():
            raise ValueError(
                f"router={pattern!r} matches no module name of this {type(unwrapped(model)).__name__}; "
                "list its modules with [name for name, _ in model.named_modules()]"
            )

    def module_taps(self) -> Sequence[ModuleTap]:
        modules = hookable_modules(self._model).items()
        return [
            ModuleTap(module, left=self._left(name)) for name, module in modules if name and self._pattern.search(name)
        ]

    def _named(self) -> list[str]:
        """The names of all routers, including those inside compiled code."""
        names = (clean_name(name) for name, _ in named_modules(unwrapped(self._model)))
        return [name for name in names if name and self._pattern.search(name)]

    def _left(self, name: str) -> Callable[..., None]:
        def left(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            logits = router_logits(output)
            if logits is not None:
                self._add(name, logits)

        return left

    def _add(self, name: str, logits: Tensor) -> None:
        num_experts = logits.shape[-1]
        rows = logits.detach().flatten(0, -2)
        rows = rows[:: -(-len(rows) // max(1, _MAX_VALUES // num_experts))]
        with torch.no_grad():
            rows = rows.to(wide(rows.device))
            experts = rows.topk(min(self._top_k, num_experts)).indices.flatten()
            loads = torch.zeros(num_experts, dtype=rows.dtype, device=rows.device)
            loads.scatter_add_(0, experts, torch.ones_like(experts, dtype=rows.dtype))
            entropy = torch.special.entr(_probabilities(rows)).sum()
        earlier = self._routed.get(name)
        if earlier is not None and earlier.loads.shape == loads.shape:
            loads, entropy = earlier.loads + loads, earlier.entropy + entropy
            self._routed[name] = _Routed(loads, entropy, earlier.tokens + len(rows))
        else:
            self._routed[name] = _Routed(loads, entropy, len(rows))

    def collect(self, step: Step) -> Pending | None:
        routed, self._routed = self._routed, {}
        if not step.measured:
            return None
        if routed or not self.module_taps():
            step.unavailable("router/load_share", Reason.AVAILABLE if routed else Reason.COMPILED)
        tensors: list[Numbers] = [torch.cat([router.entropy.reshape(1), router.loads]) for router in routed.values()]
        tensors += [np.array(float(router.tokens)) for router in routed.values()]
        parts = [Part(How.SUM, f"{what} {name}", once=True) for what in ("loads", "tokens") for name in routed]

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            if not routed:
                return
            loads, tokens = arrays[: len(routed)], list(map(float, arrays[len(routed) :]))
            yield Reading(
                "router/load_share",
                tuple(
                    f"{name}.expert_{expert}"
                    for name, sums in zip(routed, loads, strict=True)
                    for expert in range(len(sums) - 1)
                ),
                np.concatenate([sums[1:] / sums[1:].sum() for sums in loads]),
            )
            entropies = [sums[0] / count / math.log(len(sums) - 1) for sums, count in zip(loads, tokens, strict=True)]
            yield Reading("router/entropy", tuple(routed), entropies)
            yield Reading("router/tokens", tuple(routed), tokens)

        return Pending(tensors, decode, parts)


def router_logits(output: Any) -> Tensor | None:
    """The tensor in a router's output with one number per expert: the widest, since it may also return its choices."""
    tensors = (tensor for _, tensor in nested_tensors(output, max_depth=1))
    rows = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() >= 2]
    widest = max(rows, key=lambda tensor: tensor.shape[-1], default=None)
    return widest if widest is not None and widest.shape[-1] >= 2 and widest.numel() else None


def _probabilities(rows: Tensor) -> Tensor:
    """The softmax of logits; probabilities are returned unchanged."""
    already = (rows >= 0).all() & ((rows.sum(-1) - 1).abs() < _SUM_TOLERANCE).all()
    return torch.where(already, rows, rows.softmax(-1))
