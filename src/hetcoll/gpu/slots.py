"""Host memory that the GPUs of one host have mapped: the slots through which they pass messages to each other.

Every pair of ranks has a few slots in each direction and channel, each with two 64-bit words on cache lines of their
own: `ready`, which the sender writes when the slot is full, and `credit`, which the receiver writes when it is empty.
The same few megabytes are used again and again, so they stay in the last-level cache: that is what lets several GPUs
of a host talk at full speed at once. An edge is mapped by a driver when the first plan uses it.
Calls in graphs have edges of their own, whose words count the messages of each slot
(``native/gpu/capture.h``). Behind an edge's words lie two more, for what its receiver pulls out of the sender's window
(`pulls`).

In front of the edges lie a word of each rank that makes its kernels give up, a page of each rank where it writes down
what it calls (``native/gpu/ledger.h``), and a ring and an area of each rank for messages that are too small for copy
engines, which kernels on the GPUs write and read (``devices/kernels/exchange.h``, ``oneshot.h``). Where one library
serves all ranks, rings and areas lie in the GPUs' own memory, if there are any (`near`).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import hetcoll._native as _native

from ..errors import InitError
from ..plan import pieces
from ..plan.one_kernel import SMALL, SMALL_NEAR
from ..plan.pieces import SLOTS
from ..vendors.devices.kernels.table import AWAITED, MESSAGE_COUNTERS, MESSAGE_RING, ONESHOT_RANKS

if TYPE_CHECKING:
    from ..plan.topology import Topology
    from ..vendors.devices.base import Device
    from .pinned import Pinned

CHANNELS = 3  # native/base/message.h
WORD_BYTES = 64  # bytes from one slot's word to the next: native/gpu/queue.h
WORDS_BYTES = 4096  # bytes in front of an edge's slots
_WORDS = 2 * SLOTS + 2  # so many: `ready` and `credit` of each slot, and those of pulls
EDGES = 2 * CHANNELS  # between two ranks in a direction: captured calls have their own
_CAPTURED = 16  # bytes from a rank's abort word to its words about captured calls
_KERNELS, _STREAMS = 1, 2  # bits of a rank's abort word: those that wait have been let go; native/transport/shm/slots.h
_RELEASED = 1 << 62  # above the number of any message
_PAGE = 4096
RING_SLOTS, RING_SLOT_BYTES = 4, 32 << 10  # of a block of an exchange kernel: devices/kernels/exchange.h

assert _WORDS * WORD_BYTES <= WORDS_BYTES
assert _CAPTURED + 16 <= AWAITED <= WORD_BYTES - ONESHOT_RANKS


def slot_bytes(topology: Topology, *, near: bool = False) -> int:
    """Bytes of a slot, the same on all ranks: see `pieces.slot_bytes`."""
    ranks, largest = len(topology.ranks), max(map(len, topology.islands))
    return pieces.slot_bytes(ranks, largest, far=any(topology.far(0, peer) for peer in range(1, ranks)), near=near)


@dataclass(frozen=True, slots=True)
class Edge:
    """The device's addresses of one direction between two ranks."""

    slots: int
    ready: int
    credit: int

    @property
    def pulls(self) -> tuple[int, int]:
        """Where `ready` and `credit` of pulls are."""
        first = self.ready + 2 * SLOTS * WORD_BYTES
        return first, first + WORD_BYTES


class RingSize(NamedTuple):
    """Of what a rank has for the kernels of collectives, of so many `blocks`: a ring for each, words that say what is
    in it, and an area each half of which has so many words, of 4 bytes of data each. `threads`: of a block that uses a
    ring. `pushed`: the area is cut into those of each peer, who writes there, and is not what the rank itself writes
    for all."""

    blocks: int
    threads: int
    area_words: int
    pushed: bool

    @property
    def ring(self) -> int:
        """Bytes of the ring, where the words begin."""
        return self.blocks * RING_SLOTS * RING_SLOT_BYTES

    @property
    def area(self) -> int:
        """Where the area begins."""
        return self.ring + self.blocks * RING_SLOTS * (1 + ONESHOT_RANKS) * WORD_BYTES

    @property
    def nbytes(self) -> int:
        """Of all."""
        return self.area + 2 * 8 * self.area_words


HOST_RINGS = RingSize(64, 512, SMALL // 4, pushed=False)
GPU_RINGS = RingSize(128, 256, SMALL_NEAR // 4, pushed=True)
"""A multiprocessor has room for two such blocks, by their registers: kernels of two communicators run side by side."""


class Rings(NamedTuple):
    """Where a device sees those of each rank of a host; nowhere where none has any."""

    size: RingSize
    at: Sequence[int]

    def areas(self, rank: int) -> tuple[list[int], list[int], int]:
        """Where `rank` reads the words of each other rank and 0 for its own, where it writes its own, and how many
        words a half of each has."""
        first, words = [at + self.size.area for at in self.at], self.size.area_words
        if not self.size.pushed:
            return [0 if peer == rank else at for peer, at in enumerate(first)], [first[rank]], words
        peers = [peer for peer in range(len(first)) if peer != rank]
        words = words // len(peers) // 2 * 2  # whole elements, of 8 bytes at most
        part = 2 * 8 * words
        sources = [0 if peer == rank else first[rank] + (peer - (peer > rank)) * part for peer in range(len(first))]
        return sources, [first[peer] + (rank - (rank > peer)) * part for peer in peers], words


class Words(NamedTuple):
    """Addresses of the same words."""

    device: int
    host: int


class SlotSegment:
    """The slots of one host, in a file of memory that its ranks share.

    `fd` is not kept. `with_gpu` says which ranks of the host have a GPU; ranks are named by their place there.
    `kernels`: they have areas and rings, as all ranks are here. Addresses are those of `device`; a rank without one
    (None) has the host's.
    """

    def __init__(
        self,
        fd: int,
        with_gpu: Sequence[bool],
        slot_bytes: int,
        device: Device | None,
        pinned: Pinned,
        *,
        kernels: bool,
    ) -> None:
        size, self._with_gpu = len(with_gpu), with_gpu
        self._size, self._device, self._pinned = size, device, pinned
        self._edge_bytes = WORDS_BYTES + SLOTS * slot_bytes
        nbytes, mates = self.nbytes(size, slot_bytes, kernels=kernels), size if kernels else 0
        self._rings = _PAGE + -(-size * _native.LEDGER_BYTES // _PAGE) * _PAGE
        self._head = self._rings + mates * HOST_RINGS.nbytes
        self._behind_edges = self._head + size * size * EDGES * self._edge_bytes
        self._edges: dict[tuple[int, int, int], Edge] = {}
        self._message_rings: list[tuple[int, int]] = []
        try:
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            raise InitError(f"mapping {nbytes} bytes for the slots of GPUs: {error.strerror}") from error
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._address = int(self._bytes.ctypes.data)
        self._registered: list[tuple[int, int]] = []  # offsets, and what of the bytes is this rank's
        head = self._register(0, self._head, sum(with_gpu))
        self.aborts = [head + WORD_BYTES * r for r in range(size)]
        self.rings = Rings(HOST_RINGS, [head + self._rings + HOST_RINGS.nbytes * r for r in range(mates)])
        self.ledger = self._address + _PAGE  # for the host

    @staticmethod
    def nbytes(size: int, slot_bytes: int, *, kernels: bool) -> int:
        """Address space for a host of `size` ranks; memory is taken only by edges in use."""
        each = EDGES * (WORDS_BYTES + SLOTS * slot_bytes) + 2 * _native.LEDGER_BYTES + MESSAGE_RING
        return SlotSegment.head_bytes(size, kernels=kernels) + size * size * each

    @staticmethod
    def head_bytes(size: int, *, kernels: bool) -> int:
        """What is in front of the edges, and in use from the start."""
        ledger = -(-size * _native.LEDGER_BYTES // _PAGE) * _PAGE
        return _PAGE + ledger + kernels * size * HOST_RINGS.nbytes

    def pages(self, src: int, dst: int) -> int:
        """The host's address of the two pages of a ledger, where `src` and `dst` write down their messages."""
        return self._address + self._behind_edges + (src * self._size + dst) * 2 * _native.LEDGER_BYTES

    def message_ring(self, src: int, dst: int) -> int:
        """Map the ring of the message kernels (``devices/kernels/messages.h``) from `src` to `dst`, once."""
        self._message_rings.append((src, dst))
        return self._register(self._message_offset(src, dst), MESSAGE_RING, 2)

    def _message_offset(self, src: int, dst: int) -> int:
        first = self._behind_edges + self._size * self._size * 2 * _native.LEDGER_BYTES
        return first + (src * self._size + dst) * MESSAGE_RING

    def _register(self, offset: int, nbytes: int, ranks: int) -> int:
        """Map this part, which so many ranks with GPUs share; returns the device's address of it. InitError where it
        does not fit what may be pinned."""
        if self._device is None:
            return self._address + offset
        with self._pinned.taken(nbytes // ranks):
            self._bytes[offset : offset + nbytes : mmap.PAGESIZE].sum()  # drivers pin pages that exist
            at = self._device.register_host(self._address + offset, nbytes)
        self._registered.append((offset, nbytes // ranks))
        return at

    def _offset(self, src: int, dst: int, channel: int) -> int:
        return self._head + ((src * self._size + dst) * EDGES + channel) * self._edge_bytes

    def edge(self, src: int, dst: int, channel: int, *, captured: bool = False, slots: int = 0) -> Edge:
        """The way from `src` to `dst`, or that of `captured` calls, mapped by this rank's driver on the first use. Its
        `slots` are here, or those on a GPU at that address."""
        key = (src, dst, channel + CHANNELS * captured)
        found = self._edges.get(key)
        if found is None:
            ranks = self._with_gpu[src] + self._with_gpu[dst]
            at = self._register(self._offset(*key), WORDS_BYTES if slots else self._edge_bytes, ranks)
            found = self._edges[key] = Edge(slots or at + WORDS_BYTES, at, at + SLOTS * WORD_BYTES)
        return found

    def captured(self, rank: int) -> Words:
        """Where `rank` counts how many captured calls it has begun, and how many it has ended: two words."""
        offset = WORD_BYTES * rank + _CAPTURED
        return Words(self.aborts[0] + offset, self._address + offset)

    def replays(self, rank: int) -> int:
        """How many captured calls `rank` has begun."""
        return int(self._bytes.view(np.uint64)[(WORD_BYTES * rank + _CAPTURED) // 8])

    def awaited(self, rank: int) -> list[int]:
        """The ranks for which a kernel of `rank` has been seen to wait since the last look."""
        at = WORD_BYTES * rank + AWAITED
        found = [peer for peer, waits in enumerate(self._bytes[at : at + ONESHOT_RANKS].tolist()) if waits]
        for peer in found:
            self._bytes[at + peer] = 0
        return found

    def progress(self, rank: int) -> int:
        """A number that grows while messages of `rank` move."""
        words = self._bytes.view(np.uint64)
        moved = 0
        for edge in self._edges:
            first = self._offset(*edge) // 8
            moved += int(words[first : first + _WORDS * WORD_BYTES // 8 : WORD_BYTES // 8].sum())
        for key in self._message_rings:
            counters = self._message_offset(*key) + MESSAGE_COUNTERS
            moved += int(
                words[counters // 8 : (counters - MESSAGE_COUNTERS + MESSAGE_RING) // 8 : WORD_BYTES // 8].sum()
            )
        if not self.rings.at:
            return moved
        first = self._rings + HOST_RINGS.nbytes * rank
        ring, area = (first + HOST_RINGS.ring) // 8, (first + HOST_RINGS.area) // 8
        moved += int(words[ring : area : WORD_BYTES // 8].sum())
        return moved + sum(int(words[area + half * HOST_RINGS.area_words] >> np.uint64(32)) for half in (0, 1))

    def release_kernels(self, rank: int) -> None:
        """Let every kernel of `rank` go that waits for a peer, now and from now on."""
        self._let_go(rank, _KERNELS)

    def hold_kernels(self, rank: int) -> None:
        """Let them wait again; none waits now."""
        self._bytes.view(np.uint64)[rank * WORD_BYTES // 8] &= ~np.uint64(_KERNELS)

    def release(self, rank: int) -> None:
        """Let every stream and kernel of `rank` go that waits for a peer: nothing of value comes any more."""
        self._let_go(rank, _KERNELS | _STREAMS)
        words = self._bytes.view(np.uint64)
        for edge in self._edges:
            first = self._offset(*edge) // 8
            words[first : first + _WORDS * WORD_BYTES // 8 : WORD_BYTES // 8] = _RELEASED

    def _let_go(self, rank: int, what: int) -> None:
        self._bytes.view(np.uint64)[rank * WORD_BYTES // 8] |= np.uint64(what)

    def release_edges(self, rank: int, peer: int) -> None:
        """The same for the edges between two ranks, which are never used again."""
        words = self._bytes.view(np.uint64)
        for edge in self._edges:
            if {*edge[:2]} == {rank, peer}:
                first = self._offset(*edge) // 8
                words[first : first + _WORDS * WORD_BYTES // 8 : WORD_BYTES // 8] = _RELEASED

    def close(self) -> None:
        """Unmap, when nobody looks into it any more. The device must be done with all slots."""
        for offset, nbytes in self._registered:
            assert self._device is not None
            self._device.unregister_host(self._address + offset)
            self._pinned.give(nbytes)
        self._registered.clear()
        del self._bytes
