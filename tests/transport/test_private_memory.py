"""Large messages of ordinary memory, which receivers read where they lie in the sender's process (HETCOLL_SHM_READ)."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from ranks import Ranks, wait_until
from thorough import parametrize

import hetcoll
from hetcoll import AbortedError, PeerLostError

Launch = Callable[..., Ranks]
COUNTS = (4096, 20_001, 300_001)  # int64, below and above 128 KiB and 2 MiB, of one fragment and of several
FEW = COUNTS[:2]
READS = pytest.mark.parametrize("read", ["always", "never", "auto"])


def _collectives(comm: hetcoll.Communicator, rounds: int, counts: Sequence[int] = COUNTS) -> None:
    """Everything that only copies; what was sent in one round is written in the next."""
    n, me = comm.size, comm.rank
    after, before = (me + 1) % n, (me - 1) % n
    for count in counts:
        base = np.arange(count)
        a, b = np.empty(count, "int64"), np.empty(count, "int64")
        wide, wide2 = np.empty(count * n, "int64"), np.empty(count * n, "int64")
        for i in range(rounds):
            a[:] = base + me * i
            comm.allgather(a, wide)
            assert np.array_equal(wide.reshape(n, count), base + np.arange(n)[:, None] * i)
            comm.alltoall(wide, wide2)
            assert np.array_equal(wide2.reshape(n, count), np.broadcast_to(base + me * i, (n, count)))
            wide2.reshape(n, count)[:] += np.arange(n)[:, None]
            comm.alltoall(wide2, wide2)  # in place
            assert np.array_equal(wide2.reshape(n, count), base + np.arange(n)[:, None] * i + me)
            comm.sendrecv(a, after, b, before)
            assert np.array_equal(b, base + before * i)
            with comm.group():
                for peer, into in ((after, b), (before, wide2[:count])):
                    comm.send(a, peer)
                    comm.recv(into, peer)
            assert np.array_equal(b, base + after * i)
            assert np.array_equal(wide2[:count], base + before * i)
            comm.broadcast(a, root=i % n)
            assert np.array_equal(a, base + i % n * i)
            comm.scatter(wide if me == 0 else None, b)
            assert np.array_equal(b, base + me * i)
            b += 1
            comm.gather(b, wide2 if me == 0 else None)
            if me == 0:
                assert np.array_equal(wide2.reshape(n, count), base + np.arange(n)[:, None] * i + 1)
            comm.allreduce(b)
            assert np.array_equal(b, n * (base + 1) + n * (n - 1) // 2 * i)


@READS
@parametrize("size", [4, 2], first=1)
def test_every_way_gives_the_same_results(pool: Launch, size: int, read: str) -> None:
    pool(size, HETCOLL_SHM_READ=read).run(_collectives, 2)


@READS
def test_small_rings(pool: Launch, read: str) -> None:
    pool(3, HETCOLL_SHM_READ=read, HETCOLL_SHM_BYTES="16K").run(_collectives, 2, FEW)


def _trials(comm: hetcoll.Communicator) -> None:
    """Both ways of each band of messages (native/transport/shm/protocol_choice.h), and from one to the other."""
    other = 1 - comm.rank
    for nbytes in (16 << 10, 40_000, 100_000, 200_000, 300_000, 700_000, 32 << 20):
        a, b = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        for i in range(150 if nbytes < 32 << 20 else 10):
            a[:] = i + comm.rank
            comm.sendrecv(a, other, b, other)
            assert (b == (i + other) % 256).all()
            comm.broadcast(a, root=1)
            assert (a == (i + 1) % 256).all()


@parametrize("fault", ["short=0.3,delay=0.02", ""], first=1)
def test_trials_of_both_ways(pool: Launch, fault: str) -> None:
    pool(2, HETCOLL_FAULT=fault).run(_trials)


def test_links_that_misbehave(pool: Launch) -> None:
    pool(3, HETCOLL_SHM_READ="always", HETCOLL_FAULT="short=0.3,delay=0.05").run(_collectives, 2, FEW)


def _forking(comm: hetcoll.Communicator) -> None:
    """The pages of a process that forks are shared with its child until one of them writes."""
    for _ in range(3):
        child = os.fork()
        if child == 0:
            time.sleep(0.3)
            os._exit(0)
        _collectives(comm, 2)
        assert os.waitpid(child, 0) == (child, 0)


def test_a_sender_that_forks(pool: Launch) -> None:
    pool(2, HETCOLL_SHM_READ="always").run(_forking)


def _exchange(comm: hetcoll.Communicator) -> None:
    a, b = np.ones(1 << 20), np.empty(1 << 20)
    for _ in range(1_000_000):
        comm.sendrecv(a, (comm.rank + 1) % comm.size, b, (comm.rank - 1) % comm.size)


@pytest.mark.calm
def test_a_sender_that_is_killed_while_it_is_read(launch: Launch) -> None:
    ranks = launch(3, HETCOLL_SHM_READ="always")
    ranks.start(_exchange)
    time.sleep(1.0)
    killed = time.monotonic()
    ranks.kill(1)
    for outcome in ranks.finish(15):
        if outcome.rank != 1:
            assert isinstance(outcome.error, PeerLostError), f"{outcome.value!r} {outcome.trace}"
            assert outcome.error.rank == 1
            assert outcome.ended - killed < 1.0


def _broadcast(comm: hetcoll.Communicator, buffer: npt.NDArray[np.float64]) -> None:
    for _ in range(1_000_000):
        comm.broadcast(buffer)


@pytest.mark.calm
@pytest.mark.parametrize("dies", [0, 1])
def test_ranks_that_are_killed_while_both_ends_copy(launch: Launch, dies: int) -> None:
    ranks = launch(2, HETCOLL_SHM_READ="always")
    ranks.start(_broadcast, np.ones(1 << 20))
    time.sleep(1.0)
    killed = time.monotonic()
    ranks.kill(dies)
    outcome = ranks.finish(15)[1 - dies]
    assert isinstance(outcome.error, PeerLostError), f"{outcome.value!r} {outcome.trace}"
    assert outcome.error.rank == dies
    assert outcome.ended - killed < 1.0


def _abort_while_written_to(comm: hetcoll.Communicator) -> int:
    """Rank 1 gives up while rank 0 may be writing into its memory, which is rank 1's alone once it was told so."""
    wrong = 0
    for turn in range(40):
        part = comm.split(0)
        assert part is not None
        buffer = np.zeros(1 << 20)
        for _ in range(3):
            part.broadcast(buffer)
        comm.barrier()  # rank 0 is done with these as well
        give_up = threading.Timer(1e-3 + 37e-6 * turn, part.abort, ("enough",)) if comm.rank == 1 else None
        if give_up is not None:
            give_up.start()
        with pytest.raises(AbortedError):
            _broadcast(part, buffer)
        buffer[:] = -1
        comm.barrier()
        wrong += int((buffer != -1).sum())
        if give_up is not None:
            give_up.join()
        part.close()
    return wrong


def test_who_gives_up_is_not_written_to_any_more(launch: Launch) -> None:
    assert launch(2, HETCOLL_SHM_READ="always").run(_abort_while_written_to, timeout=60) == [0, 0]


def _secret(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that no other process can read or write, as that of devices."""
    fd = ctypes.CDLL(None, use_errno=True).syscall(447, 0)  # memfd_secret(2)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "memfd_secret")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    os.close(fd)
    return np.frombuffer(memory, np.uint8)


def _out_of_reach(comm: hetcoll.Communicator, where: int) -> str:
    n = 1 << 20
    try:
        x, y = (_secret(n) if comm.rank == where else np.zeros(n, np.uint8) for _ in range(2))
    except OSError as error:
        comm.abort(str(error))
        return str(error)
    for turn in range(20):
        x[:] = turn if comm.rank == 0 else 0
        comm.broadcast(x)
        assert (x == turn).all()
        x[:] = comm.rank + turn
        comm.sendrecv(x, 1 - comm.rank, y, 1 - comm.rank)
        assert (y == 1 - comm.rank + turn).all()
        comm.allreduce(x, y)
        assert (y == 2 * turn + 1).all()
        comm.allreduce(x)
        assert (x == 2 * turn + 1).all()
    return ""


@pytest.mark.parametrize("where", [0, 1])
def test_memory_out_of_reach(launch: Launch, where: int) -> None:
    ranks = launch(2, HETCOLL_SHM_READ="always")
    ranks.start(_out_of_reach, where)
    outcomes = ranks.finish(30)
    if reason := outcomes[where].value:
        pytest.skip(f"no memory that others cannot reach: {reason}")
    assert [outcome.value for outcome in outcomes] == ["", ""], [outcome.problem() for outcome in outcomes]


def _abort_what_is_lent(comm: hetcoll.Communicator) -> bool:
    """Rank 0 lends a message and takes it back; rank 1 comes late and must not take what is there then."""
    count, good = 1 << 20, np.arange(1 << 20)
    out, got = good.copy(), np.empty(count, "int64")
    for _ in range(3):  # by now rank 1 has found out that it can read
        comm.sendrecv(out, 1 - comm.rank, got, 1 - comm.rank)
    comm.barrier()
    if comm.rank == 0:
        sent = comm.send(out, 1, async_op=True)
        time.sleep(0.3)
        assert not sent.done  # it is lent: a message of 8 MiB fits no ring
        comm.abort("enough")
        out[:] = -1
        comm.barrier()
    time.sleep(0.6)
    comm.recv(got, 0)
    return bool((got == good).all())


def test_a_sender_that_aborts_while_it_lends(launch: Launch) -> None:
    ranks = launch(2, HETCOLL_SHM_READ="always")
    ranks.start(_abort_what_is_lent)
    for outcome in ranks.finish(15):
        assert isinstance(outcome.error, AbortedError), f"{outcome.value!r} {outcome.trace}"


def _wait_for_the_dead(comm: hetcoll.Communicator) -> None:
    comm.barrier()
    if comm.rank == 0:
        time.sleep(60)
    wait_until(lambda: comm._engine.failed, 10)
    comm.recv(np.empty(1 << 20), 0)


def test_a_sender_that_dies_before(launch: Launch) -> None:
    ranks = launch(2, HETCOLL_SHM_READ="always")
    ranks.start(_wait_for_the_dead)
    time.sleep(0.5)
    ranks.kill(0)
    error = ranks.finish(15)[1].error
    assert isinstance(error, PeerLostError)
    assert error.rank == 0
