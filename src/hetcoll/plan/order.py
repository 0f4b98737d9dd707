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
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ArgumentError
from .ir import Op, Plan
from .simulator import RECEIVES
from .simulator.node import wrong


def enqueue_order(plans: Sequence[Plan], credits: int) -> tuple[tuple[int, ...], ...]:
    """For each rank, its steps in the order in which to enqueue them: by how many others they wait for in a chain, as
    if each took as long as any other; of equals, sends come first. That interleaves the lanes the way they will run.

    Parameters and errors are those of `levels`.
    """
    orders = []
    for plan, row in zip(plans, levels(plans, credits), strict=True):
        keys = [(row[i], step.op, step.lane, i) for i, step in enumerate(plan.steps)]
        orders.append(tuple(key[-1] for key in sorted(keys)))
    return tuple(orders)


def levels(plans: Sequence[Plan], credits: int, lag: int = 1) -> tuple[tuple[int, ...], ...]:
    """For each rank, a level for each of its steps, above those of all that it waits for, on whatever rank.

    Parameters
    ----------
    plans
        Of all ranks, in rank order, proved by `simulator.check`.
    credits
        Slots of each channel and direction. Every message must fit in one (see `pipeline`).
    lag
        How far above what other ranks do for it: their messages, the slots that they empty. The members of an island
        have their LOCAL steps on one level.

    Raises
    ------
    ArgumentError
        There are no slots.
    PlanError
        The plans cannot complete with this many slots.
    """
    if credits < 1:
        raise ArgumentError(f"credits: wanted at least one slot, got {credits}")
    names = [(plan.rank, i) for plan in plans for i in range(len(plan.steps))]
    before = _waits(plans, credits)
    after: dict[tuple[int, int], list[tuple[int, int]]] = {name: [] for name in names}
    missing = {name: len(before[name]) for name in names}
    for name in names:
        for earlier in before[name]:
            after[earlier].append(name)
    level = {name: 0 for name in names if not missing[name]}
    ready = list(level)
    for name in ready:  # grows as steps become ready
        for later in after[name]:
            far = later[0] != name[0] and plans[later[0]].steps[later[1]].op is not Op.LOCAL
            level[later] = max(level.get(later, 0), level[name] + (lag if far else 1))
            missing[later] -= 1
            if missing[later] == 0:
                ready.append(later)
    if len(ready) < len(names):
        rank, i = next(name for name in names if missing[name])
        raise wrong(plans[rank], i, f"deadlock with {credits} slots of one message each")
    return tuple(tuple(level[plan.rank, i] for i in range(len(plan.steps))) for plan in plans)


def _waits(plans: Sequence[Plan], credits: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each (rank, step) what it waits for: its lane, its deps, its message, the slot it needs, its island."""
    before: dict[tuple[int, int], list[tuple[int, int]]] = {}
    sends: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    recvs: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    locals: dict[tuple[int, ...], dict[int, list[tuple[int, int]]]] = {}
    for plan in plans:
        heads: dict[int, int] = {}
        for i, step in enumerate(plan.steps):
            mine = [*step.deps, *([heads[step.lane]] if step.lane in heads else [])]
            before[plan.rank, i] = [(plan.rank, d) for d in mine]
            heads[step.lane] = i
            if step.op is Op.SEND:
                sends.setdefault((plan.rank, step.peer, step.channel), []).append((plan.rank, i))
            elif step.op in RECEIVES:
                recvs.setdefault((step.peer, plan.rank, step.channel), []).append((plan.rank, i))
            elif step.op is Op.LOCAL:
                locals.setdefault(plan.island, {}).setdefault(plan.rank, []).append((plan.rank, i))
    for fifo, sent in sends.items():
        for k, (send, recv) in enumerate(zip(sent, recvs[fifo], strict=True)):
            before[recv].append(send)
            if k >= credits:
                before[send].append(recvs[fifo][k - credits])
    for rows in locals.values():
        for group in zip(*rows.values(), strict=True):  # members wait for what any of them waits for
            waits = sorted({name for member in group for name in before[member]})
            for member in group:
                before[member] = waits
    return before
