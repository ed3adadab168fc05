"""The server: what it answers, whom it refuses, and how it follows a run that grows, ends or disappears."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from forewarn.config import Config
from forewarn.store import RunWriter, open_run
from forewarn.views.page.folder import Folder, NoRunError
from forewarn.views.page.server import host_of, is_loopback
from tests.page_runs import HOSTILE, INFO, SPIKE, TOKEN, Client, blocks_of, growing, serving, unpacked


def test_the_list_has_every_run_newest_first_and_nothing_from_outside(client: Client, root: Path) -> None:
    os.symlink(root.parent / "secret", root / "link")
    answer = client.get("/api/runs").json()
    assert {row["run"] for row in answer["runs"]} == {"faulty", "more/healthy"}
    faulty = next(row for row in answer["runs"] if row["run"] == "faulty")
    assert (faulty["num_steps"], faulty["last_step"], faulty["state"]) == (100, 99, "completed")
    assert faulty["alerts"] == {"warning": 2}
    assert faulty["last_loss"] == pytest.approx(5 / (1 + 99 / 20))
    assert faulty["loss_words"] == "0.84"
    assert (faulty["tags"], faulty["note"]) == ([], "")


def test_a_damaged_run_has_an_error_and_the_others_stay(client: Client, root: Path) -> None:
    (root / "faulty" / "run.db").write_bytes(b"not a database")
    rows = {row["run"]: row for row in client.get("/api/runs").json()["runs"]}
    assert "faulty" in rows["faulty"]["error"]
    assert rows["more/healthy"]["num_steps"] == 100
    assert client.get("/api/run?run=faulty").status == 503


def test_series_are_binary_and_a_spike_stays_however_few_columns_there_are(client: Client) -> None:
    answer = client.get(f"/api/series?run=faulty&series=train/loss@&series=gradient/norm@{quote(HOSTILE)}&columns=3")
    assert answer.headers["content-type"] == "application/octet-stream"
    header, arrays = unpacked(answer.body)
    loss, norm = header["series"]
    assert (loss["name"], loss["count"], loss["reduced"], loss["first"], loss["last"]) == (
        "train/loss",
        100,
        True,
        0,
        99,
    )
    assert (norm["scope"], norm["count"]) == (HOSTILE, 10)
    steps, values = arrays["steps:0"], arrays["values:0"]
    assert values[steps == SPIKE] == [90.0]
    assert {0, 99} <= set(steps.tolist())
    assert len(steps) == loss["points"] <= 8


def test_a_part_of_a_series_can_be_asked_for_and_unknown_ones_are_empty(client: Client) -> None:
    header, arrays = unpacked(
        client.get("/api/series?run=faulty&series=train/loss@&series=no/such@x&from=95&to=97").body
    )
    assert arrays["steps:0"].tolist() == [95, 96, 97]
    assert header["series"][1]["points"] == 0


def test_a_series_comes_with_its_times_even_if_the_clock_was_set_back(client: Client, root: Path) -> None:
    _, arrays = unpacked(client.get("/api/series?run=faulty&series=train/loss@&from=95&to=97&times=1").body)
    assert arrays["times:0"].tolist() == [95.0, 96.0, 97.0]
    writer = RunWriter(root / "back", info=INFO, config=Config().to_dict())
    for step, seconds in enumerate((0, 10, 5, 20)):
        writer.append(step, blocks_of(step, float("nan"), 1.7e9 + seconds))
    writer.close()
    _, arrays = unpacked(client.get("/api/series?run=back&series=train/loss@&times=1").body)
    assert arrays["times:0"].tolist() == [0.0, 10.0, 10.0, 20.0]
    (row,) = (row for row in client.get("/api/runs").json()["runs"] if row["run"] == "back")
    assert (row["last_loss"], row["loss_words"]) == (None, "NaN")


def test_maps_profiles_histograms_and_comparisons_are_answered(client: Client) -> None:
    header, _ = unpacked(client.get("/api/map?run=faulty&metric=gradient/norm").body)
    assert header["scopes"][-1] == HOSTILE
    header, arrays = unpacked(client.get("/api/profile?run=faulty&metric=gradient/norm&step=95").body)
    assert (header["step"], arrays["values"].tolist()) == (90, [91, 2, 3])
    header, _ = unpacked(client.get("/api/histograms?run=faulty&metric=gradient/histogram&scope=blocks.0.weight").body)
    assert header["steps"] == list(range(10, 100, 10))
    compared = client.get("/api/compare?run=faulty&run=more%2Fhealthy").json()
    assert [row["run"] for row in compared["runs"]] == ["faulty", "more/healthy"]


def test_a_single_run_can_be_served(root: Path, built: Path) -> None:
    with serving(root / "faulty") as client:
        assert [row["run"] for row in client.get("/api/runs").json()["runs"]] == ["faulty"]
        assert client.get("/api/run?run=faulty").json()["run"] == "faulty"
        assert client.get("/api/run?run=other").status == 404


WRONG = {
    "/api/run?run=missing": 404, "/api/run": 400, "/api/map?run=faulty&metric=gradient/nrm": 404,
    "/api/map?run=faulty": 400, "/api/series?run=faulty&series=train/loss@&columns=0": 400,
    "/api/series?run=faulty&series=train/loss@&columns=99999": 400, "/api/series?run=faulty&from=abc": 400,
    "/api/series?run=faulty&from=99999999999999999999": 400, "/api/compare?run=faulty": 400,
    "/api/series?run=faulty" + "&series=a/b@" * 501: 400, "/api/series?run=faulty&" + "x" * 50_000: 414,
    "/api/nothing": 404, "/api/note?run=faulty": 405, "/../pyproject.toml": 404, "/page.map": 404,
    "/api/events?run=missing": 404,
}  # fmt: skip


def test_a_wrong_request_is_told_in_one_sentence(client: Client) -> None:
    for path, status in WRONG.items():
        answer = client.get(path)
        assert (answer.status, set(answer.json())) == (status, {"error"}), path[:100]


def test_a_name_cannot_leave_the_folder(client: Client, root: Path) -> None:
    os.symlink(root.parent / "secret", root / "link")
    names = [
        "../secret", "..", ".", "", "more/../../secret", "/etc", "faulty/../../secret", "a\0b", "link", "x" * 2000,
        "more\\..\\..\\secret", "more/healthy/run.json", str(root.parent / "secret"), "\ud800",
    ]  # fmt: skip
    for name in names:
        asked = quote(name.encode("utf-8", "surrogatepass"), safe="")
        for path in ("run?run=", "series?run=", "events?run=", "compare?run=faulty&run="):
            assert client.get(f"/api/{path}{asked}").status == 404, name
        with pytest.raises(NoRunError):
            Folder(root).path_of(name)


def test_a_page_with_another_name_cannot_ask(client: Client) -> None:
    for host in ("evil.example", "evil.example:7007", "127.0.0.1.evil.example", "", "0x7f.1", "[::2]"):
        for path in ("/", "/api/runs", "/page.js", "/api/events"):
            assert client.get(path, host=host).status == 403


def test_every_name_of_this_machine_can_ask_through_any_port(client: Client) -> None:
    for host in ("127.0.0.1", "localhost", "localhost:1234", "[::1]:7007", "LOCALHOST:7007"):
        assert client.get("/api/runs", host=host).status == 200


def test_every_answer_forbids_what_the_page_does_not_need(client: Client) -> None:
    for path in ("/", "/page.js", "/api/runs", "/api/run?run=faulty", "/api/run?run=missing", "/nothing"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_names_are_data_and_never_part_of_the_page(client: Client) -> None:
    assert HOSTILE.encode() not in client.get("/").body
    answer = client.get("/api/run?run=faulty")
    assert answer.headers["content-type"].startswith("application/json")
    plain = answer.json()
    assert HOSTILE in plain["words"]
    assert HOSTILE in [layer["scope"] for layer in plain["layers"]]
    assert HOSTILE in {alert["scope"] for alert in plain["alerts"]}


def test_beyond_this_machine_every_request_needs_the_token(root: Path, built: Path) -> None:
    with serving(root, "gpu-box") as client:
        assert client.get("/api/runs", host="evil.example").status == 403
        for path in ("/", "/page.js", "/api/runs", "/api/run?run=faulty", "/api/events"):
            assert client.get(path, host="gpu-box:7007").status == 401
            assert client.get(f"{path}{'&' if '?' in path else '?'}token=wrong", host="gpu-box").status == 401
            assert client.get(path, host="localhost").status == 401, "also through a tunnel"
        opened = client.get(f"/?token={TOKEN}", host="gpu-box")
        cookie = opened.headers["set-cookie"]
        assert opened.status == 200
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        assert client.get("/api/runs", host="gpu-box", cookie=cookie.partition(";")[0]).status == 200
        assert client.get("/api/runs", host="gpu-box", x_forewarn_token=TOKEN).status == 200


def test_on_this_machine_the_page_gets_the_token_and_nothing_else_does(client: Client) -> None:
    page = client.get("/")
    assert f'<meta name="token" content="{TOKEN}">' in page.body.decode()
    assert "set-cookie" not in page.headers
    assert "access-control-allow-origin" not in page.headers


NOTE = '{"tags": ["baseline", " baseline "], "note": "<b>first</b>"}'


def test_tags_and_a_note_are_kept_with_the_run(client: Client, root: Path) -> None:
    assert client.get("/api/note?run=faulty", "POST", NOTE, x_forewarn_token=TOKEN).status == 200
    rows = {row["run"]: row for row in client.get("/api/runs").json()["runs"]}
    assert (rows["faulty"]["tags"], rows["faulty"]["note"]) == (["baseline"], "<b>first</b>")
    assert (root / "faulty" / "notes.json").is_file()


def test_nothing_else_is_written(client: Client, root: Path) -> None:
    right = {"x_forewarn_token": TOKEN}
    refused = [
        ({}, NOTE, "faulty", 403),
        ({"x_forewarn_token": "wrong"}, NOTE, "faulty", 403),
        ({"cookie": f"forewarn_token={TOKEN}"}, NOTE, "faulty", 403),
        ({**right, "origin": "http://evil.example"}, NOTE, "faulty", 403),
        ({**right, "sec_fetch_site": "cross-site"}, NOTE, "faulty", 403),
        (right, NOTE, "../secret", 404),
        (right, "[1]", "faulty", 400),
        (right, "{", "faulty", 400),
        (right, "[" * 50_000, "faulty", 400),
        (right, '{"tags": [1]}', "faulty", 400),
        (right, '{"note": "' + "x" * 5000 + '"}', "faulty", 400),
        (right, '{"note": "' + "x" * 100_000 + '"}', "faulty", 413),
    ]
    for headers, body, run, status in refused:
        answer = client.get(f"/api/note?run={quote(run, safe='')}", "POST", body, **headers)
        assert answer.status == status, (headers, body[:50])
    assert not list(root.parent.rglob("notes.json"))


def test_files_of_the_page_are_sent_once(client: Client, built: Path) -> None:
    first = client.get("/page.js")
    assert first.headers["content-type"].startswith("text/javascript")
    assert client.get("/page.js", if_none_match=first.headers["etag"]).status == 304
    (built / "page.js").write_text("changed")
    os.utime(built / "page.js", (1, 1))
    assert client.get("/page.js", if_none_match=first.headers["etag"]).body == b"changed"


def test_without_a_built_page_one_sentence_says_how_to_get_it(client: Client, built: Path) -> None:
    shutil.rmtree(built)
    answer = client.get("/")
    assert answer.status == 503
    assert "make page" in answer.json()["error"]


def test_a_growing_run_is_announced_and_its_overview_renewed(client: Client, root: Path) -> None:
    writer = growing(root / "live")
    assert client.get("/api/run?run=live").json()["state"]["sentence"] == "Live · step 19 of 200"
    with client.events("/api/events?run=live") as events:
        assert next(events)[1]["last_step"] == 19
        writer.append(20, blocks_of(20, 4.0, time.time()))
        writer.flush()
        kind, now = next(events)
        assert (kind, now["last_step"], now["state"]) == ("changed", 20, "running")
        assert client.get("/api/run?run=live").json()["state"]["last_step"] == 20
        _, arrays = unpacked(client.get("/api/series?run=live&series=train/loss@&from=20").body)
        assert arrays["values:0"].tolist() == [4.0]
        writer.close("RuntimeError: boom")
        assert next(now for _, now in events if now["state"] != "running")["state"] == "failed"
    assert client.get("/api/run?run=live").json()["state"]["sentence"] == "Failed · step 20 of 200 · RuntimeError: boom"


def test_a_deleted_run_is_gone_and_a_new_one_in_its_place_is_read(client: Client, root: Path) -> None:
    growing(root / "live").close()
    assert client.get("/api/run?run=live").status == 200
    with client.events("/api/events?run=live") as events, client.events("/api/events") as listed:
        assert next(events)[0] == "changed"
        assert next(listed)[1] == {"count": 3}
        shutil.rmtree(root / "live")
        assert next(events)[0] == "gone"
        assert next(listed)[1] == {"count": 2}
        assert client.get("/api/run?run=live").status == 404
        shutil.copytree(root / "faulty", root / "live")
        assert next(events)[0] in ("gone", "changed")  # while it is copied, it may be unreadable
    assert client.get("/api/run?run=live").json()["state"]["last_step"] == 99


WRITE_FOR_EVER = """
import sys, time
from pathlib import Path
from tests.page_runs import blocks_of, growing
writer = growing(Path(sys.argv[1]))
print("ready", flush=True)
step = 20
while True:
    writer.append(step, blocks_of(step, 4.0, time.time()))
    step += 1
    if step % 10 == 0:
        writer.flush()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_run_is_read_while_its_writer_writes_and_after_it_was_killed(client: Client, root: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(root / "live")], stdout=subprocess.PIPE, env={**os.environ}
    )
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(10):
            _, arrays = unpacked(client.get("/api/series?run=live&series=train/loss@").body)
            assert np.array_equal(arrays["steps:0"], np.arange(len(arrays["steps:0"])))
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        if writer.stdout is not None:
            writer.stdout.close()
    plain = client.get("/api/run?run=live").json()
    with open_run(root / "live") as run:
        assert plain["state"]["last_step"] == run.last_step >= 20
    assert plain["state"]["word"] == "running"


@pytest.mark.parametrize(
    ("header", "host"),
    [("localhost", "localhost"), ("A.b:80", "a.b"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("::1", "::1"), ("", "")],
)
def test_the_host_is_read_without_its_port(header: str, host: str) -> None:
    assert host_of(header) == host


def test_loopback_addresses_are_known() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.0.0.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "192.168.0.1", "gpu-box", "localhost.evil.example"]))
