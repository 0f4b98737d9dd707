"""A GPU's messages to and from ranks that it shares no memory with: pinned slots here, and sockets between hosts.

An edge looks to the GPU like one inside a host (`slots`), except that its slots are memory of this process alone;
threads of a native relay carry what lies in them (``native/engine/relay.h``). An edge has several sockets: one cannot
fill a fast network, nor one processor core its end of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from . import _native
from .diagnosis import Diagnosis, Kind
from .gpu_share import GpuShare
from .slots import CHANNELS, WORD_BYTES, WORDS_BYTES
from .wiring import Check, Wiring

if TYPE_CHECKING:
    from .devices.base import Device

SLOTS = 16  # of an edge: many more than orders count on, so that the GPU and all sockets have some at a time
STRIPES = 8

assert 2 * SLOTS * WORD_BYTES <= WORDS_BYTES


class Relays:
    """The edges of one rank's GPU to ranks elsewhere. Nothing is set up before the first one is connected."""

    def __init__(self, wiring: Wiring, diagnosis: Diagnosis, device: Device, share: GpuShare) -> None:
        self._wiring, self._diagnosis, self._device = wiring, diagnosis, device
        self._gpus, self._slot_bytes = share.gpus, share.slot_bytes
        self._relay: _native.Relay | None = None
        self._connected: set[tuple[int, int]] = set()
        self._edges: dict[tuple[bool, int, int], int] = {}
        self._memory: list[int] = []
        self._failed: str | None = None
        self._lock = threading.Lock()  # over `_relay` and `_failed`
        self._thread: threading.Thread | None = None

    @property
    def stripes(self) -> int:
        """Sockets of an edge."""
        return min(SLOTS, self._wiring.stripes or STRIPES)

    def connect(self, edges: Collection[tuple[int, int]], timeout: float, check: Check) -> None:
        """Connect these (peer, channel) pairs. Both ends must ask; see `Wiring.ensure`."""
        missing = [edge for edge in edges if edge not in self._connected]
        # The engine has the other channels. A rank without a GPU has no relay: its engine deals messages to one socket.
        apart = {(p, c + CHANNELS): self.stripes if self._gpus[p].vendor else 1 for p, c in missing}
        for (peer, channel), fds in self._wiring.sockets(apart, timeout, check).items():
            self._start().connect(peer, channel - CHANNELS, fds)
            self._connected.add((peer, channel - CHANNELS))

    def edge(self, queue: _native.DeviceQueue, out: bool, peer: int, channel: int) -> int:
        """The queue's number of a connected edge: one for sends, one for receives."""
        number = self._edges.get((out, peer, channel))
        if number is None:
            assert self._relay is not None
            at = self._device.allocate_host(WORDS_BYTES + SLOTS * self._slot_bytes)
            self._memory.append(at)
            ctypes.memset(at, 0, WORDS_BYTES)
            slots, ready, credit = at + WORDS_BYTES, at, at + SLOTS * WORD_BYTES
            carried = self._relay.add_edge(
                peer=peer,
                channel=channel,
                out=out,
                slots=slots,
                ready=ready,
                credit=credit,
                slot_bytes=self._slot_bytes,
                count=SLOTS,
            )
            number = self._edges[out, peer, channel] = queue.add_edge(slots, ready, credit, SLOTS, carried)
        return number

    def _start(self) -> _native.Relay:
        with self._lock:
            if self._relay is None:
                wiring = self._wiring
                share = wiring.topology.ranks[wiring.rank].cores // len(wiring.locals)
                self._relay = _native.Relay(
                    threads=max(1, min(2 * self.stripes, share)),
                    oversubscribed=wiring.oversubscribed,
                    rank=wiring.rank,
                    fault=wiring.fault,
                )
                if self._failed is not None:
                    self._relay.fail(Kind.ABORTED, wiring.rank, self._failed)
                self._thread = threading.Thread(target=self._watch, name="hetcoll-relays", daemon=True)
                self._thread.start()
            return self._relay

    def _watch(self) -> None:
        """Threads of the relay cannot tell the other ranks what went wrong, and nobody waits for them: this does."""
        assert self._relay is not None
        kind, peer, text = self._relay.await_failure(-1.0)
        if kind not in (Kind.NONE, Kind.ABORTED):
            self._wiring.engine.fail(kind, peer, text)
            self._diagnosis.error()

    @property
    def progress(self) -> int:
        """Grows while anything moves."""
        return 0 if self._relay is None else self._relay.moves

    def describe(self) -> str:
        """What is under way, for people."""
        return "" if self._relay is None else self._relay.describe()

    def fail(self, reason: str) -> None:
        """Let every stream go that waits for another host, now and later."""
        with self._lock:
            self._failed = self._failed or reason
            if self._relay is not None:
                self._relay.fail(Kind.ABORTED, self._wiring.rank, self._failed)

    def close(self, deadline: float) -> None:
        """Send what lies in slots, until `deadline` (time.monotonic), and give everything back. The GPU is idle."""
        if self._relay is not None:
            while not self._relay.idle and time.monotonic() < deadline:
                time.sleep(0.001)
            self._relay.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with contextlib.ExitStack() as each:
            for at in self._memory:
                each.callback(self._device.free_host, at)
        self._memory.clear()
