"""Real runs, a real server for them, and Debian's chromium."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forewarn
from forewarn.views.page.built_page import is_built

HOSTILE = "<img src=x onerror=hacked=1>"
FAULT = 60
"""The step at which the learning rate of the faulty run jumps."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.browser)


def missing(reason: str) -> None:
    """Skip visibly on a developer's machine; a failure in CI, where everything must be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


class Training:
    """A small model whose loop the test drives, step by step."""

    def __init__(self, path: Path, name: str = "middle", depth: int = 1, policy: Any = None) -> None:
        torch.manual_seed(0)
        layers: dict[str, nn.Module] = {"first": nn.Linear(8, 16), "act": nn.Tanh()}
        layers |= {name if depth == 1 else f"{name}{index}": nn.Linear(16, 16) for index in range(depth)}
        self.model = nn.Sequential()
        for key, layer in {**layers, "last": nn.Linear(16, 1)}.items():
            self.model.add_module(key, layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.monitor = forewarn.watch(self.model, self.optimizer, path, every=5, views=[], policy=policy)

    def steps(self, count: int) -> None:
        for _ in range(count):
            inputs = torch.randn(32, 8)
            loss = ((self.model(inputs) - inputs[:, :1]) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.monitor.step(loss)

    def break_it(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5

    def close(self) -> None:
        self.monitor.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: healthy, with a fault, saved by a policy, with a hostile name, and with thousands of series."""
    folder = tmp_path_factory.mktemp("runs")
    for name, fault in (("healthy", None), ("faulty", FAULT)):
        training = Training(folder / name)
        training.steps(fault or 100)
        if fault is not None:
            training.break_it()
            training.steps(60)
        training.close()
    saved = Training(folder / "saved", policy={"update-ratio-jump": "lower_lr", "loss-spike": "roll_back"})
    saved.steps(FAULT)
    saved.break_it()
    saved.steps(60)
    saved.close()
    hostile = Training(folder / "hostile", HOSTILE)
    hostile.steps(40)
    hostile.close()
    many = Training(folder / "many", "layer", depth=100)
    many.steps(12)
    many.close()
    return folder


class Server:
    """`forewarn serve` in a process of its own, which can be killed and started again on the same port."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        command = [sys.executable, "-m", "forewarn", "serve", str(self.root), "--no-browser", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(200):
            try:
                urllib.request.urlopen(self.address, timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None, "the server ended"
                time.sleep(0.1)
        pytest.fail("the server did not answer")

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def server(runs: Path) -> Iterator[Server]:
    if not is_built():
        missing("the page was not built: make page")
    server = Server(runs)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed: make test-browser")
    chromium = shutil.which("chromium")
    if chromium is None:
        missing("chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visitor:
    """Opens pages; what goes wrong in one of them fails the test."""

    def __init__(self, browser: Any, server: Server) -> None:
        self._browser, self.server, self._contexts = browser, server, []
        self.complaints: list[str] = []

    def open(self, link: str, width: int = 1440, height: int = 900, theme: str = "light") -> Any:
        page = self.blank(width, height, theme)
        page.goto(self.server.address + link)
        page.wait_for_selector("main:not(.skeleton)")
        return page

    def blank(self, width: int = 1440, height: int = 900, theme: str = "light") -> Any:
        permissions = ["clipboard-read", "clipboard-write"]
        context = self._browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, permissions=permissions
        )
        self._contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def visit(browser: Any, server: Server) -> Iterator[Visitor]:
    visitor = Visitor(browser, server)
    yield visitor
    visitor.close()
    assert not visitor.complaints
