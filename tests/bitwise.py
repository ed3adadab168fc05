"""What two runs must have in common, in a form that compares bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def random_states() -> tuple[Any, ...]:
    """The random states of torch, numpy and Python."""
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), name, keys.tolist(), *rest, random.getstate()


def plain(value: Any) -> Any:
    """Tensors as bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
