"""What moves data between the ranks of a simulated job, as far as the control plane knows of it: in a collective each
rank sends a message to every other one, and waits for theirs. Links are closed with their processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hetcoll.errors import CommunicationError
from hetcoll.health.desync_report import WINDOW, Answer, Called, Edge, Wait
from hetcoll.health.diagnosis import Diagnosis
from hetcoll.health.verdicts import Kind

from .kernel import Queue, World
from .network import Host, Network

_BYTES = 8  # of a message
_LOOKS_EVERY = 0.5  # seconds: how often who waits looks at its links
_AGAIN = 1.0  # seconds until a message is sent again that did not come through


class Links:
    """All of a job, between ranks by name."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.came: dict[tuple[bytes, int, int], list[str]] = defaultdict(list)
        """What each message of an edge was sent for."""
        self.engines: dict[tuple[bytes, int], Engine] = {}

    def send(self, engine: Engine, peer: int, what: str) -> None:
        """A message to a rank of the same group, which may have yet to come there."""
        edge, host = (engine.group, engine.rank, peer), engine.places[peer]
        engine.handed[peer] += 1
        self._deliver(edge, engine.host, host, what, engine.handed[peer])

    def _deliver(self, edge: tuple[bytes, int, int], source: Host, to: Host, what: str, number: int) -> None:
        def arrive() -> None:
            kernel = self.network.kernel
            if source.gone or to.gone:
                return
            if not Network.reaches(source, to) or len(self.came[edge]) != number - 1:
                kernel.after(_AGAIN, arrive)
                return
            self.came[edge].append(what)
            if (engine := self.engines.get((edge[0], edge[2]))) is not None:
                kernel.wake(engine.news)

        self.network.kernel.after(self.network.delay(), arrive)

    def close(self, name: str) -> None:
        """A process has ended, and its links with it."""
        for (group, rank), engine in list(self.engines.items()):
            if engine.name == name:
                del self.engines[group, rank]
                for (other, _), each in self.engines.items():
                    if other == group:
                        each.closed.add(rank)
                        self.network.kernel.wake(each.news)


class Engine:
    """Of one communicator, with what `Diagnosis` asks of an engine and of a `StatusReporter`. `places`: on which
    machine each rank is."""

    def __init__(self, links: Links, name: str, host: Host, group: bytes, rank: int, places: dict[int, Host]) -> None:
        self.links, self.name, self.host, self.group, self.rank, self.places = links, name, host, group, rank, places
        self.news: Queue = {}
        self.failed = False
        self.failure: tuple[int, int, str] = (0, -1, "")
        self.collectives = self.naps = 0
        self.handed: dict[int, int] = defaultdict(int)
        self.closed: set[int] = set()
        self._calls: dict[int, str] = {}
        self._inside: str | None = None
        self.preparing: int | None = None
        links.engines[group, rank] = self

    # As the engine.

    def fail(self, kind: int, peer: int, text: str) -> None:
        if not self.failed:
            self.failed, self.failure = True, (int(kind), peer, text)
        World.kernel.wake(self.news)

    def peer_left(self, rank: int) -> None: ...

    def describe(self) -> str:
        missing = self._missing()
        return f"waits for ranks {missing}" if missing else ""

    def run(self, what: str, diagnosis: Diagnosis, timeout: float) -> None:
        """A collective."""
        if self.failed:
            raise diagnosis.error()
        diagnosis.check_present(list(self.places))
        self.collectives += 1
        self._calls[self.collectives] = self._inside = what
        try:
            for peer in self.places:
                if peer != self.rank:
                    self.links.send(self, peer, what)
            self._await(diagnosis, timeout)
        finally:
            self._inside = None

    def _await(self, diagnosis: Diagnosis, timeout: float) -> None:
        kernel = World.kernel
        deadline = kernel.now + timeout
        detector = diagnosis.stall_detector(deadline)
        while missing := self._look():
            if self.failed:
                raise diagnosis.error()
            if kernel.now >= deadline:
                raise diagnosis.timeout(timeout)
            kernel.wait([self.news], min(detector.seconds(), deadline - kernel.now, _LOOKS_EVERY))
            self.naps += 1
            if gone := self.closed.intersection(missing):
                self.fail(Kind.PEER_GONE, min(gone), "its end of the link was closed")
            if not self.failed:
                detector.look()
        if self.failed and self.failure[0] == Kind.MISMATCH:
            raise diagnosis.error()

    def _missing(self) -> list[int]:
        """Whose message of this collective has not come."""
        return [peer for peer in self.places if peer != self.rank and self._came(peer) < self.collectives]

    def _look(self) -> list[int]:
        for peer in self.places:
            if peer != self.rank and self._came(peer) >= self.collectives:
                theirs = self.links.came[self.group, peer, self.rank][self.collectives - 1]
                if theirs != self._inside:
                    self.fail(Kind.MISMATCH, peer, f"a message of {theirs} came from rank {peer}")
                    return [peer]
        return self._missing()

    def _came(self, peer: int) -> int:
        return len(self.links.came[self.group, peer, self.rank])

    # As its reporter.

    def since(self) -> int:
        return max(1, self.collectives - WINDOW // 2)

    def inside(self, thread: object = None) -> Called | None:
        return None if self._inside is None else Called(self._inside)

    def received_from(self, peer: int) -> Called | None:
        return None

    def report(self, since: int, asker: int, edges: Iterable[Edge] = ()) -> Answer:
        """Its own state, when another rank asks."""
        waits = [(peer, self._came(peer)) for peer in self._missing()] if self._inside else []
        return Answer(
            now=self.collectives,
            calls={number: Called(what) for number, what in self._calls.items() if number >= since},
            inside=self.inside(),
            progress=f"{self.collectives} {sum(map(self._came, self.places))}",
            alone=True,
            failed=self.failure if self.failed and self._inside is None else None,
            idle=self.naps,
            waits=tuple(Wait(peer, 0, False, 0, _BYTES, _BYTES * came, came) for peer, came in waits),
            handed=tuple(
                (edge.destination, 0, _BYTES * self.handed[edge.destination], self.handed[edge.destination])
                for edge in edges
                if edge.source == self.rank
            ),
        )


def spell(error: CommunicationError) -> tuple[Any, ...]:
    """What all ranks are to be told alike."""
    return type(error).__name__, getattr(error, "rank", None), str(error)
