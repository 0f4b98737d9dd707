"""Ranks on several hosts beside Gloo, Open MPI and Intel MPI: network namespaces whose links have a known rate.

    python benchmarks/hosts.py                                     # 4 and 8 hosts at 1 and 10 Gbit/s, all-reduce
    python benchmarks/hosts.py --hosts 4 --rates 1gbit --ops allreduce allgather --algos "" ring tree
    python benchmarks/hosts.py --each 2                            # two ranks a host: shared memory inside
    python benchmarks/hosts.py --rates 1gbit+1gbit 1gbit+250mbit   # two cards a host; one of two is slow

Every library runs the same worker (worker.py), a launch each in turn; every result is verified. Of its launches the
best counts, and of a launch the slowest rank. `bound` is the least that the links allow: for large messages the bytes
that must leave or enter a host over the link's rate; for 8 B ceil(log2 hosts) times half of what a message of 8 B takes
there and back between two hosts, by hetcoll. The last column is what part of the bound a library reaches (large), or
how many times the bound it takes (8 B). Needs root, ip(8) and tc(8). Namespaces share this machine's cores: many hosts
on few cores are bound by these, and each takes all of them for its own: HETCOLL_SPIN_US=0 has waiting ranks sleep.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/support")]

import netns  # noqa: E402
from libraries import UCX, prepare, run_group  # noqa: E402
from shaped import FRAMES, bits, shaped  # noqa: E402

INTEL = {"I_MPI_FABRICS": "shm:ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0", "I_MPI_THREAD_YIELD": "2"}
HERE = Path(__file__).resolve().parent
LARGE = 1 << 20  # bytes from which on the rate of the links bounds a call
OPS = ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "alltoall")


@dataclass(frozen=True)
class Library:
    """A library as worker.py knows it, in the environment of that name; `words` are of its launcher."""

    name: str
    worker: str
    environment: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def libraries(algos: Sequence[str], cards: int) -> list[Library]:
    """Where hosts have two cards, those libraries use both that can."""
    stripes = {"HETCOLL_SOCKET_STRIPES": str(cards)}
    ours = [
        Library(f"hetcoll {algo}".strip(), "hetcoll", "", stripes | ({"HETCOLL_ALGO": algo} if algo else {}))
        for algo in algos
    ]
    names = ",".join(f"eth{card}" for card in range(cards))
    tcp = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", names)
    ucx = (*UCX.split(), "-x", f"UCX_NET_DEVICES={names}", "-x", "UCX_TLS=tcp,self")
    return [
        *ours,
        Library("Gloo", "gloo", "gloo", {"GLOO_SOCKET_IFNAME": "eth0"}),
        Library("Open MPI", "mpi", "openmpi", {}, tcp),
        Library("Open MPI UCX", "mpi", "openmpi", {}, ucx),
        Library("Intel MPI", "mpi", "impi", INTEL),
    ]


def launch(lib: Library, hosts: Sequence[str], each: int, words: Sequence[str], home: Path, timeout: float) -> None:
    """Run a worker on every rank, `each` on a host, to the end."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | lib.variables
    folder = prepare(lib.environment, Path.home() / ".cache/hetcoll-bench") if lib.environment else None
    python = sys.executable if folder is None else str(folder / "bin/python")
    command = [python, str(HERE / "worker.py"), *words]
    if lib.worker != "mpi":
        command = [sys.executable, __file__, "--start", ",".join(hosts), str(each), *command]
    elif folder is not None:
        env |= {"PATH": f"{folder / 'bin'}:{env['PATH']}", "I_MPI_ROOT": str(folder)}
        own = lib.environment == "openmpi"
        agent, at = enterer(hosts, home, own_names=own), [f"10.78.0.{host + 1}" for host in range(len(hosts))]
        count = ("-n", str(len(hosts) * each))
        if own:
            places = ",".join(f"{one}:{each}" for one in at)
            how = ["--host", places, "--prtemca", "plm_ssh_agent", str(agent), "--allow-run-as-root", "--bind-to",
                   "none", "--leave-session-attached", "--mca", "mpi_yield_when_idle", "1", "-x", "PATH",
                   "-x", "OMP_NUM_THREADS"]  # fmt: skip
        else:
            how = ["-hosts", ",".join(at), "-ppn", str(each), "-launcher", "ssh", "-launcher-exec", str(agent)]
        named = ["unshare", "--uts", "sh", "-c", 'hostname h0; exec "$@"', "sh"] if own else []
        mpirun = [str(folder / "bin/mpirun"), *count, *how, *lib.words, *command]
        command = ["ip", "netns", "exec", hosts[0], *named, *mpirun]
    run_group(command, env, timeout)


def enterer(hosts: Sequence[str], home: Path, *, own_names: bool) -> Path:
    """A program in the place of ssh(1), which runs a command in the namespace of an address; `own_names`: each under a
    name of its own. Open MPI takes ranks on hosts of one name for ranks of one host; Intel MPI connects to names."""
    path, cases = home / "enter", ""
    for i, host in enumerate(hosts):
        shell, named = ("unshare --uts /bin/sh", f"hostname h{i}; ") if own_names else ("/bin/sh", "")
        cases += f'10.78.0.{i + 1}) exec ip netns exec {host} {shell} -c "{named}$*";;\n'
    path.write_text(
        f'#!/bin/sh\nwhile case "$1" in -*) true;; *) false;; esac; do shift; done\n'
        f'at="$1"; shift\ncase "$at" in\n{cases}esac\nexit 9\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def start(hosts: Sequence[str], each: int, command: Sequence[str]) -> int:
    """Start the ranks of a command in their namespaces, with torchrun's variables."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    size = len(hosts) * each
    env = os.environ | {"WORLD_SIZE": str(size), "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each)}
        words = ["ip", "netns", "exec", hosts[rank // each], *command]
        processes.append(subprocess.Popen(words, env=env | own))
    return max(abs(process.wait()) for process in processes)


def measured(lib: Library, hosts: Sequence[str], each: int, args: Any) -> dict[tuple[str, int], tuple[float, int]]:
    """(the slowest rank's best microseconds, wrong elements) by operation and size, of one launch."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "r"
        words = ["--library", lib.worker, "--ops", *args.ops, "--sizes", *map(str, args.sizes), "--budget-ms",
                 str(args.budget_ms), "--out", str(where)]  # fmt: skip
        launch(lib, hosts, each, words, Path(folder), args.timeout)
        found: dict[tuple[str, int], tuple[float, int]] = {}
        for rank in range(len(hosts) * each):
            for row in json.loads(Path(f"{where}.{rank}.json").read_text())["rows"]:
                us, wrong = found.get((row["op"], row["nbytes"]), (0.0, 0))
                found[row["op"], row["nbytes"]] = max(us, row["median_us"]), wrong + row["wrong"]
    return found


def bound(op: str, nbytes: int, hosts: int, each: int, rate: float, half_way: float) -> float:
    """Microseconds: see this file's docstring. What ranks of a host send in an all-to-all is never the same."""
    if nbytes < LARGE:
        return math.ceil(math.log2(hosts)) * half_way
    passes = {"allreduce": 2 * (hosts - 1) / hosts, "broadcast": 1.0, "reduce": 1.0}.get(op, (hosts - 1) / hosts)
    return 1e6 * passes * (each if op == "alltoall" else 1) * nbytes / (rate * FRAMES)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8], help="numbers of namespaces (default 4 8)")
    parser.add_argument("--each", type=int, default=1, help="ranks of a host (default 1)")
    parser.add_argument(
        "--rates", nargs="+", default=["1gbit", "10gbit"], help="of each link, in tc's words; A+B: of two"
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, default=["allreduce"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16 << 20], metavar="BYTES")
    parser.add_argument("--algos", nargs="+", default=["", "ring", "tree"], help="of HETCOLL_ALGO; empty: the choice")
    parser.add_argument("--peers", nargs="*", default=["Gloo", "Open MPI", "Intel MPI"])
    parser.add_argument("--rounds", type=int, default=2, help="launches of each library (default 2)")
    parser.add_argument("--budget-ms", type=float, default=300.0, help="time for the samples of one size")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one launch")
    args = parser.parse_args(words)
    wrong = 0
    for n in args.hosts:
        for rate in args.rates:
            first, _, second = rate.partition("+")
            with shaped(n, first, burst=256 << 10, second=second) as net:
                half = half_way(net, args)
                print(f"{n} hosts of {args.each}, {rate}: a message of 8 B takes {half:.1f} us one way", flush=True)
                wrong += compare(net, n, rate, half, args)
    return 1 if wrong else 0


def half_way(net: netns.Network, args: Any) -> float:
    """Of 8 B between two hosts, in microseconds."""
    two = argparse.Namespace(**vars(args) | {"ops": ["sendrecv"], "sizes": [8]})
    return measured(Library("hetcoll", "hetcoll"), net.hosts[:2], 1, two)["sendrecv", 8][0]


def compare(net: netns.Network, hosts: int, rate: str, half: float, args: Any) -> int:
    """Print a row for each library, operation and size; how many elements were wrong."""
    best: dict[tuple[str, str, int], float] = {}
    wrong, failed = 0, dict[str, str]()
    everyone = [
        lib for lib in libraries(args.algos, rate.count("+") + 1) if lib.worker == "hetcoll" or lib.name in args.peers
    ]
    for _ in range(args.rounds):
        for lib in everyone:
            try:
                for (op, nbytes), (us, bad) in measured(lib, net.hosts, args.each, args).items():
                    key = lib.name, op, nbytes
                    best[key] = min(us, best.get(key, math.inf))
                    wrong += bad
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
                last = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:]
                failed[lib.name] = last[0][:200] if last else type(error).__name__
    for (name, op, nbytes), us in sorted(best.items(), key=lambda item: (item[0][1:], item[1])):
        least = bound(op, nbytes, hosts, args.each, sum(map(bits, rate.split("+"))), half)
        part = f"{us / least:6.2f} times" if nbytes < LARGE else f"{least / us:6.2f} of it"
        print(f"  {op:<15}{nbytes:>10}  {name:<20}{us:>12.1f} us  bound {least:>10.1f}  {part}", flush=True)
    for name, why in failed.items():
        print(f"  {name} failed: {why}", flush=True)
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        sys.exit(start(sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4:]))
    sys.exit(main())
