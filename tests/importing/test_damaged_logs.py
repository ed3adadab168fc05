"""Logs that are cut off, corrupted or made to harm: one sentence, or what could be read, and never more than that."""

import json
import os
import random
import time

import pytest

from forewarn.importing import LogError, find_logs, import_log
from forewarn.importing import log as limits
from tests.importing.small_logs import MAKERS, csv_file, event_file, wandb_file


def read_or_refuse(path, folder):
    """Import a log. Anything but a LogError of one short line is a defect."""
    began, sentence = time.monotonic(), ""
    try:
        for log in find_logs(path):
            import_log(log.read(), folder, judge=False)
    except LogError as error:
        sentence = str(error)
    assert "\n" not in sentence
    assert len(sentence) < 600
    assert time.monotonic() - began < 60


def damaged(content, generator):
    """The content, cut off or with some bytes changed, moved or repeated."""
    kind = generator.randrange(5)
    place = generator.randrange(len(content))
    if kind == 0:
        return content[:place]
    if kind == 1:
        changed = bytearray(content)
        for _ in range(generator.choice([1, 4, 40])):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        return bytes(changed)
    if kind == 2:
        return content[:place] + generator.randbytes(generator.randrange(1, 200)) + content[place:]
    if kind == 3:
        end = min(len(content), place + generator.randrange(1, 400))
        return content[:place] + content[end:]
    return content[:place] + content[place : place + 300] * 20 + content[place:]


def check_damage(make, seed, folder):
    path = make(folder)
    generator = random.Random(f"{make.__name__} {seed}")
    path.write_bytes(damaged(path.read_bytes(), generator))
    read_or_refuse(path, folder / "run")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", MAKERS)
def test_a_damaged_log_is_one_sentence_or_what_is_left_of_it(make, seed, tmp_path):
    check_damage(make, seed, tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(3, 200))
@pytest.mark.parametrize("make", MAKERS)
def test_hundreds_of_damaged_logs(make, seed, tmp_path):
    check_damage(make, seed, tmp_path)


@pytest.mark.parametrize("make", [event_file, wandb_file])
def test_a_log_that_was_cut_off_in_its_last_record_is_read_up_to_there(make, tmp_path):
    path = make(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    (log,) = find_logs(path)
    read = log.read()
    assert len(read.tracks["loss"]) >= 59
    assert read.notes == []


def test_a_corrupt_record_is_noted_and_what_came_before_is_kept(tmp_path):
    path = event_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = b"\xff" * (len(content) - len(content) // 2)
    path.write_bytes(content)
    (log,) = find_logs(path)
    read = log.read()
    assert 10 < len(read.tracks["loss"]) < 60
    assert any("is damaged" in note for note in read.notes)


def test_a_line_without_an_end_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOST_LINE_BYTES", 1000)
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"step": 0, "loss": 1.0}\n{"step": 1, "loss": 2.0, "x": "' + "y" * 9000 + '"}\n{"step": 2, "loss": 3.0}'
    )
    (log,) = find_logs(path)
    read = log.read()
    assert read.tracks["loss"].steps.tolist() == [0, 2]
    assert any("longer than" in note for note in read.notes)


def test_more_readings_and_names_than_any_run_has_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOST_READINGS", 100)
    path = csv_file(tmp_path)
    with pytest.raises(LogError, match="more than 100 readings"):
        find_logs(path)[0].read()
    monkeypatch.setattr(limits, "MOST_NAMES", 1)
    with pytest.raises(LogError, match="more than 1 names"):
        find_logs(path)[0].read()


def test_a_deeply_nested_file_is_refused(tmp_path):
    for name in ("trainer_state.json", "log.jsonl"):
        (tmp_path / name).write_text('{"log_history": ' + "[" * 200_000)
        read_or_refuse(tmp_path / name, tmp_path / "run")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(tmp_path, forewarn):
    for name in ("events.out.tfevents.1", "trainer_state.json", "log.csv"):
        os.mkfifo(tmp_path / name)
        said = forewarn("check", str(tmp_path / name))
        assert (said.code, "FIFO" in said.err) == (3, True)
    assert forewarn("check", str(tmp_path)).code == 3


def test_control_characters_in_names_never_reach_the_terminal(tmp_path, forewarn):
    rows = ({"step": step, "\x1b[31mevil\x07": 1.0, "my_loss\x1b[0m": 1.0} for step in range(40))
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for code, arguments in ((3, ["check"]), (0, ["import", "--out", str(tmp_path / "run")])):
        said = forewarn(arguments[0], str(tmp_path / "log.jsonl"), *arguments[1:])
        assert said.code == code
        assert "my_loss" in said.out + said.err
        assert not {"\x1b", "\x07"} & set(said.out + said.err)


def test_a_link_to_elsewhere_is_not_followed_in_a_folder(tmp_path):
    (tmp_path / "outside").mkdir()
    csv_file(tmp_path / "outside")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "link.csv").symlink_to(tmp_path / "outside" / "log.csv")
    (tmp_path / "logs" / "folder").symlink_to(tmp_path / "outside")
    with pytest.raises(LogError, match="neither a run"):
        find_logs(tmp_path / "logs")
