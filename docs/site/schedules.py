"""Draws the plans of an algorithm as SVG: who sends what to whom, and how far each part of the result is."""

from __future__ import annotations

from dataclasses import dataclass

from hetcoll.errors import ArgumentError
from hetcoll.plan.algorithms import find
from hetcoll.plan.algorithms.hosts import among_hosts
from hetcoll.plan.ir import Buf, Op, Plan, Span
from hetcoll.plan.simulator import RECEIVES, check
from hetcoll.plan.simulator.network import network
from hetcoll.plan.simulator.node import Node
from hetcoll.plan.simulator.progress import run
from hetcoll.types import Collective

CELL, GAP, ROW, HOST, LEFT, TOP = 16, 74, 46, 18, 64, 34
Terms = frozenset[int]  # the ranks whose input is in a sum


@dataclass(frozen=True)
class Message:
    """One message in the round in which it travels; rounds count from 1."""

    round: int
    source: int
    destination: int
    adds: bool


@dataclass(frozen=True)
class Schedule:
    """What plans do, round by round: `states[k][rank][unit]` are the terms of a unit after round k."""

    plans: list[Plan]
    hosts: tuple[tuple[int, ...], ...]
    messages: list[Message]
    states: list[list[list[Terms]]]


def schedule(collective: str, algorithm: str, ranks: str) -> Schedule:
    """The schedule of an algorithm for as many ranks as `ranks` says: "4", or "2+2" for two hosts of two.

    The plans are proved first. A round is as long as one message, and a lane has one message a round.
    """
    counts = [int(word) for word in ranks.split("+")]
    size, ends = sum(counts), [sum(counts[: i + 1]) for i in range(len(counts))]
    hosts = tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True))
    entry = find(Collective[collective.upper()], algorithm)
    if len(hosts) > 1:
        entry = among_hosts(entry, led=False)
    plans = [entry.build(size, rank, hosts=hosts) for rank in range(size)]
    check(plans)
    nodes = network(plans, plans[0].apart)
    slots = 0 if plans[0].apart else max(plan.credits for plan in plans)
    order = run(plans, nodes, slots)
    if any(node.step.op in (Op.LOCAL, Op.ROUND) for node in order):
        raise ArgumentError(f"{collective} by {algorithm}: steps of vendors' libraries and roundings are not drawn")
    rounds = _rounds(order, slots == 0 and plans[0].collective is not Collective.BARRIER)
    messages = [
        Message(rounds[node.id], node.other.rank, node.rank, node.step.op is Op.RECV_REDUCE)
        for node in order
        if node.step.op in RECEIVES and node.other is not None
    ]
    return Schedule(plans, hosts, messages, _states(plans, order, rounds))


def _rounds(order: list[Node], meet: bool) -> dict[int, int]:
    """The round in which each node ends, by its id. Where ends do not `meet`, a send ends a round after it may begin.

    `order` has what comes before a node before it.
    """
    rounds: dict[int, int] = {}

    def earliest(node: Node) -> int:
        return max((rounds[n.id] for n in (node.before, *(d for d, _ in node.deps)) if n is not None), default=0)

    for node in order:
        if node.other is None:
            rounds[node.id] = earliest(node)
        elif meet and node.step.op is Op.SEND:
            rounds[node.id] = rounds[node.other.id] = 1 + max(earliest(node), earliest(node.other))
        elif not meet:
            came = 0 if node.step.op is Op.SEND else rounds[node.other.id]
            rounds[node.id] = max(1 + earliest(node), came)
    return rounds


def _states(plans: list[Plan], order: list[Node], rounds: dict[int, int]) -> list[list[list[Terms]]]:
    """The terms of each unit of each rank's result after each round; before it is written, of its input."""
    memory: dict[tuple[int, Buf, int], Terms] = {}
    sent: dict[int, list[Terms]] = {}

    def get(rank: int, span: Span) -> list[Terms]:
        own = frozenset((rank,)) if span.buf is Buf.SEND else frozenset()
        return [memory.get((rank, span.buf, span.start + i), own) for i in range(span.count)]

    def do(node: Node) -> None:
        step, rank = node.step, node.rank
        terms = [get(rank, step.src)] if step.src is not None else []
        if step.op is Op.SEND:
            sent[node.id] = terms[0]
            return
        if step.dst is None or step.op is Op.SCALE:
            return
        if node.other is not None:
            terms.append(sent[node.other.id])
        if step.op is Op.REDUCE:
            terms.append(get(rank, step.dst))
        for i in range(step.dst.count):
            memory[rank, step.dst.buf, step.dst.start + i] = frozenset().union(*(part[i] for part in terms))

    states = []
    todo = sorted(order, key=lambda node: rounds[node.id])
    for at in range(max(rounds.values(), default=0) + 1):
        while todo and rounds[todo[0].id] == at:
            do(todo.pop(0))
        states.append([[_shown(memory, plan, unit) for unit in range(plan.recv_units)] for plan in plans])
    return states


def _shown(memory: dict[tuple[int, Buf, int], Terms], plan: Plan, unit: int) -> Terms:
    written = memory.get((plan.rank, Buf.RECV, unit))
    same = plan.send_units == plan.recv_units  # before the result is there, the input stands for it
    return written if written is not None else frozenset((plan.rank,)) if same else frozenset()


def draw(collective: str, algorithm: str, ranks: str) -> str:
    """The schedule as a figure in HTML, in the colours of the page."""
    shown = schedule(collective, algorithm, ranks)
    size, rounds = len(shown.plans), len(shown.states) - 1
    block = CELL * max(plan.recv_units for plan in shown.plans)
    host = {rank: i for i, ranks_of in enumerate(shown.hosts) for rank in ranks_of}
    width, height = LEFT + (block + GAP) * rounds + block + 8, TOP + ROW * size + HOST * (len(shown.hosts) - 1)

    def x(column: int) -> int:
        return LEFT + (block + GAP) * column

    def y(rank: int) -> int:
        return TOP + ROW * rank + HOST * host[rank] + CELL // 2

    parts = [
        f'<text class="quiet" x="{x(at) - GAP // 2}" y="14" text-anchor="middle">{at}</text>'
        for at in range(1, rounds + 1)
    ]
    for rank in range(size):
        parts.append(f'<text x="0" y="{y(rank) + 5}">rank {rank}</text>')
        for column, state in enumerate(shown.states):
            for unit, terms in enumerate(state[rank]):
                left, top = x(column) + CELL * unit, y(rank) - CELL // 2
                parts.append(
                    f'<rect x="{left}" y="{top}" width="{CELL}" height="{CELL}" '
                    f'fill-opacity="{len(terms) / size:.2f}"><title>part {unit}: '
                    f"{'inputs of ranks ' + ', '.join(map(str, sorted(terms))) if terms else 'nothing'}</title></rect>"
                )
    for message in sorted(shown.messages, key=lambda m: m.adds):
        kind = "adds" if message.adds else "copies"
        parts.append(
            f'<line class="{kind}" x1="{x(message.round) - GAP + 4}" y1="{y(message.source)}" '
            f'x2="{x(message.round) - 8}" y2="{y(message.destination)}" marker-end="url(#{kind}-tip)"/>'
        )
    where = f"{size} ranks" + (f" of {len(shown.hosts)} hosts" if len(shown.hosts) > 1 else "")
    title = f"{collective} by {algorithm}, {where}: {len(shown.messages)} messages in {rounds} rounds"
    tips = "".join(
        f'<marker id="{kind}-tip" class="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 8 4 0 8z"/></marker>'
        for kind in ("adds", "copies")
    )
    return (
        f'<figure class="schedule"><div><svg viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"<title>{title}</title><defs>{tips}</defs>{''.join(parts)}</svg></div>"
        f"<figcaption>{title}</figcaption></figure>"
    )
