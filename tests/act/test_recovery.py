"""Every action on a real run: what it changes, what it leaves alone, and how it is recorded."""

import errno
import os

import pytest
import torch
from torch import nn

import forewarn
from forewarn.act import checkpoints
from forewarn.act.training_state import Parts, TrainingState, schedulers_of
from forewarn.cli.terminal import from_run
from forewarn.cli.verdict import as_json
from forewarn.config import Config
from forewarn.judge.diagnosis import replay
from tests.act.recovery_runs import ONSET, STEPS, assert_it_was_done, loss_out_of_range, train

ACTIONS = ["notify", "snapshot", "skip_batch", "lower_lr", "lower_clip", "raise_clip", "rebalance", "stop"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Several threads may add in another order each time, and these tests compare bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def healthy(folder):
    return train(0, 1, "one", "roll_back", str(folder), is_faulty=False)


def stored(path, action):
    with forewarn.open_run(path) as run:
        return [one for one in run.actions() if one.action == action]


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_does_what_it_says_and_is_recorded_with_reason_and_outcome(folder, healthy, action):
    seen = train(0, 1, "one", action, str(folder))
    assert_it_was_done(action, seen, healthy)
    path = folder / f"one-{action}"
    (recorded,) = stored(path, action)
    if action != "skip_batch":
        assert (recorded.step, recorded.code, recorded.reason) == (ONSET, "Z901", "The loss is out of range")
    assert (recorded.failed, recorded.dry_run) == ("", False)
    if action not in ("notify", "stop"):
        assert recorded.watched_steps
        assert 1 <= recorded.resolved_after <= 6
    if action == "snapshot":
        assert (path / recorded.parameters["path"]).is_dir()
    if action in ("lower_clip", "raise_clip"):
        limits = {"lower_clip": 0.5, "raise_clip": 2.0}
        with forewarn.open_run(path) as run:
            clips = run.series("train/clip").values.tolist()
        assert clips == [1.0] * (ONSET + 1) + [limits[action]] * (STEPS - ONSET - 1)
        assert dict(recorded.parameters) == {"from": 1.0, "to": limits[action]}


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_run_that_returned_equals_a_run_that_never_left(folder, healthy, where):
    policy = {"rules": {"Z901": "roll_back"}, "roll_back": {"every": 10, "where": where}}
    seen = train(0, 1, "one", f"roll_back-{where}", str(folder), policy)
    assert_it_was_done("roll_back", seen, healthy)
    path = folder / f"one-roll_back-{where}"
    (action,) = stored(path, "roll_back")
    assert action.parameters == {"from": ONSET + 1, "to": 40}
    assert action.resolved_after == ONSET + 1 - 40
    assert action.recovered_after is not None
    assert not list(path.glob("checkpoints/*.pt"))
    with forewarn.open_run(path) as run, forewarn.open_run(folder / "one-roll_back-healthy") as never_left:
        names = [name for name in never_left.names() if not name.startswith(("speed/", "system/", "monitor/overhead"))]
        assert len(names) > 50
        for name in names:
            for scope in never_left.scopes(name):
                one, other = run.series(name, scope), never_left.series(name, scope)
                assert one.steps.tolist() == other.steps.tolist()
                assert one.values.tobytes() == other.values.tobytes(), name
        assert [event.data["step"] for event in run.events() if event.kind == "resume"] == [40]


def test_a_run_with_actions_is_judged_again_with_the_same_alerts(folder, healthy):
    train(0, 1, "one", "replayed", str(folder), {"rules": {"Z901": ["roll_back"]}, "roll_back": {"every": 10}})
    path = folder / "one-replayed"
    with forewarn.open_run(path) as run:
        diagnosis = replay(run, Config.from_stored(run.config, (loss_out_of_range,)).rule_set((loss_out_of_range,)))
        key = [(alert.code, alert.scope, alert.since) for alert in run.alerts()]
        assert sorted((alert.code, alert.scope, alert.since) for alert in diagnosis.alerts) == sorted(key)
    plain = from_run(path, lambda run: as_json(run, diagnosis))
    assert [action["action"] for action in plain["actions"]] == ["roll_back"]


def test_a_dry_run_records_what_it_would_have_done_and_changes_nothing(folder, healthy):
    policy = {"rules": {"Z901": ["snapshot", "lower_lr"]}, "dry_run": True}
    seen = train(0, 1, "one", "dry", str(folder), policy)
    assert seen["lr"] == healthy["lr"]
    (lowered,) = stored(folder / "one-dry", "lower_lr")
    assert lowered.dry_run
    assert lowered.parameters["to"] == pytest.approx(lowered.parameters["from"] / 2)


def test_an_action_that_cannot_be_taken_says_why(folder):
    train(0, 1, "one", "no-clip", str(folder), {"Z901": "lower_clip"})
    (action,) = stored(folder / "one-no-clip", "lower_clip")
    assert action.failed == "the loop does not clip with monitor.clip_grad_norm_"
    train(0, 1, "one", "no-task", str(folder), {"Z901": "rebalance"})
    (action,) = stored(folder / "one-no-task", "rebalance")
    assert action.failed == "no task of monitor.combine_losses is named"


def test_data_in_between_is_skipped_if_asked_for(folder, healthy):
    policy = {"rules": {"Z901": "roll_back"}, "roll_back": {"every": 10, "skip_data": True, "lr_factor": 0.5}}
    seen = train(0, 1, "one", "skip-data", str(folder), policy)
    assert len(seen["moved"]) == STEPS
    with forewarn.open_run(folder / "one-skip-data") as run:
        assert run.last_step == STEPS - 1 - 6


def test_a_checkpoint_that_cannot_be_written_leaves_a_run_that_goes_on(folder, healthy, monkeypatch, caplog):
    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "replacing", full)
    policy = {"rules": {"Z901": "roll_back"}, "roll_back": {"every": 10, "where": "disk"}}
    seen = train(0, 1, "one", "full", str(folder), policy)
    assert len(seen["moved"]) == STEPS
    assert "No space left on device" in caplog.text
    (action,) = stored(folder / "one-full", "roll_back")
    assert action.failed == "there is no checkpoint yet"


def parts() -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(torch.bfloat16)
    return Parts(model, [torch.optim.AdamW(model.parameters(), lr=0.01)], None)


def advanced(run: Parts, scheduler, steps: int) -> None:
    for _ in range(steps):
        run.model(torch.randn(8, 3).to(torch.bfloat16)).pow(2).mean().backward()
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()
        scheduler.step()


def everything(run: Parts, scheduler) -> dict:
    optimizer = run.optimizers[0]
    tensors = [tensor.clone() for _, tensor in run.tensors()]
    states = [value.clone() for state in optimizer.state.values() for value in state.values()]
    rates = [group["lr"] for group in optimizer.param_groups]
    return {"tensors": tensors + states + [torch.get_rng_state()], "plain": [rates, dict(scheduler.state_dict())]}


def same(one: dict, other: dict) -> bool:
    pairs = list(zip(one["tensors"], other["tensors"], strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs) and one["plain"] == other["plain"]


class Refusing(torch.optim.lr_scheduler.StepLR):
    """A scheduler that refuses a state as often as it is told to."""

    refusals = 0

    def load_state_dict(self, state):
        if Refusing.refusals:
            Refusing.refusals -= 1
            raise RuntimeError("not this one")
        super().load_state_dict(state)


def test_a_scheduler_that_refuses_its_state_leaves_everything_as_it_was():
    run = parts()
    scheduler = Refusing(run.optimizers[0], 2)
    advanced(run, scheduler, 3)
    saved, at_checkpoint = TrainingState.capture(run), everything(run, scheduler)
    advanced(run, scheduler, 3)
    later = everything(run, scheduler)
    Refusing.refusals = 1
    with pytest.raises(RuntimeError, match="not this one"):
        saved.restore(run)
    assert same(everything(run, scheduler), later)
    saved.restore(run)
    assert same(everything(run, scheduler), at_checkpoint)
    assert not same(later, at_checkpoint)


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes():
    run = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizers[0], 2)
    advanced(run, scheduler, 2)
    saved = TrainingState.capture(run)
    run.model[0] = nn.Linear(3, 4).to(torch.bfloat16)
    run.model.register_buffer("extra", torch.zeros(1))
    with pytest.raises(ValueError, match="parameters or buffers have changed"):
        saved.restore(run)
    assert saved.num_bytes > 0


def test_schedulers_are_found_wherever_they_are():
    optimizer, other = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    outer = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [3])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    unrelated = torch.optim.lr_scheduler.StepLR(other, 2)
    assert {id(one) for one in schedulers_of([optimizer])} == {id(outer), id(plateau)}
    assert [id(one) for one in schedulers_of([other])] == [id(unrelated)]
