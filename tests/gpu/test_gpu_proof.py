"""Ways between ranks are tried with bytes before they are used: what fails is found, given up, and told."""

from __future__ import annotations

import itertools
import re
import threading
import unittest.mock
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_kinds import Own, start
from ranks import Outcome
from thorough import parametrize

import hetcoll
from hetcoll.errors import CommunicationError, InitError
from hetcoll.gpu import path_probe, planner
from hetcoll.gpu.path_probe import pairs_to_try, pattern, try_all, turns, without, wrong
from hetcoll.gpu.planner import MOST_INSIDE
from hetcoll.gpu.proxy import Proxies
from hetcoll.gpu.slots import Edge, SlotSegment
from hetcoll.plan.rails import Nic
from hetcoll.plan.topology import RankInfo, Topology

# The protocol, without any GPU.


class Ranks:
    """Threads that meet, and ways between them that carry bytes, or do not."""

    def __init__(self, size: int, broken: dict[tuple[int, int], str]) -> None:
        self._broken, self._size = broken, size
        self._barrier = threading.Barrier(self._size)
        self._blobs: list[bytes] = [b""] * self._size
        self._busy: set[int] = set()
        self.tried: list[tuple[int, int, int]] = []
        self.meetings = 0

    def meet(self, rank: int, blob: bytes) -> Sequence[bytes]:
        self.meetings += 1
        self._blobs[rank] = blob
        self._barrier.wait(20)
        found = list(self._blobs)
        self._barrier.wait(20)
        return found

    def exchange(self, rank: int, peer: int, nbytes: int) -> str:
        assert rank not in self._busy
        self.tried.append((rank, peer, nbytes))
        came = pattern(peer, nbytes)
        how = self._broken.get((peer, rank), "")
        if how == "never":
            return "nothing came"
        if how and nbytes > 1000:
            came[1000:] = np.roll(came[1000:], 1)
        return wrong(lambda at, n: came[at : at + n], peer, nbytes)

    def try_all(self, pairs: set[tuple[int, int]]) -> list[dict[tuple[int, int], str]]:
        found: list[Any] = [None] * self._size

        def run(rank: int) -> None:
            found[rank] = try_all(
                pairs,
                rank,
                (257, 5000),
                lambda peer, nbytes, _: self.exchange(rank, peer, nbytes),
                lambda _, blob: self.meet(rank, blob),
            )

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found


def all_pairs(size: int) -> set[tuple[int, int]]:
    return {(a, b) for a in range(size) for b in range(a + 1, size)}


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_every_pair_is_tried_both_ways(size: int) -> None:
    ranks = Ranks(size, {})
    assert ranks.try_all(all_pairs(size)) == [{}] * size
    wanted = [(a, b, n) for a in range(size) for b in range(size) if a != b for n in (257, 5000)]
    assert sorted(ranks.tried) == wanted


def test_which_pairs_are_tried() -> None:
    def pairs(sizes: Sequence[int], cpus: Sequence[int] = ()) -> set[tuple[int, int]]:
        hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
        topology = Topology(tuple(RankInfo(rank, str(host)) for rank, host in enumerate(hosts)))
        return pairs_to_try(topology, [rank not in cpus for rank in range(len(hosts))])

    assert pairs((2, 3)) == {(0, 1), (2, 3), (2, 4), (3, 4)}
    assert pairs((2, 2), cpus=(1,)) == {(0, 1), (2, 3)}
    assert pairs((2, 2), cpus=(2, 3)) == {(0, 1)}
    many = pairs((8,) * 128)
    assert len(many) == 128 * 28
    assert len(turns(many)) == 7, "as many as one host has"


def test_no_more_meetings_than_pairs_need() -> None:
    """Pairs that meet at once share a round; all others are left out."""
    ranks = Ranks(6, {})
    assert ranks.try_all({(0, 1), (2, 3), (1, 4)}) == [{}] * 6
    assert sorted(ranks.tried) == sorted((a, b, n) for a, b in ((0, 1), (1, 0), (2, 3), (3, 2), (1, 4), (4, 1))
                                         for n in (257, 5000))  # fmt: skip
    assert ranks.meetings == 2 * 2 * 6


def test_all_ranks_hear_of_what_failed() -> None:
    """A way that fails in one direction, with large messages only; and one that carries nothing."""
    ranks = Ranks(4, {(2, 0): "shifts", (1, 2): "never", (1, 3): "never", (3, 1): "never"})
    first, *others = ranks.try_all(all_pairs(4))
    assert others == [first] * 3
    assert set(first) == {(0, 2), (1, 2), (1, 3)}
    assert first[1, 3] == "rank 1: nothing came; rank 3: nothing came"
    assert first[1, 2] == "rank 2: nothing came"
    assert first[0, 2].startswith("rank 0: ")
    assert "of 5000 bytes came wrong, the first at 1000" in first[0, 2]
    assert (2, 1, 5000) not in ranks.tried, "what failed is not tried again"


def test_the_way_is_a_function_of_facts_and_of_what_was_excluded() -> None:
    topology = Topology(tuple(RankInfo(r, "h") for r in range(3)))
    left = without(topology, [(0, 2)])
    assert [left.way(a, b) for a, b in ((0, 1), (2, 0), (1, 2))] == ["mapped", "staged-tcp", "mapped"]
    assert left.why(2, 0) == "staged: mapped did not work"
    assert left.far(0, 2)
    assert without(left, [(0, 2)]).ways(0, 2) == ()


def test_ways_between_hosts_are_given_up_one_by_one() -> None:
    nic = Nic("rxe0:1", "RoCE", "10.77.0.1", "10.77.0.0/24")
    infos = (RankInfo(r, "ab"[r], vendor="cuda", device=str(r), nics=(nic,), wish="cuda") for r in range(2))
    topology = Topology(tuple(infos))
    seen = []
    while ways := topology.ways(0, 1):
        seen.append((ways[0], topology.why(0, 1)))
        topology = without(topology, [(0, 1)])
    assert [way for way, _ in seen] == ["direct", "staged-rdma", "staged-tcp"]
    assert seen[1][1] == "staged: direct did not work"
    assert seen[2][1] == "staged: direct and staged-rdma did not work"


# On fakes.


def break_slots(rank: int, how: str) -> None:
    """From now on what this rank has mapped for its way from and to rank 0 is not what it should be."""
    if how == "nothing":
        return
    edge = SlotSegment.edge

    def broken(self: SlotSegment, src: int, dst: int, channel: int, **how_made: Any) -> Edge:
        found = edge(self, src, dst, channel, **how_made)
        if (how == "bytes" and (src, dst) == (0, rank)) or (how == "sent" and (src, dst) == (rank, 0)):
            return replace(found, slots=found.slots + 64)
        if how == "signal" and (src, dst) == (rank, 0):
            return replace(found, ready=found.ready + 8)  # in the same line, where nobody looks
        return found

    SlotSegment.edge = broken  # type: ignore[method-assign]


def reduce_and_explain(comm: hetcoll.Communicator, hows: tuple[str, ...]) -> tuple[str, ...]:
    path_probe.SECONDS = 5.0
    break_slots(comm.rank, hows[comm.rank])
    for count in (5, 70_001, 3_000_003):
        own = Own(comm, np.full(count, comm.rank + 1, np.float32))
        comm.allreduce(own.array).wait(60)
        assert (own.get() == sum(range(1, comm.size + 1))).all()
    return comm.explain("allreduce", 20).paths


@pytest.mark.fakes
@parametrize(
    ("how", "why"),
    [
        ("bytes", "bytes came wrong, the first at 0"),
        ("sent", "bytes came wrong, the first at 0"),
        ("signal", "rank 0: nothing came from rank 1 in 5 s"),
    ],
    first=1,
)
@parametrize(("kinds", "algo"), [("naa", "auto"), ("nn", "direct"), ("na", "auto"), ("aa", "direct")], first=2)
def test_a_way_that_fails_is_given_up(kinds: str, algo: str, how: str, why: str) -> None:
    """Through the host's memory, and through that of GPUs of one island."""
    with start(kinds, HETCOLL_ALGO=algo) as ranks:
        found = ranks.run(reduce_and_explain, ("nothing", how, "nothing")[: len(kinds)], timeout=120)
    for rank, peer in ((0, 1), (1, 0)):
        path = next(path for path in found[rank] if f"to that of rank {peer} " in path)
        assert re.search(r"through pinned slots and \d+ sockets \(staged: mapped did not work", path)
        assert why in path
    if kinds == "naa":
        assert any("(mapped: one host)" in path for path in found[0])


@pytest.mark.fakes
@parametrize(
    ("kinds", "how"),
    [
        ("nc", "bytes"),
        ("ca", "signal"),
        ("ncn", "sent"),
        ("nc", "sent"),
        ("nc", "signal"),
        ("ca", "bytes"),
        ("ca", "sent"),
    ],
    first=2,
)
def test_a_way_between_a_gpu_and_a_cpu_that_fails_is_given_up(kinds: str, how: str) -> None:
    """Whichever of the two finds out. Others keep theirs."""
    why = "nothing came from rank" if how == "signal" else "bytes came wrong, the first at 0"
    with start(kinds) as ranks:
        found = ranks.run(reduce_and_explain, ("nothing", how, "nothing")[: len(kinds)], timeout=120)
    for rank, peer in ((0, 1), (1, 0)):
        if kinds[rank] == "c":
            path = next(path for path in found[rank] if f"to the GPU of rank {peer} " in path)
            assert "through 1 socket (staged: mapped did not work" in path
        else:
            path = next(path for path in found[rank] if f"to rank {peer}, a CPU" in path)
            assert "through pinned slots and 1 socket (staged: mapped did not work" in path
        assert why in path
        assert path.endswith(", tried with bytes")
    if kinds == "ncn":
        assert any("(mapped: one host)" in path for path in found[1])


def outcomes_of(kinds: str, hows: tuple[str, ...], **settings: Any) -> list[Outcome]:
    ranks = start(kinds, **settings)
    try:
        return ranks.outcomes(reduce_and_explain, hows, timeout=120)
    finally:
        ranks.kill_all()


@pytest.mark.fakes
@parametrize("how", ["bytes", "signal"], first=1)
@parametrize("kinds", ["na", "nc", "cn"], first=1)
def test_the_way_that_was_asked_for_and_fails_is_an_error_on_all_ranks(kinds: str, how: str) -> None:
    for outcome in outcomes_of(kinds, ("nothing", how), HETCOLL_CROSS="mapped"):
        assert isinstance(outcome.error, InitError), outcome.trace
        assert "ranks 0 and 1 do not reach each other through memory that both have mapped" in str(outcome.error)
        assert "HETCOLL_CROSS=mapped leaves no other way" in str(outcome.error)


def break_everything(comm: hetcoll.Communicator) -> tuple[str, ...]:
    """Slots that both have mapped, and then pinned ones."""
    if comm.rank == 1:
        true = path_probe.pattern
        path_probe.pattern = lambda rank, nbytes: true(rank + 7, nbytes)  # what it sends is not what is waited for
    return reduce_and_explain(comm, ("nothing", "nothing"))


@pytest.mark.fakes
@parametrize("kinds", ["na", "nc", "ca"], first=1)
def test_two_ways_that_fail_are_an_error_on_all_ranks(kinds: str) -> None:
    ranks = start(kinds)
    try:
        outcomes = ranks.outcomes(break_everything, timeout=120)
    finally:
        ranks.kill_all()
    for outcome in outcomes:
        assert isinstance(outcome.error, InitError), outcome.trace
        assert "ranks 0 and 1 do not reach each other through pinned slots and sockets" in str(outcome.error)
        assert "came wrong" in str(outcome.error)


# Inside an island messages are the library's, which connects two ranks when both call it.


def exchange(comm: hetcoll.Communicator) -> dict[int, bool]:
    """Whether messages to each other rank, and from it, have moved words of slots."""
    size, rank, found = comm.size, comm.rank, dict[int, bool]()
    comm.allreduce(Own(comm, np.ones(4, np.float32)).array).wait(60)
    edges = comm._gpus.executor._edges  # type: ignore[union-attr]
    for count in (6, 70_002, 3_000_003):
        own, got = Own(comm, np.arange(count, dtype=np.float32) + rank), Own(comm, np.zeros(count, np.float32))
        for pair in itertools.combinations(range(size), 2):
            comm.barrier()  # nobody else's messages move meanwhile
            if rank in pair:
                peer, before = sum(pair) - rank, edges.progress()
                comm.sendrecv(own.array, peer, got.array, peer).wait(60)
                found[peer] = edges.progress() != before
                assert (got.get() == np.arange(count) + peer).all()
        comm.barrier()
        each = count // size
        want = [np.arange(rank * each, (rank + 1) * each) + peer for peer in range(size)]
        counts: dict[str, Any]
        for counts in ({}, {"sendcounts": [each] * size, "recvcounts": [each] * size}):
            sent, came = Own(comm, own.get()[: size * each]), Own(comm, np.zeros(size * each, np.float32))
            comm.alltoall(sent.array, came.array, **counts).wait(60)
            assert (came.get() == np.concatenate(want)).all()
        comm.alltoall(sent.array, sent.array).wait(60)
        assert (sent.get() == np.concatenate(want)).all()
    return found


@pytest.mark.fakes
@parametrize(
    ("islands", "through_slots"),
    [
        ("0,1,2", [{1: False, 2: False}, {0: False, 2: False}, {0: False, 1: False}]),
        ("0|1,2", [{1: True, 2: True}, {0: True, 2: False}, {0: True, 1: False}]),
    ],
    first=1,
)
def test_messages_inside_an_island_are_the_librarys(islands: str, through_slots: list[dict[int, bool]]) -> None:
    with start("nnn", HETCOLL_ISLANDS=islands) as ranks:
        assert ranks.run(exchange, timeout=120) == through_slots


def send_first(comm: hetcoll.Communicator, by_kernel: int) -> float:
    """Both send before they receive: a small message needs no receive to have been called."""
    own, got = Own(comm, np.full(4, comm.rank, np.float32)), Own(comm, np.zeros(4, np.float32))
    with unittest.mock.patch.object(planner, "MOST_INSIDE", by_kernel):
        comm.send(own.array, 1 - comm.rank)
        comm.recv(got.array, 1 - comm.rank).wait(30)
    return float(got.get()[0])


@pytest.mark.fakes
@pytest.mark.parametrize("by_kernel", [MOST_INSIDE, 0], ids=["kernel", "library"])
def test_two_ranks_of_an_island_that_send_first(by_kernel: int) -> None:
    with start("nn") as ranks:
        assert ranks.run(send_first, by_kernel, timeout=60) == [1, 0]


def send_to_nobody(comm: hetcoll.Communicator) -> None:
    one = Own(comm, np.ones(MOST_INSIDE, np.float32))
    comm.allreduce(one.array).wait(30)
    if comm.rank == 0:
        comm.send(one.array, 1)  # held up by the library


@pytest.mark.fakes
def test_a_message_that_nobody_takes_ends_in_time() -> None:
    with start("nn", HETCOLL_TIMEOUT="3") as ranks:
        outcome = ranks.outcomes(send_to_nobody, timeout=60)[0]
    assert "have not moved for" in str(outcome.error)
    assert "its first message waits for a call of rank 1" in str(outcome.error)


# Between hosts, which fakes have sockets for alone: tests/verbs/suite_gpus.py has the other ways.


class Shifted:
    """A device queue whose edges have slots and words so many bytes beside where they are."""

    def __init__(self, queue: Any, slots: int, words: int) -> None:
        self._queue, self._slots, self._words = queue, slots, words

    def add_edge(self, slots: int, ready: int, credit: int, count: int, proxy: Any) -> int:
        return int(self._queue.add_edge(slots + self._slots, ready + self._words, credit, count, proxy))


def break_proxy(how: str) -> None:
    """From now on what this rank's GPU has for other hosts lies beside where it should, or nobody is told of it."""
    edge, by = Proxies.edge, (64, 0) if how == "bytes" else (0, 8)

    def wrong(self: Proxies, queue: Any, out: bool, peer: int, channel: int) -> int:
        return edge(self, Shifted(queue, *by) if out else queue, out, peer, channel)  # type: ignore[arg-type]

    Proxies.edge = wrong  # type: ignore[method-assign]


def reduce_between_hosts(comm: hetcoll.Communicator, broken: int, how: str) -> tuple[str, ...]:
    path_probe.SECONDS = 5.0
    if comm.rank == broken:
        break_proxy(how)
    own = Own(comm, np.full(70_001, comm.rank + 1, np.float32))
    comm.allreduce(own.array).wait(60)
    assert (own.get() == sum(range(1, comm.size + 1))).all()
    return comm.explain("allreduce", 20).paths


@pytest.mark.fakes
@parametrize(("how", "why"), [("bytes", "came wrong"), ("signal", "nothing came from rank 2 in 5 s")], first=1)
@parametrize("kinds", ["nan", "ncn"], first=1)
def test_the_last_way_between_hosts_that_fails_is_an_error_on_all_ranks(kinds: str, how: str, why: str) -> None:
    ranks = start(kinds, HETCOLL_HOST_ID=("a", "a", "b"))
    try:
        outcomes = ranks.outcomes(reduce_between_hosts, 2, how, timeout=120)
    finally:
        ranks.kill_all()
    for outcome in outcomes:
        assert isinstance(outcome.error, CommunicationError), outcome.trace
        assert "and 2 do not reach each other through pinned slots and sockets" in str(outcome.error)
        assert why in str(outcome.error)


@pytest.mark.fakes
@parametrize("kinds", ["nan", "ncn"], first=1)
def test_ways_between_hosts_that_work_are_used(kinds: str) -> None:
    with start(kinds, HETCOLL_HOST_ID=("a", "a", "b")) as ranks:
        found = ranks.run(reduce_between_hosts, -1, "", timeout=120)
    assert any(re.search(r"to that of rank 2 .*through pinned slots and \d+ sockets", path) for path in found[0])


def reduce_patiently(comm: hetcoll.Communicator) -> None:
    path_probe.SECONDS = 60.0
    comm.allreduce(Own(comm, np.ones(70_001, np.float32)).array).wait(60)


# The second pattern is four slots and eight bytes, of which four are lacking: all that comes has come by then.
_ALL_BUT_FOUR = (32 + 257) + 4 * (32 + (2 << 20)) + 32 + 4


@pytest.mark.fakes
@pytest.mark.parametrize("fault", [f"truncate={_ALL_BUT_FOUR}", "corrupt_every=20000"])
@parametrize("hosts", ["aa", "ab"], first=1)
@pytest.mark.parametrize("kinds", ["na", "nc"])
def test_a_link_that_ends_while_it_is_tried(kinds: str, hosts: str, fault: str) -> None:
    """Rank 0 leaves it. Rank 1 has nothing to receive, and cannot send: the link has ended, or is not made again."""
    ranks = start(
        kinds,
        HETCOLL_FAULT=f"{fault},rank=1",
        HETCOLL_HOST_ID=tuple(hosts),
        HETCOLL_TRANSPORT="tcp",
        HETCOLL_SOCKET_STRIPES="1",
        HETCOLL_INTEGRITY="off" if fault.startswith("truncate") else "all",
    )
    try:
        outcomes = ranks.outcomes(reduce_patiently, timeout=120)
    finally:
        ranks.kill_all()
    for outcome in outcomes:
        assert isinstance(outcome.error, (CommunicationError, InitError)), outcome.trace
        assert outcome.seconds < 30
