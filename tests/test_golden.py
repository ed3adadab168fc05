"""What this version says, does and stores is what the golden files say; `tests/golden` tells how they are written."""

import difflib
import re

import pytest
import torch

import forewarn
from forewarn.judge.families import Family
from forewarn.judge.rules import family_of
from tests.golden.record import RECORDED, SAVED_AT, STATE, half_frozen
from tests.golden.write import GROUPS, HERE, RUNS, stored


def differences(expected: dict[str, str], said: dict[str, str]) -> str:
    """Of two sets of texts by name, as a patch."""
    lines = [
        line
        for name in sorted({*expected, *said})
        for line in difflib.unified_diff(
            expected.get(name, "").splitlines(), said.get(name, "").splitlines(), name, "now", n=1, lineterm=""
        )
    ]
    return "\n".join(lines)


def without_views(counts: dict[str, str]) -> dict[str, str]:
    """Counts without the totals and the views that older torch dispatches otherwise: two detaches for one."""
    varying = re.compile(r"\d+ operations$|^ +\d+ (alias|detach|slice)\n", re.MULTILINE)
    return {name: varying.sub("", text) for name, text in counts.items()}


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_said_and_counted_is_what_was(group, tmp_path):
    expected, said = stored(group), GROUPS[group](tmp_path)
    assert expected.keys() == said.keys()
    if group == "operations.txt" and torch.__version__ < (2, 13):
        expected, said = without_views(expected), without_views(said)
    assert not differences(expected, said), differences(expected, said)


def test_every_golden_file_belongs_to_a_group_and_every_recorded_run_is_there():
    texts = {path.relative_to(HERE).as_posix() for kind in ("txt", "json") for path in HERE.rglob(f"*.{kind}")}
    assert texts == {name for group in GROUPS for name in stored(group)}
    assert set(RUNS) == set(RECORDED)


def test_differences_between_texts_are_shown():
    assert "+new" in differences({"a": "old\n"}, {"a": "new\n"})
    assert "-gone" in differences({"a": "gone\n"}, {})


def test_nothing_golden_names_a_place_on_the_machine_that_made_it():
    for group in GROUPS:
        for name, text in stored(group).items():
            assert "/tmp/" not in text, name
            assert "/work/" not in text, name
            assert str(HERE) not in text, name


def test_a_saved_state_of_an_earlier_version_loads_and_the_run_goes_on(tmp_path):
    state = torch.load(STATE, weights_only=True)
    it = half_frozen(tmp_path / "run")
    seen = []

    def load(monitor):
        monitor.load_state_dict(state)
        seen.append((monitor.at, [(alert.code, alert.scope, alert.since, alert.fired) for alert in monitor.firing]))

    it.linears()[1].requires_grad_(False)
    it.after_attach = load
    monitor = it.train(SAVED_AT)
    ((at, firing),) = seen
    assert at == SAVED_AT
    assert firing, "the alerts that fired are gone"
    assert monitor.at == 2 * SAVED_AT
    going_on = [(alert.code, alert.scope, alert.since, alert.fired) for alert in monitor.firing]
    assert set(firing) <= set(going_on)
    assert not [alert for alert in monitor.alerts if family_of(alert.code) is Family.MONITOR]
    losses = monitor.history.series("train/loss")
    assert losses.steps.tolist() == list(range(2 * SAVED_AT))
    with forewarn.open_run(tmp_path / "run") as run:
        assert run.last_step == 2 * SAVED_AT - 1
