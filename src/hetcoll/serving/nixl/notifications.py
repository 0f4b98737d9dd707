"""Messages of bytes to a rank that looks for them when it likes: a ring for each pair of ranks, over windows."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import Communicator, Work

_SLOTS, _WIDTH = 32, 4096  # of a pair's ring
_HEAD = struct.Struct("<IIQ")  # whether the program is not to see it; bytes of the message from here on
_ROOM = _WIDTH - _HEAD.size


class Notifications:
    """Of one communicator: made by all ranks together. A peer's come there in the order in which they were posted.
    `hear` is given those that are not for the program."""

    def __init__(self, comm: Communicator, hear: Callable[[int, bytes], None]) -> None:
        self._hear = hear
        size, self._rank = comm.size, comm.rank
        self._ring = np.zeros((size, _SLOTS, _WIDTH), np.uint8)  # by sender
        self._taken = np.zeros(size, np.int64)
        self._rings, self._counts = comm.window(self._ring, signals=size), comm.window(self._taken, signals=0)
        self._sent = [0] * size
        self._known = [0] * size  # of what was sent, how many the peer has taken
        self._waiting: list[deque[bytes]] = [deque() for _ in range(size)]
        self._works: list[deque[Work]] = [deque() for _ in range(size)]
        self._partial = [bytearray() for _ in range(size)]

    def post(self, peer: int, message: bytes, *, inner: bool = False) -> None:
        """Begin to send it. `pump` goes on, where the ring has no room now."""
        for at in range(0, max(len(message), 1), _ROOM):
            self._waiting[peer].append(_HEAD.pack(inner, 0, len(message) - at) + message[at : at + _ROOM])
        self.pump(peer)

    def pump(self, peer: int) -> bool:
        """Whether all that was posted to the peer is there. Raises what it failed with."""
        waiting, works = self._waiting[peer], self._works[peer]
        if waiting and self._sent[peer] - self._known[peer] == _SLOTS:
            taken = np.empty(1, np.int64)
            self._counts.get(taken, peer, self._rank)
            self._known[peer] = int(taken[0])
        while waiting and self._sent[peer] - self._known[peer] < _SLOTS:
            at = (self._rank * _SLOTS + self._sent[peer] % _SLOTS) * _WIDTH
            part = np.frombuffer(waiting.popleft(), np.uint8)
            works.append(self._rings.put(part, peer, at, signal=self._rank, async_op=True))
            self._sent[peer] += 1
        while works and works[0].done:
            works.popleft().wait()
        return not waiting and not works

    def take(self, found: dict[int, list[bytes]]) -> None:
        """Add what has come for the program since the last call, by sender: also where `hear` raises."""
        for sender, partial in enumerate(self._partial):
            while self._taken[sender] < self._rings.signal(sender):
                slot = self._ring[sender, int(self._taken[sender]) % _SLOTS].tobytes()
                inner, _, rest = _HEAD.unpack_from(slot)
                partial += slot[_HEAD.size : _HEAD.size + min(rest, _ROOM)]
                self._taken[sender] += 1  # from now on the slot may be written
                if rest <= _ROOM:
                    message = bytes(partial)
                    partial.clear()
                    if inner:
                        self._hear(sender, message)
                    else:
                        found.setdefault(sender, []).append(message)

    def close(self) -> None:
        self._rings.close()
        self._counts.close()

    @property
    def side(self) -> Any:
        """What carries the messages of all windows of the communicator."""
        return self._rings._side
