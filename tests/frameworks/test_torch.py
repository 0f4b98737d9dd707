"""`hetcoll.torch` on four ranks with CPU tensors."""

from __future__ import annotations

import pytest
from installed import import_torch
from torch_ranks import TorchRanks, names

pytestmark = pytest.mark.timeout(300)  # the first test starts the ranks, which load torch


@pytest.mark.parametrize("case", names("collectives"))
def test_collectives(torch_ranks: TorchRanks, case: str) -> None:
    torch_ranks.run("collectives", case)


@pytest.mark.parametrize("case", names("messages"))
def test_messages_and_groups(torch_ranks: TorchRanks, case: str) -> None:
    torch_ranks.run("messages", case)


@pytest.mark.parametrize("case", names("tags"))
def test_tags(torch_ranks: TorchRanks, case: str) -> None:
    torch_ranks.run("tags", case)


@pytest.mark.parametrize("case", names("layouts"))
def test_layouts(torch_ranks: TorchRanks, case: str) -> None:
    torch_ranks.run("layouts", case)


@pytest.mark.parametrize("case", names("training"))
def test_training(torch_ranks: TorchRanks, case: str) -> None:
    torch_ranks.run("training", case)


@pytest.mark.parametrize("case", names("failures"))
def test_failures(torch_ranks: TorchRanks, case: str) -> None:
    torch_ranks.run("failures", case, backend=None)


def test_compression() -> None:
    """Four ranks that are two islands."""
    import_torch()  # or skips
    ranks = TorchRanks(HETCOLL_ISLANDS="0,1|2,3")
    try:
        for case in names("compression"):
            ranks.run("compression", case)
    finally:
        ranks.close()
