"""The unique id: all that a process needs to find and join a job."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import struct
from dataclasses import dataclass, field
from typing import Protocol

from ...config.limits import Held
from ...errors import ArgumentError

_HEAD = struct.Struct("<4s16s32sB")
_ADDRESS = struct.Struct("<HB")
_MAGIC = b"HCI1"


class Host(Protocol):
    """A store."""

    def holds(self) -> Held: ...

    def retire(self) -> None: ...

    @property
    def refused(self) -> int: ...


HOSTED: dict[bytes, Host] = {}
"""The stores that live in this process, by the ids of their jobs."""


def hosted_here(job_id: bytes) -> Host | None:
    """The store of this job, where it lives in this process."""
    return HOSTED.get(job_id)


@dataclass(frozen=True, slots=True)
class UniqueId:
    """Where a job's store listens, the job's id (16 bytes) and the key of all its proofs (32 bytes).

    `str` gives a printable form that `parse` reads. Both it and `to_bytes` contain the key: who has them can join the
    job. `repr` leaves the key out.
    """

    addresses: tuple[tuple[str, int], ...]
    job_id: bytes
    secret: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        """About 55 bytes and 7 to 20 more an address."""
        parts = [_HEAD.pack(_MAGIC, self.job_id, self.secret, len(self.addresses))]
        for host, port in self.addresses:
            parts += (_ADDRESS.pack(port, len(host.encode())), host.encode())
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> UniqueId:
        """What `to_bytes` made; ArgumentError for anything else."""
        if not isinstance(data, bytes):
            raise ArgumentError(f"unique id: wanted the bytes of to_bytes, got {data!r}")
        try:
            magic, job_id, secret, count = _HEAD.unpack_from(data)
            addresses, at = [], _HEAD.size
            for _ in range(count):
                port, length = _ADDRESS.unpack_from(data, at)
                at += _ADDRESS.size + length
                addresses.append((bytes(data[at - length : at]).decode(), port))
        except (struct.error, UnicodeDecodeError) as error:
            raise ArgumentError(f"unique id: wanted the bytes of to_bytes, got {len(data)} others") from error
        if magic != _MAGIC or at != len(data):
            raise ArgumentError(f"unique id: wanted the bytes of to_bytes, got {len(data)} others")
        return cls(tuple(addresses), job_id, secret)

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(self.to_bytes()).decode()

    @classmethod
    def parse(cls, text: str) -> UniqueId:
        """What `str` made; ArgumentError for anything else."""
        if not isinstance(text, str):
            raise ArgumentError(f"unique id: wanted the text of str(unique_id), got {text!r}")
        try:
            return cls.from_bytes(base64.b64decode(text.strip().encode(), altchars=b"-_", validate=True))
        except (binascii.Error, ValueError) as error:
            raise ArgumentError(f"unique id: wanted the text of str(unique_id), got {len(text)} characters") from error


def job_secret(shared: bytes | None, job_id: bytes) -> bytes:
    """The key of a job's proofs: from HETCOLL_SECRET and the job's id, or random where there is no such secret."""
    if shared is None:
        return os.urandom(32)
    return hmac.digest(shared, b"hetcoll job " + job_id, hashlib.sha256)
