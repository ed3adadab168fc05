"""Layer outputs: their statistics, dead and saturated units, and the spread of normalized channels."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.engine import Numbers
from forewarn.measure.engine.layer_outputs import Chunk, Look, channel_spread, describe, merge
from forewarn.measure.forward import any_compiled, hookable_modules
from forewarn.measure.layers import Layer, Layers, is_leaf
from forewarn.measure.module_tree import models_in
from forewarn.measure.nested import nested_tensors
from forewarn.measure.over_ranks import How, Part, in_place
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.measure.units import UnitsOfOutputs
from forewarn.types import Reason

_OfUnits = dict[str, dict[str, Any]]
"""By quantity and scope: numbers, or tensors that are still on their device."""

_HOW = (("positions", How.SUM), ("fired", How.MAX), ("sums", How.SUM))
"""How what was counted in units is combined over ranks."""


class _Counted(NamedTuple):
    """What was counted in the units of some outputs that have as many and are looked at alike."""

    look: Look
    scopes: tuple[str, ...]
    is_answer: NDArray[np.bool_]
    """Which of them are the model's output, of which nothing is told."""
    units: Chunk
    """A row for each."""
    is_alone: bool = False
    """Whether this is one output, perhaps still on a device."""

    def only(self, rows: NDArray[np.bool_]) -> _Counted:
        """Some of the outputs."""
        units = Chunk(*(array[rows] for array in self.units))
        return self._replace(scopes=tuple(compress(self.scopes, rows)), is_answer=self.is_answer[rows], units=units)


_NOT_SEEN = float("nan")
_FOLLOWED = (Look.FIRED, Look.INSIDE)
"""Of these looks, each unit is followed over several steps."""
_QUANTITIES = {
    Look.FIRED: ("dead_fraction",),
    Look.INSIDE: ("saturated_fraction",),
    Look.PEAKED: ("saturated_fraction",),
    Look.CHANNELS: ("channel_mean_spread", "channel_std_spread"),
}


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
        self._units = UnitsOfOutputs()
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
        # Units are followed on their device; those of several ranks only once all of them are known.
        counted = self._counted()
        of_units: _OfUnits = {}
        travelling: list[Numbers] = []
        unit_parts: list[Part] = []
        if self._parameter_index.rank is None:
            of_units = self._of_units(counted)
            travelling = [v for values in of_units.values() for v in values.values() if isinstance(v, Tensor)]
        else:
            counted = [alone for together in counted for alone in _one_by_one(together)]
            for look, (scope,), _, units, _ in counted:
                travelling += [units.positions.astype(np.float64), *units[1:]]
                unit_parts += [
                    Part(how, f"{scope} {what}", once=what == "positions" and look in _FOLLOWED) for what, how in _HOW
                ]
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
                shares = self._of_units([alone._replace(units=_arrived(arrived)) for alone in counted])
            for quantity, by_scope in shares.items():
                numbers = [float(next(arrived) if isinstance(value, Tensor) else value) for value in by_scope.values()]
                yield Reading(f"activation/{quantity}", tuple(by_scope), numbers)

        layers = zlib.crc32(" ".join(scopes).encode(errors="replace"))
        board = [Part(How.ROWS, f"rows {layers} {number}", each=True) for number in range(1 + len(parts))]
        pending = Pending([rows, *parts, *travelling], decode, [*board, *unit_parts])
        shards = self._parameter_index.shards
        if shards is None or shards.tensor_part[1] == 1:
            return pending

        def settle(arrays: Sequence[Array]) -> Pending:
            of_rows, of_units = arrays[: len(board)], arrays[len(board) :]
            placed = _placed(counted, of_units, shards.tensor_part)
            return pending._replace(tensors=[*of_rows, *placed], settle=None)

        return pending._replace(settle=settle)

    def _counted(self) -> list[_Counted]:
        """What was counted in all units since the last time."""
        counted = []
        for shelf, scopes in self._layers.shelves().items():
            outputs = [self._layers.outputs[scope] for scope in scopes]
            places, taken = [output.tally.place for output in outputs], shelf.take()
            is_answer = np.array([output.is_answer for output in outputs])
            of_shelf = _Counted(shelf.look, tuple(scopes), is_answer, Chunk(*(array[places] for array in taken)))
            if any(output.tally.is_elsewhere for output in outputs):
                counted += [
                    alone._replace(units=output.tally.take(alone.units))
                    for output, alone in zip(outputs, _one_by_one(of_shelf), strict=True)
                ]
            else:
                counted.append(of_shelf)
        return counted

    def _of_units(self, counted: Sequence[_Counted]) -> _OfUnits:
        """Quantities about the units of all outputs, in the order of the outputs."""
        of_units: _OfUnits = {}
        for quantity, by_scope in (pair for together in counted for pair in self._of_some_units(together)):
            of_units.setdefault(quantity, {}).update(by_scope)
        outputs = self._layers.outputs
        return {
            quantity: {scope: by_scope[scope] for scope in outputs if scope in by_scope}
            for quantity, by_scope in of_units.items()
        }

    def _of_some_units(self, counted: _Counted) -> Iterator[tuple[str, dict[str, Any]]]:
        """Quantities about units that are looked at alike; NaN for outputs that were not read."""
        is_told = ~counted.is_answer
        if not is_told.any():
            return
        unread = dict.fromkeys(compress(counted.scopes, is_told), _NOT_SEEN)
        was_read = is_told & (counted.units.positions[:, 0] > 0)
        counted = counted if was_read.all() else counted.only(was_read)
        quantities = _QUANTITIES[counted.look]
        shares = self._shares(counted) if counted.scopes else [()] * len(quantities)
        for quantity, values in zip(quantities, shares, strict=True):
            yield quantity, unread | dict(zip(counted.scopes, values, strict=True))

    def _shares(self, counted: _Counted) -> Sequence[Sequence[Any]]:
        """The values of each quantity of these outputs, as floats or tensors."""
        look, scopes, _, (positions, fired, sums), is_alone = counted
        if look is Look.CHANNELS:
            return [
                _in_a_list(values)
                for values in channel_spread(sums, positions if len(scopes) > 1 else positions.item())
            ]
        if look is Look.PEAKED:
            return [_in_a_list(sums[..., 0] / sums[..., 1])]
        kind, num_units = ("dead", fired.shape[-1]) if look is Look.FIRED else ("saturated", sums.shape[-1])
        followed = self._units.of(kind, num_units, scopes, is_alone)
        rows = followed.rows_of(scopes)
        followed.update(rows, fired, sums, positions[:, 0])
        return [followed.shares(rows, self._window, self._least_positions)]

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
        return self._units.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._units.load_state_dict(state)


def _in_a_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else [values]


def _one_by_one(counted: _Counted) -> Iterator[_Counted]:
    """Each output alone."""
    if counted.is_alone:
        yield counted
    else:
        for row, scope in enumerate(counted.scopes):
            only = slice(row, row + 1)
            units = Chunk(*(array[only] for array in counted.units))
            yield _Counted(counted.look, (scope,), counted.is_answer[only], units, is_alone=True)


def _placed(counted: Sequence[_Counted], arrays: Sequence[Array], part: tuple[int, int]) -> Iterator[Array]:
    """What was counted in units, as that of all ranks that compute a layer together.

    An activation function does not tell whether they have different units of it or copies, in which case every unit
    counts equally often.
    """
    for number, (look, *_) in enumerate(counted):
        positions, *of_units = arrays[3 * number : 3 * number + 3]
        yield positions
        yield from (in_place(array, part) if look in _FOLLOWED else array for array in of_units)


def _arrived(arrays: Iterator[Array]) -> Chunk:
    """What was counted in the units of one output, over all ranks."""
    return Chunk(next(arrays).astype(np.int64), next(arrays), next(arrays))


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
