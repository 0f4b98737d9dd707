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
from typing import TYPE_CHECKING

import hetcoll._native as _native

from ..calls import Call
from ..errors import CollectiveTimeoutError
from ..types import Collective

if TYPE_CHECKING:
    from ..runtime.executor import Seen
    from .edges import GpuEdges
    from .planner import Place

_PAUSE = 50e-6  # seconds between looks at a GPU


class Pulls:
    """Those of rank `rank` of `size`. `windows` are those that all GPUs see, by number; they come and go."""

    def __init__(
        self, queue: _native.DeviceQueue, edges: GpuEdges, windows: Mapping[int, Seen], rank: int, size: int
    ) -> None:
        self._queue, self._edges, self._windows, self._rank, self._size = queue, edges, windows, rank, size

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
            lengths = [count * call.dtype.itemsize for count in call.shares(self._size)[1]]
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
