"""Modules under the names that they had: found, with a warning of what to write instead."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from hetcoll._moved import MOVED
from hetcoll.plan import ir

USE = """
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from {old} import {name}
assert str(told[-1].message) == "{old} has moved: import {new}", told
import {new} as new
assert {name} is new.{name} and new.__spec__.name == "{new}" == new.__name__
"""


@pytest.mark.parametrize("old", MOVED)
def test_old_names_are_found_once_and_warn(old: str) -> None:
    new = importlib.import_module(MOVED[old])
    name = next(n for n, value in vars(new).items() if callable(value) and n[0] != "_")
    code = USE.format(old=old, new=MOVED[old], name=name)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_plan_is_found_where_it_was() -> None:
    with pytest.warns(DeprecationWarning, match=r"hetcoll\.plan\.Plan has moved: import hetcoll\.plan\.ir\.Plan"):
        from hetcoll.plan import Plan
    assert Plan is ir.Plan


def test_what_never_was_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"hetcoll\.nothing"):
        importlib.import_module("hetcoll.nothing")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from hetcoll.plan import Nothing")
