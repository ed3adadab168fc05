import copy
import gc
import io
import math
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import forewarn
from forewarn.config import Config
from forewarn.judge.diagnosis import replay
from forewarn.judge.families import Family
from forewarn.judge.rules import family_of
from forewarn.types import AlertState, Severity
from tests.conftest import last


def train(model, optimizer, monitor, steps, seed=0, lr=None):
    generator = torch.Generator().manual_seed(seed)
    outcomes = []
    for _ in range(steps):
        x = torch.randn(16, 4, generator=generator)
        loss = (model(x) - x[:, :2]).square().mean()
        loss.backward()
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        outcomes.append(monitor.step(loss))
    return outcomes


class Recorder:
    """A view that keeps what it is shown."""

    def __init__(self):
        self.steps, self.changed, self.closed = [], [], 0

    def show(self, step, blocks, changed, taken):
        self.steps.append(step)
        self.changed += changed

    def close(self):
        self.closed += 1


def test_the_ema_is_the_formula(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer, config=forewarn.Config(measure=forewarn.Measure(ema_decay=0.9)))
    losses = [2.0, 4.0, float("nan"), 1.0]
    for loss in losses:
        monitor.step(loss)
    found = monitor.history.series("train/loss_ema").values
    np.testing.assert_allclose(found, [2.0, 2.2, 2.2, 0.9 * 2.2 + 0.1], rtol=1e-6)


def test_values_of_the_users_own_are_recorded_with_the_step(small, watch, tmp_path):
    model, optimizer = small
    monitor = watch(model, optimizer, run=tmp_path / "mine")
    monitor.log("eval/accuracy", 0.5)
    monitor.log("eval/accuracy", torch.tensor(0.75), scope="french")
    monitor.step(1.0, accuracy=torch.tensor(0.25))
    monitor.log("eval/final", 3.0)
    monitor.close()
    with forewarn.open_run(tmp_path / "mine") as run:
        assert run.series("eval/accuracy").values.tolist() == [0.5]
        assert run.series("eval/accuracy", "french").values.tolist() == [0.75]
        assert run.series("train/accuracy").values.tolist() == [0.25]
        assert run.series("eval/final").steps.tolist() == [0]


def test_views_see_every_step_and_are_closed_once(small, watch):
    model, optimizer = small
    view = Recorder()
    monitor = watch(model, optimizer, views=[view])
    train(model, optimizer, monitor, 3)
    monitor.close()
    monitor.close()
    assert view.steps == [0, 1, 2]
    assert view.closed == 1


def test_a_view_that_raises_is_dropped_and_the_run_goes_on(small, watch):
    class Broken(Recorder):
        def show(self, *args):
            raise OSError("no terminal")

    model, optimizer = small
    other = Recorder()
    monitor = watch(model, optimizer, views=[Broken(), other])
    train(model, optimizer, monitor, 3)
    assert other.steps == [0, 1, 2]
    assert ("X101", "view Broken") in {alert.identity for alert in monitor.alerts}


def test_a_probe_that_raises_is_switched_off_and_becomes_an_alert(small, watch, tmp_path):
    model, optimizer = small
    monitor = watch(model, optimizer, run=tmp_path / "broken")

    def explode(measured):
        raise RuntimeError("cannot read this")

    monitor._probes["weights"].collect = explode
    train(model, optimizer, monitor, 3)
    assert monitor.firing[0].identity == ("X101", "weights")
    assert "weight/norm" not in monitor.history
    assert last(monitor, "gradient/global_norm") > 0
    monitor.close()
    with forewarn.open_run(tmp_path / "broken") as run:
        assert [event.data["error"] for event in run.events() if event.kind == "probe_failed"] == [
            "RuntimeError: cannot read this"
        ]


def test_an_anomaly_makes_the_schedule_dense_for_a_while(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer, every=forewarn.Schedule(every=1000, dense=1),
                    config=forewarn.Config(escalation_steps=5))  # fmt: skip
    train(model, optimizer, monitor, 10)
    assert monitor.history.panel("weight/norm").steps.tolist() == [0]
    monitor.step(float("nan"))
    train(model, optimizer, monitor, 10)
    assert monitor.history.panel("weight/norm").steps.tolist() == [0, 11, 12, 13, 14, 15]


@forewarn.rule(
    "Z901", "heavy-weights", reads=("weight/global_norm",), hold=3, message="Heavy weights",
    remedies=(forewarn.advise("look", "Look at the weights", "they are heavy"),),
)  # fmt: skip
def heavy_weights(norm):
    """The weights are heavy.

    ## Why is this bad?
    It is a test.

    ## Example
    fires: 1.0 1.2x3
    quiet: 1.0x4
    """
    limit = 1.05 * norm.values[0]
    return forewarn.finding(Severity.WARNING, norm.last, limit) if norm.last > limit else None


@pytest.mark.parametrize(("until", "fired", "measured"), [(99, [22], [20, 21, 22]), (21, [], [20, 21, 22, 30])])
def test_a_warning_that_waits_for_another_check_is_looked_at_again_at_once(small, watch, until, fired, measured):
    model, optimizer = small
    monitor = watch(model, optimizer, every=forewarn.Schedule(every=10, dense=1), rules=[heavy_weights],
                    config=forewarn.Config(escalation_steps=2))  # fmt: skip
    for step in range(31):
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(0.11 if 15 <= step < until else 0.1)
        train(model, optimizer, monitor, 1, lr=1e-3)
        if step == 22:
            assert [alert.fired for alert in monitor.alerts if alert.code == "Z901"] == fired
    steps = monitor.history.panel("weight/norm").steps.tolist()
    assert [step for step in steps if 12 <= step <= measured[-1]] == measured


def test_the_stop_policy_asks_for_a_stop_and_the_default_never_does(small, watch):
    for policy, expected in (("observe", False), ("stop", True)):
        model, optimizer = small
        monitor = watch(model, optimizer, policy=policy)
        assert not monitor.should_stop
        outcome = monitor.step(float("nan"))
        assert monitor.should_stop is expected
        assert bool(outcome.actions) is expected
        assert outcome.alerts[0].name == "non-finite-loss"


@pytest.mark.parametrize("how", ["state", "replay"])
def test_a_run_is_asked_to_stop_once_and_once_more_if_it_is_resumed_and_fails_again(how, small, watch, tmp_path):
    def steps(monitor, losses):
        for factor in losses:
            loss = model(torch.ones(2, 4)).square().mean() * factor
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield from monitor.step(loss).actions

    model, optimizer = small
    good, nan = copy.deepcopy(model.state_dict()), float("nan")
    monitor = watch(model, optimizer, run=tmp_path / "run", policy="stop")
    stops = list(steps(monitor, [1.0, 1.0, nan, nan, nan]))
    assert [(action.step, action.code) for action in stops] == [(2, "L101")], "gradients and weights are NaN as well"
    state = monitor.state_dict()
    monitor.close()

    model.load_state_dict(good)
    monitor = watch(model, optimizer, run=tmp_path / "run", policy="stop", resume=True)
    if how == "state":
        monitor.load_state_dict(state)
    assert not monitor.should_stop
    assert not list(steps(monitor, [1.0, 1.0]))
    assert not monitor.should_stop
    stops = list(steps(monitor, [nan, nan]))
    assert [(action.step, action.code) for action in stops] == [(7, "L101")], "the alert of before is still open"
    assert monitor.should_stop
    monitor.close()
    with forewarn.open_run(tmp_path / "run") as run:
        assert [action.step for action in run.actions()] == [2, 7]


def test_an_exception_that_ends_the_run_is_recorded_as_its_end(small, tmp_path):
    model, optimizer = small

    def train_out_of_memory():
        with forewarn.watch(model, optimizer, tmp_path / "r", views=[]) as monitor:
            train(model, optimizer, monitor, 2)
            raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train_out_of_memory()
    with forewarn.open_run(tmp_path / "r") as run:
        assert run.end[0] == "RuntimeError: CUDA out of memory"
        assert run.last_step == 1


def test_live_and_replayed_verdicts_are_equal_field_by_field(small, watch, tmp_path):
    model, optimizer = small
    monitor = watch(model, optimizer, run=tmp_path / "faulty", every=5)
    train(model, optimizer, monitor, 60)
    train(model, optimizer, monitor, 12, lr=40.0)
    assert {"U104", "L102"} & {alert.code for alert in monitor.alerts}
    monitor.close()
    with forewarn.open_run(tmp_path / "faulty") as run:
        diagnosis = replay(run, Config.from_stored(run.config).rule_set())
        stored = run.alerts()
    assert repr(diagnosis.alerts) == repr(monitor.alerts)
    fired = {(alert.identity, alert.since): alert for alert in stored}
    assert set(fired) == {(alert.identity, alert.since) for alert in monitor.alerts}


def pieces(tmp_path, cut, how):
    """A run in two pieces, resumed in the given way, and its twin in one piece."""
    runs = []
    for name, parts in (("whole", [100]), ("parts", [cut, 100 - cut])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        saved = None
        for at, steps in enumerate(parts):
            monitor = forewarn.watch(model, optimizer, tmp_path / name, every=7, views=[], resume=at > 0)
            if saved is not None and how == "state":
                saved.seek(0)
                monitor.load_state_dict(torch.load(saved, weights_only=True))
            assert monitor.at == sum(parts[:at])
            train(model, optimizer, monitor, steps, seed=at if name == "parts" else 0)
            saved = io.BytesIO()
            torch.save(monitor.state_dict(), saved)
            if how == "state" and at + 1 < len(parts):
                train(model, optimizer, monitor, 0)
            monitor.close()
        runs.append(monitor)
    return runs


@pytest.mark.parametrize("how", ["state", "directory"])
def test_a_resumed_run_continues_its_series_without_a_seam(tmp_path, how):
    pieces(tmp_path, 40, how)
    with forewarn.open_run(tmp_path / "parts") as run:
        for name in ("train/loss", "train/loss_ema", "gradient/global_norm", "train/lr"):
            scope = "0" if name == "train/lr" else ""
            assert run.series(name, scope).steps.tolist() == list(range(100))
        loss, ema = run.series("train/loss").values, run.series("train/loss_ema").values
        expected = loss[0]
        for at in range(1, 100):
            expected = 0.99 * expected + 0.01 * loss[at]
            assert ema[at] == pytest.approx(expected, rel=1e-5)
        assert run.end[0] == "completed"


def test_state_restores_history_alerts_and_baselines_exactly(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer, every=3)
    train(model, optimizer, monitor, 50)
    monitor.step(float("nan"))
    file = io.BytesIO()
    torch.save(monitor.state_dict(), file)
    file.seek(0)
    twin = watch(model, optimizer, every=3)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert twin.at == monitor.at
    assert repr(twin.alerts) == repr(monitor.alerts)
    assert repr(twin.history.state_dict()) == repr(monitor.history.state_dict())
    for value in (0.3, 900.0, 900.0, 900.0):
        changed = [each.step(value).alerts for each in (monitor, twin)]
        loss_only = [[a for a in alerts if family_of(a.code) is Family.LOSS] for alerts in changed]
        assert repr(loss_only[0]) == repr(loss_only[1])
    assert any(alert.code == "L102" for alert in twin.alerts)


def test_loading_an_older_state_discards_what_the_run_recorded_after_it(small, watch, tmp_path):
    model, optimizer = small
    monitor = watch(model, optimizer, run=tmp_path / "r")
    train(model, optimizer, monitor, 5)
    state = monitor.state_dict()
    train(model, optimizer, monitor, 5)
    monitor.load_state_dict(state)
    assert monitor.at == 5
    train(model, optimizer, monitor, 1)
    monitor.close()
    with forewarn.open_run(tmp_path / "r") as run:
        assert run.series("train/loss").steps.tolist() == [0, 1, 2, 3, 4, 5]


def test_recording_that_fails_becomes_an_alert_and_training_goes_on(small, watch, tmp_path, monkeypatch):
    model, optimizer = small
    monitor = watch(model, optimizer, run=tmp_path / "r")
    monkeypatch.setattr(type(monitor._writer), "failure", "the disk is full")
    train(model, optimizer, monitor, 3)
    assert monitor.firing[0].name == "store-failed"
    monkeypatch.undo()


def test_a_run_that_cannot_be_recorded_at_first_is_told_and_recorded_from_its_first_step_later(
    small, watch, tmp_path, monkeypatch, caplog
):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    model, optimizer = small
    monkeypatch.setattr("forewarn.store.background._RETRY_SECONDS", 0.02)
    with monkeypatch.context() as patch:
        patch.setattr("forewarn.store.writer.Path.mkdir", refuse)
        monitor = watch(model, optimizer, run=tmp_path / "r")
        train(model, optimizer, monitor, 3)
    assert monitor.firing[0].name == "store-failed"
    [stopped] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "No space left on device): this run is not recorded until it can; training continues" in stopped
    end = time.monotonic() + 20
    while monitor._writer.failure is not None:
        assert time.monotonic() < end
        time.sleep(0.01)
    train(model, optimizer, monitor, 60)
    assert "store-failed" not in [alert.name for alert in monitor.firing]
    assert f"recording continues: {tmp_path / 'r'} is writable again" in caplog.messages
    monitor.close()
    with forewarn.open_run(tmp_path / "r") as run:
        assert run.series("train/loss").steps.tolist() == list(range(63))
        assert run.series("monitor/store_failed").values.tolist() == [1.0, 0.0]
        assert repr(replay(run, Config.from_stored(run.config).rule_set()).alerts) == repr(monitor.alerts)


def test_a_directory_that_cannot_be_made_becomes_an_alert(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer, run="/proc/no/such/place")
    train(model, optimizer, monitor, 3)
    assert monitor.firing[0].name == "store-failed"


def test_a_failure_inside_the_monitor_never_reaches_the_loop(small, watch, monkeypatch):
    model, optimizer = small
    monitor = watch(model, optimizer)

    def explode(*args):
        raise MemoryError

    monkeypatch.setattr(monitor._ledger, "update", explode)
    outcomes = train(model, optimizer, monitor, 2)
    assert outcomes[-1].alerts == ()
    assert monitor.at == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": 3}, TypeError, "model must be a torch.nn.Module"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be a torch Optimizer"),
        ({"optimizer": []}, TypeError, "optimizer must be a torch Optimizer"),
        ({"scaler": object()}, TypeError, "GradScaler"),
        ({"every": "often"}, TypeError, "every must be"),
        ({"every": 0}, ValueError, "at least 1"),
        ({"policy": "panic"}, ValueError, "policy must be"),
        ({"config": forewarn.Config(disable=("loss-spikes",))}, ValueError, "did you mean 'loss-spike'"),
    ],
)
def test_wrong_arguments_are_refused_at_attach_time_and_leave_nothing_behind(small, tmp_path, change, error, message):
    model, optimizer = small
    arguments = {"model": model, "optimizer": optimizer, "run": tmp_path / "r", "views": []} | change
    with pytest.raises(error, match=message):
        forewarn.watch(**arguments)
    assert not model._forward_hooks
    assert not (tmp_path / "r").exists()


def test_an_optimizer_of_another_model_is_refused(small, tmp_path):
    model, _ = small
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="holds no parameter of this Sequential"):
        forewarn.watch(model, stranger, tmp_path / "r")


@pytest.mark.parametrize("value", [1 + 2j, np.complex64(1 + 2j), np.array([1 + 2j]), torch.tensor(1 + 2j)])
def test_a_complex_value_is_refused_rather_than_cut(small, watch, value):
    monitor = watch(*small)
    with pytest.raises(TypeError, match=r"user/phase must be a real number.*record its abs\(\)"):
        monitor.log("user/phase", value)
    with pytest.raises(TypeError, match="loss must be a real number"):
        monitor.step(value)


def test_a_wrong_loss_is_refused_at_the_first_step_and_left_out_later(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    with pytest.raises(ValueError, match=r"pass its mean\(\)"):
        monitor.step(torch.ones(3))
    for words in ("low", "0.3"):
        with pytest.raises(TypeError, match="must be a number"):
            monitor.step(words)
    train(model, optimizer, monitor, 2)
    monitor.step(torch.ones(3))
    assert len(monitor.history.series("train/loss")) == 2


@pytest.mark.parametrize("extra", [{"lr": 0.1}, {"Accuracy!": 0.5}, {"accuracy": torch.ones(3)}])
def test_a_wrong_further_value_does_not_take_the_loss_with_it(extra, small, watch):
    monitor = watch(*small)
    monitor.step(1.0)
    monitor.step(2.0, **extra)
    assert monitor.history.series("train/loss").values.tolist() == [1.0, 2.0]


def test_a_metric_with_a_bad_name_is_refused(small, watch):
    monitor = watch(*small)
    with pytest.raises(ValueError, match="family/quantity"):
        monitor.log("accuracy", 1.0)


def test_a_closed_monitor_says_so(small, watch):
    monitor = watch(*small)
    monitor.close()
    for call in (lambda: monitor.step(1.0), lambda: monitor.log("a/b", 1.0), lambda: monitor.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_watch_takes_seventeen_arguments_and_no_more():
    import inspect

    assert list(inspect.signature(forewarn.watch).parameters) == [
        "model", "optimizer", "run", "every", "config", "views", "policy", "scaler", "resume", "overwrite", "metrics",
        "rules", "probes", "budget", "notify", "notify_at", "on_alert",
    ]  # fmt: skip


def test_a_compiled_model_is_watched_under_its_own_names(watch):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model = torch.compile(inner, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor, 2)
    assert monitor.history.panel("gradient/norm").scopes == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert last(monitor, "gradient/global_norm") > 0


def test_importing_forewarn_imports_neither_torch_nor_numpy():
    code = "import sys, forewarn; print(sorted({'torch', 'numpy', 'rich', 'click'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names_all_resolve():
    for name in forewarn.__all__:
        assert getattr(forewarn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        forewarn.nonsense  # noqa: B018


def test_no_thread_is_left_after_closing(small, tmp_path):
    before = threading.active_count()
    monitor = forewarn.watch(*small, tmp_path / "r", views=[])
    monitor.step(1.0)
    monitor.close()
    assert threading.active_count() == before
    assert not math.isnan(os.path.getsize(tmp_path / "r" / "run.db"))


def test_the_default_run_directory_is_a_new_one_under_runs(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monitor = forewarn.watch(*small, views=[])
    monitor.step(1.0)
    monitor.close()
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_alerts_have_the_fields_that_people_read(small, watch):
    monitor = watch(*small)
    monitor.step(float("inf"))
    (alert,) = [alert for alert in monitor.alerts if alert.code == "L101"]
    assert (alert.name, alert.scope, alert.severity, alert.state, alert.since) == (
        "non-finite-loss", "", Severity.CRITICAL, AlertState.FIRING, 0,
    )  # fmt: skip
    assert alert.remedies


def test_a_monitor_that_nobody_holds_takes_its_hooks_with_it(small, tmp_path):
    model, optimizer = small
    monitor = forewarn.watch(model, optimizer, tmp_path / "r", views=[])
    monitor.step(1.0)
    del monitor
    gc.collect()
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_a_failure_of_the_monitor_itself_becomes_one_alert(small, watch, caplog, monkeypatch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    update, calls = monitor._ledger.update, []

    def explode_twice(*args):
        calls.append(1)
        if len(calls) < 3:
            raise MemoryError("no room")
        return update(*args)

    monkeypatch.setattr(monitor._ledger, "update", explode_twice)
    train(model, optimizer, monitor, 5)
    assert ("X101", "monitor") in {alert.identity for alert in monitor.alerts}
    assert caplog.text.count("the monitor itself failed") == 1


@pytest.mark.parametrize("name", ["loss_ema", "lr"])
def test_names_of_the_monitors_own_series_are_refused(small, watch, name):
    monitor = watch(*small)
    with pytest.raises(ValueError, match="the monitor already records"):
        monitor.step(1.0, **{name: 0.5})
    with pytest.raises(ValueError, match="the monitor already records"):
        monitor.log("gradient/norm", 1.0)


def test_a_logged_tensor_is_read_as_it_was(small, watch):
    monitor = watch(*small)
    value = torch.tensor(0.75)
    monitor.log("eval/accuracy", value)
    value.zero_()
    monitor.step(1.0)
    assert last(monitor, "eval/accuracy") == 0.75


def test_two_default_directories_within_a_second_are_two(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monitors = [forewarn.watch(*small, views=[]) for _ in range(3)]
    for monitor in monitors:
        monitor.close()
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_an_optimizer_behind_a_wrapper_is_found(small, watch):
    model, optimizer = small

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.optimizer = inner

        def step(self, closure=None):
            self.optimizer.step(closure)

        def zero_grad(self, set_to_none=True):
            self.optimizer.zero_grad(set_to_none)

    wrapper = Wrapper(optimizer)
    monitor = watch(model, wrapper)
    loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    wrapper.step()
    monitor.step(loss)
    assert last(monitor, "update/optimizer_steps") == 1


def test_state_of_a_model_with_other_parameters_is_taken_by_name(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor, 5)
    state = monitor.state_dict()
    larger = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.Linear(2, 2))
    other = torch.optim.SGD(larger.parameters(), lr=0.1)
    twin = watch(larger, other)
    twin.load_state_dict(state)
    train(larger, other, twin, 3)
    assert "X101" not in {alert.code for alert in twin.alerts}


def test_the_run_of_a_different_model_is_not_resumed(small, watch, tmp_path):
    model, optimizer = small
    monitor = watch(model, optimizer, run=tmp_path / "r")
    train(model, optimizer, monitor, 2)
    monitor.close()
    other = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="a run of a different model"):
        forewarn.watch(other, torch.optim.SGD(other.parameters(), lr=0.1), tmp_path / "r", resume=True)
    assert not other._forward_hooks
