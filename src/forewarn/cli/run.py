"""`forewarn run`: watch a script that knows nothing of forewarn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forewarn.cli.option_groups import POSITIVE, rules_option

if TYPE_CHECKING:
    from forewarn.integrations.script import Ending
    from forewarn.judge.registry import Rule


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--run", "run_path", type=click.Path(path_type=Path), metavar="DIR",
              help="Record in this directory; by default in a new one under runs/.")  # fmt: skip
@click.option("--every", type=POSITIVE, default=100, show_default=True, metavar="N",
              help="Measure every tensor on the first 10 steps, then every N steps.")  # fmt: skip
@click.option("--budget", type=click.FloatRange(0.0, 1.0, min_open=True, max_open=True), metavar="SHARE",
              help="Share of the time that detail may take, such as 0.01; if it takes more, N is raised.")  # fmt: skip
@click.option("--config", "config_path", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="TOML",
              help="Settings of the monitor, such as thresholds.")  # fmt: skip
@rules_option
@click.option("--quiet", is_flag=True, help="Print nothing while the script trains, only the diagnosis at the end.")
@click.option("-m", "is_module", is_flag=True, help="Run a module, as `python -m` does.")
@click.argument("target", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def command(
    run_path: Path | None,
    every: int,
    budget: float | None,
    config_path: Path | None,
    rule_modules: tuple[str, ...],
    quiet: bool,
    is_module: bool,
    target: str,
    arguments: tuple[str, ...],
) -> Callable[[], None]:
    """Watch a training script without changing it.

    SCRIPT runs as with `python SCRIPT ARGS`, with the same results and the same exit code. forewarn finds the models,
    the optimizers and the loss by itself. Alerts and the diagnosis go to standard error. Options of forewarn come
    before SCRIPT; everything after it belongs to the script.

    \b
    Examples:
      forewarn run train.py --lr 0.001
      forewarn run --run runs/exp1 --every 50 train.py
      forewarn run -m package.train --epochs 3
      torchrun --nproc-per-node 2 -m forewarn run train.py

    \b
    Exit codes:
      that of the script; `forewarn check RUN` has one for the verdict
      64 invalid command line
    """
    import time

    from forewarn.cli.terminal import Failure, loaded_rules
    from forewarn.config import Config
    from forewarn.integrations.script import Script, Watched

    if not is_module and not Path(target).is_file():
        raise click.BadParameter(f"there is no script {target!r}", param_hint="SCRIPT")
    own = loaded_rules(rule_modules)
    try:
        config = Config.with_rules(config_path, own)[0]
    except (TypeError, ValueError, OSError) as error:
        raise Failure(f"the config {config_path} is invalid: {error}") from error
    place = run_path or Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S")
    settings: dict[str, Any] = {
        "run": place.absolute(),
        "every": every,
        "budget": budget,
        "config": config,
        "rules": own,
    }
    if quiet:
        settings["views"] = []
    watched = Watched(
        Script(target, arguments, is_module), settings, lambda ending: _conclude(ending, own, rule_modules)
    )
    return watched.run


def _conclude(ending: Ending, own: tuple[Rule, ...], rule_modules: Sequence[str]) -> None:
    """Print the diagnosis of each run, and what could not be watched, to standard error."""
    from forewarn.cli.terminal import from_run, output, show
    from forewarn.cli.verdict import as_summary, as_text
    from forewarn.config import Config
    from forewarn.judge.diagnosis import replay

    console = output(stderr=True)
    as_words = as_text if len(ending.runs) == 1 else as_summary

    def judged(stored: Any) -> Any:
        return as_words(stored, replay(stored, Config.from_stored(stored.config, own).rule_set(own)), rule_modules)

    for path in ending.runs:
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        try:
            show(from_run(shown, judged), console=console)
        except click.ClickException as error:
            click.echo(f"forewarn  {error.format_message()}", err=True)
    for remark in ending.remarks:
        click.echo(f"forewarn  {remark}", err=True)
