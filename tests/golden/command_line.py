"""What the command line prints: help, rules, and what it says of stored runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from forewarn.cli import main
from forewarn.judge.rules import find_rule

HERE = Path(__file__).parent
RUNS = tuple(sorted(path.name.removesuffix(".tar.xz") for path in (HERE / "stored").glob("*.tar.xz")))
"""The stored runs by name."""


def printed(*arguments: str, columns: int = 100) -> str:
    """Standard output of a command at this width, after its exit code."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    out = io.StringIO()
    code: object = 0
    try:
        with contextlib.redirect_stdout(out):
            main(arguments)
    except SystemExit as end:
        code = end.code or 0
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return f"$ forewarn {' '.join(arguments)}  # exit code {code}\n{out.getvalue()}"


def helps() -> dict[str, str]:
    """The help of every command, by the name of its file."""
    whole = printed("--help", columns=80)
    pages = {"help/forewarn.txt": whole}
    for command in re.findall(r"^ +\$ forewarn ([\w-]+)", whole, re.MULTILINE):
        page = printed(command, "--help", columns=80)
        pages[f"help/{command}.txt"] = page
        _, _, below = page.partition("\nCommands:\n")
        for subcommand in re.findall(r"^  ([\w-]+)", below, re.MULTILINE):
            pages[f"help/{command}-{subcommand}.txt"] = printed(command, subcommand, "--help", columns=80)
    return pages


def rules() -> dict[str, str]:
    """The list of rules, and the explanation of each, one file per family."""
    listed = printed("rules", "--json").partition("\n")[2]
    codes = [rule["code"] for rule in json.loads(listed)]
    families = groupby(sorted(codes), key=lambda code: find_rule(code).family.letter)
    explained = {
        f"rules/explain-{family}.txt": "\n".join(printed("explain", code) for code in its) for family, its in families
    }
    return {"rules/rules.txt": printed("rules", columns=160), "rules/rules.json": listed, **explained}


def said_of(run: str, folder: Path) -> dict[str, str]:
    """What the commands say of a stored run, which is unpacked into a folder."""
    with tarfile.open(HERE / "stored" / f"{run}.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    with contextlib.chdir(folder):  # what is printed holds the path as it was given
        return {
            f"stored/{run}/check.json": printed("check", run, "--json").partition("\n")[2],
            f"stored/{run}/check.txt": printed("check", run),
            f"stored/{run}/show.txt": "\n".join(_shown(run)),
        }


def _shown(run: str) -> Iterator[str]:
    yield printed("show", run)
    yield printed("show", run, "--metric", "/", columns=160)
    yield printed("forecast", run)
