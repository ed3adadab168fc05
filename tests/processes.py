"""Several processes that train together, and an end to them whatever happens."""

import datetime
import functools
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from forewarn.measure import exchange

LONGEST_SECONDS = 600

multiprocessing.get_context("forkserver").set_forkserver_preload(["forewarn.attach", "tests.processes"])
"""The processes begin with these imports, which would otherwise take longer than most tests."""


def in_two_processes(work: Callable[..., None], *args: Any, start: str = "forkserver") -> None:
    """Call `work(rank, *args)` in two processes of one group; what one of them raises is raised here."""
    in_processes(2, work, *args, start=start)


def in_processes(num: int, work: Callable[..., None], *args: Any, start: str = "forkserver") -> None:
    """Call `work(rank, *args)` in several processes of one group; those of `start="spawn"` run exit handlers."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a free port, which it keeps
    running = multiprocessing.start_processes(
        _joined, (num, store.port, work, args), nprocs=num, join=False, start_method=start
    )
    end = time.monotonic() + LONGEST_SECONDS
    while not running.join(timeout=max(0.0, end - time.monotonic())):
        if time.monotonic() >= end:
            for process in running.processes:
                process.kill()
            pytest.fail(f"{work.__name__} was not done after {LONGEST_SECONDS} seconds")


def skip_without_fsdp2() -> None:
    """Skip the test if this torch cannot train under FSDP2 on a CPU, which 2.6 and older cannot."""
    if reason := _obstacle_to_fsdp2():
        pytest.skip(f"torch {torch.__version__} cannot train under FSDP2 on a CPU: {reason}")


@functools.cache
def _obstacle_to_fsdp2() -> str:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.fsdp import fully_shard

        fully_shard(torch.nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()
    except Exception as error:  # of torch alone
        return repr(error)
    finally:
        gc.collect()
        dist.destroy_process_group()
    return ""


def _joined(rank: int, num: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever this machine's name resolves to
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=LONGEST_SECONDS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num)
    torch.manual_seed(0)
    for limit in ("_SECONDS_BEHIND", "_SECONDS_AT_THE_END", "_SECONDS_FOR_LAST", "_SECONDS_TO_AGREE"):
        setattr(exchange, limit, 120.0)  # on a busy machine a process may rest for long
    work(rank, *args)
    gc.collect()  # a model that outlives its group ends it with Python's lock held: now and then both wait for ever
    dist.destroy_process_group()
