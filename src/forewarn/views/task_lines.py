"""A multi-task run: a line per epoch, each task's share of the gradient, alerts, and a final summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from forewarn.judge.gradient_tally import (
    GradientTally,
    balance_in_words,
    detect_exploding_gradients,
    detect_vanishing_gradients,
)
from forewarn.types import Action, Alert, Block, in_words
from forewarn.views.console import News, plain_console, print_lines
from forewarn.views.wording import short

BAR = 24
"""Columns of the bar that shows the shares of two tasks."""

_BALANCE_STYLES = {"balanced": "green", "slightly uneven": "cyan", "uneven": "yellow", "very uneven": "bold yellow"}
_INDENT = " " * 13


class TaskView:
    """Shows a run with several tasks: gradients every `every` epochs, and alerts as they fire."""

    def __init__(self, num_epochs: int, every: int = 10, console: Console | None = None) -> None:
        self._console = console or plain_console()
        self._num_epochs = num_epochs
        self._every = every
        self._news = News()
        self._tally = GradientTally(unit="step")
        self._latest: dict[str, dict[str, float]] = {}
        self._ratios: dict[str, GradientTally] = {}
        """By pair of tasks."""

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        for block in blocks:
            self._latest[block.name] = dict(zip(block.scopes, map(float, block.values), strict=True))
            if block.name == "gradient/global_norm":
                self._tally.add_norm(step, float(block.values[0]))
            elif block.name == "gradient/norm":
                self._tally.add_layers(self._layers())
            elif block.name == "task/ratio":
                for pair, ratio in self._latest[block.name].items():
                    self._ratios.setdefault(pair, GradientTally()).add_ratio(ratio)
        print_lines(self._console, self._news.lines(step, blocks, changed, taken))

    def end_epoch(self, epoch: int, loss: float, held_out: Mapping[str, float]) -> None:
        """Print a line for the completed epoch (counted from 1), and its gradients."""
        width = len(str(self._num_epochs))
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in held_out.items())
        line = Text.assemble(
            (f"epoch {epoch:{width}}/{self._num_epochs}", "bold"),
            f"  loss {loss:8.4f}",
            ("  held out  ", "dim"),
            numbers,
        )
        print_lines(self._console, [line])
        if self._latest and (epoch == 1 or epoch % self._every == 0):
            print_lines(self._console, [*self._gradient_lines(), *self._task_lines()])

    def note(self, words: str, style: str = "") -> None:
        """Print a line of text."""
        print_lines(self._console, [Text(_INDENT + words, style=style)])

    def close(self) -> None:
        """Print the summary of the run."""
        if not self._latest:
            return
        *rows, _ = self._tally.summary().rows()
        balances = [tally.summary(short(pair)).task_balance for pair, tally in self._ratios.items()]
        rows += [("task balance", balance) for balance in balances or ["not enough data"]]
        lines = [Text(), Text("Gradients over the whole run", style="bold")]
        lines += [Text.assemble((f"  {label:18}", "dim"), value) for label, value in rows]
        print_lines(self._console, lines)

    def _layers(self) -> dict[str, float]:
        """The gradient norms of all layers that have a gradient."""
        return {name: norm for name, norm in self._latest.get("gradient/norm", {}).items() if norm == norm}

    def _gradient_lines(self) -> list[Text]:
        norm, layers = self._latest.get("gradient/global_norm", {}), self._layers()
        if not norm or not layers:
            return []
        vanishing, exploding = detect_vanishing_gradients(layers), detect_exploding_gradients(layers)
        words = (
            f"norm {in_words(next(iter(norm.values())))}, layers from {in_words(min(layers.values()))} "
            f"to {in_words(max(layers.values()))}, {len(vanishing)} vanishing, {len(exploding)} exploding"
        )
        return [Text.assemble((f"{_INDENT}gradients  ", "dim"), words)]

    def _task_lines(self) -> list[Text]:
        shares = self._latest.get("task/share", {})
        if len(shares) < 2:
            return []
        line = Text.assemble((f"{_INDENT}tasks      ", "dim"), _shares(shares))
        for pair, tally in self._ratios.items():
            words = balance_in_words(tally.mean_ratio)
            name = f" {short(pair)}" if len(shares) > 2 else ""
            cosine = self._latest.get("task/cosine", {}).get(pair, float("nan"))
            line.append(f"  ratio{name} {in_words(tally.mean_ratio)}, ")
            line.append(words, style=_BALANCE_STYLES[words])
            line.append(f", cosine {cosine:+.2f}")
        weights = self._latest.get("task/weight", {})
        if len(set(weights.values())) > 1:
            line.append(
                "  weights " + ", ".join(f"{short(name)} {in_words(weight)}" for name, weight in weights.items())
            )
        return [line]


def _shares(shares: Mapping[str, float]) -> str:
    """`pointer 46% ━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌ 54% type` for two tasks, a list for more tasks."""
    if len(shares) > 2:
        return ", ".join(f"{short(name)} {share:.0%}" for name, share in shares.items())
    (first, first_share), (second, second_share) = shares.items()
    if first_share != first_share:
        return f"{short(first)}, {short(second)}"
    filled = round(BAR * first_share)
    return f"{short(first)} {first_share:.0%} {'━' * filled}{'╌' * (BAR - filled)} {second_share:.0%} {short(second)}"
