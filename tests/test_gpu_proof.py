"""Ways between ranks are tried with bytes before they are used: what fails is found, given up, and told."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ranks import Outcome
from test_gpu_and_cpu import Own, start

import hetcoll
from hetcoll import gpu_proof
from hetcoll.errors import InitError
from hetcoll.gpu_proof import Bytes, pairs_of_hosts, pattern, prove
from hetcoll.slots import Edge, SlotSegment
from hetcoll.topology import RankInfo, Topology

# The protocol, without any GPU.


class Ranks:
    """Threads that meet, and ways between them that carry bytes, or do not."""

    def __init__(self, hosts: str, broken: dict[tuple[int, int], str]) -> None:
        self.topology = Topology(tuple(RankInfo(r, host) for r, host in enumerate(hosts)))
        self._broken, self._size = broken, len(hosts)
        self._barrier = threading.Barrier(self._size)
        self._blobs: list[bytes] = [b""] * self._size
        self._busy: set[int] = set()
        self.tried: list[tuple[int, int, int]] = []

    def meet(self, rank: int, blob: bytes) -> Sequence[bytes]:
        self._blobs[rank] = blob
        self._barrier.wait(20)
        found = list(self._blobs)
        self._barrier.wait(20)
        return found

    def exchange(self, rank: int, peer: int, data: Bytes) -> Bytes | str:
        assert rank not in self._busy
        self.tried.append((rank, peer, data.size))
        assert (data == pattern(rank, data.size)).all()
        came = pattern(peer, data.size).copy()
        how = self._broken.get((peer, rank), "")
        if how == "never":
            return "nothing came"
        if how and data.size > 1000:
            came[1000:] = np.roll(came[1000:], 1)
        return came

    def prove(self) -> list[dict[tuple[int, int], str]]:
        pairs = pairs_of_hosts(self.topology, [True] * self._size)
        found: list[Any] = [None] * self._size

        def run(rank: int) -> None:
            found[rank] = prove(
                self.topology,
                rank,
                pairs,
                (257, 5000),
                lambda peer, data, _: self.exchange(rank, peer, data),
                lambda _, blob: self.meet(rank, blob),
            )

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found


@pytest.mark.parametrize("hosts", ["aa", "aaa", "aaaaa", "aabab", "abc"])
def test_every_pair_of_a_host_is_tried_both_ways(hosts: str) -> None:
    ranks = Ranks(hosts, {})
    assert ranks.prove() == [{}] * len(hosts)
    wanted = {(a, b) for a, x in enumerate(hosts) for b, y in enumerate(hosts) if a != b and x == y}
    assert sorted(ranks.tried) == sorted((a, b, n) for a, b in wanted for n in (257, 5000))


def test_all_ranks_hear_of_what_failed() -> None:
    """A way that fails in one direction, with large messages only; and one that carries nothing."""
    ranks = Ranks("aaab", {(2, 0): "shifts", (1, 2): "never"})
    first, *others = ranks.prove()
    assert others == [first] * 3
    assert set(first) == {(0, 2), (1, 2)}
    assert first[1, 2] == "rank 2: nothing came"
    assert first[0, 2].startswith("rank 0: ")
    assert "of 5000 bytes came wrong, the first at 1000" in first[0, 2]
    assert (2, 1, 5000) not in ranks.tried, "what failed is not tried again"


def test_the_way_is_a_function_of_facts_and_of_what_was_excluded() -> None:
    topology = Topology(tuple(RankInfo(r, "h") for r in range(3)))
    without = replace(topology, excluded=frozenset({(0, 2, "mapped")}))
    assert [without.way(a, b) for a, b in ((0, 1), (2, 0), (1, 2))] == ["mapped", "staged-tcp", "mapped"]
    assert without.why(2, 0) == "staged: memory that both have mapped does not work"
    assert without.far(0, 2)


# On stand-ins.


def break_slots(rank: int, how: str) -> None:
    """From now on what this rank has mapped for its way from and to rank 0 is not what it should be."""
    if how == "nothing":
        return
    edge = SlotSegment.edge

    def broken(self: SlotSegment, src: int, dst: int, channel: int) -> Edge:
        found = edge(self, src, dst, channel)
        if (how == "bytes" and (src, dst) == (0, rank)) or (how == "sent" and (src, dst) == (rank, 0)):
            return replace(found, slots=found.slots + 64)
        if how == "signal" and (src, dst) == (rank, 0):
            return replace(found, ready=found.ready + 8)  # in the same line, where nobody looks
        return found

    SlotSegment.edge = broken  # type: ignore[method-assign]


def reduce_and_explain(comm: hetcoll.Communicator, hows: tuple[str, ...]) -> tuple[str, ...]:
    gpu_proof.SECONDS = 5.0
    break_slots(comm.rank, hows[comm.rank])
    for count in (5, 70_001, 3_000_003):
        own = Own(comm, np.full(count, comm.rank + 1, np.float32))
        comm.allreduce(own.array).wait(60)
        assert (own.get() == sum(range(1, comm.size + 1))).all()
    return comm.explain("allreduce", 20).paths


@pytest.mark.standins
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("bytes", "bytes came wrong, the first at 0"),
        ("sent", "bytes came wrong, the first at 0"),
        ("signal", "rank 0: nothing came from rank 1 in 5 s"),
    ],
)
@pytest.mark.parametrize("kinds", ["na", "naa"])
def test_a_way_that_fails_is_given_up(kinds: str, how: str, why: str) -> None:
    with start(kinds) as ranks:
        found = ranks.run(reduce_and_explain, ("nothing", how, "nothing")[: len(kinds)], timeout=120)
    for rank, peer in ((0, 1), (1, 0)):
        path = next(path for path in found[rank] if f"to that of rank {peer} " in path)
        assert "through pinned slots and 8 sockets (staged: memory that both have mapped does not work" in path
        assert why in path
    if kinds == "naa":
        assert any("(mapped: one host)" in path for path in found[0])


def outcomes_of(kinds: str, hows: tuple[str, ...], **settings: Any) -> list[Outcome]:
    ranks = start(kinds, **settings)
    try:
        return ranks.outcomes(reduce_and_explain, hows, timeout=120)
    finally:
        ranks.kill_all()


@pytest.mark.standins
@pytest.mark.parametrize("how", ["bytes", "signal"])
@pytest.mark.parametrize(("kinds", "cross", "why"), [("na", "mapped", "HETCOLL_CROSS=mapped"), ("nc", "auto", "a CPU")])
def test_the_last_way_that_fails_is_an_error_on_all_ranks(kinds: str, cross: str, why: str, how: str) -> None:
    if kinds == "nc" and how == "signal":
        pytest.skip("the engine writes the words of its own links")
    for outcome in outcomes_of(kinds, ("nothing", how), HETCOLL_CROSS=cross):
        assert isinstance(outcome.error, InitError), outcome.trace
        assert "ranks 0 and 1 do not reach each other" in str(outcome.error)
        assert why in str(outcome.error)


def break_everything(comm: hetcoll.Communicator) -> tuple[str, ...]:
    """Slots that both have mapped, and then pinned ones."""
    if comm.rank == 1:
        true = gpu_proof.pattern
        gpu_proof.pattern = lambda rank, nbytes: true(rank + 7, nbytes)  # what it sends is not what is waited for
    return reduce_and_explain(comm, ("nothing", "nothing"))


@pytest.mark.standins
def test_two_ways_that_fail_are_an_error_on_all_ranks() -> None:
    ranks = start("na")
    try:
        outcomes = ranks.outcomes(break_everything, timeout=120)
    finally:
        ranks.kill_all()
    for outcome in outcomes:
        assert isinstance(outcome.error, InitError), outcome.trace
        assert "ranks 0 and 1 do not reach each other through pinned slots and sockets" in str(outcome.error)
        assert "came wrong" in str(outcome.error)
