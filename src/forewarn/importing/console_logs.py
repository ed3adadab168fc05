"""What a training script printed: lines with a step and pairs of a name and a number, in any of the usual notations.

Read are `step: 10  loss: 2.1` (torchtitan), `iter 10: loss 2.1, time 12ms` (nanoGPT), `iteration 10/ 500 | lm loss:
2.1E+00` (Megatron-LM), `step 10/100 | loss 2.1 | norm 1.2` (llm.c), `step:10/100 val_loss:2.1` (modded-nanogpt),
`[step=10/100]` with indented `name=number` below it (OLMo), `{'loss': 2.1, 'epoch': 0.1}` (Hugging Face),
`Epoch: [1][10/100]` and `Train Epoch: 1 [640/60000 (1%)]` (PyTorch's examples), `Epoch 1/30, loss: 2.1`, and progress
bars of tqdm with a loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from forewarn.importing.log import Log, lines_of
from forewarn.importing.step_counter import StepCounter

TOOL = "console output"

_MOST_CHARACTERS = 4000
"""Longer lines are no lines for people."""
_MOST_WORDS = 5
"""A name has at most this many words."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
_CLOCK = re.compile(
    r"\d{4}[-/]\d\d[-/]\d\d(?:[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?)?|\b\d+:\d\d:\d\d(?:[.,]\d+)?|\b\d\d:\d\d\b"
)
"""Dates and times, which contain numbers."""
_NUMBER = re.compile(
    r"(?<![\w.@])(?P<number>[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    r"|(?:(?<=[:=])|(?<=[:=]\s)|(?<=[:=]\s\s)|(?<=\s)(?=\S+(?:\s*[,|;)\]}]|\s*$)))[-+]?(?:nan|inf|NaN|Infinity|NAN|INF))"
    r"(?P<unit>\s?(?:ms|s|sec|GiB|GB|MiB|MB|%|[kKMB]\b)(?![\w/]))?(?![\w.]*[A-Za-z_])"
)
_SEPARATOR = re.compile(r"[|,;()\[\]{}\t<>'\"]|\s-\s|\s{2,}")
_IN_PARENTHESES = re.compile(r"\(([^()\d]{1,40})\)")
_UNIT_OF_NAME = re.compile(r"\((ms|s|sec)\)\W*$")
_EDGES = " :=-/#*>@\t'\""
_POSITION = "position in the epoch"
"""The name that stands for the first number in `[10/100]` and in a progress bar."""
_STEPS = (
    "step", "global step", "global_step", "iteration", "iter", "itr", "update", "num_updates", "train step", "batch",
    _POSITION,
)  # fmt: skip
"""Names of steps, best first."""
_COUNTED = re.compile(r"(?<=[A-Za-z])(:?\s*)\[\s*(\d+)(?:\s*/\s*\d+)?\s*\]")
"""`Epoch [3/10]` or `Epoch: [3]`, which is epoch 3."""
_OF_TOTAL = re.compile(r"\[\s*(\d+)\s*/\s*\d+\s*(?:\(\s*[\d.]+%\s*\))?\s*\]")
_BAR = re.compile(r"\d{1,3}%\|[^|]*\|\s*(\d+)/\d+\s*(?=\[)")
"""A progress bar of tqdm up to its times: `Epoch 1:  50%|█████     | 50/100 [00:10<00:10, 5.0it/s, loss=2.1]`."""
_VALIDATION = re.compile(r"^(valid\w*|val|eval\w*|test)\b", re.IGNORECASE)
_FACTORS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}


class _Pair(NamedTuple):
    name: str
    value: float
    unit: str


def read(path: Path, log: Log) -> None:
    """Add the readings of every line that has a step."""
    counter = StepCounter(log)
    step: int | None = None
    num_rows = num_passes = position = 0
    for line in chain.from_iterable(whole.split("\r") for whole in lines_of(path, log)):  # bars go back to the start
        pairs = list(pairs_of(line))
        if not pairs:
            continue
        named = step_of(pairs)
        epoch = next((pair.value for pair in pairs if pair.name.lower().split()[-1] == "epoch"), None)
        has_loss = any("loss" in pair.name.lower() for pair in pairs)
        if named is not None and named.name == _POSITION:
            if not has_loss:
                continue
            num_passes += named.value < position
            position = int(named.value)
            step = counter.step(num_rows, position, num_passes)
        elif named is not None:
            step = counter.step(num_rows, int(named.value), epoch)
        elif epoch is not None and has_loss:
            step = counter.step(num_rows, None, epoch)
            num_rows += 1
        elif step is None or not line[:1].isspace():
            continue
        prefix = "val " if named is not None and _VALIDATION.match(named.name) else ""
        for name, value, unit in pairs:
            if named is None or name != named.name:
                log.add(prefix + name, step, math.nan, value)
                if unit:
                    log.units.setdefault(prefix + name, unit)
    counter.finish()


def step_of(pairs: list[_Pair]) -> _Pair | None:
    """The pair that names the step of a line; None if there is none."""
    whole = [pair for pair in pairs if pair.value >= 0 and pair.value.is_integer()]
    for name in _STEPS:
        for pair in whole:
            words = pair.name.lower()
            if words == name or (words.endswith(f" {name}") and _VALIDATION.match(words)):
                return pair
    return None


def pairs_of(line: str) -> Iterator[_Pair]:
    """The names and numbers of a line."""
    if len(line) > _MOST_CHARACTERS or not any(character.isdigit() for character in line):
        return
    line = _CLOCK.sub("|", _ANSI.sub("", line))
    line = _BAR.sub(_position, line)
    line = _OF_TOTAL.sub(_position, _COUNTED.sub(r"\1 \2|", line))
    end, before = 0, ""
    for match in _NUMBER.finditer(line):
        words = line[end : match.start()]
        name, unit_of_name = _name(words), _UNIT_OF_NAME.search(words)
        end = match.end()
        if not name:
            continue
        if before.startswith("loss ") and name in ("val", "valid", "validation"):
            name = f"loss {name}"
        before = name
        value = float(match["number"].replace(",", ""))
        unit = unit_of_name[1] if unit_of_name else (match["unit"] or "").strip()
        yield _Pair(name, value * _FACTORS.get(unit, 1.0), "" if unit in _FACTORS else unit)


def _position(match: re.Match[str]) -> str:
    return f"|{_POSITION} {match[1]}|"


def _name(words: str) -> str:
    """The name in front of a number: the last piece of the text since the number before; empty if there is none."""
    words = _IN_PARENTHESES.sub(" ", words).rstrip(_EDGES)
    piece = _SEPARATOR.split(words)[-1].strip(_EDGES)
    if not piece or not (piece[0].isalpha() or piece[0] == "_") or len(piece.split()) > _MOST_WORDS:
        return ""
    return piece
