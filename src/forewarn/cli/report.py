"""`forewarn report`: a run in one file."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import click

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_PRINT_SECONDS = 120


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="File to write. Default: report.html or report.pdf here; Markdown and JSON go to standard output.",
)  # fmt: skip
@click.option("--markdown", "form", flag_value="markdown", help="Write Markdown, for a pull request.")
@click.option("--json", "form", flag_value="json", help="Write JSON, for a script or an agent.")
@click.option("--pdf", "form", flag_value="pdf", help="Print to PDF with an installed Chromium or Chrome.")
def command(run: Path, output: Path | None, form: str | None) -> None:
    """Write a run to one file that opens anywhere, without a network.

    The file has the verdict, what to do, the charts behind each alert, heat maps, settings, and what watching cost. It
    is smaller than 2 MB. Markdown and JSON are smaller than 64 KB.

    \b
    Examples:
      forewarn report runs/demo -o report.html
      forewarn report runs/demo --markdown | gh pr comment 12 --body-file -
      forewarn report runs/demo --json | jq .verdict
    """
    import json

    from forewarn.cli.terminal import from_run
    from forewarn.views.page.report import json_report, markdown_report

    if form == "json":
        _deliver(json.dumps(from_run(run, json_report), indent=2, allow_nan=False) + "\n", output)
    elif form == "markdown":
        _deliver(from_run(run, markdown_report), output)
    elif form == "pdf":
        target = output or Path("report.pdf")
        browser = _browser()
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "report.html"
            write_html(run, page)
            _print(browser, page, target)
        click.echo(f"Wrote {target}.")
    else:
        target = output or Path("report.html")
        write_html(run, target)
        click.echo(f"Wrote {target}, {os.path.getsize(target) / 1000:.0f} KB.")


def write_html(run: Path, target: Path) -> None:
    """Write the report of a run to a file."""
    from forewarn.cli.terminal import Failure, from_run
    from forewarn.views.page.report import NotBuiltError, html_report

    try:
        _write(from_run(run, html_report), target)
    except NotBuiltError as error:
        raise Failure(str(error)) from error


def _deliver(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(text, output)
        click.echo(f"Wrote {output}.")


def _write(text: str, target: Path) -> None:
    from forewarn.cli.terminal import Failure
    from forewarn.files import replacing

    try:
        with replacing(target, durable=False) as file:
            file.write(text.encode())
    except OSError as error:
        raise Failure(f"{target} cannot be written: {error.strerror}") from error


def _browser() -> str:
    from forewarn.cli.terminal import Failure

    found_browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found_browser is None:
        raise Failure(
            "--pdf needs Chromium or Chrome on the PATH; open the HTML report in a browser and print it instead"
        )
    return found_browser


def _print(browser: str, page: Path, target: Path) -> None:
    """Let a browser without a window print a page to PDF."""
    from forewarn.cli.terminal import Failure

    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    arguments = [
        browser, "--headless", "--disable-gpu", "--no-pdf-header-footer", *(["--no-sandbox"] if is_root else []),
        f"--user-data-dir={page.parent / 'profile'}", f"--print-to-pdf={target.absolute()}", page.absolute().as_uri(),
    ]  # fmt: skip
    try:
        done = subprocess.run(arguments, capture_output=True, timeout=_PRINT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure(f"{browser} could not print the report: {error}") from error
    if done.returncode or not target.exists():
        raise Failure(f"{browser} could not print the report: {done.stderr.decode(errors='replace')[-300:].strip()}")
