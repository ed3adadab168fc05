"""A run in one file."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from forewarn.config import Config
from forewarn.store import RunWriter, open_run
from forewarn.types import Block, ParameterInfo
from forewarn.views.page.report import (
    MOST_BYTES,
    MOST_TEXT_BYTES,
    NotBuiltError,
    html_report,
    json_report,
    markdown_report,
)
from tests.page_runs import HOSTILE, INFO, unpacked, written
from tests.views.made import alert


class Elements(HTMLParser):
    """The elements of a page, and the text inside of each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self.texts[-1] += data


@pytest.fixture
def faulty(root: Path, built: Path) -> str:
    with open_run(root / "faulty") as run:
        return html_report(run)


def test_the_page_its_data_and_its_policy_are_in_one_file_that_loads_nothing(faulty: str) -> None:
    elements = Elements(faulty)
    assert not [attributes for _, attributes in elements.tags if "src" in attributes or "href" in attributes]
    named = {tag: text for (tag, _), text in zip(elements.tags, elements.texts, strict=True)}
    scripts = [pair for pair in zip(elements.tags, elements.texts, strict=True) if pair[0][0] == "script"]
    (data, data_text), (module, module_text) = scripts
    assert data[1] == {"type": "application/json", "id": "embedded"}
    assert module[1] == {"type": "module"}
    assert module_text == 'console.log("<\\/script><b>")'
    policy = next(attributes["content"] for tag, attributes in elements.tags if "http-equiv" in attributes)
    for text in (module_text, named["style"]):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in str(policy)
    assert "unsafe" not in str(policy)
    assert set(json.loads(data_text)) == {"overview", "blobs"}


def test_the_report_has_what_the_page_asks_for_and_names_stay_text(faulty: str) -> None:
    elements = Elements(faulty)
    assert "img" not in [tag for tag, _ in elements.tags]
    embedded = json.loads(
        next(text for (tag, at), text in zip(elements.tags, elements.texts, strict=True) if at.get("id"))
    )
    assert HOSTILE in embedded["overview"]["words"]
    blobs = {request: unpacked(base64.b64decode(blob)) for request, blob in embedded["blobs"].items()}
    paths = [request.partition("?")[0] for request in blobs]
    assert paths == ["/api/series", "/api/map", "/api/map", "/api/histograms"]
    header, arrays = next(iter(blobs.values()))
    names = [series["name"] for series in header["series"]]
    assert {"train/loss", "speed/step_seconds"} <= set(names)
    assert arrays[f"steps:{names.index('train/loss')}"].tolist() == list(range(100))
    judged = {(alert["judged"]["name"], alert["judged"]["scope"]) for alert in embedded["overview"]["alerts"]}
    assert judged <= {(series["name"], series["scope"]) for series in header["series"]}


def test_a_report_of_a_large_model_is_smaller_than_2_mb(tmp_path: Path, built: Path) -> None:
    scopes = tuple(f"blocks.{number}.a_rather_long_name_of_a_module.weight" for number in range(3000))
    parameters = {scope: ParameterInfo((2, 2), "Linear.weight", "float32", 0, True) for scope in scopes}
    writer = RunWriter(
        tmp_path / "run", info=dataclasses.replace(INFO, parameters=parameters), config=Config().to_dict()
    )
    random = np.random.default_rng(0)
    for step in range(120):
        names = ("gradient/norm", "update/ratio", "weight/norm", "activation/abs_max")
        writer.append(step, [Block(step, 0.0, name, scopes, random.random(3000, np.float32)) for name in names])
        writer.flush()
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert len(html_report(run).encode()) <= MOST_BYTES
        assert len(json.dumps(json_report(run), indent=2)) <= MOST_TEXT_BYTES


def test_without_the_page_there_is_no_report(root: Path, built: Path) -> None:
    (built / "page.js").unlink()
    with open_run(root / "faulty") as run, pytest.raises(NotBuiltError, match="make page"):
        html_report(run)


def test_text_reports_are_bounded_however_many_alerts_and_settings_there_are(tmp_path: Path) -> None:
    many = tuple(alert("G103", f"blocks.{number}.{'long' * 50}") for number in range(500))
    settings = {f"setting_{number}": "value" * 50 for number in range(300)}
    info = dataclasses.replace(INFO, hyperparameters=settings)
    with open_run(written(tmp_path / "run", alerts=many, info=info)) as run:
        plain = json_report(run)
        assert len(json.dumps(plain, indent=2)) <= MOST_TEXT_BYTES
        assert plain["alerts"][0]["num_places"] == 500
        assert len(markdown_report(run).encode()) <= MOST_TEXT_BYTES


def test_markdown_shows_names_as_they_are(root: Path) -> None:
    with open_run(root / "faulty") as run:
        text = markdown_report(run)
    assert HOSTILE not in text
    assert "\\<img src=x onerror=alert(1)\\>" in text
    assert text.startswith("# faulty: warnings\n")
    assert "1. **Lower the learning rate from 0.0003 to 0.00015.** Smaller steps keep the loss low." in text


def test_a_notebook_embeds_the_page_in_a_frame_of_its_own(root: Path, built: Path) -> None:
    with open_run(root / "faulty") as run:
        shown = run.dashboard(height=500)._repr_html_()
        expected = html_report(run)
    ((tag, attributes),) = Elements(shown).tags
    assert tag == "iframe"
    assert attributes["sandbox"] == "allow-scripts allow-downloads"
    assert "height: 500px" in str(attributes["style"])
    assert html.unescape(str(attributes["srcdoc"])) == expected
    assert not re.search(r"<script", shown)
