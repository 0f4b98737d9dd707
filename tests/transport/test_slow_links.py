"""Links that stall: slow is not stuck, however long it takes. Only the timeout ends it, and says what hangs."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import run_cases
from ranks import Ranks
from reference import Case

import hetcoll
from hetcoll import CollectiveTimeoutError, CommunicationError, HetcollError, InitError, PeerLostError
from hetcoll.config.limits import SPARE
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.types import Collective

Launch = Callable[..., Ranks]
HOLD = 7.0  # seconds: longer than it takes to look at stuck ranks twice
STALL = {"HETCOLL_FAULT": f"stall=8000000,hold={HOLD}"}


def pass_on(comm: hetcoll.Communicator, count: int) -> float:
    """One long message from rank 0 to rank 1, which answers."""
    x = np.arange(count, dtype=np.uint32)
    into, reply = np.zeros_like(x), np.zeros(3, np.int16)
    start = time.monotonic()
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(reply, 1)
    elif comm.rank == 1:
        comm.recv(into, 0)
        comm.send(reply + 1, 0)
        assert (into == x).all()
    return time.monotonic() - start


def exchange(comm: hetcoll.Communicator, count: int) -> float:
    """The same both ways at once."""
    x, into = np.full(count, comm.rank, np.uint32), np.zeros(count, np.uint32)
    start = time.monotonic()
    comm.sendrecv(x, 1 - comm.rank, into, 1 - comm.rank)
    assert (into == 1 - comm.rank).all()
    return time.monotonic() - start


def add_up(comm: hetcoll.Communicator, count: int) -> float:
    x = np.ones(count, np.float32)
    start = time.monotonic()
    comm.allreduce(x)
    comm.barrier()
    assert (x == comm.size).all()
    return time.monotonic() - start


@pytest.mark.slow
def test_a_stalled_link_is_waited_for(launch: Launch) -> None:
    """Whether the sender's or the receiver's end stalls, and whether the sender has gone on meanwhile."""
    small = {"HETCOLL_FAULT": f"stall=50000,hold={HOLD},rank=1"}  # then the whole message is in the link's buffers
    plans: list[tuple[int, Any, int, dict[str, str]]] = []
    for transport in ("auto", "tcp"):
        over = {"HETCOLL_TRANSPORT": transport}
        plans += [
            (2, pass_on, 6_000_000, {"HETCOLL_FAULT": f"{STALL['HETCOLL_FAULT']},rank={r}", **over}) for r in (0, 1)
        ]
        plans += [(2, pass_on, 20_000, small | over), (2, exchange, 6_000_000, STALL | over)]
    # Where each rank has a core of its own, what is chosen by itself (direct) sends 6 MB over a link, and none stalls.
    ring = {"HETCOLL_TRANSPORT": "tcp", "HETCOLL_ALGO": "allreduce:ring"}
    plans.append((4, add_up, 6_000_000, {"HETCOLL_FAULT": f"{STALL['HETCOLL_FAULT']},rank=2", **ring}))
    jobs = [(launch(size, **env), function, count) for size, function, count, env in plans]
    for ranks, function, count in jobs:
        ranks.start(function, count)
    for (ranks, function, _), (*_, env) in zip(jobs, plans, strict=True):
        for outcome in ranks.finish(40):
            assert outcome.error is None, f"{function.__name__} {env}: {outcome.trace}"
            assert outcome.value > HOLD - 1, f"{function.__name__} {env}: the link did not stall"


def wait_for_one_that_is_late(comm: hetcoll.Communicator, late: float) -> tuple[int, float]:
    """How often rank 0 slept while it waited for rank 1, which got its message at once, and for how long."""
    x, total = np.ones(1 << 14, np.float32), np.zeros(1 << 14, np.float32)
    for _ in range(3):  # connected, bound, and known to the fast path
        comm.allreduce(x, total)
    before, start = comm._core.engine.naps, time.monotonic()
    if comm.rank == 1:
        time.sleep(late)
    comm.allreduce(x, total)
    assert (total == comm.size).all()
    return comm._core.engine.naps - before, time.monotonic() - start


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["direct", "oneshot"])
def test_who_has_sent_all_sleeps_until_the_answer_comes(launch: Launch, name: str, size: int) -> None:
    """What it sent may still be read where it lies, and the sockets would take more: neither is a reason to wake."""
    ranks = launch(size, HETCOLL_TRANSPORT="tcp", HETCOLL_ALGO=f"allreduce:{name}")
    ranks.start(wait_for_one_that_is_late, 1.0)
    first = ranks.finish(30)[0]
    assert first.error is None, first.trace
    naps, seconds = first.value
    assert naps < 20 + 100 * seconds, f"{naps} naps in {seconds:.2f} s"


def test_the_timeout_names_the_messages_that_hang(launch: Launch) -> None:
    message = [
        launch(2, HETCOLL_TIMEOUT="4.5", HETCOLL_TRANSPORT=transport, HETCOLL_FAULT=f"stall=8000000,hold=60,rank={end}")
        for transport in ("auto", "tcp")
        for end in (0, 1)
    ]
    gone_on = launch(2, HETCOLL_TIMEOUT="4.5", HETCOLL_TRANSPORT="tcp", HETCOLL_FAULT="stall=50000,hold=60,rank=1")
    sums = launch(4, HETCOLL_TIMEOUT="4.5", HETCOLL_TRANSPORT="tcp", HETCOLL_FAULT="stall=2000000,hold=60,rank=2")
    for ranks in message:
        ranks.start(pass_on, 6_000_000)
    gone_on.start(pass_on, 20_000)
    sums.start(add_up, 4_000_000)
    for ranks in [*message, gone_on, sums]:
        texts = set()
        for outcome in ranks.finish(30):
            assert isinstance(outcome.error, CollectiveTimeoutError), outcome.trace or outcome.value
            assert outcome.seconds < 8.0
            texts.add(str(outcome.error))
        (text,) = texts
        if ranks is sums:
            assert re.search(r"MB from rank (2 to rank \d|\d to rank 2) came, none for ", text), text
        else:
            some = "50 of 80 kB" if ranks is gone_on else "8 of 24 MB"
            assert re.search(rf"{some} from rank 0 to rank 1 came, none for \d s", text), text


def count_links(comm: hetcoll.Communicator, cases: list[Case]) -> tuple[list[tuple[int, ...]], int]:
    """Run the cases; then peer, channel, bytes and messages that were sent, and those that came. Also how many bytes
    were compressed."""
    run_cases(comm, cases, {})
    edges = [(peer, channel) for peer in range(comm.size) if peer != comm.rank for channel in range(3)]
    through = comm._engine.through
    rows = [(peer, channel, *through(peer, channel, True), *through(peer, channel, False)) for peer, channel in edges]
    return rows, comm.counters().get("compressed_before", 0)


CASES = [
    Case(kind.label, "float32", count, root=1, inplace=count == 5 and kind is not Collective.BROADCAST)
    for kind in ALGORITHMS
    if kind is not Collective.BARRIER
    for count in (0, 5, 40_001)
]


@pytest.mark.parametrize(
    "env",
    [
        {"HETCOLL_TRANSPORT": "shm"},
        {"HETCOLL_TRANSPORT": "tcp"},
        {"HETCOLL_HOST_ID": ("a", "b", "c"), "HETCOLL_COMPRESS": "bf16"},
    ],
)
def test_both_ends_of_a_link_count_alike(launch: Launch, env: dict[str, Any]) -> None:
    """Else what has come would be taken for what is under way, and deadlocks would not be found."""
    rows = launch(3, **env).run(count_links, CASES)
    sent = {(rank, peer, channel): counts[:2] for rank, (row, _) in enumerate(rows) for peer, channel, *counts in row}
    came = {(peer, rank, channel): counts[2:] for rank, (row, _) in enumerate(rows) for peer, channel, *counts in row}
    assert sent == came
    assert sum(messages for _, messages in sent.values()) > 3 * len(CASES)
    assert all(compressed > 0 for _, compressed in rows) == ("HETCOLL_COMPRESS" in env)


# Links that are being made.


def meet_late(comm: hetcoll.Communicator) -> float:
    """The first message between two ranks, each of which answers a new connection only after HOLD seconds."""
    listener = comm._wiring._listener
    assert listener is not None
    wait, held = listener._wait, threading.Event()

    def hold() -> float | None:
        listener._wait = wait  # type: ignore[method-assign]
        held.set()
        time.sleep(HOLD)
        return wait()

    x, start = np.ones(5, np.int32), time.monotonic()
    listener._wait = hold  # type: ignore[method-assign]
    listener._wake_write.send(b"\0")  # it waits already, and would take a connection before it is held
    assert held.wait(30)
    comm._core.meet("both are held", b"", 30)
    comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
    return time.monotonic() - start


def test_links_that_are_being_made_are_waited_for(launch: Launch) -> None:
    outcomes = launch(2, HETCOLL_TRANSPORT="tcp").outcomes(meet_late)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    assert max(outcome.value for outcome in outcomes) >= HOLD, "nobody was held"


def run_with_descriptors(comm: hetcoll.Communicator, more: int, hard_too: bool) -> int:
    """An all-to-all in which rank 1 may have only so `many` more descriptors; gives its soft limit in the end."""
    x = np.ones(comm.size, np.int32)
    if comm.rank == 1:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = len(os.listdir("/proc/self/fd")) + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit if hard_too else hard))
    comm.alltoall(x, np.empty_like(x))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.calm
def test_a_rank_that_has_too_few_descriptors_is_named_with_how_many_it_needs(launch: Launch) -> None:
    ranks = launch(4, HETCOLL_TRANSPORT="tcp")
    for outcome in ranks.outcomes(run_with_descriptors, SPARE, True):
        assert isinstance(outcome.error, CommunicationError), outcome.trace or outcome.value
        text = str(outcome.error)
        assert text.startswith("rank 1 in alltoall(int32, count=1) at "), text
        told = re.search(r"(\d+) file descriptors are needed .*, and (\d+) are allowed", text)
        assert told is not None, text
        assert 0 < int(told[1]) - int(told[2]) <= 4
        assert outcome.seconds < 3.0


def test_the_soft_limit_of_descriptors_is_raised(launch: Launch) -> None:
    ranks = launch(3, HETCOLL_TRANSPORT="tcp")
    outcomes = ranks.outcomes(run_with_descriptors, 0, False)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    assert outcomes[1].value >= SPARE + 2


def split_with_few_descriptors(comm: hetcoll.Communicator) -> list[tuple[HetcollError, float]]:
    """What came of splits, and after how long: rank 1 may open nothing, then one file, then two, until it suffices."""
    limits, taken, failed = resource.getrlimit(resource.RLIMIT_NOFILE), [os.dup(0)], []
    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 64, limits[1]))
    with contextlib.suppress(OSError):
        while comm.rank == 1:
            taken.append(os.dup(0))
    for attempt in range(len(taken) if comm.rank == 1 else 64):
        begin = time.monotonic()
        try:
            part = comm.split(0)
            assert part is not None
            part.barrier()
            part.close()
        except HetcollError as error:
            failed.append((error, time.monotonic() - begin))
        if comm.agree(len(failed) == attempt):
            break
        if comm.rank == 1:
            os.close(taken.pop())
    for fd in taken:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return failed


def test_a_rank_that_has_no_descriptor_for_shared_memory_says_so_at_once(launch: Launch) -> None:
    zero, one, two = launch(3).run(split_with_few_descriptors)
    assert len(zero) == len(one) == len(two) >= 3
    for error, _ in one:
        assert isinstance(error, InitError)
        assert "too many open files" in str(error).lower()
    for error, _ in (*zero, *two):
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
    assert max(seconds for _, seconds in (*zero, *one, *two)) < 5.0
