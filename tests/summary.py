"""The result of several pytest sessions in one line, and above it, for all to see, what was skipped and why.

python tests/summary.py _build/tests/*.xml
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def main(files: list[str]) -> int:
    """Print the summary; exit code 1 if a test failed or none ran."""
    counts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for case in (case for file in files for case in ElementTree.parse(Path(file)).iter("testcase")):
        if (skip := case.find("skipped")) is not None:
            counts["skipped"] += 1
            skipped[skip.get("message", "no reason given")] += 1
        else:
            counts["failed" if {"failure", "error"} & {child.tag for child in case} else "passed"] += 1
    for reason, number in skipped.items():
        print(f"!!! SKIPPED {number}: {reason}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 0 if counts["passed"] and not counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
