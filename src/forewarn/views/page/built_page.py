"""The built files of the page, which `make page` puts beside this module and a wheel brings along."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

BUILT = Path(__file__).parent / "built"
NOT_BUILT = "the page was not built: run `make page` in the checkout; wheels (pip install forewarn) have it built"
FILES = ("index.html", "page.js", "page.css")


def is_built() -> bool:
    return all((BUILT / name).is_file() for name in FILES)


def asset(name: str) -> bytes | None:
    """A file of the page; None if the page was not built."""
    try:
        return _content(name, (BUILT / name).stat().st_mtime_ns)[0]
    except OSError:
        return None


def asset_stamp(name: str) -> str | None:
    """What changes with the content of a file; None if the page was not built."""
    try:
        return _content(name, (BUILT / name).stat().st_mtime_ns)[1]
    except OSError:
        return None


@lru_cache(8)
def _content(name: str, _modified: int) -> tuple[bytes, str]:
    content = (BUILT / name).read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:16]
