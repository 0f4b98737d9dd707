"""From a control connection to an engine with links: who runs where, shared memory, TCP, RDMA.

Ranks of one host share one segment, made by the lowest of them and handed to the others as a descriptor. Other pairs
get TCP sockets when a plan first needs them, all at once. Where both have RDMA devices that reach each other, the
engine makes queue pairs too: the two ends introduce them to each other through the socket, which then rests until the
last queue pair has died.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, starmap
from typing import TYPE_CHECKING

import hetcoll._native as _native

from ..config.env import INTEGRITY, SHM_READ, SHM_STORES, Config
from ..config.interfaces import are_unlike
from ..config.limits import Held, reserve_descriptors
from ..errors import ArgumentError, ClosedError, InitError
from ..plan.rails import Nic
from ..plan.topology import Topology
from ..rendezvous.connections.secure import detach_all
from ..rendezvous.control import ControlClient
from .descriptors import shared_memory
from .edges import TALKS, Address, EdgeKey, Request, unpack_addresses
from .facts import Facts, check_digests
from .introduction import Introduction, Introductions, Process, Reach, read_cards
from .lines import Lines
from .listener import Listener
from .making import Making
from .mending import Mending
from .verbs.report import by_peer, describe, fell_back

if TYPE_CHECKING:
    from .verbs.local_nics import LocalNics
    from .verbs.memory import Memory

log = logging.getLogger("hetcoll")

_INTRODUCE, _ADDRESSES = b"introduce", b"addresses"  # what ranks exchange: see `introduction`
_SPIN_SECONDS = 10e-6  # then it yields: its peer may be waiting for the very same core
_UNLIMITED = (1 << 64) - 1  # native/transport/shm says how much it takes then
Check = Callable[[Collection[int]], None]
"""Called now and then, with the ranks that are waited for."""


def ring_bytes(local_size: int, configured: int | None) -> int:
    """The data ring of one directed edge and channel: a power of two.

    Larger than a core's L2 cache where there are few: a slot that the reader's cache has long evicted is written at the
    speed of the shared cache, one that it still holds at the speed of the cores' conversation about it (a quarter).
    """
    if configured is not None:
        return max(4096, 1 << (configured.bit_length() - 1))
    return int(min(2 << 20, max(128 << 10, (8 << 20) >> (local_size - 1).bit_length())))


def rail_bytes(size: int, configured: int | None) -> int:
    """The ring of one rail in one direction, in a communicator of `size` ranks: a power of two. It is locked memory."""
    if configured is not None:
        return min(256 << 20, max(64 << 10, 1 << (configured.bit_length() - 1)))
    return int(min(1 << 20, max(64 << 10, (16 << 20) >> (size - 1).bit_length())))


def most_heap(rooms: Iterable[int | None]) -> int:
    """Address space for what the ranks of a host lend each other, of which so much is `rooms`: a quarter of the least,
    since each communicator takes its own, and the program needs some, too."""
    return min((room // 4 for room in rooms if room is not None), default=_UNLIMITED)


class Wiring:
    """One communicator's topology, engine and links. `rank` and `size` are those of `group`. A call of the engine
    returns after `patience` seconds, complete or not."""

    def __init__(
        self,
        control: ControlClient,
        group: bytes,
        rank: int,
        size: int,
        config: Config,
        timeout: float,
        patience: float,
    ) -> None:
        self._control, self._config = control, config
        self.group, self.rank, self.size = group, rank, size
        self._comm = hashlib.blake2b(group, digest_size=16).digest()
        self._deadline = time.monotonic() + timeout
        self._listener: Listener | None = None
        self.mending: Mending | None = None
        self._places: dict[int, Sequence[Address]] = {}  # where those listen that there are sockets to
        intros = self._introduce()
        self.topology = Topology(intros.infos, config.transport, config.islands, config.cross)
        self.measured = intros.measured
        self.stripes = config.socket_stripes
        self.pinned_bytes = config.pinned_bytes
        self.locals = list(next(host for host in self.topology.hosts if rank in host))
        spin = _SPIN_SECONDS if config.spin_us is None else config.spin_us * 1e-6
        self.oversubscribed = len(self.locals) > intros.cores[intros.hosts[rank]]
        self.fault = config.fault or ""
        self.integrity = INTEGRITY.index(config.integrity)
        identity = hashlib.blake2b(control.unique_id.job_id + group, digest_size=8).digest()
        try:
            self.engine = _native.Engine(
                rank=rank,
                size=size,
                identity=int.from_bytes(identity, "little"),
                local_rank=self.locals.index(rank),
                spin_seconds=spin,
                oversubscribed=self.oversubscribed,
                timeout=patience,
                fault=self.fault,
                integrity=self.integrity,
            )
        except ValueError as error:
            raise ArgumentError(f"HETCOLL_FAULT: {error}") from None
        if config.fault is not None:
            log.info("rank %d: links misbehave on purpose: HETCOLL_FAULT=%s", rank, config.fault)
        self._making = Making[tuple[int, int]](lambda edge: self.engine.linked(*edge))
        self.local_nics: LocalNics | None = None
        self._gpus = [gpu.bus for gpu in intros.gpus[rank]]
        try:
            if config.transport in ("auto", "shm") and len(self.locals) > 1:
                heap = most_heap(intros.rooms[r] for r in self.locals)
                self._attach_shm(heap)
            apart = config.transport in ("tcp", "verbs") or len(self.topology.hosts) > 1
            if size > 1 and (apart or config.cross == "staged"):
                self._listen()
            # Only now: whether the direct way is there depends on the RDMA devices that ranks have just told.
            self.facts = Facts(self.topology, intros.gpus, intros.no_gpu)
            if digest := self.facts.digest:
                check_digests(control.exchange(group, b"gpus", digest, self._left()))
        except BaseException:
            self.engine.close()
            self.close()
            raise

    @property
    def secret(self) -> bytes:
        """What authenticates every connection of the job."""
        return self._control.unique_id.secret

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.1)

    def _introduce(self) -> Introductions:
        mine = Introduction.here(self._config, self.rank).telling()
        return Introductions(self._control.exchange_columns(self.group, _INTRODUCE, mine, self._left()))

    def processes(self, ranks: Collection[int]) -> list[Process]:
        """What each of `ranks` tells those who ask. The store is asked once for each."""
        told = self._control.look_up(self.group, _INTRODUCE, ranks, self._left())
        return [Process.read(told[rank]) for rank in ranks]

    def _attach_shm(self, heap: int) -> None:
        name = self.processes(self.locals[:1])[0].memory
        ring = ring_bytes(len(self.locals), self._config.shm_bytes)
        stores, reads = SHM_STORES.index(self._config.shm_stores), SHM_READ.index(self._config.shm_read)
        nbytes, who = _native.shm_bytes(len(self.locals), ring, heap), (self.rank, self.locals)

        def check(ranks: Collection[int]) -> None:
            self._control.check_present(self.group, ranks)

        with shared_memory("hetcoll", nbytes, name, *who, self.secret, self._left(), check) as memory:
            self.engine.attach_shm(memory.fileno(), ring, heap, self.locals, stores, reads)

    def exchange(self, label: str, blob: bytes, timeout: float) -> list[bytes]:
        """Every rank's `blob`, by rank, past the engine. A collective call; each has another label."""
        return self._control.exchange(self.group, label.encode(), blob, timeout)

    def listen(self, timeout: float) -> None:
        """Sockets may be wanted after all: all ranks tell each other where they are reached, once."""
        if self._listener is None:
            self._deadline = time.monotonic() + timeout
            self._listen()

    def _listen(self) -> None:
        loopback = len(self.topology.hosts) == 1
        self._listener = Listener(self._config, self._control.unique_id.secret, loopback=loopback)
        timeout, check = self._config.timeout, self._check_mending
        self.mending = Mending(self.rank, self._comm, self._listener, self._places, timeout, check)
        self.mending.add(self.engine)
        no_nics = self._open_nics(self._listener.addresses)
        tcp = self._listener.rates(self.stripes or 1)
        rates = sum(tcp), 0 if self.local_nics is None else self.local_nics.rate
        unlike = are_unlike(tcp)
        mine = Reach(self._listener.addresses, self.nics, no_nics, rates, unlike, self._control.round_trip).telling()
        (told,) = self._control.exchange_columns(self.group, _ADDRESSES, mine, self._left())
        cards = zip(self.topology.ranks, read_cards(told), strict=True)
        infos = (replace(info, **each._asdict()) for info, each in cards)
        self.topology = replace(self.topology, ranks=tuple(infos))
        self.topology.check_rails()

    def _check_mending(self, peer: int) -> None:
        if self.engine.failed:
            raise ClosedError("the communicator has ended")
        self._control.check_present(self.group, [peer])

    def _open_nics(self, addresses: Sequence[Address]) -> str:
        """Open this rank's RDMA devices, unless they cannot be needed; why there are none."""
        if self._config.tls:
            return "HETCOLL_TLS is set, and RDMA is not encrypted"
        if self._config.transport not in ("auto", "verbs"):
            return f"HETCOLL_TRANSPORT is {self._config.transport}"
        if self._config.transport == "auto" and len(self.topology.hosts) == 1:
            return "all ranks are on one host"
        from .verbs.library import UnavailableError  # few jobs need it, and imports count
        from .verbs.local_nics import LocalNics
        from .verbs.pci import pci_folder

        family = socket.AF_INET if any(":" not in address.host for address in addresses) else socket.AF_INET6
        # Of several GPUs the first call says which it is (`ports_near`). Until then the cores say what is near.
        near = pci_folder(self._gpus[0]) if len(self._gpus) == 1 else None
        try:
            self.local_nics = LocalNics(self.engine, self._config, family, near)
        except UnavailableError as error:
            log.info("rank %d: no RDMA: %s", self.rank, error)
            return str(error)
        return ""

    @property
    def nics(self) -> tuple[Nic, ...]:
        """This rank's open ports of RDMA devices."""
        return () if self.local_nics is None else self.local_nics.nics

    @property
    def memory(self) -> Memory | None:
        """Where memory is registered, if it needs to be."""
        return None if self.local_nics is None else self.local_nics.memory

    def ensure(self, edges: Iterable[tuple[int, int]], timeout: float, check: Check) -> None:
        """Links for these (peer, channel) pairs. Both ends must ask; `check` may raise to end the wait."""

        def make(missing: list[tuple[int, int]], left: float) -> None:
            verbs = {p for p, _ in missing if self.topology.transport(self.rank, p) == "verbs"}
            for (p, c), fds in self.sockets(dict.fromkeys(missing, self.stripes or 1), left, check):
                if p in verbs:
                    self.attach_verbs(p, c, fds, self.topology)
                else:
                    self.engine.attach_tcp(p, c, fds)

        self.attach(edges, make, timeout, check)

    def attach(
        self,
        edges: Iterable[tuple[int, int]],
        make: Callable[[list[tuple[int, int]], float], None],
        timeout: float,
        check: Check,
    ) -> None:
        """Have `make` attach those of these (peer, channel) pairs that the engine has no link for, in at most so many
        seconds, which are its second argument. Of several threads that need a link one makes it."""
        wanted, deadline = list(edges), time.monotonic() + timeout
        if all(starmap(self.engine.linked, wanted)):  # as shared memory does from the start
            return
        while True:
            with self._making.missing(wanted) as missing:
                if missing:
                    make(missing, deadline - time.monotonic())
            if self._making.wait(wanted, deadline, lambda: check({p for p, _ in wanted})) or self.engine.failed:
                return

    def sockets(
        self, edges: Mapping[tuple[int, int], int], timeout: float, check: Check
    ) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """So many connected sockets for each (peer, channel). As `ensure`. They are made all at once, and belong to the
        caller when it is given them: who is interrupted before that leaves none open."""
        made = self._connect(edges, timeout, check)
        try:
            for edge in edges:
                yield edge, detach_all(made[edge])
        finally:
            for sock in chain.from_iterable(made.values()):
                sock.close()

    def talks(self, peers: Collection[int], timeout: float, check: Check) -> dict[int, Lines]:
        """A socket to each of these ranks, by which two processes talk before they have links. As `ensure`."""
        made = self._connect({(peer, TALKS): 1 for peer in peers}, timeout, check)
        return {peer: Lines(sock) for (peer, _), (sock,) in made.items()}

    def callers(self) -> set[int]:
        """The ranks that have asked for `talks` with this one, and have none yet."""
        listener = self._listener  # another thread may close it
        found = () if listener is None else listener.arrived(TALKS)
        return {key.src + key.dst - self.rank for key in found}

    def _connect(
        self, edges: Mapping[tuple[int, int], int], timeout: float, check: Check
    ) -> dict[tuple[int, int], list[socket.socket]]:
        if not edges:
            return {}
        listener = self._listener  # another thread may close it
        if listener is None:
            raise InitError(f"no transport links rank {self.rank} to {sorted({p for p, _ in edges})}")
        keys = {
            (p, c): [EdgeKey(self._comm, min(self.rank, p), max(self.rank, p), c, s) for s in range(stripes)]
            for (p, c), stripes in edges.items()
        }
        peers = {p for p, _ in edges}
        told = self._control.look_up(self.group, _ADDRESSES, peers, timeout)
        self._places |= (places := {p: unpack_addresses(own) for p, own in told.items()})
        requests = [Request(key, places[p]) for (p, _), each in keys.items() for key in each]
        if problem := reserve_descriptors(len(requests)):
            raise InitError(f"{len(requests)} sockets to {len(peers)} ranks do not fit rank {self.rank}: {problem}")
        made = listener.ensure(self.rank, requests, time.monotonic() + timeout, lambda: check(peers))
        return {edge: [made[key] for key in each] for edge, each in keys.items()}

    def attach_verbs(self, peer: int, channel: int, fds: list[int], topology: Topology) -> None:
        """An RDMA link of the engine's to a rank that has rails to this one. Takes over the sockets."""
        self.engine.attach_verbs(peer, channel, fds, self.rails(peer, topology), self.rail_bytes)

    @property
    def rail_bytes(self) -> int:
        """The ring of one rail in one direction."""
        return rail_bytes(self.size, self._config.ib_bytes)

    def rails(self, peer: int, topology: Topology) -> list[tuple[int, str]]:
        """For the engine, or a proxy: this rank's port and the name of the peer's device, for each rail, as `topology`
        has them, which is the same at both ends."""
        assert self.local_nics is not None
        mine, theirs = topology.ranks[self.rank].nics, topology.ranks[peer].nics
        return [(self.local_nics.number(mine[i]), theirs[j].device) for i, j in topology.rails(self.rank, peer)]

    def ports_near(self, bus: str) -> tuple[int, ...]:
        """The places of this rank's RDMA ports, those nearest to the PCI function `bus` first."""
        if self.local_nics is None:
            return ()
        from .verbs.pci import pci_folder

        return self.local_nics.near(pci_folder(bus))

    def transports(self, peers: Iterable[int]) -> str:
        """What carries data to these ranks now, such as ``shm+tcp``; ``self`` where there are none."""
        links = by_peer(self.engine.links())
        planned = {p: self.topology.transport(self.rank, p) for p in peers if p != self.rank}
        return "+".join(sorted({"tcp" if fell_back(links, p) else path for p, path in planned.items()})) or "self"

    def paths(self, peers: Iterable[int]) -> tuple[str, ...]:
        """For people: how data goes to those of these ranks that are not reached through shared memory, and why."""
        return describe(by_peer(self.engine.links()), self.topology, self.rank, peers)

    def holds(self) -> Held:
        """What the listener holds; the rest is the engine's."""
        listener = self._listener  # another thread may close it
        return Held() if listener is None else listener.holds()

    def settle(self) -> None:
        """Before the engine is closed: what was sent over TCP has come to those who are there."""
        if self.mending is not None:
            self.mending.settle()

    def close(self) -> None:
        """Close the listener and give RDMA's devices and memory back. The engine must be closed."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self.mending is not None:
            self.mending.close()
        if self.local_nics is not None:
            self.local_nics.close()
            self.local_nics = None
