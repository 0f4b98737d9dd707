"""`hetcoll topo`: the ranks of a job, their hosts, and what carries data between them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, Protocol

from .. import Communicator
from ..plan.topology import Topology
from . import in_job

_WIDEST = 32  # ranks up to which every pair is shown


class Process(Protocol):
    """What is said of a rank's process."""

    @property
    def host(self) -> str: ...

    @property
    def pid(self) -> int: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many ranks to start, where no launcher did, and the form of the answer."""
    in_job.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Rank 0 prints the topology of the job."""

    def told(comm: Communicator) -> str:
        topology, processes = comm.topology, comm._wiring.processes(range(comm.size))
        return json.dumps(document(topology, processes), indent=1) if args.json else text(topology, processes)

    return in_job.tell(args, argv, told)


def document(topology: Topology, processes: Sequence[Process]) -> dict[str, Any]:
    """The topology, of these processes, as JSON values. `transports[a][b]` is what carries data from rank a to b."""
    return {
        "schema": 1,
        "setting": topology.setting,
        "hosts": [list(ranks) for ranks in topology.hosts],
        "ranks": [
            {"rank": info.rank, "host": process.host, "pid": process.pid, "cores": info.cores}
            for info, process in zip(topology.ranks, processes, strict=True)
        ],
        "transports": [[_transport(topology, a, b) for b in range(topology.size)] for a in range(topology.size)],
    }


def text(topology: Topology, processes: Sequence[Process]) -> str:
    """The topology for people: hosts with their ranks, then the transport of every pair."""
    hosts = topology.hosts
    lines = [f"{topology.size} ranks on {len(hosts)} host{'s' * (len(hosts) != 1)}, transport {topology.setting}"]
    for number, ranks in enumerate(hosts):
        first = topology.ranks[ranks[0]]
        name = processes[ranks[0]].host
        lines.append(f"host {number} ({name}), {first.cores} cores: ranks {_spans(ranks)}")
    if topology.crowding > 1:
        lines.append(f"{topology.crowding:g} ranks share a core: whoever waits sleeps instead of spinning")
    if topology.size <= _WIDEST:
        width = max(4, len(str(topology.size - 1)))
        lines.append("     " + "".join(f"{b:>{width}}" for b in range(topology.size)))
        for a in range(topology.size):
            cells = (_transport(topology, a, b) for b in range(topology.size))
            lines.append(f"{a:>4} " + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def _transport(topology: Topology, a: int, b: int) -> str:
    return "-" if a == b else topology.transport(a, b)


def _spans(ranks: Sequence[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3, 6."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
