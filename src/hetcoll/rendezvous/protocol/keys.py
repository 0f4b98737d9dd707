"""Keys and values that members of the store put and get."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

from .wire import MAX_BODY, Op, Status, pack

MAX_KEYS = 1 << 20


class Member(Protocol):
    """A process that has proven the secret. `ranks` says which rank it is in each of its groups."""

    name: str
    ranks: dict[bytes, int]

    def send(self, op: Op, body: bytes, request: int = 0, status: Status = Status.OK) -> None: ...


class RefusedError(Exception):
    """A request that cannot be served. Becomes an InitError at the member."""


class Keys:
    """All of them. `after` calls a function once so many seconds (a packed double) are over."""

    def __init__(self, after: Callable[[bytes, Callable[[], None]], None]) -> None:
        self._after = after
        self._values: dict[bytes, bytes] = {}
        self._nbytes = 0
        self._getters: dict[bytes, dict[int, tuple[Member, int]]] = {}
        self._numbers = itertools.count(1)

    def drop(self, member: Member) -> None:
        """`member` is gone, and waits for nothing any more."""
        for getters in self._getters.values():
            for number in [number for number, (who, _) in getters.items() if who is member]:
                del getters[number]

    def put(self, member: Member, request: int, key: bytes, value: bytes) -> None:
        size = self._nbytes + len(value) - len(self._values.get(key, b""))
        if size > MAX_BODY or (key not in self._values and len(self._values) >= MAX_KEYS):
            raise RefusedError(f"the store is full: {len(self._values)} keys, {self._nbytes} bytes")
        self._nbytes = size
        self._values[key] = value
        member.send(Op.REPLY, b"", request)
        for getter, waiting in self._getters.pop(key, {}).values():
            getter.send(Op.REPLY, pack([value]), waiting)

    def get(self, member: Member, request: int, key: bytes, seconds8: bytes) -> None:
        if key in self._values:
            member.send(Op.REPLY, pack([self._values[key]]), request)
            return
        number = next(self._numbers)
        self._after(seconds8, lambda: self._expire(key, number))
        self._getters.setdefault(key, {})[number] = (member, request)

    def _expire(self, key: bytes, number: int) -> None:
        waiting = self._getters.get(key, {}).pop(number, None)
        if waiting is None:
            return
        text = f"nobody put {key.decode(errors='replace')!r}"
        waiting[0].send(Op.REPLY, text.encode(), waiting[1], Status.TIMEOUT)
