"""The last layer that several losses share, read from the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from forewarn.measure.module_tree import clean_name
from forewarn.types import Reason

_FORBIDDING = {
    "CheckpointFunctionBackward": Reason.REENTRANT_CHECKPOINT,
    "CompiledFunctionBackward": Reason.COMPILED,
}
"""Graph nodes that the monitor's own backward pass cannot or must not go through."""

_SHARDING = ("FSDPModule", "FullyShardedDataParallel")

_LEAF = "torch::autograd::AccumulateGrad"


def obstacle(losses: Sequence[Tensor], model: nn.Module) -> Reason:
    """Why `torch.autograd.grad` is not safe on these losses; AVAILABLE if it is."""
    if _is_sharded(model):
        return Reason.SHARDED_PARAMETERS
    for loss in losses:
        for node in _reached(loss):
            if node.name() in _FORBIDDING:
                return _FORBIDDING[node.name()]
            if node.name() == "_DDPSinkBackward" and node.ddp_weakref().static_graph:
                return Reason.STATIC_GRAPH
    return Reason.AVAILABLE


def last_shared_layer(losses: Sequence[Tensor], model: nn.Module) -> tuple[str, list[nn.Parameter]]:
    """The name and the trainable parameters of the last layer that every loss reaches; `("", [])` if there is none.

    torch numbers the nodes of a graph in the order of the forward pass. So the last layer is the one whose first use
    comes latest, in whatever order the model lists its layers. A tied weight counts by its use at the input, since a
    pass down to it would go through the whole model. Layers with a matrix take precedence: the scale of a normalization
    says little about a task.
    """
    uses = [_first_uses(loss) for loss in losses]
    common = set.intersection(*map(set, uses))
    used_from = {key: min(first_uses[key] for first_uses in uses) for key in common}
    best: tuple[bool, int] = (False, -1)
    layer: tuple[str, list[nn.Parameter]] = ("", [])
    for name, module in model.named_modules():
        own = [weight for weight in module.parameters(recurse=False) if weight.requires_grad and id(weight) in common]
        if own:
            rank = (any(weight.ndim >= 2 for weight in own), max(used_from[id(weight)] for weight in own))
            if rank > best:
                best, layer = rank, (clean_name(name), own)
    return layer


def _is_sharded(model: nn.Module) -> bool:
    """Whether a model uses FSDP or tensor parallelism: a pass on one rank alone would wait for the others forever.

    It checks the modules' classes, since FSDP2 may show whole parameters between forward and backward.
    """
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    sharded = any(hasattr(parameter, "to_local") for parameter in model.parameters())
    return sharded or not classes.isdisjoint(_SHARDING)


def _first_uses(loss: Tensor) -> dict[int, int]:
    """By the id of each leaf tensor, the number of the first node behind a loss that uses it."""
    uses: dict[int, int] = {}
    for node in _reached(loss):
        for following, _ in node.next_functions:
            if following is not None and following.name() == _LEAF:
                key = id(following.variable)
                uses[key] = min(uses.get(key, node._sequence_nr()), node._sequence_nr())
    return uses


def reached_parameters(loss: Tensor) -> set[int]:
    """The ids of all leaf tensors, including parameters, that a loss depends on."""
    return {id(node.variable) for node in _reached(loss) if node.name() == _LEAF}


def _reached(loss: Tensor) -> Iterator[Any]:
    """Every node of the graph behind a loss, once."""
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]
