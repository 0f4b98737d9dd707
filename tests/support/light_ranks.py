"""Light ranks in one process, over real sockets: clients of the store and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from hetcoll.config.env import Config
from hetcoll.rendezvous.bootstrap import get_unique_id
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.rendezvous.protocol.news import Event, Query
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.store import server as store

T = TypeVar("T")
SIZE = 16


class Light:
    """A rank that is a client of the store and nothing else."""

    def __init__(self, unique_id: UniqueId, rank: int, size: int = SIZE) -> None:
        self.rank = rank
        self.seen: list[Event] = []
        self._news = threading.Condition()
        self.client = ControlClient(unique_id, rank, size, 30, self._hear)

    def _hear(self, group: bytes, event: Event) -> bytes | None:
        with self._news:
            self.seen.append(event)
            self._news.notify_all()
        return b"%d" % self.rank if isinstance(event, Query) else None

    def wait_for(self, wanted: Callable[[Event], bool], seconds: float = 20.0) -> None:
        with self._news:
            assert self._news.wait_for(lambda: any(map(wanted, self.seen)), seconds), (self.rank, self.seen)

    def die(self) -> None:
        """As when its process is killed: all of its connections end without a word."""
        self.client._uplink.end()  # it looks for no other way
        if self.client._relay is not None:
            self.client._relay.close()

    @property
    def serves(self) -> int:
        """How many children its relay has."""
        return 0 if self.client._relay is None else len(self.client._relay._children)


class Job:
    """A store, and light ranks that have entered; `pool` runs what waits for others."""

    def __init__(self, size: int = SIZE) -> None:
        self.unique_id = get_unique_id(Config(linger=0), loopback=True)
        self.store = store._hosted[self.unique_id.job_id]
        self.pool = ThreadPoolExecutor(3 * size)
        self.ranks: list[Light] = []
        self.size = size

    def enter(self) -> None:
        self.ranks = self.all([lambda r=r: Light(self.unique_id, r, self.size) for r in range(self.size)])  # type: ignore[misc]

    def all(self, calls: list[Callable[[], T]]) -> list[T]:
        return [future.result(40) for future in [self.pool.submit(call) for call in calls]]

    def exchange(self, tag: bytes, ranks: list[Light]) -> list[Future[list[bytes]]]:
        return [self.pool.submit(each.client.exchange, WORLD, tag, b"%d" % each.rank, 30) for each in ranks]

    def a_relay(self) -> Light:
        """A rank behind which others are."""
        return max(self.ranks, key=lambda each: each.serves)

    def close(self) -> None:
        for each in self.ranks:
            each.client._uplink.closing = True
        self.all([each.client.close for each in self.ranks])
        self.store.close()
        for each in self.ranks:
            if each.client._relay is not None:
                each.client._relay.close()
        self.pool.shutdown()
