"""What a run ran on: versions, devices and the commit of the code; never environment variables or arguments."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from forewarn.files import read_regular

_PACKAGES = ("forewarn", "torch", "numpy", "transformers", "accelerate", "lightning", "peft", "triton")
_MOST_BYTES = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def environment() -> dict[str, Any]:
    """The environment as plain values. It starts no process and imports nothing."""
    loaded = ((name, getattr(sys.modules.get(name), "__version__", None)) for name in _PACKAGES)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: str(version) for name, version in loaded if version is not None},
        "cuda": torch.version.cuda,
        "devices": list(_devices()),
        "torch_threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "git_commit": git_commit(Path.cwd()),
    }


def _devices() -> Iterator[str]:
    yield platform.processor() or platform.machine()
    if torch.cuda.is_initialized():
        yield from (torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out around a folder, read from the files of git; None if there is none."""
    for parent in (folder, *folder.parents):
        directory = parent / ".git"
        try:
            if directory.is_file():  # a work tree
                directory = parent / _read(directory).removeprefix("gitdir: ")
            if not directory.is_dir():
                continue
            head = _read(directory / "HEAD")
            if head.startswith("ref: "):
                head = _commit_of(directory, head.removeprefix("ref: "))
            return head if _COMMIT.fullmatch(head) else None
        except (OSError, ValueError):
            return None
    return None


def _commit_of(directory: Path, reference: str) -> str:
    shared = directory / _read(directory / "commondir") if (directory / "commondir").is_file() else directory
    if ".." in Path(reference).parts or Path(reference).is_absolute():
        return ""
    if (shared / reference).is_file():
        return _read(shared / reference)
    packed = (line.partition(" ") for line in _read(shared / "packed-refs").splitlines())
    return next((commit for commit, _, name in packed if name == reference), "")


def _read(path: Path) -> str:
    return read_regular(path, _MOST_BYTES).decode().strip()
