"""What tools can say about the code: style, types, imports that run one way, the environment as pinned."""

from __future__ import annotations

import ast
import importlib.metadata
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "companion" / "ridethrough"
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "ruff", "check", "."],
        [sys.executable, "-m", "ruff", "format", "--check", "."],
        [sys.executable, "-m", "mypy"],
        [str(BIN / "lint-imports"), "--no-cache"],
    ],
    ids=["ruff", "format", "mypy", "imports"],
)
def test_tool_finds_nothing(command: list[str]) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_functions_are_short() -> None:
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert statistics.median(lengths) <= 12
    assert statistics.quantiles(lengths, n=10)[-1] <= 30


def test_environment_is_the_pinned_one() -> None:
    """Every installed package stands in constraints.txt, in that version; so `make` gives all the same."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(p.name): p.specifier for p in pins if not p.marker or p.marker.evaluate()}
    own = {"ridethrough", "pip"}
    assert all(len(p.specifier) == 1 and str(p.specifier).startswith("==") for p in pins)
    unlike = {
        f"{distribution.name}=={distribution.version}"
        for distribution in importlib.metadata.distributions(path=[str(site_packages())])
        if (name := canonicalize_name(distribution.name)) not in own
        and not (name in pinned and pinned[name].contains(distribution.version))
    }
    assert not unlike, "installed, but not so in constraints.txt"


def site_packages() -> Path:
    return Path(pytest.__file__).parents[1]
