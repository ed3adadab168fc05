"""The comparison as a Markdown page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.named_faults.faults import FAULTS, STEPS
from benchmarks.named_faults.scoring import MEANINGS, Remark, Said, Verdict, mentioned, telling, verdict
from benchmarks.named_faults.tools import TOOLS
from forewarn.lab.bench.measurements import Machine

QUOTE = 240
"""Characters of a quoted remark."""

SNIPPET = """\
import torch
import wandb

import forewarn

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
run = wandb.init(project="beside", mode="offline")
with forewarn.watch(model, optimizer, run="runs/beside") as monitor:
    for batch in torch.randn(20, 32, 4):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
        run.log({"loss": loss.item(), "open alerts": len(monitor.firing)})
run.finish()
"""
"""The command runs it with the real wandb before it writes the page."""


Cell = tuple[str, str, int]
"""A tool, the name of a run, and its seed."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What every tool said about every run."""

    tools: list[str]
    faults: list[str]
    seeds: int
    said: dict[Cell, Said]

    @property
    def twins(self) -> list[str]:
        return list(dict.fromkeys(FAULTS[fault].twin.__name__ for fault in self.faults))

    def remarks(self, tool: str, run: str, seed: int) -> tuple[Remark, ...]:
        return self.said[tool, run, seed].remarks

    def pairs(self, tool: str, fault: str) -> Iterator[tuple[tuple[Remark, ...], tuple[Remark, ...]]]:
        """The remarks about the broken run and about its twin, for each seed."""
        for seed in range(self.seeds):
            names = FAULTS[fault].build.__name__, FAULTS[fault].twin.__name__
            yield self.remarks(tool, names[0], seed), self.remarks(tool, names[1], seed)

    def verdicts(self, tool: str, fault: str) -> list[Verdict]:
        if not TOOLS[tool].judges:
            return ["not its job"]
        return [verdict(FAULTS[fault].pattern, *pair) for pair in self.pairs(tool, fault)]

    def overall(self, tool: str, fault: str) -> Verdict:
        """The verdict of most seeds; of those that tie, the better one."""
        counts = Counter(self.verdicts(tool, fault))
        return max(MEANINGS, key=lambda one: counts[one])

    def as_json(self) -> dict[str, Any]:
        """The verdicts, and all that the tools said."""
        runs = [
            {"tool": tool, "run": run, "seed": seed, **asdict(said)} for (tool, run, seed), said in self.said.items()
        ]
        scores = {
            fault: {"pattern": FAULTS[fault].pattern, **{tool: self.verdicts(tool, fault) for tool in self.tools}}
            for fault in self.faults
        }
        return {"scores": scores, "runs": runs}


def from_json(stored: dict[str, Any]) -> dict[Cell, Said]:
    """The runs of a file that `Comparison.as_json` gave."""
    return {
        (run["tool"], run["run"], run["seed"]): Said(
            tuple(Remark(**remark) for remark in run["remarks"]), run["report"], run["console"]
        )
        for run in stored["runs"]
    }


def table(result: Comparison) -> Iterator[str]:
    """The faults against the tools."""
    yield from _table(
        ("fault", *result.tools),
        [(FAULTS[fault].title, *(_cell(result, tool, fault) for tool in result.tools)) for fault in result.faults],
    )


def _cell(result: Comparison, tool: str, fault: str) -> str:
    verdicts = result.verdicts(tool, fault)
    overall = result.overall(tool, fault)
    words = f"**{overall}**" if overall == "names the cause" else overall
    if overall == "warns, other words":
        words += " ¹" if any(mentioned(FAULTS[fault].pattern, *pair) for pair in result.pairs(tool, fault)) else ""
    agree = verdicts.count(overall)
    return words if agree == len(verdicts) else f"{words} ({agree} of {len(verdicts)})"


def page(command: str, machine: Machine, result: Comparison, beside: str) -> str:
    """Markdown; `beside` is the name of the JSON file with all that the tools said."""
    return "\n".join(_lines(command, machine, result, beside)) + "\n"


def _lines(command: str, machine: Machine, result: Comparison, beside: str) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    yield f"""\
# Compared with other tools

Everyday faults in small training runs, and what each tool says about them. Every tool runs at its defaults, as its
documentation says.

Made by `{command}` on {machine.date}; {versions}.
All that the tools said is in [{beside}]({beside}).

## Which faults does it name?
"""
    yield from table(result)
    yield ""
    yield from (f"- **{word}**: {meaning}" for word, meaning in MEANINGS.items())
    yield f"""
¹ Its longer explanation or its further advice mentions the cause, among others.

Each fault runs under {result.seeds} seeds. A cell shows the verdict of most seeds, and how many agree if not all do.

## How often does it warn about a healthy run?

Every broken run has a healthy twin: the same training without the fault. Several faults share a twin. The twin of the
sigmoid stack has ReLUs and Kaiming initialisation.
"""
    yield from _scores(result)
    yield """
## How it was scored

- Only warnings count: for each tool, what it calls a warning or worse. Information and notices do not.
- Two warnings are of one kind if the same check gave them at the same severity, wherever in the model.
- For each fault, one regular expression decides whether a warning names the cause. It is the same for all tools.
- It is applied to the name of the check, its headline, its summary, its cause and its first advice.

How each tool was used:
"""
    yield from (f"- {tool}: {TOOLS[tool].use}." for tool in result.tools)
    yield from (
        "",
        "## What each tool said",
        "",
        "With the first seed, the warning that names the cause, or else the first.",
    )
    for fault in result.faults:
        yield from _quotes(result, fault)
    yield f"""
## The limits of this comparison

- We chose the faults, and we wrote one of the tools. Other faults would give another table.
- The models are small and train on a CPU. The other tools may do better on large models.
- We changed the setup after the first runs. At 300 steps forewarn, which reads most details on every 100th step,
  was silent about the dead ReLUs and the small learning rate; now all runs have {STEPS}. With 7 hidden layers
  torchmortem did not name the vanishing gradients; now there are 10.
- We wrote the final patterns after reading what the tools say, forewarn included.
- The story of trainscope's Spike Inspector comes from our copy of the rule in its browser script.
- W&B and TensorBoard ran the first fault only. They give no verdict that could be scored.
- `combine_losses` and `end_epoch` are extra calls. Without them forewarn cannot see a starved task or overfitting.
- A pattern cannot read. Check the quotes above, and the JSON file for everything else.
- Each tool is good at something that is not in the table:
"""
    yield from (f"  - {tool}: {TOOLS[tool].strength}." for tool in result.tools)
    yield f"""
## How it fits beside W&B, TensorBoard and MLflow

W&B, TensorBoard and MLflow record runs and show them. forewarn judges a run while it trains. Use them together.

- forewarn has [views](trackers.md) that write readings and alerts into your run of W&B, MLflow, trackio or TensorBoard.
- Your own logging stays as it is:

```python
{SNIPPET}```"""


def _scores(result: Comparison) -> Iterator[str]:
    rows = []
    for tool in result.tools:
        if not TOOLS[tool].judges:
            continue
        counts = Counter(result.overall(tool, fault) for fault in result.faults)
        healthy = [result.remarks(tool, twin, seed) for twin in result.twins for seed in range(result.seeds)]
        kinds = Counter(kind for remarks in healthy for kind in {one.kind for one in remarks})
        warned = sum(bool(remarks) for remarks in healthy)
        often = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(3))
        verdicts = [str(counts[word]) for word in MEANINGS if word != "not its job"]
        rows.append((tool, *verdicts, f"{warned} of {len(healthy)}", often or "none"))
    yield from _table(
        ("tool", "names the cause", "warns, other words", "silent", "healthy runs with a warning", "most often"), rows
    )


def _quotes(result: Comparison, fault: str) -> Iterator[str]:
    yield from ("", f"### {FAULTS[fault].title}", "")
    for tool in result.tools:
        if TOOLS[tool].judges:
            remarks = telling(FAULTS[fault].pattern, *next(result.pairs(tool, fault)))
            words = " and ".join(quoted(remark.text) for remark in remarks)
            yield f"- {tool}: {words or 'nothing that its healthy twin does not get'}"


def quoted(text: str) -> str:
    """One line of at most `QUOTE` characters, as code, so that nothing in it is taken for Markdown."""
    line = " ".join(text.replace("`", "'").split())
    return f"`{line if len(line) <= QUOTE else line[: QUOTE - 1] + '…'}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
