"""Reading a run, finished or still being written, by another process or on another machine."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from forewarn.metrics import catalogue_of, switched_off
from forewarn.store import database, manifest
from forewarn.store.catalog import Catalog, Layout
from forewarn.store.chunks import column_of, num_values
from forewarn.store.errors import RunError, UnknownSeriesError
from forewarn.store.extent import Extent, extent_of
from forewarn.store.histogram_table import StoredHistograms, histograms_of, names_in
from forewarn.store.index import Index, Occurrences, compacted, occurrences, steps_at, times_at, with_tail
from forewarn.store.listing import list_runs
from forewarn.store.manifest import Manifest, read_manifest
from forewarn.store.pieces import Piece, values_between
from forewarn.store.read_limits import ReadLimits
from forewarn.store.records import Change, Event, event_from, from_text
from forewarn.store.replay import Reading, Stretch, replay, stretches
from forewarn.store.tail import column_in_tail
from forewarn.suggestions import did_you_mean
from forewarn.types import Action, Alert, Block, Finding, RunInfo, Values

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from forewarn.views.page.report import EmbeddedPage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredSeries:
    """One metric and scope over the whole run, in the order it was recorded."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    """Seconds since the epoch."""
    values: Values

    def __len__(self) -> int:
        return len(self.steps)


class Run:
    """A stored run. Every call reads one consistent state of the run at that moment.

    A run can be read while it is written; `freeze` makes several calls see the same state. Not thread-safe: open a run
    once per thread.
    """

    def __init__(self, path: Path, description: Manifest, connection: sqlite3.Connection) -> None:
        self.path = path
        self.info: RunInfo = description.info
        self.config: dict[str, Any] = dict(description.config)
        self.journal = description.journal
        self._connection = connection
        self._limits = ReadLimits(connection, path / database.NAME)
        self._generation = -1
        self._catalog = Catalog()
        self._behind = Index()
        self._extent = Extent()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(sqlite3.ProgrammingError, AttributeError):  # another thread must not close it; it never opened
            self.close()

    def close(self) -> None:
        self._connection.close()

    def freeze(self) -> Self:
        """Let every later call see the run as it is now, even if more is written.

        This takes no lock. Later calls raise ResumedError if the run is resumed from an earlier step.
        """
        with self._reading() as connection:
            self._extent = self._extent_now(connection, self._index(connection))
        return self

    @property
    def end(self) -> tuple[str, float] | None:
        """Why and when the run ended; None while it runs, or if it was killed."""
        last = [event for event in self.events() if event.kind in ("end", "resume")][-1:]
        if not last or last[0].kind == "resume":
            return None
        return str(last[0].data.get("reason", "")), last[0].time

    @property
    def last_step(self) -> int | None:
        with self._reading() as connection:
            steps = self._index(connection).until(self._extent.rows).steps
        return int(steps.max()) if len(steps) else None

    @property
    def num_steps(self) -> int:
        """Number of distinct steps recorded."""
        with self._reading() as connection:
            steps = self._index(connection).until(self._extent.rows).steps
        rises = np.diff(steps)
        return int(np.count_nonzero(rises)) + (len(steps) > 0) if (rises >= 0).all() else len(np.unique(steps))

    @property
    def updated(self) -> float | None:
        """When the newest block was measured, in seconds since the epoch; None if that is not known."""
        with self._reading() as connection:
            times = self._index(connection).until(self._extent.rows).times
        return float(times[-1]) if len(times) and np.isfinite(times[-1]) else None

    def switched_off(self, metric: str) -> str:
        """The setting that switched a metric off for this run, such as `Measure(gain=False)`; empty if none did."""
        measure = self.config.get("measure", self.config)  # earlier versions had no table of it
        return switched_off(metric, measure) if isinstance(measure, Mapping) else ""

    def names(self) -> list[str]:
        """The metrics of the run, in order of first appearance."""
        with self._reading():
            return self._names()

    def scopes(self, name: str) -> tuple[str, ...]:
        """The scopes of a metric, in order of first appearance; `("",)` for the run as a whole."""
        with self._reading() as connection:
            layouts = self._layouts_of(name)
            return tuple(
                dict.fromkeys(scope for layout in layouts for scope in self._catalog.scopes_of(layout, connection))
            )

    def series(self, name: str, scope: str = "") -> StoredSeries:
        """All readings of one metric for one scope; a million take some tens of milliseconds."""
        with self._reading() as connection:
            index = self._index(connection)
            parts: list[tuple[Occurrences, Values]] = []
            other_scopes: dict[str, None] = {}
            for layout in self._layouts_of(name):
                scopes = self._catalog.scopes_of(layout, connection)
                if scope in scopes:
                    parts.append(self._column(connection, index, layout, scopes.index(scope)))
                else:
                    other_scopes.update(dict.fromkeys(scopes))
            if not parts:
                raise UnknownSeriesError(_unknown(f"scope of {name}", scope, list(other_scopes)))
            places, values = _in_order(parts)
            end = int(np.searchsorted(places.rows, self._extent.rows))
            return StoredSeries(
                steps_at(index, places)[:end], times_at(index, self._catalog, places)[:end], values[:end]
            )

    def num_readings(self) -> dict[str, int]:
        """The number of readings of each metric, in order of first appearance."""
        with self._reading() as connection:
            index = self._index(connection).until(self._extent.rows)
            rows = np.bincount(index.patterns, minlength=len(self._catalog.patterns))
            table = self._catalog.table
            of_layout = np.bincount(table.members, rows[table.owners], minlength=len(self._catalog.layouts))
            counts: dict[str, int] = {}
            for layout in self._catalog.layouts[: self._extent.layouts]:
                counts[layout.name] = counts.get(layout.name, 0) + int(of_layout[layout.id])
            return counts

    def steps_of(self, name: str) -> NDArray[np.int64]:
        """The steps at which a metric was recorded, in order, each once."""
        with self._reading() as connection:
            index = self._index(connection).until(self._extent.rows)
            layouts = self._layouts_of(name)
            return np.unique(
                np.concatenate([steps_at(index, occurrences(index, self._catalog, layout.id)) for layout in layouts])
            )

    def pieces(self, name: str, start: int | None = None, end: int | None = None) -> Iterator[Piece]:
        """All readings of one metric for all scopes, piece by piece: much faster than one series after the other.

        Steps before `start` and after `end` are left out. No other method of the run can be called before the
        iteration is over. A piece takes 16 MB at most.
        """
        with self._reading() as connection:
            index = self._index(connection)
            for layout in self._layouts_of(name):
                scopes = self._catalog.scopes_of(layout, connection)
                places = occurrences(index, self._catalog, layout.id)
                steps = steps_at(index, places)
                wanted = places.rows < self._extent.rows
                wanted = wanted if start is None else wanted & (steps >= start)
                wanted = wanted if end is None else wanted & (steps <= end)
                times = times_at(index, self._catalog, places)
                for first, values in values_between(connection, self._catalog, layout, places, wanted):
                    kept = np.flatnonzero(wanted[first : first + values.shape[1]])
                    if len(kept):
                        yield Piece(scopes, steps[first + kept], times[first + kept], values[:, kept])

    def distributions(self) -> dict[str, tuple[str, ...]]:
        """The metrics that have histograms, such as `gradient/histogram`, each with its scopes."""
        with self._reading() as connection:
            return {
                name: tuple(
                    dict.fromkeys(
                        scope for number in numbers for scope in self._catalog.scopes_by(number, name, connection)
                    )
                )
                for name, numbers in names_in(connection, self._extent.distributions).items()
            }

    def histograms(self, name: str, scope: str) -> StoredHistograms:
        """All histograms of one metric for one scope; about 0.1 ms each."""
        with self._reading() as connection:
            metrics = names_in(connection, self._extent.distributions)
            if name not in metrics:
                self._check_is_on(name)
                raise UnknownSeriesError(_unknown("metric with histograms", name, list(metrics)))
            tuples = {number: self._catalog.scopes_by(number, name, connection) for number in metrics[name]}
            places = {number: scopes.index(scope) for number, scopes in tuples.items() if scope in scopes}
            if not places:
                candidates = list(dict.fromkeys(candidate for scopes in tuples.values() for candidate in scopes))
                raise UnknownSeriesError(_unknown(f"scope of {name}", scope, candidates))
            return histograms_of(connection, name, places, self._extent.distributions)

    def steps(self, start: int | None = None, end: int | None = None) -> Iterator[tuple[int, list[Block]]]:
        """The step and blocks of every call of `append`, in order and bit for bit.

        A step that was appended twice comes twice. Steps before `start` and after `end` are left out. The iteration
        covers the run as it was when it began, and reads it piece by piece. Values are read-only views into a piece.
        Raises ResumedError if the run is resumed from an earlier step meanwhile.
        """
        reading, index = self._as_it_is()
        wanted = np.ones(len(index), np.bool_) if start is None else index.steps >= start
        return replay(reading, index, wanted if end is None else wanted & (index.steps <= end))

    def stretches(self) -> Iterator[Stretch]:
        """The same rows, thousands at a time, for readers that need only a few of them one by one."""
        reading, index = self._as_it_is()
        return stretches(reading, index, np.ones(len(index), np.bool_))

    def _as_it_is(self) -> tuple[Reading, Index]:
        """How to read the run as it is now, later on."""
        with self._reading() as connection:
            index = self._index(connection).until(self._extent.rows)
            extent = self._extent_now(connection, index)

        @contextmanager
        def reading() -> Iterator[tuple[sqlite3.Connection, Catalog, Index]]:
            with self._reading() as connection:
                extent.check(connection)
                yield connection, self._catalog, self._compacted(connection)

        return reading, index

    def alerts(self) -> list[Alert]:
        """The newest state of every episode, in the order they began."""
        newest: dict[tuple[str, str, int], Alert] = {}
        for change in self.alert_changes():
            newest[change.alert.code, change.alert.scope, change.alert.since] = change.alert
        return list(newest.values())

    def alert_changes(self) -> list[Change]:
        """Every change of state, severity or words of every alert, in the order they were recorded."""
        return self._records("alert", lambda time, step, body: Change(float(time), int(step), from_text(Alert, body)))

    @property
    def num_alert_changes(self) -> int:
        """The number of `alert_changes`, without reading them."""
        with self._reading() as connection:
            count = connection.execute(
                "SELECT count(*) FROM records WHERE kind = 'alert' AND id <= ?", [self._extent.records]
            )
            return int(count.fetchone()[0])

    def findings(self) -> list[Finding]:
        return self._records("finding", lambda _time, _step, body: from_text(Finding, body))

    def actions(self) -> list[Action]:
        """What a policy has done, each with its outcome if that is known."""
        recorded = self._records("action", lambda _time, _step, body: from_text(Action, body))
        newest = {action.identity: action for action in recorded}
        return list(newest.values())

    def events(self) -> list[Event]:
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT time, kind, data FROM events WHERE id <= ? ORDER BY id", [self._extent.events]
            )
            return [event_from(*row) for row in rows]

    def to_pandas(
        self,
        metrics: str | Sequence[str] | None = None,
        scopes: str | Sequence[str] | None = None,
        *,
        steps: tuple[int | None, int | None] | None = None,
        long: bool = False,
    ) -> pd.DataFrame:
        """The readings as a DataFrame: one row per step, one column per metric and scope.

        `run.to_pandas()["train/loss"]` is a Series, `run.to_pandas("gradient/norm")["gradient/norm"]` a DataFrame with
        a column per parameter. `metrics` and `scopes` are names, globs such as `gradient/*`, or regular expressions to
        search the names for. `steps` are the first and the last step, None for no limit. Without `metrics` and
        `scopes`, metrics of single tensors, layers and heads are left out: a large model has thousands. `metrics="."`
        takes everything. NaN stands where a step has no reading; of a step recorded twice, the last
        reading counts. With `long`, each reading is a row: step, time, metric, scope and value. Needs pandas.
        """
        from forewarn.views.frame import frame

        return frame(self, metrics, scopes, steps, long)

    def plot(self, *metrics: str) -> Figure:
        """The loss, its moving average and the validation loss, the learning rate below, and where alerts fired.

        Each further metric gets a panel: `run.plot("gradient/global_norm")`. The figure needs no display; a notebook
        shows it, and `figure.savefig("loss.png")` writes it. Needs matplotlib.
        """
        from forewarn.views.plot import plot

        return plot(self, metrics)

    def dashboard(self, height: int = 900) -> EmbeddedPage:
        """The dashboard's page of this run in a notebook, as it is now, `height` pixels high.

        The page is part of the notebook: it needs no server and loads nothing. `forewarn serve` shows a run live.
        """
        from forewarn.views.page.report import EmbeddedPage, html_report

        return EmbeddedPage(html_report(self), height)

    def __repr__(self) -> str:
        from forewarn.views.notebook import run_words

        return run_words(self)

    def _repr_html_(self) -> str:
        from forewarn.views.notebook import run_html

        return run_html(self)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One state of the database, with the catalog up to date. Damage raises RunError."""
        try:
            self._limits.begin(self._connection)
            with database.transaction(self._connection, "DEFERRED"):
                generation = database.generation_of(self._connection)
                if generation != self._generation:
                    self._generation, self._catalog, self._behind = generation, Catalog(), Index()
                self._extent.check(self._connection)
                self._catalog.refresh(self._connection)
                yield self._connection
        except RunError as error:
            raise type(error)(f"{self.path}: {error}") from error
        except sqlite3.ProgrammingError:  # closed, or used from another thread: the run itself is fine
            raise
        except (sqlite3.Error, IndexError, OverflowError, TypeError, ValueError) as error:
            if (advice := _advice(error)) is not None:
                raise RunError(f"{self.path} cannot be read ({error}): {advice}") from error
            raise RunError(f"{self.path} cannot be read: {database.NAME} is damaged or in use ({error})") from error

    def _index(self, connection: sqlite3.Connection) -> Index:
        """All rows, including those after the extent, because a chunk may hold both."""
        return with_tail(connection, self._catalog, self._compacted(connection))

    def _compacted(self, connection: sqlite3.Connection) -> Index:
        self._behind = compacted(connection, self._catalog, self._behind)
        return self._behind

    def _extent_now(self, connection: sqlite3.Connection, index: Index) -> Extent:
        return extent_of(connection, len(index), len(self._catalog.layouts))

    def _names(self) -> list[str]:
        return list(dict.fromkeys(layout.name for layout in self._catalog.layouts[: self._extent.layouts]))

    def _layouts_of(self, name: str) -> list[Layout]:
        layouts = [layout for layout in self._catalog.layouts_of(name) if layout.id < self._extent.layouts]
        if not layouts:
            self._check_is_on(name)
            label = catalogue_of(self.info).label
            raise UnknownSeriesError(_unknown("metric", name, {metric: label(metric) for metric in self._names()}))
        return layouts

    def _check_is_on(self, name: str) -> None:
        if setting := self.switched_off(name):
            raise UnknownSeriesError(f"{name} is off: the run was measured with {setting}")

    def _column(
        self, connection: sqlite3.Connection, index: Index, layout: Layout, column: int
    ) -> tuple[Occurrences, Values]:
        places = occurrences(index, self._catalog, layout.id)
        in_tail = column_in_tail(connection, self._catalog, layout.id, column)
        if num_values(connection, layout.id) + len(in_tail) != len(places.rows):
            raise RunError(f"values of {layout.name} are missing: the database is damaged")
        values = [*column_of(connection, layout.id, layout.num_scopes, column), in_tail]
        return places, np.concatenate(values)

    def _records(self, kind: str, read: Callable[[float, int, str], T]) -> list[T]:
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT time, step, body FROM records WHERE kind = ? AND id <= ? ORDER BY id",
                [kind, self._extent.records],
            )
            return [read(*row) for row in rows]


def open_run(path: str | Path) -> Run:
    """The run in a directory. Raises RunError if there is none."""
    if not isinstance(path, str | Path):
        raise TypeError(f"path must name the directory of a run, a str or a Path, not {path!r}")
    path = Path(path)
    if not path.exists():
        hint = did_you_mean(path.name, _near(path))
        raise RunError(f"there is no {path}; {hint or 'name the directory of a run'}")
    if not path.is_dir():
        raise RunError(f"{path} is a file; name the directory of a run")
    if not (path / manifest.NAME).exists():
        below = [str(run) for run in list_runs(path)[:3]]
        advice = f"it has runs below, such as {', '.join(below)}" if below else "name the directory of a run"
        raise RunError(f"{path} holds no run: {manifest.NAME} is missing; {advice}")
    description = read_manifest(path)
    file = path / database.NAME
    if not file.exists():
        raise RunError(f"{path} has a {manifest.NAME} but no {database.NAME}; restore it from a copy")
    try:
        return Run(path, description, _opened(file))
    except (OSError, UnicodeError, sqlite3.Error) as error:  # SQLite may quote names that are not valid text
        reason = getattr(error, "strerror", None) or error
        advice = _advice(error) or "it is damaged; restore it from a copy"
        raise RunError(f"{file} cannot be opened ({reason}): {advice}") from error


def _near(path: Path) -> dict[str, str]:
    """The runs beside a path that does not exist, and one directory further down, each with its name."""
    return {str(run): run.name for run in list_runs(path.parent, depth=2)}


def _opened(file: Path) -> sqlite3.Connection:
    connection = database.open_for_reading(file)
    try:
        if (version := database.format_of(connection)) > manifest.FORMAT:
            raise RunError(
                f"{file} has format {version}, and this forewarn reads up to {manifest.FORMAT}: it was written by a"
                " newer version, so upgrade with pip install -U forewarn"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _advice(error: Exception) -> str | None:
    """What to do if a run cannot be read now or from here; None if it is damaged."""
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_READONLY:
            return "its writer was killed; try again in a minute, or copy its directory to a writable place"
        case sqlite3.SQLITE_CANTOPEN:
            return "the run was not closed and is read-only; copy its directory to a writable place"
        case sqlite3.SQLITE_BUSY:
            return "another process holds it; try again in a minute"
    return None


def _in_order(parts: list[tuple[Occurrences, Values]]) -> tuple[Occurrences, Values]:
    """Readings of one scope under different layouts, in the order they were recorded."""
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([places.rows for places, _ in parts])
    positions = np.concatenate([places.positions for places, _ in parts])
    order = np.lexsort((positions, rows))
    return Occurrences(rows[order], positions[order], once=False), np.concatenate([values for _, values in parts])[
        order
    ]


def _unknown(kind: str, name: str, names: list[str] | dict[str, str]) -> str:
    """The error message for an unknown name. `names` may map each name to what people call it."""
    some = ", ".join(map(repr, list(names)[:3]))
    others = f"the run has {some}{' and others' if len(names) > 3 else ''}" if some else "the run holds none"
    return f"there is no {kind} {name!r}; {did_you_mean(name, names) or others}"
