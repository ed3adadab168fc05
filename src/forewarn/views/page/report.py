"""A run in one file: the page with its data inside, or the same in Markdown or JSON."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from forewarn.store import Run
from forewarn.views.page.answers import answer
from forewarn.views.page.built_page import NOT_BUILT, asset
from forewarn.views.page.maps import evenly
from forewarn.views.page.overview import overview
from forewarn.views.page.packing import json_bytes, without_nan

AIM_BYTES = 1_000_000
MOST_BYTES = 2_000_000
MOST_TEXT_BYTES = 64_000
"""Maximum size of a report in Markdown or JSON, so that it fits a comment on a pull request or a prompt."""
MOST_ACTIONS = 20
"""Actions in a report in Markdown or JSON."""
MOST_SCOPES = 8
MOST_BLOCKS = 12
MOST_HISTOGRAMS = 4
RUN_SERIES = (
    "train/loss", "train/loss_ema", "eval/loss", "gradient/global_norm", "weight/global_norm",
    "monitor/update_ratio_median", "gain/mean", "speed/step_seconds", "speed/tokens_per_second",
    "speed/samples_per_second", "system/process_memory_bytes", "system/cuda_allocated_bytes",
    "system/gpu_utilization_share", "monitor/overhead_share",
)  # fmt: skip
SCOPED_SERIES = (
    "train/lr", "task/share", "task/remaining", "task/cosine", "speed/phase_seconds", "rank/step_seconds",
    "rank/data_seconds", "rank/forward_seconds", "rank/update_seconds", "rank/loss",
)  # fmt: skip
MAPS = ("update/ratio", "gradient/norm", "weight/norm", "activation/abs_max", "attention/entropy", "gain/block")


class NotBuiltError(RuntimeError):
    """The files of the page are missing."""


class _Size(NamedTuple):
    """How much of a run goes into a report."""

    points: int
    """Columns of a line, with two points each."""
    columns: int
    """Columns of a map."""
    layers: int
    """Rows of a map, evenly spaced if the model has more, and those with alerts."""


SIZES = (_Size(1000, 400, 1000), _Size(500, 200, 500), _Size(250, 120, 300), _Size(120, 60, 150), _Size(60, 30, 60))


def html_report(run: Run) -> str:
    """The page with everything inside: it opens without a server and loads nothing."""
    page, style, script = (asset(name) for name in ("index.html", "page.css", "page.js"))
    if page is None or style is None or script is None:
        raise NotBuiltError(NOT_BUILT)
    name = run.path.name
    whole = overview(run, name)
    frame = len(page) + len(style) + len(script)
    for size in SIZES:
        plain, requests = _trimmed(whole, size), list(_requests(whole, size))
        blobs = {request: base64.b64encode(answer(run, request)).decode() for request in requests}
        data = _as_script({"overview": plain, "blobs": blobs})
        if frame + len(data) <= AIM_BYTES:
            break
    while blobs and frame + len(data) > MOST_BYTES:
        blobs.popitem()
        data = _as_script({"overview": plain, "blobs": blobs})
    return _inlined(page.decode(), style.decode(), script.decode(), data, f"{name} · forewarn")


def _requests(plain: Mapping[str, Any], size: _Size) -> Iterator[str]:
    """What the page asks for to show a run, most important first."""
    name = quote(plain["run"], safe="")
    recorded = {series["name"]: series["scopes"] for series in plain["series"]}
    lines = [f"{metric}@" for metric in RUN_SERIES if "" in recorded.get(metric, ())]
    lines += [f"{metric}@{scope}" for metric in SCOPED_SERIES for scope in recorded.get(metric, ())[:MOST_SCOPES]]
    blocks = recorded.get("gain/block", ())
    lines += [f"gain/block@{scope}" for scope in blocks] if len(blocks) <= MOST_BLOCKS else []
    judged = [alert["judged"] for alert in plain["alerts"] if alert["judged"]]
    lines = list(dict.fromkeys([*lines, *(f"{series['name']}@{series['scope']}" for series in judged)]))
    wanted = "&".join(f"series={quote(line, safe='')}" for line in lines)
    yield f"/api/series?run={name}&{wanted}&columns={size.points}"
    for metric in MAPS:
        if metric in recorded:
            yield f"/api/map?run={name}&metric={quote(metric, safe='')}&columns={size.columns}&rows={size.layers}"
    for metric, scopes in plain["histograms"].items():
        if metric == "gradient/histogram":
            named = [scope for alert in plain["alerts"] for scope in alert["scopes"] if scope in scopes]
            for scope in list(dict.fromkeys(named or scopes[:1]))[:MOST_HISTOGRAMS]:
                yield (f"/api/histograms?run={name}&metric={quote(metric, safe='')}&scope={quote(scope, safe='')}"
                       f"&columns={min(120, size.columns)}")  # fmt: skip


def _trimmed(plain: Mapping[str, Any], size: _Size) -> dict[str, Any]:
    """The overview without what a report does not show: the scopes of series that are not inside."""
    maps = dict.fromkeys(MAPS)
    series = [
        entry if entry["name"] in maps or len(entry["scopes"]) <= MOST_BLOCKS else {**entry, "scopes": []}
        for entry in plain["series"]
    ]
    series = [{**entry, "scopes": evenly(entry["scopes"], size.layers)} for entry in series]
    named = {scope for alert in plain["alerts"] for scope in alert["scopes"]}
    kept = set(evenly([layer["scope"] for layer in plain["layers"]], size.layers)) | named
    layers = [layer for layer in plain["layers"] if layer["scope"] in kept]
    histograms = {metric: evenly(scopes, size.layers) for metric, scopes in plain["histograms"].items()}
    return {**plain, "series": series, "layers": layers, "histograms": histograms}


def _as_script(value: Any) -> str:
    """JSON that a script element can hold, whatever names are in it."""
    return json_bytes(value).decode().replace("<", "\\u003c")


def _inlined(page: str, style: str, script: str, data: str, title: str) -> str:
    """The page with its style, script and data inside, and a policy that allows these alone."""
    script = re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE)
    if "</style" in style.lower():
        raise ValueError("the style of the page would end early")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = re.sub(r"<link[^>]*page\.css[^>]*>\s*", "", page)
    page = re.sub(r"<script[^>]*page\.js[^>]*>\s*</script>\s*", "", page)
    page = re.sub(r"<title>.*?</title>", lambda _: f"<title>{html.escape(title)}</title>", page, flags=re.DOTALL)
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace("<head>", f"<head>\n{head}", 1).replace("</head>", f"<style>{style}</style>\n</head>", 1)
    embedded = f'<script type="application/json" id="embedded">{data}</script>\n<script type="module">{script}</script>'
    before, _, after = page.rpartition("</body>")
    return f"{before}{embedded}\n</body>{after}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class EmbeddedPage:
    """A report inside a notebook."""

    def __init__(self, page: str, height: int) -> None:
        self._page, self._height = page, height

    def _repr_html_(self) -> str:
        """The page in a frame of its own, which can reach neither the notebook nor the network."""
        style = f"width: 100%; height: {int(self._height)}px; border: 0"
        sandbox = "allow-scripts allow-downloads"
        return f'<iframe sandbox="{sandbox}" style="{style}" srcdoc="{html.escape(self._page, quote=True)}"></iframe>'


def json_report(run: Run) -> dict[str, Any]:
    """The verdict, what to do, the alerts and the facts of a run, at most 64 KB as JSON."""
    plain = overview(run, run.path.name)
    kept = (
        "path",
        "words",
        "state",
        "verdict",
        "remedies",
        "alerts",
        "actions",
        "checklist",
        "epochs",
        "config",
        "environment",
        "cost",
    )
    report: dict[str, Any] = without_nan({key: plain[key] for key in kept})
    report["epochs"], report["actions"] = report["epochs"][-5:], report["actions"][-MOST_ACTIONS:]
    for most_places, most_alerts, most_settings in ((20, 40, 200), (5, 20, 100), (2, 8, 40), (1, 3, 10)):
        alerts = [
            {**alert, "places": alert["places"][:most_places], "scopes": alert["scopes"][:most_places],
             "num_places": len(alert["places"])}
            for alert in report["alerts"][:most_alerts]
        ]  # fmt: skip
        config = dict(list(report["config"].items())[:most_settings])
        bounded = {**report, "alerts": alerts, "num_alerts": len(report["alerts"]), "config": config}
        if len(json.dumps(bounded, indent=2)) <= MOST_TEXT_BYTES:
            break
    return bounded


def markdown_report(run: Run) -> str:
    """The same for a pull request."""
    plain = json_report(run)
    verdict, state = plain["verdict"], plain["state"]
    lines = [f"# {_text(run.path.name)}: {_text(verdict['word'])}", ""]
    lines += [f"{_text(plain['words'])} · {_text(state['sentence'])}. {_text(verdict['sentence'])}.", ""]
    if verdict["headline"]:
        lines += [f"**{_text(verdict['headline'])}** ({_text(verdict['name'])}, since step {verdict['since']})", ""]
        lines += [f"{_text(part)}\n" for part in (verdict["numbers"], verdict["cause"], verdict["followed"]) if part]
    if plain["remedies"]:
        lines += ["## What to do", ""]
        lines += [f"{rank}. **{_text(remedy['do'])}.** {_text(remedy['why'])}"
                  for rank, remedy in enumerate(plain["remedies"], 1)]  # fmt: skip
        lines.append("")
    if plain["alerts"]:
        lines += ["## Alerts", "", "| step | severity | what happened | numbers | rule |", "|---|---|---|---|---|"]
        lines += [_alert_line(alert) for alert in plain["alerts"]]
        others = plain["num_alerts"] - len(plain["alerts"])
        lines += ["", *([f"and {others} more kinds of alerts", ""] if others else [])]
    if plain["actions"]:
        lines += ["", "## What the policy did", "", "| step | action | outcome |", "|---|---|---|"]
        lines += [f"| {one['step']} | {_text(one['words'])} | {_text(one['outcome'])} |" for one in plain["actions"]]
        lines.append("")
    lines += ["## Health checks", "", "| check | state | |", "|---|---|---|"]
    lines += [
        f"| {_text(check['name'])} | {check['state']} | {_text(check['detail'])} |" for check in plain["checklist"]
    ]
    if plain["epochs"]:
        lines += ["", "## Last epochs", "", *(f"- {_text(epoch['words'])}" for epoch in plain["epochs"])]
    facts = {**plain["config"], **plain["environment"]}
    lines += ["", "## Settings", "", "| | |", "|---|---|"]
    lines += [f"| {_text(str(key))} | {_text(str(value))} |" for key, value in facts.items()]
    lines += ["", _text(plain["cost"]["sentence"])] if plain["cost"] else []
    text = "\n".join(lines).rstrip() + "\n"
    return text if len(text.encode()) <= MOST_TEXT_BYTES else _cut(text)


def _alert_line(alert: Mapping[str, Any]) -> str:
    state = "" if alert["state"] == "firing" else ", resolved"
    indent = "↳ " if alert["is_symptom"] else ""
    return (
        f"| {alert['fired']} | {alert['severity']}{state} | {indent}{_text(alert['headline'])} "
        f"| {_text(alert['numbers'])} | {_text(alert['name'])} {_text(alert['code'])} |"
    )


def _cut(text: str) -> str:
    end = "\n\n(cut: the report was too long)\n"
    kept = text.encode()[: MOST_TEXT_BYTES - len(end.encode())].decode(errors="ignore")
    return kept.rpartition("\n")[0] + end


def _text(words: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", words)
