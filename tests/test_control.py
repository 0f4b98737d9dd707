"""The control plane: the store, its clients, and what they say when ranks are missing, lost or strangers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from hetcoll import store
from hetcoll.control import WORLD, ControlClient, Event, Left, Query, Verdict
from hetcoll.env import Config
from hetcoll.errors import InitError, PeerLostError
from hetcoll.rendezvous import get_unique_id
from hetcoll.unique_id import UniqueId

T = TypeVar("T")


class Events:
    """Records what a client's handler is told; answers questions with its rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.seen: list[Event] = []
        self._news = threading.Condition()

    def __call__(self, group: bytes, event: Event) -> bytes | None:
        with self._news:
            self.seen.append(event)
            self._news.notify_all()
        return b"answer of %d" % self.rank if isinstance(event, Query) else None

    def wait_for(self, wanted: Callable[[Event], bool], seconds: float = 5.0) -> Event:
        with self._news:
            assert self._news.wait_for(lambda: any(map(wanted, self.seen)), seconds), self.seen
            return next(event for event in self.seen if wanted(event))


def in_parallel(calls: list[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def unique_id() -> Iterator[UniqueId]:
    made = get_unique_id(Config())
    yield made
    store._hosted[made.job_id].close()


def join_all(unique_id: UniqueId, size: int) -> tuple[list[ControlClient], list[Events]]:
    events = [Events(rank) for rank in range(size)]
    clients = in_parallel([lambda r=r: ControlClient(unique_id, r, size, 20, events[r]) for r in range(size)])
    return clients, events


def test_exchange_gives_every_blob_in_the_order_of_ranks(unique_id: UniqueId) -> None:
    clients, _ = join_all(unique_id, 3)
    for tag in (b"a", b"b", b"a"):  # a tag may be used again
        results = in_parallel(
            [lambda c=c, r=r, tag=tag: c.exchange(WORLD, tag, b"%d" % r * 100000) for r, c in enumerate(clients)]
        )
        assert results == [[b"%d" % r * 100000 for r in range(3)]] * 3
    for client in clients:
        client.close()


def test_missing_ranks_are_named(unique_id: UniqueId) -> None:
    one, two = ControlClient(unique_id, 1, 8, 5), ControlClient(unique_id, 4, 8, 5)
    with pytest.raises(InitError, match=r"ranks 0, 2-7 never came to 'topology'; ranks 0, 2-3, 5-7 of 8 never joined"):
        one.exchange(WORLD, b"topology", b"", 0.2)
    with pytest.raises(InitError, match="ranks 0, 2-7 never came"):  # a late rank is told the same
        two.exchange(WORLD, b"topology", b"", 60)
    one.close()
    two.close()


def test_a_second_process_of_a_rank_and_another_size_are_refused(unique_id: UniqueId) -> None:
    first = ControlClient(unique_id, 1, 3, 5)
    with pytest.raises(InitError, match=r"two processes say that they are rank 1: .* came first"):
        ControlClient(unique_id, 1, 3, 5)
    with pytest.raises(InitError, match=r"rank 2 .* says that the job has 4 ranks; rank 1 said 3"):
        ControlClient(unique_id, 2, 4, 5)
    first.close()


def test_the_first_verdict_wins_and_late_members_get_it(unique_id: UniqueId) -> None:
    clients, events = join_all(unique_id, 2)
    clients[0].join(b"sub", 0, 2, events[0])
    assert clients[0].post_verdict(b"sub", b"abort", b"why") == Verdict(b"abort", b"why", 0)
    clients[1].join(b"sub", 1, 2, events[1])
    assert events[1].wait_for(lambda e: isinstance(e, Verdict)) == Verdict(b"abort", b"why", 0)
    assert clients[1].post_verdict(b"sub", b"mismatch", b"else") == Verdict(b"abort", b"why", 0)
    for client in clients:
        client.close()


def test_query_collects_answers(unique_id: UniqueId) -> None:
    clients, _ = join_all(unique_id, 3)
    assert clients[2].query(WORLD, b"where?", 5) == {r: b"answer of %d" % r for r in range(3)}
    for client in clients:
        client.close()


def test_put_and_get(unique_id: UniqueId) -> None:
    clients, _ = join_all(unique_id, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients[0].get, b"key", 5)
        clients[1].put(b"key", b"value")
        assert waiting.result(5) == b"value"
    with pytest.raises(InitError, match=r"nobody put 'other' within 0.1 s"):
        clients[0].get(b"other", 0.1)
    for client in clients:
        client.close()


def test_a_goodbye_is_seen_and_ends_exchanges(unique_id: UniqueId) -> None:
    clients, events = join_all(unique_id, 3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients[0].exchange, WORLD, b"t", b"", 30)
        clients[1].close()
        events[0].wait_for(lambda e: e == Left(1))
        with pytest.raises(PeerLostError, match="rank 1 has left") as caught:
            waiting.result(5)
    assert caught.value.rank == 1
    for client in clients:
        client.close()
