"""Training over fake GPUs of two vendors: the losses of one vendor, and of one process."""

from __future__ import annotations

from collections.abc import Iterator

import fakes
import pytest
from installed import import_torch
from torch_ranks import SIZE, TorchRanks

pytestmark = [pytest.mark.slow, pytest.mark.fakes, pytest.mark.timeout(200)]
MIXED, ONE_VENDOR = "nnaa", "nnnn"
LIMIT = 7e-3  # HetCCL's figure for the relative error of the loss


def start(**env: str | tuple[str, ...]) -> TorchRanks:
    """Each sees GPUs of both vendors; the islands are those of two vendors, whatever the GPUs are, if not said."""
    if import_torch().version.cuda is not None:
        pytest.skip("PyTorch for CUDA needs more of NCCL's library than the fake has: a build for CPUs is wanted")
    return TorchRanks(**{**fakes.environment("both", SIZE, timeout=60), "HETCOLL_ISLANDS": "0,1|2,3", **env})


@pytest.fixture(scope="module")
def ranks() -> Iterator[TorchRanks]:
    made = start()
    yield made
    made.close()


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "pipeline", "overlapped"])
def test_losses_over_two_vendors(ranks: TorchRanks, way: str) -> None:
    """Of two vendors and of one the same bits; of one process the same but for the order of additions."""
    wanted = ranks.run("vendors", "alone", backend=None)[0]
    mixed = ranks.run("vendors", "trained", way, MIXED, backend=None)
    alike = ranks.run("vendors", "trained", way, ONE_VENDOR, backend=None)
    assert wanted[-1] < wanted[0]
    for rank, ((losses, state, paths, _), (same_losses, same_state, *_)) in enumerate(zip(mixed, alike, strict=True)):
        assert losses == same_losses
        assert state == same_state
        assert max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)) < LIMIT
        across = next(line for line in paths if f"rank {(rank + 2) % 4} ({'hip' if rank < 2 else 'cuda'}" in line)
        assert "mapped" in across
    if way in ("pipeline", "overlapped"):  # activations and gradients are only moved
        assert mixed[0][0] == wanted


@pytest.mark.thorough
def test_losses_beside_ranks_without_a_gpu() -> None:
    """A GPU of each vendor and two CPUs: the losses of one process, and the same parameters on all ranks."""
    ranks = start(HETCOLL_ISLANDS="auto", HETCOLL_DEVICE=("cuda:0", "hip:1", "cpu", "cpu"))
    try:
        wanted = ranks.run("vendors", "alone", backend=None)[0]
        for way in ("ddp", "fsdp2", "pipeline"):
            found = ranks.run("vendors", "trained", way, "nacc", backend=None)
            for losses, state, paths, _ in found:
                assert max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)) < LIMIT
                assert way != "ddp" or state == found[0][1]
                assert way != "pipeline" or losses == wanted
                assert any("mapped" in line for line in paths), paths
    finally:
        ranks.close()


@pytest.mark.thorough
def test_compressed_gradients_over_two_vendors() -> None:
    """Between the vendors gradients travel as int8; the losses stay those of one process."""
    ranks = start(HETCOLL_COMPRESS="int8")
    try:
        wanted = ranks.run("vendors", "alone", backend=None)[0]
        for way in ("ddp", "fsdp2"):  # all-reduces, reduce-scatters
            for losses, _, _, counters in ranks.run("vendors", "trained", way, MIXED, backend=None):
                assert max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)) < LIMIT
                assert 0 < counters["compressed_after"] < 0.27 * counters["compressed_before"]
    finally:
        ranks.close()
