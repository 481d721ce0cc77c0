"""`python -m ridethrough.bench PART`: run one part, print its table, write its JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ridethrough import faults
from ridethrough.bench import drills, stall
from ridethrough.errors import RunError, UsageError


def main() -> int:
    """Run the part that the command line names."""
    arguments = _parser().parse_args()
    try:
        if arguments.part == "stall":
            sizes = arguments.size, arguments.ranks, arguments.rounds, arguments.repetitions
            result = stall.run(arguments.dir, *sizes)
            table = stall.format_result(result)
        else:
            result = drills.run(arguments.dir, arguments.kinds, arguments.policy, arguments.rounds)
            table = drills.format_result(result)
    except (UsageError, RunError) as error:
        print(f"ridethrough.bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ridethrough.bench", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    part = _part(
        parts,
        "stall",
        "how long a checkpoint keeps the training from going on, against copying and writing its bytes",
    )
    part.add_argument("--size", default="medium", help="model size; medium has about 460 MB of state")
    part.add_argument("--ranks", type=int, default=2)
    part.add_argument("--rounds", type=int, default=3, help="rounds of all arms in turn")
    part.add_argument("--repetitions", type=int, default=4, help="of each arm in a round")
    part = _part(
        parts, "drills", "each kind of fault under torchrun in pods: first cause named, result equal, MTTR"
    )
    part.add_argument("--policy", default="each", choices=("each", "index", "gang"), help="restart policy")
    part.add_argument("--kinds", nargs="+", default=list(faults.KINDS), choices=faults.KINDS)
    part.add_argument("--rounds", type=int, default=1, help="runs of each kind")
    return parser


def _part(parts: Any, name: str, help: str) -> argparse.ArgumentParser:
    part: argparse.ArgumentParser = parts.add_parser(
        name, help=help, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    part.add_argument("--dir", type=Path, default=Path("runs"), help="where to write: the disk to measure")
    part.add_argument("--json", type=Path, metavar="FILE", help="write every sample and figure here")
    return part


if __name__ == "__main__":
    sys.exit(main())
