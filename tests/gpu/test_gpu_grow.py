"""Ranks with GPUs that lose one of them and take another in: the vendors' communicators are made anew."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from gpu_calls import device_of_rank
from gpu_places import PLACES, ranks_on
from ranks import Job
from thorough import parametrize

import hetcoll
from hetcoll.gpu.array import DeviceArray

LARGE = 1_100_001  # elements: copies through slots
CASES: dict[str, tuple[list[str | None], int]] = {  # of each rank its kind of GPU, if any; and which rank dies
    "one island": (["cuda", "cuda", "cuda", "cuda"], 1),
    "both vendors": (["cuda", "hip", "hip", "cuda"], 1),
    "both vendors, and rank 0 dies": (["hip", "cuda", "hip", "cuda"], 0),
    "another vendor's comes": (["cuda", "cuda", "cuda", "hip"], 1),
    "one GPU beside CPUs": (["cuda", None, None, "cuda"], 1),
    "the GPU of rank 0 dies": (["cuda", None, None, "cuda"], 0),
}


def check(comm: hetcoll.Communicator, seat: int) -> None:
    """Sums of few and of many elements, in the memory that this process uses."""
    for count in (7, LARGE):
        want = comm.size * (comm.size + 1) / 2
        mine = np.full(count, comm.rank + 1, np.float32)
        if os.environ["HETCOLL_DEVICE"] == "cpu":
            comm.allreduce(mine)
        else:
            array = DeviceArray.of(device_of_rank(seat), mine)
            comm.allreduce(array.buffer()).wait(60)
            mine = array.get()
        assert (mine == want).all()


def regain(job: Job, victim: int) -> tuple[int, int]:
    """Ranks 0 to 2 begin, one is killed, the fourth process comes."""
    if job.rank == 3:
        comm = hetcoll.Communicator.join(job.unique_id, timeout=60)
    else:
        whole = hetcoll.Communicator.init(3, job.rank, job.unique_id, timeout=60)
        check(whole, job.rank)
        whole.barrier()
        if job.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(hetcoll.CommunicationError):
            check(whole, job.rank)
        rest = whole.shrink()
        whole.close()
        check(rest, job.rank)
        comm = rest.grow(timeout=60)
        rest.close()
    check(comm, job.rank)
    comm.barrier()
    return comm.rank, comm.size


@pytest.mark.parametrize("place", PLACES)
@parametrize(("kinds", "victim"), CASES.values(), ids=CASES, first=1)
def test_a_rank_with_a_gpu_is_replaced(kinds: list[str | None], victim: int, place: str) -> None:
    ranks = ranks_on(place, kinds, {"HETCOLL_DEVICE": tuple(kind or "cpu" for kind in kinds)}, join=False)
    try:
        ranks.start(regain, victim)
        outcomes = ranks.finish(90, only=sorted({0, 1, 2, 3} - {victim}))
        ranks.kill(victim)
        assert not [outcome.problem() for outcome in outcomes if outcome.problem()]
        assert [outcome.value for outcome in outcomes] == [(0, 3), (1, 3), (2, 3)]
        ranks.close()
    finally:
        ranks.kill_all()
