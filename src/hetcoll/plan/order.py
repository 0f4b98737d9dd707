"""The order in which a rank enqueues the steps of a plan on its device.

A device may run all streams of a process one operation after another, because streams share hardware queues
(CUDA_DEVICE_MAX_CONNECTIONS, GPU_MAX_HW_QUEUES), and a waiting operation blocks whatever shares its queue. So each rank
must enqueue what its peers need before what it waits for from them. Orders that are cut out of one order of the steps
of *all* ranks, in which everything comes after what it waits for, have that property: run one operation after another
on each rank, the global order itself is a way to the end; and since plans are Kahn networks, every other way ends too.
With more queues than one, less waits. `simulator.serialisable` proves an order without relying on this argument.

A graph's nodes run in any order that its edges allow, so a captured plan has edges for it
(``native/gpu/capture.h``). Its steps have `levels`, of which those of what other ranks do for them are lower
by a lag. A step that waits for a message or a slot comes after all that its rank tells its peers at levels that are
lower by the lag, and a LOCAL step after all of that at lower levels. Then nothing gets stuck, on any number of queues.
Suppose something did: take the lowest level, a, at which a step waits for a message or a slot in vain, and the lowest,
b, at which a LOCAL step does. What the first waits for has a level of at most a - lag. Its rank is held up by
something that waits and does not come after it: a LOCAL step of that level or a lower one. So b <= a - lag. What the
LOCAL step at b waits for is one at b on another rank, which is held up by something that waits, too: but a LOCAL step
of a higher level comes after it, as does whatever waits at b + lag or above, and nothing waits at a lower level.

Ranks that fare alike have the same levels, so a rank need not draw the plans of all (`Alike`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import ArgumentError
from .costs import Hosts
from .ir import Op, Plan
from .simulator import RECEIVES
from .simulator.node import wrong

Name = tuple[int, int]  # a rank and its step
Fifo = tuple[int, int, int]


class Alike(NamedTuple):
    """Which ranks stand for all: `ranks`, whose plans are enough to order those of everyone.

    `islands` where these are of equal size and each member deals with those of its place alone: then members fare
    alike, and those of one place stand for all. `turns`: the plans of the islands are those of the first, moved on
    round a ring; then one rank stands for all, and what it gets from an island d before its own is what an island d
    after it gets from it.
    """

    ranks: tuple[int, ...]
    islands: Hosts = ()
    turns: bool = False

    @classmethod
    def of(cls, rank: int, islands: Hosts, *, turns: bool, rooted: bool) -> Alike:
        """As `rank` sees it. `turns`: the algorithm does where islands are of equal size. `rooted`: one member of one
        island fares otherwise than its mates."""
        if rooted or len(set(map(len, islands))) > 1:
            return cls(tuple(range(sum(map(len, islands)))))
        place = next(island.index(rank) for island in islands if rank in island)
        ranks = tuple(sorted(island[place] for island in islands))
        return cls((rank,) if turns else ranks, islands, turns)

    def fifos(self, plan: Plan) -> dict[int, tuple[int, int]]:
        """For each peer of the rank, the two ends that name a FIFO to it, which one from it has the other way."""
        peers = {step.peer for step in plan.steps if step.peer >= 0}
        if not self.turns:
            return {peer: (plan.rank, peer) for peer in peers}
        place = {r: i for i, island in enumerate(self.islands) for r in island if r in peers or r == plan.rank}
        mine, m = place[plan.rank], len(self.islands)
        return {peer: ((place[peer] - mine) % m, (mine - place[peer]) % m) for peer in peers}


def enqueue_order(plans: Sequence[Plan], credits: int, alike: Alike | None = None) -> tuple[tuple[int, ...], ...]:
    """For each rank, its steps in the order in which to enqueue them: by how many others they wait for in a chain, as
    if each took as long as any other; of equals, sends come first. That interleaves the lanes the way they will run.

    Parameters and errors are those of `levels`.
    """
    orders = []
    for plan, row in zip(plans, levels(plans, credits, alike=alike), strict=True):
        keys = [(row[i], step.op, step.lane, i) for i, step in enumerate(plan.steps)]
        orders.append(tuple(key[-1] for key in sorted(keys)))
    return tuple(orders)


def levels(
    plans: Sequence[Plan], credits: int, lag: int = 1, alike: Alike | None = None
) -> tuple[tuple[int, ...], ...]:
    """For each rank, a level for each of its steps, above those of all that it waits for, on whatever rank.

    Parameters
    ----------
    plans
        Of all ranks, in rank order, proved by `simulator.check`; or of those that stand for all.
    credits
        Slots of each channel and direction. Every message must fit in one (see `pipeline`).
    lag
        How far above what other ranks do for it: their messages, the slots that they empty. The members of an island
        have their LOCAL steps on one level.
    alike
        Of which ranks the plans are, where these are not all.

    Raises
    ------
    ArgumentError
        There are no slots.
    PlanError
        The plans cannot complete with this many slots.
    """
    if credits < 1:
        raise ArgumentError(f"credits: wanted at least one slot, got {credits}")
    by_rank = {plan.rank: plan for plan in plans}
    before = _waits(plans, credits, alike or Alike(tuple(by_rank)))
    after: dict[Name, list[tuple[Name, bool]]] = {name: [] for name in before}
    missing = {name: len(waits) for name, waits in before.items()}
    for name, waits in before.items():
        for earlier, far in waits:
            after[earlier].append((name, far))
    level = {name: 0 for name, count in missing.items() if not count}
    ready = list(level)
    for name in ready:  # grows as steps become ready
        for later, far in after[name]:
            level[later] = max(level.get(later, 0), level[name] + (lag if far else 1))
            missing[later] -= 1
            if missing[later] == 0:
                ready.append(later)
    if len(ready) < len(before):
        rank, i = next(name for name in before if missing[name])
        raise wrong(by_rank[rank], i, f"deadlock with {credits} slots of one message each")
    return tuple(tuple(level[plan.rank, i] for i in range(len(plan.steps))) for plan in plans)


def _waits(plans: Sequence[Plan], credits: int, alike: Alike) -> dict[Name, list[tuple[Name, bool]]]:
    """For each step what it waits for: its lane, its deps, its message, the slot it needs, its island; and whether
    another rank does that for it."""
    before: dict[Name, list[tuple[Name, bool]]] = {}
    sends: dict[Fifo, list[Name]] = {}
    recvs: dict[Fifo, list[Name]] = {}
    locals: dict[tuple[int, ...], dict[int, list[Name]]] = {}
    for plan in plans:
        heads: dict[int, int] = {}
        fifos = alike.fifos(plan)
        for i, step in enumerate(plan.steps):
            mine = [*step.deps, *([heads[step.lane]] if step.lane in heads else [])]
            before[plan.rank, i] = [((plan.rank, d), False) for d in mine]
            heads[step.lane] = i
            if step.op is Op.SEND:
                sends.setdefault((*fifos[step.peer], step.channel), []).append((plan.rank, i))
            elif step.op in RECEIVES:
                end, begin = fifos[step.peer]
                recvs.setdefault((begin, end, step.channel), []).append((plan.rank, i))
            elif step.op is Op.LOCAL:
                locals.setdefault(plan.island, {}).setdefault(plan.rank, []).append((plan.rank, i))
    for fifo, sent in sends.items():
        for k, (send, recv) in enumerate(zip(sent, recvs[fifo], strict=True)):
            before[recv].append((send, True))
            if k >= credits:
                before[send].append((recvs[fifo][k - credits], True))
    for rows in locals.values():
        for group in zip(*rows.values(), strict=True):  # members wait for what any of them waits for
            waits = sorted({name for member in group for name, _ in before[member]})
            for member in group:
                before[member] = [(name, False) for name in waits]
    return before
