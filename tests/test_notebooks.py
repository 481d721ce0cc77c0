"""The notebooks run from top to bottom, keep to their form, and carry outputs that belong to their source."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import nbformat
import psutil
import pytest
import ridethrough
import run_notebooks
import yaml
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
LONGEST_CELL = 15  # lines; more belongs in the package, where it is tested

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_contents_list_every_notebook() -> None:
    toc = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())
    listed = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    assert [f"notebooks/{path.stem}" for path in NOTEBOOKS] == [
        f for f in listed if f.startswith("notebooks/")
    ]


# --- each notebook's form --------------------------------------------------------------------------------


@each_notebook
def test_has_one_parameters_cell_with_fast_and_live(path: Path) -> None:
    (cell,) = [c for c in code_cells(read(path)) if "parameters" in c.metadata.get("tags", [])]
    assigned = {
        target.id
        for node in ast.parse(cell.source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert {"fast", "live"} <= assigned


@each_notebook
def test_checks_the_version_before_anything_else(path: Path) -> None:
    first = next(c for c in code_cells(read(path)) if "parameters" not in c.metadata.get("tags", []))
    assert f'check_versions("{ridethrough.__version__}")' in first.source


@each_notebook
def test_cells_are_short_python(path: Path) -> None:
    for cell in code_cells(read(path)):
        assert len(cell.source.splitlines()) <= LONGEST_CELL, cell.source
        # A shell command that fails leaves its cell green; so does one by a magic.
        assert not [line for line in cell.source.splitlines() if line.lstrip().startswith(("!", "%"))]
        ast.parse(cell.source)


@each_notebook
def test_defines_nothing_that_the_package_has(path: Path) -> None:
    package = {
        node.name
        for file in Path(ridethrough.__file__).parent.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    defined = {
        node.name
        for cell in code_cells(read(path))
        for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert not defined & package


# --- stored outputs --------------------------------------------------------------------------------------


@each_notebook
def test_stored_outputs_are_those_of_this_source(path: Path) -> None:
    notebook = read(path)
    stored, now = notebook.metadata.get("ridethrough", {}), run_notebooks.stamp(notebook)
    assert stored.get("code") == now["code"], "the code has changed since its outputs: `make notebooks`"
    assert all(cell.execution_count for cell in code_cells(notebook))
    assert run_notebooks.problems(notebook) == []
    if stored["package"] != now["package"]:
        warnings.warn(f"{path.name}: its outputs are older than the package: `make notebooks`", stacklevel=1)


@each_notebook
def test_stored_outputs_are_tidy(path: Path) -> None:
    before = path.read_text()
    after = nbformat.writes(run_notebooks.tidy(nbformat.reads(before, as_version=4))) + "\n"
    assert after == before, "not as the tool left it: `make notebooks`"
    assert "\r" not in before.replace("\\\\r", "") and "widget-view" not in before


# --- they run --------------------------------------------------------------------------------------------


@pytest.mark.notebooks
@each_notebook
def test_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make book` has run with these very sources counts; anything else is run here."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # while it is set, ipykernel drops what children print
    built, now = run_notebooks.EXECUTED / path.name, run_notebooks.stamp(read(path))
    notebook = read(built) if built.exists() else None
    if notebook is None or notebook.metadata.get("ridethrough") != now:
        notebook = run_notebooks.execute(path)
    assert run_notebooks.problems(notebook) == []
    assert all(cell.execution_count for cell in code_cells(notebook))
    assert notebook.metadata["ridethrough"] == now


# --- the tool that runs them -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the tool looks for notebooks and leaves what failed."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    for name in ("SOURCES", "EXECUTED", "FAILED"):
        monkeypatch.setattr(run_notebooks, name, tmp_path / name.lower())
    monkeypatch.setattr(run_notebooks, "STATUS", tmp_path / "status.json")
    (tmp_path / "sources").mkdir()
    return tmp_path


def store(folder: Path, *cells: str) -> Path:
    path = folder / "sources" / f"9_{folder.name}.ipynb"
    parameters = new_code_cell("fast = True\nlive = True", metadata={"tags": ["parameters"]})
    nbformat.write(new_notebook(cells=[parameters, *map(new_code_cell, cells)]), path)
    return path


@pytest.mark.notebooks
def test_a_failing_cell_fails_every_build(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store(folder, "print('so far')", "raise ValueError('on purpose')", "print('never')")
    for _ in range(2):
        assert run_notebooks.main([]) == 1
        assert "ValueError: on purpose" in capsys.readouterr().err
        assert not (folder / "executed" / path.name).exists()
    assert "so far" in (folder / "failed" / path.name).read_text()


@pytest.mark.notebooks
def test_a_dead_kernel_fails_the_build(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(folder, "import os\nos._exit(0)")
    assert run_notebooks.main([]) == 1
    assert "died" in capsys.readouterr().err.lower()


@pytest.mark.notebooks
def test_a_process_left_behind_fails_the_build_and_is_ended(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(
        folder,
        "import subprocess, sys",
        "command = [sys.executable, '-c', 'import time; time.sleep(300)']",
        "child = subprocess.Popen(command, start_new_session=True)",
        "from pathlib import Path",
        f"Path({str(folder / 'pid')!r}).write_text(str(child.pid))",
    )
    assert run_notebooks.main([]) == 1
    assert "left processes behind" in capsys.readouterr().err
    pid = int((folder / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.notebooks
def test_a_wall_of_warnings_fails_the_build(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(folder, "import sys\nprint('trouble\\n' * 50, file=sys.stderr)")
    assert run_notebooks.main([]) == 1
    assert "lines on standard error, beginning 'trouble" in capsys.readouterr().err


@pytest.mark.notebooks
def test_two_runs_leave_the_same_bytes_and_no_path_of_this_machine(folder: Path) -> None:
    path = store(
        folder,
        "import os, sys, tempfile\nfrom pathlib import Path",
        "somewhere = f'{tempfile.gettempdir()}/{os.getpid()}'",
        "print(sys.executable, Path('runs').absolute(), somewhere, fast, live)",
        "for done in range(1, 101):\n    print(f'\\r{done} %', end='')",
    )
    copies = []
    for _ in range(2):
        assert run_notebooks.main([]) == 0
        copies.append((folder / "executed" / path.name).read_bytes())
    assert copies[0] == copies[1]
    printed = [
        cell.outputs[0].text for cell in code_cells(read(folder / "executed" / path.name)) if cell.outputs
    ]
    executable = sys.executable.replace(str(ROOT), "~/ridethrough").replace(str(Path.home()), "~")
    assert printed == [f"{executable} runs /tmp/… True False\n", "100 %"]


def test_tidy_joins_a_progress_bar_and_drops_what_papermill_added() -> None:
    cell = new_code_cell("run()", execution_count=7, metadata={"papermill": {"duration": 1.5}, "tags": []})
    cell.outputs = [
        new_output("stream", name="stderr", text="\r 10%"),
        new_output("stream", name="stderr", text="\r100%"),
        new_output("stream", name="stderr", text="\n"),
        new_output("display_data", data={run_notebooks.WIDGET: {"model_id": "0"}, "text/plain": "HBox()"}),
        new_output("execute_result", data={"text/plain": "1"}, execution_count=7),
    ]
    injected = new_code_cell("fast = True", metadata={"tags": ["injected-parameters"]})
    notebook = run_notebooks.tidy(
        new_notebook(cells=[injected, cell], metadata={"papermill": {}, "widgets": {}})
    )
    (cell,) = notebook.cells
    assert [o.get("text", o.output_type) for o in cell.outputs] == ["100%\n", "execute_result"]
    assert (cell.execution_count, cell.outputs[1].execution_count) == (1, 1)
    assert cell.metadata == {} and notebook.metadata == {}


def test_stamp_changes_with_the_code_and_with_the_package_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_notebooks, "ROOT", tmp_path)
    module = tmp_path / "companion" / "ridethrough" / "a.py"
    module.parent.mkdir(parents=True)
    module.write_text("x = 1\n")
    first = run_notebooks.stamp(new_notebook(cells=[new_code_cell("a"), new_markdown_cell("b")]))
    assert run_notebooks.stamp(new_notebook(cells=[new_code_cell("a"), new_markdown_cell("c")])) == first
    assert run_notebooks.stamp(new_notebook(cells=[new_code_cell("a2")]))["code"] != first["code"]
    module.write_text("x = 2\n")
    changed = run_notebooks.stamp(new_notebook(cells=[new_code_cell("a")]))
    assert changed["code"] == first["code"] and changed["package"] != first["package"]


def test_tool_names_what_it_cannot_find() -> None:
    result = subprocess.run(
        [sys.executable, run_notebooks.__file__, "--only", "nothing"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1 and "no notebook in" in result.stderr
