"""The numbers that predictions start from: how fast edges and cores are."""

from __future__ import annotations

import math
from typing import NamedTuple

from .topology import Topology

_MBIT = 125e3  # bytes per second
_FRAMES = 1448 / 1514  # of what a card carries, the part that is data
_VERBS = 0.88  # the same for RDMA: what cards of 100 Gb/s are said to do


class Link(NamedTuple):
    """An edge: seconds until a message is seen, seconds of work for one at either end, bytes per second.

    `duplex` says whether a rank sends and receives at that rate at the same time (a network card) or not (a core that
    copies).
    """

    latency: float
    overhead: float
    bandwidth: float
    duplex: bool


class Network(NamedTuple):
    """What `hetcoll tune` measured between hosts: seconds until a message is seen, of work for one at either end, and
    bytes per second."""

    latency: float
    overhead: float
    bandwidth: float


class Machine(NamedTuple):
    """The numbers behind every prediction. Defaults are for a server of 2020 or later.

    `reduce` is in bytes per second of the result. `switch` is how many seconds longer a hop takes for each rank that
    shares a core and must be scheduled first. `stall` is how much longer the work of a stepwise algorithm takes inside
    a host, where cores move the bytes; over TCP not where ranks share a core, as who waits for one other leaves it to
    them. `staging` is how many seconds longer `staged` takes before it gains: nothing is sent before a whole copy is
    there. Where ranks share a core, the others work meanwhile; their number divides it twice. It was fitted to 4, 8, 16
    and 32 ranks on 32 cores of a Xeon and to 4, 6 and 8 on two.

    The numbers for shared memory were fitted to sweeps of all algorithms over 4, 8 and 16 ranks on 16 cores of a Xeon:
    what is chosen is, on average, 4 to 8 % slower than the fastest, for collectives that everyone waits for.
    Those of `loopback`, TCP inside a host, were fitted to sweeps over 3, 4, 6 and 8 ranks on the two cores of one Xeon
    and 3, 4, 6, 8 and 16 ranks on two to sixteen cores of another: where ranks share cores, a message is work of the
    cores, and its way takes little beside it. What is chosen takes 1 to 3 % longer than the fastest all-reduce.
    Those of `tcp` are of 8 hosts, namespaces on 32 cores of a Xeon: a core takes as long to send a message or to take
    it, and then it is there. What is predicted so is 0.92 to 1.01 of what five all-reduces of 8 B took at 10 Gbit/s.
    `incast` is how much longer bytes take over TCP for each further rank that sends to the same one, of up to
    `incast_most`, the most that was measured: shaped links of 4 and 8 hosts were filled to 0.92 and 0.79 by direct
    all-reduces, to 0.96 and more by rings.
    `unlike` is how much longer bytes take over cards of unlike rates where whole messages or several streams wait for
    each other: each time they wait for what the slow card has last, while a ring goes on meanwhile.
    `slots_incast` is the same for each GPU of a host beyond the second that sends to the same one, through slots in the
    host's memory: among four, direct all-reduces of 16 MiB took 1.15 to 1.3 times as long as rings, of 256 MiB as long.
    `island` is a vendor's collective among its GPUs: what NCCL takes over NVLink. `verbs` is what a card of 100 Gb/s is
    said to do, not measured. `on` has the network's rate in the place of these where the system says it, or what was
    `measured` of it.
    """

    shm: Link = Link(latency=0.25e-6, overhead=0.06e-6, bandwidth=22e9, duplex=False)
    tcp: Link = Link(latency=2e-6, overhead=3e-6, bandwidth=3.5e9, duplex=True)
    loopback: Link = Link(latency=2.5e-6, overhead=2e-6, bandwidth=5e9, duplex=True)
    island: Link = Link(latency=15e-6, overhead=0.0, bandwidth=200e9, duplex=True)
    verbs: Link = Link(latency=2.5e-6, overhead=0.5e-6, bandwidth=11e9, duplex=True)
    reduce: float = 20e9
    switch: float = 2e-6
    stall: float = 1.6
    staging: float = 14e-6
    incast: float = 0.04
    incast_most: int = 7
    unlike: float = 1.25
    slots_incast: float = 0.0
    slots_incast_most: int = 3
    measured: Network | None = None

    def on(self, topology: Topology) -> Machine:
        """The same with the rate of the network between hosts, where ranks say it: of the slowest cards; and over TCP
        with its latency, half of the longest round trip, where that is more than a message takes by these. What was
        measured counts before what is said.

        A rank moves no more over TCP than it did, however fast its cards are. What incast takes was measured at 200
        Mbit/s, and rings gained from the same sizes on at 1 Gbit/s: so it stays as it is, and grows with the latency of
        a slow network, up to the part of a byte's time that it was.
        """
        machine, (mbits, _), (micros, _) = self, topology.rate, topology.round_trip
        if self.measured is not None and topology.between_hosts == "tcp":
            return self._with(*self.measured)
        if topology.between_hosts == "tcp" and micros * 0.5e-6 > self.tcp.latency + 2 * self.tcp.overhead:
            machine = self._replace(tcp=self.tcp._replace(latency=micros * 0.5e-6))
        if mbits == 0:
            return machine
        if topology.between_hosts == "verbs":
            return machine._replace(verbs=self.verbs._replace(bandwidth=mbits * _MBIT * _VERBS))
        bandwidth = min(self.tcp.bandwidth, mbits * _MBIT * _FRAMES)
        return self._with(machine.tcp.latency, self.tcp.overhead, bandwidth)

    def _with(self, latency: float, overhead: float, bandwidth: float) -> Machine:
        slower, later = bandwidth / self.tcp.bandwidth, latency / self.tcp.latency
        tcp = self.tcp._replace(latency=latency, overhead=overhead, bandwidth=bandwidth)
        return self._replace(tcp=tcp, incast=self.incast * min(1.0, slower * later))

    def network(self, topology: Topology) -> str:
        """What `on` makes of the network between hosts, for people; nothing of one host."""
        if len(topology.hosts) == 1:
            return ""
        mbits, rank = topology.rate
        ours = self.on(topology).tcp
        if self.measured is not None and topology.between_hosts == "tcp":
            rate, micros = 8e-9 * ours.bandwidth, ours.latency * 1e6
            work = ours.overhead * 1e6
            told = f"{rate:.3g} Gbit/s, {micros:.3g} us a message and {work:.3g} us of work at either end"
            return f"network between hosts: {told}, as measured"
        if mbits == 0:
            taken = self.verbs if topology.between_hosts == "verbs" else self.tcp
            told = f"taken for {8e-9 * taken.bandwidth:.3g} Gbit/s: no system says its cards' rate"
        else:
            told = f"{mbits / 1000:.6g} Gbit/s, as the system of rank {rank} says of its cards"
            if topology.between_hosts == "tcp" and ours.bandwidth == self.tcp.bandwidth:
                told += f"; of which a rank fills {8e-9 * ours.bandwidth:.3g} by TCP"
        if ours.latency > self.tcp.latency:
            told += f"; {ours.latency * 1e6:.6g} us a message, by the round trip of rank {topology.round_trip[1]}"
        return f"network between hosts: {told}"


GPUS = Machine(
    shm=Link(latency=20e-6, overhead=10e-6, bandwidth=45e9, duplex=True),
    tcp=Link(latency=60e-6, overhead=15e-6, bandwidth=3.5e9, duplex=True),
    loopback=Link(latency=60e-6, overhead=15e-6, bandwidth=3.5e9, duplex=True),
    verbs=Link(latency=30e-6, overhead=15e-6, bandwidth=11e9, duplex=True),
    reduce=math.inf,  # while the next piece comes
    switch=0.0,
    stall=1.0,
    slots_incast=0.25,
)
"""Of messages between GPUs of different islands, by copy engines. Inside a host they are those of H200s; between hosts
they are not measured."""
