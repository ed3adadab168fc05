"""Rules about the gradients."""

import math

import numpy as np
import pytest
import torch

import forewarn
from forewarn.types import AlertState, FrozenCause, ParameterInfo, RunInfo, Severity
from tests.judge.rules.runs import Run, info
from tests.real_runs import Breakable, loss_of, make_mlp

LAYERS = ("first.weight", "second.weight", "last.weight")
KNOWN = info(*LAYERS, vectors=["first.bias"])


def noise(scale, size, seed=0):
    return np.exp(scale * np.random.default_rng(seed).normal(size=size))


def test_a_norm_that_is_no_number_is_critical_on_any_step():
    run = Run("G101").series("gradient/global_norm", [1.0] * 5 + [np.inf])
    assert run.ledger.firing[0].severity is Severity.CRITICAL


def test_the_tensors_are_named_and_the_one_where_it_began():
    run = Run("G101", info=KNOWN)
    bad = {"first.weight": 64.0, "second.weight": 3.0, "last.weight": 0.0}
    run.feed({"gradient/global_norm": np.nan, "gradient/nonfinite": bad})
    by_scope = {alert.scope: alert.finding for alert in run.ledger.firing}
    assert set(by_scope) == {"", "first.weight", "second.weight"}
    assert by_scope[""].evidence == {"num_tensors": 2, "nearest_the_output": "second.weight", "cause": "start"}
    assert by_scope["second.weight"].value == 3


def test_tensors_count_even_where_the_global_norm_is_unavailable():
    run = Run("G101", info=KNOWN)
    run.feed({"gradient/nonfinite": {"last.weight": 2.0}})
    assert [alert.scope for alert in run.ledger.firing] == ["last.weight"]


def test_a_tensor_stays_accused_until_it_is_measured_again():
    run = Run("G101", info=KNOWN)
    run.feed({"gradient/global_norm": np.nan, "gradient/nonfinite": {"last.weight": 2.0}})
    for _ in range(200):
        run.feed({"gradient/global_norm": 1.0})
    assert [alert.scope for alert in run.ledger.firing] == ["last.weight"]
    (resolved,) = run.feed({"gradient/global_norm": 1.0, "gradient/nonfinite": {"last.weight": 0.0}})
    assert resolved.state is AlertState.RESOLVED


@pytest.mark.parametrize(
    ("norms", "fires"),
    [
        (np.logspace(-10, -6, 10), False),  # doubles and more with every step
        (np.logspace(-10, -9.5, 10), True),  # grows, but hardly
        ([1e-9, 5e-8, 2e-8, 1e-8, 1e-8], True),  # grew, and falls again
        ([1e-9] * 10, True),
    ],
)
def test_a_gradient_that_grows_out_of_small_initial_weights_is_not_vanishing(norms, fires):
    run = Run("G103", info=KNOWN)
    for norm in norms:
        run.feed({"gradient/norm": {"first.weight": norm, "last.weight": 0.1}, "train/loss": 2.0})
    assert [alert.scope for alert in run.ledger.alerts] == ["first.weight"] * fires


def test_a_single_overshoot_in_the_first_steps_is_no_explosion():
    assert Run("G102").series("gradient/global_norm", [4.4, 1.3, 126.0, 19.0, 1.8]).ledger.alerts == ()
    assert Run("G102").series("gradient/global_norm", [4.4, 1.3, 126.0, 190.0]).ledger.alerts
    assert Run("G102").series("gradient/global_norm", [4.4, 1.3, 1260.0]).ledger.alerts


def test_an_explosion_names_the_largest_tensor_where_it_was_measured():
    run = Run("G102")
    for _ in range(10):
        run.feed({"gradient/global_norm": 1.0})
    run.feed({"gradient/global_norm": 150.0})
    assert "largest_tensor" not in run.ledger.firing[0].finding.evidence
    (alert,) = run.feed({"gradient/global_norm": 2000.0, "gradient/norm": {"a.weight": 20.0, "b.weight": 1999.0}})
    assert alert.severity is Severity.CRITICAL
    assert alert.finding.evidence["largest_tensor"] == "b.weight"


def test_a_starved_run_must_be_starved_for_three_steps():
    run = Run("G103")
    assert run.series("gradient/global_norm", [1e-4, 1e-4, 1.0, 1e-4, 1e-4]).ledger.alerts == ()
    (alert,) = run.feed({"gradient/global_norm": 1e-4})
    assert (alert.since, alert.fired) == (3, 5)


def test_checks_of_a_tensor_count_and_not_the_steps_between_them():
    run = Run("G103", info=KNOWN)
    for step in range(301):
        readings = {"gradient/global_norm": 1.0, "train/loss": 2.0}
        if step % 100 == 0:
            readings["gradient/norm"] = {"first.weight": 1e-9, "second.weight": 0.1, "first.bias": 1e-9}
        run.feed(readings)
    (alert,) = run.ledger.firing
    assert (alert.scope, alert.since, alert.fired) == ("first.weight", 0, 200)


def test_a_task_that_is_solved_has_small_gradients_and_that_is_no_fault():
    run = Run("G103", info=KNOWN)
    for loss in np.geomspace(2.0, 1e-6, 400):
        tensors = dict.fromkeys(LAYERS, 1e-4 * loss)
        run.feed({"train/loss": loss, "gradient/global_norm": 0.5 * loss, "gradient/norm": tensors})
    assert run.ledger.alerts == ()


@pytest.mark.parametrize(
    ("acts", "policy", "value", "fires"),
    [
        (2.0, 1e-8, 0.01, True),
        (2.0, 1e-6, 0.01, False),  # an almost certain policy
        (2.0, 1e-8, 1e-6, False),  # both have learned their task
        (0.0, 1e-8, 0.01, False),  # a supervised loss that is this small is a success
    ],
)
def test_a_policy_without_a_gradient_beside_a_value_with_one_has_saturated(acts, policy, value, fires):
    run = Run("G103", info=KNOWN)
    for step in range(40):
        norms = {"first.weight": 0.1 if step < 20 else policy, "second.weight": 0.1 if step < 20 else value}
        run.feed({
            "train/loss": 1e-4, "gradient/global_norm": max(norms.values()), "gradient/norm": norms,
            "update/separate_losses": acts or np.nan,
        })  # fmt: skip
    found = [(alert.scope, alert.finding.evidence["cause"]) for alert in run.ledger.alerts]
    assert found == ([("first.weight", "saturated")] if fires else [])


def test_a_gradient_of_exactly_zero_is_another_matter():
    run = Run("G103", info=KNOWN)
    for _ in range(5):
        run.feed({"gradient/norm": {"first.weight": 0.0}})
    assert run.ledger.alerts == ()


@pytest.mark.parametrize(
    ("tall", "clip", "severity"),
    [
        (30.0, 1.0, Severity.INFO),
        (30.0, 20.0, Severity.WARNING),
        (200.0, 1.0, Severity.WARNING),
        (30.0, 0.0, Severity.INFO),
    ],
)
def test_a_spike_of_which_clipping_leaves_little_is_information(tall, clip, severity):
    run = Run("G104")
    for value in [*noise(0.1, 100), tall]:
        run.feed({"gradient/global_norm": float(value), "train/clip": clip})
    assert run.ledger.firing[0].severity is severity


@pytest.mark.parametrize(("height", "severity"), [(0.1, Severity.INFO), (0.5, Severity.WARNING)])
def test_a_spike_of_a_task_that_is_all_but_solved_is_information(height, severity):
    run = Run("G104")
    for value in noise(0.1, 100):
        run.feed({"gradient/global_norm": float(value), "train/loss": 2.0})
    for value in noise(0.1, 100):
        run.feed({"gradient/global_norm": 0.01 * float(value), "train/loss": height})
    run.feed({"gradient/global_norm": 1.0, "train/loss": 2.5 * height})
    assert run.ledger.firing[0].severity is severity


def test_a_gradient_spike_is_information_a_tall_or_lasting_one_a_warning():
    usual = noise(0.1, 100)
    assert Run("G104").series("gradient/global_norm", [*usual, 4.0]).ledger.firing[0].severity is Severity.INFO
    assert Run("G104").series("gradient/global_norm", [*usual, 40.0]).ledger.firing[0].severity is Severity.WARNING
    lasting = Run("G104").series("gradient/global_norm", [*usual, 4.0, 4.0, 4.0])
    assert lasting.ledger.firing[0].severity is Severity.WARNING


@pytest.mark.parametrize(
    "norms",
    [
        pytest.param(noise(0.25, 3000), id="noise"),
        pytest.param(np.geomspace(5, 0.1, 3000) * noise(0.2, 3000), id="falling"),
        pytest.param(np.linspace(0.2, 3, 3000) * noise(0.2, 3000), id="rising slowly"),
        pytest.param((1 + np.cos(np.arange(3000) / 500)) * noise(0.1, 3000) + 0.2, id="cosine"),
        pytest.param(1 + 0.2 * np.abs(np.random.default_rng(0).standard_t(3, size=3000)), id="heavy tails"),
    ],
)
def test_no_gradient_spike_is_loud_in(norms):
    assert Run("G102", "G103", "G104").series("gradient/global_norm", norms).loud() == []


@pytest.mark.parametrize(("norms", "action"), [([math.inf], "check_loss_scale"), ([1.0, 1.0, math.nan], "skip_batch")])
def test_gradients_that_were_never_finite_are_not_blamed_on_a_batch(norms, action):
    (alert,) = Run("G101").series("gradient/global_norm", norms).ledger.firing
    assert alert.remedies[0].action == action


def test_gradients_that_vanish_from_the_first_step_on_are_blamed_on_the_scale_of_the_loss():
    for norms, action in (([1e-9] * 5, "check_loss_scale"), ([1.0] + [1e-9] * 5, "inspect_layer")):
        (alert,) = Run("G103").series("gradient/global_norm", norms).ledger.firing
        assert alert.remedies[0].action == action


def test_an_unused_parameter_is_named_after_three_checks():
    run = Run("G108")
    for _ in range(3):
        assert run.ledger.firing == ()
        run.feed({"gradient/missing": {"used.weight": 0.0, "unused.weight": 1.0}})
    assert [alert.scope for alert in run.ledger.firing] == ["unused.weight"]
    assert "unused.weight" in str(run.ledger.firing[0].remedies[0])


@pytest.mark.parametrize(
    ("ran", "codes", "severity"), [("", ["G108"], Severity.INFO), ("b", ["G108", "U101"], Severity.WARNING)]
)
def test_a_layer_that_is_never_called_is_one_piece_of_information_and_one_that_is_cut_off_is_not(ran, codes, severity):
    known = info(*(f"{layer}.weight" for layer in "abcdef"))
    run = Run("G108", "U101", info=known)
    for _ in range(5):
        idle = {name: float(name == "b.weight") for name in known.parameters}
        causes = {name: float(FrozenCause.NO_GRADIENT) * flag for name, flag in idle.items()}
        outputs = dict.fromkeys("acdef" + ran, 0.1)
        run.feed({"gradient/missing": idle, "update/frozen_cause": causes, "activation/mean": outputs})
    assert {(alert.code, alert.scope, alert.severity) for alert in run.ledger.firing} == {
        (code, "b.weight", severity) for code in codes
    }


def wide_info(**widths):
    held = {
        f"{layer}.weight": ParameterInfo((width, 8), "Linear.weight", "float32", 0, True)
        for layer, width in widths.items()
    }
    return RunInfo(parameters=held)


@pytest.mark.parametrize(
    ("called", "width", "severity"),
    [
        ("a b pooler head", 1, Severity.INFO),
        ("pooler a b head", 1, Severity.WARNING),
        ("a b pooler head", 8, Severity.WARNING),
    ],
)
def test_a_small_head_that_the_loss_does_not_use_is_information_unless_it_comes_first(called, width, severity):
    run = Run("G108", "U101", info=wide_info(a=64, b=64, pooler=width, head=1))
    for _ in range(5):
        idle = {f"{layer}.weight": float(layer == "pooler") for layer in called.split()}
        causes = {name: float(FrozenCause.NO_GRADIENT) * flag for name, flag in idle.items()}
        outputs = dict.fromkeys(called.split(), 0.1)
        run.feed({"gradient/missing": idle, "update/frozen_cause": causes, "activation/mean": outputs})
    assert {alert.severity for alert in run.ledger.firing} == {severity}
    assert {alert.scope for alert in run.ledger.firing} == {"pooler.weight"}


@pytest.mark.parametrize(
    ("order", "severity"), [("a b pooler head", Severity.INFO), ("pooler a b head", Severity.WARNING)]
)
def test_where_no_output_is_seen_the_order_of_the_parameters_tells_a_side_head_from_a_detached_layer(order, severity):
    run = Run("G108", "U101", info=wide_info(a=64, b=64, pooler=1, head=1))
    for _ in range(5):
        idle = {f"{layer}.weight": float(layer == "pooler") for layer in order.split()}
        causes = {name: float(FrozenCause.NO_GRADIENT) * flag for name, flag in idle.items()}
        run.feed({"gradient/missing": idle, "update/frozen_cause": causes})
    assert {alert.severity for alert in run.ledger.firing} == {severity}
    assert "pooler.weight" in run.ledger.firing[0].headline


def test_an_expert_that_lost_its_tokens_is_no_head_that_the_loss_does_not_use():
    run = Run("G108", info=wide_info(a=64, expert=1, b=64))
    for step in range(60):
        ran = {"a": 0.1, "b": 0.1} | ({"expert": 0.1} if step < 3 else {})
        run.feed(
            {
                "gradient/missing": {"a.weight": 0.0, "expert.weight": float(step >= 3), "b.weight": 0.0},
                "activation/mean": ran,
            }
        )
    assert [(alert.scope, alert.severity) for alert in run.ledger.firing] == [("expert.weight", Severity.WARNING)]


@pytest.mark.parametrize(
    ("kind", "severity"), [("Linear.weight", Severity.INFO), ("CosineClassifier.weight", Severity.WARNING)]
)
def test_the_only_layer_of_its_class_is_unused_if_hooks_would_have_seen_it(kind, severity):
    held = {f"conv{index}.weight": ParameterInfo((8, 8), "Conv2d.weight", "float32", 0, True) for index in range(6)}
    run = Run("G108", info=RunInfo(parameters=held | {"fc.weight": ParameterInfo((8, 8), kind, "float32", 0, True)}))
    for _ in range(5):
        outputs = {name.removesuffix(".weight"): 0.1 for name in held}
        run.feed({"gradient/missing": {**dict.fromkeys(held, 0.0), "fc.weight": 1.0}, "activation/mean": outputs})
    assert [(alert.scope, alert.severity) for alert in run.ledger.firing] == [("fc.weight", severity)]


def test_layers_that_are_never_called_are_a_warning_if_they_are_a_large_part_of_the_model():
    run = Run("G108", info=info("a.weight", "b.weight"))
    for _ in range(5):
        run.feed({"gradient/missing": {"a.weight": 0.0, "b.weight": 1.0}, "activation/mean": {"a": 0.1}})
    (alert,) = run.ledger.firing
    assert (alert.severity, alert.headline) == (Severity.WARNING, "The loss does not use b")


def test_an_expert_without_tokens_now_and_then_is_not():
    run = Run("G108")
    for step in range(60):
        run.feed({"gradient/missing": {"expert.weight": float(step % 3 != 0)}})
    assert run.ledger.alerts == ()


def test_a_forgotten_zero_grad_is_named_and_accumulation_is_not():
    run = Run("G109")
    for step in range(4):
        run.feed({"gradient/residual_norm": float(step), "gradient/global_norm": 1.0 + step})
    (alert,) = run.ledger.firing
    assert (alert.since, alert.fired) == (1, 3)
    assert alert.remedies[0].action == "call_zero_grad"
    assert Run("G109").series("gradient/residual_norm", [0.0] * 50).ledger.alerts == ()


def test_a_parameter_without_elements_misses_nothing():
    shapes = {"empty.weight": (0, 4), "unused.weight": (4, 4)}
    known = {scope: ParameterInfo(shape, "Linear.weight", "float32", 0, True) for scope, shape in shapes.items()}
    run = Run("G108", info=RunInfo(parameters=known))
    for _ in range(5):
        run.feed({"gradient/missing": dict.fromkeys(shapes, 1.0)})
    assert [alert.scope for alert in run.ledger.alerts] == ["unused.weight"]


@pytest.mark.parametrize(("steps", "severity"), [(0.0, Severity.INFO), (1.0, Severity.CRITICAL)])
def test_gradients_that_are_not_finite_are_critical_where_the_optimizer_used_them(steps, severity):
    run = Run("G101")
    run.feed({"gradient/global_norm": 1.0, "update/optimizer_steps": 1.0})
    (alert,) = run.feed({"gradient/global_norm": math.nan, "update/optimizer_steps": steps})
    assert alert.severity is severity


@pytest.mark.parametrize(("loss", "severity"), [(2.0, Severity.INFO), (3.4, Severity.INFO), (4.6, Severity.WARNING)])
def test_a_tall_spike_is_a_warning_if_its_loss_doubles_as_well(loss, severity):
    run = Run("G104")
    for norm, level in zip(noise(0.1, 200), noise(0.03, 200, seed=1), strict=True):
        run.feed({"gradient/global_norm": float(norm), "train/loss": 2.0 * float(level)})
    run.feed({"gradient/global_norm": 27.0, "train/loss": loss})
    assert run.ledger.firing[0].severity is severity


@pytest.mark.parametrize("shift", [0.0, 11.0])
def test_a_loss_that_may_be_negative_is_never_all_but_solved(shift):
    run = Run("G104")
    for value, loss in zip(noise(0.1, 200), np.r_[np.linspace(10, -1, 50), np.full(150, -1.0)], strict=True):
        run.feed({"gradient/global_norm": float(value), "train/loss": float(loss) + shift})
    run.feed({"gradient/global_norm": 500.0, "train/loss": -1.0 + shift})
    assert run.ledger.firing[0].severity is Severity.WARNING


def test_a_summed_loss_has_gradients_of_its_own_size():
    run = Run("G102")
    for step in range(60):
        run.feed({"train/loss": 1e4, "gradient/global_norm": 3e3, **({"train/loss_level": 1e4} if not step else {})})
    assert run.ledger.alerts == ()


def test_a_loss_that_explodes_with_its_gradients_does_not_raise_the_limit():
    run = Run("G102")
    for step in range(60):
        run.feed({"train/loss": 2.0 * 1.2**step, "gradient/global_norm": 1.2**step})
    assert run.loud()


def test_a_norm_that_is_usual_for_the_run_has_not_exploded():
    assert Run("G102").series("gradient/global_norm", [60.0 + step for step in range(100)]).ledger.alerts == ()


def test_a_large_gradient_of_the_first_step_alone_is_no_explosion_unless_it_is_critical():
    assert not Run("G102").series("gradient/global_norm", [500.0, 2.0, 2.0]).ledger.alerts
    assert Run("G102").series("gradient/global_norm", [5000.0, 2.0, 2.0]).ledger.alerts


@pytest.mark.parametrize(("quiet", "action"), [(0, "inspect_initialization"), (5, "clip_gradient")])
def test_gradients_that_explode_before_the_first_step_are_no_matter_of_clipping(quiet, action):
    run = Run("G102").series("gradient/global_norm", [1.0] * quiet + [500.0] * 3)
    assert run.ledger.firing[0].remedies[0].action == action


def test_a_clip_that_never_changed_was_there_from_the_first_step():
    run = Run("G112", "G103", info=RunInfo(optimizers=("SGD",), groups=({"lr": 0.1},)))
    for step in range(64):
        clip = {"train/clip": 1e-4} if step > 1 else {}
        level = {"train/loss_level": 2.3} if step % 32 == 31 else {}
        tensors = {"gradient/norm": {"a.weight": 1e-9}} if step < 10 else {}
        run.feed({"gradient/global_norm": 5e-3 if step == 1 else 5.0, **clip, **tensors, **level})
    assert [alert.code for alert in run.ledger.ranked(run.ledger.alerts)] == ["G112", "G103"]


def clipped_fed(clip, optimizers=("SGD",), losses=(2.3, 2.3, 2.3), groups=({"lr": 0.1},)):
    known = RunInfo(optimizers=optimizers, groups=groups, num_parameters=10_000)
    run = Run("G112", info=known)
    for step in range(96):
        level = {"train/loss_level": losses[(step + 1) // 32 - 1]} if step % 32 == 31 else {}
        run.feed({"gradient/global_norm": 5.0, "train/clip": clip, "weight/global_norm": 10.0, **level})
    return [alert.severity for alert in run.ledger.alerts]


def test_clipping_that_is_always_active_is_not_too_tight():
    assert clipped_fed(1.0) == []
    assert clipped_fed(1e-4) == [Severity.WARNING]


def test_a_tight_limit_alone_does_no_harm_to_adam():
    assert clipped_fed(1e-3, ("AdamW",), groups=({"eps": 1e-8},)) == [Severity.INFO]
    assert clipped_fed(1e-5, ("AdamW",), groups=({"eps": 1e-8},)) == [Severity.WARNING]
    assert clipped_fed(1e-3, ("AdamW",), groups=({"weight_decay": 0.01},)) == [Severity.INFO]
    assert clipped_fed(1e-3, ("Adam",), groups=({"weight_decay": 0.01},)) == [Severity.WARNING], "0.01 x 10 is more"


def test_a_tight_limit_is_information_where_the_loss_halves_all_the_same():
    assert clipped_fed(1e-4, losses=(2.3, 1.1, 0.8)) == [Severity.INFO]


def a_limit_of_almost_zero(run):
    it = Breakable(run)
    it.optimizer = torch.optim.SGD(it.model.parameters(), lr=0.05, momentum=0.9)
    it.clip = 1e-4
    return it.train(100)


def changed_run(run, change, *, accumulate=1, steps=12, loss_scale=None, lr=1e-3):
    """A run whose loop does something to the gradients between the backward pass and the optimizer step."""
    torch.manual_seed(0)
    model, batches, _ = make_mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scaler = None if loss_scale is None else torch.amp.GradScaler("cpu", init_scale=loss_scale)
    with forewarn.watch(model, optimizer, run, every=1, views=[]) as monitor:
        for _ in range(steps):
            for _ in range(accumulate):
                loss = loss_of(model, *next(batches))
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            change(model, optimizer)
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad()
            monitor.step(loss)
    return monitor


def each(function):
    """The function, applied to every gradient."""
    return lambda model, _: [parameter.grad.copy_(function(parameter.grad)) for parameter in model.parameters()]


def clipped_the_wrong_way_round(model, _):
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    each(lambda gradient: gradient * norm / 1e-3)(model, _)


def combined(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    each(lambda gradient: gradient * 2000)(model, optimizer)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(each(lambda gradient: gradient * 2000), id="constant factor"),
        pytest.param(each(lambda gradient: gradient.clamp(min=5.0)), id="clip by value with the wrong end"),
        pytest.param(clipped_the_wrong_way_round, id="clip by norm the wrong way round"),
        pytest.param(combined, id="after clipping"),
    ],
)
def test_gradients_that_grow_before_the_step_are_named_with_both_norms(change, tmp_path):
    monitor = changed_run(tmp_path / "run", change, lr=1e-9)
    alert = next(alert for alert in monitor.firing if alert.code == "G113")
    assert alert.severity is Severity.WARNING
    assert alert.finding.value > 100
    assert alert.finding.evidence["before"] < 10
    assert alert.remedies[0].action == "remove_scaling"


def test_the_factor_is_that_of_the_hook(tmp_path):
    monitor = changed_run(tmp_path / "run", each(lambda gradient: gradient * 2000), lr=1e-9)
    (alert,) = (alert for alert in monitor.firing if alert.code == "G113")
    assert alert.finding.evidence["ratio"] == pytest.approx(2000, rel=1e-5)
    assert alert.headline.startswith("Gradients grow 2000×")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_zero_grad_before_the_step_comes_before_the_missing_gradients_that_it_causes(set_to_none, tmp_path):
    change = lambda model, optimizer: optimizer.zero_grad(set_to_none=set_to_none)  # noqa: E731
    monitor = changed_run(tmp_path / "run", change, steps=60)
    assert monitor.firing[0].code == "G113"
    assert monitor.firing[0].remedies[0].action == "move_zero_grad"


def centralized(gradient):
    return gradient - gradient.mean(dim=tuple(range(1, gradient.ndim)), keepdim=True) if gradient.ndim > 1 else gradient


@pytest.mark.parametrize(
    ("change", "options"),
    [
        pytest.param(lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01), {}, id="clip by norm"),
        pytest.param(lambda model, _: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01), {}, id="by value"),
        pytest.param(each(centralized), {}, id="centralized"),
        pytest.param(each(lambda gradient: gradient / 64), {"accumulate": 4}, id="average over batches"),
        pytest.param(each(lambda gradient: gradient / 1000), {}, id="unscaled by hand"),
        pytest.param(each(lambda gradient: gradient * 8), {}, id="sum over eight ranks"),
        pytest.param(each(lambda gradient: gradient + 0.1 * torch.randn_like(gradient)), {}, id="noise"),
        pytest.param(each(lambda gradient: gradient + 3.0 * torch.randn_like(gradient)), {}, id="loud noise"),
        pytest.param(each(lambda gradient: 2 * gradient.sign()), {}, id="signs"),
        pytest.param(each(lambda gradient: gradient / gradient.norm()), {}, id="normalized"),
        pytest.param(lambda *_: None, {"loss_scale": 3000.0}, id="loss scale"),
    ],
)
def test_what_loops_do_to_gradients_on_purpose_is_not(change, options, tmp_path):
    monitor = changed_run(tmp_path / "run", change, lr=1e-9, **options)
    assert len(monitor.history.panel("gradient/norm")) == 12
    assert [alert for alert in monitor.alerts if alert.code == "G113"] == []


def test_gradients_of_several_losses_that_are_combined_by_hand_are_not():
    run = Run("G113")
    for factor in noise(0.3, 20):
        run.feed({"gradient/norm": {"a.weight": 150.0 * factor, "b.weight": 30.0}, "gradient/global_norm": 1.0,
                  "gradient/backward_passes": 2.0})  # fmt: skip
    assert run.ledger.alerts == ()


FAULTS = {
    "G112": a_limit_of_almost_zero,
    "G113": lambda run: changed_run(run, each(lambda gradient: gradient * 2000), steps=40),
}
