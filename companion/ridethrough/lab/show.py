"""Code and tables as a page shows them: the package's own source, differences, aligned rows.

Values are Markdown: JupyterLab, GitHub and the built site each show it in their own style.
"""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ridethrough
from ridethrough.errors import UsageError

Source = Any  # a module, a class, a function: what `inspect.getsource` takes


@dataclass(frozen=True)
class Markdown:
    """Text that Jupyter displays as Markdown, and that `print` shows as it is."""

    text: str
    plain: str

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.plain


def check_versions(book: str) -> None:
    """Stop a notebook that was written for another version of the package.

    Raises:
        UsageError: saying which version the book needs and which one is installed.
    """
    if book != ridethrough.__version__:
        raise UsageError(
            f"this notebook is for ridethrough {book}, but {ridethrough.__version__} is installed: "
            f"run the notebooks of that version, or install this one with `pip install -e .` in its clone"
        )


def show_source(source: Source) -> Markdown:
    """The source of a module, class or function of the package, with its place."""
    code = textwrap.dedent(inspect.getsource(source))
    return _fenced("python", code, _place(source))


def show_diff(before: Source, after: Source) -> Markdown:
    """What changes from one module, class or function to another, line by line."""
    old, new = (inspect.getsource(source).splitlines(keepends=True) for source in (before, after))
    files = [_place(source).partition(":")[0] for source in (before, after)]
    return _fenced("diff", "".join(difflib.unified_diff(old, new, files[0], files[1])), "")


def table(rows: Sequence[Mapping[str, object]]) -> Markdown:
    """Rows under the names of the first row's columns; numbers to three digits, to the right."""
    if not rows:
        return Markdown("", "")
    names = list(rows[0])
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    right = [all(_is_number(row.get(name)) for row in rows) for name in names]
    rule = ["---:" if number else "---" for number in right]
    text = "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in [names, rule, *cells])
    return Markdown(text, _aligned([names, *cells], right))


def _fenced(language: str, code: str, caption: str) -> Markdown:
    fence = "`" * 3 if "```" not in code else "`" * 8
    head = f"`{caption}`\n\n" if caption else ""
    return Markdown(f"{head}{fence}{language}\n{code.rstrip()}\n{fence}", code)


def _place(source: Source) -> str:
    """As in `companion/ridethrough/job/loop.py:12`."""
    root = Path(__file__).parents[2]
    path = Path(inspect.getsourcefile(source) or "")
    name = f"companion/{path.relative_to(root).as_posix()}" if path.is_relative_to(root) else path.name
    return name if inspect.ismodule(source) else f"{name}:{inspect.getsourcelines(source)[1]}"


def _aligned(lines: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    columns = []
    for column, number in zip(zip(*lines, strict=True), right, strict=True):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if number else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if _is_number(value):
        return f"{value:,}"
    return " ".join(str(value).split())


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
