"""The scores, against numbers that were worked out by hand."""

import math

import pytest

from forewarn.lab.faults.cases import CHANCE, FIRST, LOWERED, TWIN
from forewarn.lab.faults.injected import FAULTS
from forewarn.lab.faults.published_rules import Remark
from forewarn.lab.faults.scoring import Share, scores
from tests.lab.faults.made import healthy, record, warned


@pytest.mark.parametrize(("hits", "total"), [(8, 10), (0, 7), (7, 7), (1, 200), (150, 200)])
def test_the_interval_holds_all_shares_that_the_count_does_not_refute(hits, total):
    # Wilson's bounds are where the distance from the observed share is 1.96 standard errors of the bound itself.
    low, high = Share(hits, total).interval
    for bound in (low, high):
        error = math.sqrt(bound * (1 - bound) / total)
        is_at_the_edge = bound in (0.0, 1.0) and hits in (0, total)
        assert is_at_the_edge or abs(hits / total - bound) == pytest.approx(1.959964 * error, rel=1e-6)
    assert low <= hits / total <= high


def test_the_interval_of_8_of_10():
    assert Share(8, 10).interval == pytest.approx((0.4902, 0.9433), abs=5e-5)


def test_nothing_counted_says_nothing():
    assert Share(0, 0).interval == (0.0, 1.0)
    assert math.isnan(Share(0, 0).value)


def test_a_fault_is_harmful_if_it_is_three_spreads_worse_than_its_twin():
    plain = healthy(1.0, 1.2, 0.8)  # the standard deviation is 0.2
    result = scores([*plain, record(change="lr-too-high", score=1.59), record(change="lr-too-low", score=1.61)])
    assert [verdict.fault.name for verdict in result.harmful] == ["lr-too-low"]
    assert [verdict.fault.name for verdict in result.harmless] == ["lr-too-high"]


def test_seeds_that_agree_do_not_make_every_fault_harmful():
    result = scores([*healthy(1.0, 1.0, 1.0), record(change="lr-too-high", score=1.029)])
    assert not result.harmful


def test_a_lost_run_is_harmful_and_a_return_counts_with_its_sign():
    plain = healthy(-50.0, -49.0, -48.0, workload="reinforce")
    result = scores([*plain, record("reinforce", "lr-too-high", 2, -45.9), record("reinforce", "no-step", 1, math.inf)])
    assert len(result.harmful) == 2


def test_the_cause_is_named_by_the_alert_shown_first_only():
    plain = healthy(1.0, 1.1, 0.9)
    right = record(change="lr-too-high", score=9.0, alerts=[warned("U102"), warned("L101")])
    wrong = record(change="lr-too-high", seed=2, score=9.0, alerts=[warned("L101"), warned("U102")])
    in_words = record(change="lr-too-high", seed=3, score=9.0, alerts=[warned("X9", text="the Learning Rate is high")])
    result = scores([*plain, right, wrong, in_words])
    assert result.detected == Share(3, 3)
    assert [verdict.is_named for verdict in result.harmful] == [True, False, True]


def test_a_cause_in_the_evidence_counts_only_with_its_rule():
    plain = healthy(1.0, 1.1, 0.9)
    named = record(change="no-step", score=9.0, alerts=[warned("U101", cause="optimizer_not_stepped")])
    other = record(change="no-step", seed=2, score=9.0, alerts=[warned("U101", cause="zero_gradient")])
    assert scores([*plain, named, other]).named == Share(1, 2)


def test_information_and_warnings_before_the_onset_are_no_detection():
    plain = healthy(1.0, 1.1, 0.9)
    noted = record(change="lr-jump", score=9.0, onset=50, alerts=[warned("U104", severity=1, fired=60)])
    early = record(change="lr-jump", seed=2, score=9.0, onset=50, alerts=[warned("U104", fired=40)])
    assert scores([*plain, noted, early]).detected == Share(0, 2)


def test_a_fault_whose_first_step_is_the_damage_is_declared_and_can_be_left_out():
    instant = {name for name, fault in FAULTS.items() if fault.is_instant}
    assert instant == {"nan-batch", "log-of-zero", "corrupt-batches", "label-noise-onset"}
    assert all(FAULTS[name].is_dynamic for name in instant)


def test_the_lead_is_from_the_first_warning_to_where_the_run_stays_worse():
    noise = [0.01 * (-1) ** step for step in range(200)]
    plain = [record(seed=seed, score=1 + seed / 10, objective=[1 + value for value in noise]) for seed in (1, 2, 3)]
    worse = [1 + value + (step >= 120) for step, value in enumerate(noise)]
    broken = record(change="lr-jump", score=9.0, onset=80, objective=worse, alerts=[warned("U104", fired=90)])
    (verdict,) = scores([*plain, broken]).harmful
    assert verdict.damage == 120  # one step of ten is enough: the jump is a hundred times the noise
    assert verdict.lead == 30


def test_a_remedied_run_is_repaired_if_it_is_no_longer_harmful():
    plain = healthy(1.0, 1.2, 0.8)
    remedied = {FIRST: 1.5, CHANCE: 2.0, LOWERED: 1.7, TWIN: 1.7}
    broken = record(change="lr-too-high", score=9.0, alerts=[warned()], remedied=remedied)
    by_hand = record(change="no-step", seed=2, score=9.0, alerts=[warned("U105")], remedied={FIRST: None, CHANCE: 9.0})
    result = scores([*plain, broken, by_hand])
    assert result.repaired(FIRST) == Share(1, 1)
    assert result.repaired(CHANCE) == Share(0, 2)
    assert result.repaired(LOWERED) == Share(0, 1)
    assert result.no_harm == Share(0, 1)
    assert result.names_fix == Share(0, 1)  # lowering the learning rate does not call optimizer.step()
    assert result.fixed == Share(1, 2)


def test_healthy_runs_are_counted_by_run_and_by_step():
    records = [*healthy(1.0, 1.0), record(change="tiny-batches", seed=9, alerts=[warned(), warned("L102")])]
    result = scores(records)
    assert result.healthy.warned == Share(1, 3)
    assert result.healthy.per_thousand_steps == pytest.approx(1000 * 2 / 300)


def test_a_published_rule_set_detects_what_it_warns_about_after_the_onset():
    plain = healthy(1.0, 1.1, 0.9)
    late = record(change="lr-jump", score=9.0, onset=50, published=(Remark("ZClip", 20, 60, "z"),))
    early = record(change="lr-jump", seed=2, score=9.0, onset=50, published=(Remark("ZClip", 20, 49, "z"),))
    result = scores([*plain, late, early])
    assert result.published("ZClip") == Share(1, 2)
    assert result.healthy.published("ZClip") == Share(0, 3)


def test_a_fault_without_healthy_runs_cannot_be_scored():
    assert scores([record(change="lr-too-high", score=9.0)]).harmful == ()
    with pytest.raises(LookupError, match="only one healthy run"):
        scores([record(), record(change="lr-too-high", score=9.0)])
