"""`forewarn show`: the measurements of each layer at one step."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from rich.console import RenderableType
    from rich.text import Text

    from forewarn.catalogue import Catalogue
    from forewarn.store import Run
    from forewarn.types import Block

COLUMNS = (
    "gradient/norm", "weight/norm", "update/ratio", "gradient/zero_fraction", "gradient/nonfinite",
    "update/frozen_cause",
)  # fmt: skip
"""Metrics shown for each layer unless --metric is given."""
CAUSES = ("update/frozen_cause", "update/stopped_by")
QUIET = {
    "gradient/zero_fraction": "No gradient value is zero.",
    "gradient/nonfinite": "No gradient value is NaN or infinite.",
    "update/frozen_cause": "Every tensor moves.",
}
"""Columns that are hidden while they are zero for every layer, and the sentence shown instead."""
GUTTER = 2
"""Spaces between two columns."""
MEDIAN_RATIO = "monitor/update_ratio_median"


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--scope", metavar="REGEX", help="Show only layers whose name matches.")
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Show the first measured step at or after N. Default: the last one.",
)
@click.option("--metric", metavar="REGEX", help="Show every recorded metric whose name matches.")
@click.option("--histogram", metavar="NAME", help="Show the distribution of this tensor's gradients and weights.")
def command(run: Path, scope: str | None, step: int | None, metric: str | None, histogram: str | None) -> None:
    """Show the measurements of every layer at one step, or the histogram of one tensor.

    A histogram has one column per power of two, with negative values on the left. On this axis a bell curve around zero
    looks like two hills, because few values lie close to zero. Its shape in words and its percentiles are below.

    \b
    Examples:
      forewarn show runs/demo
      forewarn show runs/demo --scope 'blocks.0' --step 180
      forewarn show runs/demo --metric 'update/'
      forewarn show runs/demo --metric '/shape'
      forewarn show runs/demo --histogram blocks.0.attention.output.weight --step 180
    """
    from forewarn.cli.terminal import from_run, show

    wanted_scope, wanted_metric = _pattern("--scope", scope), _pattern("--metric", metric)
    if histogram is not None:
        if metric is not None or scope is not None:
            raise click.UsageError("--histogram shows a single tensor; remove --metric and --scope")
        show(*from_run(run, lambda stored: _histograms(stored, step, histogram)))
    else:
        show(*from_run(run, lambda stored: _picture(stored, step, wanted_scope, wanted_metric)))


def _histograms(run: Run, step: int | None, scope: str) -> list[RenderableType]:
    """All histograms of a tensor, each with its shape in words and its percentiles."""
    from rich.text import Text

    from forewarn.cli.terminal import Failure, output
    from forewarn.store.errors import UnknownSeriesError
    from forewarn.views.bars import ASCII_BARS, BARS
    from forewarn.views.histogram import picture, words
    from forewarn.views.wording import short

    options = output().options
    parts: list[RenderableType] = []
    names = run.distributions()
    if not names:
        raise Failure(f"{run.path} has no histograms: {_why_no_histograms(run)}")
    for name in names:
        try:
            histograms = run.histograms(name, scope)
        except UnknownSeriesError as error:
            raise Failure(str(error)) from error
        if not len(histograms.steps):
            continue
        measured = _nearest(histograms.steps, step)
        index = histograms.steps.tolist().index(measured)
        title = f"{short(name.removesuffix('/histogram'))} of {short(scope)}  "
        title += f"step {measured}{_instead_of(step, measured)}\n"
        bars = ASCII_BARS if options.ascii_only else BARS
        drawn = picture(histograms.counts[index], int(histograms.zeros[index]), options.max_width, bars)
        description = words(*_spread(run, name.removesuffix("/histogram"), scope, measured))
        parts += [Text(title, style="bold"), *map(Text, drawn), *map(Text, description), Text()]
    if not parts:
        raise Failure(f"no histogram was recorded for {short(scope)}")
    return parts[:-1]


def _why_no_histograms(run: Run) -> str:
    if setting := run.switched_off("weight/histogram"):
        return f"it was recorded with {setting}"
    if not {"gradient/norm", "weight/norm"} & set(run.names()):
        return "no tensors were measured; use forewarn.watch(every=N), or forewarn train lm --weight-monitor"
    return "its tensors were measured, but no histograms were recorded"


def _instead_of(requested: int | None, shown: int) -> str:
    """A note if the step shown is not the one requested."""
    if requested is None or requested == shown:
        return ""
    if shown < requested:
        return f" (the last measured step; none at or after step {requested})"
    return f" (the next measured step after {requested})"


def _nearest(steps: Sequence[int] | NDArray[np.int64], requested: int | None) -> int:
    """The first measured step at or after the requested one, so that a fault at that step shows; else the last one."""
    later = [step for step in map(int, steps) if requested is not None and step >= requested]
    return later[0] if later else int(steps[-1])


def _spread(run: Run, family: str, scope: str, step: int) -> tuple[float, dict[str, float]]:
    """The shape of a tensor at a step, and its percentiles including minimum and maximum."""
    from forewarn.histograms import PERCENTS

    recorded = set(run.names())

    def value(quantity: str) -> float:
        if f"{family}/{quantity}" not in recorded or scope not in run.scopes(f"{family}/{quantity}"):
            return float("nan")
        series = run.series(f"{family}/{quantity}", scope)
        return float(next(iter(series.values[series.steps == step]), "nan"))

    return value("shape"), {name: value(name) for name in ("min", *PERCENTS, "max")}


def _picture(
    run: Run, step: int | None, scope: re.Pattern[str] | None, metric: re.Pattern[str] | None
) -> list[RenderableType]:
    """The step, its key numbers, and a table of layers."""
    from rich.text import Text

    from forewarn.metrics import catalogue_of
    from forewarn.views.wording import short

    catalogue = catalogue_of(run.info)
    names = _chosen(run, metric, catalogue)
    measured = _measured_step(run, names, step)
    rows = itertools.takewhile(lambda row: row[0] == measured, run.steps(measured))
    recorded = [block for _, of_step in rows for block in of_step]
    blocks = [block for block in recorded if not metric or metric.search(block.name)]
    with_ratios = {"update/ratio", MEDIAN_RATIO} & {block.name for block in blocks}
    ratio = _update_ratio(run, measured, recorded) if with_ratios else []
    last_step = run.last_step
    of = f" of {last_step}" if last_step != measured else ""
    parts: list[RenderableType] = [
        Text.assemble((short(str(run.path)), "bold"), f"  step {measured}{of}{_instead_of(step, measured)}\n")
    ]
    of_the_run = [block for block in blocks if _is_of_the_run(block.name, block.scopes, catalogue)]
    parts += _key_numbers(of_the_run, catalogue)
    return [*parts, *ratio, *_layers([block for block in blocks if block.name in names], scope, catalogue)]


def _chosen(run: Run, metric: re.Pattern[str] | None, catalogue: Catalogue) -> list[str]:
    """The metrics that select the step and fill the table: layer metrics, if any match."""
    from forewarn.cli.terminal import Failure
    from forewarn.metrics import all_metrics

    recorded = run.names()
    if not recorded:
        raise Failure(f"{run.path} has no recorded metrics yet")
    if metric and not any(metric.search(name) for name in recorded):
        for candidate in all_metrics():
            if metric.search(candidate.name) and (setting := run.switched_off(candidate.name)):
                raise Failure(f"{candidate.name} is off: the run was measured with {setting}")
    matching = _matching("metric", metric, recorded)
    of_layers = [name for name in matching if not _is_of_the_run(name, run.scopes(name), catalogue)]
    return [name for name in of_layers if metric or name in COLUMNS] or matching


def _is_of_the_run(name: str, scopes: tuple[str, ...], catalogue: Catalogue) -> bool:
    """Whether a metric belongs to the run as a whole rather than to its layers."""
    from forewarn.catalogue import Scope

    metric = catalogue.find(name)
    return scopes == ("",) or (metric is not None and metric.scope is Scope.GROUP)


def _measured_step(run: Run, names: list[str], step: int | None) -> int:
    """The step to show, among those with a value for any of these metrics."""
    import numpy as np

    return _nearest(np.unique(np.concatenate([run.series(name, run.scopes(name)[0]).steps for name in names])), step)


def _key_numbers(blocks: Sequence[Block], catalogue: Catalogue) -> list[RenderableType]:
    """The values of the run as a whole, one line per family: `gradient  global_norm 1.79 · backward_passes 1`."""
    from rich.text import Text

    from forewarn.cli.terminal import output
    from forewarn.judge.headlines import SEPARATOR
    from forewarn.types import figure
    from forewarn.views.wording import short

    families: dict[str, list[tuple[str, str]]] = {}
    for block in blocks:
        family, _, quantity = block.name.partition("/")
        if quantity.startswith("topk_"):
            continue
        for scope, value in zip(block.scopes, block.values.tolist(), strict=True):
            name = f"{quantity} {scope}" if len(block.scopes) > 1 else quantity
            families.setdefault(family, []).append((short(name), figure(value) + _unit(block.name, catalogue)))
    margin = max(map(len, families), default=0) + GUTTER
    room = output().width - margin
    lines: list[RenderableType] = []
    for family in sorted(families, key=lambda name: (name != "train", name == "monitor", name)):
        line = Text.assemble((short(family).ljust(margin), "dim"))
        for name, value in sorted(families[family]):
            item = Text.assemble((f"{name} ", "dim"), (value, "bold"))
            if line.cell_len + len(SEPARATOR) + item.cell_len > margin + room:
                lines.append(line)
                line = Text(" " * margin)
            line = Text.assemble(line, (SEPARATOR, "dim") if line.cell_len > margin else "", item)
        lines.append(line)
    return [*lines, Text()] if lines else []


def _unit(name: str, catalogue: Catalogue) -> str:
    """The unit after a number; empty for shares, counts, flags and codes, where it would not read well."""
    from forewarn.views.wording import short

    metric = catalogue.find(name)
    return f" {short(str(metric.unit))}" if metric and metric.unit not in ("", "share", "count", "flag", "code") else ""


def _update_ratio(run: Run, step: int, blocks: Sequence[Block]) -> list[RenderableType]:
    """`update ratio: median 3e-4; typical in the middle of a run 1e-4 to 1e-3`, if the step has one."""
    import numpy as np
    from rich.text import Text

    from forewarn.types import figure
    from forewarn.views.bands import Rate, phase, update_ratio_words

    median = next((float(block.values[0]) for block in blocks if block.name == MEDIAN_RATIO), float("nan"))
    if not np.isfinite(median):
        return []
    groups = [run.series("train/lr", group) for group in run.scopes("train/lr")] if "train/lr" in run.names() else []
    rates = [Rate.of(lr.values[lr.steps <= step]) for lr in groups]
    highest = max(rates, key=lambda rate: np.nan_to_num(rate.peak), default=Rate())
    total = run.info.hyperparameters.get("total_steps")
    now = phase(step, total if isinstance(total, int | float) else None, highest)
    line = Text.assemble("update ratio: median ", (figure(median), "bold"), f"; {update_ratio_words(now)}\n")
    return [line]


def _layers(
    blocks: Sequence[Block], scope_pattern: re.Pattern[str] | None, catalogue: Catalogue
) -> list[RenderableType]:
    """One row per layer, one column per metric."""
    from rich.text import Text

    from forewarn.views.wording import short

    layers = [block for block in blocks if not _is_of_the_run(block.name, block.scopes, catalogue)]
    if not layers:
        return []
    recorded = dict.fromkeys(block.name for block in layers)  # a metric may be split into several blocks, one per scope
    names = sorted(recorded, key=lambda name: [*COLUMNS, name].index(name))
    cells: dict[str, dict[str, float]] = {}
    for block in layers:
        for scope, value in zip(block.scopes, block.values.tolist(), strict=True):
            cells.setdefault(scope, {})[block.name] = value
    rows = {scope: cells[scope] for scope in _matching("scope", scope_pattern, cells)}
    family, headers = _headers(names, catalogue)
    columns = [
        (header, name, [_cell(name, row.get(name), catalogue) for row in rows.values()])
        for header, name in zip(headers, names, strict=True)
    ]
    above = [Text(family, style="bold")] if family else []
    is_whole = len(rows) == len(cells) and len(columns) > 1  # else the sentence would be about layers not shown
    telling = [column for column in columns if not (is_whole and _is_quiet(column[1], rows.values()))]
    quiet = [QUIET[name] for _, name, _ in columns if all(name != other for _, other, _ in telling)]
    below = [Text("\n" + " ".join(quiet), style="dim")] if quiet else []
    return [*above, *_tables([short(scope) for scope in rows], telling), *below]


def _is_quiet(name: str, rows: Iterable[Mapping[str, float]]) -> bool:
    """Whether a column is zero for all of several layers."""
    return name in QUIET and len(rows := list(rows)) > 1 and all(row.get(name, 0.0) == 0.0 for row in rows)


def _headers(names: Sequence[str], catalogue: Catalogue) -> tuple[str, list[str]]:
    """The family that several metrics share, or an empty string, and the header of each column."""
    from forewarn.views.wording import short

    families = {name.partition("/")[0] for name in names}
    headers = [catalogue.label(name) if name in COLUMNS else short(name) for name in names]
    if len(names) == 1 or len(families) > 1:
        return "", headers
    (family,) = families
    return family, [header.removeprefix(f"{family}/").removeprefix(f"{family} ") for header in headers]


def _tables(layers: Sequence[str], columns: Sequence[tuple[str, str, list[Text]]]) -> Iterator[RenderableType]:
    """As many tables as needed to show every number in full, each with the layers on the left."""
    from rich.text import Text

    from forewarn.cli.terminal import output, quiet_table

    room = output().width - max(map(len, ("layer", *layers)))
    tables: list[list[tuple[str, str, list[Text]]]] = [[]]
    room_left = room
    for column in columns:
        width = GUTTER + max(len(column[0]), *map(len, column[2]))
        if tables[-1] and width > room_left:
            tables.append([])
            room_left = room
        tables[-1].append(column)
        room_left -= width
    for number, group in enumerate(tables):
        if number:
            yield Text()
        table = quiet_table()
        table.add_column("layer", overflow="fold")
        for header, name, values in group:
            least = max(map(len, values))
            table.add_column(header, justify="left" if name in CAUSES else "right", min_width=least)
        for layer, *row in zip(layers, *(values for _, _, values in group), strict=True):
            table.add_row(Text(layer), *row)
        yield table


def _cell(name: str, value: float | None, catalogue: Catalogue) -> Text:
    """One number; unhealthy values are red."""
    import math

    from rich.text import Text

    from forewarn.types import FrozenCause, Shape, figure

    metric = catalogue.find(name)
    if value is None or (name.endswith("/shape") and math.isnan(value)):
        return Text("–", style="dim")
    if name.endswith("/shape") and value in set(map(float, Shape)):
        shape = Shape(int(value))
        return Text(str(shape).partition(":")[0], style="" if shape is Shape.HEALTHY else "yellow")
    if name in CAUSES and value in {float(cause) for cause in FrozenCause}:
        cause = FrozenCause(int(value))
        moves = cause is FrozenCause.MOVING
        return Text("yes" if moves else f"no: {cause}", style="dim" if moves else "yellow")
    broken = not math.isfinite(value) or (metric is not None and not metric.is_healthy(value))
    return Text(figure(value), style="bold red" if broken else "")


def _matching(option: str, pattern: re.Pattern[str] | None, names: Iterable[str]) -> list[str]:
    """The names that match; raises a Failure with suggestions if none does."""
    from forewarn.cli.terminal import Failure
    from forewarn.suggestions import did_you_mean
    from forewarn.views.wording import short

    names = list(names)
    matching = [name for name in names if pattern is None or pattern.search(name)]
    if not matching and pattern is not None:
        some = " or ".join(f"'{short(name)}'" for name in names[:3])
        others = f"the run has {len(names)}, such as {some}"
        hint = did_you_mean(pattern.pattern, dict(zip(map(short, names), names, strict=True))) or others
        raise Failure(f"no name matches --{option} {pattern.pattern!r}; {hint}")
    return matching


def _pattern(option: str, text: str | None) -> re.Pattern[str] | None:
    from forewarn.cli.terminal import Failure

    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise Failure(f"{option} {text!r} is not a valid regular expression: {error}") from error
