"""Screens fit their terminal and say the same with and without colour; `tests/golden/screens` holds their text."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from rich.cells import cell_len

from tests.golden.screens import SCREENS, WIDTHS, Screen, lines, stored_runs, written

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module", autouse=True)
def _runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with stored_runs(tmp_path_factory.mktemp("runs")):
        yield


@pytest.mark.parametrize("name", SCREENS)
def test_no_line_is_wider_than_the_terminal(name: str) -> None:
    for width in WIDTHS:
        wide = [line for line in ESCAPES.sub("", written(name, width, Screen())).splitlines() if cell_len(line) > width]
        assert not wide, f"at {width} columns"


@pytest.mark.parametrize("name", SCREENS)
def test_colour_adds_nothing_but_colour(name: str) -> None:
    for width in WIDTHS:
        coloured = lines(written(name, width, Screen()), width)
        assert coloured == lines(written(name, width, Screen(), NO_COLOR="1"), width)
        dumb = written(name, width, Screen(), TERM="dumb")
        assert "\x1b" not in dumb
        assert coloured == lines(dumb, width)


@pytest.mark.parametrize("name", SCREENS)
def test_no_color_means_no_colour(name: str) -> None:
    codes = re.findall(r"\x1b\[([0-9;]*)m", written(name, 80, Screen(), NO_COLOR="1"))
    assert not {code for sequence in codes for code in sequence.split(";") if code.isdigit() and 30 <= int(code) < 108}


@pytest.mark.parametrize("name", SCREENS)
def test_a_file_gets_plain_text_and_the_same_words(name: str) -> None:
    in_file = written(name, 80, Screen(is_terminal=False))
    assert "\x1b" not in in_file
    on_screen = lines(written(name, 80, Screen()), 80)
    assert _words(in_file) == _words(on_screen)


@pytest.mark.parametrize("name", SCREENS)
def test_a_terminal_without_unicode_gets_ascii(name: str) -> None:
    assert written(name, 80, Screen(encoding="ascii")).isascii()


def _words(text: str) -> list[str]:
    """The words of a text in any order: a terminal wraps lines and moves the rule's name to the right."""
    return sorted(re.findall(r"[\w.%-]+", text))
