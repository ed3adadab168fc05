"""The catalogue of metrics: everything that is recorded is in it, everything in it is recorded, and no name is free."""

import ast
import contextlib
import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional

import forewarn
from forewarn.catalogue import Cadence, Metric, Reduce, Scope
from forewarn.cli import cli
from forewarn.judge.registry import rule
from forewarn.judge.remedies import advise
from forewarn.judge.rules import all_rules
from forewarn.measure.budget import DECIDED_EVERY
from forewarn.measure.metric_kinds import ModuleMetric
from forewarn.measure.probes.system import SystemProbe
from forewarn.metrics import (
    FAMILIES,
    all_metrics,
    find,
    is_reserved,
    label,
    unknown,
    with_tables,
)
from forewarn.types import is_metric_name
from forewarn.views.bands import UPDATE_RATIO
from forewarn.views.tensorboard import TensorBoardView
from tests.measure.probes.test_system import FakeCuda

SOURCE = Path(forewarn.__file__).parent
DOCS = Path(__file__).parent.parent / "docs"
NOT_A_READING = {"monitor/rule_failed"}
"""The judge makes an alert of it and stores nothing."""

OF_SEVERAL_PROCESSES = {
    "monitor/ranks_unconnected",
    *(metric.name for metric in all_metrics() if metric.family == "rank"),
}
"""Written only by several processes; `tests/measure/test_exchange.py` and `tests/test_rank_faults.py` read them."""

every_metric = pytest.mark.parametrize("metric", all_metrics(), ids=lambda metric: metric.name)


@every_metric
def test_it_is_named_and_explained(metric):
    assert is_metric_name(metric.name.replace("*", "any"))
    assert re.fullmatch(r"\S.*\.", metric.meaning), "one sentence"
    assert isinstance(metric.scope, Scope)
    assert isinstance(metric.cadence, Cadence)
    assert isinstance(metric.reduce, Reduce)
    assert metric.label
    assert find(metric.name) is metric


def test_names_say_the_unit_that_the_catalogue_declares():
    suffixes = {"_seconds": "s", "_bytes": "bytes", "_share": "share", "_fraction": "share", "_count": "count"}
    for metric in all_metrics():
        for suffix, unit in suffixes.items():
            assert not metric.name.endswith(suffix) or metric.unit == unit, metric.name


def test_a_name_that_no_metric_has_belongs_to_the_family_or_to_nobody():
    assert find("train/accuracy") is find("train/*")
    assert find("gain/nothing") is None
    assert find("my/score") is None
    assert label("gradient/norm") == "gradient norm"
    assert label("train/accuracy") == "train/accuracy"


def test_the_bands_of_the_update_ratio_make_up_its_healthy_range():
    bands = UPDATE_RATIO.values()
    assert find("monitor/update_ratio_median").healthy == (min(band.low for band in bands), max(map(max, bands)))


@pytest.mark.parametrize(("value", "healthy"), [(0, True), (1e-5, True), (1e-2, True), (2e-2, False), (-1, False)])
def test_a_healthy_range_has_both_its_ends_in_it(value, healthy):
    assert replace(find("update/ratio"), healthy=(0, 1e-2)).is_healthy(value) is healthy
    assert find("update/ratio").is_healthy(value)


# Reserved names


@pytest.mark.parametrize("metric", [one for one in all_metrics() if not one.loggable], ids=lambda metric: metric.name)
def test_nobody_but_the_monitor_records_under_its_names(metric, small, watch):
    name = metric.name.replace("*", "mine")
    monitor = watch(*small)
    with pytest.raises(
        ValueError, match=r"^the monitor already records '.*'; log yours under another family, such as 'my/"
    ):
        monitor.log(name, 123.0)
    monitor.step(1.0)
    assert 123.0 not in monitor.history.panel(name).values


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"train", "eval"}))
def test_whole_families_are_reserved(family, small, watch):
    with pytest.raises(ValueError, match="the monitor already records"):
        watch(*small).log(f"{family}/something_new", 1.0)


@pytest.mark.parametrize("name", ["lr", "lr_plan", "loss_ema", "loss_level", "clip", "loss_scale"])
def test_a_further_value_of_a_step_can_not_take_the_place_of_the_monitors_own(name, small, watch):
    with pytest.raises(ValueError, match=f"the monitor already records 'train/{name}'"):
        watch(*small).step(1.0, **{name: 3.0})


@pytest.mark.parametrize(
    "name", ["my/score", "eval/bleu", "eval/accuracy", "eval/loss", "train/accuracy", "speed/tokens_per_second"]
)
def test_what_is_the_users_own_is_recorded(name, small, watch):
    monitor = watch(*small)
    assert not is_reserved(name)
    monitor.log(name, 0.5)
    monitor.step(1.0)
    assert monitor.history.series(name).last == 0.5


def test_metrics_of_the_users_own_have_families_of_their_own():
    kinds = {one.kind for one in ModuleMetric.__subclasses__()}
    assert len(kinds) == 5
    assert all(find(f"{kind}_metric/norm").name == f"{kind}_metric/*" for kind in kinds)


# What rules read


def test_every_rule_reads_what_is_in_the_catalogue():
    wanted = {name for rule in all_rules() for name in rule.reads if "*" not in name}
    assert {name for name in wanted if find(name) is None} == set()
    assert unknown(name for rule in all_rules() for name in rule.reads) == []


@pytest.mark.parametrize(("reads", "known"), [("gain/men", False), ("my/score", True), ("train/accuracy", True)])
def test_a_rule_that_reads_what_nobody_records_is_refused(reads, known):
    def made_up(loss, other):
        """Made up.

        ## Why is this bad?
        It is not.

        ## Example
        fires: 1.0
        quiet: 2.0
        """

    declare = rule(
        "L999",
        "made-up",
        reads=("train/loss", reads),
        message="Made up.",
        remedies=(advise("nothing", "Do nothing", ""),),
    )
    if known:
        declare(made_up)
    else:
        with pytest.raises(ValueError, match=r"it reads gain/men, which nothing records: see docs/metrics.md"):
            declare(made_up)


# What is written


class Rich(nn.Module):
    """A little of everything that a probe looks at."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU()) for _ in range(3))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.batch_norm = nn.BatchNorm1d(16)
        self.tanh = nn.Tanh()
        self.router = nn.Linear(16, 4)
        self.frozen = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        x = x + self.attention(x, x, x)[0]
        x = self.tanh(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))
        x = x * self.router(x).softmax(-1).max(-1, keepdim=True)[0] + self.frozen(x)
        return self.head(x)


class Names:
    """A view that keeps the names of all that is shown."""

    def __init__(self):
        self.seen = set()

    def show(self, step, blocks, changed, taken):
        self.seen |= {block.name for block in blocks}

    def show_histograms(self, step, distributions):
        self.seen |= {distribution.name for distribution in distributions}

    def close(self):
        pass


def train_rich(folder, view):
    """Two tasks, micro-batches, a scaler that skips a step, a plan, epochs, a frozen layer, a probe that fails."""
    torch.manual_seed(0)
    model = Rich()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    metrics = [
        forewarn.ActivationMetric("mean"), forewarn.ParameterMetric("mean"), forewarn.GradientMetric("mean"),
        forewarn.ActivationDifferenceMetric("far", lambda a, b: (a - b).norm(), reference=copy.deepcopy(model).eval()),
        forewarn.ParameterDifferenceMetric("norm"),
    ]  # fmt: skip
    config = forewarn.Config(measure=forewarn.Measure(router="router$", plan=forewarn.Plan(total=40, warmup=2)))
    views = [view, TensorBoardView(folder / "tensorboard")]
    monitor = forewarn.watch(
        model, optimizer, folder / "run", every=1, config=config, scaler=scaler, metrics=metrics, views=views
    )
    for step in range(40):
        model.frozen.requires_grad_(step < 20)
        for _ in range(2):
            logits = model(torch.randn(4, 12, 16))
            targets = torch.randint(5, (4 * 12,))
            losses = {
                "a": functional.cross_entropy(logits.flatten(0, 1), targets),
                "b": functional.cross_entropy(2 * logits.flatten(0, 1), targets.flip(0)),
            }
            loss = monitor.combine_losses(losses, shared="head", every=1)
            scaler.scale(loss * (float("inf") if step == 5 else 1.0)).backward()
        scaler.unscale_(optimizer)
        monitor.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 38:
            monitor._probes["system"].collect = None
        monitor.step(loss, mine=1.0, tokens=48, samples=4)
        monitor.log("eval/mine", 1.0)
        if step in (33, 38):
            monitor.end_epoch(val_loss=loss)
    return monitor


def plain_step(model, monitor, *optimizers, **extra):
    loss = model(torch.randn(4, 4)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    monitor.step(loss, **extra)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The names of all that several runs recorded and showed."""
    folder, view = tmp_path_factory.mktemp("runs"), Names()
    train_rich(folder, view).close()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for resume in (False, True):
        with forewarn.watch(model, optimizer, folder / "resumed", views=[view], resume=resume) as monitor:
            plain_step(model, monitor, optimizer)
    with forewarn.watch(model, optimizer, folder / "over budget", every=10, views=[view], budget=1e-9) as monitor:
        for _ in range(DECIDED_EVERY + 1):
            plain_step(model, monitor, optimizer)
    skipping = {"rules": {"gradient-spike": "skip_batch"}, "skip_batch": {"least": 1}}
    with forewarn.watch(model, optimizer, folder / "guarded", views=[view], policy=skipping) as monitor:
        for _ in range(3):
            plain_step(model, monitor, optimizer)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    with forewarn.watch(model, optimizers, folder / "two", views=[view]) as monitor:
        plain_step(model, monitor, *optimizers)
    with contextlib.suppress(ValueError), forewarn.watch(model, optimizer, folder / "failed", views=[view]) as monitor:
        plain_step(model, monitor, optimizer)
        batch = torch.full((4,), float("nan"))
        raise ValueError(batch)
    declared = {"hyperparameters": {"flops_per_token": 100, "peak_flops": 1e12}}
    monitor = forewarn.watch(model, optimizer, folder / "gpu", views=[view], config=declared)
    probe = SystemProbe(torch.device("cuda"), FakeCuda())
    monitor._probes["system"].collect = probe.collect
    for _ in range(3):
        plain_step(model, monitor, optimizer, tokens=4)
        with monitor.pause("eval"):
            monitor._probes["speed"].stalls["data"] = 130.0
    monitor.close("MemoryError")
    view.undelivered = view.unsent = "mail: down"
    (folder / "file").write_text("")
    with forewarn.watch(model, optimizer, folder / "file" / "run", views=[view]) as monitor:
        monitor.snapshot()
        plain_step(model, monitor, optimizer)
    small = ["--width", "16", "--heads", "2", "--depth", "1", "--max-steps", "3", "--result-dir", str(folder / "lm")]
    for arguments in (
        ["train", "lm", *small],
        ["train", "multitask", "--epochs", "1", "--samples", "100", "--result-dir", str(folder / "tasks")],
    ):
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
    for path in folder.rglob("run.json"):
        with forewarn.open_run(path.parent) as run:
            view.seen |= {*run.names(), *run.distributions()}
    topk = (folder / "tensorboard" / "forewarn-topk.json").read_text()
    return view.seen | set(re.findall(r'"(monitor/topk_\w+)": \["', topk))


def unwritten(metrics: tuple[Metric, ...], names: set[str]) -> set[str]:
    """The metrics of which nothing was written; one that stands for a family is written if another name in it is."""
    found = {metric.name for name in names if (metric := find(name))}
    return {metric.name for metric in metrics} - found - NOT_A_READING - OF_SEVERAL_PROCESSES


def test_every_metric_of_the_catalogue_is_written_by_somebody(written):
    assert unwritten(all_metrics(), written) == set()


def test_everything_that_is_written_is_in_the_catalogue(written):
    assert {name for name in written if find(name) is None} == set()


def test_a_metric_that_nobody_writes_is_noticed(written):
    forgotten = replace(find("gain/mean"), name="gain/forgotten")
    assert unwritten((*all_metrics(), forgotten), written) == {"gain/forgotten"}
    assert unwritten(all_metrics(), written - {"gain/mean", "train/mine"}) == {"gain/mean", "train/*"}


# Names in the code and in the documentation


def names_in(source: str) -> set[str]:
    """The string literals of a module that look like a name in a family of the catalogue."""
    literals = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    shape = re.compile(rf"({'|'.join(FAMILIES)})/[a-z0-9_]+")
    return {text for text in literals if isinstance(text, str) and shape.fullmatch(text)}


def test_every_metric_that_the_code_names_is_in_the_catalogue():
    named = {name for path in SOURCE.rglob("*.py") for name in names_in(path.read_text())}
    assert len(named) > 80
    assert {name for name in named if find(name) is None} == set()


def test_a_name_that_is_misspelt_in_the_code_is_noticed():
    assert names_in('Reading("gain/men", ONE, 1.0)') == {"gain/men"}
    assert find("gain/men") is None


def test_the_page_of_metrics_is_up_to_date():
    page = (DOCS / "metrics.md").read_text()
    assert with_tables(page) == page, "run `make docs`"
    assert {metric.name for metric in all_metrics() if f"| `{metric.name}` |" not in page} == set()


def test_a_page_that_is_not_up_to_date_is_noticed():
    page = (DOCS / "metrics.md").read_text()
    assert with_tables(page.replace("| `gain/mean` | model |", "| `gain/men` | run |")) == page
