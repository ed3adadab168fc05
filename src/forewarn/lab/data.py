"""Data that needs no download: text that is already on this machine, and generated classification tasks.

Each function uses its own random generator, never the global one, so that building a dataset does not change a
training run. The same arguments give the same data.
"""

import math
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

IMAGE_SIZE = 16
"""Height and width of the generated images, in pixels."""

_NOT_LIBRARY_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages"}

# How hard the generated tasks are: a small network learns each within about fifty steps, a linear model none of them
# well, and the noise keeps the loss on unseen samples above zero.
_CLUSTERS_PER_CLASS = 4
_NUM_INFORMATIVE = 4  # directions in which the clusters lie apart; along all others there is only noise
_CENTER_STD = 3.0  # how far apart, where the noise around each center is 1
_STRIPE_WIDTH = 6.0  # pixels from one stripe to the next
_IMAGE_NOISE = 2.0  # where the stripes go from -1 to 1
_SEQUENCE_NOISE = 0.6  # where the circle has radius 1
_BURST_NOISE = 0.4  # where a burst goes from 0.5 to 2


def stdlib_text(max_bytes: int = 2_000_000) -> Tensor:
    """Source text of Python's standard library as bytes, in a fixed order: real text on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in _source_files(root):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(
            f"no Python source in {root}: this Python ships without it, use read_text(path) instead"
        )
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _NOT_LIBRARY_SOURCE)  # os.walk visits the rest in this order
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
        yield from filter(Path.is_file, paths)  # some distributions link to files that they do not install


def read_text(path: str | os.PathLike[str]) -> Tensor:
    """The bytes of one text file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: give the path of a text file")
    text = bytearray(path.read_bytes())
    if not text:
        raise ValueError(f"the file {path} is empty: give a file that holds text to train on")
    return torch.frombuffer(text, dtype=torch.uint8)


def wikitext() -> Tensor:
    """The bytes of WikiText-2's training text, through the `datasets` package, which downloads it where it can."""
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ValueError("the dataset wikitext needs the package datasets: pip install datasets") from error
    try:
        lines = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="train")["text"]
    except Exception as error:  # the hub, the network and the cache raise many kinds
        raise ValueError(f"the dataset wikitext could not be loaded ({type(error).__name__}: {error})") from error
    return torch.frombuffer(bytearray("".join(lines).encode()), dtype=torch.uint8)


def split(tokens: Tensor, validation_share: float = 0.1) -> tuple[Tensor, Tensor]:
    """The part to train on and, from the end, the part to validate on; for samples and labels too."""
    if not 0 < validation_share < 1:
        raise ValueError(f"validation_share is {validation_share}, expected a share between 0 and 1")
    num_training = len(tokens) - math.ceil(len(tokens) * validation_share)
    return tokens[:num_training], tokens[num_training:]


class TokenBatches:
    """Endless batches of `(inputs, targets)` at random places of a text; targets are the inputs one token later.

    Continues after `load_state_dict` with exactly the batches that would have come next. Under data parallelism each
    rank takes its own seed.
    """

    def __init__(self, tokens: Tensor, batch_size: int, context: int, seed: int = 0) -> None:
        if len(tokens) <= context:
            raise ValueError(f"{len(tokens)} tokens are too few for a context of {context}: at least {context + 1}")
        self._tokens = tokens
        self.batch_size = batch_size
        self._window = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        num_places = len(self._tokens) - len(self._window) + 1
        starts = torch.randint(num_places, (self.batch_size, 1), generator=self._generator)
        windows = self._tokens[starts + self._window].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


def classification(num_samples: int, num_features: int, num_classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Feature vectors `[num_samples, num_features]` and labels: Gaussian clusters, four for each class.

    Only a few directions tell the clusters apart, and a random rotation spreads these over all features.
    """
    generator = torch.Generator().manual_seed(seed)
    num_informative = min(_NUM_INFORMATIVE, num_features)
    centers = torch.zeros(num_classes * _CLUSTERS_PER_CLASS, num_features)
    centers[:, :num_informative] = _CENTER_STD * torch.randn(len(centers), num_informative, generator=generator)
    rotation, _ = torch.linalg.qr(torch.randn(num_features, num_features, generator=generator))

    clusters = _balanced(num_samples, len(centers), generator)
    noise = torch.randn(num_samples, num_features, generator=generator)
    return (centers[clusters] + noise) @ rotation, clusters % num_classes


def images(num_samples: int, num_classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images `[num_samples, 1, 16, 16]` and labels: noisy stripes, each class in its own direction.

    The stripes are shifted at random, so no single pixel reveals the class.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = _balanced(num_samples, num_classes, generator)
    direction = (labels * math.pi / num_classes).view(-1, 1, 1, 1)
    shift = _random_angles(num_samples, generator).view(-1, 1, 1, 1)
    pixels = torch.arange(IMAGE_SIZE)
    position = pixels * direction.cos() + pixels.view(-1, 1) * direction.sin()
    stripes = torch.sin(position * 2 * math.pi / _STRIPE_WIDTH + shift)
    return stripes + _IMAGE_NOISE * torch.randn(stripes.shape, generator=generator), labels


def sequences(num_samples: int, length: int, num_classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sequences `[num_samples, length, 2]` and labels: a noisy point on a circle, each class at its own speed.

    The point starts anywhere, so no single step reveals the class.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = _balanced(num_samples, num_classes, generator)
    speed = (labels.view(-1, 1) + 1) * math.pi / (num_classes + 1)
    angle = _random_angles(num_samples, generator).view(-1, 1) + speed * torch.arange(length)
    points = torch.stack([angle.cos(), angle.sin()], dim=-1)
    return points + _SEQUENCE_NOISE * torch.randn(points.shape, generator=generator), labels


class Bursts(NamedTuple):
    """Sequences `[num_samples, length, 1]`, the type of the burst in each, and the steps of its start and its end."""

    sequences: Tensor
    types: Tensor
    starts: Tensor
    ends: Tensor


BURST_TYPES = ("rise", "fall", "zigzag")


def bursts(num_samples: int, length: int, seed: int = 0) -> Bursts:
    """Noise around zero with one burst in it that rises, falls or zigzags: what it is, and where, are two tasks.

    All three types have the same mean, so the position of a burst does not reveal its type.
    """
    generator = torch.Generator().manual_seed(seed)
    types = _balanced(num_samples, len(BURST_TYPES), generator)
    duration = torch.randint(length // 4, length // 2 + 1, (num_samples,), generator=generator)
    starts = (torch.rand(num_samples, generator=generator) * (length - duration + 1)).long()
    ends = starts + duration - 1
    since = torch.arange(length) - starts.view(-1, 1)
    inside = (since >= 0) & (since < duration.view(-1, 1))
    slope = since / (duration.view(-1, 1) - 1) - 0.5
    shapes = torch.stack([slope, -slope, 0.5 - since % 2], dim=1)
    level = 1.25 + 1.5 * shapes[torch.arange(num_samples), types]
    values = level.where(inside, 0.0) + _BURST_NOISE * torch.randn(num_samples, length, generator=generator)
    return Bursts(values.unsqueeze(-1), types, starts, ends)


def _balanced(num_samples: int, num_groups: int, generator: torch.Generator) -> Tensor:
    """The group of each sample, in random order, with groups of equal size."""
    return torch.randperm(num_samples, generator=generator) % num_groups


def _random_angles(num_samples: int, generator: torch.Generator) -> Tensor:
    return 2 * math.pi * torch.rand(num_samples, generator=generator)
