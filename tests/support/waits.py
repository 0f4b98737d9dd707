"""What each step of all ranks' plans waits for, and an order from that: `hetcoll.plan.order` has to come up to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetcoll.plan.costs import Hosts
from hetcoll.plan.flat import LAG
from hetcoll.plan.ir import Op, Plan
from hetcoll.plan.order import Ordered
from hetcoll.plan.pieces import SLOTS
from hetcoll.plan.simulator import RECEIVES, serialisable
from hetcoll.plan.simulator.node import wrong
from hetcoll.plan.steps import Ints


class Waits:
    """What each step of some plans waits for: its lane, its deps, its message, the slot that it needs.

    Parameters
    ----------
    plans
        Of all ranks, in rank order, proved by `simulator.check`.
    credits
        Slots of each channel and direction. Every message must fit in one (see `pipeline`).

    """

    def __init__(self, plans: Sequence[Plan], credits: int) -> None:
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
        far = self._messages()
        earlier, later = self._nodes[np.concatenate([*near, *far], axis=1)]
        order = np.argsort(earlier, kind="stable")
        self.pairs = earlier[order], later[order], order >= sum(each.shape[1] for each in near)
        """Which step comes before which, and whether it is another rank's that does."""
        self._at: list[int] = np.searchsorted(earlier[order], [*steps, len(steps)]).tolist()

    def _gates(self) -> Ints:
        """For each step its own number, but for a LOCAL step that of the first member of the island."""
        nodes, gates = np.arange(len(self._plan)), np.flatnonzero(self._op == Op.LOCAL)
        plan = self._plan[gates]
        island = np.array([plan.island[0] for plan in self._plans])[plan]
        nth = np.arange(len(gates)) - np.searchsorted(plan, plan)
        _, first, gate = np.unique(island * len(nodes) + nth, return_index=True, return_inverse=True)
        nodes[gates] = gates[first][gate]
        return nodes

    def _messages(self) -> tuple[Ints, Ints]:
        """What waits for other ranks: receives for their sends, sends for the receives that empty their slots."""
        ranks = np.array([plan.rank for plan in self._plans])[self._plan]
        sends, recvs = np.flatnonzero(self._op == Op.SEND), np.flatnonzero(np.isin(self._op, RECEIVES))
        ends = []
        for steps, a, b in ((sends, ranks[sends], self._peer[sends]), (recvs, self._peer[recvs], ranks[recvs])):
            fifo = (a * len(self._plans) + b) * (1 + self._channel.max(initial=0)) + self._channel[steps]
            order = np.argsort(fifo, kind="stable")
            ends.append((fifo[order], steps[order]))
        (fifos, sent), (others, received) = ends
        assert np.array_equal(fifos, others), "`simulator.check` says which messages are not received"
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


def proved(found: list[Ordered], plans: list[Plan], islands: Hosts) -> None:
    """Orders of all ranks in pieces, whose plans are to be these, can be enqueued, and levels keep their distances."""
    assert [each.plan for each in found] == plans
    serialisable(plans, [each.order for each in found], SLOTS)
    earlier, later, far = Waits(plans, SLOTS).pairs
    level, op = np.concatenate([each.levels for each in found]), np.concatenate([p.columns.fields[0] for p in plans])
    beside = (op[earlier] == Op.LOCAL) & (op[later] == Op.LOCAL)  # they keep their lane's order
    assert (level[later] - level[earlier] >= np.where(far, LAG, np.where(beside, 0, 1))).all()
    for island in islands:
        assert len({tuple(found[r].levels[i] for i in plans[r].columns.locals) for r in island}) == 1
