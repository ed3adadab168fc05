"""How quantities of a layer grow with width: power-law exponents and their verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

LEAST_WIDTHS = 3
"""Two points always lie on a line and say nothing about its error."""

STAYS_WITHIN = 0.25
"""The largest exponent that counts as none: theory knows multiples of a half, and this is half-way to the first."""

CLEAR = 2.0
"""Standard errors: a change is clear if its exponent is as far from zero, staying if they fit into the bound."""


class Term(StrEnum):
    """A term of a layer's output after t updates, as the root mean square of its coordinates.

    W_t x_t − W_0 x_0 = (W_t−W_0) x_t + W_0 (x_t−x_0), of which the first is the layer's own doing.
    """

    UPDATE = "(W_t-W_0)x_t"
    PASSED_ON = "W_0(x_t-x_0)"
    INPUT = "x_t"
    INPUT_CHANGE = "(x_t-x_0)"


JUDGED = (Term.UPDATE, Term.PASSED_ON)
"""The terms that are judged; the other two only show where a change comes from."""


class Trend(StrEnum):
    """How a number changes as the model gets wider."""

    GROWS = "grows"
    SHRINKS = "shrinks"
    STAYS = "stays"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Growth:
    """A number that is proportional to width^exponent, with the standard error of the exponent."""

    exponent: float
    error: float

    @property
    def trend(self) -> Trend:
        doubt = math.inf if math.isnan(self.error) else CLEAR * self.error
        if abs(self.exponent) <= STAYS_WITHIN and doubt <= STAYS_WITHIN:
            return Trend.STAYS
        if abs(self.exponent) > max(STAYS_WITHIN, doubt):
            return Trend.GROWS if self.exponent > 0 else Trend.SHRINKS
        return Trend.UNCLEAR

    def __str__(self) -> str:
        return f"{self.exponent:+.2f} ± {self.error:.2f}".replace("-", "−")


def growth(widths: Sequence[int], values: NDArray[np.float64]) -> Growth:
    """Least squares on logarithms, over values [widths × seeds]; not a number if any value is zero or not finite."""
    if len(widths) < LEAST_WIDTHS:
        raise ValueError(f"{len(widths)} widths are too few for an exponent with its error: at least {LEAST_WIDTHS}")
    if not (np.isfinite(values).all() and (values > 0).all()):
        return Growth(math.nan, math.nan)
    x = np.log(np.repeat(np.asarray(widths, np.float64), values.shape[1]))
    y = np.log(values).ravel()
    spread = ((x - x.mean()) ** 2).sum()
    exponent = ((x - x.mean()) * y).sum() / spread
    residual = y - y.mean() - exponent * (x - x.mean())
    return Growth(float(exponent), float(math.sqrt((residual**2).sum() / (len(x) - 2) / spread)))


Growths = Mapping[str, Mapping[Term, Growth]]
"""By layer and term."""


def unstable(growths: Growths) -> dict[str, tuple[Term, Growth]]:
    """The layers that change with width, with the term that changes most.

    Nothing may grow, and no layer may learn less. The part that a layer only passes on may shrink, as it does by design
    for the first weights of a muP head.
    """
    worst: dict[str, tuple[Term, Growth]] = {}
    for layer, terms in growths.items():
        wrong = [
            (term, terms[term])
            for term in JUDGED
            if term in terms
            and (terms[term].trend is Trend.GROWS or (term is Term.UPDATE and terms[term].trend is Trend.SHRINKS))
        ]
        if wrong:
            worst[layer] = max(wrong, key=lambda pair: abs(pair[1].exponent))
    return worst


def unclear(growths: Growths) -> list[str]:
    """Layers without a verdict, because numbers are not finite or scatter too much."""
    return [
        layer
        for layer, terms in growths.items()
        if any(terms[term].trend is Trend.UNCLEAR for term in JUDGED if term in terms)
    ]
