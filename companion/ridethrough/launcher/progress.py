"""How far a run is, and what its ranks print: in a terminal, in a notebook, in a log file."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from tqdm.std import tqdm


class Progress:
    """One run's display: a bar that stays below the ranks' output, or a line every tenth of the run.

    A terminal gets the bar, and so does a notebook, in an output of its own that is updated in place and
    needs no widgets; a file or a pipe gets plain lines.

    Args:
        stream: where to write; None shows nothing.
        steps: steps in the whole run; None shows no progress.
    """

    def __init__(self, stream: TextIO | None, steps: int | None) -> None:
        self._stream, self._steps = stream, steps
        self._bar: Any = None
        self._shown = 0
        if stream and steps and (out := stream if stream.isatty() else _notebook(stream)):
            sized = stream.isatty() and all(os.get_terminal_size(stream.fileno()))  # some say 0 × 0
            self._bar = tqdm(total=steps, file=out, unit="step", dynamic_ncols=sized, ncols=80, nrows=20)

    def line(self, text: str) -> None:
        """Show one line, above the bar.

        Raises:
            BrokenPipeError: once, if nobody reads any more; after that nothing is shown.
        """
        if self._stream is None:
            return
        try:
            if self._bar is not None and self._stream.isatty():
                self._bar.write(text, file=self._stream)
            else:
                print(text, file=self._stream, flush=True)
        except BrokenPipeError:
            self._stream = self._bar = None
            raise

    def at(self, step: int, loss: float | None = None) -> None:
        """The run has finished `step`; a restored run starts at its checkpoint's step."""
        if self._bar is not None:
            if loss is None:
                self._bar.initial = step  # the rate counts from here
            else:
                self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self._bar.update(step - self._bar.n)
            if step == self._steps:
                self.close()  # what comes after the last step is not in the rate
        elif self._steps and self._is_due(step) and loss is not None:
            self.line(f"step {step}/{self._steps}  loss {loss:.4f}")

    def close(self) -> None:
        """Leave the bar as it is; nothing is updated any more."""
        if self._bar is not None:
            self._bar.close()
            self._bar = self._steps = None

    def _is_due(self, step: int) -> bool:
        assert self._steps
        tenth = step * 10 // self._steps
        due = step == self._steps or tenth != self._shown
        self._shown = tenth
        return due


class _Display:
    """A stream for tqdm that shows the newest state of the bar in one updated notebook output."""

    encoding = "utf-8"  # tqdm draws in ASCII for a stream that does not say

    def __init__(self, display: Any) -> None:
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def write(self, text: str) -> None:
        if bar := text.strip("\r\n\x1b[A"):
            self._handle.update({"text/plain": bar}, raw=True)

    def flush(self) -> None:
        pass


def _notebook(stream: TextIO) -> _Display | None:
    """A notebook output, if `stream` is the output of a running notebook cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel") or stream is not sys.stdout:
        return None
    from IPython.display import display

    return _Display(display)
