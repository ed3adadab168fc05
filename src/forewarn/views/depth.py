"""Gradient norms over the depth of the model as one line of block characters."""

from __future__ import annotations

from collections.abc import Sequence

from forewarn.judge.families import Family
from forewarn.judge.rules import family_of
from forewarn.types import Alert, AlertState, Block, in_words
from forewarn.views.bars import line
from forewarn.views.wording import short

_FEWEST_BLOCKS = 3
_WIDEST = 24
"""Maximum characters; a deeper model shows evenly spaced blocks, including the first and the last."""


def depth_profile(blocks: Sequence[Block], changed: Sequence[Alert]) -> str | None:
    """Gradient norms from the first block to the last on a log scale, if an alert about gradients fires."""
    firing = [alert for alert in changed if alert.state is AlertState.FIRING]
    about_gradients = any(family_of(alert.code) is Family.GRADIENTS for alert in firing)
    norms = next((block for block in blocks if block.name == "gradient/block_norm"), None)
    if not about_gradients or norms is None:
        return None
    pairs = [(scope, float(value)) for scope, value in zip(norms.scopes, norms.values, strict=True) if value == value]
    if len(pairs) < _FEWEST_BLOCKS:
        return None
    bars = line([value for _, value in pairs], _WIDEST, logarithmic=True)
    first, last = (f"{in_words(value)} in {_layer(scope)}" for scope, value in (pairs[0], pairs[-1]))
    return f"gradient by depth: {first} {bars} {last}"


def _layer(scope: str) -> str:
    return f"layer {scope}" if scope.isdigit() else short(scope)
