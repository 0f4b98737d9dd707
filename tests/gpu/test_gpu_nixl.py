"""Agents with NIXL's interface whose memory lies on GPUs: in one host the reader's GPU reads what is its vendor's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agents import heard, over
from gpu_kinds import Own
from ranks import Ranks, wait_until
from thorough import parametrize

import hetcoll
from hetcoll.serving.nixl import nixl_agent, nixl_agent_config

PIECE, COUNT = 4096, 200
NBYTES = PIECE * COUNT


class Side:
    """One of two agents, its memory, and what it knows of the other's."""

    def __init__(self, comm: hetcoll.Communicator, agent: nixl_agent) -> None:
        self.comm, self.agent, self.other = comm, agent, str(1 - comm.rank)
        self.mine = Own(comm, np.random.default_rng(comm.rank).integers(0, 256, NBYTES, np.uint8))
        self.registered = agent.register_memory([self.mine.array])
        self.begin = comm.counters()["window_direct"]
        kind, address = self.registered.memory, self.registered[0][0]
        told = comm.allgather_object((agent.get_agent_metadata(), kind, address))[1 - comm.rank]
        agent.add_remote_agent(told[0])
        self.own, self.theirs = self._pieces(kind, address), self._pieces(*told[1:])
        self.place = np.random.default_rng(7).permutation(COUNT).astype(np.int32)

    @staticmethod
    def _pieces(kind: str, address: int) -> tuple[Any, str]:
        rows = np.stack([address + np.arange(COUNT) * PIECE, np.full(COUNT, PIECE), np.zeros(COUNT)], 1)
        return rows.astype(np.int64), kind

    def prepared(self, operation: str, message: bytes) -> Any:
        """Half of the pieces: a WRITE takes the first half here to places in the other's second half; a READ too."""
        here = self.agent.prep_xfer_dlist("", *self.own)
        there = self.agent.prep_xfer_dlist(self.other, *self.theirs)
        first, second = np.arange(COUNT // 2, dtype=np.int32), np.arange(COUNT // 2, COUNT, dtype=np.int32)
        own, far = (first, second) if operation == "WRITE" else (second, first)
        return self.agent.make_prepped_xfer(operation, here, own, there, far[::-1].copy(), message)

    @property
    def direct(self) -> int:
        """Bytes that went from GPU to GPU, out of this rank's memory or into it, by what others asked of it."""
        return self.comm.counters()["window_direct"] - self.begin


def halves(values: Any) -> tuple[Any, Any]:
    rows = values.reshape(COUNT, PIECE)
    return rows[: COUNT // 2], rows[COUNT // 2 :]


def write_and_read(comm: hetcoll.Communicator, turns: int) -> tuple[int, int]:
    """Rank 0 writes and reads again and again. How many bytes went from GPU to GPU by WRITEs, and by READs."""
    with nixl_agent(str(comm.rank), nixl_agent_config(comm=comm)) as agent:
        side = Side(comm, agent)
        before = side.mine.get().copy()
        other = np.random.default_rng(1 - comm.rank).integers(0, 256, NBYTES, np.uint8)
        if comm.rank == 0:
            write = side.prepared("WRITE", b"wrote")
            for _ in range(turns):
                agent.transfer(write)
                assert over(agent, write) == "DONE"
                assert heard(agent, 1) == [b"more"]
            comm.barrier()
            read = side.prepared("READ", b"")
            for _ in range(turns):
                agent.transfer(read)
                assert over(agent, read) == "DONE"
            assert (halves(side.mine.get())[1] == halves(other)[0][::-1]).all()
            assert (halves(side.mine.get())[0] == halves(before)[0]).all()
            written = 0
        else:
            for _ in range(turns):
                assert heard(agent, 1) == [b"wrote"]
                agent.send_notif("0", b"more")
            assert (halves(side.mine.get())[1] == halves(other)[0][::-1]).all()
            assert (halves(side.mine.get())[0] == halves(before)[0]).all()
            written = side.direct
            comm.barrier()
        comm.barrier()
        found = written, side.direct - written
        agent.deregister_memory(side.registered)
        comm.barrier()
        return found


@parametrize("kinds", ["nn", "aa", "na", "nc"], first=1)
def test_agents_of_gpus(whole: Any, kinds: str) -> None:
    """The first WRITE is where the other agent hears how it opens what is written; the first READ knows."""
    ranks: Ranks = whole(kinds)
    turns, half = 4, NBYTES // 2
    found = ranks.run(write_and_read, turns)[1]
    assert found == (((turns - 1) * half, turns * half) if kinds[0] == kinds[1] else (0, 0))


def test_agents_of_two_hosts(whole: Any) -> None:
    assert whole("nn", HETCOLL_HOST_ID=("a", "b")).run(write_and_read, 2)[1] == (0, 0)


def come_and_go(comm: hetcoll.Communicator) -> int:
    """Memory that is registered anew each time, by an agent after another. How many bytes went from GPU to GPU."""
    direct = 0
    for _ in range(2):
        with nixl_agent(str(comm.rank), nixl_agent_config(comm=comm)) as agent:
            opened = agent._side.devices._opened
            for _ in range(3):
                side = Side(comm, agent)
                if comm.rank == 0:
                    read = side.prepared("READ", b"read")
                    agent.transfer(read)
                    assert over(agent, read) == "DONE"
                    assert len(opened) == 1
                    comm.barrier()
                    wait_until(lambda: agent.get_new_notifs() or not opened, 60)  # noqa: B023
                    agent.transfer(read)
                    assert over(agent, read) == "ERR"
                    assert "closed by its rank" in str(read.error)
                else:
                    assert heard(agent, 1) == [b"read"]
                    comm.barrier()
                    agent.deregister_memory(side.registered)
                comm.barrier()
                if comm.rank == 0:
                    agent.deregister_memory(side.registered)
                direct += side.direct
    return direct


@pytest.mark.parametrize("kinds", ["nn", "aa"])
def test_what_is_gone_is_not_kept_open(whole: Any, kinds: str) -> None:
    assert whole(kinds).run(come_and_go)[1] == 2 * 3 * NBYTES // 2
