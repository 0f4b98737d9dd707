"""Ranks of several kinds in one job: with NVIDIA's GPU, with AMD's, with none; and what runs on each one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fakes
from cases import run_case
from gpu_places import STAND_INS, ranks_on
from on_gpu import OnGpu
from ranks import Ranks
from reference import Case

import hetcoll
from hetcoll.gpu.array import DeviceArray
from hetcoll.vendors.devices import cuda, hip
from hetcoll.vendors.devices.base import Device

VENDOR: dict[str, str | None] = {"n": "cuda", "a": "hip", "c": None}


def start(kinds: str, join: bool = True, place: str = STAND_INS, **settings: Any) -> Ranks:
    """Ranks of these kinds: "nac" has NVIDIA's GPU, AMD's, and none. Settings in capitals are variables."""
    devices = tuple(VENDOR[kind] or "cpu" for kind in kinds)
    env = {"HETCOLL_DEVICE": devices, **{name: value for name, value in settings.items() if name.isupper()}}
    ours = {"timeout": 120, **{name: value for name, value in settings.items() if not name.isupper()}}
    return ranks_on(place, [VENDOR[kind] for kind in kinds], env, join=join, **ours)


def start_gpus(gpus: str, join: bool = True, **settings: Any) -> Ranks:
    """Fake ranks with a GPU each: "nna" has two of NVIDIA's and one of AMD's.

    Settings in capitals are variables.
    """
    env = {name: value for name, value in settings.items() if name.isupper()}
    ours = {"timeout": 120, **{name: value for name, value in settings.items() if not name.isupper()}}
    return Ranks(len(gpus), {**fakes.environments([VENDOR[gpu] for gpu in gpus], len(gpus), **ours), **env}, join=join)


def has_gpu(comm: hetcoll.Communicator) -> bool:
    return kinds_of(comm)[comm.rank] != "c"


def kinds_of(comm: hetcoll.Communicator) -> str:
    """A letter for each rank, as `start` has them, by the device that it was told to use."""
    return "".join({"cuda": "n", "hip": "a"}.get(rank.wish, "c") for rank in comm.topology.ranks)


def device_of(comm: hetcoll.Communicator) -> Device:
    """This rank's GPU, of the vendor that it was told to use."""
    found = (cuda if comm.topology.ranks[comm.rank].wish == "cuda" else hip).devices()
    return found[comm.rank % len(found)]


@contextmanager
def stream_of(comm: hetcoll.Communicator) -> Iterator[int | None]:
    """One of this rank's GPU, if it has one. What is on it is done before it goes."""
    if not has_gpu(comm):
        yield None
        return
    device = device_of(comm)
    stream = device.stream()
    try:
        yield stream
        device.synchronize(stream)
    finally:
        device.destroy_stream(stream)


def run_on_own(comm: hetcoll.Communicator, cases: list[Case]) -> list[bytes]:
    with stream_of(comm) as stream:
        own = comm if stream is None else OnGpu(comm, device_of(comm), stream)
        return [run_case(own, case) for case in cases]  # type: ignore[arg-type]


class Own:
    """An array on this rank's own device."""

    def __init__(self, comm: hetcoll.Communicator, values: Any) -> None:
        self._gpu = DeviceArray.of(device_of(comm), values) if has_gpu(comm) else None
        self.array = values.copy() if self._gpu is None else self._gpu

    def get(self) -> Any:
        return self.array if self._gpu is None else self._gpu.get()
