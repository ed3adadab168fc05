"""What the names and settings of optimizers say about their steps."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.series import Bools, Floats
from forewarn.judge.tensor_kinds import Same
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


def settings_of(scopes: tuple[str, ...], name: str, info: RunInfo) -> Floats:
    """A numeric setting of each parameter's group, as at the start of the run; 0 where there is none."""
    return _settings_of(Same(scopes), name, Same(info))


def of_group(scopes: tuple[str, ...], scope: str, info: RunInfo) -> Bools:
    """Which of these parameters are in the same group of an optimizer as this one."""
    groups = [None if (held := info.parameters.get(name)) is None else held.group for name in (*scopes, scope)]
    return np.array([group == groups[-1] for group in groups[:-1]], bool)


def groups_of(scopes: tuple[str, ...], num_groups: int, info: RunInfo) -> NDArray[np.intp]:
    """The group of each parameter; −1 if it is in none of these."""
    return _groups_of(Same(scopes), num_groups, Same(info))


@lru_cache(maxsize=16)
def _groups_of(scopes: Same[tuple[str, ...]], num_groups: int, info: Same[RunInfo]) -> NDArray[np.intp]:
    groups = (None if (held := info.value.parameters.get(scope)) is None else held.group for scope in scopes.value)
    return np.array([-1 if group is None or group >= num_groups else group for group in groups], np.intp)


@lru_cache(maxsize=16)
def _settings_of(scopes: Same[tuple[str, ...]], name: str, info: Same[RunInfo]) -> Floats:
    declared = [group.get(name, 0.0) for group in info.value.groups]
    parameters = (info.value.parameters.get(scope) for scope in scopes.value)
    groups = (None if parameter is None else parameter.group for parameter in parameters)
    return np.array([declared[group] if group is not None and group < len(declared) else 0.0 for group in groups])
