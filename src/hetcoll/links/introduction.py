"""What the ranks of a communicator tell each other before anything else, and where each is reached.

Both are exchanged in columns (`protocol/columns.py`), cut so that what ranks have in common stands by itself. What
differs from rank to rank (a process's number, a random name, a port) only those are told who ask: ranks of one host,
and those that make a link. So what a rank is told hardly grows with their number. What is read here is read once for
each different content, and everything else a rank does at the start takes time that grows with the number of ranks, and
no faster.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import hetcoll._native as _native

from ..config.env import SHM_STORES, Config
from ..config.limits import address_space_left
from ..config.version import __version__
from ..errors import ArgumentError, InitError, parser
from ..plan.rails import Nic
from ..plan.topology import RankInfo, spell_islands
from ..rendezvous.protocol.columns import Column, Telling
from . import tuned
from .descriptors import host_identity
from .edges import Address, pack_addresses
from .facts import Gpu, decode, encode, visible

if TYPE_CHECKING:
    from ..plan.tuned import Tuned

_AGREED = (
    *(
        "algo",
        "transport",
        "cross",
        "shm_bytes",
        "socket_stripes",
        "check",
        "integrity",
        "tls",
        "objects",
        "reproducible",
    ),
    *("pinned_bytes", "ib_bytes", "ib_retry_cnt", "ib_sl", "ib_tc", "ib_timeout"),
)
"""What must be the same in the configurations of all ranks; islands as well."""

_NAME_BYTES = 16
_PROCESS = struct.Struct(f"<Q{_NAME_BYTES}s")


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a rank tells the others first. `settings` must be equal everywhere."""

    host: str
    cores: list[int]  # that it may run on
    settings: dict[str, Any]
    device: str
    gpus: Sequence[Gpu]  # that it may use
    no_gpu: str
    claims: bool
    room: int | None  # what is left of its address space
    tuned: tuple[str | None, str]  # see `_loaded`
    version: str
    pid: int
    name: bytes  # random, by which its memory is found

    @classmethod
    def here(cls, config: Config, rank: int) -> Self:
        """That of this process, which is `rank`: what rank 0's file says, all go by."""
        islands = None if config.islands is None else spell_islands(config.islands)
        chosen = {f"HETCOLL_{name.upper()}": getattr(config, name) for name in _AGREED} | {"HETCOLL_ISLANDS": islands}
        gpus, no_gpu = visible(config.device)
        return cls(
            host=host_identity(config.host_id),
            cores=sorted(os.sched_getaffinity(0)),
            settings=chosen,
            device=config.device.kind if config.device else "",
            gpus=gpus,
            no_gpu=no_gpu,
            claims=_native.claims_slots(SHM_STORES.index(config.shm_stores)),
            room=address_space_left(),
            tuned=_loaded(config) if rank == 0 else ("", ""),
            version=__version__,
            pid=os.getpid(),
            name=os.urandom(_NAME_BYTES),
        )

    def telling(self) -> Telling:
        """For `Introductions`, and `Process`."""
        shared = [self.device, self.no_gpu, self.claims, self.room, self.version, self.tuned]
        parts = (self.cores, self.settings, encode(self.gpus), shared)
        host = self.host.encode()
        return Telling([json.dumps(part).encode() for part in parts], [host], _PROCESS.pack(self.pid, self.name) + host)


class Process(NamedTuple):
    """What a rank tells of itself to those who ask."""

    pid: int
    name: bytes
    host: str

    @classmethod
    @parser("what a rank tells of its process")
    def read(cls, own: bytes) -> Self:
        """That of another rank's `Introduction`."""
        pid, name = _PROCESS.unpack_from(own)
        return cls(pid, name, own[_PROCESS.size :].decode())

    @property
    def memory(self) -> str:
        """The name under which the rank shares its memory: nobody can guess it."""
        return f"hetcoll-{self.name.hex()}"


class Introductions:
    """Those of all ranks. InitError where their settings differ."""

    def __init__(self, columns: Sequence[Column]) -> None:
        cores, settings, gpus, shared, hosts = columns
        _check_settings(settings)
        self.hosts: list[str] = hosts.each(bytes.decode)
        found: dict[str, set[int]] = {}  # a launcher may have given each rank one of its host's cores
        for host, mine in {(self.hosts[r], cores.which[r]): cores[r] for r in range(len(hosts))}.items():
            found.setdefault(host[0], set()).update(json.loads(mine))
        self.cores = {host: len(numbers) for host, numbers in found.items()}
        self.gpus: list[list[Gpu]] = gpus.each(lambda told: decode(json.loads(told)))
        told: list[list[Any]] = shared.each(json.loads)
        self.no_gpu: list[str] = [each[1] for each in told]
        self.rooms: list[int | None] = [each[3] for each in told]
        self.infos = tuple(
            RankInfo(rank, host, self.cores[host], version=version, wish=device, claims=claims)
            for rank, (host, (device, _, claims, _, version, _)) in enumerate(zip(self.hosts, told, strict=True))
        )
        self.measured = _read(*told[0][5])  # all ranks choose by rank 0's


def _loaded(config: Config) -> tuple[str | None, str]:
    """What was measured on hosts like this one, and in which file; or None, and why that cannot be read."""
    try:
        return tuned.load(config.tuned, config.cache)
    except ArgumentError as error:
        return None, str(error)


@cache  # a job has one, and many communicators
def _read(text: str | None, name: str) -> Tuned | None:
    """ArgumentError, on all ranks, where rank 0's file is no good."""
    if text is None:
        raise ArgumentError(name)
    if not text:
        return None
    from ..plan.tuned import read  # imports count

    return read(text, name)


def _check_settings(settings: Column) -> None:
    if len(settings.values) > 1:
        odd = next(rank for rank, which in enumerate(settings.which) if which != settings.which[0])
        ours, theirs = json.loads(settings[0]), json.loads(settings[odd])
        unequal = [k for k in ours if ours[k] != theirs.get(k)]
        raise InitError("; ".join(f"{k} is {ours[k]!r} on rank 0 and {theirs.get(k)!r} on rank {odd}" for k in unequal))


class Reach(NamedTuple):
    """Where a rank listens, its RDMA ports, why it has none, and `RankInfo.rates`, `unlike` and `round_trip`."""

    addresses: Sequence[Address]
    nics: Sequence[Nic]
    no_nics: str
    rates: tuple[int, int]
    unlike: bool
    round_trip: int

    def telling(self) -> Telling:
        """For `read_cards`; the addresses for `unpack_addresses`, of those who ask."""
        nics = [asdict(nic) for nic in self.nics]
        cards = json.dumps([nics, self.no_nics, *self.rates, self.unlike, self.round_trip]).encode()
        return Telling([cards], own=pack_addresses(self.addresses))


class Cards(NamedTuple):
    """A rank's RDMA ports, why it has none, its cards' rates, whether these are unlike, and its round trip: fields of
    `RankInfo`."""

    nics: tuple[Nic, ...]
    no_nics: str
    rates: tuple[int, int]
    unlike: bool
    round_trip: int


def read_cards(column: Column) -> list[Cards]:
    """Those of all ranks."""
    return column.each(_read_cards)


@parser("what a rank tells of its cards")
def _read_cards(value: bytes) -> Cards:
    nics, no_nics, tcp, rdma, unlike, round_trip = json.loads(value)
    if not (isinstance(tcp, int) and isinstance(rdma, int) and isinstance(round_trip, int)):
        raise TypeError(f"rates and round trip: wanted whole numbers, got {tcp}, {rdma} and {round_trip}")
    if not isinstance(unlike, bool):
        raise TypeError(f"whether cards are unlike: wanted true or false, got {unlike}")
    return Cards(tuple(Nic(**nic) for nic in nics), no_nics, (tcp, rdma), unlike, round_trip)
