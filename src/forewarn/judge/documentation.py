"""The pages in `docs/rules`, made from the rules themselves: `python -m forewarn.judge.documentation docs/rules`."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from forewarn.judge import examples
from forewarn.judge.families import Family
from forewarn.judge.history import History
from forewarn.judge.registry import Rule
from forewarn.judge.rules import all_rules, find_rule
from forewarn.types import Block, Finding, ParameterInfo, Remedy, RunInfo, Severity, in_words

_MADE = "<!-- Made by `python -m forewarn.judge.documentation docs/rules`. Edit the rule, not this page. -->"

_SAMPLE_STEP = 100
_SAMPLE_SCOPE = "layer.weight"


def render_rule(rule: Rule) -> str:
    """The page of one rule, in markdown."""
    parts = [f"# {rule.code} {rule.name}", _MADE, _with_examples_as_code(rule.documentation), *_mechanics(rule)]
    return "\n\n".join(parts) + "\n"


def render_index(rules: Sequence[Rule]) -> str:
    """The page that lists all rules and says how to read them."""
    rows = [(rule.code, f"[{rule.name}]({rule.name}.md)", rule.summary) for rule in rules]
    shorthand = inspect.cleandoc(examples.__doc__ or "")
    return "\n\n".join(
        [
            "# Rules",
            _MADE,
            "What is judged about a training run. A rule is named by its code or its name, here, on the command line "
            "(`forewarn explain NAME`) and in `Config(disable=...)`. The first letter of a code is its family: "
            f"{', '.join(f'{family.letter} {family.title}' for family in Family)}.",
            _table(("code", "name", "what is wrong"), rows),
            "## How to read the examples",
            _indented_as_code(shorthand),
        ]
    ) + "\n"  # fmt: skip


def write_docs(folder: str | Path) -> list[Path]:
    """Write every page and delete those of rules that no longer exist; returns what was written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rules = all_rules()
    pages = {folder / f"{rule.name}.md": render_rule(rule) for rule in rules}
    pages[folder / "README.md"] = render_index(rules)
    for stale in set(folder.glob("*.md")) - set(pages):
        stale.unlink()
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return sorted(pages)


def _mechanics(rule: Rule) -> Iterator[str]:
    yield "## How it is judged"
    rows = [
        ("reads", ", ".join(f"`{name}`" for name in rule.reads)),
        ("judged when there is a new", " or ".join(f"`{name}`" for name in rule.when)),
        ("fires", patience(rule)),
        ("resolves after", f"{rule.keep} steps without it"),
    ]
    if rule.explains:
        names = (find_rule(code).name for code in rule.explains)
        rows.append(("explains", ", ".join(f"[{name}]({name}.md)" for name in names)))
    yield _table(("", ""), rows)
    if rule.settings is not None:
        yield "## Thresholds"
        yield f"In the config under `thresholds.{rule.table}`."
        documented = field_docs(rule.settings)
        values = rule.settings().to_dict().items()
        yield _table(
            ("name", "default", ""),
            [(f"`{name}`", in_words(value), documented[name]) for name, value in values],
        )
    yield "## What to do"
    yield (
        "Best first, with the numbers of a sample run: learning rate 1e-3, AdamW, weights in bfloat16, seen at step "
        f"{_SAMPLE_STEP}. Whatever is marked *opt in* the monitor does only if a policy allows it."
    )
    yield "\n".join(_remedy_line(remedy, cause) for remedy, cause in sample_remedies(rule))


def patience(rule: Rule) -> str:
    """How long a rule waits before it fires; a rule without a hold may wait for a window in its settings."""
    if rule.hold > 1:
        return f"after {rule.hold} checks in a row"
    return "as soon as its thresholds are met" if rule.settings else "at once"


def field_docs(settings: type) -> dict[str, str]:
    """The docstring under each field of a settings class, inherited if the class has none for it."""
    docs: dict[str, str] = {}
    for owner in reversed(settings.__mro__[:-1]):
        body = ast.parse(inspect.getsource(owner)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def sample_remedies(rule: Rule) -> list[tuple[Remedy, str]]:
    """The rule's remedies in a sample run, each with its cause; "" for any cause."""
    history = History()
    sample = (
        ("train/lr", "0", 1e-3), ("gradient/global_norm", "", 0.8), ("train/loss", "", 2.0),
        ("task/weight", "type", 1.0), ("task/weight", "pointer", 1.0),
    )  # fmt: skip
    for name, scope, value in sample:
        for step in range(_SAMPLE_STEP + 1):
            history.append([Block(step, 0.0, name, (scope,), np.array([value], np.float32))])
    info = RunInfo(
        parameters={_SAMPLE_SCOPE: ParameterInfo((8, 8), "Linear.weight", "bfloat16", 0, True)},
        groups=({"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999},),
        hyperparameters={"steps": 10_000},
    )
    remedies: list[tuple[Remedy, str]] = []
    for prescription in rule.remedies:
        cause = getattr(prescription, "cause", "")
        evidence = {"cause": cause, "ratio": 5.0, "dominating": "pointer", "starved": "type"}
        finding = Finding(rule.code, _SAMPLE_SCOPE, _SAMPLE_STEP, Severity.WARNING, 5.0, 1.0, evidence)
        remedy = prescription(finding, history, info)
        if remedy is not None:
            remedies.append((remedy, cause))
    return remedies


def _remedy_line(remedy: Remedy, cause: str) -> str:
    safety = {"notify": "", "safe": " *(safe)*", "opt_in": " *(opt in)*"}[remedy.safety]
    condition = f" where the cause is `{cause}`" if cause else ""
    why = f"{remedy.why[:1].upper()}{remedy.why[1:]}."
    return f"1. **{remedy.do}**{safety}{condition}. {why}"


def _with_examples_as_code(documentation: str) -> str:
    how = "[How to read this](README.md#how-to-read-the-examples)."
    return re.sub(
        r"(?:^(?:fires|quiet):.*\n?)+",
        lambda match: f"```\n{match[0].rstrip()}\n```\n\n{how}",
        documentation,
        flags=re.M,
    )


def _indented_as_code(text: str) -> str:
    return re.sub(
        r"(?:^ {4}.*\n?)+", lambda match: f"```\n{inspect.cleandoc(match[0])}\n```\n", text, flags=re.MULTILINE
    ).rstrip()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m forewarn.judge.documentation FOLDER")
    for page in write_docs(sys.argv[1]):
        print(page)
