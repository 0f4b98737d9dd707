"""Which cases of a test `make test` runs. The others show the same of more: `make test-all` runs all, CI a quarter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def parametrize(
    names: str | tuple[str, ...], cases: Iterable[Any], *, first: int, **options: Any
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize`, whose cases from number `first` on are marked "thorough"."""
    one = isinstance(names, str)
    rows = [pytest.param(*([case] if one else case)) for case in cases]
    assert 0 <= first < len(rows), "then it is no other than parametrize"
    marked = [
        row if at < first else pytest.param(*row.values, marks=pytest.mark.thorough) for at, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(names, marked, **options)
