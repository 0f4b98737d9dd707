"""Windows through which few tokens travel between ranks of any kind: of each block, and of sums, what there is.

A rank puts a block that it has for another one into that one's window: the ids of all of its tokens, and the rows of
those that go there, one behind the other; so the other one finds out which these are. Sums come back likewise. Blocks
have two places by turns: all ranks meet in each dispatch, so none is more than one ahead, and what came before may
still be read. Combines meet before sums are put, where they tell each other weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .. import Communicator, InitError
from .rows import Wire

if TYPE_CHECKING:
    from ..runtime.one_sided import Window

_LINE = 16
_MOST_TEXT = 400  # of a problem


class Sizes(NamedTuple):
    """What a rank sends each other one: up to `most` tokens with `topk` ids each. Each rank has so many experts."""

    wire: Wire
    most: int
    topk: int
    experts: int

    @property
    def ids(self) -> int:
        """Bytes of ids, or weights, of 32 bits."""
        return -(-4 * self.most * self.topk // _LINE) * _LINE

    @property
    def head(self) -> int:
        """The same and a line more; BlockHead of tokens.h."""
        return self.ids + _LINE

    @property
    def rows(self) -> int:
        """Bytes of the sums for a rank."""
        return self.most * self.wire.stride

    @property
    def block(self) -> int:
        """Bytes of ids and tokens."""
        return self.head + self.most * self.wire.packed


class Places(NamedTuple):
    """Where in a window what is of each rank begins, in bytes."""

    sizes: Sizes
    ranks: int

    @property
    def odd(self) -> int:
        """From a block to that of the next dispatch."""
        return self.ranks * self.sizes.block

    @property
    def end(self) -> int:
        """Of all."""
        return self.sums(self.ranks)

    def block(self, rank: int, turn: int = 0) -> int:
        """Of ids and tokens, by turns."""
        return turn * self.odd + rank * self.sizes.block

    def sums(self, rank: int) -> int:
        """Of a rank's sums."""
        return 2 * self.odd + rank * self.sizes.rows


class Arrivals:
    """Counts what is put into a rank's window: by each other rank one in every dispatch and combine, with the signal of
    that rank's number."""

    def __init__(self, comm: Communicator, window: Window) -> None:
        self._comm, self._window, self._all, self.dispatches = comm, window, 0, 0

    @property
    def turn(self) -> int:
        """Of the next dispatch, 0 or 1."""
        return self.dispatches % 2

    def wait(self, timeout: float | None, stream: int | None = None) -> None:
        """Until what is put in the next call is there; on a GPU what comes on the stream later waits."""
        self._all += 1
        for peer in range(self._comm.size):
            if peer != self._comm.rank:
                self._window.wait_signal(peer, self._all, timeout=timeout, stream=stream, async_op=stream is not None)


def agree(comm: Communicator, problem: str, timeout: float | None) -> None:
    """InitError on all ranks where one has a problem."""
    for rank, each in enumerate(comm._core.meet("where experts' tokens go", problem.encode()[:_MOST_TEXT], timeout)):
        if each:
            raise InitError(f"memory for experts' tokens on rank {rank}: {each.decode(errors='replace')}")
