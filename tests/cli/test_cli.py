"""The command line as a whole: help, exit codes, start-up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import forewarn as package
from forewarn.cli import SECTIONS, main
from tests.cli.conftest import Said

Call = Callable[..., Said]
COMMANDS = [name for section in SECTIONS.values() for name in section]


def test_help_shows_every_command_with_an_example_by_section(forewarn: Call) -> None:
    said = forewarn("--help")
    assert said.code == 0
    for title, examples in SECTIONS.items():
        assert f"{title}:" in said.out
        for example in examples.values():
            assert f"$ {example}" in said.out
    assert said == forewarn()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_examples(forewarn: Call, name: str) -> None:
    said = forewarn(name, "--help")
    assert said.code == 0
    assert f"  forewarn {name}" in said.out


def test_version(forewarn: Call) -> None:
    assert forewarn("--version").out == f"forewarn {package.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["check"], ["check", "a", "b"], ["--bad"], ["demo", "--steps", "x"]]
)
def test_a_wrong_command_line_is_64_because_2_means_critical(forewarn: Call, arguments: list[str]) -> None:
    said = forewarn(*arguments)
    assert said.code == 64
    assert "Usage: forewarn" in said.err


def test_a_defect_is_70_with_its_traceback(forewarn: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forewarn.judge.rules.all_rules", lambda: 1 / 0)
    said = forewarn("rules")
    assert said.code == 70
    assert "ZeroDivisionError" in said.err
    assert "bug in forewarn" in said.err


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("forewarn.judge.rules.all_rules", interrupt)
    with pytest.raises(SystemExit) as end:
        main(["rules"])
    assert end.value.code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_python_m_forewarn_works() -> None:
    command = [sys.executable, "-m", "forewarn", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("forewarn ")


def test_help_needs_neither_torch_nor_numpy_nor_rich() -> None:
    script = """
import sys
from forewarn.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
print(sorted({"torch", "numpy", "rich"} & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("[]\n")


def test_judging_a_run_needs_no_torch(tmp_path: object) -> None:
    script = f"""
import sys
from forewarn.cli import main
for arguments in ("check {tmp_path}", "ls {tmp_path}", "rules", "explain L102", "show {tmp_path}",
                  "compare {tmp_path} {tmp_path}", "report {tmp_path} --json", "serve {tmp_path}/none",
                  "export {tmp_path} --to csv", "mcp {tmp_path}/none"):
    try:
        main(arguments.split())
    except SystemExit:
        pass
import forewarn.judge.diagnosis, forewarn.views.live, forewarn.views.console, forewarn.views.page.report
print("torch" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("chek", "check"), ("forcast", "forecast"), ("expain", "explain"), ("list", "ls"), ("Show", "show"),
     ("coordinate_check", "coordinate-check"), ("train mutitask", "multitask")],
)  # fmt: skip
def test_an_unknown_command_suggests_the_closest(forewarn: Call, typed: str, meant: str) -> None:
    said = forewarn(*typed.split())
    assert said.code == 64
    assert f"; did you mean {meant!r}" in said.err


def test_a_command_that_is_like_no_other_lists_them_all(forewarn: Call) -> None:
    said = forewarn("zzz")
    assert all(name in said.err for name in COMMANDS)


def test_a_misspelled_run_suggests_runs_that_are_there(forewarn: Call, healthy: Path, lost: Path) -> None:
    for typed in (healthy.parent / "heatlhy", healthy.parent.parent / "healthy"):
        for command in ("check", "show", "forecast"):
            said = forewarn(command, typed)
            assert said.code == 3
            assert f"there is no {typed}; did you mean '{healthy}'?" in said.err
