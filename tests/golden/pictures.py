"""Draws terminals as SVG, light and dark, from what the commands really print.

`python -m tests.golden.pictures docs/pictures` draws those of the documentation; with `--all`, every screen of
`tests.golden.screens` at every width, to be looked at.
"""

from __future__ import annotations

import re
import tempfile
from itertools import groupby
from pathlib import Path

import click
import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

from tests.golden.screens import SCREENS, WIDTHS, Screen, command, displayed, stored_runs, written

THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
SCREENS["demo"] = command("demo")
DOCUMENTED = {"demo": "forewarn demo", "check-faulty": "forewarn check lr-jump"}
"""The pictures of the documentation, each with its title."""

pyte.graphics.TEXT[2] = "+blink"
"""pyte knows no faint text: its field for blinking text, of which there is none here, holds it."""
_COLORS = {"brown": "yellow", "default": None} | {
    f"bright{name}": f"bright_{name}" for name in ("red", "green", "blue")
}
"""pyte's names of colours in rich's words, where they differ."""


def drawn(terminal: pyte.Screen) -> Text:
    """What is on a terminal, in its colours."""
    lines = []
    for row in range(terminal.lines):
        cells = [terminal.buffer[row][column] for column in range(terminal.columns)]
        runs = groupby(cells, key=_style)
        lines.append(Text.assemble(*[("".join(cell.data for cell in same), style) for style, same in runs]))
    while lines and not lines[-1].plain.strip():
        lines.pop()
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def _style(cell: pyte.screens.Char) -> Style:
    color = _COLORS.get(cell.fg, cell.fg)
    known = f"#{color}" if color and re.fullmatch(r"[0-9a-f]{6}", color) else color
    return Style(color=known, bold=cell.bold, dim=cell.blink, italic=cell.italics, underline=cell.underscore)


def pictures(title: str, terminal: pyte.Screen) -> dict[str, str]:
    """A terminal as SVG without anything from elsewhere, by theme."""
    made = {}
    for theme, colors in THEMES.items():
        console = Console(
            width=terminal.columns, record=True, file=Screen(), force_terminal=True, color_system="truecolor"
        )
        console.print(drawn(terminal), soft_wrap=True)
        svg = console.export_svg(title=title, theme=colors, unique_id=f"terminal-{theme}")
        made[theme] = re.sub(r"@font-face \{.*?\}\n?", "", svg, flags=re.DOTALL)
    return made


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--all", "everything", is_flag=True, help="Every screen at every width.")
def main(folder: Path, everything: bool) -> None:
    """Draw the pictures of the documentation into FOLDER."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = (
        [(name, width) for name in SCREENS for width in WIDTHS] if everything else [(name, 80) for name in DOCUMENTED]
    )
    with tempfile.TemporaryDirectory() as runs, stored_runs(Path(runs)):
        for name, width in wanted:
            click.echo(f"{name} at {width} columns")
            terminal = displayed(written(name, width, Screen()), width)
            for theme, svg in pictures(DOCUMENTED.get(name, name), terminal).items():
                size = f"-{width}" if everything else ""
                (folder / f"{name}{size}-{theme}.svg").write_text(svg)


if __name__ == "__main__":
    main()
