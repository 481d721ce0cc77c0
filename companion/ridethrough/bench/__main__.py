"""`python -m ridethrough.bench PART`: run one part, print its table, write its JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ridethrough.bench import stall
from ridethrough.errors import RunError, UsageError


def main() -> int:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m ridethrough.bench", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser(
        "stall",
        help="how long a checkpoint keeps the training from going on, against copying and writing its bytes",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    part.add_argument("--size", default="medium", help="model size; medium has about 460 MB of state")
    part.add_argument("--ranks", type=int, default=2)
    part.add_argument("--rounds", type=int, default=3, help="rounds of all arms in turn")
    part.add_argument("--repetitions", type=int, default=4, help="of each arm in a round")
    part.add_argument("--dir", type=Path, default=Path("runs"), help="where to write: the disk to measure")
    part.add_argument("--json", type=Path, metavar="FILE", help="write every sample and ratio here")
    arguments = parser.parse_args()
    try:
        result = stall.run(
            arguments.dir, arguments.size, arguments.ranks, arguments.rounds, arguments.repetitions
        )
    except (UsageError, RunError) as error:
        print(f"ridethrough.bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    print(stall.format_result(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
