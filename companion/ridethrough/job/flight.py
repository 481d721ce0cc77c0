"""The flight recorder of `torch.distributed`: which collectives a rank had entered when it failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def dump(run: Path, name: str) -> dict[str, Any]:
    """Write what the recorder of this process holds to `logs/flight-NAME.json` of a run.

    The recorder is on where `TORCH_FR_BUFFER_SIZE` is above 0, which `ridethrough run` sees to. With gloo it
    knows what was entered, not what was finished. With NCCL (not run on a GPU yet) it knows both.

    Returns:
        `path`, relative to the run, and `collective`, `seq` and `group` of the last collective that this
        process entered; nothing if the recorder is off or empty.
    """
    if "torch.distributed" not in sys.modules:  # it failed before it could have entered any
        return {}
    from torch._C import _distributed_c10d

    trace: bytes = _distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    entries = json.loads(trace).get("entries") or []
    if not entries:
        return {}
    path = run / "logs" / f"flight-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(trace)
    last = max(entries, key=lambda entry: entry["record_id"])
    return {
        "path": str(path.relative_to(run)),
        "collective": last["profiling_name"],
        "seq": last["collective_seq_id"],
        "group": last["process_group"][-1],
    }
