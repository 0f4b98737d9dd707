"""What a job's store tells its members of its successors, and when."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from heard import Heard, count
from ranks import wait_until

from hetcoll.rendezvous import succession
from hetcoll.rendezvous.connections.members import ENDED, Connection
from hetcoll.rendezvous.protocol.keys import Member
from hetcoll.rendezvous.protocol.news import StoreLost
from hetcoll.rendezvous.protocol.routes import pack_up
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.protocol.wire import F64, Frame, FrameReader, Op, Status, pack, unpack
from hetcoll.rendezvous.store import server as store
from hetcoll.rendezvous.store.groups import Groups
from hetcoll.rendezvous.store.returns import Claim
from hetcoll.rendezvous.store.successors import Successors
from hetcoll.rendezvous.store.tree import Tree
from hetcoll.rendezvous.uplink import TOKEN_BYTES, Entry, Kind, pack_places


def test_a_job_that_goes_on_knows_its_successors_though_a_newcomer_has_not_answered() -> None:
    later = list[Callable[[], None]]()
    successors = Successors(pack((b"charge",)), lambda _, action: later.append(action))
    host, rank, newcomer = Heard("rank 0", world=0), Heard("rank 1", world=1), Heard("a newcomer")
    successors.add(host, hosts=True)
    successors.add(rank)
    successors.stand(rank, 0, b"", b"where rank 1 listens")
    successors.add(newcomer)
    assert [op for op, _ in newcomer.told] == [Op.STAND]
    successors.begin([host, rank])
    for member in (host, rank, newcomer):
        op, body = member.told[-1]
        assert (op, unpack(body)) == (Op.SUCCESSORS, [count(1), b"where rank 1 listens"]), "of no group"
    successors.stand(newcomer, 0, b"", b"where it does")
    assert unpack(rank.told[-1][1])[1:] == [b"where rank 1 listens", b"where it does"]
    newcomer.ranks[b"larger"] = 2
    successors.add(newcomer)
    for action in later:
        action()
    assert unpack(rank.told[-1][1])[0] == count(2), "or two parts of it might both be more than half of the old one"


def test_who_comes_to_a_store_late_is_counted() -> None:
    """Others go by the number that it told whether they are more than half."""
    later = list[Callable[[], None]]()
    successors = Successors(pack((b"charge",)), lambda _, action: later.append(action))
    host, first, late = Heard("rank 0", world=0), Heard("rank 1", world=1), Heard("rank 2", world=2)
    for member in (host, first):
        successors.take_back(member, member is host, b"where it listens", b"")
    successors.confirm()
    successors.release()
    assert unpack(first.told[-1][1])[0] == count(1)
    successors.take_back(late, False, b"where it does", b"")
    successors.confirm()
    later.pop()()
    assert unpack(first.told[-1][1])[0] == count(2)


def test_all_go_by_one_list_until_nobody_is_left_who_could_go_by_the_old_one() -> None:
    """Else a successor that has yet to come here, and who is asked in its place, might both serve."""
    successors = Successors(pack((b"charge",)), lambda _, action: None)
    old = pack((count(3), b"where rank 1 listens", b"where rank 2 does"))
    host, first = Heard("rank 1", world=1), Heard("rank 3", world=3)
    for member in (host, first):
        successors.take_back(member, member is host, b"", old)
    successors.confirm()
    assert first.told == [(Op.SUCCESSORS, b"")]
    successors.release()
    assert [op for op, _ in first.told[1:]] == [Op.STAND]
    successors.stand(first, 0, b"", b"where rank 3 does")
    assert unpack(first.told[-1][1]) == [count(2, 1), b"where rank 3 does"], "rank 2 may yet come"


@pytest.mark.parametrize(
    ("hosts", "asked", "chosen"),
    [(["", "", "", "", "", "b", "b", "c"], "12357", "157"), (["", "b", "b", "b", "c", ""], "12345", "514")],
)
def test_one_successor_is_on_the_host_of_the_store_and_others_elsewhere(
    hosts: list[str], asked: str, chosen: str
) -> None:
    """A host that dies takes no more than one with it, and whoever is beside the store does not look in vain."""
    successors = Successors(pack((b"charge",)), lambda _, action: None)
    successors.host_of = lambda member: hosts[int(member.name)]
    ranks = [Heard(str(rank), world=rank) for rank in range(len(hosts))]
    for rank in ranks:
        successors.add(rank, hosts=rank is ranks[0])
        if rank.told:
            successors.stand(rank, 0, b"", rank.name.encode())
    assert "".join(rank.name for rank in ranks if rank.told) == asked
    successors.begin(ranks)
    counts, *places = unpack(ranks[-1].told[-1][1])
    assert counts == count(len(hosts) - 1, sum(map(bool, hosts)))
    assert b"".join(places).decode() == chosen


def test_who_missed_a_list_goes_to_the_same_successor_as_the_others() -> None:
    old = pack((count(4), b"one", b"two", b"three"))
    successors = Successors(pack((b"charge",)), lambda _, action: None)
    host, *others = (Heard(name, world=rank) for rank, name in enumerate(["one", "three", "two", "late"]))
    successors.take_back(host, True, b"", old)
    for rank in others[:2]:
        successors.take_back(rank, False, rank.name.encode(), old)
    successors.confirm()
    successors.release()
    assert unpack(others[0].told[-1][1])[1:] == [b"two", b"three"], "or who has the old list goes elsewhere"
    successors.take_back(others[2], False, b"", old)
    successors.confirm()
    assert others[2].told[-1] == others[0].told[-1]


class Dropped(Groups):
    """Notes who is lost, and whether it may live elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[tuple[str, bool]] = []

    def drop(self, member: Member, reason: str, *, silent: bool = False) -> None:
        self.lost.append((reason, silent))


class Watched:
    """A store's tree, without a server, and a rank: nobody listens where it did."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.groups, self._selector, self._socks = Dropped(), selector, [socket.socket(), socket.socket()]
        self.tree = Tree(self.groups, lambda _: None, selector)
        with socket.create_server(("127.0.0.1", 0)) as pulse:
            self.rank = Entry(Kind.MEMBER, b"m" * TOKEN_BYTES, 3, addresses=(pulse.getsockname(),)).pack()
        self.own, self.relay = (Connection(sock, "rank 1", set(), FrameReader()) for sock in self._socks)

    def say(self, connection: Connection, op: Op, body: bytes, status: Status = Status.OK, *, behind: bool) -> None:
        frame = Frame(op, status, 0, body)
        self.tree.handle(connection, Frame(Op.UP, 0, 0, pack_up(1, frame)) if behind else frame)

    def verdict(self) -> bool:
        """Of its death: whether it may have been elsewhere before."""

        def turn() -> bool:
            self.tree.tick()
            for key, _ in self._selector.select(0.1):
                key.data(key)
            return bool(self.groups.lost)

        wait_until(turn)
        for sock in self._socks:
            sock.close()
        ((reason, silent),) = self.groups.lost
        assert "its process died" in reason
        return silent


@pytest.mark.parametrize(
    ("silence", "broke", "elsewhere"), [(0.0, True, False), (30.0, True, True), (30.0, False, False)]
)
def test_who_is_found_dead_after_a_silence_may_have_been_elsewhere_before(
    silence: float, broke: bool, elsewhere: bool
) -> None:
    """A store that was stopped, or cut off, cannot know with whom such a one was. An end of the stream says it."""
    with selectors.DefaultSelector() as selector:
        store = Watched(selector)
        store.say(store.own, Op.ENTER, store.rank, behind=False)
        store.tree.lost(store.own, "reset" if broke else ENDED, broke=broke, silence=silence)
        assert store.verdict() == elsewhere


@pytest.mark.parametrize("seconds", [0.0, 7.0])
@pytest.mark.parametrize("turns", [0, 1])
def test_what_a_relay_said_to_a_store_that_was_stopped_may_be_old(seconds: float, turns: int) -> None:
    """Its connection to the relay broke some time while the store did not read; nor did it read all at once."""
    with selectors.DefaultSelector() as selector:
        store = Watched(selector)
        store.tree.tick()
        relay = Entry(Kind.RELAY, b"r" * TOKEN_BYTES, 3, addresses=(("127.0.0.1", 1),))
        store.say(store.relay, Op.ENTER, relay.pack(), behind=False)
        store.say(store.relay, Op.ENTER, store.rank, behind=True)
        store.tree.tick()
        store.tree._looked -= seconds
        for _ in range(turns):
            store.tree.tick()
        store.say(store.relay, Op.GONE, b"reset", Status.AGAIN, behind=True)
        assert store.verdict() == (seconds > 0)


@pytest.mark.parametrize("seconds", [0.0, 7.0])
def test_who_is_found_dead_after_a_stop_may_have_served_in_the_meantime(seconds: float) -> None:
    """A store that waits to be sure was passed over while it was stopped; who served instead has ended."""
    with socket.create_server(("127.0.0.1", 0)) as rival:
        places = (rival.getsockname(),)
    groups = Groups(succeeds=Claim(3, (places,), True, 15.0, 2.0))
    with selectors.DefaultSelector() as selector:
        tree = Tree(groups, lambda _: None, selector)
        tree._looked -= seconds
        while tree.tick() is not None:
            for key, _ in selector.select(0.1):
                key.data(key)
    assert groups.returns.sure == (seconds == 0)


@pytest.mark.parametrize(
    ("silent", "stopped", "look", "certain"),
    [(0, False, 1.0, True), (1, False, 1.0, False), (0, True, 1.0, False), (0, False, 60.0, False)],
)
def test_who_may_not_know_of_all_stores_serves_with_more_than_half(
    monkeypatch: pytest.MonkeyPatch, silent: int, stopped: bool, look: float, certain: bool
) -> None:
    """Some fell silent before the store ended; or this process was stopped, before that or while it looked."""
    now, claims = [100.0], list[bool]()

    def looks(*_: object) -> succession._Found:
        now[0] += look
        return succession._Found.DEAD

    def takes_over(self: succession.Succession, *_: object) -> UniqueId:
        claims.append(self.certain)
        return lost

    monkeypatch.setattr(succession, "_look", looks)
    monkeypatch.setattr(succession, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(succession.Succession, "_serving", lambda *_: None)
    monkeypatch.setattr(succession.Succession, "_take_over", takes_over)
    lost = UniqueId((("127.0.0.1", 1),), bytes(16), bytes(32))
    with contextlib.closing(succession.Succession(hosts=False)) as mine:
        places = mine.stand(pack((b"", b"", b"", b"")))
        mine.hear(pack((count(3, 0, silent), pack_places((("127.0.0.1", 1),)), places)))
        mine.find(lost, StoreLost("its process ended in order", True, not stopped), lambda: False)
    assert claims == [certain]


def test_of_two_that_begin_at_once_the_later_one_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looked at the other before that one served. Members that are divided between them would be half of the job
    at either, and nobody would go on."""
    for name in ("_GREETS", "_STILL_GREETS", "_REFUSES"):
        monkeypatch.setattr(succession, name, 0.05)
    lost = UniqueId((("127.0.0.1", 1),), bytes(16), bytes(32))
    charge = pack((bytes(48), b"\0\0", F64.pack(0.0), b""))
    stores = list[store.StoreServer]()

    def begin(*args: Any, **options: Any) -> store.StoreServer:
        stores.append(real(*args, **options))
        if len(stores) == 1:
            first._take_over(lost, False, math.inf)
        return stores[0]

    real = store.StoreServer
    monkeypatch.setattr(store, "StoreServer", begin)
    with contextlib.closing(succession.Succession(hosts=False)) as first, contextlib.ExitStack() as ends:
        second = ends.enter_context(contextlib.closing(succession.Succession(hosts=False)))
        places = [each.stand(charge) for each in (first, second)]
        for each in (first, second):
            each.hear(pack((count(4, 0, 1), *places)))  # one fell silent: nobody is certain
        found = second.find(lost, StoreLost("its host vanished", False, False), lambda: False)
        for each in stores:
            ends.callback(each.close)
        assert found is not None
        assert pack_places(found.addresses) == places[0]
        assert [each.holds().threads for each in stores] == [0, 1]
        assert not second.hosts


def test_a_store_that_serves_does_not_give_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = store.StoreServer([listener.dup()], bytes(32), bytes(48))
    with contextlib.closing(serving):
        assert not serving.withdraw()
        assert serving.holds().threads == 1
