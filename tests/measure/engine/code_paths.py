"""The code paths of the native library as parameters of a test; those that cannot run here are skipped, and say why."""

import pytest

from forewarn.measure.engine import native

EVERY_PATH = ("avx512", "avx2", "portable")
_HERE = native.paths() if native.available() else ()
_ELSEWHERE = {"avx512": "; `make test-avx512` runs it in an emulator"}


def over_paths(argument, torch=None, made=lambda path: path):
    """A test for every code path, given what is made of its name, and for torch's operations if they are given."""
    ways = [] if torch is None else [pytest.param(torch, id="torch")]
    for path in EVERY_PATH:
        reason = f"this processor has no {path}{_ELSEWHERE.get(path, '')}" if _HERE else native.why_not()
        ways.append(pytest.param(made(path), id=path, marks=pytest.mark.skipif(path not in _HERE, reason=reason)))
    return pytest.mark.parametrize(argument, ways)
