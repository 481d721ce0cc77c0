"""Fixtures that more than one test module uses."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # NVRx 0.4.1 pulls a deprecated pynvml
os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So started by a shell in the background; processes that a test starts would ignore Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """The test process is the only rank of a gloo group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import torch
        import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    del os.environ["LOCAL_RANK"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick first: a slip shows after seconds, not after the crash points."""
    slow = ("ranks", "crash", "notebooks", "book")
    items.sort(
        key=lambda item: max(
            (1 + slow.index(m.name) for m in item.iter_markers() if m.name in slow), default=0
        )
    )
