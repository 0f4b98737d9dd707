"""Windows' part on RDMA devices: memory that is registered so that peers' devices may read and write it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..calls.buffers import Buffer
from ..errors import ArgumentError, DeviceError, RegistrationError
from .core import Core

if TYPE_CHECKING:
    from ..links.verbs.memory import Lease, Memory
    from .executor import Gpus

log = logging.getLogger("hetcoll")


class WindowMemory:
    """Of the communicator that carries the messages of windows, `core`. `memory` is their communicator's own, which
    both engines use where they have the same numbers for the ports, and `gpus` its GPU's."""

    def __init__(self, core: Core, memory: Memory | None, gpus: Gpus) -> None:
        self._core, self._gpus = core, gpus
        own = core.wiring.memory
        self._memory = memory if memory is not None and own is not None and memory.ports == own.ports else None
        self._leases: dict[int, Lease] = {}  # of windows
        self._late: list[Lease] = []  # of closed ones, out of which this rank still puts
        if self._memory is not None:
            self._memory.follow(core.engine)

    def register(self, window: int, buffer: Buffer | None) -> bool:
        """Whether it is registered now, since others reach it over RDMA. DeviceError where it is a GPU's, cannot be,
        and HETCOLL_CROSS asks for that."""
        memory = self._memory
        if memory is None or buffer is None or buffer.nbytes < memory.least:
            return False
        if not any(map(self._over_rdma, range(self._core.size))):
            return False
        on_gpu, cross = buffer.device != "cpu", self._core.wiring.topology.cross
        try:
            self._leases[window] = (
                self._gpus.lease(memory, buffer) if on_gpu else memory.lease(buffer.ptr, buffer.nbytes, buffer.owner)
            )
        except RegistrationError as error:
            if on_gpu and cross == "direct":
                raise DeviceError(f"HETCOLL_CROSS=direct: {error}") from error
            if not on_gpu or cross == "auto":
                log.warning("a window whose bytes are copied: %s", error)
            return False
        return True

    def place(self, window: int, peers: Iterable[int]) -> None:
        """Those have registered theirs."""
        for peer in filter(self._over_rdma, peers):
            self._core.engine.place_window(window, peer)

    def _over_rdma(self, peer: int) -> bool:
        rank = self._core.rank
        return peer != rank and self._core.wiring.topology.transport(rank, peer) == "verbs"

    def give_back(self, window: int) -> None:
        """It is closed, and settled."""
        if window in self._leases:
            self._late.append(self._leases.pop(window))
        self._close_late()

    def _close_late(self) -> None:
        late, self._late = self._late, []
        for lease in late:
            try:
                lease.close()
            except ArgumentError:  # it is in use
                self._late.append(lease)

    def close(self) -> None:
        """Give all back. The engine is closed."""
        if self._memory is not None:
            self._memory.unfollow(self._core.engine)
        self._late += self._leases.values()
        self._leases.clear()
        self._close_late()
