"""Plans that nobody would write: random messages, sums and copies, what they leave by NumPy, and how ranks run them."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

import hetcoll
from hetcoll import _native
from hetcoll.calls import descriptor
from hetcoll.plan.ir import Buf, Op, Plan, Span, Step, cut
from hetcoll.plan.simulator import PlanError
from hetcoll.plan.simulator.grid import grids
from hetcoll.plan.simulator.memory import Memory, check_races
from hetcoll.plan.simulator.network import network
from hetcoll.plan.simulator.progress import order_node, run
from hetcoll.types import Collective, DType, ReduceOp

Array = NDArray[np.int64]
SECONDS = 20.0
UNWRITTEN = -7  # in outputs, before a call


def prove(plans: Sequence[Plan], inplace: bool) -> None:
    """What `simulator.check` proves, but for what the result is: these plans are no collective."""
    apart = not inplace and plans[0].apart
    nodes = network(plans, apart)
    memories = [Memory(plan, inplace, grid) for plan, grid in zip(plans, grids(plans), strict=True)]
    for node in run(plans, nodes, 0 if apart else plans[0].credits):
        order_node(node, lends=True)
        check_races(plans[node.rank], memories[node.rank], node)


def proved(plans: Sequence[Plan]) -> bool:
    try:
        for inplace in (False, True):
            prove(plans, inplace)
    except PlanError:
        return False
    return True


@dataclass
class _Author:
    """Writes steps of all ranks in an order in which they can run, one after the other."""

    rng: random.Random
    size: int
    units: int
    copies: int

    def __post_init__(self) -> None:
        self.steps: list[list[Step]] = [[] for _ in range(self.size)]
        self.unread: list[set[tuple[Buf, int]]] = [set() for _ in range(self.size)]
        self.known: list[set[tuple[Buf, int]]] = [set() for _ in range(self.size)]
        for known in self.known:
            known |= {(buf, unit) for buf in (Buf.SEND, Buf.RECV) for unit in range(self.units)}
        self.lanes: dict[tuple[int, int, int, bool], int] = {}
        self.order: list[tuple[int, int]] = []

    def span(self, rank: int, start: int, count: int, written: bool) -> Span | None:
        """Any buffer at these units: what is read must hold something."""
        bufs = [(Buf.RECV, 0), *((Buf.SCRATCH, k * self.units) for k in range(self.copies))]
        if not written:
            bufs.append((Buf.SEND, 0))
        buf, first = self.rng.choice(bufs)
        span = Span(buf, first + start, count)
        return span if written or _cells(span) <= self.known[rank] else None

    def add(self, rank: int, step: Step) -> None:
        """Appends a step that depends on whatever it shares memory with."""
        mine = self.steps[rank]
        deps = {i for i, other in enumerate(mine) if other.lane != step.lane and _conflict(other, step)}
        mine.append(replace(step, deps=tuple(sorted(deps))))
        self.order.append((rank, len(mine) - 1))
        for span in (step.src, step.dst if step.op is Op.REDUCE else None):
            self.unread[rank] -= _cells(span)
        if step.dst is not None:
            self.unread[rank] |= _cells(step.dst)
            self.known[rank] |= _cells(step.dst)

    def lane(self, rank: int, peer: int, channel: int, sends: bool) -> int:
        return self.lanes.setdefault((rank, peer, channel, sends), self.rng.randrange(5))

    def message(self, src: int, dst: int, given: Span, taken: Span, summand: Span | None = None) -> None:
        channel = self.rng.randrange(2)
        own = summand if summand is not None and _cells(summand) <= self.known[dst] else None
        if own is None and _cells(taken) & self.unread[dst]:
            own = taken
            if not _cells(taken) <= self.known[dst]:
                return
        if own not in (None, taken) and _cells(taken) & self.unread[dst]:
            own = taken
            if not _cells(taken) <= self.known[dst]:
                return
        if own is not None and own != taken and own.buf is taken.buf and _cells(own) & _cells(taken):
            own = taken
        if own is not None and {own.buf, taken.buf} == {Buf.SEND, Buf.RECV} and own.start != taken.start:
            return
        self.add(src, Step(Op.SEND, self.lane(src, dst, channel, True), given, None, dst, channel))
        op = Op.RECV if own is None else Op.RECV_REDUCE
        self.add(dst, Step(op, self.lane(dst, src, channel, False), own, taken, src, channel))

    def event(self) -> None:
        rng = self.rng
        start = rng.randrange(self.units)
        count = rng.randint(1, self.units - start)
        kind = rng.random()
        if kind < 0.25 and self.copies:
            self.chain(start, count)
            return
        rank = rng.randrange(self.size)
        src = self.span(rank, start, count, written=False)
        if src is None:
            return
        if kind < 0.75:
            peer = rng.choice([r for r in range(self.size) if r != rank])
            taken = self.span(peer, start, count, written=True)
            assert taken is not None
            self.message(rank, peer, src, taken, self.span(peer, start, count, written=False))
            return
        dst = self.span(rank, start, count, written=True)
        assert dst is not None
        if dst == src or {src.buf, dst.buf} == {Buf.SEND, Buf.RECV}:  # in place that is the same memory
            return
        reduces = bool(_cells(dst) & self.unread[rank]) or rng.random() < 0.4
        if reduces and not _cells(dst) <= self.known[rank]:
            return
        self.add(rank, Step(Op.REDUCE if reduces else Op.COPY, rng.randrange(5), src, dst))

    def chain(self, start: int, count: int) -> None:
        """A sum that goes from rank to rank through scratch: what staged plans lend on."""
        ranks = self.rng.sample(range(self.size), self.rng.randint(2, self.size))
        place = Span(Buf.SCRATCH, self.rng.randrange(self.copies) * self.units + start, count)
        mine = Span(Buf.SEND, start, count)
        if not any(_cells(place) & self.unread[r] for r in ranks):
            self.add(ranks[0], Step(Op.COPY, self.rng.randrange(5), mine, place))
            for a, b in pairwise(ranks):
                end = Span(Buf.RECV, start, count) if b == ranks[-1] and self.rng.random() < 0.7 else place
                self.message(a, b, place, end, mine)


def _cells(span: Span | None) -> set[tuple[Buf, int]]:
    return set() if span is None else {(span.buf, unit) for unit in range(span.start, span.start + span.count)}


def _conflict(a: Step, b: Step) -> bool:
    """Whether both touch the same memory, in place or not, and not both only read."""

    def touched(step: Step, written: bool) -> set[tuple[Buf, int]]:
        spans = [step.dst] if written else [step.src, step.dst if step.op is Op.REDUCE else None]
        return {(Buf.RECV if buf is Buf.SEND else buf, unit) for span in spans for buf, unit in _cells(span)}

    wrote, writes = touched(a, True), touched(b, True)
    return bool(wrote & (touched(b, False) | writes) or touched(a, False) & writes)


@dataclass
class Scene:
    plans: list[Plan]
    order: list[tuple[int, int]]  # (rank, step): one order in which all can run

    def expected(self, inputs: Sequence[Array], inplace: Sequence[bool]) -> list[Array]:
        """The outputs of all ranks, by NumPy."""
        count = len(inputs[0])
        table = cut(count, self.plans[0].send_units)
        memories: list[dict[Buf, Array]] = []
        for plan, x, same in zip(self.plans, inputs, inplace, strict=True):
            send = x.copy()
            scratch = np.zeros(plan.scratch_copies * count, np.int64)
            recv = send if same else np.full(count, UNWRITTEN, np.int64)
            memories.append({Buf.SEND: send, Buf.RECV: recv, Buf.SCRATCH: scratch})

        def view(rank: int, span: Span | None) -> Array:
            assert span is not None
            copy, unit = divmod(span.start, len(table) - 1)
            return memories[rank][span.buf][copy * count + table[unit] : copy * count + table[unit + span.count]]

        flying: dict[tuple[int, int, int], list[Array]] = {}
        for rank, i in self.order:
            step = self.plans[rank].steps[i]
            if step.op is Op.SEND:
                flying.setdefault((rank, step.peer, step.channel), []).append(view(rank, step.src).copy())
            elif step.op is Op.COPY:
                view(rank, step.dst)[:] = view(rank, step.src)
            elif step.op is Op.REDUCE:
                view(rank, step.dst)[:] += view(rank, step.src)
            else:
                came = flying[step.peer, rank, step.channel].pop(0)
                view(rank, step.dst)[:] = came if step.op is Op.RECV else view(rank, step.src) + came
        return [memory[Buf.RECV] for memory in memories]


def scene(seed: int, size: int, loosen: int = 12) -> Scene | None:
    """A random set of plans that the checker accepts, with deps left out as far as it does; None where it does not."""
    rng = random.Random(seed)
    author = _Author(rng, size, rng.randint(1, 4), rng.randrange(3))
    for _ in range(rng.randint(2, 5 * size)):
        author.event()
    for rank, unread in enumerate(author.unread):  # whatever lies in scratch is used in the end
        for _, unit in sorted(cell for cell in unread if cell[0] is Buf.SCRATCH):
            mine = Span(Buf.RECV, unit % author.units)
            author.add(rank, Step(Op.REDUCE, rng.randrange(5), Span(Buf.SCRATCH, unit), mine))
    credits = rng.choice((0, 0, 0, 1))
    staged = author.copies > 0 and rng.random() < 0.7
    plans = [
        Plan(
            Collective.ALLREDUCE, f"random {seed}", size, rank, author.units, author.units, tuple(steps),
            scratch_copies=author.copies, credits=credits, staged=staged,
        )
        for rank, steps in enumerate(author.steps)
    ]  # fmt: skip
    if not proved(plans):
        return None
    deps = [(r, i, d) for r, plan in enumerate(plans) for i, step in enumerate(plan.steps) for d in step.deps]
    for rank, i, dep in rng.sample(deps, min(loosen, len(deps))):
        step = plans[rank].steps[i]
        looser = replace(step, deps=tuple(d for d in step.deps if d != dep))
        changed = replace(plans[rank], steps=(*plans[rank].steps[:i], looser, *plans[rank].steps[i + 1 :]))
        attempt = [*plans[:rank], changed, *plans[rank + 1 :]]
        if proved(attempt):
            plans = attempt
    return Scene(plans, author.order)


# What follows runs on ranks.


def shape(comm: hetcoll.Communicator, plan: Plan, count: int) -> _native.Shape:
    """The engine's form of a plan that is in no table."""
    wiring = comm._wiring

    def bind(check: object) -> _native.Shape:
        wiring.ensure(sorted(plan.edges), SECONDS, check)  # type: ignore[arg-type]
        found = wiring.engine.bind(
            plan=wiring.engine.add_plan(plan.encode()), dtype=DType.INT64, op=ReduceOp.SUM, send_count=count,
            recv_count=count, send_table=(), recv_table=(), descriptor=descriptor(f"{plan.algorithm} {count}"),
            p2p=False,
        )  # fmt: skip
        comm._planner.note(found.id, plan.algorithm, 0)
        return found

    return comm._host.prepare(bind, SECONDS)


KINDS = ("ordinary", "of Communicator.empty", "registered")  # of memory


def play(
    comm: hetcoll.Communicator, bound: _native.Shape, mine: Array, inplace: bool, *, kind: str = "ordinary"
) -> Array:
    """One call with memory of one of `KINDS`; what is in the output then. An input that is another memory stays as it
    was."""

    def make(filled: Array | int) -> Array:
        array = comm.empty(len(mine), "int64") if kind == "of Communicator.empty" else np.empty_like(mine)
        if kind == "registered":
            leases.enter_context(comm.register(array))
        array[:] = filled
        return array

    with contextlib.ExitStack() as leases:
        send = make(mine)
        recv = send if inplace else make(UNWRITTEN)
        comm._host._run(bound, send.ctypes.data, recv.ctypes.data, False, SECONDS, None)
    if not inplace:
        np.testing.assert_array_equal(send, mine)
    return recv


def mixed(size: int, turn: int) -> list[bool]:
    """In whose place is what is summed: nobody's, everybody's, every second rank's."""
    return [(False, True, rank % 2 == 0)[turn % 3] for rank in range(size)]


def play_all(comm: hetcoll.Communicator, played: Scene, counts: tuple[int, ...], rounds: int = 1) -> None:
    """Calls of so many elements in place and not, in all kinds of memory, while someone is late; held to NumPy."""
    for count in counts:
        bound = shape(comm, played.plans[comm.rank], count)
        for turn in range(3 * rounds):
            given, inplace = inputs(comm.size, count, turn), mixed(comm.size, turn)
            if comm.rank == turn % comm.size:
                time.sleep(0.002)
            kind = KINDS[(turn + comm.rank) % len(KINDS)]
            got = play(comm, bound, given[comm.rank], inplace[comm.rank], kind=kind)
            wanted = played.expected(given, inplace)[comm.rank]
            np.testing.assert_array_equal(got, wanted, f"{count} elements, in place {inplace}, memory {kind}")


def inputs(size: int, count: int, turn: int) -> list[Array]:
    return [np.random.default_rng((turn, rank)).integers(-(1 << 40), 1 << 40, count) for rank in range(size)]
