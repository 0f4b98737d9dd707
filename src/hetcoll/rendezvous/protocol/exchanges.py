"""One all-gather of the store in progress."""

from __future__ import annotations

from ...errors import CommunicationError
from .columns import pack_columns
from .keys import Member, RefusedError
from .wire import MAX_BODY, Op, Status, pack, unpack

MAX_EXCHANGE = MAX_BODY // 2  # bytes in all different values of one exchange
FEW = (
    32  # ranks of a group in which all are told what otherwise stays with the store: most of them will need most of it
)


class Exchange:
    """The values so far, by rank, each different one kept once, and the requests that wait for the rest.

    `failed` is why it did not complete in time. It stays, so that a late rank gets the same answer as the others.
    """

    def __init__(self) -> None:
        self.rows: dict[int, list[bytes]] = {}
        self.own: dict[int, bytes] = {}
        self._alike = 0
        self.failed = b""
        self.waiting: dict[int, tuple[Member, int]] = {}
        self._known: dict[bytes, bytes] = {}
        self._nbytes = 0

    def add(self, tag: bytes, rank: int, member: Member, request: int, blobs: tuple[bytes, bytes, bytes]) -> None:
        """What `rank` tells (a packed `Telling`); RefusedError where that does not fit what others told."""
        try:
            shared, alike, own = unpack(blobs[0]), unpack(blobs[1]), blobs[2]
        except CommunicationError as error:
            raise RefusedError(str(error)) from error
        row = shared + alike
        wanted = (len(next(iter(self.rows.values()))), self._alike) if self.rows else (len(row), len(alike))
        if (len(row), len(alike)) != wanted:
            raise RefusedError(f"rank {rank} tells {len(row)} values in {tag!r}: wanted {wanted[0]}, as others told")
        self._alike = len(alike)
        self._nbytes += sum(len(value) for value in row if value not in self._known) + len(own)
        if self._nbytes > MAX_EXCHANGE:
            raise RefusedError(f"the blobs of {tag!r} are too large: wanted at most {MAX_EXCHANGE} bytes in all")
        self.rows[rank] = [self._known.setdefault(value, value) for value in row]
        self.own[rank] = own
        self.waiting[rank] = (member, request)

    def finish(self, size: int) -> None:
        """All `size` ranks have told: answer them. Few ranks are told at once what each tells who asks."""
        columns = list(zip(*(self.rows[rank] for rank in range(size)), strict=True))
        own = [self.own[rank] for rank in range(size)] if size <= FEW else []
        body = pack([pack_columns(columns, size, self._alike), pack_columns([own], size) if own else b""])
        self.answer(body, Status.OK)

    def answer(self, body: bytes, status: Status) -> None:
        """Send the body, which is built once and shared by all, to those who wait, and keep no more."""
        for member, request in self.waiting.values():
            member.send(Op.REPLY, body, request, status)
        self.waiting.clear()
        self.rows.clear()  # its timer still refers to it
        self._known.clear()
