"""Which tests, and which cases of a test, `make test` runs. The other cases show the same of more: `make test-all` runs
all, CI an eighth. Where they are `whole` CI runs all, too."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

_Row = type(pytest.param())

HOUSE = pytest.mark.thorough(whole=True)
"""What holds this repository to its own rules, documents and benchmarks, its fakes to the drivers, its parsers to any
bytes, and kernels to compilers for devices that are not here: CI runs it with each commit. `make test` shows that the
library works on the machine at hand."""


def examples(few: int) -> int:
    """So many of a property, drawn anew each time; `make test-all` tries three times as many."""
    return few * int(os.environ.get("TEST_EXAMPLES", "1"))


def parametrize(
    names: str | tuple[str, ...], cases: Iterable[Any], *, first: int, whole: bool = False, **options: Any
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize`, whose cases from number `first` on are marked "thorough". `whole`: a slice has all."""
    one = isinstance(names, str)
    rows = [case if isinstance(case, _Row) else pytest.param(*([case] if one else case)) for case in cases]
    assert 0 <= first < len(rows), "then it is no other than parametrize"
    more = pytest.mark.thorough(whole=whole)
    marked = [
        row if at < first else pytest.param(*row.values, id=row.id, marks=[*row.marks, more])
        for at, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(names, marked, **options)
