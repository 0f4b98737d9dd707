"""Documented modules that have moved: importing them by their old names works, and warns of what to write instead."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader  # at run time it loads more of Python than all of this

MOVED = {
    "hetcoll.algorithms": "hetcoll.plan.algorithms",
    "hetcoll.algorithms.base": "hetcoll.plan.algorithms.base",
    "hetcoll.launch": "hetcoll.tools.launch",
    "hetcoll.selection": "hetcoll.runtime.planner",
    "hetcoll.simulator": "hetcoll.plan.simulator",
    "hetcoll.topology": "hetcoll.plan.topology",
    "hetcoll.tuner": "hetcoll.plan.tuner",
}


class _Finder:
    """Asked first: a package that has moved would be searched for its modules, too, and those made twice."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, cast("Loader", self)) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        where = MOVED[spec.name]
        warnings.warn(f"{spec.name} has moved: import {where}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(where)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the old name's there


def install() -> None:
    """Let old names be found."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
