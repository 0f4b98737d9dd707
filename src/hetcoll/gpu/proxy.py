"""A GPU's messages to and from ranks that it shares no memory with, through slots of this process alone.

An edge looks to the GPU like one inside a host (`slots`); threads of a native proxy carry what lies in its slots
(``native/proxy/proxy.h``). By the way between the two ranks (`topology.Topology.way`):

direct        the slots are the GPU's own memory, and RDMA goes from there to the peer's. No processor touches them:
              when the last device fails, the GPU copies what goes over TCP to pinned host memory and back.
staged-rdma   the slots are pinned host memory, which RDMA devices read and write; they end on TCP when the last fails.
staged-tcp    the slots are pinned host memory, and an edge has several sockets: one cannot fill a fast network, nor one
              processor core its end of it. A thread moves both directions of a socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import threading
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import hetcoll._native as _native

from ..config.limits import Held
from ..errors import DeviceError, InitError, RegistrationError, spell_ranks
from ..health.diagnosis import Diagnosis
from ..health.verdicts import Kind
from ..links.verbs.report import describe_link, planned
from ..links.wiring import Check, Wiring
from ..plan import pieces
from ..vendors.devices.base import PATIENT
from .shared import GpuShare
from .slots import CHANNELS, WORD_BYTES, WORDS_BYTES

if TYPE_CHECKING:
    from ..links.verbs.memory import Lease, Memory
    from ..vendors.devices.base import Device

log = logging.getLogger("hetcoll")

SLOTS = 8  # of an edge: more than orders count on, so that the GPU fills some while others are on their way
_LEAST = pieces.SLOTS  # so many do
LEAST_STRIPES, MOST_STRIPES = 4, 20
_BOUNCE_BYTES = 256 << 10  # of a link, half of them each way: a frame has no more

assert 2 * SLOTS * WORD_BYTES <= WORDS_BYTES


class Proxies:
    """The edges of one rank's GPU to ranks elsewhere. Nothing is set up before the first one is connected."""

    def __init__(self, wiring: Wiring, diagnosis: Diagnosis, device: Device, share: GpuShare) -> None:
        self._wiring, self._diagnosis, self._device = wiring, diagnosis, device
        self._share, self._gpus, self._slot_bytes = share, share.gpus, share.slot_bytes
        self._proxy: _native.Proxy | None = None
        self._registered: Memory | None = None
        self._connected: set[tuple[int, int]] = set()
        self._edges: dict[tuple[bool, int, int], int] = {}
        self._undo = contextlib.ExitStack()  # memory
        self._copier: _native.Copier | None = None
        self._ways: list[int] = []  # its streams
        self._failed: str | None = None
        self._trying = False
        self._lock = threading.Lock()  # over `_proxy` and `_failed`
        self._thread: threading.Thread | None = None
        self._holds = Held()

    def holds(self) -> Held:
        """Sockets and threads."""
        return self._holds

    def stripes(self, peer: int) -> int:
        """Sockets of an edge. RDMA links have one, for the handshake and for the worst case; and a rank without a GPU
        has no proxy: its engine deals messages to one. Each socket has a thread, which spins, so there are as many as
        leave more than half of the cores of either rank alone."""
        if self._rdma(peer) or not self._gpus[peer].vendor:
            return 1
        cores = min(self._share.topology.shares[rank] for rank in (self._wiring.rank, peer))
        return self._wiring.stripes or max(LEAST_STRIPES, min(3 * cores // 8, MOST_STRIPES))

    def _rdma(self, peer: int) -> bool:
        return self._share.topology.way(self._wiring.rank, peer) in ("direct", "staged-rdma")

    def _direct(self, peer: int) -> bool:
        return self._share.topology.way(self._wiring.rank, peer) == "direct"

    def connect(self, edges: Collection[tuple[int, int]], timeout: float, check: Check) -> None:
        """Connect these (peer, channel) pairs. Both ends must ask; see `Wiring.ensure`."""
        wanted = [(peer, self._channel(peer, channel)) for peer, channel in edges]
        missing = [edge for edge in wanted if edge not in self._connected]
        apart = {(p, c + CHANNELS): self.stripes(p) for p, c in missing}  # the engine has the other channels
        for (peer, shifted), fds in self._wiring.sockets(apart, timeout, check):
            proxy, channel = self._start(), shifted - CHANNELS
            if self._rdma(peer):
                rails = self._wiring.rails(peer, self._share.topology)
                bounce = self._bounce() if self._direct(peer) else (None, 0, 0)
                self._share_nics(proxy)
                proxy.connect_verbs(peer, channel, fds, rails, self._wiring.rail_bytes, *bounce)
            else:
                proxy.connect(peer, channel, fds)
            self._connected.add((peer, channel))
            self._hold(descriptors=len(fds))

    def check_room(self, ends: Collection[tuple[bool, int, int]]) -> None:
        """InitError unless edges to these ends (whether this rank sends, peer, channel) may be made now, before any of
        them is connected."""
        fresh = [peer for out, peer, c in ends if (out, peer, self._channel(peer, c)) not in self._edges]
        if problem := self._share.pinned.lacks(sum(self._pins(peer, _LEAST) for peer in fresh)):
            problem = f"{len(fresh)} edges between GPUs, to and from {spell_ranks(set(fresh))}: {problem}"
            raise InitError(problem) from MemoryError(problem)

    def _channel(self, peer: int, channel: int) -> int:
        """Links that take the place of others that did not work have channels of their own."""
        return channel + CHANNELS * self._share.given_up(peer)

    def edge(self, queue: _native.DeviceQueue, out: bool, peer: int, channel: int) -> int:
        """The queue's number of a connected edge: one for sends, one for receives."""
        channel = self._channel(peer, channel)
        number = self._edges.get((out, peer, channel))
        if number is None:
            assert self._proxy is not None
            count = SLOTS if self._direct(peer) else _LEAST + self._share.spare_slots(SLOTS - _LEAST)
            words, slots = self._allocate(peer, count)
            ready, credit = words, words + SLOTS * WORD_BYTES
            carried = self._proxy.add_edge(
                peer=peer,
                channel=channel,
                out=out,
                slots=slots,
                ready=ready,
                credit=credit,
                slot_bytes=self._slot_bytes,
                count=count,
            )
            number = self._edges[out, peer, channel] = queue.add_edge(slots, ready, credit, count, carried)
        return number

    def _hold(self, descriptors: int = 0, threads: int = 0) -> None:
        held = self._holds
        self._holds = Held(held.descriptors + descriptors, held.threads + threads)

    def _pins(self, peer: int, slots: int) -> int:
        """Bytes of the host that a direction of an edge pins with so many slots; and half of what its link does."""
        return WORDS_BYTES + (_BOUNCE_BYTES // 2 if self._direct(peer) else slots * self._slot_bytes)

    def _pin(self, nbytes: int) -> int:
        """So many bytes of the host, until `close`."""
        pinned, device = self._share.pinned, self._device
        with pinned.taken(nbytes):
            address = device.allocate_host(nbytes)
        self._undo.callback(pinned.give, nbytes)
        self._undo.callback(device.free_host, address)
        return address

    def _allocate(self, peer: int, count: int) -> tuple[int, int]:
        """The words of an edge, and so many slots: the GPU's memory, or the host's behind the words."""
        device, nbytes = self._device, count * self._slot_bytes
        direct = self._direct(peer)
        words = self._pin(WORDS_BYTES if direct else WORDS_BYTES + nbytes)
        ctypes.memset(words, 0, WORDS_BYTES)
        slots = words + WORDS_BYTES
        if direct:
            slots = device.allocate(nbytes)
            self._undo.callback(device.free, slots)
        if self._rdma(peer):
            try:
                self._register(slots, nbytes, device if direct else None)
            except RegistrationError as error:
                if direct:
                    raise
                log.warning("rank %d: slots that are copied before they are sent: %s", self._wiring.rank, error)
        return words, slots

    def _bounce(self) -> tuple[_native.Copier, int, int]:
        """What copies this GPU's memory while a link has no rail, and pinned memory for one link."""
        device = self._device
        if self._copier is None:
            for _ in range(2):
                self._ways.append(device.stream(PATIENT))
                self._undo.callback(device.destroy_stream, self._ways[-1])
            into, out = self._ways
            self._copier = _native.Copier(vendor=device.vendor, functions=device.functions(), into=into, out=out)
        return self._copier, self._pin(_BOUNCE_BYTES), _BOUNCE_BYTES

    def _register(self, address: int, nbytes: int, gpu: Device | None) -> Lease:
        assert self._registered is not None
        return self._registered.lease(address, nbytes, None, gpu)  # until the memory is closed

    def _share_nics(self, proxy: _native.Proxy) -> None:
        if self._registered is None:
            assert self._wiring.local_nics is not None
            self._registered = self._wiring.local_nics.share(proxy)
            self._hold(threads=1)  # of all links over RDMA

    def _start(self) -> _native.Proxy:
        with self._lock:
            if self._proxy is None:
                wiring = self._wiring
                sockets = max([self.stripes(p) for p in range(wiring.size) if p != wiring.rank], default=1)
                threads = max(1, min(max(sockets, 2), self._share.topology.shares[wiring.rank]))
                self._proxy = _native.Proxy(
                    threads=threads,
                    oversubscribed=wiring.oversubscribed,
                    rank=wiring.rank,
                    fault=wiring.fault,
                    integrity=wiring.integrity,
                )
                self._proxy.try_links(self._trying)
                if wiring.mending is not None:
                    wiring.mending.add(self._proxy, CHANNELS)
                if self._failed is not None:
                    self._proxy.fail(Kind.ABORTED, wiring.rank, self._failed)
                self._thread = threading.Thread(target=self._watch, name="hetcoll-proxies", daemon=True)
                self._thread.start()
                self._hold(descriptors=1, threads=threads + 1)
            return self._proxy

    def _watch(self) -> None:
        """Threads of the proxy cannot tell the other ranks what went wrong, and nobody waits for them: this does. What
        links lost, and went on without, is logged."""
        assert self._proxy is not None
        while True:
            kind, peer, text = self._proxy.await_failure(-1.0)
            events = self._proxy.events()
            for event in events:
                log.warning("%s", event)
            if kind != Kind.NONE or not events:
                break
        if kind not in (Kind.NONE, Kind.ABORTED):
            self._wiring.engine.fail(kind, peer, text)
            self._diagnosis.error()  # it tells the other ranks

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """While the block runs, a link that fails ends what goes to its peer, and nothing else: see `problem`. After it
        one that was in use before ends the communicator."""
        used = {peer for peer, _ in self._connected if peer in self._share.proved}
        self._try(True)
        try:
            yield
        finally:
            self._try(False)
            for peer in used:
                if (problem := self.problem(peer)) and not self._wiring.engine.failed:
                    self._wiring.engine.fail(Kind.PEER_GONE, peer, problem)
                    self._diagnosis.error()  # it tells the other ranks

    def _try(self, on: bool) -> None:
        with self._lock:
            self._trying = on
            if self._proxy is not None:
                self._proxy.try_links(on)

    def problem(self, peer: int) -> str:
        """What links to `peer` failed with in such a block, or nothing."""
        return "" if self._proxy is None else self._proxy.problem(peer)

    def leave(self, peer: int) -> None:
        """Let this rank's streams go that wait for `peer`: the links that there are to it are not used any more."""
        if self._proxy is not None:
            self._proxy.leave(peer)

    @property
    def progress(self) -> int:
        """Grows while anything moves."""
        return 0 if self._proxy is None else self._proxy.moves

    def counters(self) -> dict[str, int]:
        """Of the RDMA links."""
        return {} if self._proxy is None else self._proxy.counters()

    def describe(self) -> str:
        """What is under way, for people."""
        return "" if self._proxy is None else self._proxy.describe()

    def describe_way(self, peer: int) -> str:
        """How messages to `peer` go, for people."""
        if not self._rdma(peer):
            n = self.stripes(peer)
            return f"through pinned slots and {n} socket{'s' * (n != 1)}"
        slots = "slots in both GPUs' memory" if self._direct(peer) else "pinned slots"
        links = [] if self._proxy is None else json.loads(self._proxy.links())
        made = [link for link in links if link["peer"] == peer]
        if made:
            return f"through {slots} and {'; '.join(map(describe_link, made))}"
        return f"through {slots} and RDMA over {planned(self._share.topology, self._wiring.rank, peer)}"

    def fail(self, reason: str) -> None:
        """Let every stream go that waits for another host, now and later."""
        with self._lock:
            self._failed = self._failed or reason
            if self._proxy is not None:
                self._proxy.fail(Kind.ABORTED, self._wiring.rank, self._failed)

    def close(self, deadline: float) -> None:
        """Send what lies in slots, until `deadline` (time.monotonic), and give everything back. The GPU is idle."""
        if self._proxy is not None:
            while not self._proxy.idle and time.monotonic() < deadline:
                time.sleep(0.001)
            self._proxy.close(max(0.0, deadline - time.monotonic()))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._registered is not None:
            self._registered.close()  # before the memory goes
        self._copier = None
        with contextlib.suppress(DeviceError):  # a GPU that has failed copies nothing more
            for way in self._ways:
                self._device.synchronize(way)
        self._undo.close()
