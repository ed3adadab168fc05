"""`forewarn report`, with a page of three small files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forewarn.cli import report
from tests.cli.conftest import Said

Call = Callable[..., Said]


@pytest.fixture
def run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return root / "faulty"


def test_a_report_is_written_and_named(forewarn: Call, run: Path, built: Path) -> None:
    said = forewarn("report", run, "-o", "mine.html")
    assert said.out.startswith("Wrote mine.html, ")
    assert 'id="embedded"' in Path("mine.html").read_text()
    assert forewarn("report", run).out.startswith("Wrote report.html")


def test_markdown_and_json_go_to_standard_output_or_a_file(forewarn: Call, run: Path) -> None:
    assert forewarn("report", run, "--markdown").out.startswith("# faulty: warnings\n")
    assert json.loads(forewarn("report", run, "--json").out)["verdict"]["code"] == "G103"
    assert forewarn("report", run, "--json", "-o", "mine.json").out == "Wrote mine.json.\n"
    assert json.loads(Path("mine.json").read_text())["path"] == str(run)


def test_what_is_missing_is_told_in_one_sentence(
    forewarn: Call,
    run: Path,
    built: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "there is no missing" in forewarn("report", "missing").err
    assert "nowhere" in forewarn("report", run, "-o", "nowhere/mine.html").err
    monkeypatch.setattr(report, "BROWSERS", ("no-such-browser",))
    assert "needs Chromium or Chrome" in forewarn("report", run, "--pdf").err
    (built / "page.js").unlink()
    said = forewarn("report", run)
    assert said.code == 3
    assert "make page" in said.err
    assert not Path("report.html").exists()


def test_a_browser_prints_the_report(
    forewarn: Call,
    run: Path,
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(
        '#!/bin/sh\nfor word; do case "$word" in --print-to-pdf=*) echo "$@" > "${word#*=}";; esac; done\n'
    )
    browser.chmod(0o755)
    monkeypatch.setattr(report, "BROWSERS", (str(browser),))
    assert forewarn("report", run, "--pdf").out == "Wrote report.pdf.\n"
    words = Path("report.pdf").read_text().split()
    assert "--headless" in words
    assert words[-1].startswith("file://")
    browser.write_text("#!/bin/sh\necho no display >&2\nexit 1\n")
    Path("report.pdf").unlink()
    assert "could not print the report: no display" in forewarn("report", run, "--pdf").err
