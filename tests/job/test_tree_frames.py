"""What travels in the tree of a large job: streams that lose nothing where sockets are reset, frames with routes."""

from __future__ import annotations

import struct
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetcoll.errors import CommunicationError
from hetcoll.rendezvous import uplink
from hetcoll.rendezvous.protocol.routes import Entry, extend_up, pack_down, pack_up, unpack_down, unpack_up
from hetcoll.rendezvous.protocol.streams import Sent, Stream
from hetcoll.rendezvous.protocol.wire import Frame, Op


@given(st.lists(st.sampled_from(["send", "deliver", "cut", "resync"]), max_size=60))
def test_a_stream_gives_each_frame_once_and_in_order_whatever_is_lost(moves: list[str]) -> None:
    ends, wires = (Stream(), Stream()), (deque[Sent](), deque[Sent]())
    sent: tuple[list[bytes], list[bytes]] = ([], [])
    came: tuple[list[bytes], list[bytes]] = ([], [])

    def resync() -> None:
        for here, there in ((0, 1), (1, 0)):
            ends[here].acknowledge(ends[there].received)
            wires[here].extend(ends[here].again())

    def deliver(side: int) -> None:
        frame = wires[side].popleft()
        if ends[1 - side].accept(frame.number):
            came[1 - side].append(frame.body)

    for number, move in enumerate([*moves, "resync"]):
        side = number % 2
        if move == "send":
            sent[side].append(b"%d" % number)
            wires[side].append(ends[side].put(Op.PUT, sent[side][-1]))
        elif move == "deliver" and wires[side]:
            deliver(side)
        elif move == "cut":
            wires[0].clear()
            wires[1].clear()
        elif move == "resync":
            resync()
    for side in (0, 1):
        while wires[side]:
            deliver(side)
    assert came == (sent[1], sent[0])
    with pytest.raises(CommunicationError):
        ends[0].acknowledge(len(sent[0]) + 1)


routes = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=16).map(tuple)
entries = st.lists(st.builds(Entry, routes, st.integers(0, 2**64 - 1), st.integers(0, 65535)), max_size=5)


@given(entries, st.binary(max_size=20), st.integers(64, 90), st.integers(0, 3))
def test_frames_downwards_come_back(found: list[Entry], body: bytes, op: int, status: int) -> None:
    assert unpack_down(pack_down(op, status, found, body)) == (op, status, found, body)


@given(routes, st.binary(max_size=20), st.integers(0, 65535))
def test_frames_upwards_bring_their_route(route: tuple[int, ...], body: bytes, number: int) -> None:
    frame = Frame(Op.PUT, 0, 7, body, number)
    packed = pack_up(route[-1], frame)
    for child in reversed(route[:-1]):
        packed = extend_up(child, packed)
    assert unpack_up(packed) == (route, frame)
    if len(route) == 16:
        with pytest.raises(CommunicationError):
            extend_up(1, packed)


@given(st.binary(max_size=60))
def test_garbled_frames_are_errors(data: bytes) -> None:
    for unpack in (unpack_up, unpack_down, uplink.Entry.read):
        with suppress(CommunicationError, ValueError, struct.error):  # anything else would end the thread that reads
            unpack(data)
