"""Most steps of a run are quiet, and judging them must cost little: what is not called, and what is called once."""

import dataclasses
import inspect
import itertools
from collections import Counter

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from forewarn.config import Config
from forewarn.judge.chains import Episode, Episodes, chains_of
from forewarn.judge.families import Phase
from forewarn.judge.history import History
from forewarn.judge.judgement import Judge
from forewarn.judge.ledger import Ledger
from forewarn.judge.rules import all_rules, find_rule
from forewarn.judge.series import RollingMedian, Series
from forewarn.types import Block, RunInfo, Severity

READ_ON_EVERY_STEP = {"train/loss": "", "gradient/global_norm": "", "update/optimizer_steps": "", "train/lr": "0"}
MOST_CHECKS = 8
"""Of thirteen rules that concern what is read on every step."""


def blocks(step, **values):
    readings = {"train/lr": 1e-3, "update/optimizer_steps": 1.0} | values
    return [
        Block(step, float(step), name, (scope,), np.array([readings[name]], np.float32))
        for name, scope in READ_ON_EVERY_STEP.items()
    ]


def counting(rules, calls):
    """The same rules, whose checks are counted by code."""

    def counted(rule):
        def check(*readings, **given):
            calls[rule.code] += 1
            return rule.check(*readings, **given)

        check.__signature__ = inspect.signature(rule.check)
        return dataclasses.replace(rule, check=check)

    return tuple(map(counted, rules))


def test_a_quiet_step_calls_few_checks():
    calls, rule_set, rng = Counter(), Config().rule_set(), np.random.default_rng(0)
    rule_set = dataclasses.replace(rule_set, rules=counting(rule_set.rules, calls))
    history, judge = rule_set.history(), Judge(rule_set, RunInfo())
    for step in range(200):
        noise = np.exp(0.05 * rng.normal(size=2))
        readings = blocks(step, **{"train/loss": 2.0 * noise[0], "gradient/global_norm": noise[1]})
        judge(step, history, history.append(readings))
    assert sum(calls.values()) <= 200 * MOST_CHECKS
    assert not {"L101", "G102", "U105", "U110", "U111"} & set(calls)


def test_the_small_gradients_of_a_solved_task_are_not_looked_at_closely_on_every_step():
    calls = Counter()
    rule_set = dataclasses.replace(Config().rule_set(), rules=counting([find_rule("G103")], calls))
    history, judge = rule_set.history(), Judge(rule_set, RunInfo())
    for step in range(100):
        judge(step, history, history.append(blocks(step, **{"train/loss": 1e-4, "gradient/global_norm": 1e-5})))
    assert not calls
    judgement = judge(100, history, history.append(blocks(100, **{"train/loss": 1e-4, "gradient/global_norm": 9e-8})))
    assert [finding.code for finding in judgement.findings] == ["G103"]


def test_gates_change_no_alert():
    rng = np.random.default_rng(1)
    loss = 2.0 * np.exp(0.1 * rng.normal(size=3000))
    norm = np.exp(0.5 * rng.normal(size=3000))
    loss[rng.integers(0, 3000, 20)] = rng.choice([np.nan, np.inf, 50.0], 20)
    norm[rng.integers(0, 3000, 20)] = rng.choice([np.nan, 100.0, 101.0, 5000.0], 20)
    norm[1500:1600] = 1e-4
    loss[2500:2600] *= 1e-3
    norm[2500:2600] = np.geomspace(1e-4, 1e-8, 100)
    stepped = np.where((np.arange(3000) % 700) < 690, 1.0, 0.0)
    info = RunInfo(hyperparameters={"total_steps": 3000}, groups=({"lr": 1e-3},))

    def alerts_by(rule_set):
        history, judge, ledger = rule_set.history(info), Judge(rule_set, info), Ledger(rule_set.rules)
        for step in range(3000):
            values = {"train/loss": loss[step], "gradient/global_norm": norm[step]}
            readings = blocks(step, **values, **{"update/optimizer_steps": stepped[step]})
            ledger.update(judge(step, history, history.append(readings)), history, info)
        return ledger.alerts

    gated = Config().rule_set()
    ungated = dataclasses.replace(gated, rules=tuple(dataclasses.replace(rule, gate=None) for rule in gated.rules))
    alerts = alerts_by(gated)
    assert {"L101", "G102", "U105", "U111"} <= {alert.code for alert in alerts}
    assert repr(alerts) == repr(alerts_by(ungated))


def test_rules_that_read_the_same_series_share_it():
    history = History()
    history.append(blocks(0, **{"train/loss": 1.0, "gradient/global_norm": 1.0}))
    assert history.series("train/loss") is history.panel("train/loss").series()
    before = history.series("train/loss")
    history.append(blocks(1, **{"train/loss": 2.0, "gradient/global_norm": 1.0}))
    assert (before.last, history.series("train/loss").last) == (1.0, 2.0)


FLOATS = st.lists(st.floats(width=32) | st.sampled_from([1.0, 1.0, 2.0]), min_size=1, max_size=60)


@given(FLOATS, st.integers(1, 9))
def test_a_rolling_median_is_the_median_of_the_last_readings(values, window):
    medians = RollingMedian(window)
    for end in range(1, len(values) + 1):
        medians.observe(values[end - 1])
        for ago in range(3):
            recent = np.array(values[max(0, end - (ago + 1) * window) : end - ago * window], np.float64)
            if end > ago * window:
                finite = recent[np.isfinite(recent)]
                expected = np.median(finite) if len(finite) else np.nan
                assert np.array_equal(medians.at(ago), expected, equal_nan=True)


@given(FLOATS, st.integers(1, 7), st.integers(0, 59))
def test_a_rolling_median_does_not_depend_on_when_it_is_asked_for_nor_on_a_resume(values, window, asked):
    often, once = History(window=64), History(window=64)
    for step, value in enumerate(values):
        for history in (often, once):
            history.append([Block(step, 0.0, "train/loss", ("",), np.array([value], np.float32))])
        often.series("train/loss").rolling_median(window)
        if step == asked:
            often, state = History(window=64), often.state_dict()
            often.load_state_dict(state)
    expected = Series.of(values).rolling_median(window)
    for ago in range(min(3, (len(values) - 1) // window + 1)):
        for history in (often, once):
            median = history.series("train/loss").rolling_median(window).at(ago)
            assert np.array_equal(median, expected.at(ago), equal_nan=True)


def all_pairs(episodes):
    """The direct cause of each episode by comparing it with all others, as the documentation of `chains_of` says."""
    in_order = sorted(episodes, key=lambda episode: (episode.began, episode.phase, episode.code, episode.since))

    def explains(cause, symptom):
        quiet = cause.severity is Severity.INFO and symptom.severity is not Severity.INFO
        return symptom.code in find_rule(cause.code).explains and not quiet

    causes = {}
    for symptom in in_order:
        causes[symptom] = next(
            (
                cause
                for cause in in_order
                if cause.began <= symptom.since
                and symptom.began <= cause.until
                and explains(cause, symptom)
                and (cause.began < symptom.since or cause.phase <= symptom.phase)
                and not (explains(symptom, cause) and (symptom.began, symptom.phase) < (cause.began, cause.phase))
            ),
            None,
        )
    roots = [episode for episode in in_order if causes[episode] is None]
    for symptom in roots:
        outside = [other for other in roots if other.began == symptom.since and explains(other, symptom)]
        causes[symptom] = outside[0] if outside else None
    return causes


EPISODES = st.lists(
    st.builds(
        lambda code, since, early, length, severity: Episode(
            code, find_rule(code).family.phase, since, since - early, since + length, severity
        ),
        st.sampled_from([rule.code for rule in all_rules()]),
        st.integers(0, 30), st.sampled_from([0, 0, 0, 7]), st.integers(0, 20), st.sampled_from(list(Severity)),
    ),
    max_size=25, unique=True,
)  # fmt: skip


@given(EPISODES)
def test_causes_are_those_that_comparing_all_pairs_gives(overlapping):
    codes = [rule.code for rule in all_rules()]
    explaining = {symptom: [code for code in codes if symptom in find_rule(code).explains] for symptom in codes}
    known = Episodes()
    for episode in overlapping:
        known.add(episode)
    episodes = list(dict.fromkeys(map(known.of, overlapping)))
    for one, other in itertools.combinations(episodes, 2):
        assert one.code != other.code or one.until < other.since or other.until < one.since
    for part in overlapping:
        whole = known.of(part)
        assert whole.since <= part.since <= part.until <= whole.until
    chains, causes = chains_of(episodes, known, explaining), all_pairs(episodes)
    for episode in episodes:
        root, links = episode, 0
        while causes[root] is not None and links <= len(episodes):
            root, links = causes[root], links + 1
        assert chains[episode] == (root, links)


def test_the_causes_of_thousands_of_episodes_do_not_take_all_pairs():
    asked = Counter()

    class Explaining(dict):
        def get(self, code, default=()):
            asked[code] += 1
            return super().get(code, default)

    phases = {"G900": Phase.BACKWARD, "L900": Phase.LOSS}
    episodes = [
        Episode(code, phase, since, since, since + 20, Severity.INFO)
        for since in range(0, 200_000, 50)
        for code, phase in phases.items()
    ]
    known = Episodes()
    for episode in episodes:
        known.add(episode)
    chains_of(episodes, known, Explaining(L900=("G900",)))
    assert asked
    assert sum(asked.values()) < 10 * len(episodes)
