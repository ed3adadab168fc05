"""Notifications: what is sent, that nobody waits for it, and that no secret is written anywhere."""

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from aiosmtpd.controller import Controller

import forewarn
from forewarn.cli import main
from forewarn.judge.rules import find_rule
from forewarn.types import AlertState, RunStart, Severity
from forewarn.views import notify
from forewarn.views.notify import Notifier, Service, message, services
from tests.views.made import alert

TOKEN = "s3cr3tt0k3n"
CRITICAL = Severity.CRITICAL


class Endpoint(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(json.loads(body))
        self.server.arrived.set()
        self.send_response(self.server.status)
        if self.server.moved_to:
            self.send_header("Location", self.server.moved_to)
        self.end_headers()

    def do_GET(self):
        self.server.received.append(dict(self.headers))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint():
    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    server.received, server.arrived, server.status, server.moved_to = [], threading.Event(), 200, ""
    server.url = f"json://user:{TOKEN}@127.0.0.1:{server.server_port}/{TOKEN}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Inbox:
    """A service that keeps what it is sent; while `open` is cleared, it does not answer."""

    def __init__(self, accepts=True):
        self.texts = []
        self.accepts = accepts
        self.open = threading.Event()
        self.open.set()
        self.called = threading.Semaphore(0)

    def __call__(self, title, body):
        self.called.release()
        self.open.wait(60)
        self.texts.append(body)
        if isinstance(self.accepts, Exception):
            raise self.accepts
        return self.accepts

    def notifier(self, at="critical", **settings):
        settings = {"pauses": (0.0, 0.0), "seconds_apart": 0.0} | settings
        notifier = Notifier([Service("inbox", self)], at, **settings)
        notifier.begin(RunStart(Path("runs/exp1"), None, 60))
        return notifier


def train(run, *, losses=(1.0,) * 12 + (float("nan"),) * 3, **given):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with forewarn.watch(model, optimizer, run, views=[], **given) as monitor:
        for value in losses:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 2)).square().mean() * value
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


def test_a_message_names_the_run_the_step_what_happened_and_what_to_do(endpoint, tmp_path):
    train(tmp_path / "exp1", notify=[endpoint.url])
    (sent,) = endpoint.received
    assert sent["title"] == "forewarn: exp1"
    first, *rest = sent["message"].splitlines()
    assert first.startswith("✖ step 12  ")
    assert any(line.startswith("  do ") for line in rest)
    assert rest[-1].startswith(f"forewarn check {tmp_path}/exp1 ")
    assert len(rest) < 10


def test_no_secret_is_stored_logged_or_shown(endpoint, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    endpoint.status = 500
    settings = forewarn.Config(notify=[endpoint.url])
    assert TOKEN not in repr(settings)
    monitor = train(tmp_path / "exp1", config=settings)
    assert endpoint.received
    assert "notification" in caplog.text
    assert TOKEN not in caplog.text
    assert TOKEN not in "".join(capfd.readouterr())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in repr(monitor.config)
    assert TOKEN not in str(monitor.state_dict())


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_is_not_followed_since_the_message_and_its_secrets_would_go_elsewhere(endpoint, status):
    endpoint.status, endpoint.moved_to = status, f"http://localhost:{endpoint.server_port}/login"
    (service,) = services([f"{endpoint.url}?+X-Key={TOKEN}"])
    assert list(notify.deliver([service], "title", "text")) == [service]
    assert len(endpoint.received) == 1


def test_a_service_that_never_ends_its_answer_counts_as_dead_and_the_next_one_is_told(monkeypatch):
    monkeypatch.setattr(notify, "MOST_SECONDS_OF_ATTEMPT", 0.2)
    stuck, other = Inbox(), Inbox()
    stuck.open.clear()
    first, second = Service("stuck", stuck), Service("other", other)
    assert notify.deliver([first, second], "title", "text") == {first: "no answer within 0 s"}
    assert other.texts == ["text"]
    stuck.open.set()


def test_whatever_a_library_logs_while_it_sends_is_dropped_and_nothing_else(caplog):
    caplog.set_level(logging.DEBUG)
    library = logging.getLogger("some.library.that.sends")

    def send(title, body):
        library.debug("connecting to %s", TOKEN)
        logging.debug("connected to %s", TOKEN)
        return True

    notify.deliver([Service("library", send)], "title", "text")
    assert TOKEN not in caplog.text
    library.debug("something else")
    assert "something else" in caplog.text


@pytest.mark.parametrize("urls", [f"slack://{TOKEN}", [f"slakc://{TOKEN}"], [TOKEN], [f"json://{TOKEN} x"], [TOKEN, 7]])
def test_a_wrong_url_is_refused_without_being_shown(urls, tmp_path):
    for wrong in ({"notify": urls}, {"config": {"notify": urls}}):
        if wrong == {"notify": [f"json://{TOKEN} x"]}:
            continue
        with pytest.raises((TypeError, ValueError)) as error:
            train(tmp_path / "run", **wrong)
        assert TOKEN not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_environment_and_the_config_name_services_too(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREWARN_NOTIFY", f"{endpoint.url} {endpoint.url}")
    train(tmp_path / "exp1")
    assert len(endpoint.received) == 2
    config = tmp_path / "forewarn.toml"
    config.write_text(f'notify = ["{endpoint.url}"]\n')
    train(tmp_path / "exp2", config=config)
    assert [sent["title"] for sent in endpoint.received[2:]] == ["forewarn: exp2"]


def test_by_mail(tmp_path):
    mails = []

    class Mailbox:
        async def handle_DATA(self, server, session, envelope):  # noqa: N802
            mails.append((envelope.rcpt_tos, envelope.content.decode()))
            return "250 OK"

    server = Controller(Mailbox(), hostname="127.0.0.1", port=_free_port())
    server.start()
    try:
        url = f"mailto://127.0.0.1:{server.port}?from=a@example.org&to=b@example.org&mode=insecure&format=text"
        train(tmp_path / "exp1", notify=[url])
    finally:
        server.stop()
    ((receivers, content),) = mails
    assert receivers == ["b@example.org"]
    assert "Subject: forewarn: exp1" in content


def _free_port():
    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    server.server_close()
    return server.server_port


def test_a_dead_service_does_not_hold_up_the_training_and_is_one_alert(tmp_path, monkeypatch):
    inbox = Inbox(accepts=False)
    monkeypatch.setattr(notify, "services", lambda urls: [Service("inbox", inbox)])
    monkeypatch.setattr("forewarn.attach.services", lambda urls: [Service("inbox", inbox)])
    monkeypatch.setattr(notify, "PAUSES", (0.0, 0.0))
    inbox.open.clear()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with forewarn.watch(model, optimizer, tmp_path / "run", views=[], notify=["json://x"]) as monitor:
        for _ in range(20):
            monitor.step(float("nan"))  # these return although nobody answers
        inbox.open.set()
        for _ in range(3):
            assert inbox.called.acquire(timeout=30)
        while not monitor._views.undelivered:
            threading.Event().wait(0.01)
        for _ in range(3):
            monitor.step(float("nan"))
    assert [(found.code, found.severity) for found in monitor.alerts if found.code == "X107"] == [
        ("X107", Severity.WARNING)
    ]
    assert len(inbox.texts) >= 3  # the first attempt and two more


def test_a_service_that_recovers_ends_the_alert():
    inbox = Inbox(accepts=OSError(TOKEN))
    notifier = inbox.notifier()
    notifier.show(5, (), [alert(severity=CRITICAL)], ())
    for _ in range(3):
        assert inbox.called.acquire(timeout=30)
    while not notifier.undelivered:
        threading.Event().wait(0.01)
    assert notifier.undelivered == "inbox: OSError"
    inbox.accepts = True
    notifier.show(50, (), [alert("G102", severity=CRITICAL)], ())
    notifier.close()
    assert notifier.undelivered == ""


def test_alerts_of_one_step_are_one_message_and_symptoms_need_none_of_their_own():
    inbox = Inbox()
    notifier = inbox.notifier("warning")
    notifier.show(5, (), [alert(), alert("G102", severity=CRITICAL, follows="L102")], ())
    notifier.show(6, (), [alert("U102", follows="L102")], ())
    notifier.close()
    (text,) = inbox.texts
    assert "loss-spike" in text
    assert "exploding-gradient" in text


def test_less_severe_alerts_are_not_sent():
    inbox = Inbox()
    notifier = inbox.notifier()
    notifier.show(5, (), [alert()], ())
    notifier.close()
    assert inbox.texts == []


def test_resolved_is_told():
    inbox = Inbox()
    notifier = inbox.notifier()
    notifier.show(5, (), [alert(severity=CRITICAL)], ())
    assert inbox.called.acquire(timeout=30)
    notifier.show(9, (), [alert(severity=CRITICAL, state=AlertState.RESOLVED)], ())
    notifier.close()
    assert "Resolved: loss-spike" in inbox.texts[-1]


def test_news_that_come_close_together_are_one_message():
    inbox = Inbox()
    notifier = inbox.notifier(seconds_apart=3600.0)
    codes = ["L102", "G102", "U102", "A103", "W102"]
    notifier.show(5, (), [alert(codes[0], severity=CRITICAL)], ())
    assert inbox.called.acquire(timeout=30)
    for step, code in enumerate(codes[1:], 6):
        notifier.show(step, (), [alert(code, severity=CRITICAL)], ())
    notifier.close()
    assert len(inbox.texts) == 2
    assert all(f"step {step}" in inbox.texts[1] for step in range(6, 10))


def test_a_message_is_short_and_mentions_nobody():
    title, text = message(Path("runs/<!channel>"), [f"@everyone {index}" for index in range(100)])
    assert len(text.splitlines()) == notify.MOST_LINES + 2
    assert "<!" not in title + text
    assert "@everyone" not in text


def test_a_function_is_called_with_each_alert_and_its_error_ends_nothing(tmp_path, caplog):
    seen = []
    train(tmp_path / "a", on_alert=seen.append)
    assert "non-finite-loss" in [found.name for found in seen]
    assert AlertState.PENDING not in [found.state for found in seen]

    def fail(found):
        raise ValueError("mine")

    monitor = train(tmp_path / "b", on_alert=fail)
    assert monitor.at == 15
    with pytest.raises(TypeError, match="on_alert must be a function"):
        train(tmp_path / "c", on_alert="x")


def test_the_command_sends_a_sample(endpoint, monkeypatch, capsys):
    monkeypatch.delenv("FOREWARN_NOTIFY", raising=False)
    assert call("notify", "--test", endpoint.url) == 0
    assert capsys.readouterr().out == "✓ json: delivered\n"
    words = endpoint.received[0]["message"].splitlines()[0]
    assert "sample" in words
    find_rule(words.partition("(")[2].rstrip(")"))
    assert call("notify") == 64
    endpoint.status = 404
    monkeypatch.setenv("FOREWARN_NOTIFY", endpoint.url)
    assert call("notify") == 1
    assert call("notify", "--test", f"slakc://{TOKEN}") == 64
    assert TOKEN not in "".join(capsys.readouterr())


def call(*arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def test_services_are_named_by_their_scheme():
    found = services(["json://localhost", "mailto://a:b@example.org"])
    assert [service.name for service in found] == ["json", "mailto"]
