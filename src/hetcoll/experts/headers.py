"""What ranks tell each other at the begin of a dispatch or combine, beside the tokens: how many come, and for whom.

Who has heard from a rank knows that it is done with all calls before this one, so that its window may be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import Communicator, Work

_WORDS = 4  # in front of the rows: which call, of which layout, how many rows, and one that is 0
_CALLS = ("dispatch", "combine")

Words = np.ndarray[Any, np.dtype[np.int32]]


class Headers:
    """Of one `Experts`: each rank sends up to `most` rows of `width` 32-bit words to every other in a call.

    A rank may be one call ahead of another, and no more: so there is room for two of each.
    """

    def __init__(self, comm: Communicator, most: int, width: int, timeout: float | None) -> None:
        self._comm, self._width = comm, width
        self._each = _WORDS + most * width
        self._memory = np.zeros((comm.size, 2, self._each), np.int32)
        self._window = comm.window(self._memory, signals=comm.size, timeout=timeout)
        self._calls = 0

    def exchange(self, call: str, layout: int, rows: Sequence[Words], timeout: float | None) -> list[Words]:
        """Send each rank its rows, and return what came of every rank: views that stay until the next call but one.

        `CollectiveMismatchError` on all ranks where some are in another call.
        """
        comm, mine = self._comm, (_CALLS.index(call), layout)
        turn, self._calls = self._calls % 2, self._calls + 1
        works: list[Work] = []
        for step in range(1, comm.size):  # each begins with another one
            peer = (comm.rank + step) % comm.size
            words = np.concatenate([np.array([*mine, len(rows[peer]), 0], np.int32), rows[peer].ravel()])
            at = (2 * comm.rank + turn) * self._each
            works.append(self._window.put(words, peer, at, signal=comm.rank, async_op=True))
        came = list(rows)
        for peer in range(comm.size):
            if peer == comm.rank:
                continue
            self._window.wait_signal(peer, self._calls, timeout=timeout)
            theirs = self._memory[peer, turn]
            if (int(theirs[0]), int(theirs[1])) != mine:
                self._differ(peer, mine, (int(theirs[0]), int(theirs[1])))
            came[peer] = theirs[_WORDS : _WORDS + int(theirs[2]) * self._width].reshape(-1, self._width)
        for work in works:
            work.wait(timeout)
        return came

    def _differ(self, peer: int, mine: tuple[int, int], theirs: tuple[int, int]) -> None:
        """All ranks are to hear of it."""
        core = self._comm._core
        words = [
            f"rank {rank} called {_CALLS[call]} of layout {layout}"
            for rank, (call, layout) in sorted([(core.rank, mine), (peer, theirs)])
        ]
        raise core.differ(f"experts: {', and '.join(words)}")

    def close(self) -> None:
        """Local."""
        self._window.close()
