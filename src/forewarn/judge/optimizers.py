"""What the names and settings of optimizers say about their steps."""

from __future__ import annotations

from forewarn.types import RunInfo

_PLAIN = ("SGD", "ASGD", "Rprop", "LBFGS")
"""Optimizers whose step grows with the gradient."""
_DECOUPLED = ("AdamW", "Muon", "Lion", "LAMB", "Sophia")
"""Optimizers that decay the weights apart from the gradient."""


def steps_grow_with_gradients(info: RunInfo) -> bool:
    """Whether a smaller gradient makes a smaller step, as in plain SGD; Adam and its kin divide by its size."""
    return any(name.endswith(_PLAIN) for name in info.optimizers)


def decays_apart(info: RunInfo) -> bool:
    """Whether weight decay is not part of the gradient."""
    return any(kind in name for name in info.optimizers for kind in _DECOUPLED)


def setting_of(scope: str, name: str, info: RunInfo) -> float:
    """A numeric setting of the group of a parameter, as at the start of the run; 0 if it has none."""
    parameter = info.parameters.get(scope)
    group = None if parameter is None else parameter.group
    if group is None or group >= len(info.groups):
        return max((declared.get(name, 0.0) for declared in info.groups), default=0.0) if parameter is None else 0.0
    return info.groups[group].get(name, 0.0)
