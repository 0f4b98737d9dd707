"""Where the calls on this rank's GPU stand: whether they are over, what holds them up, and how all ranks hear of it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import TYPE_CHECKING, NoReturn

import hetcoll._native as _native

from ..errors import ClosedError, CommunicationError, DeviceError, spell_ranks
from ..health.all_know import AllKnow
from ..health.diagnosis import Diagnosis
from ..health.verdicts import Kind

if TYPE_CHECKING:
    from .edges import GpuEdges
    from .float8 import OnGpu
    from .p2p import GpuMessages
    from .proxy import Proxies
    from .shared import GpuShare
    from .vendor_comm import GpuIslands


class GpuStanding:
    """Of one communicator's calls on `queue`, for its watchdog (`watchdog.Watched`) and for those who wait."""

    def __init__(
        self,
        engine: _native.Engine,
        diagnosis: Diagnosis,
        queue: _native.DeviceQueue,
        share: GpuShare,
        islands: GpuIslands,
        edges: GpuEdges,
        proxies: Proxies,
        conversions: OnGpu | None,
    ) -> None:
        self._engine, self._diagnosis, self._queue, self._share = engine, diagnosis, queue, share
        self._islands, self._edges, self._proxies, self._conversions = islands, edges, proxies, conversions
        self._all_know = AllKnow(diagnosis, share.rank)
        self.messages: GpuMessages | None = None
        """What may wait for a rank, or for kernels that are loaded, once there is any."""

    @property
    def idle(self) -> bool:
        """Whether everything enqueued so far is done. A device that has failed ends the communicator, and is idle."""
        if self._engine.forked:
            raise ClosedError("this communicator belongs to the parent of this forked process")
        try:
            return self._queue.idle() and (self._conversions is None or self._conversions.done)
        except (_native.Fault, DeviceError) as error:
            if not self._engine.failed:
                self.broken(str(error))
            return True

    def awaited(self) -> Collection[int]:
        """See `GpuShare.awaited`."""
        return self._share.awaited()

    def progress(self) -> int:
        """See `GpuEdges.progress`; of kernels and the library's calls, which leave no words, it is what has ended."""
        moved = self._edges.progress()
        with contextlib.suppress(_native.Fault, DeviceError):  # `idle` tells of those
            moved += self._queue.passed()
        return moved

    def problem(self) -> str | None:
        """What a library failed with, or None."""
        return self._islands.error()

    def still(self, waits: Collection[int]) -> None:
        """Nothing has moved for a while, and kernels wait for these ranks: perhaps one has left."""
        connecting = () if self.messages is None else self.messages.awaited
        with contextlib.suppress(CommunicationError):  # all ranks hear of it, and `release` lets go here
            self._share.check_needed({*waits, *connecting})

    def stuck(self, problem: str, waits: Collection[int]) -> None:
        """Something does not end: the verdict says where everyone stands."""
        behind, where = self._share.standing(waits)
        text = "; ".join(filter(None, (f"rank {self._share.rank}: {problem}; {where}", self._proxies.describe())))
        if self.messages is not None and (module := self.messages.loading):
            text = f"{text}; its kernels of {module} are being loaded, which waits for messages before it"
        if self.messages is not None and (connecting := self.messages.awaited):
            behind = min(connecting)
            text = f"{text}; its first message waits for a call of {spell_ranks(connecting)}"
        self._diagnosis.post(Kind.TIMEOUT, behind, text)

    def broken(self, problem: str) -> None:
        """A driver or a library has failed here."""
        rank = self._share.rank
        self._diagnosis.post(Kind.SYSTEM, rank, f"rank {rank}: {problem}")

    def ended(self, problem: str) -> NoReturn:
        """The same, in the middle of a call. What fails after the communicator has is no news."""
        if not self._engine.failed:
            self.broken(problem)
        raise self._diagnosis.error()

    def check(self) -> None:
        """Raise what the communicator failed with, if it did."""
        if self._engine.failed:
            raise self._diagnosis.error()

    def give_up(self) -> None:
        """The communicator has failed: wait until all ranks know, and let the library end what it has under way."""
        self._all_know.wait()
        self._islands.abort()

    def release(self) -> None:
        """Let every stream and kernel go that waits for a peer."""
        self._edges.fail("the communicator has failed")
