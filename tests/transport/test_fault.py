"""Links that misbehave: what a transport may do never changes a result, what it must not do never goes unseen.

The whole suite can run over such links: ``HETCOLL_FAULT=delay=0.05,short=0.2,reorder=0.05 make test``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import run_cases
from ranks import Job, Ranks
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll.errors import ArgumentError, CollectiveTimeoutError, CommunicationError, PeerLostError
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.types import REDUCING, Collective

Pool = Callable[..., Ranks]

LINKS: dict[str, dict[str, Any]] = {
    "shm": {},
    "shm-small": {"shm_bytes": 4096},
    "tcp": {"transport": "tcp"},
    "tcp-stripes": {"transport": "tcp", "socket_stripes": 3},
}
HARMLESS = ["delay=0.3", "short=0.9,seed=2", "reorder=0.5,seed=3", "delay=0.1,short=0.4,reorder=0.1,seed=4"]


def cases_for(size: int) -> list[Case]:
    """Every collective, with counts around the number of ranks, in and out of place."""
    cases: list[Case] = []
    kinds = [kind for kind in ALGORITHMS if kind is not Collective.BARRIER]
    for turn, kind in enumerate(kinds):
        for count in (0, 1, size + 1, 5003):
            op = "avg" if kind in REDUCING and turn % 2 else "sum"
            dtype = ("float32", "bfloat16", "complex128", "int8")[(turn + count) % 4] if op == "sum" else "float64"
            inplace = bool((turn + count) % 2) and kind is not Collective.BROADCAST
            cases.append(Case(kind.label, dtype, count, op, count % size, inplace, seed=turn, shift=turn % 3))
    counts = tuple(7 * rank % 5 for rank in range(size))
    cases += [Case(name, "float64", 40, counts=counts) for name in ("allgatherv", "reduce_scatterv")]
    return [*cases, Case("alltoallv", "uint16", 500)]


@pytest.mark.parametrize("fault", HARMLESS)
@parametrize("link", sorted(LINKS, key=len), first=1)
@parametrize("size", [3, 2, 4], first=1)
def test_results_do_not_depend_on_timing_or_on_pieces(pool: Pool, size: int, link: str, fault: str) -> None:
    cases = cases_for(size)
    rows = pool(size).run(run_cases, cases, {"fault": fault, **LINKS[link]}, size == 3)
    for case, digests in zip(cases, zip(*rows, strict=True), strict=True):
        if case.collective in ("allreduce", "allgather", "allgatherv", "broadcast"):
            assert len(set(digests)) == 1, f"{case}: ranks hold different bits"


def exchange(comm: hetcoll.Communicator, rounds: int) -> None:
    """Messages both ways round the ring, barriers, and several collectives in flight between them."""
    n, me = comm.size, comm.rank
    for i in range(rounds):
        out = np.arange(1000 * i, dtype=np.int32) + me
        into = np.zeros_like(out)
        with comm.group():
            comm.send(out, (me + 1) % n)
            comm.recv(into, (me - 1) % n)
        assert (into == out - me + (me - 1) % n).all()
        sums = [np.full(count, me + i, np.float32) for count in (3, 30_000, 1)]
        works = [comm.allreduce(x, async_op=True) for x in sums]
        comm.barrier()
        for work in reversed(works):
            work.wait()
        assert all((x == sum(range(n)) + n * i).all() for x in sums)


@parametrize("transport", ["shm", "tcp"], first=1)
def test_messages_and_calls_in_flight(launch: Pool, transport: str) -> None:
    ranks = launch(
        3, HETCOLL_TRANSPORT=transport, HETCOLL_DEBUG="info", HETCOLL_FAULT="delay=0.2,short=0.5,reorder=0.3"
    )
    ranks.run(exchange, 8)
    assert "misbehave on purpose" in ranks.output(0)


def add_up(comm: hetcoll.Communicator, rounds: int) -> int:
    """All-reduces until one fails, each checked; how many were right if none did."""
    for i in range(rounds):
        x = np.arange(7001, dtype=np.float32) % 50 + comm.rank + i
        comm.allreduce(x)
        want = comm.size * (np.arange(7001) % 50 + i) + sum(range(comm.size))
        assert (x == want).all(), f"round {i}: wrong data on rank {comm.rank}"
    return rounds


@parametrize(("algo", "message"), [("ring", 3), ("oneshot", 2), ("ring", 1), ("ring", 6)], first=2)
@pytest.mark.parametrize("kind", ["duplicate", "drop", "close"])
@parametrize("transport", ["shm", "tcp"], first=1)
def test_what_no_transport_may_do_is_an_error_on_every_rank(
    launch: Pool, transport: str, kind: str, algo: str, message: int
) -> None:
    fault = f"{kind}={message},rank=1"
    ranks = launch(3, HETCOLL_ALGO=algo, HETCOLL_TRANSPORT=transport, HETCOLL_FAULT=fault, HETCOLL_TIMEOUT="5")
    for outcome in ranks.outcomes(add_up, 8):
        assert isinstance(outcome.error, CommunicationError), f"{fault}: {outcome.trace or outcome.value}"
        assert outcome.seconds < 10
        if kind == "close":
            assert isinstance(outcome.error, PeerLostError)


@parametrize("tls", ["0", "1"], first=1)
@parametrize("byte", [20_000, 1, 32, 100_000], first=2)
def test_a_stream_that_ends_in_the_middle_of_a_message_is_an_error_on_every_rank(
    launch: Pool, byte: int, tls: str
) -> None:
    """Which no new connection mends: an end in order is the peer's."""
    fault = f"truncate={byte},rank=1"
    ranks = launch(3, HETCOLL_TRANSPORT="tcp", HETCOLL_TLS=tls, HETCOLL_FAULT=fault, HETCOLL_TIMEOUT="5")
    for outcome in ranks.outcomes(add_up, 20):
        assert isinstance(outcome.error, PeerLostError), f"{fault}: {outcome.trace or outcome.value}"
        assert outcome.error.rank == 1 or outcome.rank == 1, "who sent it names who left then"
        assert outcome.seconds < 5


def deliver(comm: hetcoll.Communicator, rounds: int) -> None:
    """Rank 0 sends equal-sized messages to rank 1, which checks each."""
    for i in range(rounds):
        x = np.full(100, i if comm.rank == 0 else -1, np.int64)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(x, 0)
            assert (x == i).all(), f"message {i}: wrong data"


@pytest.mark.parametrize("fault", ["duplicate=2", "drop=2", "drop=6"])
@parametrize("transport", ["shm", "tcp"], first=1)
def test_messages_lost_or_doubled(launch: Pool, transport: str, fault: str) -> None:
    ranks = launch(2, HETCOLL_TRANSPORT=transport, HETCOLL_FAULT=fault, HETCOLL_TIMEOUT="1")
    receiver = ranks.outcomes(deliver, 6)[1]
    assert isinstance(receiver.error, CommunicationError), receiver.trace or receiver.value
    if fault == "drop=6":  # nothing comes behind the last one
        assert isinstance(receiver.error, CollectiveTimeoutError)


def refused(job: Job) -> str:
    with pytest.raises(ArgumentError) as error:
        job.join()
    return str(error.value)


@pytest.mark.parametrize("fault", ["delay=2", "drop=0", "late=1", "close"])
def test_a_fault_that_cannot_be_read(launch: Pool, fault: str) -> None:
    ranks = launch(2, join=False, HETCOLL_FAULT=fault)
    for text in ranks.run(refused):
        assert text.startswith("HETCOLL_FAULT: wanted ")
        assert text.endswith(f"got '{fault}'")
