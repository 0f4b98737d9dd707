"""Where GPUs' tokens lie between the kernels of ``tokens.h``, and how ranks get to see each other's.

On one host a rank offers its tokens, and the others read what is for them (`SeenBlocks`): in a window where GPUs see
each other's memory, else in the host's, which all have mapped. A small all-reduce before that is the barrier. Elsewhere
a rank puts into each other's window what there is for it: of few tokens out of the host's memory by counts that only
devices know (`PutBlocks`), of many out of the GPU's by counts that hosts have waited for (`window_blocks`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from .. import Communicator, DeviceError, InitError
from ..gpu.array import DeviceArray
from .put_rows import Arrivals, Places, Sizes, agree

if TYPE_CHECKING:
    from ..runtime.executor import Mapped, Pinned
    from ..runtime.one_sided import Window
    from ..vendors.devices.base import Device

log = logging.getLogger("hetcoll")

_CALLS = 8  # that a barrier tells from each other
_TOLD_BYTES = 4096  # by a rank: of a host, which has few


class Lists(NamedTuple):
    """Addresses by rank, but for `to` and `via`, as ``arguments.h`` has them."""

    to: list[int]
    via: list[int]
    from_: list[int]
    weights: list[int]
    parts: list[int]
    came: list[int]
    rows: list[int]
    """`from_` of the kernel that reads rows."""
    tell: list[int]
    """Where hosts find what each rank is to be told of its tokens: `to` of the kernel that tells. Empty: it is not."""


class Route(NamedTuple):
    """How many tokens of a dispatch go to each rank, and came from each, where hosts hear of it."""

    goes: list[int]
    came: list[int]


class Numbers(NamedTuple):
    """Addresses, as ``arguments.h`` has them."""

    sent: int = 0
    taken: int = 0


class Blocks(Protocol):
    """Of one object of experts. The methods bring to all ranks what the kernels before them on the stream have written.

    `call` says which call of which layout it is of.
    """

    lists: Lists
    odd: int
    packed: int
    """Bytes from row to row of a block."""
    room: int
    """Tokens of a rank in a block: those of a round."""
    given: Sequence[int]
    """Where this rank's weights belong."""
    numbers: Numbers | None
    """Where kernels number tokens: what travels has rows for those that go there alone."""

    def late(self, incoming: bool) -> int:
        """Where a kernel is to say how many bytes go to each rank, of tokens, or of the sums of those that came; 0: it
        is not asked."""

    def tokens(self, call: int, route: Route, stream: int, timeout: float | None) -> None: ...

    def weights(self, call: int, route: Route, stream: int, timeout: float | None) -> None: ...

    def sums(self, call: int, route: Route, stream: int, timeout: float | None) -> None: ...

    def close(self) -> None: ...


class _Layout(NamedTuple):
    """Of memory of a rank that others read: two blocks of tokens by turns, weights, and sums of each reader's tokens,
    of two rounds by turns where there are several."""

    sizes: Sizes
    room: int

    @property
    def block(self) -> int:
        return self.sizes.head + self.room * self.sizes.wire.stride

    @property
    def weights(self) -> int:
        return 2 * self.block

    def parts(self, reader: int) -> int:
        """Where those sums begin; of so many readers: how many bytes there are in all."""
        turns = 1 if self.room >= self.sizes.most else 2
        return self.weights + self.sizes.head + turns * reader * self.room * self.sizes.wire.stride

    @classmethod
    def fitting(cls, sizes: Sizes, readers: int, nbytes: int) -> _Layout | None:
        """With as much room as so many bytes have, and rounds that are alike; None: they have none."""
        if (whole := cls(sizes, sizes.most)).parts(readers) <= nbytes:
            return whole
        rows = (nbytes - 3 * sizes.head) // (2 * (1 + readers) * sizes.wire.stride)
        return cls(sizes, -(-sizes.most // -(-sizes.most // rows))) if rows > 0 else None


class SeenBlocks:
    """Those of ranks that read each other's. `far`, by rank: those ranks that do not see its window, and have what is
    for them in `host`."""

    numbers: Numbers | None = None

    def __init__(
        self, comm: Communicator, device: Device, layout: _Layout, memory: DeviceArray, window: Window,
        far: Sequence[Sequence[int]], host: Mapped | None, stream: int, timeout: float | None,
    ) -> None:  # fmt: skip
        self._comm, self._window, self._host, self._memory = comm, window, host, memory
        self.odd, self.room, self.packed = layout.block, layout.room, layout.sizes.wire.packed
        me, own = comm.rank, [memory.ptr] if host is None else [memory.ptr, host.at[comm.rank]]
        self.given: Sequence[int] = [at + layout.weights for at in own]
        seen, size = {**window.mapped, me: memory.ptr}, comm.size
        self.lists = lists = Lists(own + own[:1] * (size - len(own)), [], [], [], [], [], [], [])
        for rank in range(size):
            away = rank in far[me]
            assert host is not None or not away
            theirs = host.at[rank] if host is not None and away else seen[rank]
            mine, reader = (far[rank].index(me), far[me].index(rank)) if away else (me, rank)
            lists.via.append(int(away))
            lists.from_.append(theirs)
            lists.rows.append(theirs)
            lists.weights.append(theirs + layout.weights)
            lists.parts.append(own[away] + layout.parts(reader))
            lists.came.append(theirs + layout.parts(mine))
        self._words = DeviceArray.of(device, np.zeros(_CALLS, np.int32))
        for call in range(_CALLS):  # no call draws a plan, which no graph could capture
            self._barrier(call, Route([], []), stream, timeout)

    @classmethod
    def offer(
        cls, comm: Communicator, device: Device, sizes: Sizes, stream: int, timeout: float | None
    ) -> SeenBlocks | None:
        """By all ranks together, which have GPUs. None where some share no memory, or too little."""
        core, size = comm._core, comm.size
        if len(core.wiring.locals) < size:
            return None
        # Half of the room for an odd number of tokens is one of them more.
        memory = DeviceArray(device, _Layout(sizes, sizes.most + 1).parts(size), "uint8")
        window = comm.window(memory.buffer(), signals=0, timeout=timeout)
        far = [rank for rank in range(size) if rank != comm.rank and rank not in window.mapped]
        seconds = core.seconds(timeout)
        mine = json.dumps([far, core.gpus.room(memory.buffer(), stream, seconds)]).encode()
        told = [json.loads(each) for each in core.meet("where experts' tokens go", mine, timeout, _TOLD_BYTES)]
        all_far, most = [each for each, _ in told], max(len(each) for each, _ in told)
        layout, host = _Layout(sizes, sizes.most), None
        if most > 0:
            fits = _Layout.fitting(sizes, most, min(nbytes for _, nbytes in told))
            if fits is not None:
                layout, parts = fits, [fits.parts(len(each)) for each in all_far]
                host = core.gpus.map_memory(memory.buffer(), parts, seconds)
            if host is None:
                log.warning("rank %d: experts' tokens go as between hosts: GPUs do not all see each other's memory, and"
                            " have none, or too little, of the host's in common", comm.rank)  # fmt: skip
                window.close()
                return None
        return cls(comm, device, layout, memory, window, all_far, host, stream, timeout)

    def _barrier(self, call: int, route: Route, stream: int, timeout: float | None) -> None:
        """What comes on the stream later is after what all ranks had on theirs. It has as many words as the number of
        the call says: so ranks that are in different calls hear of it as those of different all-reduces do."""
        self._comm.allreduce(self._words.buffer(0, 1 + call % _CALLS), stream=stream, timeout=timeout)

    tokens = weights = sums = _barrier

    def late(self, incoming: bool) -> int:
        """Nothing is sent."""
        return 0

    def close(self) -> None:
        self._window.close()
        if self._host is not None:
            self._host.close()


class PutBlocks:
    """In memory of this rank's host, which its GPU has mapped, and put into that of the others: of a block its ids and
    the rows that there are, and the sums of these. A kernel says how many bytes, and the engine reads that when the
    stream is there. No host waits, and no copy that might be behind a stream that does."""

    def __init__(self, comm: Communicator, device: Device, sizes: Sizes, timeout: float | None) -> None:
        self._comm, self._sizes, self.room, size, me = comm, sizes, sizes.most, comm.size, comm.rank
        self.packed = sizes.wire.packed
        self._words = DeviceArray.of(device, np.zeros(1, np.int32))
        comm.allreduce(self._words, timeout=timeout)  # the first call sets up what calls on GPUs need
        places = self._places = Places(sizes, size)
        self._goes, self._late = places.end, 2 * places.end  # what goes is behind what comes, and then its bytes
        memory = self._pin(2 * places.end + 3 * 8 * size, timeout)
        # What goes is in the window, too: so RDMA devices read it where it lies.
        self._window = comm.window(memory.buffer(0, 2 * places.end), signals=size, timeout=timeout)
        self._window._side.devices.copies(self._words.buffer(), "words")
        self._arrivals, self._memory = Arrivals(comm, self._window), memory
        numbers = self._numbers = [DeviceArray.of(device, np.zeros(size * sizes.most, np.uint32)) for _ in range(2)]
        self.numbers: Numbers | None = Numbers(*(each.ptr for each in numbers))
        self._own, self._factors = (DeviceArray(device, n * sizes.ids, "uint8") for n in (1, size))
        self.odd = places.odd
        self.given: Sequence[int] = [self._own.ptr]

        def at(first: Callable[[int], int], goes: bool) -> list[int]:
            """What goes to this rank itself does not travel."""
            return [memory.at + first(rank) + (self._goes if goes and rank != me else 0) for rank in range(size)]

        self.lists = Lists(
            to=at(places.block, True),
            via=list(range(size)),
            from_=at(places.block, False),
            rows=at(places.block, False),
            tell=[],
            weights=[self._factors.ptr + rank * sizes.ids for rank in range(size)],
            parts=at(places.sums, True),
            came=at(places.sums, False),
        )

    def _pin(self, nbytes: int, timeout: float | None) -> Pinned:
        found = problem = None
        try:
            found = self._comm._core.gpus.pin(nbytes)
        except (InitError, DeviceError) as error:
            problem = str(error)
        agree(self._comm, problem or "", timeout)
        assert found is not None
        return found

    def late(self, incoming: bool) -> int:
        return self._memory.at + self._late + 8 * self._comm.size * (2 if incoming else self._arrivals.turn)

    def tokens(self, call: int, route: Route, stream: int, timeout: float | None) -> None:
        turn = self._arrivals.turn
        self._arrivals.dispatches += 1
        self._put(lambda rank: self._places.block(rank, turn), self._sizes.block, turn, stream)
        self._comm.allreduce(self._words, stream=stream, timeout=timeout)
        self._wait("dispatch", stream, timeout)

    def weights(self, call: int, route: Route, stream: int, timeout: float | None) -> None:
        self._comm.allgather(self._own, self._factors, stream=stream, timeout=timeout)

    def sums(self, call: int, route: Route, stream: int, timeout: float | None) -> None:
        self._put(self._places.sums, self._sizes.rows, 2, stream)
        self._wait("combine", stream, timeout)

    def _put(self, first: Callable[[int], int], most: int, turn: int, stream: int) -> None:
        """What is for each other rank to where that one has what comes from here."""
        size, rank, memory = self._comm.size, self._comm.rank, self._memory
        for peer in ((rank + step) % size for step in range(1, size)):  # each begins with another one
            late = memory.word(self._late + 8 * (turn * size + peer))
            source = memory.buffer(self._goes + first(peer), most)
            self._window.put(source, peer, first(rank), late=late, signal=rank, stream=stream, async_op=True)

    def _wait(self, what: str, stream: int, timeout: float | None) -> None:
        core = self._comm._core
        with core.gpus.timed(f"{what} of experts", stream, core.seconds(timeout)):
            self._arrivals.wait(timeout, stream)

    def close(self) -> None:
        self._window.close()
