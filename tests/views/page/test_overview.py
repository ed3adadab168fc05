"""The overview of a run: every view tells the same, and an alert comes with what its rule judged."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from forewarn.config import Config
from forewarn.judge.rules import find_rule
from forewarn.store import RunWriter, open_run
from forewarn.types import Action, AlertState, Block, Finding, Severity
from forewarn.views.page.overview import explanation, overview
from forewarn.views.page.report import json_report, markdown_report
from tests.learning_runs import LEARNING_FAULTS
from tests.page_runs import HOSTILE, INFO, SPIKE, blocks_of, losses, written
from tests.real_runs import FAULTS, healthy
from tests.views.made import alert

TRAINED = {
    "evaluation": LEARNING_FAULTS["E101"],
    "tasks": FAULTS["T101"],
    "frozen": FAULTS["U101"],
    "healthy": lambda run: healthy("mlp", 0, run, 60),
}


@pytest.mark.parametrize("kind", TRAINED)
def test_console_dashboard_report_and_json_tell_the_same(kind: str, tmp_path: Path, forewarn) -> None:
    path = tmp_path / kind
    TRAINED[kind](path)
    judged = json.loads(forewarn("check", path, "--json").out)
    text = " ".join(forewarn("check", path).out.split())
    with open_run(path) as run:
        plain, report, page = overview(run, kind), json_report(run), markdown_report(run)
    assert plain["verdict"]["word"] == report["verdict"]["word"] == judged["verdict"]
    assert f"{judged['verdict']}: {plain['verdict']['sentence']}" in text
    assert [check["detail"] for check in plain["checklist"]] == [check["detail"] for check in judged["checklist"]]
    words = {(row["code"], row["headline"], row["numbers"].partition(" · the worst of")[0]) for row in plain["alerts"]}
    assert words <= {(one["code"], one["headline"], one["numbers"]) for one in judged["alerts"]}
    assert {row["code"] for row in plain["alerts"]} == {one["code"] for one in judged["alerts"]}
    for row in plain["alerts"]:
        assert " ".join(row["headline"].split()) in text
        assert row["fired"] == min(one["fired"] for one in judged["alerts"] if one["code"] == row["code"])
    for remedy in plain["remedies"]:
        assert f"{remedy['do']}." in text
        assert remedy["do"] in re.sub(r"\\(.)", r"\1", page)
    if kind != "healthy":
        assert plain["alerts"]
        assert plain["verdict"]["headline"] == plain["alerts"][0]["headline"]
        assert plain["remedies"]
        root = next(one for one in judged["alerts"] if one["headline"] == plain["verdict"]["headline"])
        assert plain["remedies"][0]["do"] == root["remedies"][0]["do"]


@pytest.fixture
def faulty(root: Path) -> dict:
    with open_run(root / "faulty") as run:
        return overview(run, "faulty")


def test_an_alert_comes_with_the_series_that_was_judged_its_limit_and_what_is_usual(tmp_path: Path) -> None:
    finding = Finding("L102", "", SPIKE, Severity.WARNING, 90.0, 12.0, {"level": 2.5, "ratio": 36.0})
    spike = dataclasses.replace(alert(), since=SPIKE, fired=SPIKE, last=SPIKE, finding=finding)
    with open_run(written(tmp_path / "run", alerts=(spike,))) as run:
        (row,) = overview(run, "run")["alerts"]
    assert row["judged"] == {"name": "train/loss", "scope": ""}
    assert (row["value"], row["limit"], row["side"], row["usual"]) == (90.0, 12.0, "above", [2.5, 2.5])
    assert row["computed"] is None
    without = dataclasses.replace(spike, finding=dataclasses.replace(finding, evidence={}))
    with open_run(written(tmp_path / "other", alerts=(without,))) as run:
        (row,) = overview(run, "run")["alerts"]
    assert row["usual"] == pytest.approx(np.percentile(np.float32(losses()[SPIKE - 30 : SPIKE]), [5, 95]).tolist())


def test_a_value_that_is_no_reading_says_what_it_was_computed_from(faulty) -> None:
    row = next(row for row in faulty["alerts"] if row["code"] == "L102")
    assert row["judged"]["name"] == "train/loss"
    assert row["computed"] == "the value 90 is computed from loss"
    assert row["usual"] is None


def test_a_code_is_no_value_to_draw(tmp_path: Path) -> None:
    finding = Finding("U106", "blocks.0.weight", 10, Severity.WARNING, 2.0, 1.0)
    missing = dataclasses.replace(alert("U106", "blocks.0.weight"), finding=finding)
    writer = RunWriter(tmp_path / "run", info=INFO, config=Config().to_dict())
    writer.append(10, [Block(10, 1.7e9, "update/frozen_cause", ("blocks.0.weight",), np.array([2.0], np.float32))])
    writer.record(10, alerts=[missing])
    writer.close()
    with open_run(tmp_path / "run") as run:
        (row,) = overview(run, "run")["alerts"]
    assert (row["judged"], row["value"], row["limit"]) == (None, None, None)


def test_a_symptom_follows_its_cause(tmp_path: Path) -> None:
    cause = dataclasses.replace(alert("U104", "0"), since=40, fired=41, last=45)
    symptoms = [dataclasses.replace(alert("L102"), since=50, fired=51, last=52), dataclasses.replace(
        alert("G103"), since=45, fired=46, last=52)]  # fmt: skip
    with open_run(written(tmp_path / "run", alerts=(symptoms[0], cause, symptoms[1]))) as run:
        plain = overview(run, "run")
    rows = plain["alerts"]
    assert [row["code"] for row in rows] == ["U104", *sorted((row["code"] for row in rows[1:]), reverse=False)]
    assert [row["follows"] for row in rows] == ["", "U104", "U104"]
    assert [row["is_symptom"] for row in rows] == [False, True, True]
    assert plain["verdict"]["code"] == "U104"
    assert plain["verdict"]["followed"] == "2 other alerts followed"


def test_names_from_the_run_are_text_and_layers_are_in_the_order_of_the_model(faulty) -> None:
    assert HOSTILE in faulty["words"]
    assert [layer["scope"] for layer in faulty["layers"]] == list(INFO.parameters)
    assert faulty["layers"][0] == {"scope": "blocks.0.weight", "label": "weight", "block": "blocks.0", "shape": [8, 8]}
    assert faulty["layers"][2]["block"] is None
    recorded = {series["name"]: series for series in faulty["series"]}
    assert recorded["gradient/norm"] == {"name": "gradient/norm", "scopes": list(INFO.parameters), "count": 10}
    assert faulty["histograms"] == {"gradient/histogram": ["blocks.0.weight"]}
    assert faulty["metrics"]["gradient/norm"]["log"]
    assert faulty["metrics"]["train/loss"]["label"] == "Loss"


def test_the_state_says_how_far_the_run_is(faulty) -> None:
    state = faulty["state"]
    assert state["sentence"] == "Completed · 100 steps"
    assert (state["planned_steps"], state["step_seconds"], state["last_step"]) == (200, 0.5, 99)


def test_an_empty_run_has_an_overview(tmp_path: Path) -> None:
    RunWriter(tmp_path / "run", info=INFO, config=Config().to_dict()).close()
    with open_run(tmp_path / "run") as run:
        plain = overview(run, "run")
    assert plain["state"]["last_step"] is None
    assert (plain["alerts"], plain["series"], plain["cost"]) == ([], [], None)


def test_a_run_that_was_not_judged_live_is_judged_now(tmp_path: Path) -> None:
    values = [2.0] * 60 + [float("nan")] * 40
    info = dataclasses.replace(INFO, rules=())
    with open_run(written(tmp_path / "run", values, info=info)) as run:
        assert "L101" in {row["code"] for row in overview(run, "run")["alerts"]}


def test_resolved_alerts_keep_their_headline(tmp_path: Path) -> None:
    falling = [5 / (1 + step / 20) for step in range(100)]
    with open_run(written(tmp_path / "run", falling, (alert(state=AlertState.RESOLVED),))) as run:
        plain = overview(run, "run")
    assert (plain["verdict"]["severity"], plain["verdict"]["word"]) == ("healthy", "recovered")
    assert plain["verdict"]["headline"] == plain["alerts"][0]["headline"]
    assert plain["alerts"][0]["state"] == "resolved"


def test_an_explanation_is_plain_text_without_examples() -> None:
    text = explanation(find_rule("L102"))
    assert text.startswith(find_rule("L102").summary)
    assert not set("`#") & set(text)
    assert "fires:" not in text


def test_metrics_of_the_user_have_their_healthy_range(tmp_path: Path) -> None:
    info = dataclasses.replace(INFO, metrics={"gradient_metric/mine": (0.0, 2.0)})
    writer = RunWriter(tmp_path / "run", info=info, config=Config().to_dict())
    writer.append(0, [Block(0, 0.0, "gradient_metric/mine", ("a",), np.array([1], np.float32))])
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert overview(run, "run")["metrics"]["gradient_metric/mine"]["high"] == 2.0


def test_what_the_policy_did_is_told_with_its_outcome_in_page_and_reports(tmp_path: Path) -> None:
    lowered = Action(SPIKE, "L102", "", "lower_lr", {"from": 0.3, "to": 0.1}, f"The loss is {HOSTILE}")
    returned = Action(70, "L101", "", "roll_back", {"from": 71, "to": 50}, "The loss is NaN")
    taken = [
        lowered, returned, dataclasses.replace(lowered, watched_steps=9, resolved_after=4, recovered_after=8),
        Action(80, "G104", "", "lower_clip", {}, "x", failed="the limit is infinite"),
    ]  # fmt: skip
    path = tmp_path / "run"
    writer = RunWriter(path, info=INFO, config=Config().to_dict())
    for step, loss in enumerate(losses()):
        writer.append(step, blocks_of(step, loss))
    for one in taken:
        writer.record(one.step, actions=[one])
    writer.close("completed")
    with open_run(path) as run:
        rows, report, text = overview(run, "run")["actions"], json_report(run), markdown_report(run)
    assert report["actions"] == rows
    assert [(row["step"], row["state"], row["worked"], row["to"]) for row in rows] == [
        (SPIKE, "done", True, None), (70, "done", False, 50), (80, "failed", False, None),
    ]  # fmt: skip
    assert rows[0]["words"].startswith("Lowered the learning rate from 0.3 to 0.1, because of L102")
    assert rows[0]["outcome"] == "L102 resolved after 4 steps, the loss came back after 8 steps"
    assert "| 70 | Rolled back from step 71 to step 50, because of L101 (the loss is NaN) |  |" in text
    assert HOSTILE not in text
