"""The command line: its commands, their help and their exit codes.

Each command lives in a module of its own and imports what it needs when it runs, so that
`forewarn --help` answers at once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from forewarn import __version__
from forewarn.cli.terminal import INTERRUPTED, SuggestingGroup

USAGE_ERROR = 64
"""As in sysexits.h; click's own 2 would read as a critical run."""
DEFECT = 70
"""An error of forewarn itself, as in sysexits.h."""
LONGEST_ERROR = 2000
"""Characters; a value in a damaged run can be as long as you like."""

SECTIONS = {
    "See it work": {
        "demo": "forewarn demo",
        "train": "forewarn train lm --max-steps 200 --weight-monitor",
    },
    "Judge a run": {
        "check": "forewarn check runs/demo",
        "show": "forewarn show runs/demo --scope attention --step 180",
        "forecast": "forewarn forecast runs/demo --target 1.5",
        "ls": "forewarn ls runs",
    },
    "Understand an alert": {
        "explain": "forewarn explain loss-spike",
        "rules": "forewarn rules",
    },
    "Before a long run": {
        "coordinate-check": "forewarn coordinate-check --parametrization mup",
    },
    "Measure the cost": {
        "bench": "forewarn bench --workload mymodel:make",
    },
}
"""Every command with an example, in the order in which a newcomer meets them."""

_NAME_WIDTH = max(len(name) for section in SECTIONS.values() for name in section)

_EXIT_CODES = """\b
Exit codes:
  0    done; of check: healthy
  1    check found warnings
  2    check found something critical
  3    a run, a config or a rule that cannot be read
  64   a wrong command line
  70   a defect of forewarn itself
  130  interrupted"""


class _Commands(SuggestingGroup):
    """The commands by section; a module is imported only when its command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for section in SECTIONS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = cmd_name.replace("-", "_")
        command: click.Command = importlib.import_module(f"forewarn.cli.{module}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, examples in SECTIONS.items():
            rows: list[tuple[str, str]] = []
            for name, example in examples.items():
                command = self.get_command(ctx, name)
                summary = command.get_short_help_str(limit=100) if command else ""
                rows += [(name.ljust(_NAME_WIDTH), summary), ("", f"$ {example}")]
            with formatter.section(title):
                formatter.write_dl(rows)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EXIT_CODES,
)
@click.version_option(__version__, prog_name="forewarn", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """forewarn tells you what is going wrong in a training run, why, and what to do about it.

    \b
    In your training loop:
      monitor = forewarn.watch(model, optimizer, run="runs/mine")
      ...
      monitor.step(loss)        # once per optimizer step

    Then, while it trains or afterwards, type the commands below. RUN is the directory given to watch().
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show ✓ must not end the command
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="replace")
    code = _run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `forewarn ls | head -1`: what is left goes nowhere, and the exit code stays
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = cli.main(arguments, prog_name="forewarn", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        _tell(error)
        return USAGE_ERROR if isinstance(error, click.UsageError) else error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except Exception:
        from forewarn.views.wording import literal

        click.echo("\n".join(map(literal, traceback.format_exc().splitlines())), err=True)
        click.echo("This is a defect of forewarn. Please report it with the lines above.", err=True)
        return DEFECT


def _tell(error: click.ClickException) -> None:
    """An error on standard error. What a file, a run or an argument brings into it never commands the terminal."""
    from forewarn.views.wording import literal

    lines = [error.format_message()]
    if isinstance(error, click.UsageError):
        lines = lines[0].expandtabs().split("\n")  # click puts choices in lines of their own
        if error.ctx is not None:
            hint = f"Try '{error.ctx.command_path} {error.ctx.help_option_names[0]}' for help."
            click.echo(f"{error.ctx.get_usage()}\n{hint}\n", err=True)
    text = "\n".join(map(literal, lines))
    half = LONGEST_ERROR // 2
    click.echo(f"Error: {text if len(text) <= LONGEST_ERROR else f'{text[:half]}…{text[-half:]}'}", err=True)
