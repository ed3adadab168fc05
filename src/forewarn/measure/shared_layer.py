"""The last layer that several losses share, read from the autograd graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from forewarn.measure.module_tree import clean_name
from forewarn.measure.own_backward import reduces_unused
from forewarn.types import Reason

_FORBIDDING = {
    "CheckpointFunctionBackward": Reason.REENTRANT_CHECKPOINT,
    "CompiledFunctionBackward": Reason.COMPILED,
}
"""Graph nodes that the monitor's own backward pass cannot or must not go through."""

_SHARDED_MODULE = "RegisterPostBackwardFunctionBackward"
"""Graph node at the input of a module that FSDP2 shards: at this point its gradients are complete."""

_LEAF = "torch::autograd::AccumulateGrad"


def obstacle(losses: Sequence[Tensor], model: nn.Module) -> Reason:
    """Why `torch.autograd.grad` is not safe on these losses; AVAILABLE if it is."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()) or reduces_unused(model):
        return Reason.SHARDED_PARAMETERS
    for loss in losses:
        for node in _reached(loss):
            if node.name() in _FORBIDDING:
                return _FORBIDDING[node.name()]
            if node.name() == "_DDPSinkBackward" and node.ddp_weakref().static_graph:
                return Reason.STATIC_GRAPH
    return Reason.AVAILABLE


def crosses_sharded_module(losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether a whole module that FSDP2 shards lies between a loss and the parameters.

    Then its gradients would be complete before the shards below it are gathered. Without it, a pass to the parameters
    gathers what the training's own pass gathers first, in the same order.
    """
    targets = {id(parameter) for parameter in parameters}
    for loss in losses:
        users: defaultdict[Any, list[Any]] = defaultdict(list)
        between: list[Any] = []
        for node in _reached(loss):
            for following, _ in node.next_functions:
                users[following].append(node)
            if node.name() == _LEAF and id(node.variable) in targets:
                between.append(node)
        seen = set(between)
        while between:
            node = between.pop()
            if node.name() == _SHARDED_MODULE:
                return True
            new = [user for user in users[node] if user not in seen]
            seen.update(new)
            between += new
    return False


def last_shared_layer(
    losses: Sequence[Tensor], model: nn.Module, whole: Mapping[int, Tensor] = MappingProxyType({})
) -> tuple[str, list[Tensor]]:
    """The name and the trainable parameters of the last layer that every loss reaches; `("", [])` if there is none.

    `whole` has, by the id of a parameter of the model, the one that the graph holds, where these differ.

    torch numbers the nodes of a graph in the order of the forward pass. So the last layer is the one whose first use
    comes latest, in whatever order the model lists its layers. A tied weight counts by its use at the input, since a
    pass down to it would go through the whole model. Layers with a matrix take precedence: the scale of a normalization
    says little about a task.
    """
    uses = [_first_uses(loss) for loss in losses]
    common = set.intersection(*map(set, uses))
    used_from = {key: min(first_uses[key] for first_uses in uses) for key in common}
    best: tuple[bool, int] = (False, -1)
    layer: tuple[str, list[Tensor]] = ("", [])
    for name, module in model.named_modules():
        held = [whole.get(id(weight), weight) for weight in module.parameters(recurse=False)]
        own = [weight for weight in held if weight.requires_grad and id(weight) in common]
        if own:
            rank = (any(weight.ndim >= 2 for weight in own), max(used_from[id(weight)] for weight in own))
            if rank > best:
                best, layer = rank, (clean_name(name), own)
    return layer


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
