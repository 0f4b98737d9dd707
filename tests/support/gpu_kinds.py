"""Ranks of several kinds in one job: with NVIDIA's GPU, with AMD's, with none; and what runs on each one's own."""

from __future__ import annotations

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
    return comm.topology.ranks[comm.rank].wish in VENDOR.values()


def device_of(comm: hetcoll.Communicator) -> Device:
    """This rank's GPU, of the vendor that it was told to use."""
    found = (cuda if comm.topology.ranks[comm.rank].wish == "cuda" else hip).devices()
    return found[comm.rank % len(found)]


def run_on_own(comm: hetcoll.Communicator, cases: list[Case]) -> list[bytes]:
    if not has_gpu(comm):
        return [run_case(comm, case) for case in cases]
    device = device_of(comm)
    stream = device.stream()
    try:
        return [run_case(OnGpu(comm, device, stream), case) for case in cases]  # type: ignore[arg-type]
    finally:
        device.destroy_stream(stream)


class Own:
    """An array on this rank's own device."""

    def __init__(self, comm: hetcoll.Communicator, values: Any) -> None:
        self._gpu = DeviceArray.of(device_of(comm), values) if has_gpu(comm) else None
        self.array = values.copy() if self._gpu is None else self._gpu

    def get(self) -> Any:
        return self.array if self._gpu is None else self._gpu.get()
