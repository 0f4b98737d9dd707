"""What becomes of one connection to the store that is reset, whoever notices, whatever was on its way."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from members import Events, first_line, in_parallel, join_all, member
from ranks import wait_until
from resetting import reset, vanish

from hetcoll.config.env import Config
from hetcoll.errors import AuthenticationError, InitError
from hetcoll.rendezvous import uplink
from hetcoll.rendezvous.bootstrap import get_unique_id
from hetcoll.rendezvous.connections import pulse
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.rendezvous.protocol.news import Left, Lost, StoreLost
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.protocol.wire import Op
from hetcoll.rendezvous.store import server as store
from hetcoll.rendezvous.store import tree

may_vanish = pytest.mark.skipif(os.geteuid() != 0, reason="it takes CAP_NET_ADMIN")


@pytest.fixture
def unique_id() -> Iterator[UniqueId]:
    made = get_unique_id(Config(linger=0), loopback=True)
    yield made
    store._hosted[made.job_id].close()


def node_of(unique_id: UniqueId, rank: int) -> tree.Node:
    nodes = store._hosted[unique_id.job_id]._tree._nodes.values()
    return next(each for each in nodes if each.ranks.get(WORLD) == rank)


def end_of(unique_id: UniqueId, rank: int) -> socket.socket:
    """The store's end of its connection."""
    connection = node_of(unique_id, rank).connection
    assert connection is not None
    return connection.sock


@contextlib.contextmanager
def beside_stopped(unique_id: UniqueId) -> Iterator[tuple[ControlClient, Events, subprocess.Popen[str]]]:
    """Rank 0 here, and rank 1 as a process that is stopped."""
    events = Events(0)
    client = ControlClient(unique_id, 0, 2, 20, events)
    with member(1, 2, unique_id) as process:
        first_line(process)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield client, events, process
    client.close()


@pytest.mark.parametrize("break_it", [reset, pytest.param(vanish, marks=may_vanish)])
@pytest.mark.parametrize("side", ["the store's", "the member's", "both"])
def test_whoever_notices_it_is_made_again_soon(
    unique_id: UniqueId, break_it: Callable[[socket.socket], None], side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only one end is left it hears of it by the next word: of the store's pulse, at the latest."""
    monkeypatch.setattr(uplink, "hosted_here", lambda _: None)  # each rank a process of its own
    clients, events = join_all(unique_id, 3)
    for turn in range(5):
        before = end_of(unique_id, 1)
        if side != "the member's":
            break_it(before)
        if side != "the store's":
            break_it(clients[1]._uplink.sock)
        start = time.monotonic()
        if side == "the member's":  # as it has something to say; else keep-alive tells it, after seconds
            clients[1].put(b"key", b"%d" % turn)
        assert clients[0].query(WORLD, b"?", 20)[0] == {rank: b"answer of %d" % rank for rank in range(3)}
        wait_until(lambda before=before: end_of(unique_id, 1) is not before)  # type: ignore[misc]
        assert time.monotonic() - start < 3  # and no keep-alive, which comes after 5 s
        told = in_parallel([lambda c=c, t=turn: c.exchange(WORLD, b"%d" % t, b"x", 20) for c in clients])  # type: ignore[misc]
        assert told == [[b"x"] * 3] * 3
    assert not [event for each in events for event in each.seen if isinstance(event, Lost | StoreLost)]
    in_parallel([client.close for client in clients])


def test_what_is_told_meanwhile_comes_afterwards(unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch) -> None:
    """News and replies, once each and in order."""
    monkeypatch.setattr(uplink, "hosted_here", lambda _: None)
    clients, events = join_all(unique_id, 3)
    come = clients[1]._uplink._come
    gate = threading.Event()

    def late(deadline: float, *, again: bool) -> uplink.Place:
        gate.wait(20)
        return come(deadline, again=again)

    monkeypatch.setattr(clients[1]._uplink, "_come", late)
    reset(end_of(unique_id, 1))
    wait_until(lambda: node_of(unique_id, 1).connection is None)
    for number in range(200):
        clients[0].put(b"%d" % number, b"value")
    clients[2].close()
    verdict = clients[0].post_verdict(WORLD, b"kind", b"why")
    gate.set()
    events[1].wait_for(lambda event: event == verdict)
    events[1].wait_for(lambda event: event == Left(2))
    assert clients[1].get(b"199") == b"value"
    assert sorted(type(event).__name__ for event in events[1].seen) == ["Left", "Verdict"]
    in_parallel([client.close for client in clients])


def test_what_came_counts_once_where_the_word_for_it_breaks(
    unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has come to this process, so the store does not send it again."""
    client = ControlClient(unique_id, 0, 1, 20)
    tell, broken = client._uplink._tell, list[Op]()

    def break_first(op: Op) -> None:
        if op == Op.ACK:
            reset(client._uplink.sock)
            broken.append(op)
        tell(op)

    monkeypatch.setattr(client._uplink, "_tell", break_first)
    for number in range(200):
        client.put(b"%d" % number, b"value", 10)
    assert len(broken) >= 3
    client.close()


@pytest.mark.parametrize("part", [0, 1, 2])
def test_ctrl_c_in_the_middle_of_a_frame_costs_a_connection(
    unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """The rest of the frame would be missing, or its number; over the next connection it comes as a whole."""
    monkeypatch.setattr(uplink, "hosted_here", lambda _: None)
    clients, events = join_all(unique_id, 2)
    before, send_all, come = end_of(unique_id, 1), uplink.send_all, clients[1]._uplink._come_again
    told = threading.Event()  # the next frame, before the thread that reads has found another way

    def late(error: OSError) -> bool:
        told.wait(20)
        return come(error)

    monkeypatch.setattr(clients[1]._uplink, "_come_again", late)

    def interrupted(sock: socket.socket, data: bytes, deadline: float) -> None:
        monkeypatch.setattr(uplink, "send_all", send_all)
        send_all(sock, data[: len(data) * part // 2], deadline)
        raise KeyboardInterrupt

    monkeypatch.setattr(uplink, "send_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        clients[1].put(b"first", b"value", 10)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(clients[1].put, b"second", b"value", 10)
        wait_until(lambda: len(clients[1]._uplink._asked) == 1)
        with clients[1]._uplink._lock:  # it has been sent, or kept
            told.set()
        second.result(20)
    assert [clients[0].get(key, 10) for key in (b"first", b"second")] == [b"value"] * 2
    assert end_of(unique_id, 1) is not before
    assert not [event for each in events for event in each.seen]
    in_parallel([client.close for client in clients])


def test_who_is_killed_with_news_unread_is_named_at_once(unique_id: UniqueId) -> None:
    """The kernel resets the connection then, as a firewall would."""
    with beside_stopped(unique_id) as (client, events, process):
        client.post_verdict(WORLD, b"kind", b"it does not read this")
        wait_until(lambda: not node_of(unique_id, 1).connection.queue)  # type: ignore[union-attr]
        process.kill()
        killed = time.monotonic()
        lost = events.wait_for(lambda e: isinstance(e, Lost))
        assert time.monotonic() - killed < 2
    assert isinstance(lost, Lost)
    assert lost.rank == 1
    assert "its process died: connection reset by peer, and nobody listens at 127.0.0.1:" in lost.reason


def test_who_dies_after_its_connection_broke_is_named_soon(unique_id: UniqueId) -> None:
    with beside_stopped(unique_id) as (_, events, process):
        reset(end_of(unique_id, 1))
        node = node_of(unique_id, 1)
        wait_until(lambda: node.connection is None)
        assert not [event for event in events.seen if isinstance(event, Lost)]
        process.kill()
        killed = time.monotonic()
        events.wait_for(lambda e: isinstance(e, Lost))
        assert time.monotonic() - killed < 2


def test_who_does_not_come_back_is_lost(unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "ABSENCE", 1.0)
    with beside_stopped(unique_id) as (_, events, process):
        reset(end_of(unique_id, 1))
        lost = events.wait_for(lambda e: isinstance(e, Lost))
        assert lost == Lost(1, "its connection broke, and it did not come back within 1 s")
        process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def beside_silent(unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Events, threading.Event]]:
    """What rank 0 hears of rank 1, whose connection was reset, and whose pulse neither answers nor refuses. It comes
    back when the event is set."""
    monkeypatch.setattr(uplink, "hosted_here", lambda _: None)
    clients, events = join_all(unique_id, 2)
    come, over = clients[1]._uplink._come, threading.Event()

    def late(deadline: float, *, again: bool) -> uplink.Place:
        over.wait(20)
        return come(deadline, again=again)

    monkeypatch.setattr(clients[1]._uplink, "_come", late)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())  # which takes no connection any more, and says nothing
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        node = node_of(unique_id, 1)
        node.entry = node.entry._replace(addresses=(full.getsockname(),))
        reset(end_of(unique_id, 1))
        yield events[0], over
    over.set()
    in_parallel([client.close for client in clients])


def test_whose_host_does_not_answer_is_lost(unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_ANSWER", 0.5)
    with beside_silent(unique_id, monkeypatch) as (events, _):
        lost = events.wait_for(lambda e: isinstance(e, Lost))
        assert isinstance(lost, Lost)
        assert "and its host does not answer" in lost.reason


def test_a_pulse_that_is_reset_when_it_was_felt_costs_the_store_nothing(
    unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the kernel's word that it connected and the look at whom it connected to."""
    judge, broken = pulse.Pulses._judge, list[bytes]()

    def judge_late(self: pulse.Pulses, token: bytes, patient: pulse._Patient, code: int = 0) -> None:
        if patient.sock is not None:
            assert patient.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            reset(patient.sock)
            patient.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # the kernel tells it once
            broken.append(token)
        judge(self, token, patient, code)

    monkeypatch.setattr(pulse.Pulses, "_judge", judge_late)
    with beside_stopped(unique_id) as (client, events, process):
        reset(end_of(unique_id, 1))
        wait_until(lambda: len(broken) > 2)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: node_of(unique_id, 1).connection)
        assert client.query(WORLD, b"?", 10)[0] == {0: b"answer of 0", 1: b"here"}
        assert not [event for event in events.seen if isinstance(event, Lost | StoreLost)]


def test_a_pulse_that_is_reset_too_is_felt_again(unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch) -> None:
    with beside_silent(unique_id, monkeypatch) as (events, over):
        node, patients = node_of(unique_id, 1), store._hosted[unique_id.job_id]._tree.pulses._patients
        for _ in range(3):
            felt = wait_until(lambda: [each.sock for each in patients.values() if each.sock is not None])[0]
            reset(felt)
            wait_until(lambda felt=felt: all(each.sock is not felt for each in patients.values()))  # type: ignore[misc]
        over.set()
        wait_until(lambda: node.connection)
        assert not [event for event in events.seen if isinstance(event, Lost)]


def test_a_goodbye_over_a_connection_that_is_reset_is_one(unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "hosted_here", lambda _: None)
    for _ in range(5):
        clients, events = join_all(unique_id, 2)
        reset(end_of(unique_id, 1))
        clients[1].close()
        events[0].wait_for(lambda event: event == Left(1))
        assert not [event for event in events[0].seen if isinstance(event, Lost)]
        clients[0].close()


def test_a_newcomer_whose_store_ends_as_it_enters_looks_for_the_next(
    unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process had accepted the connection, and read nothing. Who is of the job has other ways to find the next."""
    knock, knocks = uplink._knock, list[socket.socket]()

    def ended_first(sock: socket.socket, *rest: Any) -> Any:
        knocks.append(sock)
        if len(knocks) > 1:
            return knock(sock, *rest)
        sock.close()
        raise ConnectionResetError("it closed the connection")

    monkeypatch.setattr(uplink, "_knock", ended_first)
    ControlClient(unique_id, 0, 1, 20, group=None).close()
    assert len(knocks) == 2
    knocks.clear()
    with pytest.raises(InitError, match="it closed the connection"):
        ControlClient(unique_id, 0, 1, 20)


def test_a_stranger_does_not_take_a_stream_over(unique_id: UniqueId) -> None:
    """Who knows its token has to prove the secret, and to come later than whom it belongs to."""
    client = ControlClient(unique_id, 0, 1, 20)
    token = client._uplink._token
    entry = uplink.Entry(uplink.Kind.MEMBER, token, 1, received=2)
    with pytest.raises(AuthenticationError):
        uplink.enter(replace(unique_id, secret=bytes(32)), entry, time.monotonic() + 10)
    assert client.exchange(WORLD, b"t", b"x", 10) == [b"x"]
    with pytest.raises(InitError, match="gone on without this process"):
        uplink.enter(unique_id, entry._replace(token=bytes(16)), time.monotonic() + 10)
    assert client.exchange(WORLD, b"u", b"x", 10) == [b"x"]
    client.close()


def test_strangers_at_the_pulse_cost_little(unique_id: UniqueId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "hosted_here", lambda _: None)
    clients, _ = join_all(unique_id, 2)
    (place,) = node_of(unique_id, 1).entry.addresses
    told: list[Any] = []
    tell = clients[1]._uplink._tell
    monkeypatch.setattr(clients[1]._uplink, "_tell", lambda op: (told.append(op), tell(op)))
    start = time.monotonic()
    for _ in range(500):
        socket.create_connection(place, 5).close()
    took = time.monotonic() - start
    assert clients[0].query(WORLD, b"?", 20)[0] == {0: b"answer of 0", 1: b"answer of 1"}
    assert len(told) <= 2 + took / pulse._REST
    in_parallel([client.close for client in clients])
