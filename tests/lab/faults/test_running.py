"""Records survive an interruption, and kept runs can be judged again."""

import dataclasses
import json
import math

import pytest

from forewarn.lab.faults import cases
from forewarn.lab.faults.cases import Case, Record
from forewarn.lab.faults.page import page
from forewarn.lab.faults.running import RECORDS, stored_records
from forewarn.lab.faults.session import Session
from forewarn.lab.faults.sets import find_workload
from tests.lab.faults.made import healthy, record, warned


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(cases, "find_workload", lambda name: dataclasses.replace(find_workload(name), num_steps=20))


def test_a_record_is_the_same_after_it_was_stored(tmp_path):
    kept = record(change="no-step", score=math.inf, alerts=[warned()], remedied={"first remedy": None})
    (tmp_path / RECORDS).write_text(json.dumps(kept.to_json(int)) + "\n" + '{"case": {"workload": "ml')
    assert stored_records(tmp_path) == {"mlp/no-step/1": kept}


def test_a_fault_is_watched_remedied_and_judged_again(short, tmp_path):
    case = Case("mlp", "not-in-optimizer", 1)
    first = cases.run_case(case, tmp_path)
    assert first.warned[0].code == "U106"
    assert set(first.remedied) == {"first remedy", "random remedy", "lower the lr", "healthy twin"}
    assert first.remedied["first remedy"] == first.remedied["healthy twin"]  # it is as if nothing had been wrong
    assert cases.judged_again(first, tmp_path) == first
    silenced = dataclasses.replace(first, warned=(), num_warnings=0)
    assert dataclasses.replace(cases.judged_again(silenced, tmp_path), remedied=first.remedied) == first


def test_a_run_that_breaks_is_lost_and_says_why(short):
    lost = cases.run_case(Case("vae-sum", "nan-batch", 1))
    assert lost.score == math.inf
    assert "between 0 and 1" in lost.error
    assert Record.from_json(json.loads(json.dumps(lost.to_json(int)))) == lost


def test_a_resume_keeps_the_monitor_and_the_steps(short, tmp_path):
    resumed = cases.run_case(Case("mlp", "lr-jump-on-resume", 1), tmp_path)
    assert resumed.num_steps == len(resumed.objective) == 20
    assert "U108" in {alert.code for alert in resumed.warned}


def test_a_session_without_changes_returns_what_it_was_given():
    session = Session(0, 5)
    assert session.number("lr", 0.1) == 0.1
    assert session.count("batch_size", 32) == 32


def test_the_page_names_every_miss_and_false_warning():
    records = [
        *healthy(1.0, 1.1, 0.9),
        record(change="tiny-batches", seed=4, alerts=[warned("L102", text="loss-spike: up")]),
        record(change="no-step", score=9.0, remedied={"random remedy": 9.0}),
        record(change="lr-too-high", score=9.0, alerts=[warned("A103", text="big"), warned("U102")]),
        record(change="lr-too-low", score=1.0),
    ]
    text = page(records, ["A machine."])
    assert "**Sets on this page: development.** The test set is not among them" in text
    assert "- `mlp/no-step/1`: no rule fired" in text
    assert "- `mlp/lr-too-high/1`: A103 at step 10, big; the cause came later as U102" in text
    assert "- `mlp/tiny-batches/4`: L102 at step 10, loss-spike: up" in text
    assert "- `mlp/lr-too-low/1`: nothing" in text  # harmless
    assert "| harmful faults detected | 50% (1 of 2; 9 to 91) |" in text
