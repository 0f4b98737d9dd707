"""One line on a terminal that says what is being measured, also when the ranks are processes of their own.

Rank 0 of a job that `hetcoll perf` started has a pipe for its standard error. It writes each progress message there as
a line that begins with MARK, and the process that started it shows the latest one below the output.

By hand and not by rich, which draws for one process: here the one that measures is not the one that has the terminal.
"""

from __future__ import annotations

import sys
from typing import BinaryIO, TextIO, cast

MARK = "\x00"
_CLEAR = b"\r\x1b[K"


class Progress:
    """What rank 0 tells of its progress: `mode` "terminal" draws the line, "lines" sends it, "off" says nothing."""

    def __init__(self, total: int, mode: str, out: TextIO | None = None) -> None:
        self._total, self._mode, self._done = total, mode, 0
        self._out = sys.stderr if out is None else out

    def show(self, what: str) -> None:
        """The next measurement begins."""
        self._done += 1
        text = f"[{self._done}/{self._total}] {what}"
        if self._mode == "terminal":
            self._write(_CLEAR.decode() + text)
        elif self._mode == "lines":
            self._write(f"{MARK}{text}\n")

    def clear(self) -> None:
        """Remove the line, for output to take its place."""
        if self._mode == "terminal":
            self._write(_CLEAR.decode())

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Screen:
    """Output of a started job on a terminal: the launcher writes to its `stdout` and `stderr`."""

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self._terminal = stderr
        self._shown = False
        self.stdout = cast(BinaryIO, _Channel(self, stdout))
        self.stderr = cast(BinaryIO, _Channel(self, stderr))

    def write(self, target: BinaryIO, data: bytes) -> None:
        """Progress lines replace each other; anything else takes the place of the progress line."""
        mark = MARK.encode()
        for line in data.splitlines(keepends=True):
            if line.startswith(mark):
                self._draw(line.removeprefix(mark).rstrip(b"\n"))
            else:
                self.clear()
                target.write(line)
                target.flush()

    def clear(self) -> None:
        """Remove the progress line."""
        if self._shown:
            self._draw(b"")
            self._shown = False

    def _draw(self, text: bytes) -> None:
        self._terminal.write(_CLEAR + text)
        self._terminal.flush()
        self._shown = True


class _Channel:
    """One of the two streams of a `Screen`, as far as the launcher needs it."""

    def __init__(self, screen: Screen, target: BinaryIO) -> None:
        self._screen, self._target = screen, target

    def write(self, data: bytes) -> int:
        self._screen.write(self._target, data)
        return len(data)

    def flush(self) -> None:
        self._target.flush()
