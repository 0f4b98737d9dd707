"""The tree of a large job: light ranks in one process, over real sockets, with relays of few children."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from light_ranks import SIZE, Job
from ranks import wait_until
from resetting import resets
from thorough import examples

from hetcoll.errors import AuthenticationError, InitError
from hetcoll.rendezvous import decisions
from hetcoll.rendezvous.connections import probe
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.rendezvous.protocol.news import Left, Lost, Query, StoreLost, Verdict
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.relay import Relay
from hetcoll.rendezvous.store import tree
from hetcoll.tools.observing import Observer, Told

pytestmark = pytest.mark.usefixtures("small_trees")


def test_everything_goes_through_relays_as_it_goes_without(job: Job) -> None:
    assert sum(each.client._uplink.behind for each in job.ranks) >= SIZE - 2 * tree.FAN
    assert max(each.serves for each in job.ranks) <= tree.FAN
    told = [b"%d" % rank for rank in range(SIZE)]
    assert [each.result(30) for each in job.exchange(b"t", job.ranks)] == [told] * SIZE
    last = job.ranks[-1].client
    assert last.query(WORLD, b"?", 20)[0] == dict(enumerate(told))
    assert last.post_verdict(WORLD, b"kind", b"why") == Verdict(b"kind", b"why", SIZE - 1)
    last.put(b"key", b"value")
    for each in job.ranks:
        each.wait_for(lambda event: event == Verdict(b"kind", b"why", SIZE - 1))
        assert each.client.get(b"key", 20) == b"value"
    half = [each for each in job.ranks if each.rank % 2]
    job.all([lambda e=e: e.client.join(b"half", e.rank // 2, len(half), e._hear) for e in half])  # type: ignore[misc]
    assert half[0].client.query(b"half", b"?", 20)[0] == {i: b"%d" % each.rank for i, each in enumerate(half)}
    half[1].client.leave(b"half")
    half[2].wait_for(lambda event: event == Left(1))
    assert job.store.holds().descriptors <= 2 * tree.FAN + 6


def test_who_looks_on_asks_through_relays_too(job: Job) -> None:
    looker = Observer(job.unique_id)
    try:
        told = looker.survey("?", 20)
        assert told == [Told(WORLD, rank, rank) for rank in range(SIZE)]
        a_relay = job.a_relay()
        a_relay.die()
        job.ranks[-1 if a_relay is not job.ranks[-1] else 0].wait_for(lambda event: isinstance(event, Lost))
        told = looker.survey("?", 20)
        assert [each.rank for each in told] == [rank for rank in range(SIZE) if rank != a_relay.rank]
    finally:
        looker.close()


def test_newcomers_come_through_relays_or_straight(job: Job) -> None:
    """All of a large job's members take two in: one behind a relay, one that does not know how large the job is."""

    def come(size: int) -> tuple[ControlClient, decisions.Place]:
        client = ControlClient(job.unique_id, 0, size, 30, lambda *_: b"new", None)
        stack.callback(client.close)
        return client, decisions.come(client, 30)

    def enter(client: ControlClient, place: decisions.Place) -> list[bytes]:
        client.join(place.group, place.rank, place.size, lambda *_: b"here", timeout=30)
        return client.exchange(place.group, b"t", b"%d" % place.rank, 30)

    with ExitStack() as stack:
        coming = [job.pool.submit(come, size) for size in (SIZE, 1)]
        members = [each.client for each in job.ranks]
        places = job.all([lambda c=c: decisions.grow(c, WORLD, 1, 2, b"told", 30) for c in members])  # type: ignore[misc]
        assert [place.rank for place in places] == list(range(SIZE))
        found = [*zip(members, places, strict=True), *(each.result(30) for each in coming)]
        assert {place.rank for _, place in found} == set(range(SIZE + 2))
        assert {(place.group, place.size, place.told) for _, place in found} == {(places[0].group, SIZE + 2, b"told")}
        assert {client._uplink.behind for client, _ in found[-2:]} == {True, False}
        told = [b"%d" % rank for rank in range(SIZE + 2)]
        assert job.all([lambda f=f: enter(*f) for f in found]) == [told] * (SIZE + 2)  # type: ignore[misc]
        flags = [lambda r=r, c=c: decisions.agree(c, WORLD, 1, 1 << r, 30) for r, c in enumerate(members)]  # type: ignore[misc]
        assert set(job.all(flags)) == {0}


@pytest.mark.parametrize("orderly", [True, False])
def test_all_hear_of_the_end_of_the_store(job: Job, orderly: bool) -> None:
    if orderly:
        job.store.close()
    else:
        for listener in job.store._acceptor._listeners:
            listener.close()
        socks = [each.sock for each in list(job.store._connections.values())]
        job.store._connections.clear()
        job.store._say_farewell = lambda: None  # type: ignore[method-assign]
        job.store._closing = True
        job.store._wake_write.send(b"\0")
        job.store._thread.join(10)
        for sock in socks:
            sock.close()
    for each in job.ranks:
        each.wait_for(lambda event: isinstance(event, StoreLost) and event.orderly is orderly)


@settings(max_examples=examples(3))
@given(seed=st.integers(0, 1 << 30))
def test_nobody_is_lost_where_connections_are_reset(seed: int) -> None:
    """To the store, to relays, and of relays."""
    with closing(Job()) as job:
        job.enter()

        def connections() -> list[socket.socket]:
            relays = [each.client._relay for each in job.ranks if each.client._relay is not None]
            ways = [each._up.sock for each in relays if each._up is not None]
            return ways + [each.client._uplink.sock for each in job.ranks]

        told = [b"%d" % rank for rank in range(SIZE)]
        with resets(connections, 0.02, seed) as count:
            for turn in range(5):
                assert [each.result(60) for each in job.exchange(b"%d" % turn, job.ranks)] == [told] * SIZE
                who = job.ranks[turn].client
                assert who.query(WORLD, b"?", 30)[0] == dict(enumerate(told))
                who.put(b"key", b"%d" % turn)
                assert job.ranks[-1].client.get(b"key", 30) == b"%d" % turn
            wait_until(lambda: count[0] > 20, 20)
        verdict = job.ranks[3].client.post_verdict(WORLD, b"kind", b"why")
        for each in job.ranks:
            each.wait_for(lambda event: event == verdict)
            assert [event for event in each.seen if not isinstance(event, Query)] == [verdict]


def test_a_relay_lets_in_who_knows_the_secret_and_nobody_else(job: Job) -> None:
    served = job.a_relay().client._relay
    assert served is not None
    token, places = served._token, served._entry.addresses
    stranger = UniqueId(job.unique_id.addresses, job.unique_id.job_id, bytes(32))
    with pytest.raises(AuthenticationError, match="different secrets"):
        probe.connect_relay(stranger, token, places, time.monotonic() + 10)
    with pytest.raises(InitError, match="another job's store"):
        probe.connect_relay(job.unique_id, bytes(16), places, time.monotonic() + 10)
    before = len(served._children)
    sock = probe.connect_relay(job.unique_id, token, places, time.monotonic() + 10)
    sock.sendall(b"\xff" * 64)  # a member that talks nonsense hurts nobody else
    sock.settimeout(20)
    while sock.recv(1000):
        pass
    sock.close()
    assert len(served._children) == before
    assert None not in job.ranks[0].client.query(WORLD, b"?", 20)[0].values()


def test_who_cannot_reach_a_relay_is_sent_to_another(job: Job) -> None:
    """A relay that was given an address which is nobody's."""
    nowhere = job.a_relay()
    assert nowhere.client._relay is not None
    node = next(n for n in job.store._tree._relays if n.entry.token == nowhere.client._relay._token)
    node.entry = node.entry._replace(addresses=(("127.0.0.1", 9),))
    for each in job.ranks:
        if each.client._uplink.behind:
            each.client._uplink.end()  # its connection is lost, and so is it
    late = Relay(job.unique_id, "127.0.0.1", SIZE, 20)
    deadline = time.monotonic() + 20
    while late._up is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert late._up is not None
    late.close()
