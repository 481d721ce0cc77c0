"""Run a function of a test module on real ranks and bring back what it returned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 90


def run_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Call `function(*args)` on `ranks` new processes joined by gloo; returns each rank's result.

    An exception on a rank, or the time limit, ends all of them and is raised here.
    """
    # Ranks are forked from a server that has imported torch once: a tenth of a second each, not three.
    multiprocessing.set_forkserver_preload(["ridethrough.checkpoint.async_nvrx", "ridethrough.job.loop"])
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank, (function, args, ranks, folder), nprocs=ranks, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{function.__name__} on {ranks} ranks was not done after {timeout_s} s"
                    )
        finally:
            for process in context.processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                    process.join(5)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


def _rank(rank: int, function: Callable[..., Any], args: tuple[Any, ...], ranks: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    result = function(*args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
