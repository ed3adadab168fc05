"""`forewarn check --json` keeps to its schema: every key is described, whatever the run, and no list is unbounded."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import forewarn.cli
from forewarn.config import Config
from forewarn.store import RunWriter
from forewarn.types import Action, Block, RunInfo
from tests.cli.conftest import FACTS, Said, falling, write_run

ROOT = Path(__file__).parent.parent.parent
SHIPPED = Path(forewarn.cli.__file__).parent / "check.schema.json"
STORED = ROOT / "tests" / "golden" / "stored"
SCHEMA = json.loads(SHIPPED.read_text())


def strict(schema: Any) -> Any:
    """The schema without room for keys that it does not describe."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    return closed | {"additionalProperties": False} if isinstance(closed.get("properties"), dict) else closed


def valid(text: str) -> dict[str, Any]:
    """The answer of the command, if it keeps to the strict schema."""
    found: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    jsonschema.Draft202012Validator(strict(SCHEMA)).validate(found)
    return found


def test_the_schema_is_valid_and_the_same_in_the_package_and_the_docs() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert (ROOT / "docs" / "check.schema.json").read_text() == SHIPPED.read_text()


@pytest.mark.parametrize("run", sorted(path.name.removesuffix(".tar.xz") for path in STORED.glob("*.tar.xz")))
def test_real_runs_keep_to_it(forewarn: Callable[..., Said], run: str, tmp_path: Path) -> None:
    with tarfile.open(STORED / f"{run}.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    said = forewarn("check", tmp_path / run, "--json")
    assert valid(said.out)["exit_code"] == said.code


def test_crashed_running_and_empty_runs_keep_to_it(forewarn: Callable[..., Said], tmp_path: Path) -> None:
    write_run(tmp_path / "crashed", [*falling(100), float("nan")], end="RuntimeError: CUDA error")
    write_run(tmp_path / "running", falling(100), end=None)
    RunWriter(tmp_path / "empty", info=RunInfo(), config={}).close()
    crashed, running, empty = (
        valid(forewarn("check", tmp_path / name, "--json").out) for name in ("crashed", "running", "empty")
    )
    assert crashed["end"]["reason"] == "RuntimeError: CUDA error"
    assert running["end"] is None
    assert (empty["last_step"], empty["alerts"], empty["verdict"]) == (None, [], "too early to tell")


def test_a_thousand_alerts_are_counted_and_only_the_most_important_are_listed(
    forewarn: Callable[..., Said], tmp_path: Path
) -> None:
    layers = tuple(f"layers.{index}.{'x' * 900}" for index in range(1000))
    writer = RunWriter(tmp_path / "run", info=FACTS, config=Config().to_dict())
    for step in range(60):
        ratios = np.full(1000, 1e-3 if step < 50 else 0.9, np.float32)
        blocks = [Block(step, 1.0, "update/ratio", layers, ratios), Block(step, 1.0, "train/lr", ("0",), ratios[:1])]
        losses = np.array([3.0 - step / 100 if step != 58 else np.nan], np.float32)
        writer.append(step, [*blocks, Block(step, 1.0, "train/loss", ("",), losses)])
    writer.record(59, actions=[Action(step, "L101", "", "skip_batch", reason="y" * 2000) for step in range(300)])
    writer.close()
    said = forewarn("check", tmp_path / "run", "--json")
    found = valid(said.out)
    codes = [alert["code"] for alert in found["alerts"]]
    assert max(found["counts"]["rules"].values()) == 1000
    assert sum(found["counts"]["severities"].values()) == sum(found["counts"]["rules"].values()) > 1000
    assert len(codes) <= 100
    assert max(codes.count(code) for code in codes) == 20
    assert set(codes) == set(found["counts"]["rules"]), "many alerts of one rule do not hide the others"
    assert (found["counts"]["actions"], len(found["actions"]), found["actions"][-1]["step"]) == (300, 100, 299)
    assert len(said.out) < 500_000
