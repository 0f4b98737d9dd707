"""Frames of the control plane: a fixed header, then fields with their lengths. Nothing is ever unpickled.

Header, little-endian, 16 bytes: operation u8, status u8, number u16, body bytes u32, request u64. The number is that of
the frame among those of its member (`streams`). The body of most frames is a list of fields, each u32 length and that
many bytes. Replies carry the request they answer; pushes carry 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from ...errors import CommunicationError, parser

HEADER = struct.Struct("<BBHIQ")
MAX_BODY = 64 << 20
MAX_ID = 256  # bytes of a group's name, a tag or a key
ACTIVITY = "activity"  # what those who look on ask every process
WORLD = b"world"
"""The name of a job's first group."""

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")
F64 = struct.Struct("<d")


class Op(IntEnum):
    """What a frame is. Below 64: from a member to the store; from 64 on: from the store to a member."""

    JOIN = 1  # group, rank, size, 1 where this process hosts the store, seconds -> rank that hosts it, or NOBODY
    LEAVE = 2  # group, last words: what those who ask this rank from now on are told, or nothing
    EXCHANGE = 3  # group, tag, packed values, packed ones of which only who has the same is told, own value, seconds
    # -> a column for each value: see `columns`; and among few ranks one of own values
    POST = 4  # group, kind, blob -> kind, blob and rank of the group's first verdict
    QUERY = 5  # group, blob, seconds -> a field a rank: 1 and the answer, 2 and the last words, or empty
    PUT = 6  # key, value
    GET = 7  # key, seconds -> value
    ANSWER = 8  # the number of the question, blob; has no reply
    BYE = 9  # this member leaves all its groups; the fields of LEAVE for one of them; has no reply
    SHRINK = 10  # group, number of the roll call, seconds -> that number, and who answered it: a field a rank, in
    # rising order
    LOOK = 11  # group, tag of an exchange that is over, ranks -> the own value of each
    ENTER = 12  # the first frame: see `uplink.Entry` -> WELCOME or GO
    ACK = 13  # how many frames have come, u64; both ways
    SYNC = 14  # the same, after the way has changed -> SYNCED
    GONE = 15  # of a relay: its child is gone, and why (AGAIN: its connection broke); from a relay: it ends, since the
    # store's host fell silent
    UP = 16  # of a relay: see `routes`
    AGREE = 17  # group, number, flag i64, seconds -> the bits that the flags of all have who are alive
    GROW = 18  # group, number, how many newcomers, what they are told, seconds -> the new group, rank, size, that
    ADMIT = 19  # seconds -> the group that takes this process in, rank, size, what its members told
    STANDING = 20  # nothing, where this process listens as a successor of the store; has no reply
    RETURN = 21  # 1 where this process hosts the store, where it listens as a successor, the last SUCCESSORS, what it
    # knows of its groups (`past`); a member's first frame to a store that has taken the place of another; has no reply
    SURVEY = 22  # blob, seconds -> the last SUCCESSORS; of each process of the job a group, its rank there, and empty
    # or 1 and the answer
    CHILDREN = 23  # of a relay, after its way has changed: those that it has, u32 each
    REPLY = 64
    LOST = 65  # group, rank, reason
    LEFT = 66  # group, ranks
    VERDICT = 67  # group, kind, blob, rank
    ASK = 68  # group, rank that asks, blob, the number of the question
    HOST = 69  # group, rank that hosts the store
    CLOSING = 70  # the process that hosts the store ends in order
    WELCOME = 71  # how many frames of this member came, u64
    GO = 72  # the token of a relay and where it listens: see `uplink`; nothing: come again
    SERVE = 73  # this process is to be a relay
    DOWN = 74  # to a relay: see `routes`
    CUT = 75  # to who has said goodbye: that has come, and the connection is closed
    RESYNC = 76  # from a relay: the way to the store has changed
    SYNCED = 77  # how many frames of this member came, u64
    BEAT = 78  # from a relay, now and then, both ways: it is there
    STAND = 79  # this process is to be a successor: the context of its greeting, 1 where it hands out the unique id,
    # seconds to wait at exit
    SUCCESSORS = 80  # how many of the job's processes the store is not in, how many of these are not on its host
    # either, and how many fell silent of late, u32 each; where each successor listens; nothing: as before


class Status(IntEnum):
    """How a request ended. Except for OK the body is one text; for LOST a rank stands before it.

    A request itself is OK, or AGAIN: it was sent to the store before this one, too."""

    OK = 0
    REFUSED = 1
    TIMEOUT = 2
    LOST = 3
    AGAIN = 4


NOBODY = 0xFFFFFFFF  # in place of a rank


class Frame(NamedTuple):
    """One frame as it came."""

    op: int
    status: int
    request: int
    body: bytes
    number: int = 0

    @property
    def fields(self) -> list[bytes]:
        return unpack(self.body)


def pack(fields: Iterable[bytes]) -> bytes:
    """The body that `unpack` reads."""
    parts: list[bytes] = []
    for item in fields:
        parts += (U32.pack(len(item)), item)
    return b"".join(parts)


def unpack(body: bytes) -> list[bytes]:
    """The fields of a body; CommunicationError where it is cut short."""
    fields, at, size = [], 0, len(body)
    while at < size:
        if at + 4 > size:
            raise CommunicationError(f"a frame ends inside a length: {size - at} bytes left")
        begin = at + 4
        at = begin + int.from_bytes(body[at:begin], "little")
        if at > size:
            raise CommunicationError(f"a frame ends inside a field: wanted {at - begin} bytes, got {size - begin}")
        fields.append(body[begin:at])
    return fields


@parser("a count of frames")
def read_count(body: bytes) -> int:
    """The body of WELCOME, ACK, SYNC and SYNCED."""
    (count,) = U64.unpack(body)
    return int(count)


def header(op: int, body: bytes, request: int = 0, status: int = Status.OK, number: int = 0) -> bytes:
    """The header that goes before `body`."""
    return HEADER.pack(op, status, number, len(body), request)


class FrameReader:
    """Cuts a stream into frames."""

    def __init__(self, limit: int = MAX_BODY) -> None:
        self._limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take the next bytes of the stream and give the frames that they complete."""
        self._data += data
        while len(self._data) >= HEADER.size:
            op, status, number, length, request = HEADER.unpack_from(self._data)
            if length > self._limit:
                raise CommunicationError(f"a frame of {length} bytes: wanted at most {self._limit}")
            end = HEADER.size + length
            if len(self._data) < end:
                return
            body = bytes(memoryview(self._data)[HEADER.size : end])
            del self._data[:end]
            yield Frame(op, status, request, body, number)
