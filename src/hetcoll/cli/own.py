"""Algorithms of the user's own, for the commands that draw plans."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from .. import ArgumentError
from ..plan.algorithms import installed


def add_import(parser: argparse.ArgumentParser) -> None:
    """The option --import, once for each module."""
    parser.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="a module, or a file NAME.py, that registers algorithms of your own; may be given several times",
    )  # fmt: skip


def import_own(modules: Iterable[str]) -> None:
    """Import what is installed, modules by their names, as from a program in this folder, and files by their paths."""
    installed.load()
    for name in modules:
        try:
            if not name.endswith(".py"):
                if not name or name.startswith("."):
                    raise ImportError("no module is called so")
                if "" not in sys.path:
                    sys.path.insert(0, "")
                importlib.import_module(name)
                continue
            spec = importlib.util.spec_from_file_location(Path(name).stem, name)
            if spec is None or spec.loader is None:
                raise ImportError(f"{name} is no Python file")
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except (ImportError, OSError) as error:
            raise ArgumentError(f"--import: wanted a module or a file NAME.py, got {name!r}: {error}") from error
