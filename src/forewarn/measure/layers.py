"""The layers of a model and their outputs: which modules count as layers, and what to measure in each."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from forewarn.measure.engine.layer_outputs import Board, Layout, Look, Shelf, Tally
from forewarn.measure.hidden_from_checkpointing import hidden_from_checkpointing
from forewarn.measure.module_tree import children_of
from forewarn.measure.nested import nested_tensors
from forewarn.measure.shards import local_part

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

_CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)
_PASS_ON = (nn.Identity, nn.Flatten, nn.Unflatten)
"""Leaves whose output is their input."""
_NOT_ZERO_BELOW_ZERO = ("leaky", "prelu", "rrelu")
"""Parts of the names of ReLU variants whose units are never off."""
_ROWS_PER_PLANE = 8
"""Number of rows that one image plane counts as in a sample: its positions resemble each other."""


def is_leaf(name: str, module: nn.Module) -> bool:
    """Whether a module computes something itself: it has no children, or parameters of its own beside them.

    Parametrizing a weight does not change that. The model as a whole counts only if it has no children.
    """
    if "parametrizations" in name.split(".") or isinstance(module, _PASS_ON):
        return False
    own = any(parameter is not None for parameter in module._parameters.values())
    return (own and name != "") or not children_of(module).keys() - {"parametrizations"}


class Layers:
    """All outputs seen so far, and the running sums of each."""

    def __init__(self, rows: int, saturated_from: float) -> None:
        self.board = Board()
        self.outputs: dict[str, Output] = {}
        """By scope, in the order first seen."""
        self.rows = rows
        """Maximum number of rows read from one output."""
        self.saturated_from = saturated_from
        self.channels_first: bool | None = None
        """Whether the latest layer with weights has its channels first; None before there was one."""
        self._shelves: dict[Shelf, list[str]] = {}
        self._version = -1

    def shelves(self) -> dict[Shelf, list[str]]:
        """The scopes of the outputs whose units are on each shelf."""
        if self._version != self.board.version:
            self._version, self._shelves = self.board.version, {}
            for scope, output in self.outputs.items():
                if output.tally.look is not Look.NOTHING:
                    self._shelves.setdefault(output.tally.shelf, []).append(scope)
        return self._shelves


class Layer:
    """A module whose outputs are read as soon as it returns them."""

    def __init__(self, layers: Layers, scope: str, module: nn.Module, chosen: bool) -> None:
        self.module = module
        self._layers = layers
        self._scope = scope
        self._chosen = chosen
        self._only: Output | None = None
        first = isinstance(module, _CHANNELS_FIRST)
        self._channels_first = first if first or isinstance(module, _CHANNELS_LAST) else None

    def left(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Read the outputs of one call of the module."""
        if self._channels_first is not None:
            self._layers.channels_first = self._channels_first
        if isinstance(output, Tensor):
            if self._only is None:
                self._only = self._output(self._scope)
            own = output if type(output) is Tensor else local_part(output)
            if own is not None:
                self._only.see(own)
        else:
            for suffix, tensor in nested_tensors(output):
                self._output(self._scope + suffix).see(tensor)

    def _output(self, scope: str) -> Output:
        output = self._layers.outputs.get(scope)
        if output is None or output.module is not self.module:
            output = self._layers.outputs[scope] = Output(self._layers, self.module, self._chosen)
        return output


class Output:
    """One tensor that a module returns; its shape may change from call to call."""

    def __init__(self, layers: Layers, module: nn.Module, chosen: bool) -> None:
        self.module = module
        self.is_answer = False
        """Whether this is the output of the whole model."""
        self._layers = layers
        self.tally = Tally(layers.board, *_look(module, chosen, layers.saturated_from))
        self._looks_at_answers = self.tally.look in (Look.INSIDE, Look.PEAKED)
        self._shape: torch.Size | None = None
        self._layout = Layout(0, 0, 0)
        self._address = 0

    def see(self, tensor: Tensor) -> None:
        """Add the tensor's current values: it may change or be freed right after."""
        if tensor.is_contiguous():
            if self._looks_at_answers:
                self._address = _address(tensor)
            if tensor.shape != self._shape:
                self._shape, self._layout = tensor.shape, self._laid_out(tensor.shape)
            if not self.tally.add_alike(tensor, self._layout) and tensor.is_floating_point():
                self.tally.add(tensor, self._layout)
        elif tensor.is_floating_point():
            with hidden_from_checkpointing():
                layout = self._laid_out(tensor.shape)
                if tensor.dim() == 4 and layout.inner > 1 and tensor.is_contiguous(memory_format=torch.channels_last):
                    tensor = tensor.detach().permute(0, 2, 3, 1)
                    layout = self._sampled(layout.outer * layout.inner, layout.units, 1)
                self.tally.add(tensor, layout)

    def is_in(self, tensor: Tensor) -> bool:
        """Whether the latest tensor seen has the same address as this one."""
        return self._address != 0 and self._address == _address(tensor)

    def _laid_out(self, shape: torch.Size) -> Layout:
        dim, span = _where_units_are(self.module, len(shape), self.tally.look, self._layers.channels_first)
        return self._sampled(math.prod(shape[:dim]), math.prod(shape[dim : dim + span]), math.prod(shape[dim + span :]))

    def _sampled(self, outer: int, units: int, inner: int) -> Layout:
        """Every nth row of a large tensor; n is odd, so that all positions in a sequence are sampled alike."""
        limit = self._layers.rows if inner == 1 else max(1, self._layers.rows // _ROWS_PER_PLANE)
        return Layout(outer, units, inner, 1 if outer <= limit else -(-outer // limit) | 1)


def _address(tensor: Tensor) -> int:
    """The address of a tensor; 0 if it has none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _look(module: nn.Module, chosen: bool, saturated_from: float) -> tuple[Look, float, float]:
    """What to measure in the units of a module, and the bounds to compare with."""
    name = type(module).__name__.lower()
    if "relu" in name and not any(part in name for part in _NOT_ZERO_BELOW_ZERO):
        return Look.FIRED, 0.0, 0.0
    if isinstance(module, nn.Sigmoid | nn.Hardsigmoid):
        return Look.INSIDE, 1 - saturated_from, saturated_from
    if isinstance(module, nn.Tanh | nn.Softsign) or type(module) is nn.Hardtanh:
        return Look.INSIDE, -saturated_from, saturated_from
    if isinstance(module, nn.Softmax | nn.Softmax2d):
        return Look.PEAKED, 0.0, saturated_from
    if isinstance(module, NORMS):
        return Look.CHANNELS, 0.0, 0.0
    return Look.FIRED if chosen else Look.NOTHING, 0.0, 0.0


def _where_units_are(module: nn.Module, dims: int, look: Look, channels_first: bool | None) -> tuple[int, int]:
    """The first dimension of the units, and how many dimensions they fill.

    The input of an activation function has its channels where the last layer with weights put them. Without such a
    layer, images (four dimensions) have them second and everything else last.
    """
    if dims < 2:
        return 0, 1
    if isinstance(module, nn.Softmax | nn.Softmax2d):
        dim = -3 if isinstance(module, nn.Softmax2d) else -1 if module.dim is None else module.dim
        return dim % dims, 1
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return max(0, dims - len(module.normalized_shape)), len(module.normalized_shape)
    first = dims > 3 if channels_first is None else channels_first
    return (1, 1) if first else (dims - 1, 1)
