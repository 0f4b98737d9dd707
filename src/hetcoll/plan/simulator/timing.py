"""How long plans take, by a discrete-event simulation of the work that each piece of each step makes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from ..ir import Op, Plan
from ..machine import Machine
from ..topology import Topology
from .network import network
from .node import RECEIVES, Node

PIECE = 64 << 10  # bytes that move at a time
PIECES = 8  # at most: more make the simulation slower, not better


def predict(plans: Sequence[Plan], nbytes: int, topology: Topology, machine: Machine | None = None) -> float:
    """Seconds until the last rank is done; `nbytes` is the larger of the two buffers, used in place.

    A rank's core does its copies and additions one after another; what goes over TCP occupies the host's card instead,
    each direction by itself. FIFOs are as long as need be. Raises PlanError when the plans do not fit together.
    """
    clock = _Clock(plans, nbytes, topology, machine or Machine())
    return clock.run()


class _Clock:
    def __init__(self, plans: Sequence[Plan], nbytes: int, topology: Topology, machine: Machine) -> None:
        self.unit = nbytes / max(1, *(max(plan.send_units, plan.recv_units) for plan in plans))
        self.topology, self.machine = topology, machine
        self.nodes = [node for row in network(plans) for node in row]
        self.host = {rank: i for i, host in enumerate(topology.hosts) for rank in host}
        self.then: list[list[tuple[Node, bool]]] = [[] for _ in self.nodes]  # who waits, and whether for each piece
        for node in self.nodes:
            for dep, follow in node.deps:
                self.then[dep.id].append((node, follow and self.pieces(dep) == self.pieces(node)))
            for member in node.group or (node,):
                if member.before is not None:
                    self.then[member.before.id].append((node, False))
                if member is not node:
                    for dep, _ in member.deps:
                        self.then[dep.id].append((node, False))
            if node.other is not None and node.step.op is Op.SEND:
                self.then[node.id].append((node.other, True))
        self.missing = [[int(j > 0) for j in range(self.pieces(node))] for node in self.nodes]
        self.ready = [[0.0] * self.pieces(node) for node in self.nodes]
        for waiting in self.then:
            for node, each in waiting:
                for j in range(self.pieces(node) if each else 1):
                    self.missing[node.id][j] += 1

    def bytes(self, node: Node) -> float:
        step = node.step
        spans = step.local.parts if step.local and step.local.parts else (step.dst or step.src,)
        return sum(span.count * self.unit for span in spans if span is not None)

    def pieces(self, node: Node) -> int:
        if node.step.op is Op.LOCAL:
            return 1
        return min(PIECES, max(1, math.ceil(self.bytes(node) / PIECE)))

    def run(self) -> float:
        queue = [(0.0, n.id, 0) for n in self.nodes if self.missing[n.id][0] == 0]
        free: dict[tuple[str, int], float] = {}
        end = 0.0
        while queue:
            now, i, j = heapq.heappop(queue)
            node = self.nodes[i]
            server, work, delay = self.work(node, j)
            done = max(now, free.get(server, 0.0)) + work
            free[server] = done
            end = max(end, done)
            last = self.pieces(node) - 1
            following = [(node, j + 1, done)] if j < last else []
            for waiting, each in self.then[i]:
                if each or j == last:
                    following.append((waiting, j if each else 0, done + (delay if waiting is node.other else 0.0)))
            for waiting, k, when in following:
                self.ready[waiting.id][k] = max(self.ready[waiting.id][k], when)
                self.missing[waiting.id][k] -= 1
                if self.missing[waiting.id][k] == 0:
                    heapq.heappush(queue, (self.ready[waiting.id][k], waiting.id, k))
        return end

    def work(self, node: Node, j: int) -> tuple[tuple[str, int], float, float]:
        """Who does piece `j` of a step, for how long, and how much later the other end sees it."""
        step, machine, crowding = node.step, self.machine, self.topology.crowding
        nbytes = self.bytes(node) / self.pieces(node)
        if step.op is Op.LOCAL:
            return ("island", node.rank), machine.island.latency + nbytes / machine.island.bandwidth, 0.0
        adds = nbytes / machine.reduce * crowding if step.op not in (Op.SEND, Op.RECV, Op.COPY) else 0.0
        if step.peer < 0:
            return ("core", node.rank), adds, 0.0
        path = self.topology.transport(node.rank, step.peer)
        shm = path == "shm"
        tcp = machine.loopback if self.topology.same_host(node.rank, step.peer) else machine.tcp
        link = {"shm": machine.shm, "tcp": tcp, "verbs": machine.verbs}[path]
        moves = nbytes / link.bandwidth * (crowding if shm else 1.0)
        if shm and step.op is Op.RECV_REDUCE:
            moves = 0.0  # added straight from where the peer put it
        work = moves + adds + (link.overhead * crowding if j == 0 else 0.0)
        delay = link.latency + machine.switch * (crowding - 1)
        if not link.duplex:
            return ("core", node.rank), work, delay
        return ("in" if step.op in RECEIVES else "out", self.host[node.rank]), work, delay
