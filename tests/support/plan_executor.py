"""Runs plans on NumPy arrays the way the engine does, in any order that it may, and compares with NumPy."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from hetcoll.plan.ir import Buf, Local, Op, Plan, Span, Step, cut
from hetcoll.plan.simulator import follows
from hetcoll.plan.simulator.node import only_in_place
from hetcoll.types import Collective

Array = NDArray[np.float64]


@dataclass
class Running:
    """A step on its way. Elements move one at a time, as far as deps and room allow, in any order of the lanes.

    A message that is `lent` lies where it was until the receiver reads it; of others, slots hold copies.
    """

    step: Step
    source: Array
    target: Array
    deps: list[tuple[Running, bool]] = field(default_factory=list)
    done: int = 0  # as those see it who wait for it: what a send has lent counts when it was read, in the lane's turn
    begun: bool = False
    lent: bool = False
    handed: int = 0  # elements of a message that the receiver may take
    taken: int = 0  # those that are not needed any more
    complete: bool = False
    parts: list[Array | None] = field(default_factory=list)
    members: list[Running] = field(default_factory=list)  # of the island, in its order: its k-th LOCAL step on each

    @property
    def length(self) -> int:
        return len(self.target if self.step.dst is not None else self.source)

    def limit(self) -> int:
        length = self.length
        for dep, follow in self.deps:
            if not dep.complete:
                if not follow or length == 0:
                    return -1
                length = min(length, dep.done)
        return length


def execute(plans: Sequence[Plan], counts: Sequence[int], inplace: bool, rng: random.Random, slots: int = 2) -> None:
    """Run plans on arrays, in a random order of lanes and elements, and compare with NumPy. About every second message
    is lent, unless the plans need slots.

    `counts`: elements of each rank's share where the collective cuts a buffer by rank, else all equal.
    """
    apart = plans[0].apart and not inplace
    memories = [Memory(plan, counts, inplace) for plan in plans]
    lanes: list[tuple[int, deque[Running]]] = []
    locals: dict[int, list[Running]] = {plan.rank: [] for plan in plans}
    for plan, memory in zip(plans, memories, strict=True):
        running: list[Running] = []
        queues: dict[int, deque[Running]] = {}
        for step in plan.steps:
            kept = [d for d in step.deps if not (apart and only_in_place(plan, plan.steps[d], step))]
            deps = [(running[d], follows(plan, plan.steps[d], step)) for d in kept]
            running.append(Running(step, memory.view(step.src), memory.view(step.dst), deps))
            queues.setdefault(step.lane, deque()).append(running[-1])
            if step.local is not None:
                running[-1].parts = [memory.view(part) if part else None for part in step.local.parts]
                locals[plan.rank].append(running[-1])
        lanes += [(plan.rank, queue) for queue in queues.values()]
    for island in plans[0].islands:
        for members in zip(*(locals[rank] for rank in island), strict=True):
            for r in members:
                r.members = list(members)
    wires: Wires = {}
    lends = apart or not any(plan.credits for plan in plans)
    while lanes:
        rng.shuffle(lanes)
        moved = [
            advance(rank, r, wires, len(plans), slots, rng, lends=lends, first=r is queue[0])
            for rank, queue in lanes
            for r in due(queue)
        ]
        assert any(moved), "stuck"
        for _, queue in lanes:
            if queue[0].complete:
                queue.popleft()
        lanes = [(rank, queue) for rank, queue in lanes if queue]
    assert not any(wires.values())
    averaged = any(s.op is Op.SCALE for p in plans for s in p.steps)
    for memory in memories:
        memory.compare(memories, averaged, counts)


Wires = dict[tuple[int, int, int], deque[tuple[Running, float]]]
"""What is under way, by sender, receiver and channel: the send of each element, and its value when that was sent."""


def due(lane: deque[Running]) -> Iterator[Running]:
    """What a lane does next. Sends do not wait until what those before them have lent was read."""
    for r in lane:
        sends = r.step.op is Op.SEND
        if sends or r is lane[0]:
            yield r
        if not (sends and r.begun and r.handed == r.length):
            return


def advance(
    rank: int, r: Running, wires: Wires, size: int, slots: int, rng: random.Random, *, lends: bool, first: bool
) -> bool:
    """Move a few elements of one step. A message is its length, then its elements. `first`: its lane has come to it."""
    step, limit = r.step, r.limit()
    if step.local is not None:
        r.begun = all(dep.complete for dep, _ in r.deps)
        if r.complete or not all(member.begun for member in r.members):
            return False
        together(step.local, r.members, rng)
        return True
    if limit < 0:
        return False
    length = r.length
    sends = step.op is Op.SEND
    wire = wires.setdefault((rank, step.peer, step.channel) if sends else (step.peer, rank, step.channel), deque())
    before = r.done, r.handed, r.begun
    if step.peer >= 0 and not r.begun:
        if sends and len(wire) < slots + 1:
            wire.append((r, length))
            r.begun, r.lent = True, lends and rng.random() < 0.5
        elif not sends and wire:
            assert wire.popleft()[1] == length, f"rank {rank}: {step}: lengths differ"
            r.begun = True
    for _ in range(rng.randint(1, 4)):
        if sends:
            if not r.begun or r.handed == limit or not (r.lent or len(wire) < slots + 1):
                break
            wire.append((r, r.source[r.handed]))
            r.handed, r.taken = r.handed + 1, r.taken + (not r.lent)
            continue
        if r.done == limit or (step.peer >= 0 and not r.begun):
            break
        if step.peer >= 0 and wire:
            sent, came = wire.popleft()
            if sent.lent:
                came = sent.source[sent.taken]
                sent.taken += 1
            r.target[r.done] = came if step.op is Op.RECV else r.source[r.done] + came
        elif step.op is Op.SCALE:
            r.target[r.done] /= size
        elif step.op is Op.COPY:
            r.target[r.done] = r.source[r.done]
        elif step.op is Op.REDUCE:
            r.target[r.done] += r.source[r.done]
        else:
            break
        r.done += 1
    if sends and first:
        r.done = r.taken
    r.complete = r.done == length and (step.peer < 0 or r.begun) and limit == length and first
    return (r.done, r.handed, r.begun) != before or r.complete


def together(local: Local, members: list[Running], rng: random.Random) -> None:
    """A vendor's collective, once all members of the island have come to it. It adds up in an order of its own."""
    for member in members:
        assert member.step.local
        assert (member.step.local.kind, member.step.local.root) == (local.kind, local.root)
        member.complete = True
    order = rng.sample(range(len(members)), len(members))
    sources = [m.source.copy() for m in members]
    parts = [[None if p is None else p.copy() for p in m.parts] for m in members]
    match local.kind:
        case Collective.ALLREDUCE | Collective.REDUCE:
            total = sum(sources[j] for j in order)
            for member in members:
                if member.step.dst is not None:
                    member.target[:] = total
        case Collective.BROADCAST:
            given = next(source for source, m in zip(sources, members, strict=True) if m.step.src is not None)
            for member in members:
                if member.step.dst is not None:
                    member.target[:] = given
        case Collective.ALLGATHER | Collective.GATHER:
            for member in members:
                for part, source, giver in zip(member.parts, sources, members, strict=bool(member.parts)):
                    assert (part is None) == (giver.step.src is None)
                    if part is not None:
                        part[:] = source
        case Collective.REDUCE_SCATTER:
            for j, member in enumerate(members):
                if member.step.dst is not None:
                    member.target[:] = sum(parts[k][j] for k in order)  # type: ignore[arg-type]
        case Collective.SCATTER:
            given_parts = next(row for row in parts if row)
            for member, part in zip(members, given_parts, strict=True):
                assert (part is None) == (member.step.dst is None)
                if part is not None:
                    member.target[:] = part


def refined(shares: Sequence[int], plan: Plan) -> tuple[int, ...]:
    """The offsets of shares, each cut into the plan's pieces."""
    inner = [a + x for a, b in pairwise(shares) for x in cut(b - a, plan.pieces)[1:]]
    return (shares[0], *inner)


class Memory:
    """One rank's arrays: random inputs, outputs of nan, and shared memory where the collective works in place."""

    def __init__(self, plan: Plan, counts: Sequence[int], inplace: bool) -> None:
        self.plan, me, n, kind = plan, plan.rank, plan.size, plan.collective
        shares = (0, *accumulate(counts))
        even = {u: cut(counts[0], u) for u in (plan.send_units, plan.recv_units)}
        send, recv = even[plan.send_units], even[plan.recv_units]
        if kind in (Collective.ALLGATHER, Collective.GATHER):
            send, recv = (0, counts[me]), shares
        elif kind in (Collective.REDUCE_SCATTER, Collective.SCATTER):
            send, recv = shares, (0, counts[me])
        elif kind is Collective.ALLTOALL:
            send = recv = tuple(counts[0] * i for i in range(n + 1))
        self.tables = {Buf.SEND: refined(send, plan), Buf.RECV: refined(recv, plan)}
        rng = np.random.default_rng(1000 + me)
        self.input = rng.standard_normal(send[-1])
        memory = {Buf.SEND: self.input.copy(), Buf.RECV: np.full(recv[-1], np.nan)}
        if kind is Collective.BROADCAST:
            memory[Buf.RECV] = memory[Buf.SEND] if me == plan.root else memory[Buf.RECV]
            memory[Buf.SEND] = memory[Buf.RECV]
        elif inplace and send == recv:
            memory[Buf.RECV] = memory[Buf.SEND]
        elif inplace and (kind is Collective.ALLGATHER or (kind is Collective.GATHER and me == plan.root)):
            part = memory[Buf.RECV][recv[me] : recv[me + 1]]
            part[:] = self.input
            memory[Buf.SEND] = part
        elif inplace and (kind is Collective.REDUCE_SCATTER or (kind is Collective.SCATTER and me == plan.root)):
            memory[Buf.RECV] = memory[Buf.SEND][send[me] : send[me + 1]]
        like = self.tables[plan.scratch_like]
        memory[Buf.SCRATCH] = np.full(plan.scratch_copies * like[-1], np.nan)
        self.memory, self.shared = memory, np.shares_memory(memory[Buf.SEND], memory[Buf.RECV])

    def view(self, span: Span | None) -> Array:
        if span is None:
            return np.empty(0)
        if span.buf is not Buf.SCRATCH:
            table = self.tables[span.buf]
            return self.memory[span.buf][table[span.start] : table[span.start + span.count]]
        table = self.tables[self.plan.scratch_like]
        copy, unit = divmod(span.start, len(table) - 1)
        start = copy * table[-1]
        return self.memory[Buf.SCRATCH][start + table[unit] : start + table[unit + span.count]]

    def compare(self, all_ranks: Sequence[Memory], averaged: bool, counts: Sequence[int]) -> None:
        plan, me = self.plan, self.plan.rank
        inputs = [m.input for m in all_ranks]
        got = self.memory[Buf.RECV]
        share = slice(sum(counts[:me]), sum(counts[: me + 1]))
        if not self.shared:
            np.testing.assert_array_equal(self.memory[Buf.SEND], self.input)
        match plan.collective:
            case Collective.ALLREDUCE:
                np.testing.assert_array_equal(got, all_ranks[0].memory[Buf.RECV])  # the same bits everywhere
                want = np.sum(inputs, axis=0)
            case Collective.REDUCE:
                want = np.sum(inputs, axis=0)
            case Collective.REDUCE_SCATTER:
                want = np.sum(inputs, axis=0)[share]
            case Collective.ALLGATHER | Collective.GATHER:
                want = np.concatenate(inputs)
            case Collective.SCATTER:
                want = inputs[plan.root][share]
            case Collective.ALLTOALL:
                want = np.concatenate([x[counts[0] * me : counts[0] * (me + 1)] for x in inputs])
            case _:
                want = inputs[plan.root]
        if plan.collective in (Collective.REDUCE, Collective.GATHER) and me != plan.root:
            return
        np.testing.assert_allclose(got, want / plan.size if averaged else want, rtol=1e-12, atol=1e-12)
