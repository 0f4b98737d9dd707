"""Taking ranks in: after a death, by several at a time, by who dies or is wrong, and in vain; and what is agreed on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from losing import await_stopped, found, lose, work, works
from ranks import Job, Ranks, elapsed, wait_until
from thorough import parametrize

import hetcoll
from hetcoll import communicator
from hetcoll.config.env import Config
from hetcoll.rendezvous import decisions
from hetcoll.rendezvous.bootstrap import get_unique_id
from hetcoll.rendezvous.control import ControlClient
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.protocol.wire import Op
from hetcoll.rendezvous.store import server as store
from hetcoll.rendezvous.succession import Succession
from hetcoll.rendezvous.uplink import Uplink

Launch = Callable[..., Ranks]
TRANSPORTS = parametrize("transport", ["auto", "tcp"], first=1)


# Ranks 0 to `first` - 1 begin the job; the others are processes that come later.


def lose_and_regain(job: Job, first: int, victim: int, newcomers: int) -> tuple[int, int, int, str]:
    if job.rank >= first:
        comm = hetcoll.Communicator.join(job.unique_id, timeout=20)
    else:
        whole = hetcoll.Communicator.init(first, job.rank, job.unique_id, timeout=20)
        works(whole)
        lose(whole, victim)
        rest = whole.shrink()
        comm = rest.grow(newcomers, timeout=20)
        works(rest)  # it stays as it is
        rest.close()
        whole.close()
    works(comm)
    comm.barrier()
    return comm.rank, comm.size, comm.epoch, str(comm.topology.hosts)


@TRANSPORTS
@parametrize("newcomers", [1, 2], first=1)
def test_a_rank_that_died_is_replaced(launch: Launch, newcomers: int, transport: str) -> None:
    ranks = launch(3 + newcomers, join=False, HETCOLL_TRANSPORT=transport)
    ranks.start(lose_and_regain, 3, 1, newcomers)
    values = found(ranks, 1)
    size = 2 + newcomers
    assert sorted(value[0] for value in values.values()) == list(range(size))
    assert (values[0][0], values[2][0]) == (0, 1), "those that stay keep their order"
    assert {value[1:] for value in values.values()} == {(size, 2, str((tuple(range(size)),)))}


def grow_a_part(job: Job) -> tuple[int, int, float]:
    """Ranks 1 and 2 of three take rank 3 in; the whole communicator goes on."""
    if job.rank == 3:
        comm = hetcoll.Communicator.join(job.unique_id, timeout=20)
        works(comm)
        return comm.rank, comm.size, 0.0
    whole = hetcoll.Communicator.init(3, job.rank, job.unique_id, timeout=20)
    part = whole.split(int(job.rank > 0))
    assert part is not None
    if job.rank:
        part = part.grow(timeout=20)
    works(part)
    x = np.ones(1)
    whole.allreduce(x)
    whole.barrier()
    return part.rank, part.size, float(x[0])


def test_a_part_grows(launch: Launch) -> None:
    assert launch(4, join=False).run(grow_a_part) == [(0, 1, 3.0), (0, 3, 3.0), (1, 3, 3.0), (2, 3, 0.0)]


def grow_with_islands(job: Job) -> object:
    """A newcomer has in its environment what others were started with. Then rank 1 dies, and another one comes."""
    if job.rank < 2:
        old = hetcoll.Communicator.init(2, job.rank, job.unique_id, timeout=20)
        comm = old.grow(timeout=20)
        works(comm)
        lose(comm, 1)
        comm = comm.shrink().grow(timeout=20)
    else:
        comm = hetcoll.Communicator.join(job.unique_id, timeout=20)
        if comm.epoch == 1:
            works(comm)
            lose(comm, 1)
            comm = comm.shrink().grow(timeout=20)
    works(comm)
    return comm.topology.asked


def test_newcomers_are_islands_of_their_own_where_these_were_given_by_rank(launch: Launch) -> None:
    ranks = launch(4, join=False, HETCOLL_ISLANDS="1,0")
    ranks.start(grow_with_islands)
    assert set(found(ranks, 1).values()) == {((0,), (1,), (2,))}


def slow_to_follow(job: Job) -> tuple[int, int]:
    """Two ranks look again and again whether somebody is there. The third takes longer to come in than they look."""
    if job.rank < 2:
        comm = hetcoll.Communicator.init(2, job.rank, job.unique_id, timeout=60)
        while comm.size == 2:
            with contextlib.suppress(hetcoll.InitError):
                comm, old = comm.grow(timeout=0.1), comm
                old.close()
    else:
        come = decisions.come

        def slowly(*args: Any) -> Any:
            place = come(*args)
            time.sleep(1)
            return place

        decisions.come = slowly  # type: ignore[assignment]
        comm = hetcoll.Communicator.join(job.unique_id, timeout=60)
    works(comm)
    comm.barrier()
    return comm.rank, comm.size


def test_who_only_looks_for_newcomers_gives_them_time(launch: Launch) -> None:
    assert launch(3, join=False).run(slow_to_follow) == [(0, 3), (1, 3), (2, 3)]


def die(*args: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def one_dies_joining(job: Job, moment: str, taken: Path) -> tuple[int, int, float]:
    """Rank 2 is the first newcomer, and dies at a certain step; rank 3 is taken in its place."""

    def die_taken(*args: Any, **named: Any) -> Any:
        taken.touch()
        die()

    if job.rank == 2:
        if moment == "at once":
            communicator.Core = die_taken  # type: ignore[misc,assignment]
        else:
            exchange = ControlClient.exchange_columns

            def tell(self: Any, group: bytes, tag: bytes, *rest: Any) -> Any:
                return die_taken() if tag == moment.encode() else exchange(self, group, tag, *rest)

            ControlClient.exchange_columns = tell  # type: ignore[method-assign]
        hetcoll.Communicator.join(job.unique_id, timeout=20)
    if job.rank == 3:
        wait_until(taken.exists, 20)  # earlier, and it might be the first
        comm = hetcoll.Communicator.join(job.unique_id, timeout=20)
        works(comm)
        return comm.rank, comm.size, 0.0
    whole = hetcoll.Communicator.init(2, job.rank, job.unique_id, timeout=20)
    with elapsed() as took:
        comm = whole.grow(timeout=20)
    works(comm)
    works(whole)
    return comm.rank, comm.size, took[0]


@parametrize("moment", ["at once", "introduce", "epoch"], first=1)
def test_a_newcomer_dies_while_it_joins(launch: Launch, moment: str, tmp_path: Path) -> None:
    ranks = launch(4, join=False)
    ranks.start(one_dies_joining, moment, tmp_path / "taken")
    values = found(ranks, 2)
    assert [value[:2] for value in values.values()] == [(0, 3), (1, 3), (2, 3)]
    assert max(value[2] for value in values.values()) < 10


def one_dies_of_two(job: Job) -> list[str]:
    """Rank 1 dies while the others wait for a newcomer."""
    comm = hetcoll.Communicator.init(3, job.rank, job.unique_id, timeout=20)
    if job.rank == 1:
        wait_until(lambda: len(comm.session.control._groups) == 1)
        time.sleep(0.3)
        die()
    said = []
    with elapsed() as took, pytest.raises(hetcoll.PeerLostError) as caught:
        comm.grow(timeout=20)
    assert took[0] < 5
    assert caught.value.rank == 1
    said.append(str(caught.value))
    with pytest.raises(hetcoll.PeerLostError):
        comm.grow(timeout=20)
    works(comm.shrink())
    return said


def test_a_rank_dies_while_the_others_grow(launch: Launch) -> None:
    ranks = launch(3, join=False)
    ranks.start(one_dies_of_two)
    for (text,) in found(ranks, 1).values():
        assert text.startswith("rank 1 was lost: its process died")


def come_while_rank_0_dies(job: Job, pid: Path, noticed: Path) -> tuple[int, int, int]:
    """Rank 2 is a newcomer. Rank 0 is stopped when that says what it wants, and dies before it has read it. The next
    store begins when the newcomer has noticed."""
    find = Succession.find

    def find_after(self: Succession, *args: Any) -> UniqueId | None:
        if job.rank == 2:
            noticed.touch()
        wait_until(noticed.exists, 20)
        return find(self, *args)

    Succession.find = find_after  # type: ignore[method-assign]
    if job.rank == 2:
        wait_until(lambda: pid.exists() and pid.read_text(), 20)
        host, send = int(pid.read_text()), Uplink.send

        def send_to_the_dying(self: Uplink, op: Op, *rest: Any) -> None:
            Uplink.send = send  # type: ignore[method-assign]
            assert op == Op.ADMIT
            os.kill(host, signal.SIGSTOP)
            await_stopped(host)
            self.send(op, *rest)
            os.kill(host, signal.SIGKILL)

        Uplink.send = send_to_the_dying  # type: ignore[method-assign]
        comm = hetcoll.Communicator.join(job.unique_id, timeout=20)
    else:
        whole = hetcoll.Communicator.init(2, job.rank, job.unique_id, timeout=20)
        whole.agree()
        if job.rank == 0:
            pid.write_text(str(os.getpid()))
        with pytest.raises(hetcoll.PeerLostError):
            work(whole)
        comm = whole.shrink().grow(timeout=20)
        whole.close()
    works(comm)
    comm.barrier()
    return comm.rank, comm.size, comm.epoch


def test_a_newcomer_that_rank_0_did_not_hear_is_taken_in_by_the_next_store(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(3, join=False)
    ranks.start(come_while_rank_0_dies, tmp_path / "pid", tmp_path / "noticed")
    assert sorted(found(ranks, 0).values()) == [(0, 2, 2), (1, 2, 2)]


def grow_in_vain(comm: hetcoll.Communicator) -> list[str]:
    said = []

    def refused(count: int = 1, timeout: float = 0.5) -> None:
        with pytest.raises(hetcoll.InitError) as caught:
            comm.grow(count, timeout=timeout)
        said.append(str(caught.value))

    refused()
    if comm.rank != 2:
        refused()
    comm.barrier()
    if comm.rank == 2:
        refused()  # too late, with the same answer
    refused(1 if comm.rank == 1 else 2, 10)
    with pytest.raises(hetcoll.ArgumentError, match="newcomers: wanted 1 or more, got 0"):
        comm.grow(0)
    with pytest.raises(hetcoll.ArgumentError, match="timeout: wanted seconds above 0"):
        comm.grow(timeout=-1)
    works(comm)
    return said


def test_nobody_comes(launch: Launch) -> None:
    for first, second, third in launch(3).run(grow_in_vain):
        assert first.startswith("grow(1) found 0 newcomers within ")
        assert second.startswith("rank 2 never came to grow() within ")
        assert "wanted the same on all ranks" in third


def come_wrongly(job: Job, how: str) -> str:
    """Rank 2 comes with a wrong secret or setting; then as it should."""
    if job.rank < 2:
        comm = hetcoll.Communicator.init(2, job.rank, job.unique_id, timeout=20)
        said = ""
        if how == "setting":
            with pytest.raises(hetcoll.InitError) as caught:
                comm.grow(timeout=20)
            said = str(caught.value)
        else:
            with pytest.raises(hetcoll.InitError, match=r"grow\(1\) found 0 newcomers"):
                comm.grow(timeout=1.0)
        works(comm)
        return said
    unique_id = job.unique_id
    if how == "secret":
        unique_id = UniqueId(unique_id.addresses, unique_id.job_id, bytes(32))
    with pytest.raises(hetcoll.InitError) as refused:
        hetcoll.Communicator.join(unique_id, timeout=5)
    assert isinstance(refused.value, hetcoll.AuthenticationError) == (how == "secret")
    return str(refused.value)


@pytest.mark.parametrize("how", ["secret", "setting"])
def test_a_newcomer_is_held_to_the_same(launch: Launch, how: str) -> None:
    check = {"HETCOLL_INTEGRITY": ("off", "off", "all")} if how == "setting" else {}
    said = launch(3, join=False, **check).run(come_wrongly, how)
    if how == "setting":
        assert set(said) == {"HETCOLL_INTEGRITY is 'off' on rank 0 and 'all' on rank 2"}
    else:
        assert "secret" in said[2]


def join_in_vain(job: Job) -> str:
    if job.rank == 0:
        comm = hetcoll.Communicator.init(1, 0, job.unique_id, timeout=20)
        comm.barrier()
        return ""
    with elapsed() as took, pytest.raises(hetcoll.InitError) as caught:
        hetcoll.Communicator.join(job.unique_id, timeout=0.5)
    assert took[0] < 5
    return str(caught.value)


def test_nobody_takes_it_in(launch: Launch) -> None:
    said = launch(2, join=False).run(join_in_vain)[1]
    assert said.startswith("the job did not take this process in: grow() was not called for it within ")


def left_behind(job: Job, silent: int, done: Path) -> tuple[int, int, list[str], int]:
    """Rank 2 is stopped; the others shrink without it. When it runs again it is told so, and comes as a newcomer."""
    comm = hetcoll.Communicator.init(3, job.rank, job.unique_id, timeout=20)
    comm.allreduce(x := np.ones(50_000))
    comm.barrier()
    said = []
    if job.rank == silent:
        os.kill(os.getpid(), signal.SIGSTOP)
        with elapsed() as took, pytest.raises(hetcoll.PeerLostError) as caught:
            comm.allreduce(x)
        assert took[0] < 5
        assert caught.value.rank == silent
        said.append(str(caught.value))
        control, group = comm.session.control, comm._group
        for call in (
            comm.shrink,
            lambda: comm.agree(1),
            lambda: control.exchange(group, b"something", b"", 5),
            lambda: control.post_verdict(group, b"failed", b"[]"),
            lambda: control.decide(Op.GROW, (group, bytes(4), b"\1\0\0\0", b""), 5),
        ):
            with pytest.raises(hetcoll.InitError) as refused:
                call()
            said.append(str(refused.value))
        comm.close()
        comm = hetcoll.Communicator.join(job.unique_id, timeout=20)
    else:
        comm = comm.shrink(timeout=1.0)
        works(comm)
        done.touch()
        comm = comm.grow(timeout=20)
    works(comm)
    comm.barrier()
    return comm.rank, comm.size, said, comm.counters().get("stale_refused", -1)


@TRANSPORTS
def test_who_was_left_behind_is_refused_and_may_come_again(launch: Launch, transport: str, tmp_path: Path) -> None:
    ranks = launch(3, join=False, HETCOLL_TRANSPORT=transport)
    ranks.start(left_behind, 2, tmp_path / "done")
    wait_until((tmp_path / "done").exists, 20)
    ranks.signal(2, signal.SIGCONT)
    values = found(ranks)
    assert [value[:2] for value in values.values()] == [(0, 3), (1, 3), (2, 3)]
    first, *rest = values[2][2]
    assert "rank 2 was lost: it did not come to shrink() in time, and the others went on without it" in first
    assert set(rest) == {"rank 2 did not come to shrink() in time: the others went on without it"}
    assert values[0][3] >= len(rest)
    assert values[1][3] == -1


def test_a_newcomer_does_not_keep_the_store_of_a_job_that_ends() -> None:
    unique_id = get_unique_id(Config(linger=0), loopback=True)
    server = store._hosted[unique_id.job_id]
    member = ControlClient(unique_id, 0, 1, 10)
    newcomer = ControlClient(unique_id, 1, 1, 10, None, None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(decisions.come, newcomer, 20)
        wait_until(lambda: server._groups.rolls._lobby)
        assert not server._idle.is_set()
        member.close()
        wait_until(server._idle.is_set)
        server.close()
        with pytest.raises(hetcoll.PeerLostError, match="hosts the job's store has ended"):
            waiting.result(5)
    newcomer.close()


def test_nobody_joins_a_job_of_one() -> None:
    with pytest.raises(hetcoll.InitError, match="join: wanted RANK and WORLD_SIZE as the ranks of the job"):
        hetcoll.init(join=True)


# Agreement.


def agree(comm: hetcoll.Communicator) -> list[int]:
    with pytest.raises(hetcoll.ArgumentError, match="flag: wanted 64 bits"):
        comm.agree(1 << 63)
    if comm.rank == 1:  # what is refused there others have not called
        with pytest.raises(hetcoll.ArgumentError, match="timeout: wanted seconds above 0"):
            comm.agree(timeout=0)
    return [comm.agree(7 - comm.rank, timeout=20), comm.agree(-1), comm.agree(comm.rank != 1), comm.agree(1 << 62)]


def test_all_agree(launch: Launch) -> None:
    assert launch(3).run(agree) == [[7 & 6 & 5, -1, 0, 1 << 62]] * 3


def agree_though_one_dies(comm: hetcoll.Communicator) -> list[int]:
    """Rank 2 dies before, in and after an agreement, as it happens; the others always agree."""
    flags = []
    try:
        while True:
            flags.append(comm.agree(3 if comm.rank else 5))
            if comm.rank == 2 and len(flags) == 2:  # so that all have called it twice
                threading.Timer(0.3, die).start()
            comm.allreduce(np.ones(4))
    except hetcoll.PeerLostError:
        pass
    assert len(flags) > 1
    return [comm.agree(comm.rank + 2), *set(flags)]


def test_survivors_agree(launch: Launch) -> None:
    ranks = launch(4)
    ranks.start(agree_though_one_dies)
    values = found(ranks, 2)
    assert list(values.values()) == [[2 & 3 & 5, 3 & 5]] * 3


def disagree(comm: hetcoll.Communicator) -> str:
    """Rank 1 comes too late, and is told the same."""
    if comm.rank == 1:
        comm.recv(np.empty(1), 0)
    with pytest.raises(hetcoll.InitError) as caught:
        comm.agree(1, timeout=0.3)
    if comm.rank == 0:
        comm.send(np.ones(1), 1)
    comm.barrier()
    assert comm.agree(6) == 6
    return str(caught.value)


def test_who_does_not_come_to_agree_is_named(launch: Launch) -> None:
    assert set(launch(3).run(disagree)) == {"rank 1 never came to agree() within 0.3 s"}
