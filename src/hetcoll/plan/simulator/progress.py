"""Runs a network: to see that it ends, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...types import Collective
from ..ir import Op, Plan
from ..symmetry import Symmetry, everyone
from .node import Node, wrong

SEND, LOCAL = Op.SEND, Op.LOCAL  # members of an enum are slow to look up


def run(plans: Sequence[Plan], nodes: list[list[Node]], slots: int, symmetry: Symmetry | None = None) -> list[Node]:
    """Run all steps with `slots` in each FIFO; the order in which they ended. Raises when they cannot end.

    With slots, every message is cut into more pieces than there are slots: nothing may rely on a message fitting in.
    Without, whole messages meet (finer pieces could only help). A barrier's messages are empty and always fit. With
    `symmetry` the ranks that stand for all run, and the others in step with them: if they end at all they can end so,
    as no step keeps another from being done.
    """
    pieces = 1 if slots == 0 or plans[0].collective is Collective.BARRIER else slots + 2
    lanes: dict[tuple[int, int], list[Node]] = {}
    for row in nodes:
        for node in row:
            lanes.setdefault((node.rank, node.step.lane), []).append(node)
    waiting = [lane[::-1] for lane in lanes.values()]
    awake = _Awake(waiting)
    flying: dict[int, int] = {}
    gathered: dict[int, int] = {}
    order: list[Node] = []
    while any(awake.lanes):
        for number, lane in enumerate(waiting):
            if not awake.lanes[number]:
                continue
            while lane:
                if _home(lane[-1]):
                    lane[-1].done = pieces
                    awake.after(lane[-1])
                if lane[-1].done == pieces:
                    lane.pop()
                    continue
                due = _due(lane)
                if _advance(due, pieces, slots, flying, gathered, order):
                    awake.after(due)
                    continue
                if slots == 0 and due.other is not None and due.step.op is not SEND and _ready(due, pieces):
                    awake.lanes[awake.lane[due.other.id]] = True  # without slots it is the send that moves
                break
            awake.lanes[number] = False
    stuck = [lane[-1] for lane in waiting if lane]
    if stuck:
        whole = symmetry or everyone(len(plans))
        all_stuck = [(whole.move(n.rank, t), n.index, whole.step(n.step, t)) for t in range(whole.times) for n in stuck]
        names = "; ".join(f"rank {rank} step {i} ({step})" for rank, i, step in all_stuck[:8])
        raise wrong(plans[stuck[0].rank], stuck[0].index, f"deadlock with {slots} slots: {names}")
    return order


class _Awake:
    """The lanes, by their numbers, that may have got what they wait for: of thousands nobody asks the others."""

    def __init__(self, waiting: list[list[Node]]) -> None:
        self.lane = {node.id: number for number, lane in enumerate(waiting) for node in lane}
        self.lanes = bytearray([1]) * len(waiting)
        self._laters: dict[int, list[int]] = {}  # of each node, the lanes of those that have it as a dep
        self._lenders: dict[int, list[Node]] = {}  # of each send, those whose memory it may lend on
        for number, lane in enumerate(waiting):
            for node in lane:
                for dep, _ in node.deps:
                    self._laters.setdefault(dep.id, []).append(number)
                if node.onward is not None:
                    self._lenders.setdefault(node.onward.id, []).append(node)

    def after(self, node: Node) -> None:
        """A step has moved."""
        moved = [node]
        while moved:  # what is lent may be lent on by every rank of a chain, of thousands
            node = moved.pop()
            for each in node.group or ((node,) if node.other is None else (node, node.other)):
                self.lanes[self.lane[each.id]] = True
                for number in self._laters.get(each.id, ()):
                    self.lanes[number] = True
            moved += self._lenders.get(node.id, ()) if node.met else ()


def _home(node: Node) -> bool:
    """Whether nobody reads any more what a send has lent."""
    while node.met and node.onward is not None:
        node = node.onward
    return node.met


def _due(lane: list[Node]) -> Node:
    """What a lane does next. Sends do not wait until what those before them have lent is home."""
    first = next((node for node in reversed(lane) if not node.met), lane[-1])
    return first if first.step.op is SEND else lane[-1]


def _advance(
    node: Node, pieces: int, slots: int, flying: dict[int, int], gathered: dict[int, int], order: list[Node]
) -> bool:
    """Move one piece of a step, if its deps and its FIFO allow. A step that ends joins `order`.

    `gathered`: up to which member each LOCAL step was found to be ready. Who is ready stays so, and of a thousand
    members each is asked once, not once for each time that another one is.
    """
    other, step = node.other, node.step
    if not _ready(node, pieces):
        return False
    if step.op is LOCAL:  # the members wait for each other, whether or not the library makes them
        first = node.group[0].id
        there = gathered.get(first, 0)
        while there < len(node.group) and _ready(node.group[there], pieces):
            there += 1
        gathered[first] = there
        if there < len(node.group):
            return False
        for member in node.group:
            member.done = pieces
        order += node.group
        return True
    if other is not None and slots == 0:
        if step.op is not SEND or node.met or not _ready(other, pieces):
            return False
        node.met, other.done = True, pieces
        order += (node, other)
        return True
    if other is not None and step.op is SEND:
        if flying.get(node.fifo, 0) == slots:
            return False
        flying[node.fifo] = flying.get(node.fifo, 0) + 1
    elif other is not None:
        if other.done == node.done:
            return False
        flying[node.fifo] -= 1
    node.done += 1
    if node.done == pieces:
        order.append(node)
    return True


def _ready(node: Node, pieces: int) -> bool:
    before = node.before
    if before is not None and before.done < pieces and not (before.met and node.step.op is SEND):
        return False
    return all(dep.done == pieces or (follow and dep.done > node.done) for dep, follow in node.deps)


def from_here(nodes: int, strides: int) -> int:
    """A bit set of nodes where each rank stands for itself: all see the same."""
    return nodes


def order_node(node: Node, lends: bool, seen: Callable[[int, int], int] = from_here) -> None:
    """What has happened before `node`, from what happened before the steps it waits for.

    A send is handed over first, and ends when what it lent is home. With `lends` a send waits only until the sends
    before it in its lane were handed over (``Task::PostAhead`` and ``Task::MayPost`` in ``native/host/task.cc``). Who
    gets a message knows that it was handed over, and once it was received, that this one is over, unless its memory may
    have been lent on (``Task::FuseSlot``): then the last one who gets it knows. Deps count as over, whole or element by
    element, what a send has ended in its turn (``Task::Limit``, ``Task::MoveSend``): all before it in its lane, too.

    `seen` gives a bit set of nodes as a rank sees it that is so many strides before the one whose set it is.
    """
    before, other = node.before, node.other
    ahead = before if lends and before is not None and node.step.lends and before.step.lends else None
    whole = [] if before is None or ahead is not None else [before]
    for source in node.sources:
        whole += ([] if source.before is None else [source.before]) + [dep for dep, _ in source.deps]
    sender = None if node.step.op is SEND else other
    followed = [dep for dep, follow in node.deps if follow]
    whole += [dep for dep, follow in node.deps if not follow]
    for n in whole:
        node.full = _both(node.full, n.over)
    for n in followed:
        node.full = _both(node.full, _both(n.full, 0 if n.before is None else n.before.over))
        node.paced = _both(node.paced, n.paced | 1 << n.id)
    if ahead is not None:
        node.full |= ahead.full | ahead.paced
    if sender is not None:
        node.full = _both(node.full, seen(sender.full, node.away))
        chain = 0 if sender.onward is not None else _chain(sender, seen)
        node.paced = _both(node.paced, seen(_both(sender.paced, chain), node.away))
    node.over = _both(node.full, node.paced) | 1 << node.id
    if ahead is not None:
        node.over |= ahead.over
    node.hops = max((n.hops + (n is sender) for n, _ in waits(node)), default=0)


def _both(a: int, b: int) -> int:
    """What is in either set. These are large, and Python copies where one is empty."""
    return a | b if a and b else a or b


def _chain(node: Node, seen: Callable[[int, int], int]) -> int:
    """Bit set of a send and of those whose memory it may lend on."""
    bits, strides = 0, 0
    n: Node | None = node
    while n is not None:
        bits |= seen(1 << n.id, strides)
        n = n.lent
        if n is not None and n.other is not None:
            strides += n.other.away
    return bits


def waits(node: Node) -> list[tuple[Node, int]]:
    """What a node waits for, if only until a send was handed over; and how many strides further than it that is."""
    found = [node.before, *(dep for dep, _ in node.deps)]
    for source in node.sources:
        found += [source.before, *(dep for dep, _ in source.deps)]
    sender = [(node.other, node.away)] if node.other is not None and node.step.op is not SEND else []
    return [(n, 0) for n in found if n is not None] + sender
