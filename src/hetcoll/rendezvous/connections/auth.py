"""Proof of the job's secret: a challenge and a response in both directions, before anything else is read.

    listener -> connector   greeting  72 bytes: what the listener is, a context, its nonce
    connector -> listener   claim    104 bytes: what the connector wants, a context, its nonce, its proof
    listener -> connector   verdict   40 bytes: accepted or refused, the listener's proof

Proofs are HMAC-SHA256 (RFC 2104) under the job's secret over a label of the side, the greeting and the claim, so both
contexts and both nonces are bound to them, and neither side's proof is of use to the other. The secret itself never
travels. The listener speaks first, so whoever reaches a foreign service by mistake has sent it nothing.

This keeps strangers out of a job. Where the greeting says so (HETCOLL_TLS), all that follows it is encrypted. The
proofs cover the greeting, so nobody on the way can take that word out of it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from enum import IntEnum
from typing import NamedTuple

from ...errors import AuthenticationError
from .secure import Socket

GREETING = struct.Struct("<4sB?2x32s32s")
CLAIM = struct.Struct("<B7x32s32s32s")
VERDICT = struct.Struct("<B7x32s")
assert (GREETING.size, CLAIM.size, VERDICT.size) == (72, 104, 40)
CONTEXT_BYTES = 32
HANDSHAKE_SECONDS = 5.0  # what a listener grants a connection that has proven nothing
MAX_PENDING = 128  # how many such connections it has at a time; more are let in by turning the oldest away
PATIENCE = 0.2  # seconds that each of them has at least, for its claim, while others wait in the kernel's backlog

_MAGIC = b"HCC1"
_NOTHING = bytes(32)


class Service(IntEnum):
    """What listens."""

    STORE = 1
    DATA = 2
    DESCRIPTOR = 3
    RELAY = 4


class Verb(IntEnum):
    """What a claim asks for: to prove the secret, or to be told the unique id (see `rendezvous.bootstrap`)."""

    PROVE = 1
    FETCH = 2


def _proof(secret: bytes, side: bytes, greeting: bytes, claim: bytes) -> bytes:
    return hmac.digest(secret, b"hetcoll 1 " + side + greeting + claim, hashlib.sha256)


def _tls_key(secret: bytes) -> bytes:
    return hmac.digest(secret, b"hetcoll 1 tls", hashlib.sha256)


class Judgement(NamedTuple):
    """A listener's answer to a claim. `context` is trustworthy only when the secret was `proven`."""

    accepted: bool
    proven: bool
    context: bytes
    verdict: bytes


class Challenge:
    """The listener's side of one connection: send `greeting`, read CLAIM.size bytes, `judge` them, send the verdict."""

    def __init__(self, secret: bytes, service: Service, context: bytes = b"", *, tls: bool = False) -> None:
        self._secret, self._tls = secret, tls
        self.greeting = GREETING.pack(_MAGIC, service, tls, context.ljust(CONTEXT_BYTES, b"\0"), os.urandom(32))

    def secure(self, sock: Socket) -> None:
        """Encrypt what follows the greeting, which was sent, if that says so."""
        if self._tls:
            sock.secure(_tls_key(self._secret), server=True)

    def judge(self, claim: bytes, *, open_fetch: bool = False) -> Judgement:
        """Whether `claim` proves the secret. With `open_fetch` a FETCH is accepted without a proof."""
        verb, context, _, proof = CLAIM.unpack(claim)
        wanted = _proof(self._secret, b"connector", self.greeting, claim[:-32])
        proven = hmac.compare_digest(proof, wanted) and verb == Verb.PROVE
        accepted = proven or (open_fetch and verb == Verb.FETCH)
        answer = _proof(self._secret, b"listener", self.greeting, claim) if proven else _NOTHING
        return Judgement(accepted, proven, context, VERDICT.pack(accepted, answer))


def greeting_context(greeting: bytes, service: Service) -> bytes | None:
    """The context of a greeting of `service`; `None` when these bytes are something else's."""
    magic, kind, _, context, _ = GREETING.unpack(greeting)
    return context if magic == _MAGIC and kind == service else None


class Response:
    """The connector's side: made from the greeting; `secure` the socket, send `claim`, then `check` the verdict."""

    def __init__(self, secret: bytes, greeting: bytes, context: bytes = b"", verb: Verb = Verb.PROVE) -> None:
        self._secret, self._greeting = secret, greeting
        head = CLAIM.pack(verb, context.ljust(CONTEXT_BYTES, b"\0"), os.urandom(32), _NOTHING)[:-32]
        proof = _NOTHING if verb is Verb.FETCH else _proof(secret, b"connector", greeting, head)
        self.claim = head + proof

    def secure(self, sock: Socket) -> None:
        """Encrypt what follows the greeting, if that says so."""
        if not GREETING.unpack(self._greeting)[2]:
            return
        if not self._secret:
            raise AuthenticationError("rank 0 has a HETCOLL_SECRET and this process has none")
        sock.secure(_tls_key(self._secret), server=False)

    def check(self, verdict: bytes) -> None:
        """AuthenticationError when the listener refused us, or does not know the secret itself."""
        accepted, proof = VERDICT.unpack(verdict)
        if not accepted and self.claim[0] == Verb.FETCH:
            raise AuthenticationError("rank 0 has a HETCOLL_SECRET and this process has none")
        if not accepted:
            raise AuthenticationError("it refused our proof: the two sides have different secrets (HETCOLL_SECRET)")
        if self.claim[0] == Verb.FETCH:
            return
        if not hmac.compare_digest(proof, _proof(self._secret, b"listener", self._greeting, self.claim)):
            raise AuthenticationError("it could not prove that it knows the job's secret (HETCOLL_SECRET)")
