"""`forewarn explain`: everything about one rule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from forewarn.cli.option_groups import rules_option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forewarn.judge.registry import Rule


@click.command()
@click.argument("rule", metavar="CODE|NAME")
@rules_option
def command(rule: str, rule_modules: tuple[str, ...]) -> None:
    """Explain a rule: what it sees, why it matters, its thresholds.

    docs/your_own.md shows how to write rules of your own.

    \b
    Examples:
      forewarn explain loss-spike
      forewarn explain L102
      forewarn explain my-rule --rules my_rules
    """
    from rich.markdown import Markdown
    from rich.text import Text

    from forewarn.cli.terminal import Failure, loaded_rules, output, show
    from forewarn.judge.rules import find_rule

    own = loaded_rules(rule_modules)
    try:
        subject = find_rule(rule, own)
    except ValueError as error:
        raise Failure(str(error)) from error
    console = output()
    console.width = min(console.width, 100)  # prose is read in lines of this length
    title = Text(f"{subject.code} {subject.name}", style="bold")
    show(title, Markdown(_with_examples_as_code(subject.documentation)), *_mechanics(subject, own), console=console)


def _with_examples_as_code(documentation: str) -> str:
    """The docstring with its example series set as code, and how to read them below."""
    from forewarn.judge.examples import SHORTHAND

    in_code = re.sub(r"^(?=(fires|quiet):)", "    ", documentation, flags=re.MULTILINE)
    return re.sub(r"((?:^    (?:fires|quiet):.*\n?)+)", rf"\1\n{SHORTHAND}\n", in_code, flags=re.MULTILINE)


def _mechanics(rule: Rule, own: Sequence[Rule]) -> list[RenderableType]:
    """How the rule is judged, its thresholds, and what it advises."""
    from rich.table import Table
    from rich.text import Text

    from forewarn.judge.documentation import field_docs, patience, sample_remedies
    from forewarn.judge.rules import find_rule
    from forewarn.types import in_words
    from forewarn.views.wording import advice

    info, thresholds, remedies = (Table.grid(padding=(0, 2, 0, 0)) for _ in range(3))
    info.add_row("reads", ", ".join(rule.reads))
    info.add_row("fires", patience(rule))
    info.add_row("resolves", f"after {rule.keep} steps without it")
    if rule.explains:
        info.add_row("explains", ", ".join(find_rule(code, own).name for code in rule.explains))
    for rank, (remedy, _) in enumerate(sample_remedies(rule), 1):
        remedies.add_row(f"{rank}.", advice(remedy))
    parts: list[RenderableType] = [Text(), info, Text("\nWhat to do, in the numbers of a sample run"), remedies]
    if rule.settings is not None:
        documented = field_docs(rule.settings)
        for name, value in rule.settings().to_dict().items():
            thresholds.add_row(Text(name, style="bold"), in_words(value), documented.get(name, ""))
        table = f"[thresholds.{rule.table}]"
        parts += [Text.assemble("\nThresholds, to set in a config under ", (table, "bold")), thresholds]
    return parts
