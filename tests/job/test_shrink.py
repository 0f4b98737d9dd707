"""Going on with the ranks that are left: after deaths, one after another or in the middle of it, and after stops."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from losing import found, lose, works
from ranks import Ranks, elapsed, wait_until
from thorough import parametrize

import hetcoll
from hetcoll.links import descriptors, wiring

Launch = Callable[..., Ranks]
TRANSPORTS = parametrize("transport", ["auto", "tcp"], first=1)


def survivors(ranks: Ranks, *victims: int) -> list[Any]:
    """As `found`, in the order of ranks."""
    return list(found(ranks, *victims).values())


def lose_one(comm: hetcoll.Communicator, victim: int) -> tuple[int, int, str]:
    works(comm)
    pending = comm.allreduce(np.ones(1 << 20), async_op=True) if comm.rank != victim else None
    comm._session.control.exchange(comm._group, b"it has begun everywhere", b"", 10)
    lose(comm, victim)
    with comm.shrink() as rest:
        works(rest)
        assert pending is not None
        assert isinstance(pending.error, hetcoll.PeerLostError)
        with pytest.raises(hetcoll.PeerLostError):
            comm.barrier()
        comm.close()
        works(rest)
        return rest.rank, rest.size, str(rest.topology.hosts)


@TRANSPORTS
@pytest.mark.parametrize("victim", [1, 3])
def test_a_rank_is_lost(launch: Launch, victim: int, transport: str) -> None:
    ranks = launch(4, HETCOLL_TRANSPORT=transport)
    ranks.start(lose_one, victim)
    assert survivors(ranks, victim) == [(rank, 3, "((0, 1, 2),)") for rank in range(3)]


def lose_all(comm: hetcoll.Communicator) -> list[int]:
    """The last rank dies, again and again, until rank 0 is alone."""
    sizes = []
    while comm.size > 1:
        lose(comm, comm.size - 1)
        comm = comm.shrink()
        works(comm)
        sizes.append(comm.size)
    return sizes


@TRANSPORTS
def test_one_rank_after_another_is_lost(launch: Launch, transport: str) -> None:
    ranks = launch(4, HETCOLL_TRANSPORT=transport)
    ranks.start(lose_all)
    assert survivors(ranks, 1, 2, 3) == [[3, 2, 1]]


MOMENTS = ("before it calls", "while it waits for the others", "introduce", "memory", "addresses", "epoch")


def die(*args: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(comm: hetcoll.Communicator, moment: str) -> None:
    """From now on this rank dies at a certain step towards the new communicator."""
    if moment == "before it calls":
        die()
    elif moment == "memory":
        descriptors.share_fd = die
    control, exchange = comm._session.control, comm._session.control.exchange_columns

    def tell(group: bytes, tag: bytes, *rest: Any) -> Any:
        return die() if tag == moment.encode() else exchange(group, tag, *rest)

    control.__dict__["exchange_columns"] = tell


def lose_two(comm: hetcoll.Communicator, first: int, second: int, moment: str) -> tuple[int, int, float]:
    lose(comm, first)
    if comm.rank == second:
        die_at(comm, moment)
    elif comm.rank == 3 and moment == "while it waits for the others":
        wait_until(lambda: second in comm._session.control._groups[comm._group].gone, 10)
    with elapsed() as took:
        rest = comm.shrink()
    works(rest)
    return rest.rank, rest.size, took[0]


@parametrize("moment", MOMENTS, first=2)
def test_another_one_dies_meanwhile(launch: Launch, moment: str) -> None:
    """Two hosts, so to speak; rank 2 hands out the memory of its own."""
    ranks = launch(5, HETCOLL_HOST_ID=("a", "a", "b", "b", "b"))
    ranks.start(lose_two, 1, 2, moment)
    if moment == "while it waits for the others":
        time.sleep(1.0)
        ranks.kill(2)
    for i, (rank, size, seconds) in enumerate(survivors(ranks, 1, 2)):
        assert (rank, size) == (i, 3)
        assert seconds < 10


def leave_one_out(comm: hetcoll.Communicator, silent: int, done: Path) -> tuple[int, str]:
    """A rank is stopped; the others go on without it. When it runs again it is told so, and disturbs nobody."""
    x = np.ones(50_000)
    comm.allreduce(x)
    comm.barrier()
    if comm.rank == silent:
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(hetcoll.CommunicationError) as caught:
            comm.allreduce(x)
        with pytest.raises(hetcoll.InitError, match=r"rank 2 did not come to shrink\(\) in time"):
            comm.shrink()
        return 0, str(caught.value)
    with pytest.raises(hetcoll.CollectiveTimeoutError) as caught_here:
        comm.allreduce(x, timeout=1.0)
    rest = comm.shrink(timeout=1.0)
    done.touch()
    awake = np.zeros(1)
    while not awake[0]:  # the others' answers to questions in the old group show when it runs again
        works(rest)
        answers, _ = comm._session.control.query(comm._group, json.dumps([0, []]).encode(), 0.2)
        awake[0] = answers[silent] is not None
        rest.allreduce(awake, op="max")
    works(rest)
    return rest.size, str(caught_here.value)


@TRANSPORTS
def test_a_stopped_rank_is_left_out(launch: Launch, transport: str, tmp_path: Path) -> None:
    ranks = launch(4, HETCOLL_TRANSPORT=transport)
    ranks.start(leave_one_out, 2, tmp_path / "done")
    wait_until((tmp_path / "done").exists, 20)
    ranks.signal(2, signal.SIGCONT)
    values = survivors(ranks)
    assert [size for size, _ in values] == [3, 3, 0, 3]
    assert all("rank 2 did not answer" in text for _, text in values), values


def stop_inside(comm: hetcoll.Communicator, silent: int, done: Path) -> tuple[int, str]:
    """A rank is stopped after it has come to the roll call: the others go on without it."""
    comm.barrier()
    if comm.rank == silent:
        introduce = wiring.Wiring._introduce

        def stop(self: wiring.Wiring) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return introduce(self)

        wiring.Wiring._introduce = stop  # type: ignore[method-assign]
        with pytest.raises(hetcoll.InitError) as caught:
            comm.shrink(timeout=4.0)
        return 0, str(caught.value)
    rest = comm.shrink(timeout=4.0)
    works(rest)
    done.touch()
    return rest.size, ""


def test_a_rank_that_is_stopped_inside_is_left_out(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(3)
    ranks.start(stop_inside, 2, tmp_path / "done")
    wait_until((tmp_path / "done").exists, 25)
    ranks.signal(2, signal.SIGCONT)
    values = survivors(ranks)
    assert [size for size, _ in values] == [2, 2, 0]
    assert "rank 2 did not come to shrink() in time" in values[2][1]


def shrink_at_leisure(comm: hetcoll.Communicator) -> list[str]:
    """Without a failure; what the old one is good for; what a split one does."""
    rest = comm.shrink()
    assert (rest.rank, rest.size) == (comm.rank, comm.size)
    works(rest)
    said = []
    for call in (comm.barrier, lambda: comm.allreduce(np.ones(4))):
        with pytest.raises(hetcoll.AbortedError) as caught:
            call()
        said.append(str(caught.value))
    comm.close()
    with pytest.raises(hetcoll.ClosedError):
        comm.shrink()
    with pytest.raises(hetcoll.ArgumentError, match="timeout: wanted seconds above 0"):
        rest.shrink(timeout=0)
    part = rest.split(rest.rank % 2)
    assert part is not None
    if rest.rank % 2:
        part = part.shrink()
    works(part)
    works(rest)
    return said


@TRANSPORTS
def test_nobody_is_lost(launch: Launch, transport: str) -> None:
    for said in launch(4, HETCOLL_TRANSPORT=transport).run(shrink_at_leisure):
        assert set(said) == {"shrink() replaced this communicator"}


def interrupt_while_shrinking(comm: hetcoll.Communicator) -> str:
    """Rank 1 never calls; Ctrl-C ends the wait of rank 0."""
    if comm.rank == 1:
        return ""
    with pytest.raises(KeyboardInterrupt):
        comm.shrink()
    return repr(comm)


def test_ctrl_c_while_shrinking(launch: Launch) -> None:
    ranks = launch(2)
    ranks.start(interrupt_while_shrinking)
    ranks.finish(10, only=[1])
    time.sleep(0.5)
    ranks.signal(0, signal.SIGINT)
    (zero,) = ranks.finish(10, only=[0])
    assert zero.value == "<hetcoll.Communicator rank 0 of 2>", zero.trace
