"""The healthy band of the update ratio over a run."""

import math

import pytest

from forewarn.views.bands import UPDATE_RATIO, Phase, Rate, phase, update_ratio_words

CONSTANT = [1e-3] * 100
COSINE = [0.5 * (1 + math.cos(math.pi * step / 99)) for step in range(100)]
WARM_UP_AND_COSINE = [step / 20 for step in range(20)] + [1.0] * 10 + COSINE


def phases(lr, total=None):
    """The phase at every step of a run with these learning rates."""
    return [phase(step, total, Rate.of(lr[: step + 1])) for step in range(len(lr))]


def test_the_declared_length_of_a_run_has_a_first_tenth_and_a_last_fifth():
    assert phases(CONSTANT, 100) == [Phase.EARLY] * 10 + [Phase.MIDDLE] * 70 + [Phase.LATE] * 20


def test_a_run_that_goes_on_past_its_declared_end_is_late():
    assert phase(500, 100, Rate()) is Phase.LATE


def test_without_a_length_the_learning_rate_tells():
    found = phases(WARM_UP_AND_COSINE)
    assert found[0] is None
    assert set(found[1:21]) == {Phase.EARLY}
    assert found[21:30] == [Phase.MIDDLE] * 9
    below_a_tenth = next(step for step, lr in enumerate(COSINE) if lr < 0.1)
    assert found[30:] == [Phase.MIDDLE] * below_a_tenth + [Phase.LATE] * (100 - below_a_tenth)


def test_a_long_warm_up_is_early_and_an_early_decay_is_late_whatever_was_declared():
    assert phases([step / 50 for step in range(50)], 100)[40] is Phase.EARLY
    assert phases([1.0] * 20 + [0.05] * 30, 100)[30] is Phase.LATE


def test_a_restart_that_rises_to_its_earlier_peak_is_no_warm_up():
    again = [1.0, 0.6, 0.2, 0.4, 0.6, 0.8]
    assert phases(again)[3:] == [Phase.MIDDLE] * 3


def test_a_constant_learning_rate_or_none_says_nothing():
    assert set(phases(CONSTANT)) == {None}
    assert phase(5, None, Rate()) is None
    assert phase(5, None, Rate.of([math.nan, math.inf])) is None


@pytest.mark.parametrize(
    "lr", [WARM_UP_AND_COSINE, CONSTANT, [math.nan, 1.0, 2.0, math.nan, 1.5, math.inf], [0.0, 0.0], [2.0]]
)
def test_a_course_followed_step_by_step_is_that_of_all_its_values(lr):
    followed = Rate()
    for at, value in enumerate(lr):
        followed = followed.then(value)
        whole = Rate.of(lr[: at + 1])
        assert phase(at, None, followed) is phase(at, None, whole)
        assert repr(followed) == repr(whole)


def test_bands_join_and_fall_by_ten():
    early, middle, late = (UPDATE_RATIO[when] for when in Phase)
    assert (early.high, early.low, middle.low, late.low) == (1e-2, 1e-3, 1e-4, 1e-5)
    assert early.low == middle.high
    assert middle.low == late.high


def test_words_name_the_phase_or_every_band():
    assert update_ratio_words(Phase.MIDDLE) == "typical in the middle of a run 1e-4 to 1e-3"
    assert update_ratio_words(None) == (
        "typical early in a run 1e-3 to 1e-2, in the middle of a run 1e-4 to 1e-3, late in a run 1e-5 to 1e-4"
    )
