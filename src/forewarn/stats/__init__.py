"""The tensor-statistics engine: many tensors in, one small device tensor out, no host sync.

The interface is `measure` (on the device) and `summarize` (on the host, after the one transfer). A row of `COLUMNS`
holds sums, so rows of micro-batches or shards add up to the row of the whole.
"""

from forewarn.stats.attention import AttentionSummary, attention_summary
from forewarn.stats.dispatch import backend_of, looked_at, measure
from forewarn.stats.engine import ALL_BLOCKS, COLUMNS, NUM_BINS, Measurement, Numbers, in_order
from forewarn.stats.native import Standing
from forewarn.stats.norms import norms
from forewarn.stats.sampling import UpdateSampler, sample_indices
from forewarn.stats.spread import spread_of
from forewarn.stats.summary import QUANTITIES, summarize

__all__ = [
    "ALL_BLOCKS", "COLUMNS", "NUM_BINS", "QUANTITIES", "AttentionSummary", "Measurement", "Numbers", "Standing",
    "UpdateSampler", "attention_summary", "backend_of", "in_order", "looked_at", "measure", "norms", "sample_indices",
    "spread_of", "summarize",
]  # fmt: skip
