"""What a log2-magnitude histogram says about a tensor: its percentiles, its shape, and how histograms add up.

Only numpy is needed, so stored histograms are read without torch.
"""

from forewarn.distributions.bins import (
    LOWEST_EXPONENT,
    NUM_BINS,
    in_line,
    line_edges,
    merged,
    over_scopes,
    shifted,
    used_bins,
)
from forewarn.distributions.percentiles import PERCENTS, percentiles
from forewarn.distributions.shape import LEAST_VALUES, shapes
from forewarn.distributions.spread import Spread, spread_of, whole_tensors

__all__ = [
    "LEAST_VALUES", "LOWEST_EXPONENT", "NUM_BINS", "PERCENTS", "Spread", "in_line", "line_edges", "merged",
    "over_scopes", "percentiles", "shapes", "shifted", "spread_of", "used_bins", "whole_tensors",
]  # fmt: skip
