"""Collectives that only move data, inside an island of one host: each GPU's copy engines pull what comes to it out of
the other ranks' windows, where these hold it (``native/gpu/pulls.cc``).

So nothing passes a slot, from which a copy inside the GPU would take its multiprocessors. A rank knows where all others
keep what they give if they keep it where it does: in the same window, at the same offset. That is part of what ranks
write down of a call, so those that differ find out (`shared`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import hetcoll._native as _native

from ..calls import Call
from ..errors import CollectiveTimeoutError
from ..runtime.planner import Planner
from ..types import Collective

if TYPE_CHECKING:
    from ..runtime.executor import Seen
    from .edges import GpuEdges
    from .vendor_comm import GpuIslands

_PAUSE = 50e-6  # seconds between looks at a GPU
_ALGORITHMS = {
    Collective.ALLGATHER: "direct", Collective.ALLGATHERV: "direct", Collective.ALLTOALL: "pairwise",
    Collective.BROADCAST: "direct",
}  # fmt: skip
"""Those whose messages pulls take the place of."""


class Place(NamedTuple):
    """Where a call's data lies on every rank: a window, and bytes into it. `parts`: from there on is what is gathered,
    of which each rank gives its own part."""

    window: int
    offset: int
    parts: bool

    def __str__(self) -> str:
        return f"{'in place in' if self.parts else 'out of'} window {self.window} at byte {self.offset}"


class Pulls:
    """Those of rank `rank`. `windows` are those that all GPUs see, by number; they come and go."""

    def __init__(
        self,
        queue: _native.DeviceQueue,
        edges: GpuEdges,
        planner: Planner,
        islands: GpuIslands,
        windows: Mapping[int, Seen],
        rank: int,
    ) -> None:
        self._queue, self._edges, self._planner, self._windows = queue, edges, planner, windows
        self._whole, self._rank, self._size = islands.whole, rank, len(islands.alone)
        self.why_not = ""
        """Why there are none, whatever the windows: the same on all ranks."""

    def watches(self, collective: Collective) -> bool:
        """Whether where their buffers are decides how such calls go."""
        return bool(self._windows) and not self.why_not and self._could(collective)

    def _could(self, collective: Collective) -> bool:
        """Whether HETCOLL_ALGO takes it from the library, and asks for the algorithm that they take the place of."""
        name = _ALGORITHMS.get(collective)
        return self._whole and name is not None and self._planner.asked(collective) == name

    def place(self, call: Call) -> Place | None:
        """Where in a window it is; None where it takes slots."""
        if call.nbytes == 0 or call.compress or not self.watches(call.collective):
            return None
        assert call.send is not None
        assert call.recv is not None
        parts, first, most = False, call.send, call.send.nbytes
        if call.collective.plain is Collective.ALLGATHER:
            lengths = self._gathered(call)
            if not all(lengths):  # who gives nothing may have it anywhere
                return None
            most = max(lengths)
            if call.send.overlaps(call.recv):
                parts, first, most = True, call.recv, call.recv.nbytes
        for number, window in sorted(self._windows.items()):
            offset = first.ptr - window.base
            if 0 <= offset <= window.nbytes - most:
                return Place(number, offset, parts)
        return None

    def _gathered(self, call: Call) -> list[int]:
        """Bytes of each rank's part."""
        return [count * call.dtype.itemsize for count in call.shares(self._size)[1]]

    def bind(self, call: Call, place: Place) -> _native.DeviceShape:
        """See `Binder`: for a call that is there."""
        window, rank = self._windows[place.window], self._rank
        peers = [(rank + k) % self._size for k in range(1, self._size)]  # so that not all begin with one
        there = {peer: at + place.offset for peer, at in window.peers.items()}
        aside = False
        own: tuple[int, int, int] | None = None
        if call.collective is Collective.BROADCAST:
            readers = peers if rank == call.root else []
            found = [] if rank == call.root else [(call.root, 0, there[call.root], call.nbytes)]
        elif call.collective.plain is Collective.ALLGATHER:
            lengths = self._gathered(call)
            begins = list(accumulate(lengths, initial=0))
            readers = peers
            found = [(p, begins[p], there[p] + (begins[p] if place.parts else 0), lengths[p]) for p in peers]
            own = None if place.parts else (0, begins[rank], lengths[rank])
        else:
            each, aside = call.nbytes // self._size, call.in_place
            readers = peers
            found = [(p, p * each, there[p] + rank * each, each) for p in peers]
            own = None if aside else (rank * each, rank * each, each)
        return _native.DeviceQueue.bind_pulls(
            readers=[self._edges.pulls(True, peer) for peer in readers],
            pulls=[(self._edges.pulls(False, peer), dst, src, nbytes) for peer, dst, src, nbytes in found],
            own=own,
            aside=aside,
        )

    def end(self, seconds: float) -> None:
        """Wait until nothing that was called pulls any more, here or out of this rank's memory.

        Raises
        ------
        CollectiveTimeoutError
            That is not so after `seconds`: a rank has not called what this one has.
        """
        deadline = time.monotonic() + seconds
        while not self._done():
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"close: collectives that rank {self._rank} has called still read the window after {seconds:g} s"
                )
            time.sleep(_PAUSE)

    def _done(self) -> bool:
        """A GPU that has failed pulls nothing; who watches it says so."""
        try:
            return self._queue.pulls_done()
        except _native.Fault:
            return True

    def explain(self, collective: Collective) -> str:
        """For people: whether such calls are pulls, where HETCOLL_ALGO takes them from the library; else ""."""
        if not self._whole or self._planner.asked(collective) is None or collective is Collective.BARRIER:
            return ""
        if not self._could(collective):
            return f"out of no window, as {', '.join(f'{c.label}:{a}' for c, a in _ALGORITHMS.items())} can be"
        if self.why_not:
            return f"out of no window: {self.why_not}"
        if not self._windows:
            return "out of no window: none is open that all GPUs see"
        numbers = ", ".join(map(str, sorted(self._windows)))
        return f"what lies in window {numbers}, at one offset on all ranks, is pulled out of there and passes no slot"
