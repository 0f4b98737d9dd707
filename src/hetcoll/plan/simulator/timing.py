"""How long plans take on the hosts of a topology, by a discrete-event simulation of all their pieces."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Op, Plan, Step
from ..machine import Machine
from ..symmetry import everyone
from ..topology import Topology
from .graph import Route, Server, Use, Weaver

ADDS = (Op.REDUCE, Op.SCALE, Op.ROUND)


def predict(plans: Sequence[Plan], nbytes: int, topology: Topology, machine: Machine | None = None) -> float:
    """Seconds until the last rank is done; `nbytes` is the larger of the two buffers, used in place.

    A rank's core does its copies and additions one after another, and what its messages ask for; the bytes that go over
    TCP occupy the host's card instead, each direction by itself. FIFOs are as long as need be. Raises PlanError when
    the plans do not fit together.
    """
    whole = max(max(plan.send_units, plan.recv_units) for plan in plans)
    weaver = Weaver(whole, _Hosts(topology, machine or Machine()), everyone(len(plans)), lambda server: server)
    for plan in plans:
        weaver.add(plan)
    return weaver.done().run(nbytes).seconds


class _Hosts:
    """A topology with the numbers of a machine."""

    def __init__(self, topology: Topology, machine: Machine) -> None:
        self._topology, self._machine = topology, machine.on(topology)
        self._host = {rank: i for i, host in enumerate(topology.hosts) for rank in host}

    def route(self, a: int, b: int, reduces: bool) -> Route:
        machine, topology = self._machine, self._topology
        crowding, near = topology.crowding, topology.same_host(a, b)
        path = topology.transport(a, b)
        link = {"shm": machine.shm, "tcp": machine.loopback if near else machine.tcp, "verbs": machine.verbs}[path]
        shared = crowding if path == "shm" else 1.0
        moves, adds = shared / link.bandwidth, crowding / machine.reduce if reduces else 0.0
        into = 0.0 if path == "shm" and reduces else moves  # added straight from where the peer put it
        first, delay = link.overhead * crowding, link.latency + machine.switch * (crowding - 1)
        if not link.duplex:
            return Route((Use(("core", a, 0), moves, first),), (Use(("core", b, 0), into + adds, first),), delay)
        out, card = ("out", self._host[a], 0), ("in", self._host[b], 0)
        ends = (Use(("core", rank, 0), 0.0, first) for rank in (a, b))
        return Route((next(ends), Use(out, moves)), (next(ends), Use(card, into + adds)), delay)

    def work(self, rank: int, op: Op) -> tuple[Use, ...]:
        per_byte = self._topology.crowding / self._machine.reduce if op in ADDS else 0.0
        return (Use(("core", rank, 0), per_byte),)

    def local(self, rank: int, island: tuple[int, ...], step: Step) -> tuple[Use, ...]:
        link = self._machine.island
        return (Use(("island", rank, 0), 1 / link.bandwidth, link.latency),)

    def host(self, rank: int, op: Op) -> float:
        return 0.0

    def slack(self, server: Server) -> float:
        return 0.0

    def name(self, server: Server) -> str:
        return f"{server[0]} of {'host' if server[0] in ('in', 'out') else 'rank'} {server[1]}"
