"""What the graph behind a loss shows: a softmax, one that is applied twice, outputs compared with all targets."""

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

_FEWEST_PAIRED = 3
"""Minimum number of outputs that are repeated for each other's targets: of two, it may be meant."""

_SOFTMAX, _SIGMOID = frozenset({"Softmax", "LogSoftmax"}), frozenset({"Sigmoid", "BinaryCrossEntropyWithLogits"})


@dataclass(frozen=True, slots=True)
class LossGraph:
    """What is known of the graph of this step's loss."""

    has_softmax: bool | None = None
    """None if part of the graph cannot be seen, such as compiled code."""
    twice: str = ""
    """`softmax` or `sigmoid`, if the loss applies it to what went through one already."""
    num_paired: int = 0
    """Number of outputs that the loss compares with all targets rather than each with its own; 0 if it does not."""


def loss_graph(root: Any) -> LossGraph:
    """What the graph behind a loss shows, from its `grad_fn`; it survives the backward pass."""
    has_softmax, is_whole, twice, num_paired = False, root is not None, "", 0
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
            num_paired = max(num_paired, _num_paired(node, name))
            waiting += [node for node, _ in node.next_functions]
        is_whole &= not (isinstance(node, BackwardCFunction) or "Compiled" in name)
    return LossGraph(True if has_softmax else False if is_whole else None, twice, num_paired)


def _operation(node: Any) -> str:
    return _NUMBER.sub("", node.name())


def _num_paired(node: Any, name: str) -> int:
    """The number n of outputs, if n × 1 outputs minus n targets gives n × n differences.

    Only where the targets have no gradient: the distances between all pairs of outputs are meant.
    """
    inputs = [given for given, _ in node.next_functions if given is not None]
    if name not in ("MseLoss", "SmoothL1Loss", "HuberLoss", "Sub", "Rsub") or len(inputs) != 1:
        return 0
    is_repeated = _operation(inputs[0]) == "Expand"
    if not (is_repeated or name in ("Sub", "Rsub")):
        return 0
    before = inputs[0]._saved_self_sym_sizes if is_repeated else _shape(inputs[0])
    after = _shape(inputs[0] if is_repeated else node)
    size = after[0] if len(after) == 2 else 0
    is_paired = size >= _FEWEST_PAIRED and after[1] == size and tuple(before) in ((size, 1), (size,))
    return int(size) if is_paired else 0


def _shape(node: Any) -> tuple[int, ...]:
    """The shape of what an operation returned; empty if this torch does not tell."""
    described = getattr(node, "_input_metadata", ())
    return tuple(described[0].shape) if described else ()


def _input_of(node: Any) -> str:
    """The operation that computed the first input of a node, whatever its shape was then."""
    for _ in range(_MAX_NODES):
        node = node.next_functions[0][0] if node.next_functions else None
        if node is None:
            return ""
        if (name := _operation(node)) not in _SHAPES:
            return name
    return ""
