"""Frames on their way through relays: the route is in the frame, so that a relay knows nothing but its own children.

A relay numbers its children. Upwards each relay puts the number of the child before the route that it came with.
Downwards one frame may be for many members: each has an entry with its route, its request and its number, and a relay
sends on to each child what is for those behind it. The body travels once over each connection.

Up: depth u8, as many children's numbers u32, a whole frame. Down: operation u8, status u8, 2 reserved, entries u32; the
entries, each depth u8, number u16, request u64 and as many children's numbers u32; the body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from ...errors import CommunicationError, parser
from .wire import HEADER, Frame, header

_DEPTH = struct.Struct("<B")
_DOWN = struct.Struct("<BB2xI")
_ENTRY = struct.Struct("<BHQ")
MAX_DEPTH = 16

Route = tuple[int, ...]


class Entry(NamedTuple):
    """For whom a frame is: the way there, and its own request and number."""

    route: Route
    request: int
    number: int


class Down(NamedTuple):
    """One frame for several."""

    op: int
    status: int
    entries: list[Entry]
    body: bytes


def pack_up(child: int, frame: Frame) -> bytes:
    """The body of a frame upwards, of what came from `child`, which is itself."""
    inner = header(frame.op, frame.body, frame.request, frame.status, frame.number)
    return b"".join((_DEPTH.pack(1), struct.pack("<I", child), inner, frame.body))


@parser("a frame through relays")
def extend_up(child: int, body: bytes) -> bytes:
    """The same, of what `child` sends on. What is wrong in it is found here, or its relay would answer for it."""
    route, _ = unpack_up(body)
    if len(route) >= MAX_DEPTH:
        raise CommunicationError(f"a frame came through {len(route)} relays")
    return b"".join((_DEPTH.pack(len(route) + 1), struct.pack("<I", child), body[1:]))


@parser("a frame through relays")
def unpack_up(body: bytes) -> tuple[Route, Frame]:
    """The way that a frame came, and the frame."""
    (depth,) = _DEPTH.unpack_from(body)
    route: Route = struct.unpack_from(f"<{depth}I", body, 1)
    at = 1 + 4 * depth
    op, status, number, length, request = HEADER.unpack_from(body, at)
    inner = body[at + HEADER.size :]
    if len(inner) != length or not 1 <= depth <= MAX_DEPTH:
        raise CommunicationError(f"a frame of {len(inner)} bytes through {depth} relays: wanted {length}")
    return route, Frame(op, status, request, inner, number)


def pack_down(op: int, status: int, entries: Iterable[Entry], body: bytes) -> bytes:
    """The body that `unpack_down` reads."""
    parts = [
        _ENTRY.pack(len(e.route), e.number, e.request) + struct.pack(f"<{len(e.route)}I", *e.route) for e in entries
    ]
    return b"".join((_DOWN.pack(op, status, len(parts)), *parts, body))


@parser("a frame through relays")
def unpack_down(body: bytes) -> Down:
    """What `pack_down` made."""
    op, status, count = _DOWN.unpack_from(body)
    at, entries = _DOWN.size, []
    for _ in range(count):
        depth, number, request = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        if not 1 <= depth <= MAX_DEPTH:
            raise CommunicationError(f"a route through {depth} relays")
        entries.append(Entry(struct.unpack_from(f"<{depth}I", body, at), request, number))
        at += 4 * depth
    return Down(op, status, entries, body[at:])
