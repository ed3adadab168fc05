"""A script with a fixed name for its run is started a second time."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
import torch

import forewarn
from forewarn.lab.dual_task import DualTaskLSTM
from forewarn.store.claim import new_directory
from tests.lab.test_trainer import mlp_trainer


def recorded(path, steps=2, **options):
    """The monitor of a short run, closed, and what it printed."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = io.StringIO()
    options = {"views": [forewarn.AlertLines(stream)], **options}
    with forewarn.watch(model, optimizer, path, **options) as monitor:
        for _ in range(steps):
            loss = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    return monitor, stream.getvalue()


def num_steps(path):
    with forewarn.open_run(path) as run:
        return run.num_steps


def test_a_second_and_a_third_start_go_beside_the_first_and_say_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monitor, text = recorded("runs/exp1", steps=2)
    assert str(monitor.path) == "runs/exp1"
    assert "stored in runs/exp1\n" in text
    for number, steps in ((2, 3), (3, 4)):
        monitor, text = recorded("runs/exp1", steps=steps)
        assert str(monitor.path) == f"runs/exp1-{number}"
        assert f"stored in runs/exp1-{number}, because runs/exp1 already holds a run\n" in text
    assert [num_steps(tmp_path / "runs" / name) for name in ("exp1", "exp1-2", "exp1-3")] == [2, 3, 4]


def test_a_name_that_anything_else_has_is_passed_over(tmp_path):
    recorded(tmp_path / "exp1")
    (tmp_path / "exp1-2").mkdir()
    (tmp_path / "exp1-3").write_text("a file of the user's")
    assert recorded(tmp_path / "exp1")[0].path == tmp_path / "exp1-4"
    assert not any((tmp_path / "exp1-2").iterdir())


def test_a_directory_without_a_run_is_used_as_it_is(tmp_path):
    (tmp_path / "exp1").mkdir()
    (tmp_path / "exp1" / "notes.txt").write_text("mine")
    assert recorded(tmp_path / "exp1")[0].path == tmp_path / "exp1"


def test_the_directory_one_is_in_gets_a_neighbour(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recorded(".")
    assert recorded(".")[0].path == tmp_path / "here-2"


def test_a_run_whose_process_was_killed_is_left_alone_too(tmp_path):
    script = (
        "import forewarn, os, signal, torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        f"monitor = forewarn.watch(model, torch.optim.SGD(model.parameters(), 0.1), {str(tmp_path / 'exp1')!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert (tmp_path / "exp1" / "run.json").exists()
    assert recorded(tmp_path / "exp1")[0].path == tmp_path / "exp1-2"
    (tmp_path / "exp1" / "run.json").unlink()  # as if it had been killed a little earlier
    assert recorded(tmp_path / "exp1")[0].path == tmp_path / "exp1-3"


@pytest.mark.parametrize("options", [{}, {"overwrite": True}])
def test_a_run_that_is_still_written_is_refused_in_one_sentence(tmp_path, small, options):
    with (
        forewarn.watch(*small, tmp_path / "exp1", views=[]) as monitor,
        pytest.raises(
            FileExistsError, match=r"exp1 is being written by a process that is still running.*run="
        ) as error,
    ):
        forewarn.watch(*small, tmp_path / "exp1", views=[], **options)
    assert "\n" not in str(error.value)
    assert monitor.path == tmp_path / "exp1"
    assert num_steps(tmp_path / "exp1") == 0
    assert not small[0]._forward_hooks


def test_resume_goes_on_and_overwrite_begins_again_in_the_same_place(tmp_path):
    recorded(tmp_path / "exp1", steps=2)
    assert recorded(tmp_path / "exp1", steps=3, resume=True)[0].path == tmp_path / "exp1"
    assert num_steps(tmp_path / "exp1") == 5
    (tmp_path / "exp1" / "weights.pt").write_bytes(b"the user's own")
    monitor, text = recorded(tmp_path / "exp1", steps=4, overwrite=True)
    assert monitor.path == tmp_path / "exp1"
    assert "already holds" not in text
    assert num_steps(tmp_path / "exp1") == 4
    assert (tmp_path / "exp1" / "weights.pt").read_bytes() == b"the user's own"
    assert [path.name for path in tmp_path.iterdir()] == ["exp1"]
    recorded(tmp_path / "new", overwrite=True)  # nothing to overwrite is no error


def test_overwrite_deletes_nothing_that_is_not_a_forewarn_run(tmp_path):
    foreign = {"run.json": b'{"experiment": 1}', "run.db": b"a database of something else"}
    for names in (("run.json",), ("run.db",), ("run.json", "run.db")):
        directory = tmp_path / "-".join(names)
        directory.mkdir()
        for name in names:
            (directory / name).write_bytes(foreign[name])
        with pytest.raises(FileExistsError, match=r"is not overwritten, because it does not hold a run that forewarn"):
            recorded(directory, overwrite=True)
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == {name: foreign[name] for name in names}


def test_resume_and_overwrite_exclude_each_other(tmp_path, small):
    with pytest.raises(ValueError, match="use only one of them"):
        forewarn.watch(*small, tmp_path / "exp1", resume=True, overwrite=True)
    assert not (tmp_path / "exp1").exists()


def test_where_no_view_has_a_start_line_the_log_says_where_the_run_is(tmp_path, caplog):
    recorded(tmp_path / "exp1")
    recorded(tmp_path / "exp1", views=[forewarn.LiveView(console=None)])
    assert f"{tmp_path / 'exp1'} already holds a run; this one is stored in {tmp_path / 'exp1-2'}" in caplog.text


def test_a_name_is_claimed_in_one_go(tmp_path):
    assert new_directory(tmp_path / "runs" / "demo") == tmp_path / "runs" / "demo"
    assert new_directory(tmp_path / "runs" / "demo") == tmp_path / "runs" / "demo-2"


def test_the_trainer_goes_beside_or_overwrites_its_whole_directory(tmp_path, caplog):
    for _ in range(2):
        trainer, loader = mlp_trainer(tmp_path, max_steps=2, snapshot_interval=1)
        trainer.train(loader)
    assert trainer.config.directory == tmp_path / "mlp-2"
    assert f"{tmp_path / 'mlp'} already holds a run; this one is stored in {tmp_path / 'mlp-2'}" in caplog.text
    assert len(list((tmp_path / "mlp-2" / "snapshots").iterdir())) == 2
    (tmp_path / "mlp" / "notes.txt").write_text("mine")
    trainer, loader = mlp_trainer(tmp_path, max_steps=1, snapshot_interval=1)
    trainer.train(loader, overwrite=True)
    assert trainer.config.directory == tmp_path / "mlp"
    assert [path.name for path in (tmp_path / "mlp" / "snapshots").iterdir()] == ["step-00000001.pt"]
    assert num_steps(tmp_path / "mlp" / "run") == 1
    assert (tmp_path / "mlp" / "notes.txt").exists()
    with pytest.raises(ValueError, match="give one of them"):
        trainer.train(loader, resume=True, overwrite=True)


def test_snapshots_without_a_run_are_not_ours_to_delete(tmp_path):
    (tmp_path / "mlp" / "snapshots").mkdir(parents=True)
    kept = tmp_path / "mlp" / "snapshots" / "step-00000009.pt"
    kept.write_bytes(b"mine")
    trainer, loader = mlp_trainer(tmp_path, max_steps=1)
    trainer.train(loader, overwrite=True)
    assert kept.read_bytes() == b"mine"


def test_two_tasks_go_beside_or_overwrite_too(tmp_path):
    places = []
    for overwrite in (False, False, True):
        model = DualTaskLSTM(width=4, predict_pointers=False)
        model.fit(
            torch.randn(20, 5), torch.zeros(20), epochs=1, monitor_gradients=True, result_dir=tmp_path / "tasks",
            overwrite=overwrite,
        )  # fmt: skip
        places.append(model.monitor.path.relative_to(tmp_path).as_posix())
    assert places == ["tasks/run", "tasks-2/run", "tasks/run"]


def test_a_resumed_run_is_locked_once_the_writer_before_it_has_ended(tmp_path, small):
    model, optimizer = small
    first = forewarn.watch(model, optimizer, tmp_path / "run", views=[])
    first.step(1.0)
    second = forewarn.watch(model, optimizer, tmp_path / "run", views=[], resume=True)
    first.close()
    second.step(1.0)
    with pytest.raises(FileExistsError, match="still running"):
        forewarn.watch(model, optimizer, tmp_path / "run", views=[], overwrite=True)
    second.close()


def test_a_trainer_numbers_its_runs_from_the_name_it_was_given(tmp_path):
    trainer, data = mlp_trainer(tmp_path, max_steps=1)
    names = []
    for _ in range(3):
        trainer.train(data)
        names.append(trainer.config.model_name)
    assert names == [names[0], f"{names[0]}-2", f"{names[0]}-3"]


def test_an_overwrite_that_is_interrupted_leaves_no_snapshot_to_a_later_run(tmp_path, monkeypatch):
    trainer, data = mlp_trainer(tmp_path, max_steps=5, snapshot_interval=1)
    trainer.train(data)

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("forewarn.lab.results.Snapshots.delete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(data, overwrite=True)
    trainer, data = mlp_trainer(tmp_path, max_steps=2, snapshot_interval=1)
    trainer.train(data, overwrite=True)
    snapshots = sorted(path.name for path in (tmp_path / "mlp" / "snapshots").iterdir())
    assert snapshots == ["step-00000001.pt", "step-00000002.pt"]
