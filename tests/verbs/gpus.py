"""What the suites on GPUs share: fake devices in guests, and the cases that run on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import ranks
from cables import ENDS, PRELOADED, Pool
from gpu_calls import COLLECTIVES, run_on_gpu
from ranks import Ranks
from reference import Case

import hetcoll
from hetcoll.errors import RegistrationError
from hetcoll.gpu.proxy import Proxies
from hetcoll.links.verbs import local_nics, pci
from hetcoll.links.verbs.memory import Memory

ranks.preload(*PRELOADED, *ranks.VENDORS, "hetcoll.gpu.executor", "numpy.random", "gpu_calls")

Launch = Callable[..., Ranks]
PROMPT = {"HETCOLL_IB_TIMEOUT": "14", "HETCOLL_IB_RETRY_CNT": "7"}
VENDOR = {"n": "cuda", "a": "hip", "c": None}


def cases() -> list[Case]:
    """Every collective, in place and out. Sums are of one type, since every kernel is compiled by g++."""
    found = []
    for turn, (kind, count, inplace) in enumerate(itertools.product(COLLECTIVES, (5, 20_011), (False, True))):
        if inplace and (count == 5 or kind in ("broadcast", "alltoall")):
            continue
        op = ("sum", "max", "avg")[turn % 3] if "reduce" in kind else "sum"
        dtype = "float32" if "reduce" in kind else ("float32", "int64", "uint8")[turn % 3]
        found.append(Case(kind, dtype, count, op, turn % 2, inplace, seed=turn))
    return found


GPUS = cases()


def environment(vendors: str) -> dict[str, Any]:
    """Ranks with a GPU each, "n" of NVIDIA's and "a" of AMD's, all of which are islands; "c" has none."""
    size = len(vendors)
    devices = fakes.environments([VENDOR[vendor] for vendor in vendors], size, timeout=120)
    told = {"HETCOLL_DEVICE": tuple(VENDOR[vendor] or "cpu" for vendor in vendors)} if "c" in vendors else {}
    return {**devices, **told, "HETCOLL_ISLANDS": "|".join(map(str, range(size))), "HETCOLL_IB_BYTES": "128K"}


def direct(pool: Pool, vendors: str, **env: Any) -> Ranks:
    """Ranks that pose as hosts of their own, by turns at the two ends of both cables."""
    ends = tuple(ENDS[rank % 2] for rank in range(len(vendors)))
    hosts = tuple("ab"[rank % 2] for rank in range(len(vendors)))
    given = {**environment(vendors), "HETCOLL_HOST_ID": hosts, "HETCOLL_IB_HCA": ends, **env}
    return pool(len(vendors), **given)


def sealed(_: object = None) -> None:
    """From now on no processor can touch the slots that this rank's device has for messages."""
    register = Proxies._register

    def seal(proxies: Proxies, address: int, nbytes: int, gpu: Any) -> Any:
        lease = register(proxies, address, nbytes, gpu)
        if gpu is not None:
            fakes.seal(address)
        return lease

    Proxies._register = seal  # type: ignore[method-assign]


def refuse(comm: hetcoll.Communicator, rank: int) -> None:
    """From now on the ports of this rank take no memory of a GPU."""
    if comm.rank != rank:
        return
    regions = Memory._regions

    def none(memory: Memory, nbytes: int, register: Any) -> Any:
        if "register_peer" in register.__code__.co_names:
            raise RegistrationError(f"rxe0: registering {nbytes} bytes: refused")
        return regions(memory, nbytes, register)

    Memory._regions = none  # type: ignore[method-assign]


def near(comm: hetcoll.Communicator, rank: int, device: str) -> None:
    """From now on this RDMA device of this rank lies beside its GPU, the others far away. Soft-RoCE lies nowhere."""
    if comm.rank != rank:
        return
    place = "/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"
    local_nics.device_folder = lambda name: Path(place if name == device else "/sys/devices/pci0000:ba")  # type: ignore
    pci.pci_folder = lambda _: Path(place[:-1] + "1")  # type: ignore[assignment]


class Shifted:
    """A device queue whose edges have slots and words so many bytes beside where they are."""

    def __init__(self, queue: Any, slots: int, words: int) -> None:
        self._queue, self._slots, self._words = queue, slots, words

    def add_edge(self, slots: int, ready: int, credit: int, count: int, proxy: Any) -> int:
        return int(self._queue.add_edge(slots + self._slots, ready + self._words, credit, count, proxy))


def misplace(comm: hetcoll.Communicator, rank: int, ways: tuple[str, ...], how: str) -> None:
    """From now on what this rank's device has to send by these ways lies beside where it should ("bytes"), or nobody
    is told that it is there ("signal")."""
    if comm.rank != rank:
        return
    edge, by = Proxies.edge, (64, 0) if how == "bytes" else (0, 8)
    me = comm.rank

    def wrong(proxies: Proxies, queue: Any, out: bool, peer: int, channel: int) -> int:
        broken = out and proxies._share.topology.way(me, peer) in ways
        return edge(proxies, Shifted(queue, *by) if broken else queue, out, peer, channel)  # type: ignore[arg-type]

    Proxies.edge = wrong  # type: ignore[method-assign]


def told(comm: hetcoll.Communicator) -> tuple[dict[str, int], tuple[str, ...]]:
    return comm.counters(), comm.explain("allreduce", 1 << 20).paths


def check(job: Ranks, wanted: list[Case]) -> None:
    """Run on all ranks, with checked results."""
    job.run(run_on_gpu, wanted, timeout=200)


def warm() -> None:
    """Compile what the cases need, on this machine's own processors, for guests to find."""
    with Ranks(2, {**environment("na"), "HETCOLL_HOST_ID": ("a", "b")}) as job:
        check(job, [case for case in GPUS if case.count > 5])


if __name__ == "__main__":
    warm()
