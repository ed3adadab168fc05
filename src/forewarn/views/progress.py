"""Training progress: a line every N steps and, in a terminal, a progress bar."""

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

    A validation loss that arrives after the line of its step gets a separate line. At most `topk` frozen parameters are
    listed below, each with its update ratio and the cause.
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
        self._last_line: int | None = None
        """Number of steps at the last line; None before the first line."""
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        by_name = {block.name: block for block in blocks}
        for name in _SHOWN:
            if name in by_name and len(by_name[name].values):
                self._latest[name] = float(by_name[name].values.max())
        if "update/frozen_cause" in by_name:
            self._frozen = frozen_lines(by_name["update/frozen_cause"], by_name["update/ratio"], self._topk)
        num_steps = step + 1
        if self._last_line is None:
            self._last_line = step
            if step:
                self._console.print(Text(f"resuming at step {step}"))
        if self._console.is_terminal:
            self._advance(num_steps)
        if num_steps == self._last_line and "eval/loss" in by_name:
            self._console.print(Text(self.line(num_steps, ["eval/loss"])), soft_wrap=True)
        elif num_steps % self._every == 0 or "eval/loss" in by_name:
            self._last_line = num_steps
            for line in (self.line(num_steps), *self._frozen):
                self._console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def line(self, num_steps: int, names: Collection[str] = tuple(_SHOWN)) -> str:
        """The state after `num_steps` steps."""
        parts = [f"step {_of(num_steps, self._total_steps)}"]
        if per_epoch := self._steps_per_epoch:
            epochs = math.ceil(self._total_steps / per_epoch) if self._total_steps else None
            parts.insert(0, f"epoch {_of(math.ceil(num_steps / per_epoch), epochs)}")
        shown = [name for name in _SHOWN if name in self._latest and name in names]
        return " | ".join(parts + [f"{_SHOWN[name]} {_number(self._latest[name])}" for name in shown])

    def _advance(self, num_steps: int) -> None:
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
        self._progress.update(self._task, completed=num_steps, description=words)


def frozen_lines(causes: Block, ratios: Block, topk: int) -> list[str]:
    """The frozen parameters in words, most frozen first."""
    frozen = [
        (float(ratio) if math.isfinite(ratio) else 0.0, scope, FrozenCause(int(cause)))
        for scope, cause, ratio in zip(causes.scopes, causes.values, ratios.values, strict=True)
        if np.isfinite(cause) and int(cause) not in (FrozenCause.MOVING, FrozenCause.ON_PURPOSE)
    ]
    if not frozen:
        return []
    frozen.sort(key=lambda parameter: (parameter[0], parameter[1]))
    lines = [
        f"  frozen: {short(scope)} (update ratio {in_words(ratio)}): {cause}" for ratio, scope, cause in frozen[:topk]
    ]
    if len(frozen) > topk:
        lines.append(f"  frozen: {len(frozen) - topk} more")
    return lines


def _of(count: int, total: int | None) -> str:
    return f"{count}/{total}" if total else str(count)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
