"""Runs cases in several processes and keeps their records, so that a run can be interrupted and continued."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from forewarn.lab.faults.cases import Case, Record, judged, run_case

RECORDS = "records.jsonl"
CASES_PER_PROCESS = 50
"""Cases after which a process is replaced, so that memory does not grow over hours."""


def stored_records(folder: Path) -> dict[str, Record]:
    """The records in a folder, by the key of their case; of a case that ran twice, the last."""
    path = folder / RECORDS
    if not path.exists():
        return {}
    records: dict[str, Record] = {}
    for line in path.read_text().splitlines():
        try:
            record = Record.from_json(json.loads(line))
        except ValueError:  # the line that was being written when the run was interrupted
            continue
        records[record.case.key] = record
    return records


def run_cases(cases: Iterable[Case], folder: Path, jobs: int, keep: bool) -> Iterator[Record]:
    """Run the cases that have no record yet, append each record to the folder, and yield it."""
    folder.mkdir(parents=True, exist_ok=True)
    done = stored_records(folder)
    left = [case for case in cases if case.key not in done]
    if not left:
        return
    runs = folder / "runs" if keep else None
    context = multiprocessing.get_context("spawn")
    with (
        (folder / RECORDS).open("a") as file,
        ProcessPoolExecutor(jobs, context, _prepare, max_tasks_per_child=CASES_PER_PROCESS) as pool,
    ):
        for future in as_completed([pool.submit(run_case, case, runs) for case in left]):
            record = future.result()
            file.write(json.dumps(record.to_json(int)) + "\n")
            file.flush()
            yield record


def _prepare() -> None:
    """One thread per process, at low priority."""
    import torch

    torch.set_num_threads(1)
    os.nice(5)


def judged_again(record: Record, folder: Path) -> Record:
    """The record with what the present rules say about its kept run."""
    path = folder / "runs" / record.case.key
    if not path.exists():
        return record
    warned, num_warnings, published = judged(path)
    return dataclasses.replace(record, warned=warned, num_warnings=num_warnings, published=published)
