"""Where a chapter keeps its runs."""

from __future__ import annotations

import shutil
from pathlib import Path


def fresh_runs(folder: Path | str) -> Path:
    """A folder for a chapter's runs, without those of an earlier time; whatever is no run stays.

    A run is never overwritten, so without this a notebook could be run from the top only once.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if (path / "run.json").exists():
            shutil.rmtree(path)
    return folder
