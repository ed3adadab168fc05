import json

import pytest
from click.testing import CliRunner

from forewarn.cli import cli
from forewarn.cli.terminal import PLAIN_WIDTH, print_json


@pytest.mark.parametrize("columns", ["0", "²", "wide", ""])
def test_columns_that_are_no_width_are_left_aside(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    result = CliRunner().invoke(cli, ["rules"])
    assert result.exit_code == 0
    assert 80 < max(map(len, result.output.splitlines())) <= PLAIN_WIDTH


def test_readings_are_short_and_whole_numbers_whole(capsys):
    values = {"lr": 0.0010000000474974513, "bytes": 2147483648.0, "many": 2.0**40, "nan": float("nan"), "third": 1 / 3}
    print_json(values)
    assert json.loads(capsys.readouterr().out) == {**values, "lr": 0.001, "nan": None}
