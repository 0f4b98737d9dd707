"""The hand-off itself: what senders and receivers of caches do, over windows."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from .. import ArgumentError, BufferTypeError, CollectiveTimeoutError, CommunicationError, Communicator, Work
from ..calls import check_int, check_rank, check_seconds, descriptor
from ..calls.buffers import read_buffer
from ..runtime.offsets import MOST_PIECES
from ..runtime.one_sided import Window
from .layouts import CacheLayout, Numbers, cuts, pieces

_LOOK = 0.1  # seconds between looks whether a sender has given up


class Handoff:
    """Caches of `senders` and `receivers`, two disjoint groups of ranks of `comm`. Made by all ranks of it together.

    `cache` is this rank's array, of its layout's `shape`, or where layers are `apart` a list of one each; None on ranks
    of neither group. So many requests as there are `slots` may be under way at once. A receiver takes a slot first, and
    then tells the senders, by whatever means the server has, the slot and the blocks; all ranks of a group use the same
    block numbers.
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
            [check_rank(rank, comm.size, name) for rank in _each(ranks, name)]
            for name, ranks in (("senders", senders), ("receivers", receivers))
        )
        for name, ranks, layout in (("senders", self.senders, src), ("receivers", self.receivers, dst)):
            if len(ranks) != layout.ranks:
                raise ArgumentError(f"{name}: wanted {layout.ranks} ranks, as the layout has, got {len(ranks)}")
        everybody = self.senders + self.receivers
        if len(set(everybody)) < len(everybody):
            raise ArgumentError(f"senders and receivers: wanted different ranks, got {everybody}")
        self._layers = 1 if dst.apart else dst.layers  # of one window
        if not 1 <= check_int(slots, "slots") <= (most := MOST_PIECES // (self._layers + 1)):  # signals of a window
            raise ArgumentError(f"slots: wanted 1 to {most}, got {slots}")
        self.slots = slots
        self._seconds = comm._core.seconds
        self._source = self.senders.index(comm.rank) if comm.rank in self.senders else -1
        self._target = self.receivers.index(comm.rank) if comm.rank in self.receivers else -1
        self.cache = cache
        own = src if self._source >= 0 else dst if self._target >= 0 else None
        self._arrays = [] if own is None else _arrays(cache, own, writable=self._target >= 0)
        asked = {"src": src, "dst": dst, "senders": self.senders, "receivers": self.receivers, "slots": int(slots)}
        _check_alike(comm, asked, _dtypes(self._arrays, dst.layers))
        # Of each slot a signal a layer, and in the first window one for the end.
        signals = slots * (self._layers + 1) if self._target >= 0 else 0
        self._windows = [comm.window(self._offered(i), signals=signals) for i in range(dst.layers // self._layers)]
        self._cancelled = np.zeros(slots if self._source >= 0 else 0, np.int64)  # by slot: the last use given up
        self._flags = comm.window(self._cancelled if self._source >= 0 else None, signals=0)
        self._uses = [0] * slots
        self._open = [False] * slots
        self._arrived = np.zeros((slots, dst.layers + 1), np.int64)  # before the use that is under way

    def _offered(self, number: int) -> Any:
        """What this rank has in a window: a receiver's GPU may read a sender's cache by itself."""
        if self._target >= 0:
            return self._arrays[number]
        alike = bool(self._arrays) and self.src.apart == self.dst.apart
        return self._arrays[number] if alike and _device(self._arrays[number]) != "cpu" else None

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
        with contextlib.ExitStack() as closing:
            for window in (self._flags, *self._windows):
                closing.callback(window.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self, slot: int) -> int:
        if not 0 <= (slot := check_int(slot, "slot")) < self.slots:
            raise ArgumentError(f"slot: wanted one of {self.slots}, got {slot}")
        if self._open[slot]:
            raise ArgumentError(f"slot: {slot} is still in use: close it first")
        self._open[slot] = True
        self._uses[slot] += 1
        return slot

    def _check_layer(self, layer: int) -> int:
        if not 0 <= (found := check_int(layer, "layer")) < self.dst.layers:
            raise ArgumentError(f"layer: wanted one of {self.dst.layers}, got {found}")
        return found

    def _signal(self, slot: int, layer: int) -> tuple[Window, int]:
        """The window, and which of its signals, of one layer; that after the last is the end."""
        first = slot * (self._layers + 1)
        if layer == self.dst.layers:
            return self._windows[0], first + self._layers
        return self._windows[layer // self._layers], first + layer % self._layers


def _each(ranks: Any, name: str) -> list[Any]:
    try:
        return list(ranks)
    except TypeError:
        raise ArgumentError(f"{name}: wanted a list of ranks, got {ranks!r}") from None


def _arrays(cache: Any, layout: CacheLayout, *, writable: bool) -> list[Any]:
    """The caller's. They are read anew for each call, since a tensor's current stream changes."""
    if layout.apart and not (isinstance(cache, Sequence) and len(cache) == layout.layers):
        count = len(cache) if isinstance(cache, Sequence) else type(cache).__name__
        raise ArgumentError(f"cache: wanted a list of {layout.layers} arrays, one a layer, got {count}")
    found = list(cache) if layout.apart else [cache]
    wanted = math.prod(layout.shape)
    for each in found:
        count = read_buffer(each, "cache", writable=writable).count
        if count != wanted:
            raise ArgumentError(f"cache: wanted {wanted} elements, of shape {layout.shape}, got {count}")
    return found


def _dtypes(arrays: list[Any], layers: int) -> list[str]:
    """Of each layer; none on a rank without a cache."""
    found = [read_buffer(each, "cache", writable=False).dtype.label for each in arrays]
    return found * layers if len(found) == 1 else found


def _check_alike(comm: Communicator, asked: Mapping[str, object], dtypes: list[str]) -> None:
    """Raise on all ranks where one has other arguments than rank 0, or another dtype: blocks would come to wrong
    places, or not at all."""
    mine = [descriptor(repr(each)) for each in asked.values()], descriptor(repr(dtypes)) if dtypes else None
    told = [json.loads(blob) for blob in comm._core.meet("Handoff()", json.dumps(mine).encode())]
    for rank, (theirs, _) in enumerate(told):
        for name, each, first in zip(asked, theirs, told[0][0], strict=True):
            if each != first:
                raise ArgumentError(f"{name}: wanted the same on all ranks, got another one on rank {rank}")
    kinds = {kind: rank for rank, (_, kind) in enumerate(told) if kind is not None}
    if len(kinds) > 1:
        raise BufferTypeError(f"cache: wanted one dtype on all ranks, got other ones on ranks {sorted(kinds.values())}")


def _device(array: Any) -> str:
    return read_buffer(array, "cache", writable=False).device


class Sending:
    """One request's blocks on their way. A context manager: its end is `close`."""

    def __init__(self, handoff: Handoff, slot: int) -> None:
        self._handoff, self._slot, self._use = handoff, slot, handoff._uses[slot]
        self._cuts = [cut for cut in handoff._cuts if cut.source == handoff._source]
        self._works: list[Work] = []
        self._whole: set[int] = set()  # layers whose last part was sent
        self._ended = False

    @property
    def cancelled(self) -> bool:
        """Whether a receiver has given this request up."""
        return bool(self._handoff._cancelled[self._slot] >= self._use)

    def layer(
        self, layer: int, src_blocks: Numbers, dst_blocks: Numbers, *, last: bool = True, stream: Any = None
    ) -> bool:
        """Begin to send these blocks of one layer; False, and nothing is sent, once it is cancelled. A layer may come
        in parts: it has arrived with its `last`, of which there is one.

        The blocks must stay as they are until `close`, or a `flush`. Those of a cache on a GPU are read after what is
        now on `stream`: see `Window.put`. ArgumentError for what is not there, before anything is sent.
        """
        handoff = self._handoff
        layer = handoff._check_layer(layer)  # also where nothing goes from here
        if self._ended:
            raise ArgumentError("layer: this request was ended")
        if layer in self._whole:  # a receiver would take its signal for that of another sender
            raise ArgumentError(f"layer: the last part of {layer} was sent")
        parts = [pieces(handoff.src, handoff.dst, cut, layer, src_blocks, dst_blocks) for cut in self._cuts]
        if self.cancelled:
            return False
        window, signal = handoff._signal(self._slot, layer)
        array = handoff._arrays[layer if handoff.src.apart else 0]
        for cut, (here, there, count) in zip(self._cuts, parts, strict=True):
            peer = handoff.receivers[cut.target]
            for at in range(0, max(len(here), 1), MOST_PIECES):
                some, ends = slice(at, at + MOST_PIECES), last and at + MOST_PIECES >= len(here)
                put: dict[str, Any] = {"src_offset": here[some], "count": count[some], "stream": stream}
                work = window.put(array, peer, there[some], **put, signal=signal if ends else None, async_op=True)
                self._works.append(work)
        if last:
            self._whole.add(layer)
        return True

    def flush(self, timeout: float | None = None) -> None:
        """Wait until what was begun is there. Then its blocks are free."""
        deadline = None if timeout is None else time.monotonic() + check_seconds(timeout)
        while self._works:
            self._works[0].wait(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            self._works.pop(0)

    def end(self) -> None:
        """Tell the receivers that nothing more comes. More than once is fine."""
        handoff = self._handoff
        if self._ended:
            return
        self._ended = True
        window, end = handoff._signal(self._slot, handoff.dst.layers)
        for target in dict.fromkeys(cut.target for cut in self._cuts):
            put = window.put(handoff._arrays[0], handoff.receivers[target], count=0, signal=end, async_op=True)
            self._works.append(put)

    @property
    def done(self) -> bool:
        """Whether `close` would not wait. Never blocks."""
        return self._ended and all(work.done for work in self._works)

    def close(self, timeout: float | None = None) -> None:
        """`end`, and wait until all of it is there. Then the blocks are free, and the slot is."""
        self.end()
        self.flush(timeout)
        self._handoff._open[self._slot] = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Receiving:
    """One request's blocks as they come."""

    def __init__(self, handoff: Handoff, slot: int) -> None:
        self._handoff, self._slot, self._use = handoff, slot, handoff._uses[slot]
        self._sources = list(dict.fromkeys(cut.source for cut in handoff._cuts if cut.target == handoff._target))
        self._closed = self._complete = False

    def arrived(self, layer: int) -> bool:
        """Whether all of a layer is there. Never blocks."""
        return self._has(self._check(layer))

    @property
    def complete(self) -> bool:
        """Whether all layers have come. Never blocks, and holds after `close`."""
        return self._complete or (
            not self._closed and all(self._has(layer) for layer in range(self._handoff.dst.layers))
        )

    @property
    def ended(self) -> bool:
        """Whether the senders have ended the request: `close` would not wait. Never blocks."""
        return self._closed or self._has(self._handoff.dst.layers)

    def wait(self, layer: int, timeout: float | None = None, *, stream: Any = None) -> None:
        """Wait until all of a layer is there; or let `stream`, of the cache's GPU, wait, and return at once. Such a
        stream goes on without the data where the communicator fails or `Handoff.close` is called: see
        `Window.wait_signal`.

        `CollectiveTimeoutError` after `timeout` seconds (default: the communicator's), `CommunicationError` where a
        sender has ended the request without it, `PeerLostError` where a rank is gone.
        """
        layer = self._check(layer)
        window, at = self._handoff._signal(self._slot, layer)
        wanted = self._wanted(layer)
        if stream is not None:
            window.wait_signal(at, wanted, stream=stream)
            return
        for slice_ in _slices(self._handoff._seconds(timeout)):
            with contextlib.suppress(CollectiveTimeoutError) if slice_.more else contextlib.nullcontext():
                window.wait_signal(at, wanted, timeout=slice_.seconds)
                return
            if self.ended and not self.arrived(layer):
                raise CommunicationError(f"slot {self._slot}: its senders have ended the request without layer {layer}")

    def give_up(self, timeout: float | None = None) -> None:
        """Let the senders stop at the next layer. The request ends with `close`."""
        use = np.array([self._use], np.int64)
        for source in self._sources:
            self._handoff._flags.put(use, self._handoff.senders[source], self._slot, timeout=timeout)

    def cancel(self, timeout: float | None = None) -> None:
        """`give_up` and `close`."""
        self.give_up(timeout)
        self.close(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Wait until the senders have ended the request: from then on nothing of it is written, and its blocks and the
        slot may be used again."""
        handoff = self._handoff
        if self._closed:
            return
        window, end = handoff._signal(self._slot, handoff.dst.layers)
        window.wait_signal(end, self._wanted(handoff.dst.layers), timeout=timeout)
        self._complete = self.complete
        self._closed = True
        handoff._arrived[self._slot] = [self._count(layer) for layer in range(handoff.dst.layers + 1)]
        handoff._open[self._slot] = False

    def _count(self, layer: int) -> int:
        window, at = self._handoff._signal(self._slot, layer)
        return window.signal(at)

    def _wanted(self, layer: int) -> int:
        return int(self._handoff._arrived[self._slot, layer]) + len(self._sources)

    def _has(self, layer: int) -> bool:
        return self._count(layer) >= self._wanted(layer)

    def _check(self, layer: int) -> int:
        found = self._handoff._check_layer(layer)
        if self._closed:
            raise ArgumentError(f"slot: this use of {self._slot} was closed")
        return found


class _Slice(NamedTuple):
    seconds: float
    more: bool


def _slices(seconds: float) -> Iterator[_Slice]:
    """Seconds to wait one after the other; of the last one nobody is to wait on."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > _LOOK:
        yield _Slice(_LOOK, True)
    yield _Slice(max(left, 1e-3), False)
