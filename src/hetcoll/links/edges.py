"""What a data-plane connection is for, and where it can be made: the vocabulary of `listener` and `connector`."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import ArgumentError, parser
from ..rendezvous.protocol.wire import pack, unpack

_KEY = struct.Struct("<16sIIHHI")
assert _KEY.size == 32  # it is the context of the connection's claim
_HURRIED = 1 << 15  # of the stripe's bits
_PORT = struct.Struct("<H")


TALKS = (1 << 16) - 1
"""The channel of sockets by which two ranks agree on a way between them, before there are links (`gpu.far_proof`)."""

ADMITTED, YIELD = b"\1", b"\0"
"""A listener's last byte of the handshake: whether the connection is taken, or the listener's own counts instead."""

CONFIRMED = b"\2"
"""What the connector answers to ADMITTED. Until then it may have given the connection up, and the link is none."""


CAME = struct.Struct("<QQI")
"""What both tell right after that of a socket that is made again: a `Came`."""


TAKEN = b"\1"
"""What the engine at either end of it says then, when it has taken that socket over (``Sockets::Resume``)."""


class Came(NamedTuple):
    """Of a stream: how many bytes ever came; of them, where those begin that were spoiled, and how many these are."""

    total: int
    spoiled_at: int = 0
    spoiled: int = 0


LEFT = Came((1 << 64) - 1)
"""What an end tells that does not use the socket any more (``kLeft`` in native/transport/tcp_mending.h): nobody will
make it again."""


class EdgeKey(NamedTuple):
    """One socket between two ranks. `src` connects, or `dst` where it is in a hurry; bytes go both ways. `comm` is 16
    bytes. `life` is above 0 for a socket that is made again: which try it is."""

    comm: bytes
    src: int
    dst: int
    channel: int = 0
    stripe: int = 0
    life: int = 0

    def encode(self, *, hurried: bool = False) -> bytes:
        """32 bytes. `hurried` says that `dst` connects."""
        if len(self.comm) != 16:
            raise ArgumentError(f"a communicator's id: wanted 16 bytes, got {len(self.comm)}")
        return _KEY.pack(*self[:4], self.stripe | (_HURRIED if hurried else 0), self.life)

    @classmethod
    def decode(cls, data: bytes) -> tuple[EdgeKey, bool]:
        """What `encode` made: the key, and whether `dst` connects."""
        comm, src, dst, channel, stripe, life = _KEY.unpack(data)
        return cls(comm, src, dst, channel, stripe & ~_HURRIED, life), bool(stripe & _HURRIED)

    def __str__(self) -> str:
        again = f", try {self.life}" if self.life else ""
        return f"{self.src} to {self.dst}, channel {self.channel}, stripe {self.stripe}{again}"


class Address(NamedTuple):
    """Where a rank listens. `token`, 16 bytes, is the listener's own: another process may have the same address. All
    addresses of a listener have one token."""

    host: str
    port: int
    interface: str
    token: bytes


class Request(NamedTuple):
    """An edge to make, and where the rank at its other end listens. `hurried`: that is `src`, and we do not wait."""

    key: EdgeKey
    addresses: Sequence[Address]
    hurried: bool = False

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.key.src if self.hurried else self.key.dst


def pack_addresses(addresses: Sequence[Address]) -> bytes:
    """A listener's addresses, for those who ask where it listens."""
    rows = [(each.host.encode(), each.interface.encode(), _PORT.pack(each.port)) for each in addresses]
    return pack([addresses[0].token if addresses else b"", *itertools.chain(*rows)])


@parser("where a rank listens")
def unpack_addresses(told: bytes) -> tuple[Address, ...]:
    """What `pack_addresses` made."""
    token, *rows = unpack(told)
    parts = iter(rows)
    return tuple(
        Address(host.decode(), _PORT.unpack(port)[0], interface.decode(), token)
        for host, interface, port in zip(parts, parts, parts, strict=True)
    )
