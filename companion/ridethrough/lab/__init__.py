"""What notebooks need and a job does not: figures, sliders, source listings, tables.

Everything here returns a value that Jupyter displays when it is a cell's last line. Needs the extra
`ridethrough[lab]`; no other part of the package imports it.
"""

import warnings

from ridethrough.lab.explore import explore
from ridethrough.lab.plots import buckets_bar, losses, stall_plot
from ridethrough.lab.recovery import bill, recovery_bars, spread
from ridethrough.lab.runs import fresh_runs
from ridethrough.lab.show import check_versions, show_diff, show_source, table
from ridethrough.lab.timeline import timeline

__all__ = [
    "bill",
    "buckets_bar",
    "check_versions",
    "explore",
    "fresh_runs",
    "losses",
    "recovery_bars",
    "show_diff",
    "show_source",
    "spread",
    "stall_plot",
    "table",
    "timeline",
]

# What a reader can do nothing about: NVRx 0.4.1 brings a deprecated pynvml, which `import torch` finds; and
# torch says that it loads a checkpoint in one process, which is what a notebook asks it for.
warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
