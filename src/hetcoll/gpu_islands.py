"""Which GPUs one vendor's library serves together, and this rank's communicator of that library."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from .errors import HetcollError, InitError, spell_ranks
from .float8 import two_kinds
from .islands import nccl, rccl
from .islands.library import Island
from .islands.native import BYTES, Native, float8_kind, native
from .topology import Islands, Topology, spell_islands
from .types import REDUCING, DType, ReduceOp

if TYPE_CHECKING:
    from .devices.base import Device

log = logging.getLogger("hetcoll")

_ABORT_SECONDS = 10.0

Meet = Callable[[str, bytes], Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class Gpu:
    """What every rank knows of another one's GPU. `library` is its NCCL's or RCCL's version, 0 where there is none.

    `vendor` is empty on a rank without a GPU. `float8` is the kind of 8-bit floats that the GPU itself computes with:
    OCP's, AMD's older one (fnuz), or none; `signals` whether its driver has streams that wait for values.
    `no_direct` says why RDMA devices do not reach its memory; nothing where they do.
    """

    vendor: str
    bus: str
    arch: str
    name: str
    doorbell: str
    library: int
    float8: str
    signals: bool
    no_direct: str = ""

    @classmethod
    def here(cls, device: Device, doorbell: str, no_direct: str = "") -> Gpu:
        """This rank's."""
        finder = nccl if device.vendor == "cuda" else rccl
        reason = finder.why_not()
        if reason is not None:
            log.info("GPUs of %s are on their own: %s", device.vendor, reason)
        version = 0 if reason is not None else finder.library().version_code
        return cls(
            device.vendor,
            device.bus_id,
            device.arch,
            device.name,
            doorbell,
            version,
            float8_kind(device.arch),
            device.stream_memory_ops,
            no_direct,
        )

    @classmethod
    def none(cls, doorbell: str) -> Gpu:
        """That of a rank without one."""
        return cls("", "", "", "", doorbell, 0, "", False, "it has no GPU")


def tell_all(mine: Gpu, meet: Meet) -> list[Gpu]:
    """What every rank has, by rank. InitError on all ranks where they do not hold the same in the end."""
    told = meet("gpus()", json.dumps(asdict(mine)).encode())
    digest = hashlib.blake2b(b"\0".join(told), digest_size=16).hexdigest()
    digests = meet("what ranks know of gpus()", digest.encode())
    odd = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if odd:
        raise InitError(f"{spell_ranks(odd)} and rank 0 were not told the same of all ranks' GPUs")
    return [Gpu(**json.loads(blob)) for blob in told]


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

    Making it is collective over all ranks.
    """

    def __init__(
        self, topology: Topology, rank: int, gpus: Sequence[Gpu], device: Device | None, meet: Meet, timeout: float
    ) -> None:
        self._gpus = gpus
        self.alone: Islands = tuple((r,) for r in range(topology.size))
        found = topology.equipped([(gpu.vendor, gpu.bus) for gpu in gpus]).islands
        # A library that some member lacks serves none of them.
        self.islands: Islands = tuple(
            part for one in found for part in ([one] if all(gpus[r].library for r in one) else [(r,) for r in one])
        )
        for one in self.islands:
            odd = next((r for r in one if gpus[r].library != gpus[one[0]].library), None)
            if odd is not None:
                codes = f"{gpus[one[0]].library} and {gpus[odd].library}"
                raise InitError(
                    f"ranks {one[0]} and {odd} have versions {codes} of their vendor's library: wanted one version in"
                    " an island (HETCOLL_ISLANDS can part them)"
                )
        mine = next(island for island in self.islands if rank in island)
        self.place, self.members = mine.index(rank), len(mine)
        self.island: Island | None = None
        self._ending: threading.Thread | None = None
        if all(len(island) == 1 for island in self.islands):
            return
        joins = device is not None and len(mine) > 1
        library = (nccl if gpus[rank].vendor == "cuda" else rccl).library() if joins else None
        first = library is not None and mine[0] == rank
        ids = meet("islands()", library.unique_id() if library is not None and first else b"")
        if library is not None:
            assert device is not None
            self.island = Island(library, len(mine), self.place, ids[mine[0]], device, timeout)
            log.info("rank %d: %s in island %s", rank, library, spell_islands((mine,)))

    @property
    def whole(self) -> bool:
        """Whether one library serves all ranks."""
        return len(self.islands) == 1 and len(self.islands[0]) > 1

    def reduction(self, dtype: DType, op: ReduceOp) -> Native | None:
        """How the libraries do it, or None where one of them does not; the same on all ranks."""
        if op is ReduceOp.AVG and not self.whole:
            op = ReduceOp.SUM
        members = [self._gpus[r] for island in self.islands if len(island) > 1 for r in island]
        answers = {native(dtype, op, gpu.arch, gpu.library) for gpu in members}
        return answers.pop() if len(answers) == 1 else None

    def serving(self, collective: object, dtype: DType, op: ReduceOp) -> tuple[Islands, Native | None]:
        """The islands that a call's plan is drawn for, and how their libraries reduce."""
        if all(len(island) == 1 for island in self.islands):
            return self.alone, None
        if collective not in REDUCING:
            return self.islands, Native(BYTES, ReduceOp.SUM)
        reduction = self.reduction(dtype, op)
        return (self.alone, None) if reduction is None else (self.islands, reduction)

    def error(self) -> str | None:
        """What the library failed with since, or None."""
        return None if self.island is None else self.island.async_error()

    def abort(self) -> None:
        """Begin to end what the library has under way, on a thread: it waits until streams of ours were let go."""
        if self.island is not None and self._ending is None:
            self._ending = threading.Thread(target=self._abort, name="hetcoll-island-abort", daemon=True)
            self._ending.start()

    def _abort(self) -> None:
        assert self.island is not None
        try:
            self.island.abort()
        except HetcollError as error:
            log.warning("ending a communicator of %s: %s", self.island.library, error)

    def close(self) -> None:
        """End the library's communicator, or wait until it was aborted."""
        if self._ending is not None:
            self._ending.join(_ABORT_SECONDS)
        elif self.island is not None:
            self.island.close()
