"""What a communicator has failed with, as its ranks tell each other: the first verdict of the group wins."""

from __future__ import annotations

import contextlib
import json
from enum import IntEnum
from typing import TYPE_CHECKING

from ..errors import (
    AbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    HetcollError,
    PeerLostError,
)

if TYPE_CHECKING:
    from ..rendezvous.control import ControlClient

_VERDICT_SECONDS = 1.5


class Kind(IntEnum):
    """native/transport/transport.h: FaultKind."""

    NONE = 0
    MISMATCH = 1
    PEER_GONE = 2
    CORRUPT = 3
    SYSTEM = 4
    TIMEOUT = 5
    ABORTED = 6


_ERRORS: dict[Kind, type[CommunicationError]] = {
    Kind.MISMATCH: CollectiveMismatchError,
    Kind.TIMEOUT: CollectiveTimeoutError,
    Kind.ABORTED: AbortedError,
}

Report = tuple[Kind, int, str]
"""Of what kind it is, the rank to blame or -1, and for people."""


def error_of(report: Report) -> CommunicationError:
    """What calls raise."""
    kind, peer, text = report
    return PeerLostError(text, peer) if kind == Kind.PEER_GONE else _ERRORS.get(kind, CommunicationError)(text)


def tell(control: ControlClient, group: bytes, report: Report) -> Report:
    """The verdict that has won."""
    blob = json.dumps(report).encode()
    return read(control.post_verdict(group, b"failed", blob, _VERDICT_SECONDS).blob)


def leave(control: ControlClient, group: bytes, report: Report) -> None:
    """The store does not answer: the others hear of it when the store runs."""
    control.leave_verdict(group, b"failed", json.dumps(report).encode())


def read(blob: bytes) -> Report:
    """A verdict's words."""
    kind, peer, text = json.loads(blob)
    return Kind(kind), peer, text


def interrupted(rank: int) -> Report:
    return Kind.ABORTED, rank, f"rank {rank} was interrupted"


def tell_interrupted(control: ControlClient, group: bytes, rank: int) -> None:
    """Tell all ranks of a group that this one of them was interrupted, though it may have no communicator of it."""
    with contextlib.suppress(HetcollError):
        tell(control, group, interrupted(rank))
