"""The documentation site builds without a warning, and every link in it leads somewhere."""

import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import forewarn

ROOT = Path(__file__).parent.parent


class Page(HTMLParser):
    """What a page links to, and where links into it can lead."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        self.links += [values[key] for key in ("href", "src", "srcset") if values.get(key)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` builds it, without leaving anything in the repository."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "src").symlink_to(ROOT / "src")
    shutil.copy(ROOT / "zensical.toml", folder)
    subprocess.run([sys.executable, ROOT / "docs" / "site.py", folder / "build" / "pages"], check=True, timeout=120)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", folder / "zensical.toml"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ | {"NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "site"


@pytest.mark.ci
def test_every_link_of_the_site_leads_somewhere_and_none_leaves_it_for_a_file(site):
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 150
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("mailto", "http", "https", "data"):
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.is_file() or (goal in pages and unquote(parts.fragment) not in pages[goal].anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


@pytest.mark.ci
def test_the_reference_has_every_public_name(site):
    anchors = Page(site / "reference.html").anchors
    assert [name for name in forewarn.__all__ if name[0] != "_" and f"forewarn.{name}" not in anchors] == []


@pytest.mark.ci
def test_the_site_can_be_searched_and_asks_no_other_machine_for_anything(site):
    assert "update-ratio-high" in (site / "search.json").read_text()
    home = (site / "index.html").read_text()
    assert "fonts.googleapis" not in home
    scripts = [link for link in Page(site / "index.html").links if link.endswith((".js", ".css"))]
    assert scripts
    assert [link for link in scripts if "://" in link] == []
