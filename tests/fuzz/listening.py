"""Listeners under any bytes: from strangers, and from those who have proven the secret.

Each `take` gives one connection some bytes. Whoever else is there is served as before, and nothing is logged as a
failure of the listener.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hetcoll.config.env import Config
from hetcoll.errors import HetcollError
from hetcoll.links.edges import EdgeKey, Request
from hetcoll.links.listener import Listener
from hetcoll.rendezvous.bootstrap import get_unique_id
from hetcoll.rendezvous.connections import probe
from hetcoll.rendezvous.connections.auth import CLAIM, GREETING, Challenge, Response, Service
from hetcoll.rendezvous.connections.sockets import receive_exactly
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.rendezvous.protocol.unique_id import UniqueId
from hetcoll.rendezvous.protocol.wire import F64, U32, U64, FrameReader, Op, Status, header, pack
from hetcoll.rendezvous.relay import Relay
from hetcoll.rendezvous.store import server
from hetcoll.rendezvous.uplink import TOKEN_BYTES, Entry, Kind

from .targets import SECRET

SECONDS = 20.0
Take = Callable[[bytes], None]

_OPS = [op for op in Op if op not in (Op.SUCCESSORS, Op.GO)]  # these name hosts, which the other side would look up
_FIELDS = (
    b"", b"world", b"a", b"\0", b"\1", *map(U32.pack, (0, 1, 2, 0xFFFFFFFF)), *map(F64.pack, (0.0, 0.01, -1.0, 1e300)),
    F64.pack(float("nan")), struct.pack("<Q", 0), struct.pack("<Q", 2**64 - 1), pack([b"a", b"b"]),
    b"\xff" * 9, bytes(300),
)  # fmt: skip


_PAST_THE_STREAM = {Op.ENTER, Op.ACK, Op.SYNC, Op.BEAT, Op.CUT, Op.RESYNC, Op.SYNCED}


def frames(data: bytes, number: int = 0) -> bytes:
    """Bytes for people who speak the protocol: whole frames of known fields, as `data` says, then its rest. The first
    has this number in its stream."""
    parts, at = [], 0
    while at + 2 <= len(data) and len(parts) < 40:
        op, count = _OPS[data[at] % len(_OPS)], data[at + 1] % 8
        chosen = data[at + 2 : at + 2 + count]
        body = pack(_FIELDS[each % len(_FIELDS)] for each in chosen)
        parts += [header(op, body, data[at + 1], data[at + 1] >> 6, number), body]
        number += op not in _PAST_THE_STREAM
        at += 2 + count
    return b"".join(parts) + data[at:]


@contextmanager
def quiet() -> Iterator[None]:
    """No listener says that it failed, and no thread of one ends by an exception."""
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(logging.Formatter().format(record))  # type: ignore[method-assign]
    before, threading.excepthook = threading.excepthook, lambda args: said.append(repr(args))
    logging.getLogger("hetcoll").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("hetcoll").removeHandler(handler)
        threading.excepthook = before
    assert not said, "\n".join(said)


def _entry() -> bytes:
    """The first frame of a member."""
    body = Entry(Kind.MEMBER, os.urandom(TOKEN_BYTES), 1, attempt=time.monotonic_ns()).pack()
    return header(Op.ENTER, body) + body


def _give(sock: socket.socket, data: bytes) -> None:
    """The bytes, and then the end: what came is read before whoever comes later is served."""
    sock.settimeout(SECONDS)
    with suppress(OSError):  # it may be closed in the middle of it
        sock.sendall(data)


@contextmanager
def _job() -> Iterator[tuple[UniqueId, Callable[[], None]]]:
    """A store, and what shows that it serves: a member that sets a key and reads it."""
    unique_id = get_unique_id(Config(linger=0), loopback=True)
    client = ControlClient(unique_id, 0, 1, SECONDS, group=None)
    count = 0

    def served() -> None:
        nonlocal count
        count += 1
        client.put(b"good", b"%d" % count)
        assert client.get(b"good") == b"%d" % count

    try:
        yield unique_id, served
    finally:
        client.close()
        server._hosted[unique_id.job_id].close()


@contextmanager
def store_and_members() -> Iterator[Take]:
    """The store, and a process that has proven the secret and says anything."""
    with _job() as (unique_id, served):

        def take(data: bytes) -> None:
            sock, _ = probe.connect_store(unique_id, time.monotonic() + SECONDS)
            _give(sock, _entry() + frames(data))
            served()
            sock.close()
            served()

        yield take


@contextmanager
def store_and_strangers() -> Iterator[Take]:
    """The store, and who connects and says anything."""
    with _job() as (unique_id, served):

        def take(data: bytes) -> None:
            with socket.create_connection(unique_id.addresses[0], SECONDS) as sock:
                _give(sock, data)
                served()
            served()

        yield take


@contextmanager
def relay_and_children() -> Iterator[Take]:
    """A relay and the store above it, and a child that says anything."""
    with _job() as (unique_id, served):
        relay = Relay(unique_id, "127.0.0.1", 100, SECONDS)

        def take(data: bytes) -> None:
            where = (relay._token, relay._entry.addresses, time.monotonic() + SECONDS)
            sock = probe.connect_relay(unique_id, *where)
            _give(sock, _entry() + frames(data))
            probe.connect_relay(unique_id, *where).close()  # it serves the next one after what came before
            sock.close()
            served()
            assert relay._thread.is_alive(), "a child may not end its relay"

        try:
            yield take
        finally:
            relay.close()


@contextmanager
def links_and_strangers() -> Iterator[Take]:
    """The listener of a rank's links; the first byte says whether the claim is proven, and the rest what it is for."""
    ours, theirs = (Listener(Config(), SECRET, loopback=True) for _ in range(2))
    number = 0

    def take(data: bytes) -> None:
        nonlocal number
        number += 1
        with socket.create_connection(theirs.addresses[0][:2], SECONDS) as sock:
            if data[:1] > b"\x7f":
                sock.setblocking(False)
                greeting = receive_exactly(sock, GREETING.size, time.monotonic() + SECONDS)
                data = Response(SECRET, greeting, data[1:33].ljust(32, b"\0")).claim + data[33:]
            _give(sock, data)
            key = EdgeKey(b"c" * 16, 0, number)
            ends = ours.connect_many([Request(key, theirs.addresses)], time.monotonic() + SECONDS)
            ends[key].close()
            theirs.take([key], time.monotonic() + SECONDS)[key].close()

    try:
        yield take
    finally:
        ours.close()
        theirs.close()


@contextmanager
def member_and_store() -> Iterator[Take]:
    """A member, and a store that says anything once it has let it in: the member's calls end with errors of ours."""

    def serve(listener: socket.socket, data: bytes) -> None:
        with listener:
            sock, _ = listener.accept()  # who comes again finds nobody
        with sock:
            sock.settimeout(SECONDS)
            challenge = Challenge(SECRET, Service.STORE, bytes(16))
            sock.sendall(challenge.greeting)
            sock.sendall(challenge.judge(sock.recv(CLAIM.size, socket.MSG_WAITALL)).verdict)
            reader, answer = FrameReader(), pack([U32.pack(0)])
            next(reader.feed(sock.recv(1 << 16)))  # it enters
            sock.sendall(header(Op.WELCOME, U64.pack(0)) + U64.pack(0))
            join = next(reader.feed(sock.recv(1 << 16)))
            with suppress(OSError):
                sock.sendall(header(Op.REPLY, answer, join.request, Status.OK) + answer + frames(data, 1))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass

    def take(data: bytes) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        unique_id = UniqueId((listener.getsockname(),), bytes(16), SECRET)
        thread = threading.Thread(target=serve, args=(listener, data))
        thread.start()
        client = ControlClient(unique_id, 0, 1, SECONDS, lambda group, event: b"here")
        with suppress(HetcollError):
            client.exchange(WORLD, b"tag", b"blob", SECONDS)
        client.close()
        thread.join(SECONDS)
        assert not thread.is_alive()
        assert not client._thread.is_alive()

    yield take


LISTENERS = {
    "the store, its members": store_and_members,
    "the store, strangers": store_and_strangers,
    "a relay, its children": relay_and_children,
    "links, strangers": links_and_strangers,
    "a member, its store": member_and_store,
}
