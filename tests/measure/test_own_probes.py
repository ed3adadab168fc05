"""Probes of the user's own: refused in a sentence, guarded and ordered like built-in ones, declared for one run."""

import json
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import nn

import forewarn
from forewarn import Cadence, Metric, Pending, Probe, Reading, Reason, Reduce, Scope
from forewarn.catalogue import Catalogue
from forewarn.judge.rules import all_rules
from forewarn.measure.probes.stepping import Stepping
from forewarn.metrics import BUILT_IN, catalogue_of, find

SCORE = Metric("taste/score", Scope.RUN, Cadence.EVERY_STEP, "points", Reduce.MEAN, "How it tastes.")
LAYERS = Metric("taste/layer", Scope.MODULE, Cadence.MEASURED, "", Reduce.MEAN, "How a layer tastes.", healthy=(0, 1))


class Taste(Probe):
    """Counts steps, and reads a tensor on measured ones."""

    name = "taste"
    metrics = (SCORE, LAYERS)

    def __init__(self):
        self.steps = 0

    def collect(self, step):
        self.steps += 1
        steps, layers = self.steps, [torch.tensor([0.5, 7.0])] if step.measured else []
        return Pending(layers, lambda arrays: [
            Reading("taste/score", ("",), steps), *(Reading("taste/layer", ("a", "b"), values) for values in arrays)
        ])  # fmt: skip

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def watched(path, *probes, steps=3, state=None, **given):
    """The monitor of a short run with these probes, and the final weights of the model."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = forewarn.watch(model, optimizer, path, views=[], probes=list(probes), **given)
    if state is not None:
        monitor.load_state_dict(state)
    for _ in range(steps):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    return monitor, [parameter.detach().clone() for parameter in model.parameters()]


def test_what_it_records_is_stored_shown_and_described(tmp_path):
    monitor, _ = watched(tmp_path / "run", Taste())
    monitor.close()
    with forewarn.open_run(tmp_path / "run") as run:
        assert run.series("taste/score").values.tolist() == [1, 2, 3]
        assert run.series("taste/layer", "b").values.tolist() == [7, 7, 7]
        assert catalogue_of(run.info).find("taste/layer") == LAYERS
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["facts"]["probe_metrics"]
    assert stored[0] == {
        "name": "taste/score", "scope": "run", "cadence": "every step", "unit": "points", "reduce": "mean",
        "heading": "", "meaning": "How it tastes.", "healthy": None, "words": "", "loggable": False,
    }  # fmt: skip


def test_show_knows_its_unit_without_its_code(tmp_path, capsys):
    from forewarn.cli import main

    watched(tmp_path / "run", Taste())[0].close()
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path / "run")])
    assert "taste     score 3 points" in capsys.readouterr().out


def test_nothing_of_it_is_left_for_the_next_run(tmp_path):
    watched(tmp_path / "first", Taste())[0].close()
    assert find("taste/score") is None
    assert "taste" not in BUILT_IN.families
    monitor, _ = watched(tmp_path / "second")
    monitor.log("taste/score", 1.0)
    monitor.close()
    assert monitor.info.probe_metrics == ()
    watched(tmp_path / "third", Taste())[0].close()


def test_training_is_bit_identical_with_it(tmp_path):
    _, without = watched(tmp_path / "without")
    _, with_it = watched(tmp_path / "with", Taste())
    assert all(map(torch.equal, without, with_it))


def test_its_family_is_its_own(tmp_path):
    monitor, _ = watched(tmp_path / "run", Taste())
    for name in ("taste/score", "taste/other"):
        with pytest.raises(ValueError, match=f"one of your probes already records '{name}'; log yours under"):
            monitor.log(name, 1.0)
    monitor.log("my/score", 1.0)


def test_it_is_kept_as_long_as_its_declaration_says(tmp_path):
    unjudged = watched(tmp_path / "run", Taste(), steps=2, config={"history_window": 100, "detail_window": 20})[0]
    assert unjudged.history._rings["taste/score"].window == 100
    assert unjudged.history._rings["taste/layer"].window == 8


def test_its_state_survives_a_resume(tmp_path):
    monitor, _ = watched(tmp_path / "run", Taste())
    state = monitor.state_dict()
    monitor.close()
    again, _ = watched(tmp_path / "run", Taste(), state=state, resume=True)
    assert again.history.series("taste/score").values.tolist() == [1, 2, 3, 4, 5, 6]


def test_the_metrics_of_the_earlier_part_of_a_resumed_run_stay_described(tmp_path):
    watched(tmp_path / "run", Taste())[0].close()
    watched(tmp_path / "run", resume=True)[0].close()
    with forewarn.open_run(tmp_path / "run") as run:
        assert catalogue_of(run.info).find("taste/score") == SCORE


@dataclass(frozen=True)
class Salt:
    grams: float


class Salting(Probe):
    name = "salting"
    metrics = ()
    provides = (Salt,)

    def before_update(self, at, optimizer, step, closure):
        step.provide(Salt(3.0))


class Salty(Probe):
    name = "salty"
    metrics = (Metric("salty/grams", Scope.RUN, Cadence.EVERY_STEP, "g", Reduce.SUM, "How salty it is."),)
    needs = MappingProxyType({Salt: ["salty/grams"]})

    def collect(self, step):
        salt = step.get(Salt)
        return salt and Pending(decode=lambda _: [Reading("salty/grams", ("",), salt.grams)])


def test_the_order_follows_from_what_they_provide_and_need(tmp_path):
    monitor, _ = watched(tmp_path / "run", Salty(), Salting())
    assert monitor.history.series("salty/grams").values.tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match="probe 'salty' needs Salt, which no probe provides"):
        watched(tmp_path / "other", Salty())


def test_it_may_need_what_a_built_in_probe_provides(tmp_path):
    class Steps(Probe):
        name = "steps"
        metrics = (Metric("steps/known", Scope.RUN, Cadence.EVERY_STEP, "", Reduce.SAME, "Whether a fact is there."),)
        needs = MappingProxyType({Stepping: ["steps/known"]})

        def collect(self, step):
            return Pending(decode=lambda _: [Reading("steps/known", ("",), step.get(Stepping) is not None)])

    monitor, _ = watched(tmp_path / "run", Steps())
    assert monitor.history.series("steps/known").values.tolist() == [1, 1, 1]


def test_without_its_provider_it_is_unavailable(tmp_path):
    class Broken(Salting):
        def before_update(self, at, optimizer, step, closure):
            raise OSError("no salt")

    monitor, _ = watched(tmp_path / "run", Salty(), Broken())
    assert {(alert.code, alert.scope) for alert in monitor.alerts} == {("X101", "salting"), ("X103", "salty/grams")}
    assert monitor.history.series("monitor/unavailable", "salty/grams").last == Reason.PROVIDER_FAILED


def records(*readings):
    class Wrong(Taste):
        def collect(self, step):
            return Pending(decode=lambda _: list(readings))

    return Wrong()


class Raises(Taste):
    def collect(self, step):
        raise OSError("no luck")


class Nothing(Taste):
    def collect(self, step):
        return "no Pending"


class WrongReason(Taste):
    def collect(self, step):
        step.unavailable("taste/score", "because")


@pytest.mark.parametrize(
    "probe",
    [
        Raises(), Nothing(), WrongReason(), records(Reading("gradient/norm", ("weight",), 1e9)),
        records(Reading("taste/undeclared", ("",), 1.0)), records(Reading("taste/score", ("a", "b"), 1.0)),
        records(Reading("taste/score", "", 1.0)), records(Reading("taste/score", ("",), "high")), records("no Reading"),
    ],
    ids=["raises", "nothing", "reason", "reserved", "undeclared", "shape", "scopes", "text", "reading"],
)  # fmt: skip
def test_one_that_does_something_wrong_is_switched_off_and_everything_else_goes_on(tmp_path, probe):
    plain, without = watched(tmp_path / "plain")
    monitor, weights = watched(tmp_path / "run", probe)
    assert [(alert.code, alert.scope) for alert in monitor.alerts] == [("X101", "taste")]
    assert all(map(torch.equal, without, weights))
    norms = [one.history.panel("gradient/norm").values.tolist() for one in (plain, monitor)]
    assert norms[0] == norms[1]
    assert len(monitor.history.series("train/loss")) == 3


def named(name, metrics=(), kind="Made"):
    return type(kind, (Probe,), {"name": name, "metrics": metrics})()


@pytest.mark.parametrize(
    ("probes", "sentence"),
    [
        (Taste(), "probes must be a list of probes"),
        ("taste", "probes must be a list of probes, not 'taste'; put it in brackets"),
        ([Taste], "probes must hold instances of subclasses of forewarn.Probe, not <class"),
        ([3], "probes must hold instances of subclasses of forewarn.Probe, not 3"),
        ([named("")], "Made has no name; add one to the class"),
        ([named("loss")], "a probe named 'loss' already exists; give Made another name"),
        ([Taste(), Taste()], "a probe named 'taste' already exists"),
        ([named("a", None)], "Made.metrics must be a list of the forewarn.Metric objects it records, not None"),
        ([named("a", ["a/b"])], "Made.metrics must be a list of the forewarn.Metric"),
        (
            [named("a", [find("gain/mean")])],
            "the monitor itself uses the family 'gain'; choose another, such as a/mean",
        ),
        ([named("a", [SCORE]), named("b", [SCORE])], "the metric 'taste/score' of Made already exists; give it"),
    ],
)  # fmt: skip
def test_what_is_no_probe_is_refused_before_anything_is_made(tmp_path, probes, sentence):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((TypeError, ValueError), match=sentence):
        forewarn.watch(model, optimizer, tmp_path / "run", probes=probes)
    assert not (tmp_path / "run").exists()
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"name": "score"}, "a metric name must be family/quantity, such as 'loader/queue_length', not 'score'"),
        ({"scope": "nothing"}, "scope='nothing' of my/score must be one of 'run', 'model'"),
        ({"cadence": "often"}, "cadence='often' of my/score must be one of 'every step'"),
        ({"healthy": "high"}, "healthy='high' of my/score must be the lowest and the highest value, such as"),
        ({"reduce": "median"}, "reduce='median' of my/score must be one of 'sum', 'mean'"),
    ],
)
def test_a_metric_of_unknown_properties_is_refused(given, sentence):
    plain = {"name": "my/score", "scope": "run", "cadence": "every step", "unit": "", "reduce": "mean", "meaning": "."}
    assert Metric(**plain).scope is Scope.RUN
    with pytest.raises(ValueError, match=sentence):
        Metric(**{**plain, **given})


def test_a_rule_of_ones_own_reads_it_live_and_replayed(tmp_path):
    @forewarn.rule(
        "Z102", "too-tasty", reads=("taste/score",), message="The score is {value}.",
        remedies=(forewarn.advise("add_salt", "Add {grams} g of salt", "it is made up", grams=1),),
    )  # fmt: skip
    def too_tasty(score):
        """Score above a limit.

        ## Why is this bad?
        It is made up.

        ## Example
        fires: 1 2 3
        quiet: 1 1
        """
        return forewarn.finding(forewarn.Severity.WARNING, score.last, 2.0) if score.last > 2 else None

    monitor, _ = watched(tmp_path / "run", Taste(), rules=[too_tasty])
    assert [(alert.code, alert.since) for alert in monitor.alerts] == [("Z102", 2)]
    assert "Z102" not in {rule.code for rule in all_rules()}
    other = Metric("taste/bitter", Scope.RUN, Cadence.EVERY_STEP, "", Reduce.MEAN, "How bitter it is.")
    with pytest.raises(ValueError, match=r"your rule Z102 too-tasty reads taste/score, which no probe records"):
        watched(tmp_path / "other", named("bitter", [other]), rules=[too_tasty])


def test_a_catalogue_refuses_to_declare_a_name_twice():
    with pytest.raises(ValueError, match="the metric 'taste/score' is declared twice"):
        Catalogue([SCORE, LAYERS, SCORE])
