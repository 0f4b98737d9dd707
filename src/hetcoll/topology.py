"""Who the ranks are and where: what they tell each other once, and what follows from it on all of them alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Literal

from .errors import ArgumentError, InitError

Path = Literal["shm", "tcp"]
Setting = Literal["auto", "shm", "tcp"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What one rank tells all others.

    `host` is equal on ranks that can share memory. `cores` is the number of cores that the ranks of its host can use
    together. `addresses` is where it listens, in its own notation. `version` must be the same everywhere.
    """

    rank: int
    host: str
    pid: int = 0
    cores: int = 1
    addresses: tuple[str, ...] = ()
    version: str = ""

    def encode(self) -> bytes:
        """The same bytes for equal descriptions."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankInfo:
        """What `encode` made. InitError when it is no description of a rank."""
        try:
            values = json.loads(data)
            values["addresses"] = tuple(values["addresses"])
            info = cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise InitError(f"wanted the description of a rank, got {data[:80]!r}: {error}") from error
        for field in fields(cls):
            wanted = {"int": int, "str": str}.get(str(field.type), tuple)
            if not isinstance(getattr(info, field.name), wanted):
                raise InitError(f"the description of a rank has {field.name} {getattr(info, field.name)!r}")
        return info


@dataclass(frozen=True)
class Topology:
    """All ranks of a communicator, in order, and the transport that was asked for.

    Everything derived from it is a pure function of what all ranks hold alike (`digest` proves that they do).

    Raises
    ------
    ArgumentError
        The ranks are not 0, 1, 2, ...; or shared memory is asked for between hosts.
    InitError
        Ranks run different versions.
    """

    ranks: tuple[RankInfo, ...]
    setting: Setting = "auto"

    def __post_init__(self) -> None:
        numbers = [info.rank for info in self.ranks]
        if not numbers or numbers != list(range(len(numbers))):
            raise ArgumentError(f"wanted ranks 0, 1, 2, ... in order, got {numbers}")
        for info in self.ranks:
            if info.version != self.ranks[0].version:
                raise InitError(
                    f"rank {info.rank} runs version {info.version!r}, but rank 0 runs {self.ranks[0].version!r}"
                )
            if self.setting == "shm" and info.host != self.ranks[0].host:
                raise ArgumentError(
                    f"shared memory is asked for, but rank {info.rank} is on host {info.host} and rank 0 on host "
                    f"{self.ranks[0].host}"
                )

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, hosts in the order of their first ranks."""
        hosts: dict[str, list[int]] = {}
        for info in self.ranks:
            hosts.setdefault(info.host, []).append(info.rank)
        return tuple(map(tuple, hosts.values()))

    @cached_property
    def crowding(self) -> float:
        """Ranks for each core on the host where there are most, at least 1."""
        cores = [max(1, *(self.ranks[r].cores for r in host)) for host in self.hosts]
        return max(1.0, *(len(host) / n for host, n in zip(self.hosts, cores, strict=True)))

    def local_rank(self, rank: int) -> int:
        """The place of `rank` among the ranks of its host."""
        return next(host.index(rank) for host in self.hosts if rank in host)

    def same_host(self, a: int, b: int) -> bool:
        return self.ranks[a].host == self.ranks[b].host

    def transport(self, a: int, b: int) -> Path:
        """What carries data between two ranks."""
        if self.setting == "auto":
            return "shm" if self.same_host(a, b) else "tcp"
        return self.setting

    def select(self, ranks: Sequence[int]) -> Topology:
        """The topology of some of these ranks, numbered anew in the order given."""
        return Topology(tuple(replace(self.ranks[r], rank=i) for i, r in enumerate(ranks)), self.setting)

    def digest(self) -> bytes:
        """32 bytes that are equal exactly when the descriptions are: SHA-256 of all of them."""
        state = hashlib.sha256(self.setting.encode())
        for info in self.ranks:
            state.update(b"\n" + info.encode())
        return state.digest()
