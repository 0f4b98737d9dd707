"""Frames that are numbered: what is lost with a connection, or with a relay, is sent again.

Where a way between a member and the store breaks, frames are lost on both sides, always the last ones of those that
went that way. So each side keeps what the other has not acknowledged, and says how much has come when there is a new
way. A frame's number is the low 16 bits of its place in the stream; what does not come in its turn
is dropped, since it comes again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import CommunicationError
from .wire import Op, Status

_NUMBERS = 1 << 16
_ACKNOWLEDGE = 64  # frames that came since the last acknowledgement
_ACKNOWLEDGE_BYTES = 256 << 10  # of these, which the other end keeps so long
MAX_KEPT = _NUMBERS - 1  # frames that nobody has acknowledged


class Sent(NamedTuple):
    """A frame and its number."""

    op: Op
    body: bytes
    request: int
    status: Status
    number: int


class Stream:
    """One end of the frames of a member, in both directions. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: deque[Sent] = deque()
        self._acknowledged = 0  # frames sent that the other end has
        self.received = 0  # frames
        self._told = 0  # of these, of how many the other end knows
        self._nbytes = 0  # of those of which it does not

    @property
    def sent(self) -> int:
        """Frames, each counted once."""
        return self._acknowledged + len(self._kept)

    def put(self, op: Op, body: bytes, request: int = 0, status: Status = Status.OK) -> Sent:
        """The next frame to send."""
        if len(self._kept) >= MAX_KEPT:
            raise CommunicationError(f"{len(self._kept)} frames were not acknowledged")
        frame = Sent(op, body, request, status, self.sent % _NUMBERS)
        self._kept.append(frame)
        return frame

    def accept(self, number: int, nbytes: int = 0) -> bool:
        """Whether the frame that came with this number, and so many bytes, is the one that is due."""
        if number != self.received % _NUMBERS:
            return False
        self.received += 1
        self._nbytes += nbytes
        return True

    def owes(self) -> bool:
        """Whether it is time to acknowledge what was `received`; then it counts as done."""
        if self.received - self._told < _ACKNOWLEDGE and self._nbytes < _ACKNOWLEDGE_BYTES:
            return False
        self._told, self._nbytes = self.received, 0
        return True

    def acknowledge(self, count: int) -> None:
        """The other end has received so many frames in all."""
        if not self._acknowledged <= count <= self.sent:
            raise CommunicationError(f"{count} frames are acknowledged: {self.sent} were sent")
        while self._acknowledged < count:
            self._kept.popleft()
            self._acknowledged += 1

    def again(self) -> Iterator[Sent]:
        """All that the other end does not have, as far as is known."""
        return iter(list(self._kept))
