"""Whatever an argument, a config, a file name or a run holds: one sentence, and nothing that commands the terminal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from forewarn.cli import LONGEST_ERROR
from forewarn.config import Config, read_toml
from forewarn.store import RunWriter
from forewarn.types import RunInfo
from tests.cli.conftest import Said, block, falling, write_run

Call = Callable[..., Said]
HOSTILE = "x[red]y[/red]\x1b]0;y\x07\x9b31m\u202e\r\n"


def is_harmless(said: Said) -> bool:
    return all(char.isprintable() or char == "\n" for char in said.out + said.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", HOSTILE],
        ["check", HOSTILE],
        ["show", HOSTILE],
        ["forecast", HOSTILE],
        ["explain", HOSTILE],
        ["rules", "--rules", HOSTILE],
        ["check", "RUN", "--rules", HOSTILE],
        ["check", "RUN", "--config", HOSTILE],
        ["show", "RUN", "--scope", HOSTILE],
        ["show", "RUN", "--metric", HOSTILE],
        ["show", "RUN", "--metric", HOSTILE + "("],
        ["show", "RUN", "--histogram", HOSTILE],
        ["show", "RUN", "--step", HOSTILE],
        ["forecast", "RUN", "--at", HOSTILE],
        ["train", "lm", "--device", HOSTILE],
        ["train", HOSTILE],
        ["bench", "--workload", HOSTILE],
        [HOSTILE],
        ["ls", f"--{HOSTILE}"],
        ["ls", "runs", HOSTILE],
        ["ls", "x" * 5000],
        ["check", "x" * 5000],
        ["explain", "x" * 50_000],
    ],
)
def test_an_argument_never_commands_the_terminal(forewarn: Call, healthy: Path, arguments: list[str]) -> None:
    said = forewarn(*(healthy if argument == "RUN" else argument for argument in arguments))
    assert said.code in (3, 64)
    assert is_harmless(said)
    assert "Traceback" not in said.err
    assert len(said.err) < LONGEST_ERROR + 500
    if said.code == 3:
        assert said.err.startswith("Error: ")
        assert said.err.count("\n") == 1


def test_nothing_in_a_run_commands_the_terminal(forewarn: Call, tmp_path: Path) -> None:
    run = tmp_path / HOSTILE
    info = RunInfo(model=HOSTILE, optimizers=(HOSTILE,), blocks=(HOSTILE,), hyperparameters={HOSTILE: HOSTILE})
    writer = RunWriter(run, info=info, config=Config().to_dict())
    for step, loss in enumerate(falling(50)):
        hostile = block(step, f"my/{HOSTILE}", 1.0, 2.0, scopes=(HOSTILE, "plain"))
        writer.append(step, [block(step, "train/loss", loss), hostile])
    writer.close(HOSTILE)
    for arguments in (["ls", tmp_path], ["check", run], ["show", run], ["forecast", run], ["check", run, "--json"]):
        said = forewarn(*arguments)
        assert said.code in (0, 1), said
        assert is_harmless(said), said


def test_a_directory_name_that_is_not_unicode_is_a_run_like_any_other(forewarn: Call, tmp_path: Path) -> None:
    name = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    write_run(name, falling(30))
    for arguments in (["ls", tmp_path], ["check", name], ["show", name], ["forecast", name]):
        said = forewarn(*arguments)
        assert said.code == 0, said
        assert is_harmless(said), said


CONFIGS: dict[str, bytes] = {
    "deep lists": b"hyperparameters.x = " + b"[" * 5000,
    "closed deep lists": b"hyperparameters.x = " + b"[" * 200 + b"]" * 200,
    "deep tables": b"[hyperparameters" + b".a" * 5000 + b"]\nx = 1",
    "deep keys": b"hyperparameters" + b".a" * 30_000 + b" = 1",
    "deep quoted keys": b"hyperparameters" + b'."a=b,[{"."c"' * 30_000 + b" = 1",
    "deep inline tables": b"hyperparameters = " + b"{a = " * 5000,
    "a long number": b"history_window = " + b"9" * 4000,
    "a longer number": b"history_window = " + b"9" * 5000,
    "a long number among hyperparameters": b"hyperparameters.total_steps = " + b"9" * 4000,
    "NaN": b"early_stopping_min_delta = nan",
    "infinity": b"thresholds.loss_spike.factor = inf",
    "no UTF-8": b"disable = '\xff'",
    "NUL": b"disable = '\0'",
    "an escape sequence": b"disable = ['\x1b]0;y\x07']",
    "an escaped escape sequence": rb'disable = ["\u001b]0;y\u0007"]',
    "an unknown hostile setting": rb'"\u001b[31m" = 1',
    "a table that is a list": b"[[thresholds]]\nx = 1",
    "a table that is a number": b"thresholds = 1",
    "a table of measure that is a number": b"measure = 1",
    "hyperparameters that are a number": b"hyperparameters = 7",
    "a table twice": b"[measure]\n[measure]",
    "a date": b"history_window = 1979-05-27",
    "rules that are missing": b"rules = ['no.such.module']",
    "rules that are numbers": b"rules = [1, 2]",
    "a regular expression that is none": b"measure.modules = '('",
    "2 MB": b"#" * (2 << 20),
    "nothing but a bracket": b"[",
}


def _check(forewarn: Call, run: Path, path: Path) -> None:
    said = forewarn("check", run, "--config", path)
    assert said.code in range(4), said
    assert is_harmless(said)
    assert "Traceback" not in said.err
    if said.code == 3:
        assert said.err.startswith((f"Error: the config {path} ", f"Error: {run} cannot be judged: "))
        assert said.err.count("\n") == 1
        assert "please report" not in said.err


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_cannot_be_used_is_told_in_a_sentence(forewarn: Call, tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", falling(20))
    (tmp_path / "config.toml").write_bytes(CONFIGS[name])
    said = forewarn("check", run, "--config", tmp_path / "config.toml")
    assert said.code == 3, said
    _check(forewarn, run, tmp_path / "config.toml")


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a directory", "missing"])
def test_a_config_that_is_no_file_is_told_in_a_sentence(forewarn: Call, tmp_path: Path, kind: str) -> None:
    run, path = write_run(tmp_path / "run", falling(20)), tmp_path / "config.toml"
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a directory":
        path.mkdir()
    _check(forewarn, run, path)
    assert "cannot be read" in forewarn("check", run, "--config", path).err


def test_flipped_and_cut_configs_are_judged_by_or_told_in_a_sentence(forewarn: Call, tmp_path: Path) -> None:
    whole = (
        b"history_window = 2048\ndisable = ['loss-spike', \"L102\"]\n[measure]\nema_decay = 0.99\n"
        b"[thresholds.dead_units]\n[hyperparameters]\ntotal_steps = 100\nnested = {a = [1, 2.5, true]}\n"
    )
    random = Random(0)
    run = write_run(tmp_path / "run", falling(5))
    for number in range(120):
        content = bytearray(whole)
        for _ in range(random.choice((1, 1, 4))):
            content[random.randrange(len(content))] = random.choice(
                (0, 10, 34, 46, 91, 123, 255, random.randrange(256))
            )
        (tmp_path / "config.toml").write_bytes(
            content[: random.randrange(len(content))] if number % 4 == 0 else content
        )
        _check(forewarn, run, tmp_path / "config.toml")


def test_a_config_may_have_many_dots_where_they_are_not_keys(tmp_path: Path) -> None:
    knots = " ".join(f"{step}:0.{step}" for step in range(300))
    text = f'# {"...." * 100}\nhyperparameters.floats = [{"0.5, " * 300}]\nmeasure.plan.knots = "{knots}"\n'
    (tmp_path / "config.toml").write_text(text)
    assert read_toml(tmp_path / "config.toml")["measure"]["plan"]["knots"] == knots


def test_rules_that_recurse_or_exit_are_told_in_a_sentence(forewarn: Call, tmp_path: Path) -> None:
    for name, code in {"deep": "x = " + "(" * 5000, "exits": "raise SystemExit(7)", "nul": "\0"}.items():
        (tmp_path / f"{name}.py").write_text(code)
        said = forewarn("rules", "--rules", tmp_path / f"{name}.py")
        assert said.code == 3, said
        assert said.err.count("\n") == 1
    os.mkfifo(tmp_path / "fifo.py")
    said = forewarn("rules", "--rules", tmp_path / "fifo.py")
    assert said.code == 3
    shutil.rmtree(tmp_path, ignore_errors=True)
