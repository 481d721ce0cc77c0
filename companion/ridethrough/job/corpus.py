"""Real text without a download: the source files of the reader's own Python, or any folder. No torch."""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridethrough.errors import UsageError

#: Folders that vary between installations of the same Python, or are not its own.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


@dataclass(frozen=True)
class Corpus:
    """Text as bytes.

    Attributes:
        text: all files in the order of their paths, one zero byte after each.
        source: `stdlib` or the folder.
        files: how many files.
        sha256: of `text`; two runs with the same hash read the same text.
    """

    text: bytes
    source: str
    files: int
    sha256: str

    def samples(self, seq_len: int) -> int:
        """How many samples of `seq_len` tokens, each with the one that follows it, the text is cut into.

        Raises:
            UsageError: if it is shorter than one.
        """
        if (count := (len(self.text) - 1) // seq_len) < 1:
            raise UsageError(
                f"seq_len: the text has {len(self.text)} bytes, fewer than a sample of {seq_len + 1}"
            )
        return count

    def describe(self) -> dict[str, Any]:
        """What `run.json` keeps of it."""
        return {"source": self.source, "files": self.files, "bytes": len(self.text), "sha256": self.sha256}


@functools.lru_cache(maxsize=2)
def load_corpus(source: str) -> Corpus:
    """Read the corpus: `stdlib`, or a folder whose files are taken whole, in sorted order.

    Hidden files and folders are left out, and links to folders are not followed. Of the standard library,
    tests and what is installed beside it are left out as well.

    Raises:
        UsageError: if the folder isn't there, holds no text, or a file cannot be read.
    """
    if source == "stdlib":
        root, ending = Path(sysconfig.get_paths()["stdlib"]), ".py"
    else:
        root, ending = Path(source), ""
        if not root.is_dir():
            raise UsageError(f"data: {source!r} is neither 'stdlib' nor a folder of text files")
    try:
        left_out = _LEFT_OUT if source == "stdlib" else set()
        paths = sorted(path for path in _files(root, left_out) if path.name.endswith(ending))
        text = b"".join(path.read_bytes() + b"\0" for path in paths)
    except OSError as error:
        raise UsageError(f"data: {error.filename} cannot be read: {error.strerror}") from None
    if len(text) <= len(paths):
        raise UsageError(f"data: {root} holds no text")
    return Corpus(text, source, len(paths), hashlib.sha256(text).hexdigest())


def _files(root: Path, left_out: set[str]) -> Iterator[Path]:
    """Files below a folder; what is left out is not even listed (site-packages can be large)."""
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file())  # a pipe would be read for ever


def _raise(error: OSError) -> None:
    raise error  # by default `os.walk` passes over a folder that it may not list
