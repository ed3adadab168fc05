"""Statistics of tensors in host memory, by a small library in plain C: one visit, no torch operation, no GIL.

Call these first: `available` says whether the library is there, `supports` whether it can read a tensor, and
`described` prepares many tensors for it. The numbers equal those of `forewarn.measure.engine.portable`, on any
processor and with any number of threads.
"""

from forewarn.measure.engine.native.library import available, paths, why_not
from forewarn.measure.engine.native.samples import gather, gather_diff
from forewarn.measure.engine.native.spreads import spread_of
from forewarn.measure.engine.native.tensors import Described, Standing, described, supports
from forewarn.measure.engine.native.visits import RowReader, measure, measure_one

__all__ = [
    "Described", "RowReader", "Standing", "available", "described", "gather", "gather_diff", "measure", "measure_one",
    "paths", "spread_of", "supports", "why_not",
]  # fmt: skip
