"""What all ranks tell each other before the first call on GPUs, and what those of one host then share.

That is the slots through which they pass messages (`slots`), and a ledger of calls (``native/engine/ledger.h``):
streams move bytes without looking at them, so ranks compare what they call before anything of it is enqueued.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

from . import _native
from .diagnosis import Diagnosis, Kind
from .gpu_islands import Gpu, Meet
from .rendezvous.descriptors import receive_fd, share_fd
from .slots import SlotSegment, slot_bytes
from .wiring import Wiring
from .witness import call_site

if TYPE_CHECKING:
    from .devices.base import Device


class GpuShare:
    """One rank's part in it. `mine` is its GPU, `device` the same as something to use; None on a rank without.

    Making it is collective over all ranks. `close` it when nothing uses the slots any more.
    """

    def __init__(
        self, wiring: Wiring, diagnosis: Diagnosis, mine: Gpu, device: Device | None, meet: Meet, timeout: float
    ) -> None:
        self._wiring, self._diagnosis = wiring, diagnosis
        self.here = wiring.locals.index(wiring.rank)
        self.gpus: Sequence[Gpu] = [
            Gpu(**json.loads(blob)) for blob in meet("gpus()", json.dumps(asdict(mine)).encode())
        ]
        self.slot_bytes = slot_bytes(max(map(len, wiring.topology.hosts)))  # the same on all ranks
        self.segment = self._segment(device, timeout)
        self.ledger = _native.Ledger(self.segment.ledger, self.here, len(wiring.locals))

    def _segment(self, device: Device | None, timeout: float) -> SlotSegment:
        wiring, locals_ = self._wiring, self._wiring.locals
        name, secret = self.gpus[locals_[0]].doorbell, wiring.secret
        if wiring.rank == locals_[0]:
            fd = os.memfd_create("hetcoll-slots", os.MFD_CLOEXEC)
        else:
            fd = receive_fd(name, wiring.rank, secret, timeout)
        try:
            if wiring.rank == locals_[0]:
                os.ftruncate(fd, SlotSegment.nbytes(len(locals_), self.slot_bytes))
                share_fd(name, fd, locals_[1:], secret, timeout)
            return SlotSegment(fd, len(locals_), self.slot_bytes, device)
        finally:
            os.close(fd)

    @staticmethod
    def entry(what: str, descriptor: int) -> _native.LedgerEntry:
        """How a call is written down."""
        return _native.LedgerEntry.make(descriptor, f"{what} (first called at {call_site()})")

    def note(self, entry: _native.LedgerEntry) -> None:
        """Write a call down for the other ranks of this host; raises where one of them called something else."""
        peer = self.ledger.note(entry)
        if peer >= 0:
            self.differs(peer)

    def differs(self, peer: int) -> NoReturn:
        """The rank at place `peer` of this host wrote something else down under the number of this rank's last call."""
        number = self.ledger.calls(self.here)
        texts = [f"rank {r} called {self._text(r, number)}" for r in (self._wiring.rank, self._wiring.locals[peer])]
        self._diagnosis.post(Kind.MISMATCH, self._wiring.locals[peer], "; ".join(texts))
        raise self._diagnosis.error()

    def _text(self, rank: int, number: int) -> str:
        return self.ledger.text(self._wiring.locals.index(rank), number) or "something else"

    def standing(self) -> tuple[int, str]:
        """The rank of this host that is furthest behind, and where each of them is, for people."""
        where = [(rank, self.ledger.calls(i)) for i, rank in enumerate(self._wiring.locals)]
        parts = [f"rank {rank} is at GPU call {n}: {self._text(rank, n)}" if n else f"rank {rank} has called nothing"
                 for rank, n in where]  # fmt: skip
        return min(where, key=lambda pair: pair[1])[0], "; ".join(parts)

    def close(self) -> None:
        """Unmap the slots."""
        self.segment.close()
