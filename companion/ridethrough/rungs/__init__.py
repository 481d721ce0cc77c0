"""One training script a rung; adjacent rungs differ by the few lines that are the lesson."""

#: Name on the command line → module that every rank runs as `python -m MODULE RUN_DIRECTORY`.
RUNGS: dict[str, str] = {
    "sync": "ridethrough.rungs.sync_checkpoint",
    "async": "ridethrough.rungs.async_checkpoint",
}
