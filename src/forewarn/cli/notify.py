"""`forewarn notify`: whether notifications arrive."""

from __future__ import annotations

import os
from pathlib import Path

import click

FAILED = 1
"""Exit code if a service did not take the message."""


@click.command()
@click.option(
    "--test", "urls", multiple=True, metavar="URL",
    help="Send a sample to this service; may be repeated. By default, to those in FOREWARN_NOTIFY.",
)  # fmt: skip
def command(urls: tuple[str, ...]) -> None:
    """Send a sample alert, to see whether notifications arrive.

    A URL names the service and holds its token or password. These are the forms of a few; there are a hundred more at
    https://appriseit.com/services

    \b
      slack://TOKEN_A/TOKEN_B/TOKEN_C/#channel
      discord://WEBHOOK_ID/WEBHOOK_TOKEN
      mailto://USER:PASSWORD@gmail.com
      msteams://TOKEN_A/TOKEN_B/TOKEN_C
      json://HOST/PATH

    A shell keeps what you type in its history; the environment variable FOREWARN_NOTIFY does not have to be typed.
    The exit code is 1 if a service does not take the message.

    \b
    Examples:
      forewarn notify --test json://localhost:8000
      FOREWARN_NOTIFY="$(cat ~/.forewarn-notify)" forewarn notify
    """
    from rich.text import Text

    from forewarn.cli.terminal import show
    from forewarn.views.notify import deliver, message, services

    urls = urls or tuple(os.environ.get("FOREWARN_NOTIFY", "").split())
    if not urls:
        raise click.UsageError("no service: pass --test URL, or set FOREWARN_NOTIFY to one or more URLs")
    try:
        targets = services(urls)
    except (ValueError, ModuleNotFoundError) as error:
        raise click.UsageError(str(error)) from None
    sample = [
        "✖ step 250  This is a sample: the training loss is NaN or infinite (non-finite-loss)",
        "  loss NaN · last finite loss 2.31",
        "  do     Skip the batch at step 250",
    ]
    failures = deliver(targets, *message(Path("runs/sample"), sample))
    for target in targets:
        sign, words = ("✖", failures[target]) if target in failures else ("✓", "delivered")
        show(Text(f"{sign} {target.name}: {words}"))
    if failures:
        raise SystemExit(FAILED)
