"""In a guest: every collective by every algorithm over RDMA, among 2 to 4 ranks, held to what NumPy gives."""

from __future__ import annotations

import numpy as np
import pytest
from cables import ENDS, Pool, verbs
from random_plans import play_all, scene
from reference import Case
from sweep import KINDS, NAMES, cases_of, check, collectives_of

import hetcoll

# Two ranks, and the least number of more: then an edge has both ends on one device, too. Four: below.
SUPPORTED = [(name, size) for name in NAMES for size in [n for n in (2, 3, 4) if collectives_of(name, n)][:2]]


@pytest.mark.parametrize(("name", "size"), SUPPORTED)
def test_every_algorithm(pool: Pool, name: str, size: int) -> None:
    counts = [size + 1, 4099] if size == 2 else [size + 1]
    cases = [case for kind in collectives_of(name, size) for case in cases_of(kind, size, counts)]
    check(verbs(pool, size), cases, {"algo": name})


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_the_library_chooses(pool: Pool, size: int) -> None:
    cases = [case for kind in KINDS for case in cases_of(kind, size, [0, 20_011])]
    counts = tuple((7919 * (rank + 1)) % 2003 if rank else 0 for rank in range(size))
    cases += [Case("allgatherv", "int16", counts=counts), Case("reduce_scatterv", "float16", op="avg", counts=counts)]
    check(verbs(pool, size), [*cases, Case("alltoallv", "int32", 4001)], {})


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_plans(pool: Pool, size: int) -> None:
    """As over shared memory and TCP: engine/test_random_plans.py."""
    found = [each for seed in range(3) if (each := scene(seed, size)) is not None]
    assert found
    for each in found:
        verbs(pool, size).run(play_all, each, (3, 40_000))


def test_large_messages(pool: Pool) -> None:
    """Many times the rings."""
    count = (5 << 20) // 4
    check(verbs(pool, 2), [Case("allreduce", "float32", count), Case("broadcast", "float32", count, root=1)], {})


def test_asynchronous_calls(pool: Pool) -> None:
    cases = [case for kind in KINDS for case in cases_of(kind, 3, [1009])]
    check(verbs(pool, 3), cases, {}, async_op=True)


def messages(comm: hetcoll.Communicator) -> None:
    """Every rank to every other, of all sizes, sent before they are received."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for count in (0, 1, 5, 1000, 70_000):
        got = {peer: np.zeros(count, np.int32) for peer in others}
        with comm.group():
            for peer in others:
                comm.send(np.full(count, comm.rank, np.int32), peer)
                comm.recv(got[peer], peer)
        for peer in others:
            assert (got[peer] == peer).all()


def early(comm: hetcoll.Communicator) -> None:
    """A message to a rank that makes no call, on an edge that nobody has used."""
    data = np.arange(50_000)
    if comm.rank == 0:
        work = comm.send(data, 1, async_op=True)
        comm.send(data[:1], 2)
        work.wait()
    elif comm.rank == 1:
        got = np.zeros_like(data)
        comm.recv(got, 2)
        comm.recv(got, 0)
        assert (got == data).all()
    else:
        comm.recv(np.zeros(1, data.dtype), 0)
        comm.send(data, 1)


def test_messages(pool: Pool) -> None:
    ranks = verbs(pool, 3)
    ranks.run(messages)
    ranks.run(early)


def used(comm: hetcoll.Communicator) -> tuple[str, tuple[str, ...], dict[str, int]]:
    comm.allreduce(np.ones(300_000))
    told = comm.explain("allreduce", 2_400_000)
    return told.transport, told.paths, comm.counters()


def test_both_cables_carry(pool: Pool) -> None:
    for transport, paths, counters in verbs(pool, 2).run(used):
        assert transport == "verbs"
        assert counters["links_over_tcp"] == counters["lost_rails"] == 0
        for line in paths:
            assert "rxe0 to rxe1" in line or "rxe1 to rxe0" in line
            assert "rxe2 to rxe3" in line or "rxe3 to rxe2" in line
            assert " 0 bytes sent" not in line


def split(comm: hetcoll.Communicator) -> None:
    part = comm.split(comm.rank % 2, key=-comm.rank)
    assert part is not None
    x = np.full(5000, comm.rank, np.int64)
    part.allreduce(x)
    assert (x == sum(rank for rank in range(comm.size) if rank % 2 == comm.rank % 2)).all()
    assert part.size == 1 or part.explain("allreduce", 40_000).transport == "verbs"
    part.close()


def test_communicators_share_devices(pool: Pool) -> None:
    ranks = verbs(pool, 4)
    ranks.run(split)
    ranks.run(split)


def test_shared_memory_and_rdma_in_one_communicator(pool: Pool) -> None:
    """Two hosts with two ranks each, as far as anybody can tell."""
    ends = tuple(ENDS[host] for host in (0, 0, 1, 1))
    ranks = pool(4, HETCOLL_HOST_ID=tuple("aabb"), HETCOLL_IB_HCA=ends)
    check(ranks, [case for kind in KINDS for case in cases_of(kind, 4, [5003])], {})
    found = ranks.run(transport_to_all)
    assert found == ["shm+verbs"] * 4


def transport_to_all(comm: hetcoll.Communicator) -> str:
    return comm.explain("alltoall", 8).transport


def test_a_rank_without_a_device_is_reached_over_tcp(pool: Pool) -> None:
    ranks = pool(3, HETCOLL_HOST_ID=tuple("abc"), HETCOLL_IB_HCA=("=rxe0", "=rxe1", "=none"))
    check(ranks, [case for kind in KINDS for case in cases_of(kind, 3, [5003])], {})
    assert ranks.run(transport_to_all) == ["tcp+verbs", "tcp+verbs", "tcp"]
    (line,) = [line for line in ranks.run(paths)[0] if line.startswith("rank 2: ")]
    assert "tcp, since there is no RDMA: rank 2: no port of an RDMA device can be used: rxe0:1: HETCOLL_IB_HCA" in line


def paths(comm: hetcoll.Communicator) -> tuple[str, ...]:
    return comm.explain("alltoall", 8).paths
