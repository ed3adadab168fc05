"""Runs in TensorBoard, read back with TensorBoard's own readers."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util.tensor_util import make_ndarray
from torch import nn

import forewarn
from forewarn.types import Action, AlertState, Block, Distribution, FrozenCause
from forewarn.views.tensorboard import MOST_PLACES, TensorBoardView
from forewarn.views.wording import literal
from tests.measure.engine.distributions.made import histogram
from tests.views.made import alert, block

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "html5lib's sanitizer is deprecated", DeprecationWarning)
    from tensorboard.plugin_util import markdown_to_safe_html

AGGREGATES = {
    *(f"monitor/{of}_{which}" for of in ("grad", "update_ratio") for which in ("median", "p95", "min", "max")),
    *(f"monitor/{which}_count" for which in ("vanishing", "exploding", "frozen")),
    "weight/global_norm",
}


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve as (step, value) pairs."""
    found = read(folder)
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def texts(folder: Path, tag: str) -> list[str]:
    return [make_ndarray(each.tensor_proto).item().decode() for each in read(folder).Tensors(tag)]


def settings_in(folder: Path) -> Any:
    """What the tab HPARAMS shows."""
    (content,) = read(folder).PluginTagToContent("hparams").values()
    return HParamsPluginData.FromString(content).session_start_info.hparams


def events(folder: Path) -> list[Event]:
    """All events that hold something, in the order in which the files were made."""
    raw = (each for path in sorted(folder.glob("*tfevents*")) for each in RawEventFileLoader(str(path)).Load())
    return [event for event in map(Event.FromString, raw) if event.HasField("summary")]


def written(folder: Path, *steps: list[Block], **options: Any) -> dict[str, list[tuple[int, float]]]:
    """The curves of a run of these steps."""
    view = TensorBoardView(folder, **options)
    for blocks in steps:
        view.show(blocks[0].step, blocks, [], [])
    view.close()
    return curves(folder)


def measured(step: int, norms: np.ndarray, ratios: np.ndarray, causes: np.ndarray | None = None) -> list[Block]:
    """A measured step of the update monitor for tensors t0, t1, …"""
    scopes = tuple(f"t{at}" for at in range(len(norms)))
    causes = np.zeros(len(norms)) if causes is None else causes
    return [
        block(step, "train/loss", 2.0),
        block(step, "gradient/norm", *norms, scopes=scopes),
        block(step, "gradient/std", *norms, scopes=scopes),
        block(step, "update/ratio", *ratios, scopes=scopes),
        block(step, "update/frozen_cause", *causes, scopes=scopes),
        *(block(step, name, 1.0) for name in sorted(AGGREGATES)),
    ]


def listed(found: dict[str, Any], kind: str) -> set[str]:
    """The tensors that have a top-k tag of a kind."""
    return {tag.removeprefix(f"monitor/topk_{kind}/") for tag in found if tag.startswith(f"monitor/topk_{kind}/")}


def bells(step: int, *scales: float) -> Distribution:
    """Histograms of normal distributions for tensors t0, t1, …"""
    random = np.random.default_rng(step)
    drawn = [histogram(random.normal(0, scale, 1000)) for scale in scales]
    counts, zeros = (np.concatenate(part) for part in zip(*drawn, strict=True))
    return Distribution(step, 0.0, "gradient/histogram", tuple(f"t{at}" for at in range(len(scales))), counts, zeros)


class Page(HTMLParser):
    """The table cells of a page, and how many it has of each kind of element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: Counter[str] = Counter()
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags[tag] += 1
        if tag == "td":
            self.cells.append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "td"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.cells[-1] += data


def test_a_curve_holds_what_was_shown(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=20).astype(np.float32)
    found = written(tmp_path, *([block(step, "train/loss", value)] for step, value in enumerate(values)))
    assert found == {"train/loss": [(step, float(value)) for step, value in enumerate(values)]}


def test_the_average_stands_beside_the_raw_loss(tmp_path: Path) -> None:
    found = written(tmp_path, [block(0, "train/loss", 3.0), block(0, "train/loss_ema", 2.5)])
    assert found == {"train/loss": [(0, 3.0)], "train/loss_ema": [(0, 2.5)]}


def test_a_step_is_one_event_however_much_it_holds(tmp_path: Path) -> None:
    view = TensorBoardView(tmp_path, detail="full")
    for step in range(7):
        view.show(step, measured(step, np.ones(50), np.ones(50)), [alert()], [])
    view.close()
    assert [event.step for event in events(tmp_path)] == list(range(7))


def test_an_event_carries_the_time_of_its_step(tmp_path: Path) -> None:
    written(tmp_path, [Block(3, 1234.5, "train/loss", ("",), np.ones(1, np.float32))])
    assert [event.wall_time for event in events(tmp_path)] == [1234.5]


def test_nan_is_left_out_and_infinity_is_not(tmp_path: Path) -> None:
    values = [1.0, float("nan"), float("inf"), float("-inf")]
    found = written(tmp_path, *([block(step, "train/loss", value)] for step, value in enumerate(values)))
    assert found == {"train/loss": [(0, 1.0), (2, float("inf")), (3, float("-inf"))]}


def test_a_step_without_a_value_writes_nothing(tmp_path: Path) -> None:
    assert written(tmp_path, [block(0, "train/loss", float("nan"))]) == {}
    assert list(tmp_path.iterdir()) == []


def test_housekeeping_that_no_one_looks_at_is_left_out(tmp_path: Path) -> None:
    names = ("update/optimizer_steps", "gradient/residual_norm", "update/skipped", "monitor/overhead_share")
    found = written(tmp_path, [block(0, name, 1.0) for name in names])
    assert set(found) == {"update/skipped", "monitor/overhead_share"}


@pytest.mark.parametrize(("num_groups", "groups"), [(1, [""]), (3, ["0/", "1/", "2/"])])
@pytest.mark.parametrize("quantity", ["lr", "lr_plan"])
@pytest.mark.parametrize("detail", ["aggregates", "full"])
def test_the_learning_rate_names_its_group_only_if_there_are_several(
    tmp_path: Path, num_groups: int, groups: list[str], quantity: str, detail: str
) -> None:
    scopes = tuple(map(str, range(num_groups)))
    found = written(tmp_path, [block(0, f"train/{quantity}", *range(num_groups), scopes=scopes)], detail=detail)
    assert set(found) == {f"train/{group}{quantity}" for group in groups}


def test_scoped_readings_come_with_full_detail_only(tmp_path: Path) -> None:
    scopes = ("blocks.0.attn.weight", "blocks.0.attn.bias")
    step = [block(4, "weight/norm", 1.5, 2.5, scopes=scopes), block(4, "eval/loss", 0.5, 0.25, scopes=("", "held-out"))]
    assert written(tmp_path / "few", step) == {"eval/loss": [(4, 0.5)]}
    assert written(tmp_path / "all", step, detail="full") == {
        "weight/blocks.0.attn.weight/norm": [(4, 1.5)],
        "weight/blocks.0.attn.bias/norm": [(4, 2.5)],
        "eval/loss": [(4, 0.5)],
        "eval/held-out/loss": [(4, 0.25)],
    }


def test_the_update_monitor_adds_at_most_22_tags_whatever_happens(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    steps = []
    for step in range(50):
        norms = 10.0 ** draw.uniform(-6, 6, size=300)  # other tensors lead at every step
        causes = np.where(draw.random(300) < 0.2, draw.integers(2, 10, size=300), 0)
        steps.append(measured(step, norms, 10.0 ** draw.uniform(-9, -2, size=300), causes))
    found = written(tmp_path, *steps)
    assert set(found) - {"train/loss"} >= AGGREGATES
    assert len(found) - 1 == 22
    assert len(listed(found, "grad")) == len(listed(found, "frozen")) == 5


@pytest.mark.parametrize("topk", [0, 1, 2, 7])
def test_topk_bounds_each_list(tmp_path: Path, topk: int) -> None:
    steps = [measured(at, np.roll(10.0 ** np.arange(30), at), np.ones(30), np.full(30, 5)) for at in range(30)]
    found = written(tmp_path, *steps, topk=topk)
    assert len(listed(found, "grad")) == len(listed(found, "frozen")) == topk


def test_a_tensor_with_a_tag_is_written_at_every_measured_step(tmp_path: Path) -> None:
    first, then = np.array([1.0, 9.0, 5.0, 7.0]), np.array([9.0, 1.0, 9.0, float("nan")])
    steps = [measured(step, first if step == 0 else then, np.ones(4)) for step in range(0, 30, 10)]
    found = written(tmp_path, *steps, topk=4)
    assert found["monitor/topk_grad/t1"] == [(0, 9.0), (10, 1.0), (20, 1.0)]
    assert found["monitor/topk_grad/t3"] == [(0, 7.0)], "there is no value where it is NaN"


def test_tags_are_kept_for_gradients_that_explode_later(tmp_path: Path) -> None:
    calm = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, float("nan")])
    jittering, exploded, worse = calm.copy(), calm.copy(), calm.copy()
    jittering[0], exploded[1], worse[2] = 11.9, 12.1, float("inf")
    steps = [measured(step, norms, np.ones(7)) for step, norms in enumerate([calm, jittering, exploded, worse])]
    assert listed(written(tmp_path / "calm", *steps[:2]), "grad") == {"t3", "t4", "t5"}
    found = written(tmp_path / "exploding", *steps)
    assert listed(found, "grad") == {"t3", "t4", "t5", "t1", "t2"}
    assert found["monitor/topk_grad/t2"] == [(3, float("inf"))]


def test_gradients_that_are_all_zero_get_no_tag(tmp_path: Path) -> None:
    found = written(tmp_path, measured(0, np.zeros(9), np.ones(9)), measured(1, np.arange(9.0), np.ones(9)))
    assert listed(found, "grad") == {"t6", "t7", "t8"}


def test_only_weights_that_are_frozen_by_mistake_are_listed_as_frozen(tmp_path: Path) -> None:
    causes = np.array([FrozenCause.MOVING, FrozenCause.ON_PURPOSE, FrozenCause.NOT_IN_OPTIMIZER, FrozenCause.ZERO_LR])
    ratios = np.array([1e-9, 0.0, 1e-9, 0.0])
    found = written(tmp_path, measured(0, np.ones(4), ratios, causes), measured(1, np.ones(4), ratios + 1e-3))
    assert listed(found, "frozen") == {"t2", "t3"}
    assert found["monitor/topk_frozen/t3"] == [(0, 0.0), (1, pytest.approx(1e-3))]


def test_weights_get_their_tags_as_they_freeze(tmp_path: Path) -> None:
    steps = [measured(at, np.ones(9), np.ones(9), np.where(np.arange(9) <= at, 5, 0)) for at in range(9)]
    found = written(tmp_path, *steps, topk=3)
    assert listed(found, "frozen") == {"t0", "t1", "t2"}
    assert [step for step, _ in found["monitor/topk_frozen/t2"]] == list(range(2, 9))


def test_the_stillest_of_those_that_freeze_together_are_listed(tmp_path: Path) -> None:
    ratios = np.array([4e-9, 1e-9, float("nan"), 3e-9, 2e-9])
    found = written(tmp_path, measured(0, np.ones(5), ratios, np.full(5, FrozenCause.ROUNDED_AWAY)), topk=2)
    assert listed(found, "frozen") == {"t1", "t4"}


def test_a_resumed_run_adds_a_file_and_goes_on_with_the_same_tags(tmp_path: Path) -> None:
    norms, early = 10.0 ** np.arange(20), np.repeat([5, 0], 10)
    written(tmp_path, measured(0, norms, np.ones(20), early))
    found = written(tmp_path, measured(1, norms[::-1], np.ones(20), early[::-1]))
    assert len(list(tmp_path.glob("*tfevents*"))) == 2
    assert found["train/loss"] == [(0, 2.0), (1, 2.0)]
    assert found["monitor/topk_grad/t19"] == [(0, np.float32(1e19)), (1, 1.0)]
    assert len(listed(found, "grad")) == len(listed(found, "frozen")) == 5


@pytest.mark.parametrize("content", ["", "{", "[]", '{"monitor/topk_grad": 7}', "null"])
def test_a_memory_of_tags_that_makes_no_sense_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "forewarn-topk.json").write_text(content)
    assert listed(written(tmp_path, measured(0, np.arange(9.0), np.ones(9))), "grad") == {"t6", "t7", "t8"}


HOSTILE = ["a/b", "a\nb", "a b", "../../c", "\ud800", "\x00", "größe.重み", "", "<b>", "a" * 5000, "%2F", "🙂"]


def test_names_with_slashes_or_newlines_stay_one_level_of_their_tag(tmp_path: Path) -> None:
    scopes = tuple(name for name in HOSTILE if name)
    found = written(tmp_path, [block(0, "weight/norm", *range(len(scopes)), scopes=scopes)], detail="full")
    assert len(found) == len(scopes)
    assert {tag.count("/") for tag in found} == {2}
    assert found["weight/größe.重み/norm"] == [(0, scopes.index("größe.重み"))]
    assert all(tag.isprintable() for tag in found)


@settings(max_examples=30, deadline=None)
@given(scopes=st.lists(st.text(st.characters(), min_size=1, max_size=4), min_size=1, max_size=30, unique=True))
def test_different_names_never_share_a_tag(tmp_path_factory: pytest.TempPathFactory, scopes: list[str]) -> None:
    steps = [
        block(0, "weight/norm", *range(len(scopes)), scopes=tuple(scopes)),
        block(0, "gradient/norm", *range(1, len(scopes) + 1), scopes=tuple(scopes)),
    ]
    found = written(tmp_path_factory.mktemp("tags"), steps, detail="full", topk=1)
    assert sorted(found[tag][0][1] for tag in found if tag.startswith("weight/")) == list(range(len(scopes)))
    assert len(found) == 2 * len(scopes) + 1


def test_an_alert_is_text_with_its_numbers_and_what_to_do(tmp_path: Path) -> None:
    view = TensorBoardView(tmp_path)
    told = alert("U102", "blocks.0.in_proj_weight")
    view.show(7, [], [alert(), told], [])
    view.close()
    found = read(tmp_path)
    assert set(found.Tags()["tensors"]) == {"alerts/L102-loss-spike", "alerts/U102-update-ratio-high"}
    assert found.SummaryMetadata("alerts/L102-loss-spike").plugin_data.plugin_name == "text"
    assert texts(tmp_path, "alerts/U102-update-ratio-high") == [
        f"**warning** {told.headline}\n\n"
        "| where | severity | state | since step | numbers |\n"
        "|---|---|---|---|---|\n"
        f"| blocks.0.in_proj_weight | warning | firing | 5 | {told.numbers} |\n\n"
        "1. Lower the learning rate from 0.0003 to 0.00015. Smaller steps keep the loss low.\n"
        "2. Lower the learning rate from 0.0003 to 0.00015. Smaller steps keep the loss low.\n\n"
        "why: forewarn explain update-ratio-high"
    ]


def test_a_thousand_places_are_one_text_that_begins_with_the_worst(tmp_path: Path) -> None:
    view = TensorBoardView(tmp_path)
    view.show(7, [], [alert("U102", f"t{at}", value=4.0 + at) for at in range(1000)], [])
    view.close()
    (text,) = texts(tmp_path, "alerts/U102-update-ratio-high")
    page = Page(markdown_to_safe_html(text))
    assert page.tags["td"] == 5 * MOST_PLACES
    assert page.cells[0] == "t999"
    assert f"and {1000 - MOST_PLACES} more" in text


def test_what_is_resolved_is_told_without_advice_and_what_is_pending_not_at_all(tmp_path: Path) -> None:
    view = TensorBoardView(tmp_path)
    view.show(50, [], [alert(state=AlertState.RESOLVED), alert("G104", state=AlertState.PENDING)], [])
    view.close()
    assert read(tmp_path).Tags()["tensors"] == ["alerts/L102-loss-spike"]
    (text,) = texts(tmp_path, "alerts/L102-loss-spike")
    assert text.startswith("**resolved** The training loss is 3× its usual level\n")
    assert "Lower the learning rate" not in text


def test_actions_are_told(tmp_path: Path) -> None:
    view = TensorBoardView(tmp_path)
    view.show(7, [], [], [Action(7, "L102", "<w>", "lower_lr", {"from": 0.1, "to": 0.05})])
    view.close()
    assert texts(tmp_path, "actions") == [
        "- Lowered the learning rate from 0.1 to 0.05, because of L102 in &#60;w&#62;"
    ]


def assert_shown_literally(folder: Path, names: list[str]) -> None:
    """TensorBoard's own rendering of an alert in each of these places shows their names and nothing else."""
    view = TensorBoardView(folder)
    view.show(7, [], [alert("U102", name) for name in names], [])
    view.close()
    (text,) = texts(folder, "alerts/U102-update-ratio-high")
    page = Page(markdown_to_safe_html(text))
    assert sorted(page.cells[::5]) == sorted(literal(name).strip() for name in names)
    assert set(page.tags) == {"p", "strong", "table", "thead", "tbody", "tr", "th", "td", "ol", "li"}
    assert page.tags["strong"] == 1


def test_a_hostile_name_is_shown_literally(tmp_path: Path) -> None:
    name = "`x` | y\n\n# <script>alert(1)</script> **b** _i_ [l](http://e) &amp; ~~~ \\"
    assert_shown_literally(tmp_path, [name])
    (text,) = texts(tmp_path, "alerts/U102-update-ratio-high")
    assert "<script>" not in text
    assert "`" not in text


@settings(max_examples=30, deadline=None)
@given(names=st.lists(st.text("`|<>&;*_~[]()#!\\\n\t :/a1-+=.\"'$é\x00\ud800", min_size=1, max_size=20), min_size=1, max_size=MOST_PLACES, unique=True))  # fmt: skip  # noqa: E501
def test_no_name_is_markup(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    assert_shown_literally(tmp_path_factory.mktemp("names"), names)


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    view = TensorBoardView(tmp_path)
    view.show(0, [block(0, "train/loss", 1.0)], [], [])
    view.close()
    view.close()
    assert len(list(tmp_path.glob("*tfevents*"))) == 1


def test_a_view_that_shows_nothing_leaves_no_event_file(tmp_path: Path) -> None:
    TensorBoardView(tmp_path / "logs").close()
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        TensorBoardView(tmp_path / "file" / "logs")


def test_wrong_settings_are_an_error_that_says_what_is_meant(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'aggregates' or 'full', not 'all'"):
        TensorBoardView(tmp_path, detail="all")
    with pytest.raises(ValueError, match="at least 0, not -1"):
        TensorBoardView(tmp_path, topk=-1)


def test_without_tensorboard_one_sentence_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        TensorBoardView(tmp_path)
    assert str(caught.value) == "TensorBoardView needs tensorboard: pip install 'forewarn[tensorboard]'"


def test_the_view_imports_neither_torch_nor_tensorboard_until_it_is_made(tmp_path: Path) -> None:
    script = f"""
import sys
from forewarn.views.tensorboard import TensorBoardView
assert "tensorboard" not in sys.modules
TensorBoardView({str(tmp_path)!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_a_watched_run_can_be_read_in_tensorboard(
    tmp_path: Path, watch: Callable[..., forewarn.Monitor], small: tuple[nn.Sequential, torch.optim.Optimizer]
) -> None:
    model, optimizer = small
    frozen = nn.Linear(2, 2)
    model.append(frozen)  # in no optimizer group
    folder = tmp_path / "tensorboard"
    monitor = watch(model, optimizer, run=tmp_path / "run", views=[TensorBoardView(folder)], every=5)
    losses = []
    for step in range(20):
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 12:
            monitor.log("eval/accuracy", 0.75)
        monitor.step(loss)
        losses.append(loss.item())
    monitor.close()
    found = curves(folder)
    assert found["train/loss"] == list(enumerate(losses))
    ema = [losses[0]]
    for value in losses[1:]:
        ema.append(0.99 * ema[-1] + 0.01 * value)
    assert [value for _, value in found["train/loss_ema"]] == pytest.approx(ema, rel=1e-6)
    assert found["train/lr"] == [(step, np.float32(0.1)) for step in range(20)]
    assert found["eval/accuracy"] == [(12, 0.75)]
    assert set(found) >= AGGREGATES | {"gradient/global_norm", "speed/step_seconds"}
    assert listed(found, "frozen") == {"3.weight", "3.bias"}
    assert len(listed(found, "grad")) == 3
    with forewarn.open_run(tmp_path / "run") as run:
        for tag in ("gradient/global_norm", "monitor/grad_max", "weight/global_norm"):
            stored = run.series(tag)
            assert found[tag] == list(zip(stored.steps.tolist(), stored.values.tolist(), strict=True))
    codes = {each.code for each in monitor.alerts}
    assert codes
    told = read(folder).Tags()["tensors"]
    assert {tag.removeprefix("alerts/").split("-")[0] for tag in told if tag.startswith("alerts/")} == codes
    (verdict,) = texts(folder, "verdict")
    assert verdict == "warnings"
    assert settings_in(folder)["lr"].number_value == pytest.approx(0.1)


def histograms(folder: Path, tag: str) -> list[tuple[int, np.ndarray]]:
    """Steps and buckets [left, right, count] as TensorBoard's own histogram plugin would show them."""
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "histograms": 0})
    found.Reload()
    return [
        (each.step, np.column_stack([[each.histogram_value.min, *each.histogram_value.bucket_limit[:-1]],
                                     each.histogram_value.bucket_limit, each.histogram_value.bucket]))
        for each in found.Histograms(tag)
    ]  # fmt: skip


def shown(folder: Path, *distributions: Distribution, **options: Any) -> TensorBoardView:
    view = TensorBoardView(folder, **options)
    for each in distributions:
        view.show_histograms(each.step, [each])
        view.show(each.step, [block(each.step, "train/loss", 1.0)], [], [])
    view.close()
    return view


def test_all_tensors_together_are_one_histogram_with_the_counts_of_its_bins(tmp_path):
    one = bells(3, 1.0, 0.01)
    shown(tmp_path, one)
    [(step, buckets)] = histograms(tmp_path, "gradient/histogram")
    assert step == 3
    random = np.random.default_rng(3)
    values = np.concatenate([random.normal(0, 1.0, 1000), random.normal(0, 0.01, 1000)])
    edges = [*buckets[:, 0], buckets[-1, 1]]
    assert np.array_equal(np.histogram(values, edges)[0], buckets[:, 2])
    assert (np.diff(edges) > 0).all()
    assert len(events(tmp_path)) == 1


def test_each_tensor_has_a_histogram_only_in_full_detail(tmp_path):
    shown(tmp_path / "few", bells(0, 1.0, 2.0))
    shown(tmp_path / "full", bells(0, 1.0, 2.0), detail="full")
    assert read(tmp_path / "few").Tags()["histograms"] == ["gradient/histogram"]
    assert set(read(tmp_path / "full").Tags()["histograms"]) == {
        "gradient/histogram", "gradient/t0/histogram", "gradient/t1/histogram",
    }  # fmt: skip


def test_torch_writes_the_same_histogram(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    shown(tmp_path / "ours", bells(0, 0.5))
    [ours] = [
        value.histo for event in events(tmp_path / "ours") for value in event.summary.value if value.HasField("histo")
    ]
    with SummaryWriter(str(tmp_path / "torch")) as writer:
        writer.add_histogram_raw(
            "gradient/histogram", ours.min, ours.max, int(ours.num), ours.sum, ours.sum_squares,
            list(ours.bucket_limit), list(ours.bucket), global_step=0,
        )  # fmt: skip
    [theirs] = [value.histo for event in events(tmp_path / "torch") for value in event.summary.value]
    assert ours == theirs
    values = np.random.default_rng(0).normal(0, 0.5, 1000)
    assert ours.num == 1000
    assert ours.sum_squares == pytest.approx((values**2).sum(), rel=0.3)


def test_histograms_of_nothing_and_of_zeros_do_no_harm(tmp_path):
    nothing = Distribution(0, 0.0, "gradient/histogram", ("a",), np.zeros((1, 2, 64), np.int64), np.array([0]))
    zeros = Distribution(1, 0.0, "gradient/histogram", ("a",), np.zeros((1, 2, 64), np.int64), np.array([5]))
    shown(tmp_path, nothing, zeros, detail="full")
    [(step, buckets)] = histograms(tmp_path, "gradient/histogram")
    assert step == 1
    assert buckets.tolist() == [[-0.5, 0.5, 5.0]]


def test_a_watched_run_has_histograms_in_tensorboard(tmp_path, watch):
    model = nn.Linear(50, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, views=[TensorBoardView(tmp_path / "events")])
    for _ in range(3):
        loss = model(torch.randn(4, 50)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    monitor.close()
    for name in ("gradient/histogram", "weight/histogram"):
        found = histograms(tmp_path / "events", name)
        assert [step for step, _ in found] == [0, 1, 2]
        assert all(buckets[:, 2].sum() == 50 * 40 + 40 for _, buckets in found)
    assert not monitor.alerts
