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

Kernels that carry small messages (`gpu.plans`) are as LOCAL steps: each meets those of its own level on other ranks,
and no other step of its rank that meets any has that level. What they send may wait until a ring is empty, so for
kernels of lower levels.

Ranks that fare alike have the same levels, so a rank need not draw the plans of all (`drawn_by`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from ..errors import ArgumentError
from .costs import Hosts
from .ir import Op, Plan
from .simulator import RECEIVES
from .simulator.node import wrong
from .symmetry import Symmetry, everyone

Fifo = tuple[int, int, int]
SEND, LOCAL = Op.SEND, Op.LOCAL  # members of an enum are slow to look up


def drawn_by(rank: int, islands: Hosts, *, turns: bool, rooted: bool) -> Symmetry:
    """The ranks whose plans are enough for `rank` to order its steps.

    Islands whose sizes have a common divisor fare as so many smaller ones side by side: members exchange messages with
    those of the same part alone, and those of other parts do the same. `turns`: so do islands of equal size, round the
    ring. `rooted`: one member of one island fares otherwise than its mates, so all are drawn.
    """
    if rooted:
        return everyone(sum(map(len, islands)))
    parts = gcd(*map(len, islands))
    place, k = next((island.index(rank), len(island)) for island in islands if rank in island)
    part = place * parts // k
    ranks = [r for i in islands for r in i[part * len(i) // parts : (part + 1) * len(i) // parts]]
    if turns and len(ranks) == len(islands):
        at = ranks.index(rank)
        return Symmetry(((*ranks[at:], *ranks[:at]),))
    return Symmetry(tuple((r,) for r in sorted(ranks)))


def enqueue_order(plans: Sequence[Plan], credits: int, symmetry: Symmetry | None = None) -> tuple[tuple[int, ...], ...]:
    """For each rank, its steps in the order in which to enqueue them: by how many others they wait for in a chain, as
    if each took as long as any other; of equals, sends come first. That interleaves the lanes the way they will run.

    Parameters and errors are those of `levels`.
    """
    orders = []
    for plan, row in zip(plans, levels(plans, credits, symmetry=symmetry), strict=True):
        keys = [(row[i], step.op, step.lane, i) for i, step in enumerate(plan.steps)]
        orders.append(tuple(key[-1] for key in sorted(keys)))
    return tuple(orders)


def levels(
    plans: Sequence[Plan], credits: int, lag: int = 1, symmetry: Symmetry | None = None
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
    symmetry
        Whose standing ranks the plans are of, where these are not all.

    Raises
    ------
    ArgumentError
        There are no slots.
    PlanError
        The plans cannot complete with this many slots.
    """
    if credits < 1:
        raise ArgumentError(f"credits: wanted at least one slot, got {credits}")
    numbers, before = _waits(plans, credits, symmetry or everyone(len(plans)))
    after: list[list[tuple[int, bool]]] = [[] for _ in before]
    for number, waits in enumerate(before):
        for earlier, far in waits:
            after[earlier].append((number, far))
    missing, level = list(map(len, before)), [0] * len(before)
    ready = [number for number, count in enumerate(missing) if not count]
    for number in ready:  # grows as steps become ready
        for later, far in after[number]:
            level[later] = max(level[later], level[number] + (lag if far else 1))
            missing[later] -= 1
            if missing[later] == 0:
                ready.append(later)
    if len(ready) < len(before):
        plan, i = next(
            (plan, i) for plan, row in zip(plans, numbers, strict=True) for i in range(len(row)) if missing[row[i]]
        )
        raise wrong(plan, i, f"deadlock with {credits} slots of one message each")
    return tuple(tuple(level[number] for number in row) for row in numbers)


def _waits(
    plans: Sequence[Plan], credits: int, symmetry: Symmetry
) -> tuple[list[list[int]], list[list[tuple[int, bool]]]]:
    """For each rank a number for each of its steps, the same one for a LOCAL step on all members of an island; and for
    each number what it waits for: its lane, its deps, its message, the slot it needs; and whether another rank does
    that for it."""
    numbers: list[list[int]] = []
    before: list[list[tuple[int, bool]]] = []
    sends: dict[Fifo, list[int]] = {}
    recvs: dict[Fifo, list[int]] = {}
    gates: dict[tuple[int, int], int] = {}
    for plan in plans:
        heads: dict[int, int] = {}
        row: list[int] = []
        island, locals = plan.island[0], 0
        for step in plan.steps:
            number = len(before)
            if step.op is LOCAL:
                number = gates.setdefault((island, locals), number)
                locals += 1
            if number == len(before):
                before.append([])
            before[number] += ((row[d], False) for d in step.deps)
            if step.lane in heads:
                before[number].append((heads[step.lane], False))
            heads[step.lane] = number
            row.append(number)
            if step.op is SEND:
                sends.setdefault((*symmetry.fifo(plan.rank, step.peer), step.channel), []).append(number)
            elif step.op in RECEIVES:
                recvs.setdefault((step.peer, plan.rank, step.channel), []).append(number)
        numbers.append(row)
    for fifo, sent in sends.items():
        for k, (send, recv) in enumerate(zip(sent, recvs[fifo], strict=True)):
            before[recv].append((send, True))
            if k >= credits:
                before[send].append((recvs[fifo][k - credits], True))
    return numbers, before
