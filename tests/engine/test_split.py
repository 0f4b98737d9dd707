"""`split`: who is in which communicator, in which order, and that each lives by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from ranks import Job, Ranks
from thorough import parametrize

import hetcoll
from hetcoll import ArgumentError
from hetcoll.errors import CommunicationError, InitError
from hetcoll.runtime.regroup import while_whole

Pool = Callable[..., Ranks]
TRANSPORTS = ("shm", "tcp")


def _split(comm: hetcoll.Communicator, color: int, key: int = 0) -> hetcoll.Communicator:
    child = comm.split(color, key)
    assert child is not None
    return child


def _members(comm: hetcoll.Communicator, me: int) -> list[int]:
    """What every rank of `comm` calls itself, by rank; moved by three collectives that must agree."""
    gathered, summed, sent = np.full(comm.size, -1), np.zeros(comm.size, np.int64), np.full(comm.size, -1)
    comm.allgather(np.array([me]), gathered)
    summed[comm.rank] = me
    comm.allreduce(summed)
    comm.alltoall(np.full(comm.size, me), sent)
    assert gathered.tolist() == summed.tolist() == sent.tolist()
    return [int(rank) for rank in gathered]


def _grouped(
    comm: hetcoll.Communicator, colors: list[int | None], keys: list[int]
) -> tuple[int, int, list[int]] | None:
    child = comm.split(colors[comm.rank], keys[comm.rank])
    if child is None:
        return None
    with child:
        return child.rank, child.size, _members(child, comm.rank)


@parametrize("transport", TRANSPORTS, first=1)
@pytest.mark.parametrize(
    ("colors", "keys", "groups"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0], [[0, 1, 2, 3]]),
        ([7, 7, 7, 7], [3, 2, 1, 0], [[3, 2, 1, 0]]),
        ([0, 0, 0, 0], [1, 0, 1, 0], [[1, 3, 0, 2]]),  # rank breaks ties
        ([1, 2, 1, 2], [0, 0, -(1 << 63), (1 << 63) - 1], [[2, 0], [1, 3]]),
        ([-1, 0, 0, 0], [0, 0, 0, 0], [[0], [1, 2, 3]]),
        ([(1 << 63) - 1, -(1 << 63), None, None], [0, 0, 0, 0], [[0], [1]]),
        ([0, None, 0, 0], [5, 0, 4, 4], [[2, 3, 0]]),  # None is no color, not color 0
        ([1, True, 0, False], [0, 0, 0, 0], [[0, 1], [2, 3]]),
        ([None, None, None, None], [0, 0, 0, 0], []),
    ],
)
def test_colors_and_keys(
    pool: Pool, transport: str, colors: list[int | None], keys: list[int], groups: list[list[int]]
) -> None:
    wanted = {rank: (at, len(group), group) for group in groups for at, rank in enumerate(group)}
    found = pool(4, HETCOLL_TRANSPORT=transport).run(_grouped, colors, keys)
    assert found == [wanted.get(rank) for rank in range(4)]


def _nested(comm: hetcoll.Communicator) -> tuple[list[int], list[int]]:
    half = _split(comm, comm.rank // 2, -comm.rank)
    alone = _split(half, half.rank)
    again = _split(half, 0, -half.rank)
    x = np.ones(3)
    alone.allreduce(x)
    assert (x == 1).all()
    found = _members(half, comm.rank), _members(again, comm.rank)
    for each in (half, again, alone):
        each.close()
    return found


def test_a_split_of_a_split(pool: Pool) -> None:
    assert pool(4).run(_nested) == [([1, 0], [0, 1])] * 2 + [([3, 2], [2, 3])] * 2


def _independent(comm: hetcoll.Communicator) -> None:
    """Colors run other operations, counts and types, as often as they like; the parent goes on between."""
    color = 0 if comm.rank == 0 else 1 + comm.rank % 2  # sizes 1, 2 and 2 of 5
    with _split(comm, color) as child:
        wide = [np.int8, np.float32, np.int64][color]
        for i in range(5 * (color + 1)):
            x = np.full(1 + 20_000 * color, 1 + i % 3, wide)
            child.allreduce(x)
            assert (x == child.size * (1 + i % 3)).all()
            if color == 2:
                child.broadcast(x, child.size - 1)
        total = np.ones(10)
        comm.allreduce(total)
        assert (total == comm.size).all()
        child.reduce_scatter(np.arange(3.0 * child.size), part := np.empty(3))
        assert (part == child.size * (np.arange(3) + 3 * child.rank)).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collectives_of_the_colors_are_independent(pool: Pool, transport: str) -> None:
    pool(5, HETCOLL_TRANSPORT=transport).run(_independent)


def _in_flight_together(comm: hetcoll.Communicator) -> None:
    children = [_split(comm, 0, key * comm.rank) for key in (1, -1)]
    works = []
    for i in range(10):
        for at, each in enumerate((comm, *children)):
            root = np.full(30_000, float(each.rank + i))
            works.append((each.broadcast(root, at % comm.size, async_op=True), root, at % comm.size + i))
    for work, array, wanted in reversed(works):
        work.wait()
        assert (array == wanted).all()
    for child in children:
        child.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parent_and_children_have_calls_in_flight_at_once(pool: Pool, transport: str) -> None:
    pool(3, HETCOLL_TRANSPORT=transport).run(_in_flight_together)


def _check_all(comms: list[hetcoll.Communicator], closed: set[int]) -> None:
    for i, comm in enumerate(comms):
        if i in closed:
            assert comm.closed
            with pytest.raises(hetcoll.ClosedError):
                comm.allreduce(np.ones(4))
        else:
            x = np.full(4, comm.rank + 1.0)
            comm.allreduce(x)
            assert (x == comm.size * (comm.size + 1) / 2).all()


def _closed_in_order(job: Job, order: list[int]) -> None:
    parent = job.join()
    child, reverse = _split(parent, 0), _split(parent, 0, -parent.rank)
    comms = [parent, child, reverse, _split(child, 0)]
    closed: set[int] = set()
    _check_all(comms, closed)
    for i in order:
        for comm in comms:
            if not comm.closed:
                comm.barrier()  # close() waits for nobody: the others must be done with it
        comms[i].close()
        closed.add(i)
        _check_all(comms, closed)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_in_any_order(launch: Pool, order: list[int], transport: str) -> None:
    launch(2, join=False, HETCOLL_TRANSPORT=transport).run(_closed_in_order, order)


def _overlapping(comm: hetcoll.Communicator) -> None:
    """A new communicator is made before the one before it is closed; names are not used twice."""
    last = _split(comm, 0)
    for i in range(8):
        following = _split(comm if i % 2 else last, i, i * comm.rank)
        for each in (last, following, comm):
            assert sorted(_members(each, comm.rank)) == list(range(comm.size))
        last.barrier()
        last.close()
        last = following
    last.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lifetimes_overlap(pool: Pool, transport: str) -> None:
    pool(3, HETCOLL_TRANSPORT=transport).run(_overlapping)


def _wrong(comm: hetcoll.Communicator) -> None:
    with pytest.raises(hetcoll.BufferTypeError, match="color: wanted a whole number"):
        comm.split("red")  # type: ignore[arg-type]
    with pytest.raises(hetcoll.BufferTypeError, match="key: wanted a whole number"):
        comm.split(0, 1.5)  # type: ignore[arg-type]
    with pytest.raises(hetcoll.ArgumentError, match="color: wanted 64 bits"):
        comm.split(1 << 63)
    with _split(comm, 0) as child:  # nothing was sent: the ranks are still in step
        assert _members(child, comm.rank) == list(range(comm.size))


def test_wrong_arguments_are_refused_before_anything_is_sent(pool: Pool) -> None:
    pool(2).run(_wrong)


def _one_does_not_come(comm: hetcoll.Communicator, dies: bool) -> tuple[str, int]:
    """Rank 3 splits, but makes no communicator with rank 1: it ends, or only waits."""
    if comm.rank == 3:

        def stop(*_: object) -> None:
            if dies:
                os._exit(0)
            raise ArgumentError("enough")

        hetcoll.Communicator._make = stop  # type: ignore[method-assign,assignment]
    try:
        part = comm.split(comm.rank % 2)
    except (hetcoll.InitError, hetcoll.PeerLostError) as error:
        return str(error), getattr(error, "rank", -1)
    except ArgumentError:
        time.sleep(3)  # longer than the others wait
        return "", -1
    assert part is not None
    part.close()
    return "", -1


@pytest.mark.parametrize("dies", [False, True])
def test_errors_name_the_ranks_of_the_communicator_that_is_split(launch: Pool, dies: bool) -> None:
    """Of ranks 1 and 3, which would have been 0 and 1."""
    ranks = launch(4, HETCOLL_INIT_TIMEOUT="2")
    ranks.start(_one_does_not_come, dies)
    (outcome,) = ranks.finish(only=[1])
    assert outcome.error is None, outcome.trace
    text, rank = outcome.value
    assert "rank 3 " in text
    assert "rank 1 " not in text.partition("; rank 1 was in ")[0]
    assert (rank == 3) == dies
    if dies:
        ranks.finish(only=[0, 2])
        ranks.kill(3)
    else:
        ranks.finish(only=[0, 2, 3])


def _wait_in_vain(comm: hetcoll.Communicator, what: str) -> str:
    """Rank 1 gives up when the others wait for it in the new communicator."""
    comm.barrier()
    if comm.rank == 1:

        def give_up(*args: object) -> None:
            comm.abort("enough")
            raise RuntimeError

        comm._make = give_up  # type: ignore[assignment,method-assign]
    with pytest.raises(RuntimeError if comm.rank == 1 else hetcoll.AbortedError) as caught:
        comm.split(0) if what == "split" else comm.window()
    return str(caught.value)


@pytest.mark.parametrize("what", ["split", "window"])
def test_who_waits_for_a_part_hears_that_the_whole_has_failed(launch: Pool, what: str) -> None:
    assert launch(3).run(_wait_in_vain, what) == ["rank 1 called abort(): enough", "", "rank 1 called abort(): enough"]


def test_a_part_that_cannot_be_made_since_the_whole_failed_says_what_that_failed_with() -> None:
    """Whatever the part itself met: its requests were given up in the middle of one step or another."""

    class Whole:
        engine = SimpleNamespace(failed=False)
        diagnosis = SimpleNamespace(on_failure=[], error=lambda: hetcoll.AbortedError("rank 0 aborted: enough"))
        session = SimpleNamespace(control=SimpleNamespace(while_wanted=lambda _: nullcontext(lambda _: None)))

        def fail(self, kind: type[hetcoll.HetcollError]) -> None:
            self.engine.failed = True
            self.diagnosis.on_failure[0]()
            raise kind("the communicator that it was to come from has failed")

    for kind in (InitError, hetcoll.PeerLostError, CommunicationError):
        whole = Whole()
        whole.engine.failed = False
        with pytest.raises(hetcoll.AbortedError, match="enough"), while_whole(whole, b""):  # type: ignore[arg-type]
            whole.fail(kind)
