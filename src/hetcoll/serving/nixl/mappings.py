"""Registered memory of other agents that this one's GPU has mapped (IPC), of ranks of one host and vendor: what it has
mapped it reads by itself.

Metadata has the handle by which others map a region (`share`). Who reads it maps it before its first READ. Who writes
out of it offers it to the other agent before its first WRITE, which therefore still goes through pinned memory.
Whoever maps one says so, and is told when it is gone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from ... import HetcollError
from ...calls.buffers import Buffer
from ...runtime.executor import Shared


class Mappings:
    """Of one agent. `side` carries the messages of windows; `tell` sends a message to the agent of a rank."""

    def __init__(self, side: Any, tell: Callable[[int, bytes], None]) -> None:
        self._side, self._tell = side, tell
        self._shared: dict[int, tuple[Shared, int]] = {}  # of the regions here: how they are mapped, and bytes
        self._offered: set[tuple[int, int]] = set()  # peers and regions here
        self._mapped_by: dict[int, set[int]] = {}  # by region here: peers
        self._mapped: dict[tuple[int, int], bool] = {}  # by peer and region: whether this GPU has

    def share(self, number: int, buffer: Buffer) -> list[Any] | None:
        """How other agents map a region here; None where they cannot."""
        shared = self._side.devices.share(buffer)
        if shared is None:
            return None
        self._shared[number] = (shared, buffer.nbytes)
        return list(shared)

    def map(self, peer: int, number: int, shared: Any, nbytes: int) -> None:
        """Map a peer's region, the first time."""
        if (peer, number) in self._mapped:
            return
        self._mapped[peer, number] = self._side.devices.see(number, peer, Shared(*shared), nbytes)
        if self._mapped[peer, number]:
            self._say(peer, "mapped", number)

    def offer(self, peer: int, number: int) -> None:
        """Let a peer map a region here, the first time."""
        if number in self._shared and (peer, number) not in self._offered:
            self._offered.add((peer, number))
            self._say(peer, "map", number, *self._shared[number])

    def hear(self, peer: int, message: bytes) -> None:
        """What another agent's has said."""
        what, number, *rest = json.loads(message)
        if what == "map":
            self.map(peer, number, *rest)
        elif what == "gone":
            if self._mapped.get((peer, number), False):
                self._side.devices.forget(number, peer)
            self._mapped[peer, number] = False  # metadata may still have it
        elif number in self._shared:
            self._mapped_by.setdefault(number, set()).add(peer)
            self._side.devices.seen_by(number, [peer])
        else:
            self._say(peer, "gone", number)

    def closed(self, number: int) -> None:
        """A region here is closed, and settled: nobody reads it."""
        self._shared.pop(number, None)
        for peer in self._mapped_by.pop(number, ()):
            with contextlib.suppress(HetcollError):  # whoever is gone has mapped nothing
                self._say(peer, "gone", number)

    def close(self) -> None:
        """Unmap all. No transfer is under way."""
        for (peer, number), mapped in self._mapped.items():
            if mapped:
                self._side.devices.forget(number, peer)
        self._mapped.clear()

    def _say(self, peer: int, what: str, number: int, *rest: Any) -> None:
        self._tell(peer, json.dumps([what, number, *rest]).encode())
