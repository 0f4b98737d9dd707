"""What training is held against: NCCL inside, Gloo between the halves. On CPUs, with an NCCL that is Gloo's."""

from __future__ import annotations

import pytest
from torch_ranks import TorchRanks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("way", ["ddp", "pipeline", "overlapped"])
def test_losses_are_those_of_one_process(torch_ranks: TorchRanks, way: str) -> None:
    wanted = torch_ranks.run("boundary", "alone", backend=None)[0]
    for losses in torch_ranks.run("boundary", "trained", way, backend=None):
        assert losses == pytest.approx(wanted, rel=1e-5)
