"""A pole on a cart, many at once: the classic control problem (Barto, Sutton and Anderson 1983)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
EDGE, FALLEN = 2.4, 12 * math.pi / 180


class CartPoles:
    """Carts that are pushed left (0) or right (1). The reward is 1 for every step until one falls or leaves."""

    def __init__(self, num: int, longest: int, seed: int) -> None:
        self.num, self.longest = num, longest
        self._random = np.random.default_rng(seed)
        self._state = np.zeros((num, 4), np.float32)
        self._age = np.zeros(num, np.int64)

    def reset(self, which: Tensor | None = None) -> Tensor:
        """New states for all carts, or for those in a mask; returns the states of all."""
        mask = np.ones(self.num, np.bool_) if which is None else which.numpy()
        self._state[mask] = self._random.uniform(-0.05, 0.05, (self.num, 4))[mask]
        self._age[mask] = 0
        return torch.tensor(self._state)

    def push(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states after these actions, which carts were lost, and which episodes are over."""
        _, speed, angle, turning = self._state.T
        force = np.where(actions.numpy() > 0, FORCE, -FORCE)
        sine, cosine, total, moment = np.sin(angle), np.cos(angle), CART + POLE, POLE * HALF_LENGTH
        pull = (force + moment * turning**2 * sine) / total
        bend = (GRAVITY * sine - cosine * pull) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / total))
        rates = np.stack([speed, pull - moment * bend * cosine / total, turning, bend], 1)
        self._state = (self._state + SECONDS * rates).astype(np.float32)
        self._age += 1
        lost = (np.abs(self._state[:, 0]) > EDGE) | (np.abs(self._state[:, 2]) > FALLEN)
        return torch.tensor(self._state), torch.tensor(lost), torch.tensor(lost | (self._age >= self.longest))
