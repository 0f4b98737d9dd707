"""HETCOLL_CHECK=sampled, as it is unless somebody says otherwise: some sums are checked, which all ranks know by
themselves, and no right one is found wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ranks import Ranks

import hetcoll
from hetcoll.runtime.crosscheck import view
from hetcoll.types import Collective, DType

SIZE = 3
NBYTES = 8
COST = 150_000 + 5 * NBYTES  # of a call, as it is counted: `PyEngine::IsDue`
EVERY = 100 * (200_000_000 + 1000 * NBYTES) // COST + 1  # calls of so many bytes
SKIPPED = EVERY - 50


class Sampled:
    """A communicator whose checked calls are counted; rank 1's memory changes their results while it `spoils`."""

    def __init__(self, whole: hetcoll.Communicator) -> None:
        comm = whole.split(0)
        assert comm is not None
        self.comm, self.spoils, self.checked = comm, False, 0
        self._start = comm._core.start
        comm._core.__dict__["start"] = self._change

    def _change(self, call: Any, *rest: Any) -> Any:
        work = self._start(call, *rest)
        self.checked += bool(call.label)
        if self.spoils and self.comm.rank == 1 and not call.label:
            work.wait()
            view(call.recv)[-1] += 1
        return work

    def skip(self) -> None:
        """As so many calls would, for which a test has no time."""
        nbytes = (SKIPPED * COST - 150_000) // 5
        assert not self.comm._core.engine.take_due(Collective.ALLREDUCE, nbytes, DType.UINT8, False)

    def call(self, times: int, value: float = 1.0) -> int:
        """How many of these calls were over before one failed. Rank 0 waits for each later."""
        x, y = np.full(NBYTES // 4, value, np.float32), np.zeros(NBYTES // 4, np.float32)
        for number in range(times):
            try:
                self.comm.allreduce(x, y, async_op=self.comm.rank == 0 and number % 2 == 0).wait()
            except hetcoll.CommunicationError:
                return number
            with np.errstate(over="ignore"):
                assert np.array_equal(y, SIZE * x, equal_nan=True)
        return times

    def drop(self, times: int) -> None:
        """So many asynchronous calls for whose end nobody waits: it is known otherwise, and their results are gone."""
        x, y = np.ones(NBYTES // 4, np.float32), np.zeros(NBYTES // 4, np.float32)
        for _ in range(times):
            self.comm.allreduce(x, y, async_op=True)
        self.comm.barrier()
        y[:] = 0


def sample(whole: hetcoll.Communicator) -> tuple[list[int], int, str]:
    each = Sampled(whole)
    checked = []
    for value in (1.0, np.nan, np.inf, 3e38):
        each.skip()
        assert each.call(EVERY - SKIPPED + 1, value) == EVERY - SKIPPED + 1
        checked.append(each.checked)
        each.skip()
        assert each.call(EVERY - SKIPPED + 1) == EVERY - SKIPPED + 1
    each.skip()
    each.drop(EVERY - SKIPPED + 1)
    checked.append(each.checked)
    each.skip()
    each.spoils = True
    came = each.call(1000)
    error = each.comm.error
    each.comm.close()
    return checked, came, str(error)


def test_what_is_spoiled_in_memory_is_found_within_so_many_calls(launch: Callable[..., Ranks]) -> None:
    for checked, came, error in launch(SIZE).run(sample):
        assert checked == [1, 3, 5, 7, 9], "calls that are checked, of what is finite and of what is not"
        assert came <= EVERY - SKIPPED + 1
        assert "HETCOLL_CHECK: the result of allreduce(float32, count=2, op=sum) on rank 1 is wrong: sum of" in error
