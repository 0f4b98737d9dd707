"""What every rank knows of all ranks' GPUs, told when a communicator comes to be; and what cannot work, said then.

A rank tells of each GPU that it may use: the one that it was told to, or all that its process sees. The first call on
GPUs says which of them it is. Where no vendor's driver is there, nothing is imported, and none of this costs anything.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError, InitError, spell_ranks
from ..plan.topology import Islands, Topology

if TYPE_CHECKING:
    from ..config.variables import DeviceChoice
    from ..vendors.devices.base import Device

log = logging.getLogger("hetcoll")
_MOST = 500  # characters of what ranks tell each other of one thing


@dataclass(frozen=True, slots=True)
class Gpu:
    """What every rank knows of another one's GPU. `library` is its NCCL's or RCCL's version, 0 where there is none.

    `vendor` is empty on a rank without a GPU. `float8` is the kind of 8-bit floats that the GPU itself computes with:
    OCP's, AMD's older one (fnuz), or none; `signals` whether its driver has streams that wait for values. `memory` is
    the name under which its rank shares memory, `no_direct` why RDMA devices do not reach the GPU's, or nothing,
    `kernels` whether it has the kernel of small messages, `pinned` what its process pins (`gpu.pinned.Told`), and
    `ports` the places of its rank's RDMA ports, the nearest to the GPU first: all known once the GPU is in use.
    """

    vendor: str
    bus: str
    arch: str
    name: str
    memory: str
    library: int
    float8: str
    signals: bool
    no_direct: str = ""
    kernels: bool = False
    pinned: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()

    @classmethod
    def here(cls, device: Device) -> Gpu:
        """One of this process."""
        from ..vendors.ccl import nccl, rccl
        from ..vendors.ccl.native import float8_kind

        finder = nccl if device.vendor == "cuda" else rccl
        reason = finder.why_not()
        if reason is not None:
            log.info("GPUs of %s are on their own: %s", device.vendor, reason)
        version = 0 if reason is not None else finder.library().version_code
        kind = float8_kind(device.arch)
        return cls(device.vendor, device.bus_id, device.arch, device.name, "", version, kind, device.stream_memory_ops)

    @classmethod
    def none(cls, memory: str) -> Gpu:
        """That of a rank without one."""
        return cls("", "", "", "", memory, 0, "", False, "it has no GPU")


def visible(wish: DeviceChoice | None) -> tuple[list[Gpu], str]:
    """The GPUs that this rank may use; and why there is none, where it was told to use one."""
    if wish is not None and wish.kind == "cpu":
        return [], ""
    found: list[Gpu] = []
    for kind in ("cuda", "hip") if wish is None else (wish.kind,):
        if wish is None and not _driver(kind):
            continue
        try:
            found += _gpus(kind, None if wish is None else wish.index)
        except DeviceError as error:  # the other ranks must hear of it, too
            if wish is not None:
                return [], str(error)
            log.info("no GPU of %s is used: %s", kind, error)
    return found, ""


def _gpus(kind: str, index: int | None) -> list[Gpu]:
    """Those of one vendor. DeviceError where there are none, or none of that number."""
    module = importlib.import_module(f"..vendors.devices.{kind}", __package__)
    reason = module.why_not()
    if reason is not None:
        raise DeviceError(reason)
    return [Gpu.here(device) for device in (module.devices() if index is None else [module.device(index)])]


def _driver(kind: str) -> bool:
    """Whether it is worth asking a vendor's driver, without its packages."""
    if kind == "hip" and os.path.exists("/dev/kfd"):
        return True
    name, mode = ("libcuda.so.1", ctypes.DEFAULT_MODE) if kind == "cuda" else ("libamdhip64.so", os.RTLD_NOLOAD)
    try:
        ctypes.CDLL(name, mode=mode)
    except OSError:
        return False
    return True


def encode(gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    """As plain data, for JSON."""
    return [asdict(gpu) for gpu in gpus]


def decode(told: Sequence[dict[str, Any]]) -> list[Gpu]:
    """What `encode` made plain."""
    return [Gpu(**{**each, "ports": tuple(each["ports"])}) for each in told]


class Facts:
    """The GPUs that each rank may use, as all ranks were told.

    Raises InitError, on all ranks alike, where a rank has no GPU such as it was told to use, or where an island has two
    versions of its library; ArgumentError where islands are asked for that no library serves.
    """

    def __init__(self, topology: Topology, gpus: Sequence[Sequence[Gpu]], problems: Sequence[str]) -> None:
        self.gpus = gpus
        wrong = [
            f"rank {rank} was told to use {topology.ranks[rank].wish}, but {problem}"
            for rank, problem in enumerate(problems)
            if problem
        ]
        if wrong:
            raise InitError("; ".join(wrong))
        if not any(self.gpus) or not all(len({gpu.vendor for gpu in one}) < 2 for one in self.gpus):
            return  # which vendor's a rank uses is known with its first array
        likely = [one[0] if one else Gpu.none("") for one in self.gpus]
        places = [(gpu.vendor, gpu.bus if len(one) == 1 else "") for gpu, one in zip(likely, self.gpus, strict=True)]
        served(topology.equipped(places).islands, likely)

    @property
    def digest(self) -> bytes:
        """Equal where ranks were told the same; empty where there are no GPUs."""
        if not any(self.gpus):
            return b""
        # Ranks that were told of the same GPUs share one list of them (`Column.each`), and there may be many ranks.
        texts = {id(one): json.dumps(encode(one)).encode() for one in {id(one): one for one in self.gpus}.values()}
        return hashlib.blake2b(b"\0".join(texts[id(one)] for one in self.gpus), digest_size=16).digest()

    def choose(
        self,
        mine: Device | None,
        memory: str,
        no_direct: str,
        kernels: bool,
        pinned: Sequence[int],
        ports: Sequence[int],
        meet: Callable[[str, bytes], Sequence[bytes]],
    ) -> Sequence[Gpu]:
        """Each rank's GPU, now that all have one in use; collective. `mine` is None on a rank without."""
        place = ("", "") if mine is None else (mine.vendor, mine.bus_id)
        words = json.dumps([*place, memory, no_direct[:_MOST], kernels, pinned, *ports])
        told = [json.loads(blob) for blob in meet("gpus()", words.encode())]
        return [self._chosen(rank, *one) for rank, one in enumerate(told)]

    def _chosen(
        self,
        rank: int,
        vendor: str,
        bus: str,
        memory: str,
        no_direct: str,
        kernels: bool,
        pinned: Sequence[int],
        *ports: int,
    ) -> Gpu:
        if not vendor:
            return Gpu.none(memory)
        for gpu in self.gpus[rank]:
            if (gpu.vendor, gpu.bus) == (vendor, bus):
                seen = replace(gpu, memory=memory, no_direct=no_direct, kernels=kernels)
                return replace(seen, pinned=tuple(pinned), ports=ports)
        raise InitError(
            f"rank {rank} uses GPU {bus} of {vendor}, which it did not see when the communicator was made: wanted"
            f" HETCOLL_DEVICE={vendor}, or device={vendor!r}, there"
        )


def check_digests(digests: Sequence[bytes]) -> None:
    """InitError where ranks were not told the same."""
    odd = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if odd:
        raise InitError(f"{spell_ranks(odd)} and rank 0 were not told the same of all ranks' GPUs")


def served(islands: Islands, gpus: Sequence[Gpu]) -> Islands:
    """The islands that a library serves: what some member lacks serves none of them. InitError where it is not one
    version."""
    found = tuple(
        part for one in islands for part in ([one] if all(gpus[r].library for r in one) else [(r,) for r in one])
    )
    for one in found:
        odd = next((r for r in one if gpus[r].library != gpus[one[0]].library), None)
        if odd is not None:
            codes = f"{gpus[one[0]].library} and {gpus[odd].library}"
            raise InitError(
                f"ranks {one[0]} and {odd} have versions {codes} of their vendor's library: wanted one version in an"
                " island (HETCOLL_ISLANDS can part them; HETCOLL_DEVICE=cpu says that no GPU is used)"
            )
    return found
