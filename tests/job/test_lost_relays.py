"""Relays that die, are slow, stopped or cut off, and what becomes of those behind them: see test_tree.py."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from contextlib import ExitStack, closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from light_ranks import SIZE, Job, Light
from ranks import wait_until
from thorough import examples

from hetcoll.errors import InitError, PeerLostError
from hetcoll.rendezvous import relay, uplink
from hetcoll.rendezvous.connections import sockets
from hetcoll.rendezvous.control import WORLD
from hetcoll.rendezvous.protocol.news import Left, Lost, StoreLost, Verdict
from hetcoll.rendezvous.protocol.wire import Op
from hetcoll.rendezvous.relay import Relay
from hetcoll.rendezvous.store import server as store
from hetcoll.rendezvous.store import tree

pytestmark = pytest.mark.usefixtures("small_trees")
PHASES = ("nothing", "an exchange", "a question", "a verdict", "goodbyes")


@settings(max_examples=examples(4))
@given(phase=st.sampled_from(PHASES), deep=st.booleans(), which=st.integers(0, 7))
def test_a_relay_that_dies_is_lost_and_nobody_else(phase: str, deep: bool, which: int) -> None:
    with closing(Job()) as job:
        job.enter()
        relays = [each for each in job.ranks if each.serves and each.client._uplink.behind == deep] or [job.a_relay()]
        dead = relays[which % len(relays)]  # how many there are, timing decides
        others = [each for each in job.ranks if each is not dead]
        waiting: list[Future[list[bytes]]] = []
        asked: Future[dict[int, bytes | None]] | None = None
        gone: list[Light] = []
        if phase == "an exchange":
            waiting = job.exchange(b"t", others)
        elif phase == "a question":
            asked = job.pool.submit(others[0].client.query, WORLD, b"?", 20)
        elif phase == "a verdict":
            job.pool.submit(others[0].client.post_verdict, WORLD, b"kind", b"why")
        elif phase == "goodbyes":
            gone = others[::2]
            for each in gone:
                job.pool.submit(each.client.close)
        dead.die()
        left = [each for each in others if each not in gone]
        for each in left:
            each.wait_for(lambda event: isinstance(event, Lost))
        for future in waiting:
            with pytest.raises(PeerLostError) as error:
                future.result(30)
            assert error.value.rank == dead.rank
        answers, _ = left[-1].client.query(WORLD, b"?", 20)
        for each in gone:  # who is still about to leave answers
            assert answers.pop(each.rank) in (None, b"%d" % each.rank)
        assert answers == {dead.rank: None, **{each.rank: b"%d" % each.rank for each in left}}
        if asked is not None:
            there, _ = asked.result(30)
            assert all(there[each.rank] == b"%d" % each.rank for each in others)
        for each in left:
            if phase == "a verdict":
                each.wait_for(lambda event: event == Verdict(b"kind", b"why", others[0].rank))
            assert {event.rank for event in each.seen if isinstance(event, Lost)} == {dead.rank}
            assert not [event for event in each.seen if isinstance(event, StoreLost)]
            for rank in [other.rank for other in gone]:
                each.wait_for(lambda event, rank=rank: event == Left(rank))  # type: ignore[misc]


def test_a_relay_that_ends_in_order_costs_nobody_anything(job: Job) -> None:
    left = job.a_relay()
    left.client.close()
    assert left.client._relay is not None
    left.client._relay.close()  # its process ends as well
    others = [each for each in job.ranks if each is not left]
    answers, _ = others[0].client.query(WORLD, b"?", 20)
    assert [rank for rank, answer in answers.items() if answer is None] == [left.rank]
    for each in others:
        each.wait_for(lambda event: event == Left(left.rank))
        assert not [event for event in each.seen if isinstance(event, Lost)]


def test_who_leaves_a_relay_that_is_slow_is_missing_and_not_lost(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay sees that connection break before the store hears where its child is now; which may be elsewhere."""
    held = job.a_relay().client._relay
    assert held is not None
    (address,) = held._entry.addresses
    leaver, other, *_ = (each for each in job.ranks if each.client._uplink.sock.getpeername() == address)
    way, go_on, silent = leaver.client._uplink, threading.Event(), [True]
    come, read, children = way._come, way._read, len(held._children)

    def come_late(deadline: float, *, again: bool) -> uplink.Place:
        go_on.wait(60)
        return come(deadline, again=again)

    def hear_nothing() -> bytes | None:
        if silent.pop() if silent else False:
            raise TimeoutError("a relay said nothing")
        return read()

    monkeypatch.setattr(way, "_come", come_late)
    monkeypatch.setattr(way, "_read", hear_nothing)  # the next time: a beat of the relay ends this one
    wait_until(lambda: len(held._children) < children, 30)
    wait_until(lambda: way._token in job.store._tree._missing)
    other.client.put(b"key", b"through the same relay, behind what it has to say")
    go_on.set()
    answers, _ = job.ranks[0].client.query(WORLD, b"?", 30)
    assert answers == {rank: b"%d" % rank for rank in range(SIZE)}
    assert not [event for event in job.ranks[0].seen if isinstance(event, Lost)]


def behind_one(job: Job) -> tuple[Relay, dict[Light, socket.socket]]:
    """A relay, and who is behind it with what connection."""
    held = job.a_relay().client._relay
    assert held is not None
    ways = ((each, each.client._uplink.sock) for each in job.ranks)
    return held, {each: sock for each, sock in ways if sock.getpeername() == held._entry.addresses[0]}


def test_a_relay_that_is_slow_while_the_job_starts_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a thousand processes come to few cores: it lives, and there is time. Later nobody waits so long."""
    monkeypatch.setattr(uplink, "SILENCE", 1.0)
    with closing(Job()) as job, ExitStack() as stack:
        job.enter()
        held, before = behind_one(job)
        turn, go_on = held._turn, threading.Event()
        stack.callback(go_on.set)
        monkeypatch.setattr(held, "_turn", lambda: go_on.wait(60) and turn())
        wait_until(lambda: all(time.monotonic() > each.client._uplink._heard + 3.0 for each in before), 6)
        assert before
        assert {each: each.client._uplink.sock for each in before} == before
        go_on.set()
        told = [future.result(40) for future in job.exchange(b"start", job.ranks)]
        assert told == [[b"%d" % rank for rank in range(SIZE)]] * SIZE
        go_on.clear()
        wait_until(lambda: all(each.client._uplink.sock is not sock for each, sock in before.items()))


def test_who_is_late_itself_does_not_leave_its_relay(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the relay has said meanwhile is there to be read."""
    _, before = behind_one(job)
    (late, sock), *_ = before.items()
    way, was_late = late.client._uplink, threading.Event()
    watch, felt = way._pulse.watch, way._pulse.is_felt

    def feel(ready: list[tuple[int, int]]) -> bool:
        if not ready and not was_late.is_set():
            assert select.select([sock], [], [], 30)[0]  # a beat of the relay
            way._heard -= 60.0
            was_late.set()
        return felt(ready)

    monkeypatch.setattr(way._pulse, "watch", lambda poll: watch(poll) if was_late.is_set() else 0.0)
    monkeypatch.setattr(way._pulse, "is_felt", feel)
    wait_until(lambda: was_late.is_set() and way._heard > time.monotonic() - 30.0, 20)
    assert way.sock is sock


@pytest.mark.slow
def test_a_relay_that_is_stopped_is_left(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for future in job.exchange(b"start", job.ranks):
        future.result(40)
    stopped, go_on = job.a_relay(), threading.Event()
    held = stopped.client._relay
    assert held is not None
    behind = [each for each in job.ranks if each.client._uplink.behind]
    before = {each.rank: each.client._uplink.sock for each in behind}
    monkeypatch.setattr(uplink, "SILENCE", 2.0)  # of threads of one process, which wait for their turn
    monkeypatch.setattr(relay, "BEAT", 0.2)
    monkeypatch.setattr(held, "_turn", lambda: go_on.wait(60))
    held._wake()
    children = held._children
    deadline = time.monotonic() + 60
    served = len(children)
    while sum(each.client._uplink.sock is not before[each.rank] for each in behind) < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    answers: dict[int, bytes | None] = {}
    while None in (answers or {0: None}).values() and time.monotonic() < deadline:
        answers, _ = job.ranks[0].client.query(WORLD, b"?", 3)
    monkeypatch.undo()
    go_on.set()
    assert served
    assert answers == {rank: b"%d" % rank for rank in range(SIZE)}
    assert not [event for each in job.ranks for event in each.seen if isinstance(event, Lost | StoreLost)]


def test_a_relay_that_was_given_up_too_early_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store heard nothing of a relay behind a relay, whose children did: all of them are kept."""
    monkeypatch.setattr(tree, "SILENCE", 1.0)
    monkeypatch.setattr(tree, "ABSENCE", 4.0)
    with closing(Job(32)) as job:
        job.enter()
        node = wait_until(lambda: next((n for n in job.store._tree._relays if n.parent and n.children), None), 20)
        relays = (each.client._relay for each in job.ranks)
        held = next(r for r in relays if r is not None and r._token == node.entry.token)
        assert held._up is not None
        up, beat = held._up, held._up.send
        monkeypatch.setattr(up, "send", lambda op, *rest: None if op == Op.BEAT else beat(op, *rest))
        wait_until(lambda: node.way() is None, 20)
        monkeypatch.setattr(up, "send", beat)
        wait_until(lambda: node.way() is not None, 20)
        until = time.monotonic() + 4.0  # who is missing would be lost by then
        while time.monotonic() < until:
            answers, _ = job.ranks[0].client.query(WORLD, b"?", 20)
            assert answers == {rank: b"%d" % rank for rank in range(32)}
            time.sleep(0.1)  # so often is enough to see who is missing
        assert not [event for each in job.ranks for event in each.seen if isinstance(event, Lost)]


def test_who_dies_with_its_relay_is_lost_when_it_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "ABSENCE", 3.0)
    with closing(Job()) as job:
        job.enter()
        first = job.a_relay()
        assert first.client._relay is not None
        nodes = [node for node in job.store._tree._nodes.values() if node.entry.kind is uplink.Kind.MEMBER]
        parent = next(n for n in job.store._tree._relays if n.entry.token == first.client._relay._token)
        victim = next((job.ranks[n.ranks[WORLD]] for n in nodes if n.parent is parent), None)
        if victim is None:
            pytest.skip("only relays are behind it")
        victim.client._uplink._over = True
        first.die()
        others = [each for each in job.ranks if each not in (first, victim)]
        for each in others:
            each.wait_for(lambda event: isinstance(event, Lost) and event.rank == first.rank)
            each.wait_for(lambda event: isinstance(event, Lost) and event.rank == victim.rank)
            assert {event.rank for event in each.seen if isinstance(event, Lost)} == {first.rank, victim.rank}


def test_who_is_behind_a_relay_whose_host_vanished_is_missing_since_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that vanished with it is lost as soon as one with a connection of its own."""
    with closing(Job()) as job:
        job.enter()
        first = job.a_relay()
        assert first.client._relay is not None
        token = first.client._relay._token
        monkeypatch.setattr(store, "silent_for", lambda _: sockets._VANISHED)
        first.die()
        until = wait_until(lambda: job.store._tree._missing.get(token))
        assert until - time.monotonic() <= 30.0 - sockets._VANISHED


def test_who_is_behind_relays_hears_that_the_store_fell_silent_to_them(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And looks for it no longer than they did."""
    time_to_return, looks, relays = uplink.time_to_return, defaultdict[str, list[float]](list), threading.Event()

    def time_to_look(error: Exception) -> float:
        seconds = time_to_return(error)
        looks[threading.current_thread().name].append(seconds)
        return seconds

    def come(*_: object, **__: object) -> None:
        relays.set()
        raise InitError("it does not answer")

    behind = sum(each.client._uplink.behind for each in job.ranks)
    monkeypatch.setattr(uplink, "time_to_return", time_to_look)
    monkeypatch.setattr(Relay, "_come", come)
    monkeypatch.setattr(relay, "until_vanished", lambda _: 0.0)
    wait_until(lambda: len(looks["hetcoll-control"]) >= behind)
    assert behind > 0
    assert relays.is_set()
    assert set(looks["hetcoll-control"][:behind]) == {uplink._LAST_TRY}
    assert set(looks["hetcoll-relay"]) == {uplink._LAST_TRY}
    for each in job.ranks:
        each.die()
