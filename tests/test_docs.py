"""What README and pages tell a reader to type works, and no file knows the machine it was written on."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ridethrough
from ridethrough.ledger import BUCKETS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "book").glob("*.md"))]
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def commands(page: Path) -> list[str]:
    """The lines of a page's console blocks that a reader types."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=180, check=False
    )


def tracked_files() -> Iterator[tuple[str, str]]:
    listed = run(["git", "ls-files", "-co", "--exclude-standard"], ROOT)
    if listed.returncode:
        pytest.skip("not a git clone: its files were not searched for machine paths and registry hosts")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix != ".png":
            yield name, path.read_text()


@pytest.mark.ranks
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_ridethrough_commands_of_a_page_work_in_their_order(page: Path, tmp_path: Path) -> None:
    typed = [shlex.split(line) for line in commands(page) if line.startswith("ridethrough ")]
    for command in typed:
        result = run(command, tmp_path)
        # What the page says: such a run does not reach its end, unless pods are started again.
        lost = "--fault" in command and "--launcher" not in command
        assert result.returncode == (1 if lost else 0), f"{command}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr


def test_make_targets_of_the_pages_exist_and_are_explained() -> None:
    named = {name for page in PAGES for name in re.findall(r"`?make ([a-z-]+)`?", page.read_text())}
    typed = {line.split()[1] for page in PAGES for line in commands(page) if line.startswith("make ")}
    explained = set(re.findall(r"^  ([a-z-]+) ", run(["make", "help"], ROOT).stdout, re.MULTILINE))
    assert typed <= explained
    assert {"book", "test", "lab", "clean"} <= named & explained | {"clean"}


def test_files_that_commands_name_exist() -> None:
    named = {word for page in PAGES for line in commands(page) for word in line.split() if "/" in word}
    assert not [w for w in named if w.startswith(("tests/", "book/")) and not (ROOT / w).exists()]


def subcommands() -> list[str]:
    text = run(["ridethrough", "--help"], ROOT).stdout.partition("commands:")[2].partition("\n\n")[0]
    return re.findall(r"^    ([a-z]+)", text, re.MULTILINE)


def test_every_tool_explains_itself() -> None:
    found = subcommands()
    assert {"run", "report", "checkpoint", "fault", "doctor"} <= set(found)
    tools = [["ridethrough"], *(["ridethrough", name] for name in found)]
    tools.append([sys.executable, "book/_tools/run_notebooks.py"])
    for tool in tools:
        result = run([*tool, "--help"], ROOT)
        assert result.returncode == 0 and result.stdout.startswith("usage: "), f"{tool}: {result.stderr}"


def test_no_file_names_a_registry_or_this_machine() -> None:
    hosts = [
        "pypi" + ".org",
        "python" + "hosted",
        "npm" + "js",
        "conda" + ".io",
    ]  # in two: not to find itself
    known = re.compile("|".join(map(re.escape, [*hosts, f"{Path.home()}/", f"{ROOT}/"])))
    found = [f"{name}: {match[0]}" for name, text in tracked_files() for match in known.finditer(text)]
    assert not found


def test_changelog_begins_with_this_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == ridethrough.__version__


def test_glossary_has_every_bucket() -> None:
    blocks = re.findall(r"```\{glossary\}\n(.*?)```", (ROOT / "book" / "glossary.md").read_text(), re.DOTALL)
    terms = set(re.findall(r"^(\S.*)$", "\n".join(blocks), re.MULTILINE))
    assert set(BUCKETS) <= terms


def test_workflows_run_the_two_commands() -> None:
    text = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    assert set(re.findall(r"- run: (.*)", text)) == {"make test", "make book"}
    assert all(re.fullmatch(r"[\w/-]+@v\d+", use) for use in re.findall(r"uses: (.*)", text))
