"""Runs cases in several processes and keeps their records, so that a run can be interrupted and continued."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from forewarn.lab.faults.cases import Case, Record, judged_again, run_case

RECORDS = "records.jsonl"
CASES_PER_PROCESS = 50
"""Cases after which processes are replaced, so that memory does not grow over hours.

Not with `max_tasks_per_child`: a pool of one process then waits forever for its successor (python/cpython#115634)."""


def stored_records(folder: Path) -> dict[str, Record]:
    """The records in a folder, by the key of their case; of a case that was recorded twice, the last."""
    path = folder / RECORDS
    records: dict[str, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = Record.from_json(json.loads(line))
        except ValueError:  # the line that was being written when the run was interrupted
            continue
        records[record.case.key] = record
    return records


def run_cases(
    cases: Sequence[Case], folder: Path, jobs: int, keep: bool, again: bool = False, remedies: bool = True
) -> Iterator[Record]:
    """Run the cases that have no record in the folder, or judge the kept runs of those that have one.

    Each record is appended to the folder before it is yielded. With `keep`, the monitored runs are kept in it too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done, runs = stored_records(folder), folder / "runs"
    left = [case for case in cases if (case.key in done) == again]
    with (folder / RECORDS).open("a") as file:
        for begin in range(0, len(left), CASES_PER_PROCESS * jobs):
            with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _prepare) as pool:
                tasks = [
                    pool.submit(judged_again, done[case.key], runs, remedies=remedies)
                    if again
                    else pool.submit(run_case, case, runs if keep else None, remedies=remedies)
                    for case in left[begin : begin + CASES_PER_PROCESS * jobs]
                ]
                try:
                    for task in as_completed(tasks):
                        record = task.result()
                        file.write(json.dumps(record.to_json(int)) + "\n")
                        file.flush()
                        yield record
                finally:
                    pool.shutdown(cancel_futures=True)


def _prepare() -> None:
    """One thread per process."""
    import torch

    torch.set_num_threads(1)
