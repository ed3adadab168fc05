"""Which rules were judged: a hash of their source and thresholds, and how often the test set has been run."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import forewarn.judge
from forewarn.config import Config
from forewarn.files import replacing

TEST_RUNS = Path(__file__).with_name("test_set_runs.json")
"""Each set of rules that the test set was run with; committed with the code."""
HASH_LENGTH = 12


def rules_hash() -> str:
    """A hash of the source of everything that judges, and of all thresholds."""
    digest = hashlib.sha256()
    (folder,) = map(Path, forewarn.judge.__path__)
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(json.dumps(Config().thresholds.to_dict(), sort_keys=True).encode())
    return digest.hexdigest()[:HASH_LENGTH]


def test_runs() -> list[dict[str, str]]:
    """The date and the hash of the rules of each run of the test set so far."""
    runs: list[dict[str, str]] = json.loads(TEST_RUNS.read_text())
    return runs


def count_test_run() -> None:
    """Note that the test set is run. A run that is continued with the same rules counts once."""
    runs, now = test_runs(), rules_hash()
    if not runs or runs[-1]["rules"] != now:
        runs.append({"date": time.strftime("%Y-%m-%d"), "rules": now})
        with replacing(TEST_RUNS) as file:
            file.write((json.dumps(runs, indent=2) + "\n").encode())
