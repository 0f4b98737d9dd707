"""What steps do to memory: races between them, and the values that they leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...types import FROM_ROOT, TO_ROOT, Collective
from ..ir import Buf, Op, Plan, Span, Step
from ..symmetry import Symmetry
from .grid import Grid
from .local import flows, reads, writes
from .node import Node, wrong
from .progress import waits
from .values import PRIME, Value, add, divide, in_rank_order, input_of, inputs, mixed, moved, rounded, sum_of

SAME = (Collective.ALLREDUCE, Collective.REDUCE, Collective.ALLTOALL)  # in place, unit u of SEND is unit u of RECV


class Memory:
    """One rank's cells (see `grid`), with a number each: in place, those of SEND and RECV share theirs."""

    def __init__(self, plan: Plan, inplace: bool, grid: Grid) -> None:
        self.grid = grid
        self.cells: dict[Buf, range] = {}
        size = 0
        for buf in Buf:
            self.cells[buf] = range(size, size + grid.cells(buf))
            size += grid.cells(buf)
        self.scratch = grid.cells(Buf.SEND) + grid.cells(Buf.RECV)  # its first cell
        send, recv, kind, root = self.cells[Buf.SEND], self.cells[Buf.RECV], plan.collective, plan.rank == plan.root
        mine = grid.mine
        if kind is Collective.BROADCAST or (inplace and kind in SAME):
            self.cells[Buf.RECV] = send
        elif inplace and (kind is Collective.ALLGATHER or (kind is Collective.GATHER and root)):
            self.cells[Buf.SEND] = recv[mine]
        elif inplace and (kind is Collective.REDUCE_SCATTER or (kind is Collective.SCATTER and root)):
            self.cells[Buf.RECV] = send[mine]
        self.values: list[Value | None] = [None] * size
        self.rounded: list[range | None] = [None] * size  # the cells that were rounded together with this one
        self.writer: list[Access | None] = [None] * size
        self.readers: list[list[Access] | None] = [None] * size  # most of millions of cells are never read

    def where(self, span: Span) -> range:
        begin, end = self.grid.where(span)
        return self.cells[span.buf][begin:end]


@dataclass(frozen=True, slots=True)
class Access:
    node: Node
    cells: range

    def precedes(self, node: Node, cells: range) -> bool:
        """Whether this is over, element by element at least, when `node` touches `cells`."""
        bit = 1 << self.node.id
        return bool(node.full & bit) or (self.cells == cells and bool(node.paced & bit))


def _accesses(memory: Memory, step: Step) -> tuple[list[range], list[range]]:
    """The cells that a step reads and those that it writes, span by span. A copy onto itself writes nothing."""
    read = [memory.where(span) for span in reads(step)]
    written = [memory.where(span) for span in writes(step)]
    if step.op is Op.COPY or (step.local is not None and step.local.kind in (Collective.ALLGATHER, Collective.GATHER)):
        written = [cells for cells in written if cells not in read]
    return read, written


def check_races(plan: Plan, memory: Memory, node: Node, times: int = 1) -> None:
    """Every earlier access to what this step touches must be ordered before it, unless both only read.

    `times`: of how many ranks one stands for all (`Symmetry`).
    """
    read, written = _accesses(memory, node.step)
    if len({cell for cells in written for cell in cells}) < sum(map(len, written)):
        raise wrong(plan, node.index, "writes something twice")
    for cells in read:
        if any(cells != target and not set(cells).isdisjoint(target) for target in written):
            raise wrong(plan, node.index, "src and dst overlap, but are not the same")
        access = Access(node, cells)
        for cell in cells:
            last = memory.writer[cell]
            if last is not None and not last.precedes(node, cells):
                raise wrong(plan, node.index, f"reads while step {last.node} may write")
            if last is not None:
                _check_place(plan, memory, cell, last.node, node)
            if (readers := memory.readers[cell]) is None:
                memory.readers[cell] = [access]
            else:
                readers.append(access)
    for cells in written:
        writing = Access(node, cells)
        for cell in cells:
            last, readers = memory.writer[cell], memory.readers[cell] or []
            for access in readers if last is None else [last, *readers]:
                if access.node is not node and not access.precedes(node, cells):
                    why = _LENT if access.node.step.lends and _handed_over(access.node, node, times) else ""
                    raise wrong(plan, node.index, f"writes while step {access.node} may use it{why}")
                _check_place(plan, memory, cell, access.node, node)
            if last is not None and not readers:
                raise wrong(plan, last.node.index, f"overwritten by step {node} before any use")
            memory.writer[cell], memory.readers[cell] = writing, None


_LENT = (
    ": what was sent may still be read where it lies, or hold a sum that is lent on, and neither the sends behind it"
    " nor what answers them wait for that; `after` that step would"
)


def _handed_over(send: Node, node: Node, times: int) -> bool:
    """Whether a send was handed over before another node of its rank began, though it may not have ended."""
    todo, seen = [(node, 0)], set[tuple[int, int]]()
    while todo:
        later, strides = todo.pop()
        for earlier, away in waits(later):
            there = (strides + away) % times
            if earlier is send and there == 0:
                return True
            if (earlier.id, there) not in seen:
                seen.add((earlier.id, there))
                todo.append((earlier, there))
    return False


def _check_place(plan: Plan, memory: Memory, cell: int, first: Node, second: Node) -> None:
    """Which sums are given away is found out in the order of the plan (``Neighbours`` in ``native/plan/passes.cc``):
    steps that touch a place in scratch, and do not both read it, must have there the order in which they happen."""
    if plan.staged and first.index > second.index and cell >= memory.scratch:
        why = "where a plan is staged, what uses scratch must stand in the plan in the order in which it happens"
        raise wrong(plan, second.index, f"uses scratch after step {first}, which stands behind it in the plan: {why}")


def check_values(
    plans: Sequence[Plan], order: list[Node], memories: list[Memory], symmetry: Symmetry, averaged: bool
) -> None:
    """Run all steps on numbers, and look at the results of all ranks."""
    kind = plans[0].collective
    for plan, memory in zip(plans, memories, strict=True):
        if kind not in FROM_ROOT or plan.rank == plan.root:
            for unit, cell in zip(memory.grid.points[Buf.SEND], memory.cells[Buf.SEND], strict=False):
                memory.values[cell] = inputs(plan, symmetry, unit)
    messages: dict[int, list[Value]] = {}
    results = _Results(plans, symmetry, averaged)
    for node in order:
        if not node.group:
            _execute(plans[node.rank], memories[node.rank], node, messages, symmetry)
        elif node is node.group[0]:
            _execute_local(plans, memories, node.group)
    for plan, memory in zip(plans, memories, strict=True):
        for cell in memory.cells[Buf.SCRATCH]:
            last = memory.writer[cell]
            if last is not None and not memory.readers[cell]:
                raise wrong(plan, last.node.index, "nobody uses the result")
        if plan.rank == plan.root or kind not in TO_ROOT:
            results.check(plan, memory)


def _read(plan: Plan, memory: Memory, node: Node, span: Span | None) -> list[Value]:
    assert span is not None
    values = [memory.values[cell] for cell in memory.where(span)]
    if None in values:
        raise wrong(plan, node.index, f"reads {span}, which holds nothing yet")
    return [value for value in values if value is not None]


def _execute_local(plans: Sequence[Plan], memories: list[Memory], group: tuple[Node, ...]) -> None:
    """All members at once. Who adds what in which order only the library knows: the second number says so."""
    results: list[tuple[list[Value], Memory, Span]] = []
    given: dict[tuple[int, int], list[Value]] = {}  # what goes to many as it is, by whose and which span it is
    for flow in flows(group):
        if flow.target is None:
            continue
        node, span = flow.terms[0]
        total = given.get((node.id, id(span)))
        if total is None:
            total = _read(plans[node.rank], memories[node.rank], node, span)
            if len(flow.terms) == 1:
                given[node.id, id(span)] = total
        for node, span in flow.terms[1:]:
            term = _read(plans[node.rank], memories[node.rank], node, span)
            total = [add(a, b) for a, b in zip(total, term, strict=True)]
        if len(flow.terms) > 1:
            total = [(a, mixed(b + group[0].id)) for a, b in total]
        if len(flow.terms) > 1 or flow.terms[0] != (flow.to, flow.target):  # else it lies there already
            results.append((total, memories[flow.to.rank], flow.target))
    for total, memory, target in results:
        for cell, value in zip(memory.where(target), total, strict=True):
            memory.values[cell], memory.rounded[cell] = value, None


def _execute(plan: Plan, memory: Memory, node: Node, messages: dict[int, list[Value]], symmetry: Symmetry) -> None:
    def read(span: Span | None) -> list[Value]:
        return _read(plan, memory, node, span)

    step = node.step
    result: list[Value] = []
    match step.op:
        case Op.SEND:
            messages[node.id] = read(step.src)
            assert step.src is not None
            together = memory.where(step.src)
            if step.compressed and any(memory.rounded[cell] != together for cell in together):
                raise wrong(plan, node.index, f"compresses {step.src}, which no step has rounded as a whole")
            return
        case Op.ROUND:
            result = [rounded(a) for a in read(step.src)]
        case Op.COPY:
            result = read(step.src)
        case Op.REDUCE:
            result = [add(a, b) for a, b in zip(read(step.dst), read(step.src), strict=True)]
        case Op.SCALE:
            result = [divide(a, plan.size) for a in read(step.dst)]
        case Op.RECV | Op.RECV_REDUCE:
            assert node.other is not None
            result = moved(messages.pop(node.other.id), symmetry, node.away)
            if step.op is Op.RECV_REDUCE:
                result = [add(a, b) for a, b in zip(read(step.src), result, strict=True)]
    assert step.dst is not None
    written = memory.where(step.dst)
    for cell, value in zip(written, result, strict=True):
        memory.values[cell] = value
        memory.rounded[cell] = written if step.op is Op.ROUND or (step.op is Op.RECV and step.compressed) else None


class _Results:
    """What ranks are to hold in the end. Keeps the sums of inputs that several should hold, and the numbers that know
    the order of additions of what all should hold the same bits of."""

    def __init__(self, plans: Sequence[Plan], symmetry: Symmetry, averaged: bool) -> None:
        self._plans, self._symmetry, self._averaged = plans, symmetry, averaged
        self._divisor = pow(plans[0].size, -1, PRIME) if averaged else 1
        self._bits: dict[int, int] = {}
        self._totals: dict[tuple[int, int, int], int] = {}

    def check(self, plan: Plan, memory: Memory) -> None:
        """The results of a rank, and of those it stands for."""
        p2p = _p2p_inputs(self._plans, plan.rank) if plan.collective is Collective.P2P else None
        ranks = self._symmetry.orbit(plan.rank)
        for point, cell in zip(memory.grid.points[Buf.RECV], memory.cells[Buf.RECV], strict=False):
            value = memory.values[cell]
            units = [point] if len(ranks) == 1 else self._symmetry.units(Buf.RECV, point)
            if self._whole_orbit(plan, value, units):
                continue
            for rank, unit, got in zip(ranks, units, _each(value, len(ranks)), strict=True):
                if p2p is None:
                    terms, source = _sources(plan, rank, unit)
                    total = self._total(terms, source)
                else:
                    total = sum(input_of(giver, hash(given)) for giver, given in p2p[unit]) % PRIME
                if got is None or got[0] != total:
                    sources = [(term, source) for term in terms[:8]] if p2p is None else p2p[unit]
                    names = " + ".join(f"rank {r}'s unit {u}" for r, u in sources)
                    names += " averaged" if self._averaged else ""
                    problem = "holds nothing" if got is None else "holds something else"
                    raise wrong(_of(plan, rank), None, f"wanted recv[{unit}] to be {names}; it {problem} in the end")
                if plan.collective is Collective.ALLREDUCE and got[1] != self._bits.setdefault(unit, got[1]):
                    raise wrong(_of(plan, rank), None, f"recv[{unit}] was added up in another order than on rank 0")
                if plan.ordered and got != in_rank_order(terms, source, plan.size if self._averaged else 1):
                    problem = f"recv[{unit}] was not added up in the order of ranks, as the plan says"
                    raise wrong(_of(plan, rank), None, problem)

    def _total(self, ranks: range, unit: int) -> int:
        """The sum of a unit of one rank or of all, or its average."""
        key = (ranks.start, len(ranks), unit)
        if key not in self._totals:  # of an all-gather each rank asks for all of them
            total: int = input_of(ranks.start, hash(unit)) if len(ranks) == 1 else sum_of(len(ranks), unit)
            self._totals[key] = total * self._divisor % PRIME
        return self._totals[key]

    def _whole_orbit(self, plan: Plan, value: Value | None, units: list[int]) -> bool:
        """Whether what a rank has of an all-reduce, and all those it stands for, is right; of others it is not asked.
        These may be millions."""
        if value is None or plan.collective is not Collective.ALLREDUCE or plan.ordered or len(units) == 1:
            return False
        sums: list[int] = value[0].tolist()
        bits: list[int] = value[1].tolist()
        wanted = [sum_of(plan.size, unit) * self._divisor % PRIME for unit in units]
        return sums == wanted and bits == list(map(self._bits.setdefault, units, bits))


def _each(value: Value | None, ranks: int) -> Iterable[Value | None]:
    """What a rank has, and what each of those has that it stands for."""
    if value is None:
        return [None] * ranks
    return [value] if ranks == 1 else zip(value[0].tolist(), value[1].tolist(), strict=True)


def _of(plan: Plan, rank: int) -> Plan:
    """For messages: the plan of another rank."""
    return plan if rank == plan.rank else replace(plan, rank=rank)


def _sources(plan: Plan, rank: int, unit: int) -> tuple[range, int]:
    """The ranks the sum of whose unit belongs into a rank's RECV unit, and which unit that is."""
    if plan.collective in (Collective.ALLREDUCE, Collective.REDUCE):
        return range(plan.size), unit
    share, piece = divmod(unit, plan.pieces)
    mine = rank * plan.pieces + piece
    giver, root = range(share, share + 1), range(plan.root, plan.root + 1)
    match plan.collective:
        case Collective.REDUCE_SCATTER:
            return range(plan.size), mine
        case Collective.ALLGATHER | Collective.GATHER:
            return giver, piece
        case Collective.ALLTOALL:
            return giver, mine
        case Collective.SCATTER:
            return root, mine
        case _:
            return root, unit


def _p2p_inputs(plans: Sequence[Plan], rank: int) -> list[list[tuple[int, int]]]:
    """For each RECV unit the SEND unit that it should get: those between one pair match in the order of units."""

    def units(span: Span) -> range:
        return range(span.start, span.start + span.count)

    given: dict[int, list[int]] = {}
    for peer, plan in enumerate(plans):
        to_me = [s.src for s in plan.steps if s.src and (s.peer if s.op is Op.SEND else plan.rank) == rank]
        given[peer] = sorted({u for span in to_me for u in units(span)}, reverse=True)
    steps = plans[rank].steps
    from_whom = {u: s.peer if s.peer >= 0 else rank for s in steps if s.dst for u in units(s.dst)}
    wanted = []
    for unit in range(plans[rank].recv_units):
        peer = from_whom.get(unit, rank)
        wanted.append([(peer, given[peer].pop())] if given[peer] else [])
    return wanted


def check_barrier(plans: Sequence[Plan], nodes: list[list[Node]], heard: list[int], symmetry: Symmetry) -> None:
    """Nobody leaves before everyone has come: each rank's steps come after some step of every other. `heard` has the
    nodes before those of each rank."""
    each = sum(map(len, nodes))
    own = [sum(1 << node.id for node in row) for row in nodes]
    for plan in plans:
        for rank in range(plan.size):
            home, strides = symmetry.home(rank)
            if rank != plan.rank and not heard[plan.rank] >> strides * each & own[home]:
                raise wrong(plan, None, f"leaves without having heard of rank {rank}")
