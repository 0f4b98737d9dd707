"""Objects travel pickled: only where the job has a secret, within a limit, and after their proof."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import Job, Ranks

import hetcoll
from hetcoll.runtime import objects

SIZES = (0, 200, 300, 70_000, 3_000_000)  # bytes: in one piece, in two, and in more than the largest


def _everything(comm: hetcoll.Communicator) -> None:
    rank, size = comm.rank, comm.size
    for nbytes in SIZES:
        mine = {"rank": rank, "data": b"x" * (nbytes + 7 * rank)}
        every = [{"rank": r, "data": b"x" * (nbytes + 7 * r)} for r in range(size)]
        assert comm.allgather_object(mine) == every
        root = nbytes % size
        assert comm.broadcast_object(mine if rank == root else object, root) == every[root]
        assert comm.gather_object(mine, root) == (every if rank == root else None)
        assert comm.scatter_object(every if rank == root else None, root) == mine
        comm.barrier()
    out = [np.arange(3), None]
    assert comm.broadcast_object(out)[1] is None
    if rank == 0:
        for nbytes in SIZES:
            comm.send_object("a" * nbytes, 1)
            comm.send(np.full(4, nbytes), 1)  # in one order with arrays
        assert comm.recv_object(size - 1) == {"last": size - 1}
    if rank == 1:
        for nbytes in SIZES:
            assert comm.recv_object(0) == "a" * nbytes
            comm.recv(got := np.zeros(4, int), 0)
            assert (got == nbytes).all()
    if rank == size - 1:
        comm.send_object({"last": rank}, 0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_objects_arrive(pool: Callable[..., Ranks], transport: str) -> None:
    pool(3, HETCOLL_TRANSPORT=transport).run(_everything)


def _limits(comm: hetcoll.Communicator) -> None:
    rank, size = comm.rank, comm.size
    for wrong in (
        lambda: comm.allgather_object(b"x" * 1000, limit=100),
        lambda: comm.broadcast_object(b"x" * 1000, rank, limit=100),
        lambda: comm.scatter_object([b"x" * 1000] * size, rank, limit=100),
        lambda: comm.scatter_object([1], rank),
        lambda: comm.send_object(b"x" * 1000, (rank + 1) % size, limit=100),
        lambda: comm.send_object(1, rank),
        lambda: comm.allgather_object(1, limit=0),
        lambda: comm.broadcast_object(1, size),
        lambda: comm.scatter_object(5, root=comm.rank),
        lambda: comm.scatter_object(np.array(5), root=comm.rank),
        lambda: comm.scatter_object(iter(range(size)), root=comm.rank),
    ):
        with pytest.raises(hetcoll.ArgumentError, match=r"limit: wanted|objs: wanted|peer: rank|root: wanted"):
            wrong()
    with pytest.raises(hetcoll.BufferTypeError, match="obj: this function cannot be pickled"):
        comm.allgather_object(lambda: None)
    with (
        pytest.raises(hetcoll.ArgumentError, match="wanted sends and receives only, got allgather_object"),
        comm.group(),
    ):
        comm.allgather_object(1)
    if rank == 0:
        comm.send_object(b"x" * 5000, 1)
        comm.send_object("after it", 1)
        comm.send_object(b"x" * 5000, 1)
    elif rank == 1:
        with pytest.raises(
            hetcoll.ArgumentError, match=r"wanted 50.. bytes or more for the object of rank 0"
        ) as caught:
            comm.recv_object(0, limit=100)
        assert comm.recv_object(0) == "after it"
        assert comm.recv_object(0, limit=int(str(caught.value).split()[2])) == b"x" * 5000
    assert comm.allgather_object(rank) == list(range(size))


def test_limits_and_wrong_arguments_leave_the_ranks_in_step(pool: Callable[..., Ranks]) -> None:
    pool(3).run(_limits)


def _differ(comm: hetcoll.Communicator) -> None:
    with pytest.raises(hetcoll.CollectiveMismatchError, match="allgather_object"):
        comm.allgather_object(1, limit=100 + comm.rank)


def test_ranks_with_other_limits_find_out(launch: Callable[..., Ranks]) -> None:
    launch(2).run(_differ)


def _array_to_object(comm: hetcoll.Communicator) -> None:
    def call() -> None:
        if comm.rank == 0:
            comm.send(np.zeros(256, np.uint8), 1)
            comm.recv(np.zeros(1), 1)
        else:
            comm.recv_object(0)

    with pytest.raises(hetcoll.CollectiveMismatchError):
        call()


def test_an_array_is_not_taken_for_an_object(launch: Callable[..., Ranks]) -> None:
    launch(2).run(_array_to_object)


class Trap:
    """Unpickling it is seen."""

    sprung = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Trap, "sprung", True)


def _forge(comm: hetcoll.Communicator) -> None:
    """Rank 0 does not know the proof; what it sends is never unpickled."""
    if comm.rank == 0:
        objects._proof = lambda *_: b"\0" * 32
        comm.send_object(Trap(), 1)
        with pytest.raises(hetcoll.AbortedError, match="does not prove the job's secret"):
            comm.recv(np.zeros(1), 1)
        return
    assert pickle.loads(pickle.dumps(Trap())) is None
    assert Trap.sprung
    Trap.sprung = False
    with pytest.raises(hetcoll.AuthenticationError, match="in the name of rank 0 that does not prove the job's secret"):
        comm.recv_object(0)
    assert not Trap.sprung
    assert isinstance(comm.error, hetcoll.AbortedError)


def test_what_does_not_prove_the_secret_is_not_unpickled(launch: Callable[..., Ranks]) -> None:
    launch(2).run(_forge)


def _longest_of_this_one(core: Any, label: str, nbytes: int, limit: int, timeout: float | None) -> None:
    objects._longest_of_root(core, label, core.rank, nbytes, limit, timeout)


def _lie(comm: hetcoll.Communicator, call: str, nbytes: int) -> None:
    """Rank 0 says that it moves so many bytes."""
    if comm.rank == 0:
        label, rest = f"{call}({'root=0, ' * (call != 'allgather_object')}limit={objects.LIMIT})", (objects.LIMIT, None)
        tell: Any = objects._lengths if call == "allgather_object" else _longest_of_this_one
        with pytest.raises(hetcoll.HetcollError):
            tell(comm._core, label, nbytes, *rest)
        return
    # The second where rank 0, which finds it too, was first.
    heard = (hetcoll.AuthenticationError, hetcoll.AbortedError)
    with pytest.raises(heard, match="in the name of rank 0 that does not prove the job's secret"):
        getattr(comm, call)(1)


@pytest.mark.parametrize("call", ["allgather_object", "broadcast_object"])
@pytest.mark.parametrize("nbytes", [8, 1 << 50])
def test_lengths_that_no_object_has_end_the_communicator(launch: Callable[..., Ranks], call: str, nbytes: int) -> None:
    launch(2).run(_lie, call, nbytes)


def _enter(job: Job) -> None:
    from hetcoll.config.env import configuration

    job.comm = comm = hetcoll.Communicator.enter(job.unique_id, job.rank, job.size, configuration(), 30.0)
    match job.rank, configuration():
        case _, config if config.objects:
            assert comm.allgather_object(job.rank) == [0, 1]
        case _, config if config.objects is False:
            with pytest.raises(hetcoll.ArgumentError, match="objects are refused, since HETCOLL_OBJECTS says so"):
                comm.allgather_object(1)
        case _, config if config.secret:
            assert comm.allgather_object(job.rank) == [0, 1]
        case _:
            wanted = "objects are refused, since this job has no secret .* HETCOLL_SECRET .*or HETCOLL_OBJECTS=1"
            with pytest.raises(hetcoll.ArgumentError, match=wanted):
                comm.allgather_object(1)
    comm.barrier()


@pytest.mark.parametrize("env", [{}, {"HETCOLL_OBJECTS": "1"}, {"HETCOLL_OBJECTS": "0", "HETCOLL_SECRET": "s"}])
def test_jobs_without_a_secret_refuse_objects(launch: Callable[..., Ranks], env: dict[str, str]) -> None:
    """As `hetcoll.init` enters them: who gives a unique id by hand has given a secret."""
    launch(2, join=False, **env).run(_enter)
