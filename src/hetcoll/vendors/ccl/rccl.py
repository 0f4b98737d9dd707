"""RCCL: where it is found, and why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

from .finding import Finder, loaded

INSTALL = "install ROCm's rccl (apt install rccl)"


def _candidates() -> Iterator[str]:
    """In the order of preference: a process needs one RCCL, which PyTorch may have brought already."""
    yield from loaded("librccl.so.1", "librccl.so")
    with suppress(ImportError, RuntimeError):  # hip-python up to 7 knows the bare name alone
        yield os.fsdecode(import_module("rocm.bindings.util.paths").get_library_path("rccl"))
    yield from ("librccl.so.1", "librccl.so", "/opt/rocm/lib/librccl.so.1")


_finder = Finder("RCCL", _candidates, INSTALL)
why_not, library = _finder.why_not, _finder.library
