"""Frames of the control plane: a fixed header, then fields with their lengths. Nothing is ever unpickled.

Header, little-endian, 16 bytes: operation u8, status u8, reserved u16, body bytes u32, request u64. The body of most
frames is a list of fields, each u32 length and that many bytes. Replies carry the request they answer; pushes carry 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from ..errors import CommunicationError

HEADER = struct.Struct("<BBHIQ")
MAX_BODY = 64 << 20
MAX_ID = 256  # bytes of a group's name, a tag or a key
WORLD = b"world"
"""The name of a job's first group."""

U32 = struct.Struct("<I")
F64 = struct.Struct("<d")


class Op(IntEnum):
    """What a frame is. Below 64: from a member to the store; from 64 on: from the store to a member."""

    JOIN = 1  # group, rank, size, 1 where this process hosts the store, seconds -> rank that hosts it, or NOBODY
    LEAVE = 2  # group
    EXCHANGE = 3  # group, tag, packed values, packed ones of which only who has the same is told, own value, seconds
    # -> a column for each value: see `columns`; and among few ranks one of own values
    POST = 4  # group, kind, blob -> kind, blob and rank of the group's first verdict
    QUERY = 5  # group, blob, seconds -> a field a rank: 1 and the answer, or empty
    PUT = 6  # key, value
    GET = 7  # key, seconds -> value
    ANSWER = 8  # the number of the question, blob; has no reply
    BYE = 9  # this member leaves all its groups; has no reply
    SHRINK = 10  # group, seconds -> the number of the roll call, and who answered it: a field a rank, in rising order
    LOOK = 11  # group, tag of an exchange that is over, ranks -> the own value of each
    REPLY = 64
    LOST = 65  # group, rank, reason
    LEFT = 66  # group, ranks
    VERDICT = 67  # group, kind, blob, rank
    ASK = 68  # group, rank that asks, blob, the number of the question
    HOST = 69  # group, rank that hosts the store
    CLOSING = 70  # the process that hosts the store ends in order


class Status(IntEnum):
    """How a request ended. Except for OK the body is one text; for LOST a rank stands before it."""

    OK = 0
    REFUSED = 1
    TIMEOUT = 2
    LOST = 3


NOBODY = 0xFFFFFFFF  # in place of a rank


class Frame(NamedTuple):
    """One frame as it came."""

    op: int
    status: int
    request: int
    body: bytes

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
    fields, at = [], 0
    while at < len(body):
        if at + 4 > len(body):
            raise CommunicationError(f"a frame ends inside a length: {len(body) - at} bytes left")
        (length,) = U32.unpack_from(body, at)
        at += 4
        if at + length > len(body):
            raise CommunicationError(f"a frame ends inside a field: wanted {length} bytes, got {len(body) - at}")
        fields.append(body[at : at + length])
        at += length
    return fields


def header(op: Op, body: bytes, request: int = 0, status: Status = Status.OK) -> bytes:
    """The header that goes before `body`."""
    return HEADER.pack(op, status, 0, len(body), request)


class FrameReader:
    """Cuts a stream into frames."""

    def __init__(self, limit: int = MAX_BODY) -> None:
        self._limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take the next bytes of the stream and give the frames that they complete."""
        self._data += data
        while len(self._data) >= HEADER.size:
            op, status, _, length, request = HEADER.unpack_from(self._data)
            if length > self._limit:
                raise CommunicationError(f"a frame of {length} bytes: wanted at most {self._limit}")
            end = HEADER.size + length
            if len(self._data) < end:
                return
            body = bytes(memoryview(self._data)[HEADER.size : end])
            del self._data[:end]
            yield Frame(op, status, request, body)
