"""Tables with one row per reading: CSV, JSON lines and Parquet, all with the same columns."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from itertools import chain, repeat
from typing import IO, Any

import numpy as np

from forewarn.views.export.readings import MOST_READINGS, Part, Selection, Tell

COLUMNS = ("step", "unix_seconds", "metric", "scope", "value", "unit")


def write_csv(selection: Selection, file: IO[bytes], tell: Tell) -> None:
    """Numbers have the shortest digits that give the same float32 again."""
    with _text(file) as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for part in selection.parts(tell):
            writer.writerows(_rows(part, selection.units[part.metric]))


def write_json_lines(selection: Selection, file: IO[bytes], tell: Tell) -> None:
    """One object per line. JSON has no NaN and no infinity, so these become null."""
    with _text(file) as text:
        for part in selection.parts(tell):
            metric, unit = json.dumps(part.metric), json.dumps(selection.units[part.metric])
            quoted = {scope: json.dumps(scope) for scope in part.scopes}
            for step, seconds, _, scope, value, _ in _rows(part, ""):
                number = value if value[-1].isdigit() else "null"
                now = seconds if math.isfinite(seconds) else "null"
                text.write(
                    f'{{"step":{step},"unix_seconds":{now},"metric":{metric},"scope":{quoted[scope]},'
                    f'"value":{number},"unit":{unit}}}\n'
                )


def write_parquet(selection: Selection, file: IO[bytes], tell: Tell) -> None:
    """Names are stored once. A row group has about 260,000 readings of few metrics, so filters skip the others."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Parquet needs pyarrow: pip install 'forewarn[parquet]'", name=error.name) from error
    names = list(selection.scopes)
    units = list(dict.fromkeys(selection.units.values()))
    scopes = list(dict.fromkeys(scope for several in selection.scopes.values() for scope in several))
    places = {scope: place for place, scope in enumerate(scopes)}
    word = pa.dictionary(pa.int32(), pa.string())
    kinds = (pa.int64(), pa.float64(), word, word, pa.float32(), word)
    schema = pa.schema(list(zip(COLUMNS, kinds, strict=True)), metadata=_about(selection))

    def codes(code: int, part: Part) -> Any:
        return np.full(part.values.size, code, np.int32)

    def table(parts: list[Part]) -> Any:
        def words(columns: list[Any], dictionary: list[str]) -> Any:
            return pa.DictionaryArray.from_arrays(np.concatenate(columns), pa.array(dictionary, pa.string()))

        columns = [
            np.concatenate([np.repeat(part.steps, len(part.scopes)) for part in parts]),
            np.concatenate([np.repeat(part.times, len(part.scopes)) for part in parts]),
            words([codes(names.index(part.metric), part) for part in parts], names),
            words([np.tile([places[scope] for scope in part.scopes], len(part.steps)) for part in parts], scopes),
            np.concatenate([part.values.ravel() for part in parts]),
            words([codes(units.index(selection.units[part.metric]), part) for part in parts], units),
        ]
        return pa.Table.from_arrays([pa.array(column) for column in columns], schema=schema)

    with ParquetWriter(file, schema) as writer:
        for parts in _gathered(selection.parts(tell)):
            writer.write_table(table(parts))


def _gathered(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """Small parts together, up to the size of a large one."""
    waiting: list[Part] = []
    for part in parts:
        if waiting and sum(one.values.size for one in waiting) + part.values.size > MOST_READINGS:
            yield waiting
            waiting = []
        waiting.append(part)
    if waiting:
        yield waiting


def _about(selection: Selection) -> dict[str, str]:
    return {"forewarn.run": str(selection.run.path), "forewarn.model": selection.run.info.model}


def _rows(part: Part, unit: str) -> Iterator[tuple[int, float, str, str, str, str]]:
    """One row per reading; the value is text with the shortest digits of a float32."""
    width = len(part.scopes)
    return zip(
        chain.from_iterable(repeat(step, width) for step in part.steps.tolist()),
        chain.from_iterable(repeat(now, width) for now in part.times.tolist()),
        repeat(part.metric),
        chain.from_iterable(repeat(part.scopes, len(part.steps))),
        map(str, part.values.ravel()),
        repeat(unit),
    )


def _text(file: IO[bytes]) -> _Text:
    return _Text(file, encoding="utf-8", errors="replace", newline="")


class _Text(io.TextIOWrapper):
    """Text in a binary file that stays open."""

    def close(self) -> None:
        self.flush()
        if not self.closed:
            self.detach()
