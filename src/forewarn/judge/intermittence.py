"""Tensors that are used now and then, such as an expert without tokens: how long is too long without a gradient."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from forewarn.judge.series import Bools, Floats

_CHANCE = 1e-6
"""Probability below which a gap is no chance."""

_LONGEST_GAP = 50
"""Checks after which any gap is too long; a history remembers 64."""

_NUMBER = re.compile(r"\d+")


def idle_too_long(idle: Bools, scopes: tuple[str, ...]) -> Bools:
    """Which tensors are idle now for longer than chance explains, from all checks so far: [checks × tensors].

    A tensor that went back to work earlier is used now and then. The share of checks in which it was idle tells how
    long it may be. Tensors whose names differ only in numbers are taken for siblings: the idlest one sets the limit for
    all. Where nothing is known to go back to work, every gap is too long.
    """
    if not len(idle) or not idle[-1].any():
        return np.zeros(len(scopes), bool)
    gaps = np.where(idle.all(axis=0), len(idle), np.argmin(idle[::-1], axis=0))
    working_until = len(idle) - gaps
    rests = idle.sum(axis=0) - gaps
    shares = np.where(rests > 0, (rests + 1) / (working_until + 2), 0.0)
    families = _families(scopes)
    highest: Floats = np.zeros(int(families.max()) + 1)
    np.maximum.at(highest, families, shares)
    with np.errstate(divide="ignore"):
        limits = np.minimum(math.log(_CHANCE) / np.log(highest), _LONGEST_GAP)
    too_long: Bools = idle[-1] & (gaps >= limits[families])
    return too_long


@lru_cache(8)
def _families(scopes: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """A number for each tensor, the same for siblings."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(_NUMBER.sub("", scope), len(numbers)) for scope in scopes], np.intp)
