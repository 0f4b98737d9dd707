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
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError
from .costs import Hosts
from .ir import Op, Plan, first_mates
from .pieces import Cut
from .pipeline import keeps_steps, pipelined
from .simulator import RECEIVES
from .simulator.node import wrong
from .steps import Ints
from .symmetry import Symmetry, everyone


def drawn_by(rank: int, islands: Hosts, *, turns: bool) -> Symmetry:
    """The ranks whose plans are enough for `rank` to order its steps.

    Islands whose sizes have a common divisor fare as so many smaller ones side by side: members exchange messages with
    those of the same part alone, and those of other parts do the same. `turns`: so do islands of equal size, round the
    ring.
    """
    part, parts = _part(rank, islands), gcd(*map(len, islands))
    ranks = [r for i in islands for r in i[part * len(i) // parts : (part + 1) * len(i) // parts]]
    if turns and len(ranks) == len(islands):
        at = ranks.index(rank)
        return Symmetry(((*ranks[at:], *ranks[:at]),))
    return Symmetry(tuple((r,) for r in sorted(ranks)))


def _part(rank: int, islands: Hosts) -> int:
    island = next(island for island in islands if rank in island)
    return island.index(rank) * gcd(*map(len, islands)) // len(island)


def root_for(rank: int, islands: Hosts, root: int) -> int:
    """With which root those plans are drawn: with one of another part than that of `rank`, where there is one.

    The root has the steps of its mates, which may wait for less, and perhaps some more at the end: it scales. If it
    takes its steps in the order of a mate's, all parts fare alike, its own too.
    """
    parts = gcd(*map(len, islands))
    if parts == 1 or _part(root, islands) != _part(rank, islands):
        return root
    island = next(island for island in islands if root in island)
    return island[(island.index(root) + len(island) // parts) % len(island)]


class Waits:
    """What each step of some plans waits for: its lane, its deps, its message, the slot that it needs.

    Parameters
    ----------
    plans
        Of all ranks, in rank order, proved by `simulator.check`; or of those that stand for all.
    credits
        Slots of each channel and direction. Every message must fit in one (see `pipeline`).
    symmetry
        Whose standing ranks the plans are of, where these are not all.

    Raises
    ------
    ArgumentError
        There are no slots.
    """

    def __init__(self, plans: Sequence[Plan], credits: int, symmetry: Symmetry | None = None) -> None:
        if credits < 1:
            raise ArgumentError(f"credits: wanted at least one slot, got {credits}")
        columns = [plan.columns for plan in plans]
        self._plans, self._credits = plans, credits
        self._op, self._lane, self._peer, self._channel, _ = np.concatenate([each.fields for each in columns], axis=1)
        self._begins = np.cumsum([0, *map(len, columns)])
        self._plan = np.repeat(np.arange(len(plans)), np.diff(self._begins))  # whose each step is
        self._nodes = self._gates()
        steps = np.arange(len(self._plan))
        lanes = np.lexsort((self._lane, self._plan))
        same = (np.diff(self._lane[lanes]) == 0) & (np.diff(self._plan[lanes]) == 0)
        deps = [each.deps + begin for each, begin in zip(columns, self._begins, strict=False)]
        waits = np.repeat(steps, np.concatenate([np.diff(each.ends) for each in columns]))
        near = np.stack([lanes[:-1][same], lanes[1:][same]]), np.stack([np.concatenate(deps), waits])
        far = self._messages(symmetry or everyone(len(plans)))
        earlier, later = self._nodes[np.concatenate([*near, *far], axis=1)]
        order = np.argsort(earlier, kind="stable")
        self.pairs = earlier[order], later[order], order >= sum(each.shape[1] for each in near)
        """Which step comes before which, and whether it is another rank's that does."""
        self._at: list[int] = np.searchsorted(earlier[order], [*steps, len(steps)]).tolist()

    def _gates(self) -> Ints:
        """For each step its own number, but for a LOCAL step that of the first member of the island."""
        nodes, gates = np.arange(len(self._plan)), np.flatnonzero(self._op == Op.LOCAL)
        plan = self._plan[gates]
        island = np.array(first_mates(self._plans))[plan]
        nth = np.arange(len(gates)) - np.searchsorted(plan, plan)
        _, first, gate = np.unique(island * len(nodes) + nth, return_index=True, return_inverse=True)
        nodes[gates] = gates[first][gate]
        return nodes

    def _messages(self, symmetry: Symmetry) -> tuple[Ints, Ints]:
        """What waits for other ranks: receives for their sends, sends for the receives that empty their slots."""
        ranks = np.array([plan.rank for plan in self._plans])[self._plan]
        sends, recvs = np.flatnonzero(self._op == Op.SEND), np.flatnonzero(np.isin(self._op, RECEIVES))
        table, (row, column) = symmetry.table, symmetry.index
        to, strides = row[self._peer[sends]], column[self._peer[sends]]
        source = table[row[ranks[sends]], (column[ranks[sends]] - strides) % symmetry.times]  # as the receiver sees it
        ends = []
        for steps, a, b in ((sends, source, table[to, 0]), (recvs, self._peer[recvs], ranks[recvs])):
            fifo = (a * (table.max() + 1) + b) * (1 + self._channel.max(initial=0)) + self._channel[steps]
            order = np.argsort(fifo, kind="stable")
            ends.append((fifo[order], steps[order]))
        (fifos, sent), (others, received) = ends
        if not np.array_equal(fifos, others):
            raise ArgumentError("wanted plans whose messages are received: `simulator.check` says which are not")
        full = fifos[self._credits :] == fifos[: -self._credits]
        return (
            np.stack([sent, received]),
            np.stack([received[: -self._credits][full], sent[self._credits :][full]]),
        )

    def _levels(self, lag: int) -> Ints:
        level, (_, then, far) = [0] * len(self._plan), self.pairs
        missing: list[int] = np.bincount(then, minlength=len(level)).tolist()
        laters, above = then.tolist(), np.where(far, lag, 1).tolist()
        ready = [node for node, count in enumerate(missing) if not count]
        for node in ready:  # grows as steps become ready
            low = level[node]
            for at in range(self._at[node], self._at[node + 1]):
                later = laters[at]
                if low + above[at] > level[later]:
                    level[later] = low + above[at]
                missing[later] -= 1
                if missing[later] == 0:
                    ready.append(later)
        if len(ready) < len(missing):
            step = next(step for step, node in enumerate(self._nodes.tolist()) if missing[node])
            plan = self._plan[step]
            problem = f"deadlock with {self._credits} slots of one message each"
            raise wrong(self._plans[plan], int(step - self._begins[plan]), problem)
        return np.array(level, np.int64)[self._nodes]

    def levels(self, lag: int = 1) -> tuple[tuple[int, ...], ...]:
        """For each plan, a level for each of its steps, above those of all that it waits for, on whatever rank.

        Parameters
        ----------
        lag
            How far above what other ranks do for it: their messages, the slots that they empty. The members of an
            island have their LOCAL steps on one level.

        Raises
        ------
        PlanError
            The plans cannot complete with this many slots.
        """
        return tuple(tuple(row.tolist()) for row in np.split(self._levels(lag), self._begins[1:-1]))

    def orders(self) -> tuple[tuple[int, ...], ...]:
        """For each plan, its steps in the order in which to enqueue them: by how many others they wait for in a chain,
        as if each took as long as any other; of equals, sends come first. That interleaves the lanes the way they will
        run. Errors are those of `levels`.
        """
        order = np.lexsort((self._lane, self._op, self._levels(1), self._plan))
        rows = np.split(order - self._begins[self._plan], self._begins[1:-1])
        return tuple(tuple(row.tolist()) for row in rows)


class Ordered(NamedTuple):
    """A rank's plan in pieces, the order in which it enqueues its steps, and their levels: see `Waits`."""

    plan: Plan
    order: tuple[int, ...]
    levels: tuple[int, ...]


def ordered(own: Plan, base: Sequence[Plan], symmetry: Symmetry, made: Cut, slots: int, lag: int) -> Ordered:
    """What the rank of the plan `own` does, from those of `drawn_by`, drawn with the root of `root_for`."""
    if keeps_steps(own, made.at, made.most):
        plan, plans = pipelined([own], made.at, made.most)[0], base
    else:
        *plans, plan = pipelined([*base, own], made.at, made.most)
    waits, mine = Waits(plans, slots, symmetry), symmetry.standing.index(own.rank)
    order, levels = waits.orders()[mine], waits.levels(lag)[mine]
    more = range(len(order), len(plan.steps))
    return Ordered(plan, (*order, *more), (*levels, *(max(levels) + 1 + step - more.start for step in more)))
