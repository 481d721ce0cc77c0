"""Take the picture of the README from what the notebooks printed: the timeline of a run that was killed.

python book/_tools/picture.py    # from notebooks/03… into book/_static/result.png
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "03_synchronous_checkpoints.ipynb"
PICTURE = ROOT / "book" / "_static" / "result.png"


def stored() -> bytes:
    """The image that the cell with the timeline has stored.

    Raises:
        ValueError: if no cell has.
    """
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        for output in cell.get("outputs", []) if "timeline(" in cell.source else []:
            if image := output.get("data", {}).get("image/png"):
                return base64.b64decode(image)
    raise ValueError(f"{NOTEBOOK} stores no timeline; run `make notebooks`")


if __name__ == "__main__":
    PICTURE.write_bytes(stored())
    sys.exit(0)
