"""Layer outputs: their statistics, dead and saturated units, and the spread of normalized channels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.engine.layer_outputs import Look, channel_spread, describe, merge
from forewarn.measure.forward import any_compiled, hookable_modules
from forewarn.measure.layers import Layer, Layers, Output, is_leaf
from forewarn.measure.module_tree import models_in
from forewarn.measure.nested import nested_tensors
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.measure.units import DeadUnits, SaturatedUnits, from_state
from forewarn.types import Reason

_NOT_SEEN = float("nan")
_QUANTITIES = {Look.FIRED: "dead_fraction", Look.INSIDE: "saturated_fraction"}


class ActivationProbe(Probe):
    """`activation/…` per module that computes something itself; each output is read once, as the module returns it."""

    name = "activations"
    from_modules = ("activation/mean",)

    def __init__(
        self,
        parameter_index: ParameterIndex,
        *,
        modules: str,
        rows: int,
        window: int,
        least_positions: int,
        saturated_from: float,
    ) -> None:
        self._parameter_index = parameter_index
        self._pattern = re.compile(modules) if modules else None
        self._window = window
        self._least_positions = least_positions
        self._layers = Layers(rows, saturated_from)
        self._layer_by_name: dict[str, Layer] = {}
        self._units: dict[str, DeadUnits | SaturatedUnits] = {}
        """By scope, for layers whose units are tracked."""
        self._modules: dict[str, nn.Module] = {}
        self._places: list[ModuleTap] = []
        """The hooks that see the outputs of these modules."""
        self._hidden = False
        """Whether part of the model is compiled."""
        self._updated = False

    def module_taps(self) -> Sequence[ModuleTap]:
        self._layers.channels_first = None
        modules = hookable_modules(self._parameter_index.called)
        if modules is not self._modules:
            self._modules = modules
            self._hidden = any_compiled(self._parameter_index.called)
            layers = (self._layer(name, module) for name, module in modules.items())
            self._places = [ModuleTap(layer.module, left=layer.left) for layer in layers if layer is not None]
        return self._places

    def _layer(self, name: str, module: Any) -> Layer | None:
        layer = self._layer_by_name.get(name)
        if layer is None or layer.module is not module:
            chosen = self._pattern is not None and self._pattern.search(name) is not None
            if not chosen and not is_leaf(name, module):
                return None
            layer = self._layer_by_name[name] = Layer(self._layers, name or type(module).__name__, module, chosen)
        return layer

    def forward_ended(self, output: Any) -> None:
        """Exempt a sigmoid or softmax that is the model's output: it is meant to be confident, not saturated."""
        unsure = [
            layer_output
            for layer_output in self._layers.outputs.values()
            if layer_output.tally.look in (Look.INSIDE, Look.PEAKED)
        ]
        if unsure:
            for _, tensor in nested_tensors(output):
                for layer_output in unsure:
                    layer_output.is_answer = layer_output.is_answer or layer_output.is_in(tensor)

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        self._updated = True

    def collect(self, step: Step) -> Pending | None:
        updated, self._updated = self._updated, False
        if not step.measured:
            return None
        outputs = self._layers.outputs
        scopes, places = tuple(outputs), [output.tally.at for output in outputs.values()]
        rows, to_add, parts = self._layers.board.take()
        seen = bool(to_add) or bool((rows[:, 0] > 0).any())
        of_units: dict[str, dict[str, Any]] = {}
        for scope, output in outputs.items():
            for quantity, value in self._of_units(scope, output):
                of_units.setdefault(quantity, {})[scope] = value
        travelling = [value for values in of_units.values() for value in values.values() if isinstance(value, Tensor)]
        reason = self._reason(seen)
        if reason is Reason.AVAILABLE or reason is Reason.COMPILED or updated:
            step.unavailable("activation/mean", reason)

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            if not seen:
                return
            arrived = iter(arrays[len(parts) :])
            if parts:
                merge(rows, to_add, np.concatenate(arrays[: len(parts)]))
            for quantity, values in describe(rows[places]).items():
                yield Reading(f"activation/{quantity}", scopes, values)
            for quantity, by_scope in of_units.items():
                numbers = [float(next(arrived) if isinstance(value, Tensor) else value) for value in by_scope.values()]
                yield Reading(f"activation/{quantity}", tuple(by_scope), numbers)

        return Pending([*parts, *travelling], decode)

    def _of_units(self, scope: str, output: Output) -> Iterator[tuple[str, Any]]:
        """Quantities about the units of one output: numbers, or tensors that are still on their device."""
        look = output.tally.look
        if look is Look.NOTHING:
            return
        fired, sums, positions = output.tally.take()
        if look is Look.CHANNELS:
            spread = channel_spread(sums, positions) if positions else (_NOT_SEEN, _NOT_SEEN)
            yield from zip(("channel_mean_spread", "channel_std_spread"), spread, strict=True)
        elif output.is_answer:
            return
        elif look is Look.PEAKED:
            yield "saturated_fraction", sums[0] / sums[1] if positions else _NOT_SEEN
        elif not positions:
            yield _QUANTITIES[look], _NOT_SEEN
        else:
            kind, num_units = (DeadUnits, len(fired)) if look is Look.FIRED else (SaturatedUnits, len(sums))
            units = self._units.get(scope)
            if not isinstance(units, kind) or units.num_units != num_units:
                units = self._units[scope] = kind(num_units)
            units.update(fired, sums, positions)
            yield _QUANTITIES[look], units.share(self._window, self._least_positions)

    def _reason(self, seen: bool) -> Reason:
        """Why readings are missing; AVAILABLE if none are."""
        watched = self._parameter_index.called
        if not seen:  # a root that was compiled in place calls no hook
            self._hidden = any_compiled(watched)
        if self._hidden:
            return Reason.COMPILED
        if seen:
            return Reason.AVAILABLE
        is_training = any(model.training for model in models_in(self._parameter_index.model))
        return Reason.NO_FORWARD_SEEN if is_training else Reason.EVALUATION_MODE

    def state_dict(self) -> dict[str, Any]:
        return {
            "scopes": list(self._units),
            "units": [units.state_dict() for units in self._units.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._units = dict(zip(state["scopes"], map(from_state, state["units"]), strict=True))
