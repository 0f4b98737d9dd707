"""What steps do to memory: races between them, and the values that they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

from ...types import FROM_ROOT, TO_ROOT, Collective
from ..ir import Buf, Op, Plan, Span, Step
from .grid import Grid
from .local import flows, reads, writes
from .node import Node, wrong

PRIME = (1 << 61) - 1
SAME = (Collective.ALLREDUCE, Collective.REDUCE, Collective.ALLTOALL)  # in place, unit u of SEND is unit u of RECV
Value = tuple[int, int]  # the sum, and a number that knows the order of additions


class Memory:
    """One rank's cells (see `grid`), with a number each: in place, those of SEND and RECV share theirs."""

    def __init__(self, plan: Plan, inplace: bool, grid: Grid) -> None:
        self.grid = grid
        self.cells: dict[Buf, list[int]] = {}
        size = 0
        for buf in Buf:
            self.cells[buf] = list(range(size, size + grid.cells(buf)))
            size += grid.cells(buf)
        self.scratch = grid.cells(Buf.SEND) + grid.cells(Buf.RECV)  # its first cell
        send, recv, kind, root = self.cells[Buf.SEND], self.cells[Buf.RECV], plan.collective, plan.rank == plan.root
        mine = grid.mine
        if kind is Collective.BROADCAST or (inplace and kind in SAME):
            recv[:] = send
        elif inplace and (kind is Collective.ALLGATHER or (kind is Collective.GATHER and root)):
            send[:] = recv[mine]
        elif inplace and (kind is Collective.REDUCE_SCATTER or (kind is Collective.SCATTER and root)):
            recv[:] = send[mine]
        self.values: list[Value | None] = [None] * size
        self.rounded: list[tuple[int, ...]] = [()] * size  # the cells that were rounded together with this one
        self.writer: list[Access | None] = [None] * size
        self.readers: list[list[Access]] = [[] for _ in range(size)]

    def where(self, span: Span) -> tuple[int, ...]:
        begin, end = self.grid.where(span)
        return tuple(self.cells[span.buf][begin:end])


@dataclass(frozen=True, slots=True)
class Access:
    node: Node
    cells: tuple[int, ...]

    def precedes(self, node: Node, cells: tuple[int, ...]) -> bool:
        """Whether this is over, element by element at least, when `node` touches `cells`."""
        bit = 1 << self.node.id
        return bool(node.full & bit) or (self.cells == cells and bool(node.paced & bit))


def _accesses(memory: Memory, step: Step) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The cells that a step reads and those that it writes, span by span. A copy onto itself writes nothing."""
    read = [memory.where(span) for span in reads(step)]
    written = [memory.where(span) for span in writes(step)]
    if step.op is Op.COPY or (step.local is not None and step.local.kind in (Collective.ALLGATHER, Collective.GATHER)):
        written = [cells for cells in written if cells not in read]
    return read, written


def check_races(plan: Plan, memory: Memory, node: Node) -> None:
    """Every earlier access to what this step touches must be ordered before it, unless both only read."""
    read, written = _accesses(memory, node.step)
    if len({cell for cells in written for cell in cells}) < sum(map(len, written)):
        raise wrong(plan, node.index, "writes something twice")
    for cells in read:
        if any(cells != target and not set(cells).isdisjoint(target) for target in written):
            raise wrong(plan, node.index, "src and dst overlap, but are not the same")
        for cell in cells:
            last = memory.writer[cell]
            if last is not None and not last.precedes(node, cells):
                raise wrong(plan, node.index, f"reads while step {last.node} may write")
            if last is not None:
                _check_turn(plan, memory, cell, last.node, node)
            memory.readers[cell].append(Access(node, cells))
    for cells in written:
        for cell in cells:
            last, readers = memory.writer[cell], memory.readers[cell]
            for access in readers if last is None else [last, *readers]:
                if access.node is not node and not access.precedes(node, cells):
                    why = _LENT if node.sent >> access.node.id & 1 else ""
                    raise wrong(plan, node.index, f"writes while step {access.node} may use it{why}")
                _check_turn(plan, memory, cell, access.node, node)
            if last is not None and not readers:
                raise wrong(plan, last.node.index, f"overwritten by step {node} before any use")
            memory.writer[cell], memory.readers[cell] = Access(node, cells), []


_LENT = (
    ": what was sent may still be read where it lies, or hold a sum that is lent on, and neither the sends behind it"
    " nor what answers them wait for that; `after` that step would"
)


def _check_turn(plan: Plan, memory: Memory, cell: int, first: Node, second: Node) -> None:
    """Which sums are given away is found out in the order of the plan (``Neighbours`` in ``native/plan/passes.cc``):
    steps that touch a place in scratch, and do not both read it, must have there the order in which they happen."""
    if plan.staged and first.index > second.index and cell >= memory.scratch:
        why = "where a plan is staged, what uses scratch must stand in the plan in the order in which it happens"
        raise wrong(plan, second.index, f"uses scratch after step {first}, which stands behind it in the plan: {why}")


@lru_cache(maxsize=1 << 16)
def _input(rank: int, unit: int) -> Value:
    x = pow(3, 1 + rank + (unit << 20), PRIME)
    return x, x


def _add(a: Value, b: Value) -> Value:
    """Commutative; associative in the first number, not in the second."""
    return (a[0] + b[0]) % PRIME, pow(a[1] * b[1] + 0x9E3779B9 * (a[1] + b[1]), 3, PRIME)


def _divide(a: Value, size: int) -> Value:
    return a[0] * pow(size, -1, PRIME) % PRIME, pow(a[1] + size, 5, PRIME)


def _round(a: Value) -> Value:
    """The same sum to the checker, in other bits."""
    return a[0], pow(a[1] + 0x51ED270B, 7, PRIME)


def check_values(plans: Sequence[Plan], order: list[Node], memories: list[Memory], averaged: bool) -> None:
    kind = plans[0].collective
    if kind is Collective.BARRIER:
        _check_barrier(plans, order)
        return
    for plan, memory in zip(plans, memories, strict=True):
        if kind not in FROM_ROOT or plan.rank == plan.root:
            for unit, cell in zip(memory.grid.points[Buf.SEND], memory.cells[Buf.SEND], strict=False):
                memory.values[cell] = _input(plan.rank, unit)
    messages: dict[int, list[Value]] = {}
    totals: dict[tuple[int, int], int] = {}
    for node in order:
        if not node.group:
            _execute(plans[node.rank], memories[node.rank], node, messages)
        elif node is node.group[0]:
            _execute_local(plans, memories, node.group)
    for plan, memory in zip(plans, memories, strict=True):
        for cell in memory.cells[Buf.SCRATCH]:
            last = memory.writer[cell]
            if last is not None and not memory.readers[cell]:
                raise wrong(plan, last.node.index, "nobody uses the result")
        if plan.rank == plan.root or kind not in TO_ROOT:
            _check_result(plans, plan, memory, memories[0], averaged, totals)


def _read(plan: Plan, memory: Memory, node: Node, span: Span | None) -> list[Value]:
    assert span is not None
    values = [memory.values[cell] for cell in memory.where(span)]
    if None in values:
        raise wrong(plan, node.index, f"reads {span}, which holds nothing yet")
    return [value for value in values if value is not None]


def _execute_local(plans: Sequence[Plan], memories: list[Memory], group: tuple[Node, ...]) -> None:
    """All members at once. Who adds what in which order only the library knows: the second number says so."""
    results: list[tuple[list[Value], Memory, Span]] = []
    for flow in flows(group):
        if flow.target is None:
            continue
        terms = [_read(plans[n.rank], memories[n.rank], n, span) for n, span in flow.terms]
        total = terms[0]
        for term in terms[1:]:
            total = [_add(a, b) for a, b in zip(total, term, strict=True)]
        if len(terms) > 1:
            total = [(a, pow(b + group[0].id, 3, PRIME)) for a, b in total]
        if len(terms) > 1 or flow.terms[0] != (flow.to, flow.target):  # else it lies there already
            results.append((total, memories[flow.to.rank], flow.target))
    for total, memory, target in results:
        for cell, value in zip(memory.where(target), total, strict=True):
            memory.values[cell], memory.rounded[cell] = value, ()


def _execute(plan: Plan, memory: Memory, node: Node, messages: dict[int, list[Value]]) -> None:
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
            result = [_round(a) for a in read(step.src)]
        case Op.COPY:
            result = read(step.src)
        case Op.REDUCE:
            result = [_add(a, b) for a, b in zip(read(step.dst), read(step.src), strict=True)]
        case Op.SCALE:
            result = [_divide(a, plan.size) for a in read(step.dst)]
        case Op.RECV | Op.RECV_REDUCE:
            assert node.other is not None
            result = messages[node.other.id]
            if step.op is Op.RECV_REDUCE:
                result = [_add(a, b) for a, b in zip(read(step.src), result, strict=True)]
    assert step.dst is not None
    written = memory.where(step.dst)
    for cell, value in zip(written, result, strict=True):
        memory.values[cell] = value
        memory.rounded[cell] = written if step.op is Op.ROUND or (step.op is Op.RECV and step.compressed) else ()


def _check_result(
    plans: Sequence[Plan],
    plan: Plan,
    memory: Memory,
    first: Memory,
    averaged: bool,
    totals: dict[tuple[int, int], int],
) -> None:
    """`totals` keeps the sums of inputs that several ranks should hold, by the first of them and their number."""
    wanted = _p2p_inputs(plans, plan.rank) if plan.collective is Collective.P2P else None
    for i, (unit, cell) in enumerate(zip(memory.grid.points[Buf.RECV], memory.cells[Buf.RECV], strict=False)):
        value = memory.values[cell]
        total = 0
        if wanted is None:
            ranks, source = _sources(plan, unit)
            key = source, ranks.start if len(ranks) == 1 else -1
            if key not in totals:
                totals[key] = sum(_input(rank, source)[0] for rank in ranks) % PRIME
            total = totals[key]
            sources = [(rank, source) for rank in ranks[:8]]
        else:
            sources = wanted[unit]
            total = sum(_input(rank, u)[0] for rank, u in sources) % PRIME
        if averaged:
            total = total * pow(plan.size, -1, PRIME) % PRIME
        if value is None or value[0] != total:
            names = " + ".join(f"rank {r}'s unit {u}" for r, u in sources) + (" averaged" if averaged else "")
            problem = "holds nothing" if value is None else "holds something else"
            raise wrong(plan, None, f"wanted recv[{unit}] to be {names}; it {problem} in the end")
        if plan.collective is Collective.ALLREDUCE and value != first.values[first.cells[Buf.RECV][i]]:
            raise wrong(plan, None, f"recv[{unit}] was added up in another order than on rank 0")
        if plan.ordered and value != _in_rank_order(*_sources(plan, unit), plan.size if averaged else 1):
            raise wrong(plan, None, f"recv[{unit}] was not added up in the order of ranks, as the plan says")


def _in_rank_order(ranks: range, unit: int, divisor: int) -> Value:
    """What this unit of these ranks, one after another, comes to, and its average where `divisor` is not 1."""
    total = reduce(_add, (_input(rank, unit) for rank in ranks))
    return total if divisor == 1 else _divide(total, divisor)


def _sources(plan: Plan, unit: int) -> tuple[range, int]:
    """The ranks the sum of whose unit belongs into this rank's RECV unit, and which unit that is."""
    share, piece = divmod(unit, plan.pieces)
    mine = plan.rank * plan.pieces + piece
    everyone, giver, root = range(plan.size), range(share, share + 1), range(plan.root, plan.root + 1)
    match plan.collective:
        case Collective.ALLREDUCE | Collective.REDUCE:
            return everyone, unit
        case Collective.REDUCE_SCATTER:
            return everyone, mine
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


def _check_barrier(plans: Sequence[Plan], order: list[Node]) -> None:
    """Nobody leaves before everyone has come: each rank's steps come after some step of every other."""
    heard = [0] * len(plans)
    own = [0] * len(plans)
    for node in order:
        own[node.rank] |= 1 << node.id
        heard[node.rank] |= node.full | node.paced
    for plan in plans:
        for other in plans:
            if other is not plan and not heard[plan.rank] & own[other.rank]:
                raise wrong(plan, None, f"leaves without having heard of rank {other.rank}")
