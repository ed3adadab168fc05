"""How training goes on: a line every so many steps, and a progress bar below them where there is a terminal."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from forewarn.metrics import label
from forewarn.types import Action, Alert, Block, FrozenCause, in_words
from forewarn.views.console import plain_console
from forewarn.views.wording import short

_SHOWN = {
    name: label(name).lower().removeprefix("gradient ")
    for name in (
        "train/loss", "train/loss_ema", "train/lr", "gradient/global_norm", "speed/tokens_per_second", "eval/loss"
    )
}  # fmt: skip
_ON_THE_BAR = ("train/loss", "train/loss_ema", "train/lr", "speed/tokens_per_second")


class ProgressView:
    """`epoch 1/2 | step 100/1000 | loss 2.45 | ema 2.42 | lr 3e-4 | norm 0.9 | tok/s 5210`, every `every` steps.

    A validation loss that comes after the line of its step has a line to itself, without the numbers told before.
    Frozen parameters are listed below it, at most `topk` of them, each with its update ratio and the cause.
    """

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        every: int = 100,
        topk: int = 5,
        console: Console | None = None,
    ) -> None:
        self._console = console or plain_console(stderr=True)
        self._total_steps = total_steps
        self._steps_per_epoch = steps_per_epoch
        self._every = every
        self._topk = topk
        self._latest: dict[str, float] = {}
        self._frozen: list[str] = []
        self._told: int | None = None
        """Steps done at the last line; None if there was none."""
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        found = {block.name: block for block in blocks}
        for name in _SHOWN:
            if name in found and len(found[name].values):
                self._latest[name] = float(found[name].values.max())
        if "update/frozen_cause" in found:
            self._frozen = frozen_lines(found["update/frozen_cause"], found["update/ratio"], self._topk)
        done = step + 1
        if self._told is None:
            self._told = step
            if step:
                self._console.print(Text(f"going on from step {step}"))
        if self._console.is_terminal:
            self._advance(done)
        if done == self._told and "eval/loss" in found:
            self._console.print(Text(self.line(done, ["eval/loss"])), soft_wrap=True)
        elif done % self._every == 0 or "eval/loss" in found:
            self._told = done
            for line in (self.line(done), *self._frozen):
                self._console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def line(self, done: int, wanted: Collection[str] = tuple(_SHOWN)) -> str:
        """The state after so many steps."""
        parts = [f"step {_of(done, self._total_steps)}"]
        if each := self._steps_per_epoch:
            epochs = math.ceil(self._total_steps / each) if self._total_steps else None
            parts.insert(0, f"epoch {_of(math.ceil(done / each), epochs)}")
        known = [name for name in _SHOWN if name in self._latest and name in wanted]
        return " | ".join(parts + [f"{_SHOWN[name]} {_number(self._latest[name])}" for name in known])

    def _advance(self, done: int) -> None:
        if self._progress is None:
            columns = (
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._progress = Progress(*columns, console=self._console, transient=True, refresh_per_second=4)
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total_steps)
        words = "  ".join(
            f"{_SHOWN[name]} {_number(self._latest[name])}" for name in _ON_THE_BAR if name in self._latest
        )
        self._progress.update(self._task, completed=done, description=words)


def frozen_lines(causes: Block, ratios: Block, topk: int) -> list[str]:
    """The frozen parameters in words, most frozen first."""
    frozen = [
        (float(ratio) if math.isfinite(ratio) else 0.0, scope, FrozenCause(int(cause)))
        for scope, cause, ratio in zip(causes.scopes, causes.values, ratios.values, strict=True)
        if np.isfinite(cause) and int(cause) not in (FrozenCause.MOVING, FrozenCause.ON_PURPOSE)
    ]
    if not frozen:
        return []
    frozen.sort(key=lambda one: (one[0], one[1]))
    lines = [
        f"  frozen: {short(scope)} (update ratio {in_words(ratio)}): {cause}" for ratio, scope, cause in frozen[:topk]
    ]
    if len(frozen) > topk:
        lines.append(f"  frozen: {len(frozen) - topk} more")
    return lines


def _of(done: int, total: int | None) -> str:
    return f"{done}/{total}" if total else str(done)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
