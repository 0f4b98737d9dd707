"""In a guest: memory that is registered, used where it lies, and given back."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cables import kernel_objects, verbs
from ranks import Job, Ranks, Resources, wait_until

import hetcoll
from hetcoll.vendors.devices.base import DmaBuf

Launch = Callable[..., Ranks]
COUNT = 100_000


def moved(comm: hetcoll.Communicator, x: Any) -> tuple[int, int]:
    """Bytes that a checked all-reduce sends from where they lie, and through slots."""
    before = comm.counters()
    x[:] = comm.rank + 1
    comm.allreduce(x)
    assert (x == comm.size * (comm.size + 1) / 2).all()
    after = comm.counters()
    return tuple(after[name] - before[name] for name in ("zero_copy_bytes", "staged_bytes"))  # type: ignore[return-value]


def where_it_lies(comm: hetcoll.Communicator) -> None:
    plain = np.empty(COUNT, np.float32)
    lent, copied = moved(comm, plain)
    assert lent == 0
    assert copied >= plain.nbytes // 2
    with comm.register(plain):
        lent, copied = moved(comm, plain)
    assert lent >= plain.nbytes // 2
    assert copied == 0
    lent, copied = moved(comm, plain)  # not any more
    assert lent == 0
    for own in (comm.empty(COUNT), comm.empty(2 * COUNT)[COUNT // 2 : -COUNT // 2]):
        lent, copied = moved(comm, own)
        assert lent >= own.nbytes // 2
        assert copied == 0


def test_registered_memory_is_not_copied(launch: Launch) -> None:
    verbs(launch, 2).run(where_it_lies)


def churn(comm: hetcoll.Communicator, rounds: int) -> dict[str, int]:
    """Arrays and registrations that come and go between calls: overlapping, nested, of all sizes."""
    block = np.empty(4 * COUNT, np.float32)
    for i in range(rounds):
        size = 5000 + (i * 7919) % COUNT
        with comm.register(block[i * 100 : i * 100 + size]), comm.register(block[i * 150 : i * 150 + size]):
            moved(comm, block[i * 100 : i * 100 + size])
        mine = comm.empty(size)
        moved(comm, mine)
        half = mine[: size // 2]
        del mine
        moved(comm, half)
        fresh = np.empty(size, np.float32)  # addresses of freed memory come again, without a registration
        assert moved(comm, fresh)[0] == 0
        del fresh, half
    gc.collect()
    return comm.counters()


def test_churn(launch: Launch) -> None:
    ranks = verbs(launch, 2)
    first = ranks.run(churn, 20, timeout=60)
    before = kernel_objects()
    second = ranks.run(churn, 20, timeout=60)
    assert kernel_objects() == before
    for was, counters in zip(first, second, strict=True):
        # What is left are blocks that wait for the next array, and the second time all of them were there.
        assert counters["memory_intervals"] == was["memory_intervals"]
        assert counters["memory_idle_bytes"] == counters["memory_bytes"]
        assert counters["memory_hits"] - was["memory_hits"] >= 20, (was, counters)
        assert counters["memory_registered"] - counters["memory_unregistered"] == counters["memory_intervals"]


def in_use(comm: hetcoll.Communicator) -> None:
    data = np.arange(4 * COUNT, dtype=np.float64)  # more than the rings hold
    if comm.rank == 0:
        comm.send(np.zeros(1), 1)
        registration = comm.register(data)
        work = comm.send(data, 1, async_op=True)
        wait_until(lambda: comm.counters()["zero_copy_bytes"] > 0)
        with pytest.raises(hetcoll.ArgumentError, match="in use by an operation in flight"):
            registration.close()
        assert registration.nbytes == data.nbytes
        comm.barrier()
        work.wait()
        registration.close()
        assert comm.counters()["memory_intervals"] == 0
    else:
        comm.recv(np.zeros(1), 0)
        comm.barrier()
        got = np.zeros_like(data)
        comm.recv(got, 0)
        assert (got == data).all()


def test_memory_in_use_stays_registered(launch: Launch) -> None:
    verbs(launch, 2).run(in_use)


def read_only(comm: hetcoll.Communicator) -> None:
    data = np.frombuffer(bytes(range(256)) * 1000, np.uint8)
    got = np.zeros_like(data)
    with comm.register(data):
        if comm.rank == 0:
            comm.send(data, 1)
        else:
            comm.recv(got, 0)
            assert (got == data).all()


class Gpu:
    """Stands for a GPU whose driver gives this memory of the host as a dma-buf."""

    name = "a GPU"

    def dmabuf(self, address: int, nbytes: int) -> DmaBuf:
        return DmaBuf(os.memfd_create("dma-buf"), 0, nbytes)


def no_dma_buf(comm: hetcoll.Communicator) -> None:
    """Soft-RoCE takes none, and says so."""
    memory = comm._wiring.memory
    assert memory is not None
    before = Resources.now()
    with pytest.raises(hetcoll.RegistrationError, match=r"rxe\d: registering 4096 bytes: .*not supported"):
        memory.lease(7 << 40, 4096, None, Gpu())  # type: ignore[arg-type]
    assert Resources.now().left_over(before) == ""


def test_memory_that_is_not_like_other_memory(launch: Launch) -> None:
    ranks = verbs(launch, 2)
    ranks.run(read_only)
    ranks.run(no_dma_buf)


def _obey_memlock() -> None:
    """Give up CAP_IPC_LOCK, by capset(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << 14)
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def poor(job: Job, limit: int) -> tuple[str, dict[str, int]]:
    """A rank that may lock no more than `limit` bytes, root or not."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    _obey_memlock()
    comm = job.join()
    x = np.empty(COUNT, np.float32)
    moved(comm, x)
    with pytest.raises(hetcoll.RegistrationError, match=r"registering \d+ bytes: .*Cannot allocate memory.*ulimit -l"):
        comm.register(np.zeros(8 << 20, np.uint8))
    big = comm.empty(8 << 20, "uint8")  # ordinary memory
    big[:] = 1
    comm.broadcast(big)
    told = str(comm.explain("allreduce", x.nbytes)), comm.counters()
    comm.close()
    return told


def test_rings_fit_and_nothing_else(launch: Launch) -> None:
    ranks = verbs(launch, 2, join=False)
    for text, counters in ranks.run(poor, 6 << 20):
        assert counters["links_over_tcp"] == 0, text
        assert counters["memory_refused"] == 1


def test_not_even_rings_fit(launch: Launch) -> None:
    ranks = verbs(launch, 2, join=False)
    for text, counters in ranks.run(poor, 64 << 10):
        assert counters["links_over_tcp"] > 0
        assert "memlock" in text or "locked" in text, text


def forked(comm: hetcoll.Communicator) -> None:
    """A child must not undo what the parent registered, whichever way it ends."""
    data = np.ones(COUNT, np.float32)
    with comm.register(data) as registration:
        moved(comm, data)
        child = os.fork()
        if child == 0:
            registration.close()
            comm.close()
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for _ in range(3):
            lent, copied = moved(comm, data)
            assert (lent > 0, copied) == (True, 0)


def test_fork(launch: Launch) -> None:
    verbs(launch, 2).run(forked)
