"""Where the ranks of a benchmark are, and what one is given there: a GPU of its own, one that poses, a fake, none."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

import fakes
from ports import free_port


@dataclass(frozen=True)
class Place:
    """Of one rank: what `kind` of device with which number, and in which network namespace ("": where this runs).
    A PyTorch is built for one vendor, so AMD's places may have a `python` of their own.

    Kinds are cuda, hip, cpu; posing, a GPU of NVIDIA's as AMD's; and fakes of the drivers, "fake cuda" and "fake hip".
    """

    kind: str = "cpu"
    index: int = 0
    host: str = ""
    python: str = sys.executable
    host_id: str = ""  # what it takes for its host, in the place of what it sees

    @property
    def torch(self) -> str:
        """The device of its tensors. PyTorch does not know the fakes: they carry tensors of the CPU."""
        return f"cuda:{self.index}" if self.kind in ("cuda", "hip", "posing") else "cpu"

    def environment(self, devices: int) -> dict[str, str]:
        """Of `devices` in all."""
        if self.kind == "posing":
            return fakes.posing() | {"HETCOLL_DEVICE": f"hip:{self.index}"}
        *fake, vendor = self.kind.split()
        made = fakes.environment(vendor, devices) if fake else {}
        return made | {"HETCOLL_DEVICE": vendor if vendor == "cpu" else f"{vendor}:{self.index}"}


@dataclass(frozen=True)
class Halves:
    """What the two halves of a job's ranks are, and what a run there proves."""

    first: str
    second: str
    proof: str

    def places(self, ranks: int, hip_python: str = sys.executable) -> list[Place]:
        """GPUs are numbered through, whatever their vendor, unless only half of the ranks have one."""
        kinds = [self.first] * (ranks // 2) + [self.second] * (ranks - ranks // 2)
        shared = {self.first, self.second} != {"cuda", "hip"}
        numbers = range(ranks) if shared else [rank % (ranks // 2) for rank in range(ranks)]
        pythons = [hip_python if kind == "hip" else sys.executable for kind in kinds]
        return [Place(kind, at, python=python) for kind, at, python in zip(kinds, numbers, pythons, strict=True)]

    @property
    def alike(self) -> bool:
        """Whether a GPU does as much in either half."""
        return self.first == self.second or self.second in ("posing", "fake hip")

    @property
    def islands(self) -> bool:
        """Whether the halves are islands only where they are told to be."""
        return self.first == self.second != "cpu"


DEVICES = {
    "cpu": Halves("cpu", "cpu", "CPUs of this machine, so that GPUs' figures are still to come"),
    "fakes": Halves("fake cuda", "fake hip", "fakes of both vendors' GPUs, whose times mean nothing"),
    "cuda": Halves("cuda", "cuda", "NVIDIA GPUs, whose halves are told to be islands"),
    "hip": Halves("hip", "hip", "AMD GPUs, whose halves are told to be islands"),
    "posing": Halves("cuda", "posing", "NVIDIA GPUs, half of which pose as AMD's"),
    "mixed": Halves("cuda", "cpu", "NVIDIA GPUs beside CPUs, so that two vendors' figures are still to come"),
    "vendors": Halves("cuda", "hip", "GPUs of both vendors"),
}


def islands_of(ranks: int) -> dict[str, str]:
    half = ranks // 2
    return {"HETCOLL_ISLANDS": f"0-{half - 1}|{half}-{ranks - 1}" if half > 1 else "0|1"}


def commands(
    words: Sequence[Sequence[str]], env: Mapping[str, str], places: Sequence[Place]
) -> list[tuple[list[str], dict[str, str]]]:
    """Each rank's command line and environment, with torchrun's variables."""
    hosts, devices = [place.host for place in places], 1 + max(place.index for place in places)
    at = "10.78.0.1" if hosts[0] else "127.0.0.1"
    common = {**os.environ, "WORLD_SIZE": str(len(places)), "MASTER_ADDR": at, "MASTER_PORT": str(free_port())}
    made = []
    for rank, (place, told) in enumerate(zip(places, words, strict=True)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(hosts[:rank].count(place.host)),
               "LOCAL_WORLD_SIZE": str(hosts.count(place.host))}  # fmt: skip
        own |= {"HETCOLL_HOST_ID": place.host_id} if place.host_id else {}
        own |= {"NCCL_HOSTID": place.host} if place.host else {}  # else NCCL takes all namespaces for one host
        where = ["ip", "netns", "exec", place.host] if place.host else []
        made.append(([*where, *told], {**common, **own, **place.environment(devices), **env}))
    return made
