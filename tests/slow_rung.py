"""The rung `sync` on a disk that is slow for rank 1: each of its saves takes SLOW_SAVE_S seconds more."""

import os
import time
from typing import Any

from ridethrough.checkpoint import dcp
from ridethrough.job.rank import rank_main
from ridethrough.rungs.sync_checkpoint import train

write = dcp.write


def slowly(*arguments: Any) -> Any:
    time.sleep(float(os.environ["SLOW_SAVE_S"]) * (os.environ["RANK"] == "1"))
    return write(*arguments)


if __name__ == "__main__":
    dcp.write = slowly
    rank_main(train)
