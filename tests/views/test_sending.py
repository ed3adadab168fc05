"""Trackers that are slow, down or not there: the training goes on, and one line and one alert say so."""

import logging
import threading
import time

import pytest
import torch

import forewarn
from forewarn.types import AlertState, RunEnd
from forewarn.views import sending
from forewarn.views.sending import MOST_ROWS, TrackerView
from tests.views.made import alert, block


class Tracker(TrackerView):
    """Keeps what it is sent. While `open` is cleared it does not answer; `error` is raised instead of keeping."""

    tracker = "Tracker"
    _advice = "call tracker.init() first"

    def __init__(self, run="run", detail="aggregates"):
        super().__init__(run, 5, detail)
        self.rows, self.announced, self.notes, self.settings = [], [], {}, {}
        self.error, self.active, self.is_finished = None, None, False
        self.open = threading.Event()
        self.open.set()
        self.called = threading.Semaphore(0)

    def _find(self):
        return self.active

    def _is_over(self):
        return self.is_finished

    def _do(self):
        self.called.release()
        self.open.wait(60)
        if self.error is not None:
            raise self.error

    def _set_up(self, start, settings):
        self._do()
        self.settings = settings

    def _write(self, rows):
        self._do()
        self.rows += rows

    def _announce(self, announcement):
        self._do()
        self.announced.append(announcement)

    def _note(self, name, text):
        self._do()
        self.notes[name] = text


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(sending, "SECONDS_AFTER_A_FAILURE", 0.0)
    monkeypatch.setattr(sending, "MOST_SECONDS_AFTER_A_FAILURE", 0.01)


def train(run, view, steps=30, each=lambda step: None, **given):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with forewarn.watch(model, optimizer, run, views=[view], **given) as monitor:
        for step in range(steps):
            each(step)
            optimizer.zero_grad()
            loss = model(torch.ones(4, 2)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_step_arrives_with_its_number_and_the_settings_of_the_run(tmp_path):
    view = Tracker()
    monitor = train(tmp_path / "run", view, config={"hyperparameters": {"dropout": 0.1}})
    assert [row.step for row in view.rows] == list(range(30))
    with forewarn.open_run(monitor.path) as run:
        losses = run.series("train/loss").values.tolist()
    assert [row.values["forewarn/train/loss"] for row in view.rows] == losses
    assert view.settings["lr"] == 0.01
    assert view.settings["dropout"] == 0.1
    assert view.settings["model"] == "Linear"
    assert view.notes["verdict"] in ("healthy", "warning")


def test_names_of_layers_come_with_full_detail_only(tmp_path):
    few, many = Tracker(), Tracker(detail="full")
    train(tmp_path / "few", few, steps=3)
    train(tmp_path / "many", many, steps=3)
    assert "forewarn/weight/weight/norm" not in few.rows[0].values
    assert "forewarn/weight/weight/norm" in many.rows[0].values
    assert set(few.rows[0].histograms) == {"forewarn/gradient/histogram", "forewarn/weight/histogram"}
    counts, edges = few.rows[0].histograms["forewarn/weight/histogram"]
    assert len(edges) == len(counts) + 1
    assert counts.sum() == 6


def test_a_tracker_that_does_not_answer_holds_up_nothing_and_is_one_alert(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sending, "SECONDS_TO_ANSWER", 0.05)
    monkeypatch.setattr(sending, "SECONDS_AT_THE_END", 0.1)
    view = Tracker()
    view.open.clear()
    with caplog.at_level(logging.WARNING, "forewarn"):
        monitor = train(tmp_path / "run", view, each=lambda step: time.sleep(0.2) if step == 20 else None)
    view.open.set()
    assert monitor.at == 30
    assert [each.code for each in monitor.alerts if each.code == "X109"] == ["X109"]
    assert [line for line in caplog.messages if "Tracker" in line] == [
        "Tracker has not answered for 0 seconds; training continues", "Tracker did not take everything within 0 s",
    ]  # fmt: skip


def test_a_tracker_that_fails_is_one_alert_and_its_password_is_not_logged(tmp_path, caplog):
    view = Tracker()
    view.error = ConnectionError("https://user:s3cr3t@tracker.example refused")
    with caplog.at_level(logging.WARNING, "forewarn"):
        monitor = train(tmp_path / "run", view, each=lambda step: time.sleep(0.01))
    assert [each.state for each in monitor.alerts if each.code == "X109"] == [AlertState.FIRING]
    failures = [line for line in caplog.messages if "training continues" in line]
    assert failures == [
        "Tracker takes no readings (ConnectionError: https://tracker.example refused); training continues"
    ]
    assert "s3cr3t" not in caplog.text


def test_a_tracker_that_recovers_gets_the_alerts_that_waited_and_ends_the_alert(tmp_path):
    view = Tracker()

    def each(step):
        time.sleep(0.01)
        view.error = ConnectionError("down") if step < 20 else None

    view.error = ConnectionError("down")
    monitor = train(tmp_path / "run", view, steps=60, each=each)
    assert [each.state for each in monitor.alerts if each.code == "X109"] == [AlertState.RESOLVED]
    assert view.settings
    told = [each.title for each in view.announced if "X109" in each.title]
    assert told == ["X109 tracker-failed: A tracker does not get all readings", "X109 tracker-failed: resolved"]
    assert view.notes["alerts/X109-tracker-failed"].startswith("resolved")


def test_the_oldest_steps_are_left_out_and_no_alert():
    view = Tracker()
    view.open.clear()
    for step in range(MOST_ROWS + 10):
        view.show(step, [block(step, "train/loss", 1.0)], [alert()] if step == 1 else [], [])
        if step == 0:
            view.called.acquire()  # the call that does not return has taken nothing else
    assert view.unsent == "Tracker is slower than the training, so it does not get the readings of every step"
    view.open.set()
    until(lambda: len(view.rows) > MOST_ROWS)
    assert "slower" in view.unsent  # said until the end, because these steps are missing for good
    view.close()
    assert [row.step for row in view.rows][-MOST_ROWS:] == list(range(10, MOST_ROWS + 10))
    assert [each.tag for each in view.announced] == ["L102-loss-spike"]


def test_without_a_run_one_sentence_says_what_to_do_and_a_later_run_is_found(caplog):
    view = Tracker(run=None)
    for step in range(3):
        view.show(step, [block(step, "train/loss", 1.0)], [], [])
    assert caplog.messages == ["no Tracker run is active, so nothing is written to it; call tracker.init() first"]
    view.active = "found"
    view.show(3, [block(3, "train/loss", 1.0)], [], [])
    view.close()
    assert [row.step for row in view.rows] == [3]


def test_a_run_that_was_finished_ends_the_view_without_an_alert(tmp_path, caplog):
    view = Tracker()

    def each(step):
        time.sleep(0.01)
        if step == 10:
            view.is_finished, view.error = True, RuntimeError("the run is finished")

    monitor = train(tmp_path / "run", view, each=each)
    assert "X109" not in {each.code for each in monitor.alerts}
    assert [line for line in caplog.messages if "Tracker" in line] == [
        "the Tracker run is finished, so nothing more is written to it"
    ]


def test_an_alert_is_announced_when_it_fires_and_when_it_is_resolved():
    view = Tracker()
    firing, resolved = alert(scope="head"), alert(scope="head", state=AlertState.RESOLVED)
    view.show(6, [], [alert(scope="head", state=AlertState.PENDING)], [])
    view.show(7, [], [firing, alert(scope="tail")], [])
    until(lambda: "alerts/L102-loss-spike" in view.notes)
    assert view.notes["alerts/L102-loss-spike"].startswith("warning: ")
    assert "in 2 places" in view.notes["alerts/L102-loss-spike"]
    view.show(9, [], [resolved], [])
    view.close()
    first, second = view.announced
    assert (first.step, first.is_firing, second.step, second.is_firing) == (7, True, 9, False)
    assert "where: head, tail" in first.lines
    assert first.lines[-1] == "why: forewarn explain loss-spike"
    assert view.notes["alerts/L102-loss-spike"].endswith(
        "in tail · since step 5 · Lower the learning rate from 0.0003 to 0.00015"
    )


def test_the_same_view_serves_one_run_after_another(tmp_path):
    view = Tracker(run=None)
    view.active = "first"
    train(tmp_path / "a", view, steps=3)
    view.active = "second"
    train(tmp_path / "b", view, steps=3)
    assert [row.step for row in view.rows] == [0, 1, 2, 0, 1, 2]
    assert view._run == "second"


def test_what_waits_is_sent_before_the_end():
    view = Tracker()
    view.open.clear()
    view.show(0, [block(0, "train/loss", 1.0)], [], [])
    view.end(RunEnd(None, "healthy", 0, 1, 1, (), 1.0, 1.0))
    threading.Timer(0.1, view.open.set).start()
    view.close()
    assert len(view.rows) == 1
    assert view.notes["verdict"] == "healthy"


@pytest.mark.parametrize(("name", "package"), [
    ("WandbView", "wandb"), ("MLflowView", "mlflow"), ("TrackioView", "trackio"),
])  # fmt: skip
def test_without_its_package_one_sentence_says_how_to_get_it(name, package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{name} needs {package}: pip install 'forewarn\[{package}\]'"):
        getattr(forewarn, name)()
