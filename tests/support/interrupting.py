"""Ctrl-C, or what else ends a rank, at a certain place of the library, and not after a certain time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import hetcoll

_LIBRARY = str(Path(hetcoll.__file__).parent)


def interrupt_at(count: int, *files: str) -> None:
    """From now on this thread, the main one, is interrupted there: of a call of C code the result is lost."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    act_at(count, interrupt, *files)


def act_at(count: int, act: Callable[[], None], *files: str) -> None:
    """On this thread, where the interpreter looks for signals for the `count`-th time from now on in the library, or in
    one of these `files`: as a function begins, or a call of C code ends."""
    left = count

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith((_LIBRARY, *files)):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                act()

    sys.setprofile(look)
