"""Connections to the store that break though both ends live: made again, and nothing is lost or comes twice."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from losing import lose, work, works
from ranks import Job, Ranks, wait_until
from resetting import resets
from thorough import parametrize

import hetcoll
from hetcoll.errors import PeerLostError
from hetcoll.rendezvous.store import server as store

Launch = Callable[..., Ranks]
TLS = {"HETCOLL_TLS": "1", "HETCOLL_SECRET": "of this job"}
KINDS = parametrize("env", [{}, TLS, {"HETCOLL_TRANSPORT": "tcp"}], ids=["plain", "tls", "tcp"], first=1)


def to_the_store(job_id: bytes) -> list[socket.socket]:
    """The store's ends; none where it lives elsewhere."""
    hosted = store._hosted.get(job_id)
    return [] if hosted is None else [each.sock for each in list(hosted._connections.values())]


def resetting(comm: hetcoll.Communicator, seconds: float = 0.004) -> contextlib.AbstractContextManager[list[int]]:
    job_id = comm._session.control.unique_id.job_id
    return resets(lambda: to_the_store(job_id), seconds)


# Jobs whose connections are reset all the time, the one of rank 0 to its own store too.


def all_calls(comm: hetcoll.Communicator, rounds: int) -> int:
    control, name, n = comm._session.control, comm._group, comm.size
    with resetting(comm) as count:
        for turn in range(rounds):
            told = control.exchange(name, b"turn %d" % turn, b"%d of %d" % (comm.rank, turn), 30)
            assert told == [b"%d of %d" % (rank, turn) for rank in range(n)]
            works(comm)  # a part of the communicator as well
            assert comm.agree(0b1000 | 1 << comm.rank) == 0b1000
            control.put(b"%d %d" % (turn, comm.rank), b"value" * 1000)
            assert control.get(b"%d %d" % (turn, (comm.rank + 1) % n), 30) == b"value" * 1000
            answers, _ = control.query(name, b'"state"', 30)
            assert None not in answers.values()
        until = time.monotonic() + 30
        while count[0] < 50 and comm.rank == 0:
            assert time.monotonic() < until
            time.sleep(0.01)
    comm.barrier()
    assert not comm._session.control.membership(name).gone  # type: ignore[union-attr]
    return count[0]


@KINDS
def test_a_job_goes_on_while_its_connections_to_the_store_are_reset(launch: Launch, env: dict[str, str]) -> None:
    ranks = launch(3, **env)
    counts = ranks.run(all_calls, 10, timeout=90)
    assert counts[0] >= 50
    ranks.close()  # in order, or it says what stayed


def shrink_and_grow(job: Job) -> tuple[int, int, int]:
    """Three ranks, of which one dies, and one that comes later."""
    with contextlib.ExitStack() as stack:
        if job.rank == 3:
            comm = hetcoll.Communicator.join(job.unique_id, timeout=30)
        else:
            whole = hetcoll.Communicator.init(3, job.rank, job.unique_id, timeout=30)
            stack.enter_context(resetting(whole))
            lose(whole, 1)
            rest = whole.shrink()
            works(rest)
            comm = rest.grow(1, timeout=30)
            works(rest)
            rest.close()
            whole.close()
        works(comm)
        comm.barrier()
    return comm.rank, comm.size, comm.epoch


@KINDS
def test_ranks_are_lost_and_found_while_connections_are_reset(launch: Launch, env: dict[str, str]) -> None:
    ranks = launch(4, join=False, **env)
    ranks.start(shrink_and_grow)
    outcomes = ranks.finish(60, only=[0, 2, 3])
    assert not [outcome.problem() for outcome in outcomes if outcome.problem()]
    assert [outcome.value for outcome in outcomes] == [(0, 3, 2), (1, 3, 2), (2, 3, 2)]
    ranks.kill(1)


def go_on(comm: hetcoll.Communicator, reached: Path) -> None:
    with resetting(comm) as count:
        while True:
            works(comm)
            comm._session.control.exchange(comm._group, os.urandom(0) + b"again", b"", 30)
            if count[0] > 20:
                reached.touch()


def test_a_rank_that_is_killed_meanwhile_is_named_at_once(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(3)
    ranks.start(go_on, tmp_path / "reached")
    wait_until((tmp_path / "reached").exists, 30)
    start = time.monotonic()
    ranks.kill(1)
    for outcome in ranks.finish(20, only=[0, 2]):
        assert isinstance(outcome.error, PeerLostError), outcome
        assert outcome.error.rank == 1
        assert outcome.ended - start < 3


def lose_the_host(comm: hetcoll.Communicator) -> int:
    """Rank 0 dies in the midst of it; connections to the next store are reset as well."""
    with resetting(comm, 0.01):
        works(comm)
        lose(comm, 0)
        rest = comm.shrink()
        with resetting(rest, 0.01) as count:
            until = time.monotonic() + 20
            more = np.ones(1)
            while more[0]:
                works(rest)
                more[:] = (count[0] < 10 and store._hosted != {}) and time.monotonic() < until
                rest.allreduce(more, op="max")
        rest.barrier()
    return rest.size


def test_the_connections_to_a_successor_are_made_again_too(launch: Launch) -> None:
    ranks = launch(4)
    ranks.start(lose_the_host)
    outcomes = ranks.finish(60, only=[1, 2, 3])
    assert not [outcome.problem() for outcome in outcomes if outcome.problem()]
    assert [outcome.value for outcome in outcomes] == [3, 3, 3]
    ranks.kill(0)


def cut_off(comm: hetcoll.Communicator) -> str:
    """The connection of rank 1 ends, and no process does: something between the hosts has closed it."""
    if comm.rank == 1:
        comm._session.control._uplink.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(hetcoll.PeerLostError) as caught:
        work(comm)
    assert caught.value.rank == 1
    if comm.rank != 1:
        works(comm.shrink())
    return str(caught.value)


def test_whose_connection_to_the_store_is_closed_is_lost(launch: Launch) -> None:
    zero, one, two = launch(3).run(cut_off)
    assert "its connection to the job's store was lost, and the others went on without it" in one
    for other in (zero, two):
        assert "rank 1 was lost: its process died: the connection ended" in other
