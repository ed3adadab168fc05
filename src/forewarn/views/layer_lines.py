"""A table of every layer's gradient and update, every N steps."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from forewarn.types import Action, Alert, Block, in_words
from forewarn.views.console import plain_console, print_lines
from forewarn.views.wording import short

_COLUMNS = {"gradient/norm": "norm", "gradient/mean": "mean", "gradient/std": "std", "update/ratio": "ratio"}


class LayerLines:
    """Prints each tensor's gradient norm, mean and std and its update ratio, every `every` steps that are measured.

    Gradients are those that the optimizer used: after clipping.
    """

    def __init__(self, every: int = 100, console: Console | None = None) -> None:
        if every < 1:
            raise ValueError(f"LayerLines.every must be at least 1, not {every!r}")
        self._every = every
        self._console = console or plain_console(stderr=True)

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        if (step + 1) % self._every:
            return
        columns = {block.name: dict(zip(block.scopes, block.values.tolist(), strict=True)) for block in blocks}
        names = {name: short(name) for name in columns.get("gradient/norm", ())}
        if not names:
            return
        width = max(len(f"step {step + 1}"), *map(len, names.values()))
        lines = [f"{f'step {step + 1}':{width}}" + "".join(f"{title:>11}" for title in _COLUMNS.values())]
        for name, shown in names.items():
            values = (columns.get(column, {}).get(name) for column in _COLUMNS)
            cells = ("-" if value is None or value != value else in_words(value) for value in values)
            lines.append(f"{shown:{width}}" + "".join(f"{cell:>11}" for cell in cells))
        print_lines(self._console, [Text(line) for line in lines])

    def close(self) -> None:
        """Nothing is open."""
