"""`forewarn serve`: the live dashboard."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from pathlib import Path

import click

PORT = 7007
TOKEN = "FOREWARN_TOKEN"
"""The variable for a token that stays the same, such as one that Prometheus knows."""
_SHORTEST_TOKEN = 16
_MOST_PORTS = 20
"""Number of ports to try, beginning with the wanted one."""


@click.command()
@click.argument("runs", type=click.Path(path_type=Path), default="runs", required=False)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="Port, or the next one that is free."
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on. Other machines then need the token."
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def command(runs: Path, port: int, host: str, no_browser: bool) -> None:
    """Look at runs in a browser, while they train or afterwards.

    RUNS is a directory of runs, `runs` by default, or a single run. The page follows runs that are still training. Stop
    it with Ctrl-C.

    \b
    Examples:
      forewarn serve
      forewarn serve runs/demo --port 8000

    \b
    From another machine, through SSH:
      ssh -L 7007:localhost:7007 user@server forewarn serve /data/runs --no-browser

    Prometheus finds the runs that train at /metrics. With --host, set FOREWARN_TOKEN to a token that stays the same.
    """
    from forewarn.cli.terminal import Failure
    from forewarn.views.page.built_page import NOT_BUILT, is_built

    try:
        import uvicorn  # noqa: F401

        from forewarn.views.addresses import EVERYWHERE, is_loopback
        from forewarn.views.page.server import app, serve
    except ModuleNotFoundError as error:
        raise Failure("forewarn serve needs starlette and uvicorn: pip install 'forewarn[dashboard]'") from error
    import secrets

    if not os.path.isdir(runs):
        raise Failure(f"no such directory: {runs}; pass the one that holds your runs, or create a run: forewarn demo")
    if not is_built():
        raise Failure(NOT_BUILT)
    token = _own_token() or secrets.token_urlsafe(24)
    listener = _listening(host, port)
    name = socket.gethostname() if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listener.getsockname()[1]}/"
    shown = f"${TOKEN}" if _own_token() else token
    click.echo(f"{runs} at {address}{'' if is_loopback(host) else f'?token={shown}'}\nStop with Ctrl-C.")
    if not no_browser:
        _open(address if is_loopback(host) else f"{address}?token={token}")
    serve(app(runs, token, host), listener)


def _own_token() -> str:
    """The token that the user chose; empty if there is none."""
    from forewarn.cli.terminal import Failure

    token = os.environ.get(TOKEN, "")
    if token and len(token) < _SHORTEST_TOKEN:
        raise Failure(f"{TOKEN} is too short to be safe; use at least {_SHORTEST_TOKEN} characters")
    return token


def _listening(host: str, port: int) -> socket.socket:
    """A socket on this port, or on the next one that is free."""
    from forewarn.cli.terminal import Failure

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, port + (_MOST_PORTS if port else 1)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen()
            return listener
        except OSError as error:
            listener.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise Failure(f"cannot listen on {host}: {error.strerror}") from error
        except OverflowError:
            break
    raise Failure(f"no port from {port} to {port + _MOST_PORTS - 1} is free; choose another with --port")


def _open(address: str) -> None:
    """Open the browser where there is a display."""
    import webbrowser

    has_display = sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if has_display and "SSH_CONNECTION" not in os.environ:
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(address)
