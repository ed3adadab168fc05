"""Debian's promtool checks what is exported and the examples, and a real Prometheus scrapes a run that trains."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import forewarn
from tests.page_runs import built, serving

__all__ = ["built"]  # a fixture

pytestmark = pytest.mark.prometheus
EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "grafana"


def promtool(*arguments: str, given: str = "") -> str:
    ended = subprocess.run(["promtool", *arguments], input=given, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def training(path: Path, **settings: Any) -> tuple[forewarn.Monitor, torch.nn.Module]:
    """A small model after 60 steps, whose learning rate was far too high from step 40 on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    monitor = forewarn.watch(model, optimizer, path, every=1, **settings)
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 1e-3 if step < 40 else 0.5
        inputs = torch.randn(16, 8)
        monitor.log("my/score", 1.0)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    return monitor, model


def test_promtool_finds_nothing_wrong_with_the_examples() -> None:
    assert "6 rules found" in promtool("check", "rules", str(EXAMPLES / "forewarn.rules.yml"))
    promtool("check", "config", str(EXAMPLES / "prometheus.yml"))
    promtool("test", "rules", str(Path(__file__).parent / "rules.test.yml"))


def test_promtool_finds_nothing_wrong_with_what_a_run_exports(tmp_path: Path, built: Path) -> None:
    view = forewarn.Prometheus(port=0)
    monitor, _ = training(tmp_path / "runs" / "exp1", views=[view])
    with urllib.request.urlopen(view.address) as answer:
        assert promtool("check", "metrics", given=answer.read().decode()) == ""
    with serving(tmp_path / "runs") as client:
        deadline = time.monotonic() + 30
        while "forewarn_alert{" not in (text := client.get("/metrics").body.decode()):  # a thread writes the run
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
    assert promtool("check", "metrics", given=text) == ""
    monitor.close()


def test_a_real_prometheus_scrapes_a_run_that_trains_and_fires_the_rules(tmp_path: Path, built: Path) -> None:
    monitor, _ = training(tmp_path / "runs" / "exp1", views=[])
    with serving(tmp_path / "runs") as client, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        config = {
            "rule_files": [str(EXAMPLES / "forewarn.rules.yml")],
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [{"job_name": "forewarn", "static_configs": [{"targets": [f"127.0.0.1:{client.port}"]}]}],
        }
        (tmp_path / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
        command = [
            "prometheus", f"--config.file={tmp_path / 'prometheus.json'}", f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        scraping = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            address = f"http://127.0.0.1:{port}/api/v1"
            (loss,) = until(f"{address}/query?query=forewarn_train_loss")["result"]
            assert loss["metric"] == {
                "__name__": "forewarn_train_loss", "run": "exp1", "job": "forewarn",
                "instance": f"127.0.0.1:{client.port}",
            }  # fmt: skip
            assert float(loss["value"][1]) == pytest.approx(monitor.history.series("train/loss").last, rel=1e-6)
            assert until(f"{address}/query?query=up")["result"][0]["value"][1] == "1"
            shown = {alert["labels"]["name"] for alert in until(f"{address}/alerts")["alerts"]}
            assert "update-ratio-jump" in shown
            for panel in json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]:
                for target in panel["targets"]:
                    query = urllib.parse.quote(target["expr"].replace("$run", ".*"))
                    asked(f"{address}/query?query={query}")
        finally:
            scraping.terminate()
            scraping.wait(20)
    monitor.close()


def asked(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(address, timeout=10) as answer:
        plain = json.loads(answer.read())
    assert plain["status"] == "success"
    data: dict[str, Any] = plain["data"]
    return data


def until(address: str) -> dict[str, Any]:
    """The first answer that is not empty."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            data = asked(address)
        except OSError:
            data = {}
        if data.get("result") or data.get("alerts"):
            return data
        time.sleep(0.2)
    raise AssertionError(f"no answer from {address}")
