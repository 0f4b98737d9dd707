"""`hetcoll.torch.balance`."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from installed import import_torch
from torch_ranks import TorchRanks, names

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("case", names("balance"))
def test_on_ranks(torch_ranks: TorchRanks, case: str) -> None:
    torch_ranks.run("balance", case)


def test_shares() -> None:
    import_torch()
    from hetcoll.torch.balance import shares

    assert shares(12, [1.0, 1.0, 1.0]) == [4, 4, 4]
    assert shares(10, [3.0, 1.0]) in ([7, 3], [8, 2])
    assert shares(3, [100.0, 1.0, 1.0]) == [1, 1, 1]
    with pytest.raises(ValueError, match="wanted 1 or more for each of 3 ranks, got 2"):
        shares(2, [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="above 0"):
        shares(2, [1.0, 0.0])

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.integers(0, 500), st.integers(0, 3))
    def whole(speeds: list[float], spare: int, least: int) -> None:
        total = least * len(speeds) + spare
        found = shares(total, speeds, least)
        assert sum(found) == total
        assert min(found) >= least
        ordered = [share for _, share in sorted(zip(speeds, found, strict=True))]
        assert all(b >= a - 1 for a, b in itertools.pairwise(ordered))

    whole()
