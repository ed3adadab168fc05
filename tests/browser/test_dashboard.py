"""The dashboard in a real browser, on real runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forewarn
from forewarn.config import Config
from forewarn.store import RunWriter
from forewarn.types import Block, RunInfo
from tests.browser.conftest import FAULT, HOSTILE, Server, Training, Visitor

PICTURES = Path(__file__).parents[2] / "build" / "browser"
SIZES = ((1440, 1800), (1024, 1600), (390, 2400))


def wait_for_text(page: Any, selector: str, words: str) -> None:
    script = "([selector, words]) => document.querySelector(selector)?.innerText.includes(words)"
    page.wait_for_function(script, arg=[selector, words])


def wait_for_count(page: Any, selector: str, least: int, most: int | None = None) -> None:
    """The page draws with the next frame: what follows from a click is not there at once."""
    script = "([selector, least, most]) => (n => n >= least && n <= most)(document.querySelectorAll(selector).length)"
    page.wait_for_function(script, arg=[selector, least, least if most is None else most])


def wait_for_link(page: Any, words: str) -> None:
    page.wait_for_function("words => location.hash.includes(words)", arg=words)


def middle_of_row(page: Any, label_row: int, share: float) -> tuple[float, float]:
    """A place on the map, which has been drawn and stands still: the n-th row, at a share of its steps."""
    chart, box, before = page.locator("#where .depth .chart").first, None, {}
    chart.scroll_into_view_if_needed()
    wait_for_text(page, "#where", "or less")
    while box != before:
        page.wait_for_timeout(300)
        before, box = box, chart.bounding_box()
    left, right, top, height = box["x"] + 186, box["x"] + box["width"] - 6, box["y"] + 2, 15.5
    return left + share * (right - left), top + (label_row + 0.5) * height


def test_a_live_run_updates_the_page(visit: Visitor, runs: Path) -> None:
    training = Training(runs / "live")
    training.steps(12)
    page = visit.open("#run=live")
    wait_for_text(page, ".strip .at", "step 11")
    training.steps(13)
    wait_for_text(page, ".strip .at", "step 24")
    wait_for_text(page, ".status", "Live · step 24")
    wait_for_count(page, ".vitals .u-over", 4, 99)
    page.hover(".vitals .u-over >> nth=0")
    wait_for_text(page, ".status", "Following paused")
    training.close()


def test_a_new_alert_stands_in_the_verdict_and_moves_nothing_until_asked(visit: Visitor, runs: Path) -> None:
    training = Training(runs / "breaks")
    training.steps(FAULT)
    page = visit.open("#run=breaks")
    wait_for_text(page, ".verdict", "Healthy")
    training.break_it()
    training.steps(40)
    wait_for_text(page, ".verdict", f"New at step {FAULT}")
    assert page.locator(".course").count() == 0
    page.click("text=Show it")
    wait_for_count(page, ".course", 1)
    wait_for_text(page, ".verdict", f"since step {FAULT}")
    training.close()


def test_a_click_on_an_alert_opens_its_card(visit: Visitor) -> None:
    page = visit.open("#run=faulty")
    page.click(".marks button >> nth=0")
    wait_for_text(page, ".entry .card", "What to do")
    wait_for_link(page, "alert=U104")
    wait_for_count(page, ".card canvas", 1)
    page.click(".row.cause")
    wait_for_count(page, ".card", 0)


def test_what_the_policy_did_stands_on_the_loss_and_in_a_list_with_its_outcome(visit: Visitor, runs: Path) -> None:
    with forewarn.open_run(runs / "saved") as run:
        actions = run.actions()
    assert actions[0].action == "lower_lr"
    page = visit.open("#run=saved")
    wait_for_text(page, "#actions", "Lowered the learning rate from 0.5 to 0.003, because of U104")
    assert page.locator("#actions li").count() == len(actions)
    assert "resolved" in page.locator("#actions li small").first.inner_text()
    wait_for_count(page, ".marks .deed", 1, len(actions))
    mark = page.locator(".marks .deed").first
    assert f"step {FAULT}: Lowered the learning rate" in mark.get_attribute("title")
    left, plot = mark.bounding_box(), page.locator("#loss .u-over").bounding_box()
    middle = left["x"] + left["width"] / 2
    shown = plot["x"] + FAULT / (60 + FAULT - 1) * plot["width"]
    assert middle == pytest.approx(shown, abs=3)
    page.click("#actions li button >> nth=0")
    wait_for_text(page, ".strip .at", f"step {FAULT}")
    phone = visit.open("#run=saved", 390, 844)
    wait_for_count(phone, ".marks .deed", 1, len(actions))
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    quiet = visit.open("#run=faulty")
    wait_for_count(quiet, ".marks button", 1, 99)
    assert not quiet.locator("#actions").is_visible()
    assert not quiet.locator(".deed").count()


def test_hovering_over_the_map_shows_the_stored_value(visit: Visitor, runs: Path) -> None:
    page = visit.open("#run=faulty&metric=gradient%2Fnorm&zoom=all")
    page.mouse.move(*middle_of_row(page, 1, 0.5))
    wait_for_text(page, "#where .panel.plain output", "step")
    scope, step, value = page.locator("#where .panel.plain output").first.inner_text().split(" · ")
    assert scope == "middle.weight"
    series = forewarn.open_run(runs / "faulty").series("gradient/norm", scope)
    stored = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))[int(step.removeprefix("step "))]
    assert float(value) == pytest.approx(stored, rel=5e-3)


def test_a_click_on_a_row_opens_the_layer(visit: Visitor) -> None:
    page = visit.open("#run=faulty")
    page.mouse.click(*middle_of_row(page, 1, 0.5))
    wait_for_text(page, ".drawer", "16 × 16 values")
    page.keyboard.press("ArrowDown")
    wait_for_text(page, ".drawer h2", "last.weight")
    page.keyboard.press("Escape")
    wait_for_count(page, ".drawer", 0)


def test_dragging_zooms_every_chart_and_a_double_click_shows_the_whole_run(visit: Visitor) -> None:
    page = visit.open("#run=healthy")
    box = page.locator(".vitals .u-over").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.25 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], middle, steps=5)
    page.mouse.up()
    wait_for_link(page, "zoom=25-74")
    page.wait_for_function("() => !document.querySelectorAll('.controls button')[1].disabled")
    page.mouse.dblclick(box["x"] + box["width"] / 2, middle)
    wait_for_link(page, "zoom=all")


def test_the_window_moves_with_the_keys_and_by_dragging_it(visit: Visitor) -> None:
    page = visit.open("#run=healthy&zoom=20-40")
    wait_for_count(page, ".vitals .u-over", 4, 99)
    page.keyboard.press("Shift+ArrowRight")
    wait_for_link(page, "zoom=25-45")
    box = page.locator(".strip .u-over").bounding_box()
    middle, pixels = box["y"] + box["height"] / 2, box["width"] / 99
    page.mouse.move(box["x"] + 35 * pixels, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 55 * pixels, middle, steps=5)
    page.mouse.up()
    page.wait_for_function("() => /zoom=4[4-6]-6[4-6]/.test(location.hash)")


def test_lines_are_smoothed_and_the_raw_ones_stay(visit: Visitor) -> None:
    page = visit.open("#run=healthy")
    wait_for_count(page, ".vitals .u-over", 4, 99)
    page.select_option("[aria-label='Smoothing of all lines']", "8")
    wait_for_link(page, "smooth=8")
    for _ in range(4):
        page.keyboard.press("s")
    page.wait_for_function("() => !location.hash.includes('smooth')")


def test_any_recorded_series_can_be_found_and_copied(visit: Visitor, runs: Path) -> None:
    page = visit.open("#run=faulty")
    page.click("text=Any series")
    page.click(".any .chip >> text=/^gradient.mean$/")
    wait_for_link(page, "find=")
    wait_for_text(page, ".any .values", "middle.weight")
    page.hover(".any .grid .panel >> nth=0")
    page.click(".any .grid .panel >> nth=0 >> text=CSV")
    wait_for_text(page, ".toast", "copied as CSV")
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    series = forewarn.open_run(runs / "faulty").series("gradient/mean", "middle.weight")
    copied = [line.split(",") for line in lines if ",middle.weight," in line]
    assert [int(step) for _, _, step, _ in copied] == series.steps.tolist()
    assert [float(value) for *_, value in copied] == pytest.approx(series.values.tolist(), nan_ok=True)
    other = visit.open(page.url.removeprefix(visit.server.address))
    wait_for_text(other, ".any .values", "middle.weight")


def test_runs_are_compared_over_time(visit: Visitor, runs: Path) -> None:
    page = visit.open("#view=compare&run=healthy&run=faulty")
    wait_for_count(page, ".compare .u-over", 4, 99)
    page.click("text=Time")
    wait_for_link(page, "axis=time")
    series = forewarn.open_run(runs / "faulty").series("train/loss")
    wait_for_text(page, ".compare .values", f"{series.values[-1]:.2}"[:4])
    page.click("text=Steps")
    page.wait_for_function("() => !location.hash.includes('axis')")


def test_runs_are_found_and_compared(visit: Visitor) -> None:
    page = visit.open("#view=runs")
    page.fill("input[type=search]", "healthy|faulty")
    page.wait_for_function("() => document.querySelectorAll('.runs tbody tr').length === 2")
    for name in ("healthy", "faulty"):
        page.check(f"[aria-label='Choose {name}']")
    page.click("text=Compare 2 chosen")
    page.wait_for_selector(".compare #alerts")
    wait_for_text(page, "#alerts", "step 60")
    wait_for_text(page, "#alerts", "none")
    wait_for_count(page, ".compare .u-over", 4, 99)
    wait_for_link(page, "view=compare")


def test_tags_and_notes_are_kept(visit: Visitor) -> None:
    page = visit.open("#view=runs")
    page.fill("input[type=search]", "many")
    page.click("text=add a note")
    page.fill("[aria-label=Tags]", "wide, <b>bold</b>")
    page.fill("[aria-label=Note]", "a note")
    page.click('button:text("Save")')
    wait_for_text(page, ".runs tbody", "<b>bold</b>")
    page.reload()
    wait_for_text(page, ".runs tbody", "a note")


def test_a_link_shows_a_colleague_the_same(visit: Visitor) -> None:
    link = "#run=faulty&step=75&zoom=50-90&alert=U104%40&layer=middle.weight&metric=weight%2Fnorm&theme=dark"
    page = visit.open(link)
    wait_for_text(page, ".strip .at", "step 75")
    page.wait_for_selector(".drawer")
    page.wait_for_selector(".card")
    wait_for_count(page, "html[data-theme=dark]", 1)
    page.locator("#where").scroll_into_view_if_needed()
    page.wait_for_selector("[data-metric='weight/norm'][aria-pressed=true]")
    page.keyboard.press("c")
    wait_for_text(page, ".toast", "Link copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    other = visit.open(copied.removeprefix(visit.server.address))
    wait_for_text(other, ".strip .at", "step 75")


def test_keys_do_what_the_help_says(visit: Visitor, runs: Path) -> None:
    page = visit.open("#run=faulty")
    page.wait_for_selector(".course canvas")
    page.keyboard.press("?")
    page.wait_for_selector("dialog")
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    wait_for_link(page, "zoom=all")
    page.keyboard.press("z")
    wait_for_link(page, f"step={FAULT}")
    page.locator("#where").scroll_into_view_if_needed()
    wait_for_text(page, "#where", "or less")  # the map is there, and with it the steps that were measured
    page.keyboard.press("ArrowRight")
    measured = forewarn.open_run(runs / "faulty").series("gradient/norm", "first.weight").steps.tolist()
    wait_for_text(page, ".strip .at", f"step {min(step for step in measured if step > FAULT)}")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    wait_for_text(page, ".strip .at", f"step {max(step for step in measured if step < FAULT)}")
    page.keyboard.press("w")
    page.wait_for_selector("[data-metric='weight/norm'][aria-pressed=true]")
    page.keyboard.press("t")
    wait_for_count(page, "html[data-theme=dark]", 1)
    page.focus("#where .depth .chart >> nth=0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    wait_for_text(page, ".drawer h2", "first.weight")
    page.keyboard.press("2")
    page.wait_for_selector(".runs")


def test_a_hostile_name_stays_text(visit: Visitor) -> None:
    page = visit.open("#run=hostile&layer=" + HOSTILE.replace("=", "%3D") + ".weight")
    wait_for_text(page, ".drawer h2", HOSTILE)
    page.click("text=Look closer")
    page.locator("#where").scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_the_page_recovers_when_the_server_comes_back(browser: Any, tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    training.steps(12)
    server = Server(tmp_path)
    server.start()
    visitor = Visitor(browser, server)
    page = visitor.open("#run=run")
    wait_for_text(page, ".strip .at", "step 11")
    server.kill()
    wait_for_text(page, ".status", "Disconnected")
    training.steps(8)
    assert page.locator(".vitals canvas").count() >= 4, "the picture stays"
    server.start()
    wait_for_text(page, ".strip .at", "step 19")
    wait_for_text(page, ".status", "Live")
    visitor.close()
    server.kill()
    training.close()


def test_a_panel_shows_the_step_time_of_each_rank_and_names_the_slow_one(visit: Visitor, runs: Path) -> None:
    scopes = tuple(f"rank_{rank}" for rank in range(3))
    writer = RunWriter(runs / "ranks", info=RunInfo(), config=Config().to_dict())
    for step in range(12):
        times = {"step": (1.0, 1.0, 1.0), "data": (0.1, 0.1 + 0.8 * (step > 6), 0.1), "forward": (0.2, 0.2, 0.2)}
        readings = {f"rank/{phase}_seconds": values for phase, values in (times | {"update": (0.1,) * 3}).items()}
        blocks = [Block(step, 1.7e9 + step, name, scopes, np.array(values)) for name, values in readings.items()]
        writer.append(step, [*blocks, Block(step, 1.7e9 + step, "train/loss", ("",), np.array([2.0 - step / 10]))])
    writer.close()
    page = visit.open("#run=ranks")
    page.locator("#ranks").scroll_into_view_if_needed()
    wait_for_text(page, "#ranks .panel:first-of-type .sub", "All ranks wait for rank 1")
    wait_for_text(page, "#ranks", "rank_2")
    page.wait_for_function("() => document.querySelectorAll('#ranks canvas').length === 4")


def test_a_panel_shows_where_the_time_of_a_step_goes(visit: Visitor, runs: Path) -> None:
    page, panel = visit.open("#run=healthy"), "#speed [aria-label='Step time by phase']"
    page.click("text=Look closer")
    page.locator("#speed").scroll_into_view_if_needed()
    wait_for_text(page, f"{panel} .sub", "forward")
    colours = """selector => {
        const canvas = document.querySelector(`${selector} canvas`);
        const pixels = canvas?.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data ?? [];
        const counts = new Map();
        for (let i = 0; i < pixels.length; i += 4) {
            const colour = pixels.slice(i, i + 3).join();
            if (pixels[i + 3] === 255) counts.set(colour, (counts.get(colour) ?? 0) + 1);
        }
        return [...counts.values()].filter((count) => count > 200).length >= 4;
    }"""
    page.wait_for_function(colours, arg=panel)
    page.hover(panel)
    page.click(f"{panel} >> text=CSV")
    page.wait_for_function("async () => (await navigator.clipboard.readText()).includes('speed/phase_seconds')")
    lines = page.evaluate("() => navigator.clipboard.readText()").splitlines()[1:]
    copied = {(scope, int(step)): float(value) for _, scope, step, value in (line.split(",") for line in lines)}
    with forewarn.open_run(runs / "healthy") as run:
        series = run.series("speed/phase_seconds", "backward")
    assert {step for scope, step in copied if scope == "backward"} == set(series.steps.tolist())
    assert copied["backward", int(series.steps[-1])] == pytest.approx(float(series.values[-1]), rel=1e-6)


def test_a_run_with_thousands_of_series_is_one_map(visit: Visitor, runs: Path) -> None:
    run = forewarn.open_run(runs / "many")
    assert sum(len(run.scopes(name)) for name in run.names()) > 5000
    page = visit.open("#run=many")
    if page.locator("text=Look closer").count():
        page.click("text=Look closer")
    page.locator("#where").scroll_into_view_if_needed()
    wait_for_text(page, "#where", "or more")
    page.fill("#where input[type=search]", "layer4[0-2]\\.weight")
    page.mouse.move(*middle_of_row(page, 2, 0.5))
    wait_for_text(page, "#where .panel.plain output", "layer42.weight")


@pytest.mark.parametrize("name", ["healthy", "faulty"])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_size_fits_and_is_pictured(visit: Visitor, name: str, theme: str, width: int, height: int) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page = visit.open(f"#run={name}", width, height, theme)
    page.wait_for_timeout(600)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=PICTURES / f"{name}-{width}-{theme}.png")


@pytest.mark.parametrize("view", ["runs", "compare&run=healthy&run=faulty"])
def test_lists_fit_a_phone(visit: Visitor, view: str) -> None:
    page = visit.open(f"#view={view}", 390, 844)
    page.wait_for_timeout(400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("name", ["healthy", "faulty", "saved"])
def test_a_report_opens_offline_and_in_the_frame_of_a_notebook_without_any_request(
    visit: Visitor, runs: Path, tmp_path: Path, name: str
) -> None:
    report = tmp_path / "report.html"
    subprocess.run([sys.executable, "-m", "forewarn", "report", str(runs / name), "-o", str(report)], check=True)
    page = visit.blank(960, 1400)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector("#where")
    page.locator("#where").scroll_into_view_if_needed()
    wait_for_text(page, "#where", "or more")
    wait_for_count(page, ".uplot", 4, 99)
    assert requests == [report.as_uri()]
    verdict = "Healthy" if name == "healthy" else f"since step {FAULT}"
    wait_for_text(page, ".verdict", verdict)
    assert page.locator("#actions").is_visible() == (name == "saved")
    frame = visit.blank(960, 1400)
    frame.set_content('<iframe sandbox="allow-scripts" width="900" height="1200"></iframe>')
    frame.eval_on_selector("iframe", "(frame, text) => (frame.srcdoc = text)", report.read_text())
    frame.frame_locator("iframe").locator(".verdict .sign").last.wait_for()
    frame.frame_locator("iframe").locator(".u-over").first.click()
