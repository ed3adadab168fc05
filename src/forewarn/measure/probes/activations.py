"""Layer outputs: their statistics, dead and saturated units, and the spread of normalized channels."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.engine import Numbers
from forewarn.measure.engine.layer_outputs import Look, channel_spread, describe, merge
from forewarn.measure.forward import any_compiled, hookable_modules
from forewarn.measure.layers import Layer, Layers, is_leaf
from forewarn.measure.module_tree import models_in
from forewarn.measure.nested import nested_tensors
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.measure.units import DeadUnits, SaturatedUnits, from_state
from forewarn.types import Reason

_Units = tuple[str, Look, bool, tuple[Any, Any, int]]
"""The scope of an output, what is looked at in its units, whether it is the model's output, and what was counted."""
_OfUnits = dict[str, dict[str, Any]]

_HOW = {"fired": How.MAX, "sums": How.SUM, "positions": How.SUM}
"""How what was counted in units is combined over ranks."""

_NOT_SEEN = float("nan")
_QUANTITIES = {Look.FIRED: "dead_fraction", Look.INSIDE: "saturated_fraction"}


class ActivationProbe(Probe):
    """`activation/…` per module that computes something itself; each output is read once, as the module returns it."""

    name = "activations"
    only_measured = True
    on_every_rank = True
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
        units = [
            (scope, output.tally.look, output.is_answer, output.tally.take())
            for scope, output in outputs.items()
            if output.tally.look is not Look.NOTHING
        ]
        # Units are followed on their device; those of several ranks only once all of them are known.
        of_units: _OfUnits = {}
        travelling: list[Numbers] = []
        unit_parts: list[Part] = []
        if self._parameter_index.rank is None:
            of_units = self._of_all_units(units)
            travelling = [v for values in of_units.values() for v in values.values() if isinstance(v, Tensor)]
        else:
            for scope, _, _, (fired, sums, positions) in units:
                travelling += [fired, sums, np.array(float(positions))]
                unit_parts += [Part(how, f"{scope} {what}", by_unit=True) for what, how in _HOW.items()]
        reason = self._reason(seen)
        if reason is Reason.AVAILABLE or reason is Reason.COMPILED or updated:
            step.unavailable("activation/mean", reason)

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            if not seen:
                return
            rows, *others = arrays
            arrived = iter(others[len(parts) :])
            if parts:
                merge(rows, to_add, np.concatenate(others[: len(parts)]))
            for quantity, values in describe(rows[places]).items():
                yield Reading(f"activation/{quantity}", scopes, values)
            if step.each_rank:
                ends = np.cumsum([len(part) for part in parts])
                rows_of = [
                    range(len(rows)),
                    *(to_add[end - len(part) : end] for part, end in zip(parts, ends, strict=True)),
                ]
                yield from _first_nonfinite(step, board, rows_of, dict(zip(places, scopes, strict=True)))
            shares = of_units
            if unit_parts:
                shares = self._of_all_units(
                    [(scope, look, is_answer, _counts(arrived)) for scope, look, is_answer, _ in units]
                )
            for quantity, by_scope in shares.items():
                numbers = [float(next(arrived) if isinstance(value, Tensor) else value) for value in by_scope.values()]
                yield Reading(f"activation/{quantity}", tuple(by_scope), numbers)

        layers = zlib.crc32(" ".join(scopes).encode(errors="replace"))
        board = [Part(How.ROWS, f"rows {layers} {number}", each=True) for number in range(1 + len(parts))]
        return Pending([rows, *parts, *travelling], decode, [*board, *unit_parts])

    def _of_all_units(self, units: Sequence[_Units]) -> _OfUnits:
        """By quantity and scope: numbers, or tensors that are still on their device."""
        of_units: _OfUnits = {}
        for scope, look, is_answer, (fired, sums, positions) in units:
            for quantity, value in self._of_units(scope, look, is_answer, fired, sums, positions):
                of_units.setdefault(quantity, {})[scope] = value
        return of_units

    def _of_units(
        self, scope: str, look: Look, is_answer: bool, fired: Any, sums: Any, positions: int
    ) -> Iterator[tuple[str, Any]]:
        """Quantities about the units of one output."""
        if look is Look.CHANNELS:
            spread = channel_spread(sums, positions) if positions else (_NOT_SEEN, _NOT_SEEN)
            yield from zip(("channel_mean_spread", "channel_std_spread"), spread, strict=True)
        elif is_answer:
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


def _counts(arrived: Iterator[Array]) -> tuple[Array, Array, int]:
    """What was counted in the units of one output."""
    return next(arrived), next(arrived), int(next(arrived))


def _first_nonfinite(
    step: Step, board: Sequence[Part], rows_of: Sequence[Sequence[int]], scopes: Mapping[int, str]
) -> Iterator[Reading]:
    """The first layer with a non-finite output on a rank; nothing if all ranks have one, or none."""
    first: dict[int, int] = {}
    num_ranks = 0
    for part, rows in zip(board, rows_of, strict=True):
        bad_rows = step.each_rank.get(part.label, ())
        num_ranks = max(num_ranks, len(bad_rows))
        for rank, place in enumerate(bad_rows):
            if place >= 0:
                row = int(rows[int(place)])
                first[rank] = min(row, first.get(rank, row))
    if 0 < len(first) < num_ranks:
        of_rows = reversed(first.items())
        by_scope = {scopes[row]: float(step.ranks[place]) for place, row in of_rows if row in scopes}
        yield Reading("rank/nonfinite", tuple(by_scope), list(by_scope.values()))
