"""Which agents' GPUs see which registered memory, of ranks of one host and vendor: what one sees it reads by itself.

Metadata has the handle by which others open a region (`share`). Who reads it opens it before its first READ. Who
writes out of it offers it to the other agent before its first WRITE, which therefore still goes through pinned memory.
Whoever opens one says so, and is told when it is gone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from ... import HetcollError
from ...calls.buffers import Buffer
from ...runtime.executor import Shared


class Sight:
    """Of one agent. `side` carries the messages of windows; `tell` sends a message to the agent of a rank."""

    def __init__(self, side: Any, tell: Callable[[int, bytes], None]) -> None:
        self._side, self._tell = side, tell
        self._shared: dict[int, tuple[Shared, int]] = {}  # of the regions here: how they are opened, and bytes
        self._offered: set[tuple[int, int]] = set()  # peers and regions here
        self._watchers: dict[int, set[int]] = {}  # by region here: whose GPU sees it
        self._looked: dict[tuple[int, int], bool] = {}  # by peer and region: whether this GPU sees it

    def share(self, number: int, buffer: Buffer) -> list[Any] | None:
        """How other agents open a region here; None where they cannot."""
        shared = self._side.devices.share(buffer)
        if shared is None:
            return None
        self._shared[number] = (shared, buffer.nbytes)
        return list(shared)

    def look(self, peer: int, number: int, shared: Any, nbytes: int) -> None:
        """Open a peer's region, the first time."""
        if (peer, number) in self._looked:
            return
        self._looked[peer, number] = self._side.devices.see(number, peer, Shared(*shared), nbytes)
        if self._looked[peer, number]:
            self._say(peer, "sees", number)

    def offer(self, peer: int, number: int) -> None:
        """Let a peer open a region here, the first time."""
        if number in self._shared and (peer, number) not in self._offered:
            self._offered.add((peer, number))
            self._say(peer, "look", number, *self._shared[number])

    def hear(self, peer: int, message: bytes) -> None:
        """What another agent's Sight has said."""
        what, number, *rest = json.loads(message)
        if what == "look":
            self.look(peer, number, *rest)
        elif what == "gone":
            if self._looked.get((peer, number), False):
                self._side.devices.forget(number, peer)
            self._looked[peer, number] = False  # metadata may still have it
        elif number in self._shared:
            self._watchers.setdefault(number, set()).add(peer)
            self._side.core.engine.window_is_seen(number, peer)
        else:
            self._say(peer, "gone", number)

    def closed(self, number: int) -> None:
        """A region here is closed, and settled: nobody reads it."""
        self._shared.pop(number, None)
        for peer in self._watchers.pop(number, ()):
            with contextlib.suppress(HetcollError):  # whoever is gone sees nothing
                self._say(peer, "gone", number)

    def close(self) -> None:
        """Look at nothing any more. No transfer is under way."""
        for (peer, number), seen in self._looked.items():
            if seen:
                self._side.devices.forget(number, peer)
        self._looked.clear()

    def _say(self, peer: int, what: str, number: int, *rest: Any) -> None:
        self._tell(peer, json.dumps([what, number, *rest]).encode())
