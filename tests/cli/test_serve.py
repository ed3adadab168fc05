"""`forewarn serve` in a process of its own, and what it says if something is missing."""

from __future__ import annotations

import builtins
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Said

Call = Callable[..., Said]

SERVE = """
import sys
from pathlib import Path
from forewarn.views.page import built_page
built_page.BUILT = Path(sys.argv[1])
from forewarn.cli import main
main(["serve", *sys.argv[2:], "--no-browser"])
"""


def started(built: Path, *arguments: str | Path) -> tuple[subprocess.Popen[str], str]:
    """The command, and the address that it prints."""
    words = [sys.executable, "-c", SERVE, str(built), *map(str, arguments)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    match = re.search(r"http://\S+", process.stdout.readline())
    assert match is not None
    return process, match[0]


def stopped(process: subprocess.Popen[str]) -> tuple[int, str]:
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    return process.returncode, err


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_it_prints_its_address_takes_the_next_free_port_and_stops_cleanly(root: Path, built: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process, address = started(built, root, "--port", str(port))
        try:
            assert int(re.findall(r":(\d+)/", address)[0]) > port
            assert b'<meta name="token"' in urllib.request.urlopen(address, timeout=20).read()
            listening = urllib.request.urlopen(f"{address}api/events?run=faulty", timeout=20)
            assert listening.readline() == b"event: changed\n"
        finally:
            code, err = stopped(process)
            listening.close()
    assert (code, err) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_beyond_this_machine_the_address_has_the_token(root: Path, built: Path) -> None:
    process, address = started(built, root, "--host", "0.0.0.0", "--port", "0")
    try:
        port, token = re.findall(r":(\d+)/\?token=(\S+)", address)[0]
        assert len(token) >= 32
        local = f"http://127.0.0.1:{port}/api/runs"
        assert urllib.request.urlopen(f"{local}?token={token}", timeout=20).status == 200
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(local, timeout=20)
        refused.value.close()
    finally:
        stopped(process)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_a_token_of_ones_own_is_used_and_not_printed(
    forewarn: Call, root: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREWARN_TOKEN", "correct-horse-battery")
    process, address = started(built, root, "--host", "0.0.0.0", "--port", "0")
    try:
        assert address.endswith("/?token=$FOREWARN_TOKEN")
        (port,) = re.findall(r":(\d+)/", address)
        scrape = urllib.request.Request(
            f"http://127.0.0.1:{port}/metrics", headers={"authorization": "Bearer correct-horse-battery"}
        )
        assert b"forewarn_runs{" in urllib.request.urlopen(scrape, timeout=20).read()
    finally:
        stopped(process)
    monkeypatch.setenv("FOREWARN_TOKEN", "short")
    said = forewarn("serve", root, "--no-browser", "--port", "0")
    assert said.code == 3
    assert "FOREWARN_TOKEN is too short to be safe; use at least 16 characters" in said.err
    assert "short\n" not in said.err


def test_what_is_missing_is_told_in_one_sentence(
    forewarn: Call,
    root: Path,
    built: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = forewarn("serve", root / "nothing", "--no-browser")
    assert (said.code, said.out) == (3, "")
    assert "no such directory" in said.err
    os.remove(built / "page.css")
    said = forewarn("serve", root, "--no-browser")
    assert said.code == 3
    assert "make page" in said.err
    importing = builtins.__import__

    def without_uvicorn(name: str, *rest: Any) -> Any:
        if name == "uvicorn":
            raise ModuleNotFoundError(name)
        return importing(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_uvicorn)
    said = forewarn("serve", root)
    assert "pip install 'forewarn[dashboard]'" in said.err
    assert said.err.count("\n") == 1
