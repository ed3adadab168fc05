"""Small data sets for the scripts: generated, or taken from the standard library."""

from __future__ import annotations

import functools
import re
from pydoc_data import topics

import torch
from torch import Tensor
from torch.nn import functional

TEMPLATES = 20010
"""Seed of what the classes look like, which is the same in every run."""


@functools.cache
def _templates(num_classes: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(TEMPLATES)
    rough = torch.randn(num_classes, 1, 5, 5, generator=generator)
    return functional.interpolate(rough, (size, size), mode="bicubic").squeeze(1)


def glyphs(num: int, *, size: int = 12, num_classes: int = 10, noise: float = 0.6) -> tuple[Tensor, Tensor]:
    """Gray images [num × 1 × size × size] of ten symbols, each shifted, scaled in contrast and noisy."""
    labels = torch.randint(num_classes, (num,))
    images = _templates(num_classes, size)[labels]
    shifts = torch.randint(-2, 3, (num, 2))
    images = torch.stack(
        [torch.roll(image, (int(dy), int(dx)), (0, 1)) for image, (dy, dx) in zip(images, shifts, strict=True)]
    )
    images = images * (0.6 + 0.8 * torch.rand(num, 1, 1)) + noise * torch.randn(num, size, size)
    return images.unsqueeze(1), labels


def scenes(num: int, *, size: int = 16) -> tuple[Tensor, Tensor]:
    """Gray images of one to three bright discs on a noisy background [num × 1 × size × size], and their masks."""
    rows = torch.arange(size, dtype=torch.float32)
    images = 0.3 * torch.randn(num, size, size)
    masks = torch.zeros(num, size, size)
    for index in range(num):
        for _ in range(int(torch.randint(1, 4, ()))):
            y, x = size * torch.rand(2)
            radius = 1.5 + 2.5 * torch.rand(())
            disc = ((rows[:, None] - y) ** 2 + (rows[None] - x) ** 2 < radius**2).float()
            masks[index] = torch.maximum(masks[index], disc)
            images[index] += (0.5 + torch.rand(())) * disc
    return images.unsqueeze(1), masks.unsqueeze(1)


@functools.cache
def text() -> tuple[Tensor, Tensor, int]:
    """Characters of Python's own help pages as numbers: a training text, a held-out one, and how many symbols."""
    pages = "\n".join(topics.topics[name] for name in sorted(topics.topics))[:120_000].lower()
    pages = re.sub(r"[^a-z0-9 .,()\n'\"_=:-]", " ", pages)
    symbols = sorted(set(pages))
    codes = torch.tensor([symbols.index(symbol) for symbol in pages])
    held_out = len(codes) // 10
    return codes[:-held_out], codes[-held_out:], len(symbols)


def windows(codes: Tensor, num: int, length: int) -> tuple[Tensor, Tensor]:
    """Random windows of a text [num × length], and the same one symbol later."""
    starts = torch.randint(len(codes) - length - 1, (num,))
    chosen = torch.stack([codes[start : start + length + 1] for start in starts.tolist()])
    return chosen[:, :-1], chosen[:, 1:]


def waves(num: int, length: int = 48) -> Tensor:
    """Noisy sums of two sines with a trend [num × length]."""
    time = torch.arange(length) / length
    phases, rates = 6.3 * torch.rand(num, 2, 1), 6.3 * (1 + 4 * torch.rand(num, 2, 1))
    curves = torch.sin(rates * time + phases) * (0.5 + torch.rand(num, 2, 1))
    return curves.sum(1) + torch.randn(num, 1) * time + 0.03 * torch.randn(num, length)


def ellipse(num: int) -> Tensor:
    """Points in the plane around an ellipse."""
    angles = 2 * torch.pi * torch.rand(num)
    return torch.stack([2 * angles.cos(), angles.sin()], 1) + 0.3 * torch.randn(num, 2)


def sliced_distance(points: Tensor, others: Tensor) -> float:
    """Mean Wasserstein distance between two clouds of equally many points over 32 fixed directions."""
    generator = torch.Generator().manual_seed(0)
    directions = functional.normalize(torch.randn(points.shape[1], 32, generator=generator), dim=0)
    gaps = (points @ directions).sort(0).values - (others @ directions).sort(0).values
    return float(gaps.abs().mean())


def community_graph(num_nodes: int = 600, num_classes: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Node features, a normalized adjacency matrix and node classes of a stochastic block model."""
    labels = torch.randint(num_classes, (num_nodes,))
    same = labels[:, None] == labels[None]
    chance = torch.where(same, 0.02, 0.004)
    edges = (torch.rand(num_nodes, num_nodes) < chance).float().triu(1)
    adjacency = edges + edges.T + torch.eye(num_nodes)
    scale = adjacency.sum(1).rsqrt()
    centers = torch.randn(num_classes, 16)
    features = 0.5 * centers[labels] + torch.randn(num_nodes, 16)
    return features, scale[:, None] * adjacency * scale[None], labels
