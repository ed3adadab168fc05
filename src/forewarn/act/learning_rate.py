"""Scales the learning rate, and whatever schedulers would restore the old one from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_SCALED_BY_GROUP = ("lr", "initial_lr", "max_lr", "min_lr")
_SCALED_BY_SCHEDULER = ("base_lrs", "max_lrs", "_last_lr")


def scale_lr(optimizers: Iterable[Any], schedulers: Sequence[Any], factor: float) -> tuple[float, float]:
    """The largest rate before and after. If anything refuses, every rate is as it was before."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    now = max(float(group["lr"]) for group in groups if "lr" in group)
    undo: list[tuple[Any, str, Any]] = []
    try:
        for group in groups:
            for name in _SCALED_BY_GROUP:
                if name in group:
                    undo.append((group, name, group[name]))
                    group[name] = group[name] * factor
        for owner in [part for one in schedulers for part in (one, *getattr(one, "_schedulers", ()))]:
            for name in _SCALED_BY_SCHEDULER:
                if isinstance(rates := getattr(owner, name, None), list):
                    undo.append((owner, name, rates))
                    setattr(owner, name, [rate * factor for rate in rates])
    except BaseException:
        for owner, name, value in undo:
            if isinstance(owner, dict):
                owner[name] = value
            else:
                setattr(owner, name, value)
        raise
    return now, now * factor
