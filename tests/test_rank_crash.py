"""One rank of a real torchrun is killed in the middle of a measured step: the run stays readable, the rank is named."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import forewarn
from forewarn.measure.neighbors import Neighbors
from forewarn.store import rank_logs as rank_logs_module
from forewarn.store.rank_logs import LOST_CONTACT, FirstEnd, RankLogWriter, first_to_end, rank_logs

NUM_RANKS = 3
KILLED_AT = 12


class Killed(nn.Linear):
    """A layer in which rank 1 is killed."""

    step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1 and self.step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def train(folder: str, how: str) -> None:
    if how == "patient":  # torchrun's signal comes at any time: so the others end as they would alone
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(4, 8), Killed(8, 2))
    called = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = forewarn.watch(called, optimizer, f"{folder}/run", every=1, views=[])
    while not monitor._exchange.has_met:
        time.sleep(0.01)
    for model[1].step in range(1000):
        loss = called(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="ends of other processes are noticed on Linux only")
@pytest.mark.parametrize("how", ["patient", "plain"])
def test_if_a_rank_is_killed_within_a_measured_step_the_run_is_readable_and_the_rank_is_named(tmp_path, how):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*torchrun, "-m", "tests.test_rank_crash", tmp_path, how],
        capture_output=True, text=True, env=environment, timeout=600,
    )  # fmt: skip
    assert done.returncode != 0
    assert "exitcode  : -9" in done.stderr, done.stderr
    check = subprocess.run(
        [sys.executable, "-m", "forewarn", "check", tmp_path / "run"], capture_output=True, text=True, timeout=600
    )
    assert check.returncode in (0, 1), check.stderr
    with forewarn.open_run(tmp_path / "run") as run:
        is_any = "train/loss" in run.names()  # torchrun may end rank 0 within the half second that is lost at most
        stored = run.series("train/loss").steps.tolist() if is_any else []
        if how == "patient":
            assert stored == list(range(KILLED_AT))
            assert "Connection closed by peer" in run.end[0] or run.end[0] == "not closed"
            assert re.search(r"rank 1 ended first, after step \d+: killed or crashed", check.stdout), check.stdout
        else:
            assert stored == list(range(len(stored)))
            assert len(stored) <= KILLED_AT
            first = first_to_end(tmp_path / "run")
            assert first is None or 1 in first.ranks or not first.ranks, first


LOST = "RuntimeError: [/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def begun_logs(folder):
    logs = [RankLogWriter(rank) for rank in range(3)]
    for log in logs:
        log.begin(folder, 3)
        log.completed(7)
    return logs


def test_if_all_other_ranks_lost_contact_the_rank_without_a_word_ended_first(tmp_path):
    logs = begun_logs(tmp_path)
    logs[2].close(LOST)
    assert first_to_end(tmp_path) == FirstEnd((), 7, LOST_CONTACT), "rank 0 or 1"
    logs[0].close(LOST)
    assert first_to_end(tmp_path) == FirstEnd((1,), 7, "")
    logs[1].close("ConnectionError: the server of the data set does not answer")
    assert first_to_end(tmp_path).reason.startswith("ConnectionError")


def test_a_rank_that_torchrun_killed_without_a_word_is_not_taken_for_the_one_that_left(tmp_path):
    logs = begun_logs(tmp_path)
    logs[1].close("not closed")  # `sys.exit()` in the middle of training, or an error that the script has caught
    logs[2].close(LOST)
    assert first_to_end(tmp_path) == FirstEnd((), 7, LOST_CONTACT), "rank 0 or 1"
    logs[2].saw_end([1])
    assert first_to_end(tmp_path) == FirstEnd((1,), 7, "not closed")
    logs[0].saw_end([2])
    assert first_to_end(tmp_path).ranks == (1,)


@pytest.mark.skipif(sys.platform != "linux", reason="ends of other processes are noticed on Linux only")
def test_an_end_that_is_noticed_only_as_this_process_ends_counts():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    noticed = []
    neighbors = Neighbors({5: process.pid}, noticed.extend)
    process.kill()
    process.wait()
    neighbors.close()
    assert noticed == [5]


def test_the_first_end_that_any_rank_noticed_counts(tmp_path, monkeypatch):
    logs = begun_logs(tmp_path)
    assert first_to_end(tmp_path) is None
    monkeypatch.setattr(rank_logs_module, "_SILENT_SECONDS", -1.0)
    assert first_to_end(tmp_path) == FirstEnd((), 7, "")
    logs[0].saw_end([2])
    logs[1].saw_end([0, 2])
    logs[0].close(LOST * 99)
    assert first_to_end(tmp_path) == FirstEnd((2,), 7, "")
    (tmp_path / "ranks" / "rank-2.json").write_text('{"rank": "two"')
    (tmp_path / "ranks" / "rank-9.json").write_bytes(b"[" * 10_000)
    assert [log.rank for log in rank_logs(tmp_path)] == [0, 1]
    assert all(path.stat().st_size == 2048 for path in tmp_path.glob("ranks/rank-[01].json"))
    RankLogWriter(0).begin(tmp_path, 1)
    assert [path.name for path in tmp_path.glob("ranks/*")] == ["rank-0.json"]


if __name__ == "__main__":
    train(*sys.argv[1:])
