"""Training over stand-in GPUs of two vendors: the losses of one vendor, and of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import standins
from installed import import_torch
from torch_ranks import SIZE, TorchRanks

pytestmark = [pytest.mark.standins, pytest.mark.timeout(200)]
MIXED, ONE_VENDOR = "nnaa", "nnnn"
LIMIT = 7e-3  # HetCCL's figure for the relative error of the loss


@pytest.fixture(scope="module")
def ranks() -> Iterator[TorchRanks]:
    """Each sees GPUs of both vendors; the islands are those of two vendors, whatever the GPUs are."""
    import_torch()  # or skips
    for vendor in ("cuda", "hip"):
        if why_not := standins.why_not(vendor):
            pytest.skip(why_not)
    made = TorchRanks(**standins.environment("both", SIZE, timeout=60), HETCOLL_ISLANDS="0,1|2,3")
    yield made
    made.close()


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "pipeline"])
def test_losses_over_two_vendors(ranks: TorchRanks, way: str) -> None:
    """Of two vendors and of one the same bits; of one process the same but for the order of additions."""
    wanted = ranks.run("vendors", "alone", backend=None)[0]
    mixed = ranks.run("vendors", "trained", way, MIXED, backend=None)
    alike = ranks.run("vendors", "trained", way, ONE_VENDOR, backend=None)
    assert wanted[-1] < wanted[0]
    for rank, ((losses, state, paths), (same_losses, same_state, _)) in enumerate(zip(mixed, alike, strict=True)):
        assert losses == same_losses
        assert state == same_state
        assert max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)) < LIMIT
        across = next(line for line in paths if f"rank {(rank + 2) % 4} ({'hip' if rank < 2 else 'cuda'}" in line)
        assert "mapped" in across
    if way == "pipeline":  # activations and gradients are only moved
        assert mixed[0][0] == wanted
