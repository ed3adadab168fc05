"""What the graph behind a loss shows: whether it contains a softmax, and whether it applies one twice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch.autograd.function import BackwardCFunction

_MAX_NODES = 256
"""Maximum number of nodes visited, since a loss may be a sum over many steps."""

_NUMBER = re.compile(r"Backward\d*$")

_SHAPES = frozenset({
    "Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy",
    "Transpose", "UnsafeView", "Unsqueeze", "View",
})  # fmt: skip
"""Operations that keep the values."""

_PASSED = _SHAPES | frozenset({
    "Abs", "Add", "Amax", "Amin", "BinaryCrossEntropy", "Cat", "Clamp", "ClampMax", "ClampMin", "Div", "Exp",
    "Gather", "HuberLoss", "Index", "KlDiv", "L1Loss", "Log", "Log10", "Log1P", "Log2", "LogSigmoid", "MaskedFill",
    "MaskedSelect", "Max", "Maximum", "Mean", "Min", "Minimum", "MseLoss", "Mul", "Nansum", "Neg", "NllLoss",
    "NllLoss2D", "NllLossNd", "Pow", "Prod", "Relu", "Rsub", "SmoothL1Loss", "Softplus", "Sqrt", "Stack", "Sub",
    "Sum", "Unbind", "Where", "Xlogy",
})  # fmt: skip
"""Operations of which losses are made. Any other, such as a matrix product, belongs to the model."""

_SOFTMAX, _SIGMOID = frozenset({"Softmax", "LogSoftmax"}), frozenset({"Sigmoid", "BinaryCrossEntropyWithLogits"})


@dataclass(frozen=True, slots=True)
class LossGraph:
    """What is known of the graph of this step's loss."""

    has_softmax: bool | None = None
    """None if part of the graph cannot be seen, such as compiled code."""
    twice: str = ""
    """`softmax` or `sigmoid`, if the loss applies it to what went through one already."""


def loss_graph(root: Any) -> LossGraph:
    """What the graph behind a loss shows, from its `grad_fn`; it survives the backward pass."""
    has_softmax, is_whole, twice = False, root is not None, ""
    waiting, seen = [root], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if len(seen) == _MAX_NODES:
            is_whole = False
            break
        seen.add(node)
        name = _operation(node)
        has_softmax |= name in _SOFTMAX or name == "Logsumexp"
        if name in _SOFTMAX and _input_of(node) == "Softmax":
            twice = "softmax"
        elif name in _SIGMOID and _input_of(node) == "Sigmoid":
            twice = "sigmoid"
        elif name in _PASSED:
            waiting += [node for node, _ in node.next_functions]
        is_whole &= not (isinstance(node, BackwardCFunction) or "Compiled" in name)
    return LossGraph(True if has_softmax else False if is_whole else None, twice)


def _operation(node: Any) -> str:
    return _NUMBER.sub("", node.name())


def _input_of(node: Any) -> str:
    """The operation that computed the first input of a node, whatever its shape was then."""
    for _ in range(_MAX_NODES):
        node = node.next_functions[0][0] if node.next_functions else None
        if node is None:
            return ""
        if (name := _operation(node)) not in _SHAPES:
            return name
    return ""
