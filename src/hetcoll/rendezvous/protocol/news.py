"""What a member of a group hears of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Lost(NamedTuple):
    """A rank of the group died, or its host vanished."""

    rank: int
    reason: str


class Left(NamedTuple):
    """A rank of the group said goodbye."""

    rank: int


class Verdict(NamedTuple):
    """The group's first verdict: what `rank` posted. All members get the same one, late ones too."""

    kind: bytes
    blob: bytes
    rank: int


class Query(NamedTuple):
    """A rank asks all members; the handler returns the answer."""

    rank: int
    blob: bytes


class StoreLost(NamedTuple):
    """The store is gone. Calls that need it fail from now on; `orderly` when its process ended in order. `sure`: or
    else died, as far as can be seen. Where it fell silent, or gave up, others may have gone on without this process."""

    reason: str
    orderly: bool
    sure: bool = True


Event = Lost | Left | Verdict | Query | StoreLost
Handler = Callable[[bytes, Event], bytes | None]
