"""Percentiles and shape of a tensor from its log2-magnitude histogram."""

from forewarn.measure.engine.distributions.percentiles import percentiles
from forewarn.measure.engine.distributions.shape import LEAST_VALUES, shapes
from forewarn.measure.engine.distributions.whole import Spread, spread_of, whole_tensors

__all__ = ["LEAST_VALUES", "Spread", "percentiles", "shapes", "spread_of", "whole_tensors"]
