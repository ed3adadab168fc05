"""The tensor-statistics engine: many tensors in, one small device tensor out, no host sync.

The interface is `measure` (on the device) and `summarize` (on the host, after the one transfer). A row of `COLUMNS`
holds sums, so rows of micro-batches or shards add up to the row of the whole.
"""

from forewarn.measure.engine.attention_heads import AttentionSummary, attention_summary
from forewarn.measure.engine.dispatch import backend_of, looked_at, measure, row_of
from forewarn.measure.engine.memory import number_of
from forewarn.measure.engine.native import Standing
from forewarn.measure.engine.norms import norms
from forewarn.measure.engine.sampling import UpdateSampler, sample_indices
from forewarn.measure.engine.spread import spread_of
from forewarn.measure.engine.statistics import ALL_BLOCKS, COLUMNS, NUM_BINS, Measurement, Numbers, Value, in_order
from forewarn.measure.engine.summary import QUANTITIES, summarize

__all__ = [
    "ALL_BLOCKS", "COLUMNS", "NUM_BINS", "QUANTITIES", "AttentionSummary", "Measurement", "Numbers", "Standing",
    "UpdateSampler", "Value", "attention_summary", "backend_of", "in_order", "looked_at", "measure", "norms",
    "number_of", "row_of", "sample_indices", "spread_of", "summarize",
]  # fmt: skip
