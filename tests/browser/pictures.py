"""Draws the dashboard for the documentation: `python -m tests.browser.pictures FOLDER`, from the runs of the demo."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.browser.conftest import Server

VIEWS = {
    "dashboard": ("#run=demo", 0),
    "layers": ("#run=demo", 1150),
    "compare": ("#view=compare&run=demo&run=demo-saved", 0),
}
"""By name of the picture: the address, and how far down the page."""
THEMES = ("light", "dark")
SIZE = {"width": 1280, "height": 860}


def draw(folder: Path) -> None:
    """Train the demo, serve its runs and take the pictures."""
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        subprocess.run([sys.executable, "-m", "forewarn", "demo"], cwd=place, check=True, capture_output=True)
        server = Server(Path(place, "runs"))
        server.start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            for theme in THEMES:
                page = browser.new_context(viewport=SIZE, color_scheme=theme).new_page()
                for name, (address, down) in VIEWS.items():
                    page.goto("about:blank")
                    page.goto(server.address + address)
                    page.wait_for_timeout(2000)
                    page.mouse.wheel(0, down)
                    page.wait_for_timeout(1500)
                    page.screenshot(path=folder / f"{name}-{theme}.png")
        finally:
            browser.close()
            server.kill()


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
