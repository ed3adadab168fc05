"""Small logs in the formats of other tools, for tests that damage them or only need some.

The tests in tests/integrations read what the tools themselves write.
"""

import json
import sqlite3
import struct
import zlib

from torch.utils.tensorboard import SummaryWriter


def event_file(folder):
    with SummaryWriter(folder) as writer:
        for step in range(60):
            writer.add_scalar("loss", 2.0 - step / 100, step)
            writer.add_scalar("lr", 1e-3, step, new_style=True)
    return next(folder.iterdir())


def trainer_state(folder):
    history = [
        {"step": step, "epoch": step / 50, "loss": 2.0 - step / 200, "grad_norm": 1.0} for step in range(10, 200)
    ]
    (folder / "trainer_state.json").write_text(
        json.dumps({"global_step": 200, "max_steps": 200, "log_history": history})
    )
    return folder / "trainer_state.json"


def wandb_file(folder):
    """The container and the messages of W&B's file, with values that its own writer would store in the same way."""

    def field(number, content):
        size = bytes([len(content)]) if len(content) < 128 else bytes([len(content) & 127 | 128, len(content) >> 7])
        key = number << 3 | 2
        return (bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])) + size + content

    content = b":W&B\xe1\xbe\x00"
    for step in range(60):
        items = {"_step": step, "loss": 2.0 - step / 100}
        history = b"".join(field(1, field(2, name.encode()) + field(16, json.dumps(value).encode()))
                           for name, value in items.items())  # fmt: skip
        record = field(2, history)
        content += struct.pack("<IHB", zlib.crc32(record, zlib.crc32(b"\x01")), len(record), 1) + record
    (folder / "run-x.wandb").write_bytes(content)
    return folder / "run-x.wandb"


def csv_file(folder):
    (folder / "log.csv").write_text(
        "step,loss,lr\n" + "".join(f"{step},{2 - step / 100},0.001\n" for step in range(60))
    )
    return folder / "log.csv"


def json_lines(folder):
    rows = ({"step": step, "loss": 2 - step / 100, "inner": {"lr": 1e-3}} for step in range(60))
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "log.jsonl"


def json_document(folder):
    (folder / "history.json").write_text(json.dumps([{"step": step, "loss": 2 - step / 100} for step in range(60)]))
    return folder / "history.json"


def console_output(folder):
    (folder / "train.log").write_text("".join(f"step: {step}  loss: {2 - step / 100}\n" for step in range(60)))
    return folder / "train.log"


def wide_output(folder):
    bar = "\rEpoch {}:  50%|#####     | {}/20 [00:03<00:03, 6.1it/s, loss={}]"
    bars = (bar.format(step // 20, step % 20, 2 - step / 100) for step in range(60))
    (folder / "windows.log").write_bytes("".join(bars).encode("utf-16"))
    return folder / "windows.log"


def mlflow_database(folder):
    with sqlite3.connect(folder / "mlflow.db") as connection:
        connection.execute("CREATE TABLE runs (run_uuid, name, status, start_time, lifecycle_stage)")
        connection.execute("CREATE TABLE metrics (key, value, timestamp, run_uuid, step, is_nan)")
        connection.execute("CREATE TABLE params (key, value, run_uuid)")
        connection.execute("INSERT INTO runs VALUES ('a', 'first', 'FINISHED', 0, 'active')")
        rows = [("loss", 2 - step / 100, 1_700_000_000_000, "a", step, 0) for step in range(60)]
        connection.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
    connection.close()
    return folder / "mlflow.db"


MAKERS = (
    event_file,
    trainer_state,
    wandb_file,
    csv_file,
    json_lines,
    json_document,
    console_output,
    wide_output,
    mlflow_database,
)
