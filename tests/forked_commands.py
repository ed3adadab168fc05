"""Commands in processes of their own, each forked from one that has imported everything: time and memory are theirs."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

LONGEST_SECONDS = 20.0
"""After this a command is killed: it hangs."""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it took."""

    code: int
    """Negative if a signal ended it."""
    out: str
    err: str
    seconds: float
    """Of CPU time, or on the clock if it was killed because it hung."""
    megabytes: float


class ForkedCommands:
    """Calls `forewarn` with some arguments, each time in a fresh process without torch."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def __call__(self, *arguments: str | Path, environment: dict[str, str] | None = None) -> Ended:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        encoded = [os.fsencode(argument).decode("latin-1") for argument in arguments]
        self._server.stdin.write(json.dumps([encoded, environment or {}]) + "\n")
        self._server.stdin.flush()
        return Ended(**json.loads(self._server.stdout.readline()))


@contextlib.contextmanager
def forked_commands() -> Iterator[ForkedCommands]:
    command = [sys.executable, "-m", "tests.forked_commands"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield ForkedCommands(server)
        assert server.stdin is not None
        server.stdin.close()


def _serve() -> None:
    import forewarn.cli.check
    import forewarn.cli.forecast
    import forewarn.cli.ls
    import forewarn.cli.show
    import forewarn.cli.verdict
    import forewarn.config
    import forewarn.views.console  # noqa: F401  # before the first fork, so that none has to import it

    gc.freeze()  # or collecting garbage would copy all of it in every fork
    for line in sys.stdin:
        arguments, environment = json.loads(line)
        ended = _forked([os.fsdecode(argument.encode("latin-1")) for argument in arguments], environment)
        print(json.dumps(ended), flush=True)


def _forked(arguments: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begun = time.monotonic()
        process = os.fork()
        if process == 0:
            _become(arguments, environment, out, err)
        handle = os.pidfd_open(process)
        hangs = not select.select([handle], [], [], LONGEST_SECONDS)[0]
        os.close(handle)
        if hangs:
            os.kill(process, signal.SIGKILL)
        _, status, usage = os.wait4(process, 0)
        return {
            "code": os.waitstatus_to_exitcode(status),
            "out": _text(out),
            "err": _text(err),
            "seconds": time.monotonic() - begun if hangs else usage.ru_utime + usage.ru_stime,
            "megabytes": usage.ru_maxrss / 1024,
        }


def _become(arguments: Sequence[str], environment: dict[str, str], out: IO[bytes], err: IO[bytes]) -> None:
    from forewarn.cli import main

    os.environ.update(environment)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    code = 99
    try:
        main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "surrogateescape")


if __name__ == "__main__":
    _serve()
