"""Fault-tolerant PyTorch FSDP training, one rung at a time.

A *rung* is one small training script. `ridethrough.launch` runs it on local ranks and leaves a *run*
directory; `ridethrough.ledger` accounts for every rank-second of that run; `ridethrough.report` and the
notebooks read the ledger. Nothing heavy is imported here: `import ridethrough` costs milliseconds.
"""

from importlib.metadata import version

__version__ = version("ridethrough")
