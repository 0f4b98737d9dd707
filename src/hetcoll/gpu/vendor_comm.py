"""Which GPUs one vendor's library serves together, and this rank's communicator of that library."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import ArgumentError, HetcollError, spell_ranks
from ..links.facts import Gpu, served
from ..plan.topology import Islands, spell_islands
from ..types import DType, ReduceOp
from ..vendors.ccl import nccl, rccl
from ..vendors.ccl.library import Island
from ..vendors.ccl.native import Native, native
from .float8 import two_kinds

if TYPE_CHECKING:
    from ..health.diagnosis import Diagnosis
    from ..links.wiring import Wiring
    from ..vendors.devices.base import Device

log = logging.getLogger("hetcoll")

_END_SECONDS = 10.0  # at most, that `close` waits for the library

Meet = Callable[[str, bytes], Sequence[bytes]]


def unlike_float8(gpus: Sequence[Gpu]) -> str:
    """Whose 8-bit floats are AMD's older ones, for people; nothing where no call on them converts."""
    if not two_kinds(gpus):
        return ""
    older = [rank for rank, gpu in enumerate(gpus) if gpu.float8 == "fnuz"]
    others = [rank for rank, gpu in enumerate(gpus) if gpu.vendor and gpu.float8 != "fnuz"]
    return (
        f"8-bit floats: {spell_ranks(older)} fnuz, {spell_ranks(others)} not; calls on them run in OCP's kind, and"
        " arrays of fnuz are converted by value"
    )


class GpuIslands:
    """The islands of one communicator. `island` is this rank's communicator of the vendor's library, if it has one.

    Making it is collective over all ranks. ArgumentError on all of them where it takes a vendor's library and the call
    that needs it is being captured into a graph, as NCCL's threads may not set anything up meanwhile.
    """

    def __init__(
        self,
        wiring: Wiring,
        gpus: Sequence[Gpu],
        device: Device | None,
        meet: Meet,
        timeout: float,
        diagnosis: Diagnosis,
        capturing: bool = False,
    ) -> None:
        topology, rank = wiring.topology, wiring.rank
        self._gpus = gpus
        self.alone: Islands = tuple((r,) for r in range(topology.size))
        found = topology.equipped([(gpu.vendor, gpu.bus) for gpu in gpus]).islands
        self.islands = served(found, gpus)
        mine = next(island for island in self.islands if rank in island)
        self.place, self.members = mine.index(rank), len(mine)
        self.island: Island | None = None
        self._rank = rank
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending: threading.Thread | None = None
        if all(len(island) == 1 for island in self.islands):
            return
        if capturing:
            raise ArgumentError(
                "stream: a graph is being captured on it, while the vendor's library cannot be set up; wanted a call of"
                " this communicator before"
            )
        joins = device is not None and len(mine) > 1
        library = (nccl if gpus[rank].vendor == "cuda" else rccl).library() if joins else None
        first = library is not None and mine[0] == rank
        ids = meet("islands()", library.unique_id() if library is not None and first else b"")
        if library is not None:
            assert device is not None

            def sound() -> None:
                if wiring.engine.failed:  # then some may have given up before they joined
                    raise diagnosis.error()

            self.island = Island(library, len(mine), self.place, ids[mine[0]], device, timeout, sound)
            log.info("rank %d: %s in island %s", rank, library, spell_islands((mine,)))
            # It waits from now on: there are no new threads once the interpreter ends (Python 3.12), which closes, too.
            arguments = (f"rank {rank}: {library}", self._asked)
            self._ending = threading.Thread(target=_end, args=arguments, name="hetcoll-island-end", daemon=True)
            self._ending.start()

    @property
    def whole(self) -> bool:
        """Whether one library serves all ranks."""
        return len(self.islands) == 1 and len(self.islands[0]) > 1

    def mates(self, rank: int) -> set[int]:
        """Its island, which the library connects; nothing where it has none."""
        return set() if self.island is None else {*next(one for one in self.islands if rank in one)}

    def reduction(self, dtype: DType, op: ReduceOp) -> Native | None:
        """How the libraries do it, or None where one of them does not; the same on all ranks."""
        if op is ReduceOp.AVG and not self.whole:
            op = ReduceOp.SUM
        members = [self._gpus[r] for island in self.islands if len(island) > 1 for r in island]
        answers = {native(dtype, op, gpu.arch, gpu.library) for gpu in members}
        return answers.pop() if len(answers) == 1 else None

    def error(self) -> str | None:
        """What the library failed with since, or None."""
        return None if self.island is None else self.island.async_error()

    def abort(self) -> None:
        """Begin to end what the library has under way, on a thread: it waits until streams of ours were let go."""
        if self.island is not None:
            self._asked.put(self.island.abort)

    def close(self, timeout: float) -> None:
        """End the library's communicator, if it was not aborted, in `timeout` seconds or fewer.

        The library waits for graphs that have calls of it (NCCL: ``ncclCommDestroy`` and ``ncclCommAbort``, without
        an end). They are the user's and may live as long as the process: after some seconds they are left to it.
        """
        if self.island is None or self._ending is None:
            return
        self._asked.put(self.island.close)
        seconds = min(timeout, _END_SECONDS)
        self._ending.join(seconds)
        if self._ending.is_alive():
            log.warning(
                "rank %d: %s has not ended its communicator of %s within %g s: it waits for graphs that hold calls of"
                " it, here or on others of these ranks, and gives it back when they are gone; wanted none at close()",
                self._rank,
                self.island.library,
                spell_ranks(next(one for one in self.islands if self._rank in one)),
                seconds,
            )


def _end(what: str, asked: queue.SimpleQueue[Callable[[], None]]) -> None:
    """End a communicator, in the way that is `asked` for first."""
    end = asked.get()
    try:
        end()
    except HetcollError as error:
        log.warning("%s: ending its communicator: %s", what, error)
