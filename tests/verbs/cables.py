"""What the suites share: ranks at both ends of a guest's two cables, and what can happen to cables."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ranks
from faults import Progress
from guest import kernel_module
from ranks import PATIENCE, Ranks, wait_until

Pool = Callable[..., Ranks]

ENDS = ("=rxe0,rxe2", "=rxe1,rxe3")  # of both cables, in HETCOLL_IB_HCA's words
_FAR = {"veth0": "10.77.0.2", "veth1": "10.77.0.1", "veth2": "10.77.1.2", "veth3": "10.77.1.1"}

# Emulated processors take seconds to import anything, so once for all ranks, and nothing that is not needed here.
PRELOADED = (
    "hetcoll",
    "hetcoll.cli.patterns",
    "hetcoll.links.verbs.local_nics",
    "hetcoll.plan.algorithms.among",
    "hetcoll.rendezvous.store.server",
    "hetcoll.runtime.host",
    "loaded_pyverbs",
    "ml_dtypes",
    "pytest",
    "sweep",
)
ranks.preload(*PRELOADED)


def verbs(pool: Pool, size: int, **env: Any) -> Ranks:
    """Ranks whose data crosses the cables: those with even numbers are at one end, the others at the other."""
    ends = tuple(ENDS[rank % 2] for rank in range(size))
    small = {"HETCOLL_IB_BYTES": "128K"}  # a guest has little memory, and a test many communicators
    return pool(size, **{"HETCOLL_TRANSPORT": "verbs", "HETCOLL_IB_HCA": ends, **small, **env})


def tool(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20 * PATIENCE)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def unplug(ethernet: str) -> None:
    """Take an Ethernet device down: the port of its RDMA device is down, and the other end of the cable sees it."""
    tool("ip", "link", "set", ethernet, "down")


def plug(ethernet: str) -> None:
    """Bring it back, and what the kernel forgot of its neighbour. The rest takes the kernel a while: `all_plugged`."""
    tool("ip", "link", "set", ethernet, "up")
    number = int(ethernet[-1])
    other = f"02:77:00:00:0{number // 2}:0{2 - number % 2}"
    tool("ip", "neigh", "replace", _FAR[ethernet], "lladdr", other, "dev", ethernet, "nud", "permanent")


def all_plugged() -> None:
    """Bring all cables back, until every RDMA device has its port and its address again.

    The kernel tells the other end of a cable later, a second if it has told it something before, and gives addresses
    back later still: a rank that looks for devices meanwhile does not find them all.
    """
    for number in range(4):
        plug(f"veth{number}")
    wait_until(lambda: all(_usable(f"rxe{number}") for number in range(4)), 30)


def cut_and_mend(*cables: str, shows: str) -> Callable[[Progress], None]:
    """What happens to ranks: these cables are cut, until a counter `shows` it, and plugged in until rails are back."""

    def happens(progress: Progress) -> None:
        for cable in cables:
            unplug(cable)
        progress.until(lambda counters: counters[shows] > 0)
        all_plugged()
        progress.until(lambda counters: counters["recovered_rails"] > 0)

    return happens


def _usable(device: str) -> bool:
    """Whether the port is active and has its IPv4 address, the second in its table."""
    port = Path("/sys/class/infiniband", device, "ports/1")
    if "ACTIVE" not in (port / "state").read_text():
        return False
    try:
        return (port / "gids/1").read_text().strip("0:\n") != "" and "v2" in (port / "gid_attrs/types/1").read_text()
    except OSError:  # EINVAL: no address there
        return False


@contextmanager
def netem(ethernet: str, *words: str) -> Iterator[None]:
    """netem(8) on what the device sends: ``loss 2%``, ``delay 5ms reorder 30%``."""
    tool("tc", "qdisc", "replace", "dev", ethernet, "root", "netem", *words)
    try:
        yield
    finally:
        tool("tc", "qdisc", "del", "dev", ethernet, "root")


@contextmanager
def narrow(ethernet: str, nbytes: int) -> Iterator[None]:
    """Packets of more than `nbytes` do not arrive at the device, and nobody is told. Its MTU stays."""
    load("net/sched/sch_ingress", "net/sched/cls_matchall", "net/sched/act_police")
    tool("tc", "qdisc", "replace", "dev", ethernet, "ingress")
    police = f"police rate 10gbit burst 10m mtu {nbytes} conform-exceed drop".split()
    tool("tc", "filter", "replace", "dev", ethernet, "ingress", "matchall", "action", *police)
    try:
        yield
    finally:
        tool("tc", "qdisc", "del", "dev", ethernet, "ingress")


def load(*modules: str) -> None:
    """Parts of the kernel that guests begin without."""
    for module in modules:
        if not Path("/sys/module", Path(module).name).exists():
            tool("busybox", "insmod", str(kernel_module(module)))


def allow_resets() -> None:
    """Have the kernel reset TCP connections where it is asked to: HETCOLL_FAULT's reset=B. Else it knows of none."""
    load("net/ipv4/inet_diag", "net/ipv4/tcp_diag")


def hardware(device: str) -> dict[str, int]:
    """The device's own counters: packets sent, received, sent again, ..."""
    words = tool("rdma", "statistic", "show", "link", f"{device}/1").split()[2:]
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def kernel_objects() -> dict[str, int]:
    """How many queue pairs, completion queues, memory regions and domains processes have, as the kernel counts them."""
    found = {kind: tool("rdma", "resource", "show", kind).splitlines() for kind in ("qp", "cq", "mr", "pd")}
    return {kind: sum(" pid " in line for line in lines) for kind, lines in found.items()}
