"""Remedies: the numbers of this run in the advice."""

import math

import pytest

from forewarn.judge import remedies
from forewarn.judge.history import History
from forewarn.types import Finding, FrozenCause, ParameterInfo, RunInfo, Severity
from tests.judge.rules.runs import block


def history(lr=None, clip=None, norms=()):
    made = History()
    if lr is not None:
        made.append([block(0, "train/lr", lr if isinstance(lr, dict) else {"0": lr})])
    for step, norm in enumerate(norms):
        made.append([block(step, "gradient/global_norm", norm)])
    if clip is not None:
        made.append([block(max(0, len(norms) - 1), "train/clip", clip)])
    return made


def finding(scope="", bound=10.0, step=120, **evidence):
    return Finding("L900", scope, step, Severity.WARNING, 20.0, bound, evidence)


def said(prescription, past=None, found=None, **info):
    remedy = prescription(found or finding(), past or History(), RunInfo(**info))
    return remedy if remedy is None else str(remedy)


def test_the_lr_is_lowered_from_what_it_is():
    assert said(remedies.lower_lr(0.5), history(lr=3e-4)) == "lower_lr 0.0003 → 0.00015"
    assert said(remedies.lower_lr(0.5), history(lr={"0": 1e-3, "1": 4e-3})) == "lower_lr 0.004 → 0.002"
    assert said(remedies.lower_lr(0.5)) == "lower_lr factor 0.5", "without an lr there is only the factor"
    assert said(remedies.lower_lr(0.5), history(lr=math.nan)) == "lower_lr factor 0.5"


def test_the_lr_goes_back_to_where_it_jumped_from():
    jumped = finding(lr_before=1e-3, ratio=30.0)
    assert said(remedies.restore_lr(), history(lr=3e-2), jumped) == "lower_lr 0.03 → 0.001"
    assert said(remedies.restore_lr(), history(lr=3e-2), finding(ratio=4.0)) == "lower_lr 0.03 → 0.0075"
    assert said(remedies.restore_lr(), history(lr=3e-2)) == "lower_lr 0.03 → 0.015"


def test_the_lr_is_raised_and_where_it_is_zero_set_to_what_the_run_began_with():
    assert said(remedies.raise_lr(10.0), history(lr=1e-6)) == "raise_lr 1e-6 → 1e-5"
    groups = ({"lr": 0.0, "initial_lr": 3e-4},)
    assert said(remedies.raise_lr(10.0), history(lr=0.0), groups=groups) == "raise_lr 0 → 0.0003"
    assert said(remedies.raise_lr(10.0), history(lr=0.0)) is None


@pytest.mark.parametrize(
    ("groups", "hyperparameters", "steps"),
    [((), {}, 121), (({"beta2": 0.95},), {}, 40), ((), {"total_steps": 1000}, 100),
     (({"beta2": 0.95},), {"total_steps": 1e6}, 40), ((), {"total_steps": 1e6}, 2000),
     (({"beta2": 1.0},), {"total_steps": 1e6}, 20000), ((), {"total_steps": True}, 121), ((), {"total_steps": 3}, 1)],
)  # fmt: skip
def test_the_warm_up_is_two_over_one_minus_beta2_within_a_tenth_of_the_run_or_what_it_has_made(
    groups, hyperparameters, steps
):
    remedy = remedies.warm_up()(finding(), history(lr=1e-3), RunInfo(groups=groups, hyperparameters=hyperparameters))
    assert remedy.parameters["steps"] == steps


def test_the_warm_up_leads_to_the_lr_before_a_jump():
    assert said(remedies.warm_up(), history(lr=3e-2), finding(lr_before=1e-3)) == "warm_up steps 121 to 0.001"
    assert said(remedies.warm_up(), history(lr=3e-2)) == "warm_up steps 121 to 0.03"


def test_gradients_are_clipped_at_the_usual_norm_of_the_run():
    assert said(remedies.clip_gradient(), history(norms=[0.7] * 50 + [90.0])) == "clip_gradient max_norm 0.7"
    assert said(remedies.clip_gradient(), history(clip=1.0, norms=[0.7] * 50)) == "lower_clip 1 → 0.5"
    assert said(remedies.clip_gradient()) == "clip_gradient max_norm 1"
    always_large = history(norms=[500.0] * 50)
    assert said(remedies.clip_gradient(), always_large, finding(bound=100.0)) == "clip_gradient max_norm 1"


def test_a_limit_that_the_loop_no_longer_clips_to_is_not_quoted():
    past = history(clip=1.0, norms=[0.7] * 50)
    past.append([block(50, "gradient/global_norm", 0.7)])
    assert said(remedies.clip_gradient(), past) == "clip_gradient max_norm 0.7"


BODY, HEAD = "body.0.weight", "head.weight"
PARAMETERS = {
    name: ParameterInfo((8, 8), "Linear.weight", "float32", group, True) for group, name in enumerate((BODY, HEAD))
}
GROUPS = (
    {"lr": 1e-3, "weight_decay": 0.1, "beta2": 0.999},
    {"lr": 0.0, "initial_lr": 5e-3, "weight_decay": 0.0, "beta2": 0.95},
)


@pytest.mark.parametrize(
    ("prescription", "scope", "do"),
    [
        (remedies.raise_lr(10.0), HEAD, "Set the learning rate of group 1 back to 0.005"),
        (remedies.raise_lr(10.0), BODY, "Raise the learning rate of group 0 from 0.001 to 0.01"),
        (remedies.raise_lr(10.0), "body", "Raise the learning rate of group 0 from 0.001 to 0.01"),
        (remedies.lower_lr(0.5), BODY, "Lower the learning rate of group 0 from 0.001 to 0.0005"),
        (remedies.lower_lr(0.5), HEAD, None),
        (remedies.lower_lr(0.5), "",
         "Lower the learning rate from 0.001 to 0.0005, and that of the other groups by the same factor"),
        (remedies.raise_lr(1.0, scope_is_group=True), "1", "Set the learning rate of group 1 back to 0.005"),
        (remedies.warm_up(), BODY, "Warm up the learning rate of group 0 to 0.001 over 121 steps"),
        (remedies.warm_up(), HEAD, "Warm up the learning rate of group 1 to 0 over 40 steps"),
        (remedies.lower_weight_decay(0.1), BODY, "Lower the weight decay of group 0 from 0.1 to 0.01"),
        (remedies.lower_weight_decay(0.1), HEAD, None),
        (remedies.exempt_from_decay(), BODY, "Exclude body.0.weight from weight decay"),
        (remedies.exempt_from_decay(), HEAD, None),
        (remedies.lower_beta2(), HEAD, None),
        (remedies.lower_beta2(), BODY, "Lower beta2 of group 0 from 0.999 to 0.95"),
    ],
)  # fmt: skip
def test_the_numbers_are_those_of_the_group_that_holds_the_scope(prescription, scope, do):
    past = history(lr={"0": 1e-3, "1": 0.0})
    remedy = prescription(finding(scope=scope), past, RunInfo(groups=GROUPS, parameters=PARAMETERS))
    assert (remedy and remedy.do) == do


def test_a_group_is_named_only_if_the_groups_differ():
    groups, parameters = ({"lr": 1e-3, "initial_lr": 1e-3}, {"lr": 1e-3, "initial_lr": 5e-3}), PARAMETERS
    alike = history(lr={"0": 1e-3, "1": 1e-3})
    remedy = remedies.lower_lr(0.5)(finding(scope=HEAD), alike, RunInfo(groups=groups, parameters=parameters))
    assert remedy.do == "Lower the learning rate from 0.001 to 0.0005"
    both_at_zero = history(lr={"0": 0.0, "1": 0.0})
    remedy = remedies.raise_lr(10.0)(finding(scope=HEAD), both_at_zero, RunInfo(groups=groups, parameters=parameters))
    assert remedy.do == "Set the learning rate of group 1 back to 0.005"


def test_a_group_that_began_at_zero_gets_the_rate_of_the_others():
    groups = (GROUPS[0], {"lr": 0.0})
    remedy = remedies.raise_lr(10.0)(
        finding(scope=HEAD), history(lr={"0": 1e-4, "1": 0.0}), RunInfo(groups=groups, parameters=PARAMETERS)
    )
    assert remedy.do == "Set the learning rate of group 1 to 0.001, as in the other groups"


def test_a_parameter_of_an_unknown_group_gets_a_number_only_if_all_groups_share_it():
    later = {HEAD: ParameterInfo((8, 8), "Linear.weight", "float32", None, False)}
    found = finding(scope=HEAD)
    different = said(remedies.lower_lr(0.5), history(lr={"0": 1e-3, "1": 4e-3}), found, parameters=later)
    assert different == "lower_lr factor 0.5"
    alike = said(remedies.lower_lr(0.5), history(lr={"0": 1e-3, "1": 1e-3}), found, parameters=later)
    assert alike == "lower_lr 0.001 → 0.0005"


def test_a_jump_of_one_group_is_taken_back_in_that_group():
    jumped = finding(lr_before=1e-4, lr_after=3e-3, group="1")
    remedy = remedies.restore_lr()(jumped, history(lr={"0": 1e-2, "1": 3e-3}), RunInfo())
    assert remedy.do == "Set the learning rate of group 1 back to 0.0001"
    assert remedy.parameters == {"from": 3e-3, "to": 1e-4, "group": "1"}


def test_what_changed_during_the_run_is_quoted_as_it_is_now():
    past = history()
    past.append([block(0, "train/weight_decay", {"0": 0.01}), block(0, "train/beta2", {"0": 0.999})])
    assert said(remedies.raise_weight_decay(), past, groups=GROUPS) == "raise_weight_decay 0.01 → 0.1"
    past.append([block(9, "train/weight_decay", {"0": 0.1}), block(9, "train/beta2", {"0": 0.9})])
    assert said(remedies.raise_weight_decay(), past, groups=GROUPS) == "raise_weight_decay 0.1 → 0.2"
    assert said(remedies.lower_beta2(), past, groups=GROUPS) is None


def test_the_way_back_leads_to_before_the_trouble_began():
    assert said(remedies.roll_back(), found=finding(step=120)) == "roll_back before_step 120"
    assert said(remedies.roll_back(), found=finding(step=120, lasting_steps=20)) == "roll_back before_step 101"
    assert said(remedies.roll_back(), found=finding(step=3, lasting_steps=20)) is None
    assert said(remedies.roll_back(), found=finding(step=0)) is None


def test_beta2_and_weight_decay_are_lowered_only_where_there_are_any():
    adam = ({"beta2": 0.999, "weight_decay": 0.1},)
    assert said(remedies.lower_beta2(), groups=adam) == "lower_beta2 0.999 → 0.95"
    assert said(remedies.lower_beta2(), groups=({"beta2": 0.95},)) is None
    assert said(remedies.lower_beta2(), groups=({"momentum": 0.9},)) is None
    assert said(remedies.lower_weight_decay(0.1), groups=adam) == "lower_weight_decay 0.1 → 0.01"
    assert said(remedies.lower_weight_decay(0.1), groups=({"weight_decay": 0.0},)) is None


def test_a_parameter_is_added_by_name_with_the_lr_of_the_run():
    found = finding(scope="head.weight")
    assert (
        said(remedies.add_to_optimizer(), history(lr=1e-3), found) == "add_to_optimizer parameter head.weight lr 0.001"
    )
    remedy = remedies.add_to_optimizer()(found, history(lr=0.0), RunInfo())  # before a warm-up from zero
    assert remedy.do == "Add head.weight to the optimizer"


def test_only_what_is_in_low_precision_is_kept_in_float32():
    def known(dtype):
        return {"head.weight": ParameterInfo((8, 8), "Linear.weight", dtype, 0, True)}

    found = finding(scope="head.weight")
    low = said(remedies.keep_in_float32(), found=found, parameters=known("bfloat16"))
    assert low == "keep_in_float32 bfloat16 → float32 parameter head.weight"
    assert said(remedies.keep_in_float32(), found=found, parameters=known("float32")) is None
    assert said(remedies.keep_in_float32(), found=found) is not None


def test_advice_for_a_cause_is_given_for_that_cause_alone():
    advice = remedies.for_cause(FrozenCause.ZERO_LR, remedies.stop())
    assert said(advice, found=finding(cause="zero_lr")) == "stop step 120"
    assert said(advice, found=finding(cause="no_gradient")) is None
    assert said(advice) is None


def test_advice_names_the_scope_where_there_is_one():
    look = remedies.advise("inspect_layer", "Look at {scope}", "why", scope_is="parameter", to=1e-5)
    assert said(look, found=finding(scope="head.weight")) == "inspect_layer parameter head.weight to 1e-5 step 120"
    assert said(look) == "inspect_layer to 1e-5 step 120"


@pytest.mark.parametrize(
    ("prescription", "safety"),
    [
        (remedies.skip_batch(), "safe"), (remedies.snapshot(), "safe"), (remedies.lower_lr(0.5), "opt_in"),
        (remedies.restore_lr(), "opt_in"), (remedies.raise_lr(2.0), "opt_in"), (remedies.roll_back(), "opt_in"),
        (remedies.stop(), "opt_in"), (remedies.clip_gradient(), "opt_in"), (remedies.warm_up(), "notify"),
        (remedies.advise("look", "Look", "why"), "notify"), (remedies.add_to_optimizer(), "notify"),
    ],
)  # fmt: skip
def test_whatever_changes_the_run_for_good_is_opt_in(prescription, safety):
    assert prescription(finding(), history(lr=1e-3), RunInfo()).safety == safety
