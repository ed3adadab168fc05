"""The documentation site in a browser: its search works, and nothing is asked of another machine."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.test_site import site

__all__ = ["site"]  # a fixture


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("width", [1280, 390])
def test_the_search_of_the_site_finds_a_page_without_another_machine(browser: Any, site: Path, width: int) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        asked: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": 844})
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}first_alert.html")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("header label[for=__search], header .md-search__button").locator("visible=true").click()
        page.keyboard.type("loss spikes", delay=20)
        page.get_by_text("What forewarn does not see").first.wait_for()
        assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
        context.close()
        server.shutdown()
