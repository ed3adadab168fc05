"""Plot of every layer's coordinates against width."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from forewarn.lab.coordinates.exponents import Term
from forewarn.lab.coordinates.findings import MEANINGS, NAMES, verdict_word
from forewarn.lab.coordinates.sweep import Sweep

LINE_STYLES = ("-", "--", ":", "-.")
"""Of the first block, the second and so on, in a cycle."""


def draw(path: Path, sweeps: Sequence[Sweep]) -> None:
    """Write a PNG: a row for each parametrization, a panel for each term, a line for each layer, all logarithmic.

    Raises ModuleNotFoundError where matplotlib is missing.
    """
    matplotlib: Any = import_module("matplotlib.figure")
    figure = matplotlib.Figure(figsize=(3.3 * len(Term) + 2.4, 3.1 * len(sweeps) + 0.6), layout="constrained")
    panels = figure.subplots(len(sweeps), len(Term), squeeze=False, sharex=True, sharey="col")
    kinds = list(dict.fromkeys(_kind(layer) for sweep in sweeps for layer in sweep.values))
    for sweep, row in zip(sweeps, panels, strict=True):
        for term, panel in zip(Term, row, strict=True):
            _lines(panel, sweep, term, kinds)
        row[0].set_ylabel(f"{NAMES[sweep.parametrization]}:\n{verdict_word(sweep.growths())}\n\nroot mean square")
    for term, panel in zip(Term, panels[0], strict=True):
        panel.set_title(f"${term}$\n{MEANINGS[term]}", fontsize=10)
    for panel in panels[-1]:
        panel.set_xlabel("width")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    steps = f"{sweeps[0].num_steps} Adam step{'s' if sweeps[0].num_steps > 1 else ''}"
    figure.suptitle(f"After {steps}. A level line is width-stable; a dotted grey one grows in proportion to width.")
    figure.savefig(path, dpi=120)


def _lines(panel: Any, sweep: Sweep, term: Term, kinds: Sequence[str]) -> None:
    for layer, terms in sweep.values.items():
        if term not in terms:
            continue
        block = re.search(r"\.(\d+)\.", layer)
        panel.plot(
            sweep.widths,
            np.exp(np.log(terms[term][-1]).mean(axis=1)),
            marker=".",
            color=f"C{kinds.index(_kind(layer)) % 10}",
            linestyle=LINE_STYLES[int(block[1]) % len(LINE_STYLES)] if block else "-",
            label=layer,
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sweep.widths, [str(width) for width in sweep.widths], minor=False)
    low, high = panel.get_ylim()
    for start in np.geomspace(low / max(sweep.widths), high, 12):
        ends = np.array([min(sweep.widths), max(sweep.widths)])
        panel.plot(ends, start * ends / ends[0], color="0.85", linestyle=":", linewidth=1, zorder=0)
    panel.set_ylim(low, high)


def _kind(layer: str) -> str:
    """What layers of all blocks have in common."""
    return re.sub(r"\.\d+\.", ".*.", layer)
