"""The hand-off of paged KV caches, from the ranks that prefill to those that decode, over one-sided messages.

The two groups may hold the cache in different orders and share its heads among different numbers of ranks. Each layer
is sent as soon as it is computed, and may be waited for by itself.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from . import ArgumentError, CollectiveTimeoutError, CommunicationError, Communicator, Work
from .calls import check_int, check_rank
from .calls.buffers import read_buffer

__all__ = ["CacheLayout", "Cut", "Handoff", "Receiving", "Sending", "cuts", "pieces"]

_AXES = ("layer", "kv", "block", "token", "head", "dim")
_ALIKE = ("layers", "kv", "block_tokens", "heads", "head_dim")
_LOOK = 0.1  # seconds between looks whether a sender has given up

Numbers = Sequence[int] | np.ndarray[Any, Any]
Column = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class CacheLayout:
    """A paged KV cache as a group of ranks holds it: each has all blocks of all layers, and some of the heads.

    `axes` is their order in memory, outermost first, of ``layer kv block token head dim``, with ``dim`` last. `heads`
    are those of the model, which `ranks` share evenly; where there are more ranks than heads, as many in a row have one
    head. `kv` is 1 where keys and values are one (MLA).
    """

    layers: int
    blocks: int
    block_tokens: int
    heads: int
    head_dim: int
    ranks: int = 1
    axes: tuple[str, ...] = _AXES
    kv: int = 2

    def __post_init__(self) -> None:
        for name in (*_ALIKE, "blocks", "ranks"):
            if check_int(getattr(self, name), name) < 1:
                raise ArgumentError(f"{name}: wanted 1 or more, got {getattr(self, name)}")
        if sorted(self.axes) != sorted(_AXES) or self.axes[-1] != "dim":
            raise ArgumentError(f"axes: wanted {', '.join(_AXES)} in any order with dim last, got {self.axes}")
        if self.heads % self.ranks and self.ranks % self.heads:
            raise ArgumentError(f"ranks: wanted a divisor or multiple of the {self.heads} heads, got {self.ranks}")

    def heads_of(self, member: int) -> range:
        """The heads that the group's rank `member` holds."""
        if self.ranks > self.heads:
            head = member * self.heads // self.ranks
            return range(head, head + 1)
        each = self.heads // self.ranks
        return range(member * each, (member + 1) * each)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one rank's array, by `axes`."""
        own = len(self.heads_of(0))
        sizes = (self.layers, self.kv, self.blocks, self.block_tokens, own, self.head_dim)
        found = dict(zip(_AXES, sizes, strict=True))
        return tuple(found[axis] for axis in self.axes)

    @property
    def strides(self) -> dict[str, int]:
        """Elements from one to the next along each axis of a rank's array."""
        shape = self.shape
        return {axis: math.prod(shape[i + 1 :]) for i, axis in enumerate(self.axes)}


class Cut(NamedTuple):
    """Heads that one rank of the source's group sends to one of the target's."""

    source: int
    target: int
    heads: range


def cuts(src: CacheLayout, dst: CacheLayout) -> list[Cut]:
    """Who sends which heads to whom: every head that a target holds comes to it once. Of several sources that hold it,
    targets ask different ones. ArgumentError where the layouts are not of one cache."""
    for name in _ALIKE:
        if getattr(src, name) != getattr(dst, name):
            raise ArgumentError(f"layouts: wanted one {name}, got {getattr(src, name)} and {getattr(dst, name)}")
    found: list[Cut] = []
    for target in range(dst.ranks):
        for head in dst.heads_of(target):
            holders = [source for source in range(src.ranks) if head in src.heads_of(source)]
            source = holders[target % len(holders)]
            if found and found[-1][:2] == (source, target):
                found[-1] = Cut(source, target, range(found[-1].heads.start, head + 1))
            else:
                found.append(Cut(source, target, range(head, head + 1)))
    return found


def pieces(
    src: CacheLayout, dst: CacheLayout, cut: Cut, layer: int, src_blocks: Numbers, dst_blocks: Numbers
) -> tuple[Column, Column, Column]:
    """Offsets in the source's array and in the target's, and lengths, in elements, of one layer of blocks: as few
    pieces as the two orders allow. Block `src_blocks[i]` becomes `dst_blocks[i]`."""
    if not 0 <= layer < src.layers:
        raise ArgumentError(f"layer: wanted one of {src.layers}, got {layer}")
    columns = [_blocks(src_blocks, src.blocks, "src_blocks"), _blocks(dst_blocks, dst.blocks, "dst_blocks")]
    if len(columns[0]) != len(columns[1]):
        raise ArgumentError(f"blocks: wanted as many targets as sources, got {len(columns[0])} and {len(columns[1])}")
    if len(columns[0]) == 0:
        return (np.empty(0, np.int64),) * 3
    order = [axis for axis in src.axes if axis not in ("layer", "dim")]  # what lies together there comes one by one
    offsets = []
    for layout, member, blocks in ((src, cut.source, columns[0]), (dst, cut.target, columns[1])):
        first, steps = layout.heads_of(member).start, layout.strides
        along = {
            "kv": np.arange(src.kv),
            "block": blocks,
            "token": np.arange(src.block_tokens),
            "head": np.arange(cut.heads.start - first, cut.heads.stop - first),
        }
        sums = np.zeros(1, np.int64) + layer * steps["layer"]
        for axis in order:
            sums = np.add.outer(sums, along[axis] * steps[axis])
        offsets.append(sums.ravel())
    here, there = offsets
    apart = (np.diff(here) != src.head_dim) | (np.diff(there) != src.head_dim)
    begins = np.concatenate([[0], np.flatnonzero(apart) + 1])
    lengths = np.diff(np.append(begins, len(here))) * src.head_dim
    return here[begins], there[begins], lengths


def _blocks(blocks: Numbers, most: int, name: str) -> Column:
    found = np.asarray(blocks)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ArgumentError(f"{name}: wanted a sequence of whole numbers, got {blocks!r}")
    if found.size and not (int(found.min()) >= 0 and int(found.max()) < most):
        raise ArgumentError(f"{name}: wanted blocks in [0, {most}), got {found.min()} to {found.max()}")
    return found.astype(np.int64)


class Handoff:
    """Caches of `senders` and `receivers`, two disjoint groups of ranks of `comm`. Made by all ranks of it together.

    `cache` is this rank's array, of its layout's `shape`; None on ranks of neither group. So many requests as there
    are `slots` may be under way at once. A receiver takes a slot first, and then tells the senders, by whatever means
    the server has, the slot and the blocks; all ranks of a group use the same block numbers.
    """

    def __init__(
        self,
        comm: Communicator,
        cache: Any,
        src: CacheLayout,
        dst: CacheLayout,
        senders: Sequence[int],
        receivers: Sequence[int],
        *,
        slots: int = 16,
    ) -> None:
        self.src, self.dst = src, dst
        self._cuts = cuts(src, dst)
        self.senders, self.receivers = (
            [check_rank(rank, comm.size, name) for rank in ranks]
            for name, ranks in (("senders", senders), ("receivers", receivers))
        )
        for name, ranks, layout in (("senders", self.senders, src), ("receivers", self.receivers, dst)):
            if len(ranks) != layout.ranks:
                raise ArgumentError(f"{name}: wanted {layout.ranks} ranks, as the layout has, got {len(ranks)}")
        everybody = self.senders + self.receivers
        if len(set(everybody)) < len(everybody):
            raise ArgumentError(f"senders and receivers: wanted different ranks, got {everybody}")
        if check_int(slots, "slots") < 1:
            raise ArgumentError(f"slots: wanted 1 or more, got {slots}")
        self.slots = slots
        self._source = self.senders.index(comm.rank) if comm.rank in self.senders else -1
        self._target = self.receivers.index(comm.rank) if comm.rank in self.receivers else -1
        self.cache = cache
        receives = offers = self._target >= 0
        if comm.rank in everybody:
            wanted = (src if self._source >= 0 else dst).shape
            buffer = read_buffer(cache, "cache", writable=receives)
            if buffer.count != math.prod(wanted):
                raise ArgumentError(
                    f"cache: wanted {math.prod(wanted)} elements, of shape {wanted}, got {buffer.count}"
                )
            offers = receives or buffer.device != "cpu"  # a receiver's GPU may read it by itself
        # Of each slot a signal a layer, and one for the end.
        signals = slots * (dst.layers + 1) if receives else 0
        self._window = comm.window(cache if offers else None, signals=signals)
        self._cancelled = np.zeros(slots if self._source >= 0 else 0, np.int64)  # by slot: the last use given up
        self._flags = comm.window(self._cancelled if self._source >= 0 else None, signals=0)
        self._uses = [0] * slots
        self._open = [False] * slots
        self._arrived = np.zeros(signals, np.int64)  # before the use that is under way

    def send(self, slot: int) -> Sending:
        """Begin to send one request's blocks, on a sender."""
        if self._source < 0:
            raise ArgumentError("send: this rank is none of the senders")
        return Sending(self, self._take(slot))

    def receive(self, slot: int) -> Receiving:
        """Take a slot for one request, on a receiver, before the senders are told. Local."""
        if self._target < 0:
            raise ArgumentError("receive: this rank is none of the receivers")
        return Receiving(self, self._take(slot))

    def close(self) -> None:
        """Take this rank's cache back. Local: see `Window.close`."""
        self._window.close()
        self._flags.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self, slot: int) -> int:
        if not 0 <= check_int(slot, "slot") < self.slots:
            raise ArgumentError(f"slot: wanted one of {self.slots}, got {slot}")
        if self._open[slot]:
            raise ArgumentError(f"slot: {slot} is still in use: close it first")
        self._open[slot] = True
        self._uses[slot] += 1
        return slot

    def _signal(self, slot: int, layer: int) -> int:
        return slot * (self.dst.layers + 1) + layer


class Sending:
    """One request's blocks on their way. A context manager: its end is `close`."""

    def __init__(self, handoff: Handoff, slot: int) -> None:
        self._handoff, self._slot, self._use = handoff, slot, handoff._uses[slot]
        self._cuts = [cut for cut in handoff._cuts if cut.source == handoff._source]
        self._works: list[Work] = []
        self._closed = False

    @property
    def cancelled(self) -> bool:
        """Whether a receiver has given this request up."""
        return bool(self._handoff._cancelled[self._slot] >= self._use)

    def layer(self, layer: int, src_blocks: Numbers, dst_blocks: Numbers, *, stream: Any = None) -> bool:
        """Begin to send one layer of these blocks, each layer once; False, and nothing is sent, once it is cancelled.

        The blocks must stay as they are until `close`. Those of a cache on a GPU are read after what is now on
        `stream`: see `Window.put`. ArgumentError for what is not there, before anything is sent.
        """
        handoff = self._handoff
        if self._closed:
            raise ArgumentError("layer: this request was closed")
        parts = [pieces(handoff.src, handoff.dst, cut, layer, src_blocks, dst_blocks) for cut in self._cuts]
        if self.cancelled:
            return False
        signal = handoff._signal(self._slot, layer)
        for cut, (here, there, count) in zip(self._cuts, parts, strict=True):
            peer = handoff.receivers[cut.target]
            window = handoff._window
            put = {"src_offset": here, "count": count, "signal": signal, "stream": stream}
            self._works.append(window.put(handoff.cache, peer, there, **put, async_op=True))
        return True

    def close(self, timeout: float | None = None) -> None:
        """Tell the receivers that nothing more comes, and wait until all of it is there. Then the blocks are free."""
        handoff = self._handoff
        if not self._closed:
            self._closed = True
            end = handoff._signal(self._slot, handoff.dst.layers)
            for target in dict.fromkeys(cut.target for cut in self._cuts):
                peer = handoff.receivers[target]
                self._works.append(handoff._window.put(handoff.cache, peer, count=0, signal=end, async_op=True))
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._works:
            self._works[0].wait(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            self._works.pop(0)
        handoff._open[self._slot] = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Receiving:
    """One request's blocks as they come."""

    def __init__(self, handoff: Handoff, slot: int) -> None:
        self._handoff, self._slot, self._use = handoff, slot, handoff._uses[slot]
        self._sources = list(dict.fromkeys(cut.source for cut in handoff._cuts if cut.target == handoff._target))
        self._closed = False

    def arrived(self, layer: int) -> bool:
        """Whether all of a layer is there. Never blocks."""
        at = self._handoff._signal(self._slot, self._check(layer))
        return self._handoff._window.signal(at) >= self._wanted(at)

    def wait(self, layer: int, timeout: float | None = None, *, stream: Any = None) -> None:
        """Wait until all of a layer is there; or let `stream`, of the cache's GPU, wait, and return at once. Such a
        stream goes on without the data where the communicator fails or `Handoff.close` is called: see
        `Window.wait_signal`.

        `CollectiveTimeoutError` after `timeout` seconds (default: the communicator's), `CommunicationError` where a
        sender has ended the request without it, `PeerLostError` where a rank is gone.
        """
        handoff, at = self._handoff, self._handoff._signal(self._slot, self._check(layer))
        if stream is not None:
            handoff._window.wait_signal(at, self._wanted(at), stream=stream)
            return
        end = handoff._signal(self._slot, handoff.dst.layers)
        for slice_ in _slices(timeout):
            with contextlib.suppress(CollectiveTimeoutError) if slice_.more else contextlib.nullcontext():
                handoff._window.wait_signal(at, self._wanted(at), timeout=slice_.seconds)
                return
            if handoff._window.signal(end) >= self._wanted(end) and not self.arrived(layer):
                raise CommunicationError(f"slot {self._slot}: its senders have ended the request without layer {layer}")

    def cancel(self, timeout: float | None = None) -> None:
        """Give the request up: the senders stop at the next layer. Ends with `close`."""
        use = np.array([self._use], np.int64)
        for source in self._sources:
            self._handoff._flags.put(use, self._handoff.senders[source], self._slot, timeout=timeout)
        self.close(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Wait until the senders have ended the request: from then on nothing of it is written, and its blocks and the
        slot may be used again."""
        handoff = self._handoff
        if self._closed:
            return
        end = handoff._signal(self._slot, handoff.dst.layers)
        handoff._window.wait_signal(end, self._wanted(end), timeout=timeout)
        self._closed = True
        first = handoff._signal(self._slot, 0)
        handoff._arrived[first : end + 1] = [handoff._window.signal(at) for at in range(first, end + 1)]
        handoff._open[self._slot] = False

    def _wanted(self, at: int) -> int:
        return int(self._handoff._arrived[at]) + len(self._sources)

    def _check(self, layer: int) -> int:
        if not 0 <= layer < self._handoff.dst.layers:
            raise ArgumentError(f"layer: wanted one of {self._handoff.dst.layers}, got {layer}")
        if self._closed:
            raise ArgumentError(f"slot: this use of {self._slot} was closed")
        return layer


class _Slice(NamedTuple):
    seconds: float | None
    more: bool


def _slices(timeout: float | None) -> Iterator[_Slice]:
    """Seconds to wait one after the other; of the last one nobody is to wait on."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > _LOOK:
        yield _Slice(_LOOK, True)
    yield _Slice(max(left, 1e-3), False)
