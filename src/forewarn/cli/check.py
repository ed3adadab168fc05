"""`forewarn check`: judge a stored run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forewarn.cli.option_groups import rules_option
from forewarn.cli.other_logs import map_option

if TYPE_CHECKING:
    from forewarn.config import Config
    from forewarn.importing import FoundLog
    from forewarn.judge.registry import Rule
    from forewarn.store import Run


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else; see docs/agents.md.")
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), metavar="TOML",
    help="Judge with the settings in this TOML file instead of the run's own.",
)  # fmt: skip
@map_option
@rules_option
@click.pass_context
def command(
    ctx: click.Context,
    run: Path,
    wants_json: bool,
    config_path: Path | None,
    pairs: tuple[str, ...],
    rule_modules: tuple[str, ...],
) -> None:
    """Judge a run: what is wrong, why, and what to do.

    RUN is the directory of a run, finished or still training. Every stored step is judged again by the rules that judge
    a live run.

    RUN may also be the log of another tool, a file or a folder: TensorBoard, W&B, MLflow, Hugging Face, Lightning, CSV,
    JSON lines or console output. Every rule runs whose readings are there.

    \b
    Examples:
      forewarn check runs/demo
      forewarn check runs/demo --json | jq .alerts[0]
      forewarn check runs/demo --config strict.toml
      forewarn check runs/demo --rules my_rules
      forewarn check outputs/trainer_state.json
      forewarn check train.csv --map nll=train/loss

    \b
    Exit codes:
      0  healthy, or only notes
      1  a warning is still open, or a critical alert was resolved
      2  a critical alert is still open
      3  the run or the config cannot be read, or the log has nothing to judge
      64 invalid command line
    """
    from forewarn.cli.other_logs import answers, is_log, logs_at, temporary_run, title
    from forewarn.cli.terminal import Failure, busy, from_run, loaded_rules, print_json, show
    from forewarn.cli.verdict import as_json, as_summary, as_text
    from forewarn.config import Config
    from forewarn.judge.coverage import coverage
    from forewarn.judge.diagnosis import replay
    from forewarn.store import ResumedError
    from forewarn.views.imported_lines import notes_of

    own = loaded_rules(rule_modules)

    def judged(stored: Run, *, is_alone: bool = True) -> int:
        config, rules = _loaded(config_path, stored, own) if config_path else (None, own)
        try:
            with busy(f"Judging {stored.num_steps} steps"):
                settings = config or Config.from_stored(stored.config, rules)
                diagnosis = replay(stored, settings.rule_set(rules))
        except ResumedError:
            raise
        except (TypeError, ValueError) as error:
            raise Failure(f"{run} cannot be judged: {error}") from error
        covered = coverage(stored, settings.rule_set(rules)) if stored.info.imported_from else None
        if covered is not None and covered.num_missing == covered.num_rules and is_alone:
            raise Failure(f"{stored.path} cannot be judged, as no rule has its readings: {'; '.join(notes_of(stored))}")
        if wants_json and is_alone:
            print_json(as_json(stored, diagnosis, covered))
        elif wants_json:
            answered.append(as_json(stored, diagnosis, covered))
        elif is_alone:
            show(as_text(stored, diagnosis, rule_modules, covered))
        else:
            show(as_summary(stored, diagnosis, rule_modules))
        return diagnosis.exit_code

    if not is_log(run):
        ctx.exit(from_run(run, judged))
    given, codes = answers(pairs), []
    answered: list[dict[str, Any]] = []
    logs = logs_at(run)
    for log in logs:

        def of_log(stored: Run, log: FoundLog = log) -> int:
            stored.path = log.path
            return judged(stored, is_alone=len(logs) == 1)

        try:
            with temporary_run(log, given, judge=False) as imported:
                codes.append(from_run(imported.path, of_log))
        except Failure as failure:
            if len(logs) == 1:
                raise
            click.echo(f"{title(log)}: {failure.format_message()}", err=True)
            codes.append(Failure.exit_code)
    if len(logs) > 1 and wants_json:
        print_json(answered)
    ctx.exit(max(codes))


def _loaded(path: Path, run: Run, own: tuple[Rule, ...]) -> tuple[Config, tuple[Rule, ...]]:
    from forewarn.cli.terminal import Failure
    from forewarn.config import Config, read_toml

    try:
        return Config.for_stored(read_toml(path), run.config, own)
    except OSError as error:
        raise Failure(f"the config {path} cannot be read: {error.strerror}") from error
    except (TypeError, ValueError) as error:
        raise Failure(f"the config {path} is invalid: {error}") from error
