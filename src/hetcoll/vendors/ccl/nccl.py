"""NCCL: where it is found, and why not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

from .finding import Finder, loaded

INSTALL = "pip install 'hetcoll[cuda]'"


def _candidates() -> Iterator[str]:
    """In the order of preference: a process needs one NCCL, which PyTorch may have brought already."""
    yield from loaded("libnccl.so.2")
    try:
        yield str(import_module("nccl.bindings.nccl").get_library_path())
    except (ImportError, RuntimeError):  # it looks as cuda-pathfinder does, which may be there without it
        with suppress(ImportError, RuntimeError):
            yield str(import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nccl").abs_path)
    yield "libnccl.so.2"


_finder = Finder("NCCL", _candidates, INSTALL)
why_not, library = _finder.why_not, _finder.library
