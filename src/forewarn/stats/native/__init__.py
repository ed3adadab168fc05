"""Statistics of tensors in host memory, by a small library in plain C: one visit, no torch operation, no GIL.

`available` tells whether the library is there, `supports` whether it can read a tensor, and `described` gives many in
the form in which it does; ask for these before anything else.
The numbers are those of `forewarn.stats.portable`. They depend neither on the processor nor on the number of threads.
"""

from forewarn.stats.native.library import available, paths, why_not
from forewarn.stats.native.sampling import gather, gather_diff
from forewarn.stats.native.spread import spread_of
from forewarn.stats.native.statistics import measure, measure_one
from forewarn.stats.native.tensors import Described, Standing, described, supports

__all__ = [
    "Described", "Standing", "available", "described", "gather", "gather_diff", "measure", "measure_one", "paths",
    "spread_of", "supports", "why_not",
]  # fmt: skip
