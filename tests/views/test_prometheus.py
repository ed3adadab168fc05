"""Runs for Prometheus: real servers and files, read with the parser of prometheus_client."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import forewarn
from forewarn.metrics import all_metrics, find
from forewarn.store import RunWriter
from forewarn.store.newest import MOST_ALERTS, MOST_SCOPES, TOP, Newest, OpenAlert, kept_newest
from forewarn.types import AlertState, Block, RunInfo, RunStart, Severity
from forewarn.views.exposition import OWN, Exported, exported_name, exposition
from forewarn.views.prometheus import Prometheus
from tests.page_runs import TOKEN, Client, built, client, made, root, serving
from tests.views.made import alert, block

__all__ = ["built", "client", "made", "root"]  # fixtures

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """Every sample by name and labels; a name or a set of labels that occurs twice is an error."""
    found: Samples = {}
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        assert (family.type, bool(family.documentation)) == ("gauge", True)
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            assert sample.name == family.name
            found[key] = sample.value
    return found


def value(found: Samples, metric: str, /, **labels: str) -> float:
    return found[f"forewarn_{metric}", frozenset(labels.items())]


def fetched(address: str, **headers: str) -> tuple[str, str]:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
        return answer.read().decode(), answer.headers["content-type"]


def started(tmp_path: Path, **given: Any) -> Prometheus:
    view = Prometheus(**given)
    view.begin(RunStart(tmp_path / "runs" / "exp1", RunInfo(), 1))
    return view


def test_a_watched_run_can_be_scraped_while_it_trains(
    watch: Callable[..., forewarn.Monitor], small: tuple[torch.nn.Sequential, torch.optim.Optimizer], tmp_path: Path
) -> None:
    model, optimizer = small
    view = forewarn.Prometheus(port=0)
    monitor = watch(model, optimizer, views=[view])
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    text, kind = fetched(view.address)
    found = samples(text)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    run = (tmp_path / "run0").as_posix()
    assert value(found, "run_step", run=run) == 2
    assert value(found, "train_loss", run=run) == np.float32(loss.item())
    assert value(found, "train_lr", run=run, group="0") == np.float32(0.1)
    assert 0 < value(found, "speed_step_seconds", run=run) < 60
    assert value(found, "run_state", run=run, state="running") == 1
    norms = {dict(labels)["parameter"] for name, labels in found if name == "forewarn_gradient_norm"}
    assert norms == {name for name, _ in model.named_parameters()}
    assert find("speed/step_seconds").meaning in text
    monitor.close()
    with pytest.raises(urllib.error.URLError):
        fetched(view.address)


def test_only_the_largest_tensors_are_exported_and_no_metric_has_unbounded_labels(tmp_path: Path) -> None:
    view = started(tmp_path, port=0)
    layers = tuple(f"layer{index}" for index in range(1000))
    norms = np.arange(1000.0)
    norms[999] = np.nan
    ranks = tuple(str(rank) for rank in range(500))
    blocks = [
        block(1, "gradient/norm", *norms, scopes=layers), block(1, "weight/norm", *norms, scopes=layers),
        block(1, "rank/step_seconds", *range(500), scopes=ranks), block(1, "my/score", 7.0),
        block(1, "my/layers", *norms, scopes=layers),
    ]  # fmt: skip
    view.show(1, blocks, [alert("G103", layer) for layer in layers], [])
    found = samples(view.text())
    run = (tmp_path / "runs" / "exp1").as_posix()
    view.close()
    kept = {dict(labels)["parameter"]: sample for (name, labels), sample in found.items() if "gradient_norm" in name}
    assert kept == {f"layer{index}": index for index in range(998, 998 - TOP, -1)}
    assert value(found, "rank_step_seconds", run=run, rank="3") == 3
    assert sum(name == "forewarn_rank_step_seconds" for name, _ in found) == MOST_SCOPES
    assert value(found, "my_score", run=run) == 7
    assert not [name for name, _ in found if name in ("forewarn_weight_norm", "forewarn_my_layers")]
    assert sum(name == "forewarn_alert" for name, _ in found) == MOST_ALERTS
    assert value(found, "alerts_open", run=run, severity="warning") == 1000
    assert value(found, "alerts_open", run=run, severity="critical") == 0


def test_a_metric_in_parts_has_the_newest_reading_of_each_scope(tmp_path: Path) -> None:
    view = started(tmp_path, port=0)
    view.show(1, [block(1, "task/loss", 1.0, scopes=("a",)), block(1, "task/loss", 2.0, scopes=("b",))], [], [])
    view.show(2, [block(2, "task/loss", 3.0, scopes=("a",))], [], [])
    found = samples(view.text())
    view.close()
    run = (tmp_path / "runs" / "exp1").as_posix()
    assert value(found, "task_loss", run=run, task="a") == 3
    assert value(found, "task_loss", run=run, task="b") == 2
    writer = RunWriter(tmp_path / "stored", info=RunInfo(), config={})
    writer.append(1, [block(1, "task/loss", 1.0, scopes=("a",)), block(1, "task/loss", 2.0, scopes=("b",))])
    writer.append(2, [block(2, "task/loss", 3.0, scopes=("a",))])
    writer.flush()
    assert kept_newest(tmp_path / "stored" / "summary.json").readings == {"task/loss": {"a": 3.0, "b": 2.0}}
    writer.close()


def test_an_alert_is_exported_until_it_is_resolved(tmp_path: Path) -> None:
    view = started(tmp_path, port=0)
    labels = {"run": (tmp_path / "runs" / "exp1").as_posix(), "code": "L102", "name": "loss-spike", "scope": "x"}
    view.show(1, [], [alert("L102", "x", state=AlertState.PENDING)], [])
    assert "forewarn_alert{" not in view.text()
    view.show(2, [], [alert("L102", "x", Severity.CRITICAL)], [])
    assert value(samples(view.text()), "alert", severity="critical", **labels) == 1
    view.show(3, [], [alert("L102", "x", Severity.CRITICAL, AlertState.RESOLVED)], [])
    assert "forewarn_alert{" not in view.text()
    view.close()


def test_hostile_names_and_numbers_survive_the_parser() -> None:
    hostile = 'a"b\\c\nd{e="f"} 1\r\u2028 \N{SNOWMAN}'
    readings = {
        "train/loss": {"": float("nan")}, "eval/loss": {"": float("inf")}, "train/clip": {"": float("-inf")},
        "task/loss": {hostile: 0.1}, "my/a_b": {"": 1.0}, "my_a/b": {"": 2.0}, "my/rows_total": {"": 3.0},
    }  # fmt: skip
    alerts = (OpenAlert("L102", "loss-spike", hostile, Severity.WARNING),) * 2
    found = samples(exposition([Exported(hostile, "running", None, 1.7e9, Newest(readings, alerts))], {"running": 1}))
    assert np.isnan(value(found, "train_loss", run=hostile))
    assert value(found, "eval_loss", run=hostile) == np.inf
    assert value(found, "train_clip", run=hostile) == -np.inf
    assert value(found, "task_loss", run=hostile, task=hostile) == 0.1
    assert value(found, "my_a_b", run=hostile) == 1.0, "of two names that are the same to Prometheus the first counts"
    assert value(found, "my_rows", run=hostile) == 3.0
    assert value(found, "runs", state="running") == 1
    assert value(found, "run_updated_timestamp_seconds", run=hostile) == 1.7e9


def test_every_metric_of_the_catalogue_has_a_valid_name_of_its_own() -> None:
    names = [exported_name(metric.name) for metric in all_metrics() if "*" not in metric.name]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"forewarn_[a-z][a-z0-9_]*", name) for name in names)
    assert exported_name("speed/step_seconds") == "forewarn_speed_step_seconds"
    assert exported_name("monitor/frozen_count") == "forewarn_monitor_frozen"


def test_a_file_for_node_exporter_is_complete_at_every_moment_and_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forewarn.views.prometheus.TEXTFILE_SECONDS", 0.01)
    target = tmp_path / "forewarn.prom"
    view = started(tmp_path, textfile=target)
    deadline = time.monotonic() + 10
    step = 0
    while step < 200 or (not target.exists() and time.monotonic() < deadline):
        step += 1
        view.show(step, [block(step, "train/loss", step)], [], [])
        if target.exists():
            assert any(name == "forewarn_train_loss" for name, _ in samples(target.read_text()))
    view.close()
    view.close()
    run = (tmp_path / "runs" / "exp1").as_posix()
    assert value(samples(target.read_text()), "run_step", run=run) == step
    assert [path.name for path in tmp_path.iterdir()] == ["forewarn.prom"]


def test_a_file_that_cannot_be_written_is_logged_once_and_nothing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forewarn.views.prometheus.TEXTFILE_SECONDS", 0.01)
    view = started(tmp_path, textfile=tmp_path / "missing" / "forewarn.prom")
    view.show(1, [], [], [])
    time.sleep(0.2)
    view.close()
    assert caplog.text.count("forewarn.prom cannot be written: No such file or directory") == 1


def test_a_port_that_is_taken_drops_the_view_and_the_training_goes_on(
    watch: Callable[..., forewarn.Monitor], small: tuple[torch.nn.Sequential, torch.optim.Optimizer]
) -> None:
    model, optimizer = small
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monitor = watch(model, optimizer, views=[forewarn.Prometheus(port=taken.getsockname()[1])])
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    assert any("Prometheus" in str(one.finding.evidence) + one.numbers + one.scope for one in monitor.alerts)


@pytest.mark.parametrize(
    ("given", "words"),
    [({}, "either a port"), ({"port": 1, "textfile": "x.prom"}, "either a port"), ({"port": 70000}, "0 to 65535"),
     ({"textfile": "x.txt"}, "end in .prom")],
)  # fmt: skip
def test_wrong_arguments_are_told_at_once(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Prometheus(**given)


def test_the_small_server_answers_only_to_its_own_name_and_path(tmp_path: Path) -> None:
    view = started(tmp_path, port=0)
    view.show(1, [], [], [])
    for address, host, status in (
        (view.address, "evil.example", 403), (view.address.removesuffix("metrics"), "localhost", 404),
    ):  # fmt: skip
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(address, Host=host)
        assert refused.value.code == status
        refused.value.close()
    view.close()


def live_run(path: Path, ago: float = 0.0) -> RunWriter:
    writer = RunWriter(path, info=RunInfo(model="Net", started=time.time() - ago), config={})
    for step in range(10):
        now = time.time() - ago
        blocks = [Block(step, now, name, ("",), np.array([step], np.float32)) for name in ("train/loss", "my/score")]
        blocks.append(Block(step, now, "gradient/norm", ("a", "b"), np.array([step, 1], np.float32)))
        writer.append(step, blocks)
    writer.record(9, alerts=[alert("L102", "", Severity.CRITICAL)])
    writer.flush()
    return writer


def test_the_dashboard_exports_the_runs_that_train_and_the_number_of_all(client: Client, root: Path) -> None:
    writer, old = live_run(root / "new" / "exp2"), live_run(root / "lost", ago=7200.0)
    answer = client.get("/metrics")
    found = samples(answer.body.decode())
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert value(found, "train_loss", run="new/exp2") == 9
    assert value(found, "my_score", run="new/exp2") == 9
    assert value(found, "gradient_norm", run="new/exp2", parameter="a") == 9
    assert value(found, "run_step", run="new/exp2") == 9
    assert value(found, "run_state", run="new/exp2", state="running") == 1
    assert value(found, "run_updated_timestamp_seconds", run="new/exp2") == pytest.approx(time.time(), abs=60)
    labels = {"code": "L102", "name": "loss-spike", "scope": "", "severity": "critical"}
    assert value(found, "alert", run="new/exp2", **labels) == 1
    assert value(found, "runs", state="completed") == 2
    assert value(found, "runs", state="interrupted") == 1, "nothing was heard of it for two hours"
    assert {dict(labels).get("run") for _, labels in found} == {None, "new/exp2"}
    writer.append(10, [Block(10, time.time(), "train/loss", ("",), np.array([0.5], np.float32))])
    writer.flush()
    assert value(samples(client.get("/metrics").body.decode()), "train_loss", run="new/exp2") == 0.5
    writer.close("RuntimeError: boom")
    found = samples(client.get("/metrics").body.decode())
    assert value(found, "run_state", run="new/exp2", state="failed") == 1
    assert not [name for name, _ in found if name == "forewarn_train_loss"], "it no longer trains"
    old.close()


def test_a_scrape_opens_no_database(client: Client, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = live_run(root / "live")
    monkeypatch.setattr("forewarn.views.page.folder.open_run", lambda path: pytest.fail("opened"))
    assert kept_newest(root / "live" / "summary.json").readings["train/loss"] == {"": 9.0}
    assert value(samples(client.get("/metrics").body.decode()), "train_loss", run="live") == 9
    writer.close()


def test_beyond_loopback_a_scrape_needs_the_token(root: Path, built: Path) -> None:
    with serving(root, host="0.0.0.0") as client:
        assert client.get("/metrics").status == 401
        assert client.get("/metrics", authorization="Bearer wrong").status == 401
        assert client.get("/metrics", authorization=f"Bearer {TOKEN}", host="0.0.0.0").status == 200


EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "grafana"
EXPORTED = {exported_name(metric.name) for metric in all_metrics()} | {f"forewarn_{name}" for name in OWN}


@pytest.mark.parametrize("name", ["dashboard.json", "forewarn.rules.yml"])
def test_the_examples_query_only_what_is_exported(name: str) -> None:
    named = set(re.findall(r"\bforewarn_\w+", (EXAMPLES / name).read_text()))
    assert len(named) >= 4
    assert named <= EXPORTED


def test_the_dashboard_of_grafana_has_panels_that_do_not_overlap_and_asks_its_own_source() -> None:
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert all(target["datasource"]["uid"] == "${source}" for target in panel["targets"])
