"""Ranks that have PyTorch loaded, for all modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from installed import import_torch
from torch_ranks import TorchRanks


@pytest.fixture(scope="session")
def torch_ranks() -> Iterator[TorchRanks]:
    import_torch()  # or skips
    ranks = TorchRanks()
    yield ranks
    ranks.close()
