"""The verdict on the widths of a model, as sentences and table cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forewarn.lab.coordinates.exponents import JUDGED, Growth, Growths, Term, Trend, unclear, unstable
from forewarn.lab.mup import Parametrization

NAMES = {Parametrization.STANDARD: "standard parametrization", Parametrization.MUP: "muP"}

ENOUGH_WIDTHS = 4
"""With fewer widths, the error of the fitted line rests on a point or two and is a guess."""

MEANINGS = {
    Term.UPDATE: "what the layer's own updates add",
    Term.PASSED_ON: "what it passes on from below",
    Term.INPUT: "what it is given",
    Term.INPUT_CHANGE: "by how much that has changed",
}

STYLES = {Trend.GROWS: "bold red", Trend.SHRINKS: "yellow", Trend.STAYS: "green", Trend.UNCLEAR: "dim"}


def verdict_word(growths: Growths) -> str:
    """Whether the parametrization as a whole is width-stable."""
    if unstable(growths):
        return "not width-stable"
    return "unclear" if unclear(growths) else "width-stable"


def verdict_sentence(growths: Growths, widths: Sequence[int]) -> str:
    """The verdict with its reason and its consequence."""
    bad, vague = unstable(growths), unclear(growths)
    span = f"from width {min(widths)} to {max(widths)}"
    if bad:
        layer, (term, growth) = max(bad.items(), key=lambda item: abs(item[1][1].exponent))
        learns_less = term is Term.UPDATE and growth.trend is Trend.SHRINKS
        follows = (
            f"At one learning rate these layers learn less and less {span}."
            if learns_less
            else f"The best learning rate at width {min(widths)} need not be that at {max(widths)}: lower it there."
        )
        return (
            f"{len(bad)} of {len(growths)} layers change with width, {layer} most of all: "
            f"{term} {growth.trend} as width^{growth.exponent:.2f}. {follows}"
        )
    if vague:
        return (
            f"Of {len(vague)} of {len(growths)} layers nothing can be said, such as {vague[0]}: the numbers scatter "
            "too much or are not finite. Try more --seeds, wider --widths or a lower --lr."
        )
    layer, furthest = max(
        ((layer, terms[Term.UPDATE]) for layer, terms in growths.items()), key=lambda pair: abs(pair[1].exponent)
    )
    return (
        f"What the updates of each layer add stays the same {span}; the exponent furthest from 0 is that of {layer}, "
        f"{furthest}. This is what lets a learning rate found at width {min(widths)} serve a wide model."
    )


def caveat(num_widths: int, num_seeds: int) -> str:
    """Why the errors of the exponents are unreliable; empty with enough widths and seeds."""
    few = [f"{num_widths} widths"] * (num_widths < ENOUGH_WIDTHS) + ["one seed"] * (num_seeds == 1)
    if not few:
        return ""
    return (
        f"Judged from {' and '.join(few)}: an exponent may be off by more than its standard error says. "
        "More --widths and --seeds make it firm."
    )


def cells(terms: Mapping[Term, Growth]) -> list[tuple[str, str]]:
    """Exponent and trend of the judged terms, each with its style; empty where a layer has no such term."""
    texts: list[tuple[str, str]] = []
    for term in JUDGED:
        growth = terms.get(term)
        texts += [("", "")] * 2 if growth is None else [(str(growth), ""), (growth.trend, STYLES[growth.trend])]
    return texts
