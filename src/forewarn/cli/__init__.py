"""The command line: its commands, their help and their exit codes.

Each command lives in its own module and imports what it needs when it runs, so `forewarn --help` is fast.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import click

from forewarn import __version__
from forewarn.cli.terminal import INTERRUPTED, SuggestingGroup

USAGE_ERROR = 64
"""EX_USAGE in sysexits.h; click's default of 2 would look like a critical run."""
DEFECT = 70
"""EX_SOFTWARE in sysexits.h: a bug in forewarn."""
LONGEST_ERROR = 2000
"""Maximum characters in an error: values in a damaged run can be of any length."""

SECTIONS = {
    "See it work": {
        "demo": "forewarn demo",
        "train": "forewarn train lm --max-steps 200 --weight-monitor",
    },
    "Watch a script": {
        "run": "forewarn run train.py --lr 0.001",
    },
    "Judge a run": {
        "check": "forewarn check runs/demo",
        "import": "forewarn import outputs/trainer_state.json",
        "forecast": "forewarn forecast runs/demo --target 1.5",
        "replay": "forewarn replay runs/mine --model train:make_model",
    },
    "Look at runs": {
        "serve": "forewarn serve runs",
        "watch": "forewarn watch runs/demo",
        "show": "forewarn show runs/demo --scope attention --step 180",
        "ls": "forewarn ls runs",
        "compare": "forewarn compare runs/demo runs/demo-saved",
        "report": "forewarn report runs/demo -o report.html",
    },
    "Use a run elsewhere": {
        "export": "forewarn export runs/demo --to csv",
        "mcp": "forewarn mcp runs",
    },
    "Be told": {
        "notify": "forewarn notify --test json://localhost:8000",
    },
    "Understand an alert": {
        "explain": "forewarn explain loss-spike",
        "rules": "forewarn rules",
    },
    "Before a long run": {
        "preflight": "forewarn preflight mymodel:make --total-steps 100000",
        "coordinate-check": "forewarn coordinate-check --parametrization mup",
    },
    "Measure the cost": {
        "bench": "forewarn bench --workload mymodel:make",
    },
    "Test your machine": {
        "selftest": "forewarn selftest --device cuda",
    },
    "Measure the rules": {
        "faults": "forewarn faults --quick",
    },
}
"""Every command with an example, in the order in which a newcomer needs them."""

_NAME_WIDTH = max(len(name) for section in SECTIONS.values() for name in section)

_EXIT_CODES = """\b
Exit codes:
  0    success; for check: the run is healthy; for preflight: ready to train
  1    check or preflight found warnings; replay found a fault; selftest failed
  2    check found critical alerts; preflight: it will not train
  3    a run, config or rule cannot be read
  64   invalid command line
  70   bug in forewarn
  130  interrupted"""


class _Commands(SuggestingGroup):
    """Commands grouped by section. A command's module is imported only when it is needed."""

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

    Then run these commands, during training or afterwards. RUN is the directory you passed to watch().
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    handlers = [stream.errors for stream in streams]
    _set_errors(streams, ["replace"] * len(streams))  # a terminal that cannot show ✓ must not crash the command
    outcome = _run(arguments)
    if callable(outcome):  # a script: its streams and its exceptions are its own
        _set_errors(streams, handlers)
        outcome()
        sys.exit()
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `forewarn ls | head -1`: discard the rest and keep the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(outcome)


def _set_errors(streams: Sequence[io.TextIOWrapper], handlers: Sequence[str | None]) -> None:
    """Set what the streams do with characters that they cannot encode."""
    for stream, errors in zip(streams, handlers, strict=True):
        with contextlib.suppress(OSError, ValueError):
            stream.reconfigure(errors=errors)


def _run(arguments: Sequence[str] | None) -> int | Callable[[], None]:
    """The exit code of a command, or what remains to be called outside of the guard."""
    try:
        code = cli.main(arguments, prog_name="forewarn", standalone_mode=False)
        return code if isinstance(code, int) or callable(code) else 0
    except click.ClickException as error:
        _tell(error)
        return USAGE_ERROR if isinstance(error, click.UsageError) else error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except Exception:
        from forewarn.views.wording import literal

        click.echo("\n".join(map(literal, traceback.format_exc().splitlines())), err=True)
        click.echo("This is a bug in forewarn. Please report it together with the traceback above.", err=True)
        return DEFECT


def _tell(error: click.ClickException) -> None:
    """Print an error to standard error. Control characters from files, runs and arguments are escaped."""
    from forewarn.views.wording import literal

    lines = [error.format_message()]
    if isinstance(error, click.UsageError):
        lines = lines[0].expandtabs().split("\n")  # click lists choices on separate lines
        if error.ctx is not None:
            hint = f"Try '{error.ctx.command_path} {error.ctx.help_option_names[0]}' for help."
            click.echo(f"{error.ctx.get_usage()}\n{hint}\n", err=True)
    text = "\n".join(map(literal, lines))
    half = LONGEST_ERROR // 2
    click.echo(f"Error: {text if len(text) <= LONGEST_ERROR else f'{text[:half]}…{text[-half:]}'}", err=True)
