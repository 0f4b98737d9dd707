"""HETCOLL_CHECK=sampled, as it is unless somebody says otherwise: some sums are checked, which all ranks know by
themselves, and no right one is found wrong."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import Ranks, wait_until

import hetcoll
from hetcoll.calls.buffers import array_of
from hetcoll.types import Collective, DType

SIZE = 3
NBYTES = 8
COST = 150_000 + 5 * NBYTES  # of a call, as it is counted: `PyEngine::IsDue`
EVERY = 100 * (200_000_000 + 1000 * NBYTES) // COST + 1  # calls of so many bytes
SKIPPED = EVERY - 50


class Sampled:
    """A communicator whose checked calls are counted; rank 1's memory changes what it `spoils`: "input" or "result"."""

    def __init__(self, whole: hetcoll.Communicator) -> None:
        comm = whole.split(0)
        assert comm is not None
        self.comm, self.spoils, self.checked = comm, "", 0
        self._start = comm._core.start
        comm._core.__dict__["start"] = self._change

    def _change(self, call: Any, *rest: Any) -> Any:
        odd = self.spoils if self.comm.rank == 1 and not call.label else ""
        if odd == "input":
            array_of(call.send)[-1] += 1
        work = self._start(call, *rest)
        self.checked += bool(call.label)
        if odd == "result" and call.recv is not None:
            work.wait()
            array_of(call.snapshot or call.recv)[-1] += 1
        return work

    def due(self) -> None:
        """As a call that pays for the check of the next one."""
        assert not self.comm._core.engine.take_due(Collective.ALLREDUCE, 10**12, DType.UINT8, False)

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
        """So many asynchronous calls whose end is known otherwise: rank 0 waits for none, others wait when the results
        are gone."""
        x, y = np.ones(NBYTES // 4, np.float32), np.zeros(NBYTES // 4, np.float32)
        works = [self.comm.allreduce(x, y, async_op=True) for _ in range(times)]
        self.comm.barrier()
        y[:] = 0
        for work in works if self.comm.rank > 0 else []:
            work.wait()


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
    each.spoils = "result"
    came = each.call(1000)
    error = each.comm.error
    each.comm.close()
    return checked, came, str(error)


def test_what_is_spoiled_in_memory_is_found_within_so_many_calls(pool: Callable[..., Ranks]) -> None:
    for checked, came, error in pool(SIZE).run(sample):
        assert checked == [1, 3, 5, 7, 9], "calls that are checked, of what is finite and of what is not"
        assert came <= EVERY - SKIPPED + 1
        assert "HETCOLL_CHECK: the result of allreduce(float32, count=2, op=sum) on rank 1 is wrong: sum of" in error


FORMS: dict[str, Callable[[hetcoll.Communicator], hetcoll.Work]] = {
    # the last one leaves its result on rank 1 alone
    "allreduce": lambda c: c.allreduce(np.ones(5000, np.float32), np.zeros(5000, np.float32), async_op=True),
    "in place": lambda c: c.allreduce(np.ones(70), op="max", async_op=True),
    "reduce_scatter": lambda c: c.reduce_scatter(np.ones(7 * SIZE, np.int32), np.zeros(7, np.int32), async_op=True),
    "reduce": lambda c: c.reduce(np.ones(7), np.zeros(7) if c.rank == 1 else None, root=1, async_op=True),
}


def begin(each: Sampled, name: str, spoils: str) -> hetcoll.Work:
    """The call that is checked."""
    FORMS[name](each.comm).wait()
    each.due()
    each.spoils = spoils
    work = FORMS[name](each.comm)
    assert each.checked, "it is one of those"
    each.spoils = ""
    return work


def spoil(whole: hetcoll.Communicator, spoils: str, waits: str) -> dict[str, str]:
    """What each form is told, each in a communicator of its own. `waits`: how the program knows of its end."""
    return {name: spoil_one(whole, name, spoils, waits) for name in FORMS}


def spoil_one(whole: hetcoll.Communicator, name: str, spoils: str, waits: str) -> str:
    each = Sampled(whole)
    comm = each.comm
    try:
        work = begin(each, name, spoils)
        if waits == "wait":
            work.wait()
        elif waits == "done":
            wait_until(lambda made=work: made.done, 20)
            assert work.error is None or "HETCOLL_CHECK" in str(work.error)
        work = hetcoll.Work()  # nobody has the other one any more
        for _ in range(1000):  # the others hear of it here, and all where nobody has looked yet
            comm.allreduce(np.ones(3), async_op=True).wait()
        comm.barrier()
    except hetcoll.CommunicationError as error:
        return str(error)
    finally:
        comm.close()
    return ""


@pytest.mark.parametrize("waits", ["wait", "done", "not at all"])
def test_an_asynchronous_sum_that_is_spoiled_is_found_on_every_rank(pool: Callable[..., Ranks], waits: str) -> None:
    one, *others = pool(SIZE).run(spoil, "result", waits)
    assert all(each == one for each in others)
    for name, text in one.items():
        kind = name.replace("in place", "allreduce")
        assert text.startswith(f"HETCOLL_CHECK: the result of {kind}("), (name, text)
        assert " on rank 1 is wrong: " in text, (name, text)


def test_input_that_is_spoiled_before_it_is_summed_is_found(pool: Callable[..., Ranks]) -> None:
    for found in pool(SIZE).run(spoil, "input", "wait"):
        for name, text in found.items():
            assert "HETCOLL_CHECK: the result of " in text, (name, text)
            assert " is wrong: " in text, (name, text)


def call_among_others(whole: hetcoll.Communicator) -> None:
    each = Sampled(whole)
    comm, last = each.comm, np.zeros(0)
    for turn in range(8):
        works, results, over = list[hetcoll.Work](), list[np.ndarray[Any, Any]](), list[int]()
        for number in range(6):
            if number == turn % 6:
                each.due()
            results.append(np.full(20_000 * (number + 1), comm.rank + number))
            works.append(comm.allreduce(results[-1], async_op=True))
            works[-1].add_done_callback(lambda _, over=over, number=number: over.append(number))  # type: ignore[misc]
        last = np.full(1000, comm.rank)
        comm.allreduce(last)
        assert all(work.done for work in works), "they are over in their order, the one that is checked too"
        for number in np.random.default_rng(comm.rank + turn).permutation(6):
            works[number].wait()
            assert (results[number] == 3 + SIZE * number).all(), (turn, number)
        assert (last == 3).all()
        wait_until(lambda over=over: sorted(over) == list(range(6)), 20)
    assert each.checked == 8
    comm.barrier()
    comm.close()


def test_an_asynchronous_sum_that_is_checked_disturbs_no_others(pool: Callable[..., Ranks]) -> None:
    pool(SIZE).run(call_among_others)


def end_in_flight(whole: hetcoll.Communicator, aborts: bool) -> None:
    """Rank 2 never makes the call that is checked."""
    each = Sampled(whole)
    comm, array = each.comm, np.ones(50_000)
    alive = weakref.ref(array)
    comm.allreduce(array)
    each.due()
    work = comm.allreduce(array, async_op=True) if comm.rank < 2 else None
    assert work is None or not work.done
    whole.barrier()
    if aborts:
        comm.abort()
        with pytest.raises(hetcoll.AbortedError):
            (work or comm.barrier()).wait()
        assert work is None or isinstance(work.error, hetcoll.AbortedError)
    comm.close()
    assert work is None or work.done
    del work, array, each
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("aborts", [True, False])
def test_one_that_is_in_flight_at_the_end_leaves_nothing(pool: Callable[..., Ranks], aborts: bool) -> None:
    pool(SIZE).run(end_in_flight, aborts)
