"""`forewarn preflight`: a checklist before a long run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from forewarn.cli.option_groups import POSITIVE

if TYPE_CHECKING:
    from forewarn.preflight_checks.result import Preflight

PARTS = ("model", "optimizer", "data", "loss")
KEYS = frozenset({*PARTS, "scaler", "scheduler"})


@click.command()
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option("--steps", type=POSITIVE, default=100, show_default=True, metavar="N",
              help="Steps of each trial.")  # fmt: skip
@click.option("--total-steps", type=POSITIVE, metavar="N", help="Length of the run, to estimate its time.")
@click.option("--clip", type=click.FloatRange(min=0, min_open=True), metavar="NORM",
              help="Norm to which your loop clips gradients.")  # fmt: skip
@click.option("--accumulate", type=POSITIVE, default=1, show_default=True, metavar="N",
              help="Batches per optimizer step.")  # fmt: skip
@click.option("--no-lr", is_flag=True, help="Do not sweep learning rates.")
@click.option("--json", "wants_json", is_flag=True, help="Print the result as JSON, and nothing else.")
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    steps: int,
    total_steps: int | None,
    clip: float | None,
    accumulate: int,
    no_lr: bool,
    wants_json: bool,
) -> None:
    """Check a model, its optimizer and its data before a long run.

    It trains a copy for a few steps and prints a checklist: parameters, gradients, activations, data, labels, the
    first loss, one batch learned by heart, the learning rate, memory and time.

    \b
    Write a FUNCTION that returns (model, optimizer, data) or, if the loss is not
    the model's own output or a cross-entropy, (model, optimizer, data, loss):
      data  a loader, a list of batches, one batch, or a function that makes them
      loss  a function of (model, batch), or a criterion such as nn.MSELoss()
    It can also return a dict with these names as keys, and with "scaler" and
    "scheduler" if you use them.

    \b
    Examples:
      forewarn preflight mymodel:make
      forewarn preflight mymodel:make --total-steps 100000
      forewarn preflight mymodel:make --no-lr --json

    \b
    Exit codes:
      0  ready to train
      1  something to look at
      2  it will not train
      3  it could not be checked
      64 invalid command line
    """
    from forewarn.cli.terminal import Failure, print_json, show

    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise Failure("forewarn preflight trains a model and needs torch: pip install 'forewarn[torch]'") from error
    from forewarn.preflight_checks.screen import as_text

    if ":" not in target:
        raise click.BadParameter(f"{target!r} is not of the form module:function", param_hint="MODULE:FUNCTION")
    result = _checked(target, steps=steps, clip=clip, accumulate=accumulate, total_steps=total_steps, find_lr=not no_lr)
    if wants_json:
        print_json(result.to_json())
    else:
        show(as_text(result))
    ctx.exit(result.exit_code)


def _checked(target: str, steps: int, find_lr: bool, **options: Any) -> Preflight:
    from forewarn.cli.terminal import Failure, progress
    from forewarn.lab.bench.workloads import named_function
    from forewarn.preflight_checks.inspection import NUM_BATCHES, WATCHED_STEPS, preflight

    try:
        returned = named_function(target, "the function")()
        parts = _parts_of(target, returned)
        parts.pop("scheduler", None)  # `returned` keeps it alive, so that it is found
        if isinstance(parts["data"], Iterator):  # made for this check alone
            parts["data"] = list(itertools.islice(parts["data"], NUM_BATCHES))
        with progress(WATCHED_STEPS + steps + steps * find_lr) as tell:
            return preflight(**parts, steps=steps, find_lr=find_lr, tell=tell, **options)
    except Failure:
        raise
    except Exception as error:
        words = str(error) if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {error}"
        raise Failure(f"{target} cannot be checked: {words}") from error


def _parts_of(target: str, returned: Any) -> dict[str, Any]:
    """The parts that the user's function returned, by name."""
    if isinstance(returned, tuple) and 3 <= len(returned) <= len(PARTS):
        return dict(zip(PARTS, returned, strict=False))
    if isinstance(returned, Mapping) and set(PARTS[:3]) <= set(returned) <= KEYS:
        return dict(returned)
    kind = f"a dict with the keys {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else None
    raise ValueError(
        f"{target} returned {kind or f'a {type(returned).__name__}'}; expected (model, optimizer, data) or "
        "(model, optimizer, data, loss), or a dict with these keys"
    )
