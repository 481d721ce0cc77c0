"""Run the notebooks with papermill, from top to bottom, and keep tidy copies with their outputs.

    python book/_tools/run_notebooks.py                  # all, into _build/source/notebooks
    python book/_tools/run_notebooks.py --only 01_one    # those whose names start so
    python book/_tools/run_notebooks.py --check          # run them, keep nothing
    python book/_tools/run_notebooks.py --full           # the long version, not the fast one

Exit code 1 if a cell fails, writes a wall of warnings, or leaves a process behind; the notebook as far as
it came is then in _build/failed.

Each notebook runs in an empty folder of its own. The copy is *tidy*: nothing in it says when, how long or
where it ran, as far as the outputs themselves don't. It is *stamped* with a hash of its code cells and one
of the companion package, so that a stored output that no longer belongs to its source can be told.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import papermill
import psutil
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "notebooks"
EXECUTED = ROOT / "_build" / "source" / "notebooks"
FAILED = ROOT / "_build" / "failed"
STATUS = ROOT / "_build" / "status.json"

CELL_TIMEOUT_S = 300
STDERR_LINES = 10  # more than a progress bar and a warning is something a reader should not have to see
MARK = "RIDETHROUGH_NOTEBOOK"  # in the environment of all that a notebook starts
# A cell raised; ran out of time; its kernel died.
RUN_ERRORS = (papermill.PapermillExecutionError, CellTimeoutError, DeadKernelError)
WIDGET = "application/vnd.jupyter.widget-view+json"


class NotebookError(RuntimeError):
    """A notebook did not run as a reader should see it run."""


def notebooks(prefix: str = "") -> list[Path]:
    """The book's notebooks in order, or those whose names start with `prefix`."""
    found = sorted(path for path in SOURCES.glob("[0-9]*.ipynb") if path.name.startswith(prefix))
    if not found:
        raise NotebookError(f"no notebook in {SOURCES} has a name that starts with {prefix!r}")
    return found


def stamp(notebook: NotebookNode) -> dict[str, str]:
    """What the outputs depend on: the notebook's own code, and the companion package's."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    package = hashlib.sha256()
    for path in sorted((ROOT / "companion" / "ridethrough").rglob("*.py")):
        package.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return {"code": hashlib.sha256(code.encode()).hexdigest(), "package": package.hexdigest()}


def execute(path: Path, *, full: bool = False) -> NotebookNode:
    """Run one notebook in an empty folder and return it tidy and stamped.

    Raises:
        NotebookError: if a cell fails or takes too long, or the run left a process behind.
    """
    scratch = ROOT / "_build" / "run" / path.stem
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    source = nbformat.read(path, as_version=4)
    expected = stamp(source)  # before the run: an edit meanwhile must not be taken for what ran
    mark = os.environ[MARK] = uuid.uuid4().hex
    try:
        ran = _papermill(path, scratch, full)
    finally:
        del os.environ[MARK]
        left = _end_leftovers(mark)
        shutil.rmtree(scratch, ignore_errors=True)
    if left:
        raise NotebookError(f"{path.name}: left processes behind: {'; '.join(left)}")
    ran = tidy(ran, {f"{scratch}/": "", str(scratch): "."})
    ran.metadata["ridethrough"] = expected
    if found := problems(ran):
        _keep_failed(path.name, ran)
        raise NotebookError("\n".join(f"{path.name}: {problem}" for problem in found))
    return ran


def _papermill(path: Path, scratch: Path, full: bool) -> NotebookNode:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / path.name
        try:
            papermill.execute_notebook(
                path,
                out,
                parameters={"fast": not full, "live": False},
                cwd=scratch,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                extra_arguments=["--log-level=ERROR"],  # of the kernel, not of the notebook
                execution_timeout=CELL_TIMEOUT_S,
            )
        except RUN_ERRORS as error:
            _keep_failed(path.name, nbformat.read(out, as_version=4))
            raise NotebookError(f"{path.name}: {error}") from error
        return nbformat.read(out, as_version=4)


def _keep_failed(name: str, notebook: NotebookNode) -> None:
    FAILED.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, FAILED / name)


def _end_leftovers(mark: str, patience_s: float = 5.0) -> list[str]:
    """Kill what the notebook started and did not end, after a moment to end by itself; name it."""
    deadline = time.monotonic() + patience_s
    while (left := list(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = []
    for process in left:
        try:
            names.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue  # it ended between the look and the kill
    psutil.wait_procs(left, timeout=patience_s)  # a killed process takes a moment to be gone
    return names


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone, or another user's: not ours either way


def tidy(notebook: NotebookNode, paths: dict[str, str] | None = None) -> NotebookNode:
    """Drop what differs from run to run and from machine to machine without meaning anything.

    Args:
        notebook: as papermill left it.
        paths: absolute path → what a reader should see in its place, in order.
    """
    notebook.metadata.pop("papermill", None)
    notebook.metadata.pop("widgets", None)  # a slider can't move on a page; stills are shown there
    notebook.metadata.get("language_info", {}).pop("version", None)
    notebook.cells = [c for c in notebook.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    shorten = {**(paths or {}), str(ROOT): "~/ridethrough", str(Path.home()): "~"}
    count = 0
    for cell in notebook.cells:
        for name in ("papermill", "execution"):
            cell.metadata.pop(name, None)
        if not cell.metadata.get("tags"):
            cell.metadata.pop("tags", None)
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
            cell.outputs = [_tidy_output(output, count, shorten) for output in _joined(outputs)]
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Pieces of one stream that arrived one after the other, as one; where they were cut is chance."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == "stream" and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _tidy_output(output: NotebookNode, count: int, shorten: dict[str, str]) -> NotebookNode:
    if "execution_count" in output:
        output.execution_count = count
    if output.output_type == "stream":
        output.text = _short(_last_of_progress(output.text), shorten)
    for mime, value in output.get("data", {}).items():
        if isinstance(value, str) and not mime.startswith("image/"):
            output.data[mime] = _short(value, shorten)
    return output


def _last_of_progress(text: str) -> str:
    """What a terminal would show in the end: a progress bar rewrites its line with carriage returns."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _short(text: str, shorten: dict[str, str]) -> str:
    for path, short in shorten.items():
        text = text.replace(path, short)
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/[\w.-]+", "/tmp/…", text)


def problems(notebook: NotebookNode) -> list[str]:
    """What a reader should not have to see: error outputs, and walls of text on standard error."""
    found = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                found.append(f"cell {number}: {output.ename}: {output.evalue}")
            elif output.get("name") == "stderr" and output.text.count("\n") > STDERR_LINES:
                found.append(
                    f"cell {number}: {output.text.count(chr(10))} lines on standard error,"
                    f" beginning {output.text[:200]!r}"
                )
    return found


def _write(notebook: NotebookNode, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    nbformat.write(notebook, temporary)
    temporary.replace(path)


def _note_time(name: str, seconds: float, full: bool) -> None:
    status: dict[str, Any] = json.loads(STATUS.read_text()) if STATUS.exists() else {}
    status[name] = {"seconds": round(seconds, 1), "fast": not full}
    STATUS.parent.mkdir(exist_ok=True)
    STATUS.write_text(json.dumps(dict(sorted(status.items())), indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for; the exit code says whether all of it ran well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", default="", help="only those whose names start with NAME")
    parser.add_argument("--to", metavar="DIR", type=Path, default=EXECUTED, help="where the copies go")
    parser.add_argument("--check", action="store_true", help="run them, keep no copy")
    parser.add_argument("--full", action="store_true", help="the long version: parameter fast=False")
    args = parser.parse_args(argv)
    logging.getLogger("papermill").setLevel(logging.ERROR)  # its warnings are about names we do check
    try:
        for path in notebooks(args.only):
            start = time.perf_counter()
            notebook = execute(path, full=args.full)
            seconds = time.perf_counter() - start
            if not args.check:
                _write(notebook, args.to / path.name)
            _note_time(path.stem, seconds, args.full)
            print(f"{path.stem}  {seconds:.1f} s", flush=True)
    except NotebookError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
