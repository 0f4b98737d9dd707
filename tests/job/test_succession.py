"""Rank 0 dies, and with it the job's store: another process serves the job, and those that are left go on."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from losing import await_stopped, found, lose, work, works
from ports import free_port
from ranks import Ranks, elapsed, wait_until
from resetting import reset
from thorough import parametrize

import hetcoll
from hetcoll import lifetime
from hetcoll.config.env import Config
from hetcoll.rendezvous import succession, uplink
from hetcoll.rendezvous.bootstrap import get_unique_id
from hetcoll.rendezvous.connections import sockets
from hetcoll.rendezvous.control import ControlClient
from hetcoll.rendezvous.protocol.news import Event, StoreLost
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.protocol.wire import WORLD
from hetcoll.rendezvous.store import server as store

Launch = Callable[..., Ranks]
TRANSPORTS = parametrize("transport", ["auto", "tcp"], first=1)


def lose_the_first(comm: hetcoll.Communicator, times: int) -> tuple[list[int], float]:
    """Rank 0 of what is left dies, so many times. The sizes from then on, and how long it took to go on."""
    sizes, longest = [], 0.0
    for _ in range(times):
        with elapsed() as took:
            lose(comm, 0)
            comm = comm.shrink()
        longest = max(longest, took[0])
        works(comm)
        sizes.append(comm.size)
    comm.barrier()
    return sizes, longest


@TRANSPORTS
@pytest.mark.calm
def test_rank_0_may_die_and_the_next_one_too(launch: Launch, transport: str) -> None:
    ranks = launch(5, HETCOLL_TRANSPORT=transport)
    ranks.start(lose_the_first, 3)
    for sizes, longest in found(ranks, 0, 1, 2).values():
        assert sizes == [4, 3, 2]
        assert longest < 5


def test_the_last_one_goes_on_alone(launch: Launch) -> None:
    ranks = launch(2)
    ranks.start(lose_the_first, 1)
    assert found(ranks, 0)[1][0] == [1]


@pytest.mark.thorough
def test_rank_0_of_a_large_job_may_die(launch: Launch) -> None:
    """Whose ranks reach the store through relays."""
    ranks = launch(36)
    ranks.start(lose_the_first, 1)
    assert {tuple(sizes) for sizes, _ in found(ranks, 0, seconds=60).values()} == {(35,)}


def go_on_without(comm: hetcoll.Communicator) -> int:
    """Who has nothing to do with rank 0 hears nothing of its death; questions are still answered."""
    part = comm.split(min(comm.rank, 1))
    assert part is not None
    part.barrier()
    if comm.rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    while not part.agree(comm._core.engine.failed):
        part.allreduce(np.ones(1000))
    works(part)
    inner = part.split(0)
    assert inner is not None
    if part.rank == 0:
        with pytest.raises(hetcoll.CollectiveTimeoutError, match="did not finish in"):
            inner.recv(np.empty(1), 1, timeout=0.5)
    part.barrier()
    return part.size


def test_others_do_not_notice(launch: Launch) -> None:
    ranks = launch(4)
    ranks.start(go_on_without)
    assert set(found(ranks, 0).values()) == {3}


def stop_the_first(comm: hetcoll.Communicator, who: Path) -> int:
    """The first successor is stopped when rank 0 dies."""
    pids = comm.allgather(np.array([os.getpid()]))
    succession._GREETS, succession._UNSURE_GRACE = 1.0, 4.0  # of 2 and 15 s
    known = comm._session.control._succession
    wait_until(lambda: len(known._order) == 3)
    comm.barrier()
    if known._order[0] == known._mine:
        who.write_text(str(comm.rank))
        os.kill(os.getpid(), signal.SIGSTOP)
    if comm.rank == 0:
        wait_until(lambda: who.exists() and who.read_text())
        await_stopped(pids[int(who.read_text()), 0])
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hetcoll.PeerLostError):
        work(comm)
    rest = comm.shrink()
    works(rest)
    return rest.size


@pytest.mark.slow
def test_a_successor_that_is_stopped_is_passed_over_by_more_than_half(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(5)
    ranks.start(stop_the_first, tmp_path / "first")
    wait_until(lambda: (tmp_path / "first").exists() and (tmp_path / "first").read_text(), 20)
    assert set(found(ranks, 0, int((tmp_path / "first").read_text())).values()) == {3}


def meet_a_stranger(comm: hetcoll.Communicator) -> int:
    """For the last one that is no first successor somebody listens where the store did, who does not greet."""
    known, lost = comm._session.control._succession, comm._session.control.unique_id.addresses
    wait_until(lambda: len(known._order) == 3)
    first = comm.allgather(np.array([known._order[0] == known._mine]))
    if comm.rank == max(rank for rank in range(1, comm.size) if not first[rank, 0]):
        serves, knock = succession._serves, succession._knock

        def wait_in_vain(unique_id: UniqueId, seconds: float) -> bool:
            if unique_id.addresses != lost:
                return serves(unique_id, seconds)
            time.sleep(max(0.0, seconds))
            return False

        succession._serves = wait_in_vain
        succession._knock = lambda address, until: (
            succession._Found.SILENT if address in lost else knock(address, until)
        )
    lose(comm, 0)
    rest = comm.shrink()
    works(rest)
    return rest.size


@pytest.mark.calm
def test_who_looks_for_the_lost_store_first_does_not_come_too_late(launch: Launch) -> None:
    ranks = launch(4)
    ranks.start(meet_a_stranger)
    assert set(found(ranks, 0).values()) == {3}


def find_strangers(comm: hetcoll.Communicator, live: bool) -> int:
    """Rank 1 finds somebody at each of the lost store's addresses, who does not greet. `live`: that may be the store,
    as far as its host says. How many ranks go on."""
    look, lost = succession._look, comm._session.control.unique_id.addresses
    strangers = contextlib.ExitStack()

    def find(unique_id: UniqueId, *rest: Any) -> Any:
        if unique_id.addresses == lost:
            for address in lost:
                strangers.enter_context(wait_until(partial(listening, address)))
        return look(unique_id, *rest)

    if comm.rank == 1:
        succession._look = find
        succession._UNSURE_GRACE = 1.0
        if live:
            succession.listens_locally = lambda _: True
    with strangers:
        try:
            lose(comm, 0)  # it may be gone before this rank has read that all have come
            rest = comm.shrink()
        except hetcoll.PeerLostError:
            return 0
        works(rest)
        return rest.size


def listening(address: tuple[str, int]) -> socket.socket | None:
    with contextlib.suppress(hetcoll.InitError):  # its last owner has yet to end
        return sockets.bind_all(address[:1], address[1])[0]
    return None


@pytest.mark.parametrize("live", [False, True])
def test_strangers_where_the_store_listened_say_nothing_of_it_and_its_host_does(launch: Launch, live: bool) -> None:
    """The only successor of two ranks goes on alone where the store is dead, and only there."""
    ranks = launch(2)
    ranks.start(find_strangers, live)
    assert found(ranks, 0) == {1: 0 if live else 1}


def is_first(comm: hetcoll.Communicator) -> bool:
    known = comm._session.control._succession
    wait_until(lambda: bool(known._order))
    return known._order[0] == known._mine


def hear_and_close(comm: hetcoll.Communicator) -> None:
    with pytest.raises(hetcoll.PeerLostError):
        work(comm)
    comm.close()


def test_who_comes_late_to_a_store_that_others_have_left_may_close(launch: Launch) -> None:
    ranks = launch(3)
    first = ranks.run(is_first).index(True)
    (late,) = {1, 2} - {first}
    ranks.signal(late, signal.SIGSTOP)
    ranks.start(hear_and_close, only=[first])
    ranks.kill(0)
    outcomes = ranks.finish(20, only=[first])
    ranks.signal(late, signal.SIGCONT)
    ranks.start(hear_and_close, only=[late])
    outcomes += ranks.finish(20, only=[late])
    assert not [outcome.problem() for outcome in outcomes if outcome.problem()]
    assert outcomes[-1].seconds < 10


def test_a_store_that_gives_up_has_not_died() -> None:
    """Those that it served do not take its place for that: most of the job may go on elsewhere."""
    seen = list[Event]()
    unique_id = get_unique_id(Config(linger=0), loopback=True)
    client = ControlClient(unique_id, 0, 1, 10, lambda _, event: seen.append(event))
    store._hosted[unique_id.job_id]._groups.successors.cut_off = "3 of 4 processes fell silent"
    with pytest.raises(hetcoll.HetcollError):
        client.get(b"nothing", 10)  # the frame wakes it
    assert wait_until(lambda: seen)[0] == StoreLost("3 of 4 processes fell silent", False, sure=False)
    client.close()


def test_a_way_to_the_store_that_timed_out_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gave it up, whatever patience the call had; the thread that reads finds another one."""
    send_all, sent = uplink.send_all, list[bytes]()

    def times_out(*args: Any) -> None:
        sent.append(args[1])
        if len(sent) == 1:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        send_all(*args)

    unique_id = get_unique_id(Config(linger=0), loopback=True)
    client = ControlClient(unique_id, 0, 1, 10)
    monkeypatch.setattr(uplink, "send_all", times_out)
    assert client.exchange(WORLD, b"t", b"x", 30) == [b"x"]
    assert sent[0] in sent[1:]
    client.close()
    store._hosted[unique_id.job_id].close()


def test_a_store_that_is_gone_is_not_waited_for() -> None:
    """Between the look whether a successor serves and the way to it, that may have ended: then there is another."""
    unique_id = get_unique_id(Config(linger=0), loopback=True)
    client = ControlClient(unique_id, 0, 1, 10)
    gone = replace(unique_id, addresses=(("127.0.0.1", free_port()),))
    with elapsed() as took, pytest.raises(hetcoll.InitError):
        client._uplink.move(gone, b"", time.monotonic() + 30)
    assert took[0] < 10
    client.close()
    store._hosted[unique_id.job_id].close()


def test_a_store_that_is_closed_while_it_begins_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process ends just then."""
    monkeypatch.setattr("hetcoll.lifetime.watch", lambda resource, *_: resource.close())
    before = set(threading.enumerate())
    get_unique_id(Config())
    wait_until(lambda: not set(threading.enumerate()) - before)


@pytest.mark.parametrize("where", [(threading.Thread, "start"), (lifetime, "watch")], ids=["start", "watch"])
def test_ctrl_c_while_a_store_begins_ends_it(monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]) -> None:
    begin, before = getattr(*where), set(threading.enumerate())

    def interrupted(*args: Any) -> None:
        begin(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            get_unique_id(Config())
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_a_successor_that_listens_where_the_store_died_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked first while the store's process ends, those addresses never refuse again: the next store has them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lost = UniqueId((listener.getsockname(),), bytes(16), bytes(32))
        answers = iter([False, True])
        monkeypatch.setattr(succession, "_serves", lambda *_: next(answers))
        member = succession.Succession(hosts=False)
        member._order = [(("127.0.0.1", 1),)]
        assert member.find(lost, StoreLost("reset", False), lambda: False) is lost
        assert member.certain


@pytest.mark.parametrize("vanished", [True, False])
def test_who_is_beside_a_store_whose_host_vanished_is_not_looked_for(
    monkeypatch: pytest.MonkeyPatch, vanished: bool
) -> None:
    """But where something there answers as yet, only the store may be stopped."""
    lost = UniqueId((("10.0.0.1", 1), ("127.0.0.1", 1)), bytes(16), bytes(32))
    beside, elsewhere = (("10.0.0.1", 2), ("127.0.0.1", 2)), (("10.0.0.2", 2), ("127.0.0.1", 2))
    looked = list[tuple[tuple[str, int], ...]]()

    def serves(unique_id: UniqueId, seconds: float) -> bool:
        looked.extend([unique_id.addresses] if unique_id.addresses not in looked else [])
        return unique_id.addresses == elsewhere

    def connect(address: tuple[str, int], _: float) -> socket.socket:
        if vanished and address[0] == "10.0.0.1":
            raise TimeoutError("timed out")
        if vanished:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return socket.socket()

    for name in ("_REFUSES", "_STILL_GREETS", "_GREETS"):
        monkeypatch.setattr(succession, name, 0.0)
    monkeypatch.setattr(succession, "_serves", serves)
    monkeypatch.setattr(socket, "create_connection", connect)
    member = succession.Succession(hosts=False)
    member._order = [beside, elsewhere]
    home = member.find(lost, StoreLost("connection timed out", False), lambda: False)
    assert home is not None
    assert looked == [lost.addresses, *([] if vanished else [beside]), elsewhere]


@pytest.mark.parametrize("sure", [True, False])
def test_a_store_that_fell_silent_may_have_gone_on_before_it_died(sure: bool) -> None:
    """That nobody listens there by now does not say that others have not gone on without this process."""
    lost = UniqueId((("127.0.0.1", free_port()),), bytes(16), bytes(32))
    member = succession.Succession(hosts=False)
    member._order = [(("127.0.0.1", free_port()),)]
    assert member.find(lost, StoreLost("connection timed out", False, sure), lambda: False) is None
    assert member.certain is sure


def test_a_store_that_ends_while_it_is_come_back_to_may_have_gone_on_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was silent, served again, and had ended before this process was there."""
    lost = UniqueId((("127.0.0.1", free_port()),), bytes(16), bytes(32))
    member = succession.Succession(hosts=False)
    member._order = [(("127.0.0.1", free_port()),)]
    with monkeypatch.context() as patch:
        patch.setattr(succession, "_serves", lambda *_: True)
        assert member.find(lost, StoreLost("connection timed out", False, sure=False), lambda: False) is lost
    assert member.find(lost, StoreLost("connection refused", False), lambda: False) is None
    assert not member.certain


def test_a_store_that_has_gone_on_without_this_process_has_not_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it says so, or nothing came for so long that it may have: then its end tells nothing of the others."""
    for silence, reason in (
        (0.0, "the job has gone on without this process"),
        (60.0, "connection reset by peer, and 60 s before that its host fell silent"),
    ):
        seen = list[Event]()
        unique_id = get_unique_id(Config(linger=0), loopback=True)
        server = store._hosted[unique_id.job_id]
        monkeypatch.setattr(uplink, "hosted_here", lambda _: None)
        monkeypatch.setattr(uplink, "silent_for", lambda _, seconds=silence: seconds)
        client = ControlClient(unique_id, 0, 1, 10, lambda _, event, seen=seen: seen.append(event))
        (node,) = server._tree._nodes.values()
        connection = node.connection
        assert connection is not None
        if silence:
            server._acceptor.close()  # nobody listens any more
        else:
            del server._tree._nodes[node.entry.token]  # as where it was lost
        reset(connection.sock)
        assert wait_until(lambda seen=seen: seen)[0] == StoreLost(reason, False, sure=False)
        client.close()
        server.close()


def test_a_host_that_vanished_before_the_connection_ended_fell_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sock = stack.enter_context(socket.create_connection(listener.getsockname()))
        peer = stack.enter_context(listener.accept()[0])
        acknowledged = time.monotonic()
        monkeypatch.setattr(sockets, "_KEEP_ALIVE", 0.1)
        assert wait_until(lambda: sockets.silent_for(sock)) <= time.monotonic() - acknowledged + 0.1
        reset(peer)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        assert sockets.silent_for(sock) > 0.2
        monkeypatch.setattr(sockets, "_KEEP_ALIVE", 5)
        assert sockets.silent_for(sock) == 0.0
