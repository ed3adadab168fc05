"""The readings that an export takes from a run, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forewarn.metrics import catalogue_of
from forewarn.store import Run
from forewarn.types import Block, Values
from forewarn.views.chosen_series import Patterns, chosen

MOST_READINGS = 1 << 18
"""Maximum readings in one part."""

Tell = Callable[[str, int], None]
"""Takes words and how much was done since the last call."""


@dataclass(frozen=True, slots=True)
class Part:
    """Successive readings of one metric."""

    metric: str
    scopes: tuple[str, ...]
    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    """Seconds since the epoch."""
    values: Values
    """As [steps, scopes]."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The series and steps of a run that were asked for."""

    run: Run
    scopes: dict[str, tuple[str, ...]]
    """By metric, in the order in which the run first recorded them."""
    first: int | None = None
    last: int | None = None
    units: dict[str, str] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        run: Run,
        metrics: Patterns = None,
        scopes: Patterns = None,
        steps: tuple[int | None, int | None] = (None, None),
    ) -> Selection:
        """Raises UnknownSeriesError or ValueError if a pattern chooses nothing."""
        selected: dict[str, list[str]] = {}
        for name, scope in chosen(run, metrics, scopes):
            selected.setdefault(name, []).append(scope)
        declared = {name: catalogue_of(run.info).find(name) for name in selected}
        return cls(
            run, {name: tuple(its) for name, its in selected.items()}, *steps,
            units={name: metric.unit if metric else "" for name, metric in declared.items()},
            meanings={name: metric.meaning if metric else "" for name, metric in declared.items()},
        )  # fmt: skip

    @property
    def num_series(self) -> int:
        return sum(map(len, self.scopes.values()))

    @property
    def num_rows(self) -> int:
        """How much there is to read, in the unit of progress: steps of each metric."""
        counts = self.run.num_readings()
        return sum(counts[name] for name in self.scopes)

    def includes(self, step: int) -> bool:
        return (self.first is None or step >= self.first) and (self.last is None or step <= self.last)

    def parts(self, tell: Tell) -> Iterator[Part]:
        """All readings, metric by metric."""
        for name in self.scopes:
            yield from self.parts_of(name, tell)

    def parts_of(self, name: str, tell: Tell) -> Iterator[Part]:
        """The readings of one metric."""
        wanted = set(self.scopes[name])
        for piece in self.run.pieces(name, self.first, self.last):
            columns = [column for column, scope in enumerate(piece.scopes) if scope in wanted]
            if not columns:
                continue
            scopes = tuple(piece.scopes[column] for column in columns)
            rows = max(1, MOST_READINGS // len(columns))
            for begin in range(0, len(piece.steps), rows):
                place = slice(begin, begin + rows)
                values = piece.values[:, place] if len(columns) == len(piece.scopes) else piece.values[columns, place]
                tell(name, len(piece.steps[place]))
                yield Part(name, scopes, piece.steps[place], piece.times[place], np.ascontiguousarray(values.T))

    def steps(self) -> Iterator[tuple[int, list[Block]]]:
        """The selected readings step by step, as they were recorded."""
        wanted = {name: frozenset(scopes) for name, scopes in self.scopes.items()}
        columns: dict[tuple[str, tuple[str, ...]], tuple[tuple[str, ...], list[int]]] = {}
        for step, blocks in self.run.steps(self.first, self.last):
            kept: list[Block] = []
            for block in blocks:
                if block.name not in wanted:
                    continue
                key = block.name, block.scopes
                if key not in columns:
                    places = [place for place, scope in enumerate(block.scopes) if scope in wanted[block.name]]
                    columns[key] = tuple(block.scopes[place] for place in places), places
                scopes, places = columns[key]
                if len(scopes) == len(block.scopes):
                    kept.append(block)
                elif scopes:
                    kept.append(Block(step, block.time, block.name, scopes, block.values[places]))
            yield step, kept
