"""`forewarn explain`: everything about one rule, or the rules that match a symptom."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from forewarn.cli.option_groups import rules_option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forewarn.judge.registry import Rule
    from forewarn.judge.search import Hit

WIDEST = 100
"""Maximum columns: longer lines of prose are hard to read."""


@click.command()
@click.argument("words", metavar="RULE|WORDS...", nargs=-1, required=True)
@rules_option
def command(words: tuple[str, ...], rule_modules: tuple[str, ...]) -> None:
    """Explain a rule by its name or code, or find the rules and pages about a symptom.

    To write your own rules, see docs/your_own.md.

    \b
    Examples:
      forewarn explain loss-spike
      forewarn explain L102
      forewarn explain nan
      forewarn explain "loss not decreasing"
      forewarn explain my-rule --rules my_rules
    """
    from forewarn.cli.terminal import Failure, loaded_rules
    from forewarn.judge.rules import find_rule
    from forewarn.judge.search import is_misspelled, search

    own = loaded_rules(rule_modules)
    query = " ".join(words)
    try:
        rule = find_rule(query, own)
    except ValueError as error:
        if is_misspelled(query, own):
            raise Failure(str(error)) from error
        if not (hits := search(query, own)):
            hint = "try a symptom, such as 'loss is nan', or list all rules: forewarn rules"
            raise Failure(f"no rule or page matches {query!r}; {hint}") from error
        _show_hits(query, hits)
        return
    _show_rule(rule, own)


def _show_hits(query: str, hits: Sequence[Hit]) -> None:
    """Print one line per hit, and the next command."""
    from rich.text import Text

    from forewarn.cli.terminal import output, show
    from forewarn.views.wording import short

    console = output()
    rules = [hit for hit in hits if hit.code]
    widest = max((len(hit.name) for hit in rules), default=0)
    lines = []
    for hit in hits:
        name = (f"{hit.name:<{widest}}", "bold" if hit.code else "")
        line = Text.assemble((f"{hit.code or 'page'}  ", "dim"), name, f"  {hit.summary}")
        line.truncate(console.width, overflow="ellipsis")
        lines.append(line)
    reading = f"read {hits[0].name} and judge your run: forewarn check RUN"
    next_step = f"forewarn explain {rules[0].name}" if rules else reading
    title = Text(f'No rule is named "{short(query)}". Best matches:\n')
    show(title, *lines, f"\nNext: {next_step}", console=console)


def _show_rule(rule: Rule, own: Sequence[Rule]) -> None:
    from rich.markdown import Markdown
    from rich.text import Text

    from forewarn.cli.terminal import output, show
    from forewarn.views.bars import ASCII_BARS, BARS
    from forewarn.views.example_lines import example_lines

    console = output()
    console.width = min(console.width, WIDEST)
    bars = ASCII_BARS if console.options.ascii_only else BARS
    title = Text(f"{rule.code} {rule.name}", style="bold")
    prose = re.sub(r"^(fires|quiet):.*\n?", "", rule.documentation, flags=re.MULTILINE)
    pictures = example_lines(rule, console.width, bars)
    show(title, Markdown(prose), Text(), *pictures, *_mechanics(rule, own), console=console)


def _mechanics(rule: Rule, own: Sequence[Rule]) -> list[RenderableType]:
    """How the rule works, its thresholds, and what it advises."""
    from rich.table import Table
    from rich.text import Text

    from forewarn.judge.documentation import field_docs, patience, sample_remedies
    from forewarn.judge.rules import find_rule
    from forewarn.judge.symptoms import guides_of
    from forewarn.types import in_words
    from forewarn.views.wording import advice

    info, thresholds, remedies = (Table.grid(padding=(0, 2, 0, 0)) for _ in range(3))
    info.add_row("reads", ", ".join(rule.reads))
    info.add_row("fires", patience(rule))
    info.add_row("resolves", f"after {rule.keep} steps without the problem")
    if rule.explains:
        info.add_row("explains", ", ".join(find_rule(code, own).name for code in rule.explains))
    if guides := guides_of(rule.name):
        info.add_row("guide", ", ".join(symptom.path for symptom in guides))
    for rank, (remedy, _) in enumerate(sample_remedies(rule), 1):
        remedies.add_row(f"{rank}.", advice(remedy))
    parts: list[RenderableType] = [Text(), info, Text("\nWhat to do, with numbers from a sample run"), remedies]
    if rule.settings is not None:
        documented = field_docs(rule.settings)
        for name, value in rule.settings().to_dict().items():
            thresholds.add_row(Text(name, style="bold"), in_words(value), documented.get(name, ""))
        table = f"[thresholds.{rule.table}]"
        parts += [Text.assemble("\nThresholds, set in a config under ", (table, "bold")), thresholds]
    return parts
