"""The gradient over the depth of the model in one line of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forewarn.types import Alert, Block, State, in_words
from forewarn.views.wording import short

_BARS = "▁▂▃▄▅▆▇█"
_NO_READING = "·"
_WIDEST = 64
"""Characters of the line; a deeper model shows blocks at even distances, the first and the last among them."""


def depth_profile(blocks: Sequence[Block], changed: Sequence[Alert]) -> str | None:
    """Gradient norms from the first block to the last, by order of magnitude, beside an alert about gradients."""
    about_gradients = any(alert.code.startswith("G") and alert.state is State.FIRING for alert in changed)
    norms = next((block for block in blocks if block.name == "gradient/block_norm"), None)
    if not about_gradients or norms is None:
        return None
    known = [(scope, float(value)) for scope, value in zip(norms.scopes, norms.values, strict=True) if value == value]
    if len(known) < 2:
        return None
    shown = (
        known
        if len(known) <= _WIDEST
        else [known[round(at * (len(known) - 1) / (_WIDEST - 1))] for at in range(_WIDEST)]
    )
    values = [value for _, value in shown]
    ends = [f"{short(scope)} {in_words(value)}" for scope, value in (known[0], known[-1])]
    return f"gradient by depth: {ends[0]} {bars(values)} {ends[1]}"


def bars(values: Sequence[float]) -> str:
    """One character per value, its height the order of magnitude between the least and the greatest above zero."""
    logs = [math.log(value) if 0 < value < math.inf else None for value in values]
    known = [each for each in logs if each is not None]
    if not known:
        return _NO_READING * len(values)
    low, span = min(known), max(max(known) - min(known), 1.0)
    return "".join(
        _NO_READING if each is None else _BARS[round((each - low) / span * (len(_BARS) - 1))] for each in logs
    )
