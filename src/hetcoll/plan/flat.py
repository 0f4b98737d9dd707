"""When the steps of plans start, of one rank for each island: `order` says what for.

A message is one node of a graph here: its receive starts `LAG` after its send. Edges say what starts after what. Those
of weights above 0 give an order of the nodes, or else ranks wait for each other. Where a rank sends before it receives,
and so overwrites what it sent, edges of other weights may lead back: nodes are raised until these are satisfied, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..types import WHOLE
from .algorithms.base import Likeness, Rounds
from .ir import Op, Plan, columns_of
from .pieces import SLOTS
from .pipeline import share_units
from .simulator.node import wrong
from .steps import Columns, Ints

LAG = SLOTS
"""Levels from what a rank does for another one to what that does then."""
PACE = 2
"""Levels from one message of a lane to the next."""
_NOTHING = np.zeros(0, np.int64)
_SEND, _RECV, _RECV_REDUCE = Op.SEND, Op.RECV, Op.RECV_REDUCE  # members are slow to look up


class Numbers(NamedTuple):
    """Of how many messages a step of a flat plan consists, for each share that it touches: `pieces`, for each of
    `atoms`, cut into `parts`."""

    pieces: int
    atoms: int
    parts: int

    @property
    def each(self) -> int:
        """Of one piece."""
        return self.atoms * self.parts


class Flat:
    """The plans of one rank for each island, and what each step waits for. Of those that wait for nothing before any of
    their messages some may be left out; of those that turn or swap (`Likeness`), all but one are, and where `rounds`
    say when messages go.

    Raises
    ------
    PlanError
        Not all messages are received.
    """

    def __init__(
        self, plans: Sequence[Plan], *, likeness: Likeness | None = None, rounds: Rounds | None = None
    ) -> None:
        columns = _joined(plans)
        self.plans = plans
        self._begins = np.cumsum([0, *(len(plan.steps) for plan in plans)])
        self._plan = np.repeat(np.arange(len(plans)), np.diff(self._begins))  # whose each step is
        self._op, self._lane, self._peer, self._channel, _ = columns.fields
        self._src, self._dst = columns.src, columns.dst
        self._units = np.where(self._src[0] < 0, self._dst[2], self._src[2])
        self.longest = min(share_units(plans[0]), int(self._units[self._peer >= 0].max(initial=1)))
        self._touched = self._shares()
        steps, lanes = np.arange(len(self._plan)), np.lexsort((self._lane, self._plan))
        same = (np.diff(self._lane[lanes]) == 0) & (np.diff(self._plan[lanes]) == 0)
        self._lanes = np.stack([lanes[:-1][same], lanes[1:][same]])
        waits = np.repeat(steps, np.diff(columns.ends))
        self._deps = np.stack([columns.deps + self._begins[self._plan[waits]], waits])
        self._rounds = rounds
        sent, received = self._messages(likeness) if rounds is None else (_NOTHING, _NOTHING)
        self._node, self._after = steps.copy(), np.where(receives(self._op), LAG, 0)  # a message is one node
        self._node[received] = sent

    def _shares(self) -> Ints:
        """How many shares each step touches."""
        share, found = share_units(self.plans[0]), np.ones(len(self._plan), np.int64)
        if self.plans[0].collective not in WHOLE:
            for buf, start, count in (self._src, self._dst):
                touched = np.where(buf >= 0, (start + count - 1) // share - start // share + 1, 1)
                found = np.maximum(found, touched.astype(np.int64))
        return found

    def _messages(self, likeness: Likeness | None) -> tuple[Ints, Ints]:
        """The sends whose receives are here, too, and these. One plan that stands for all is sent what it sends: from
        there, or from as far on the other side."""
        size, ranks = self.plans[0].size, np.array([plan.rank for plan in self.plans])
        alone = likeness in (Likeness.TURN, Likeness.SWAP)
        here = np.ones(len(self._op), np.bool_) if alone else np.isin(self._peer, ranks)
        sends, recvs = np.flatnonzero(here & (self._op == _SEND)), np.flatnonzero(here & receives(self._op))
        rank, to, channels = ranks[self._plan], self._peer[sends], 1 + self._channel.max(initial=0)
        source = rank[sends]
        if alone:
            source, to = (2 * source - to) % size if likeness is Likeness.TURN else to, source
        ends = []
        for steps, a, b in ((sends, source, to), (recvs, self._peer[recvs], rank[recvs])):
            fifo = (a * size + b) * channels + self._channel[steps]
            order = np.argsort(fifo, kind="stable")
            ends.append((fifo[order], steps[order]))
        (fifos, sent), (others, received) = ends
        if not np.array_equal(fifos, others):
            raise wrong(self.plans[0], None, "not every message is received: `simulator.check` says which are not")
        return sent, received

    def shares_of(self, plan: int) -> Ints:
        """How many shares each step of a plan touches."""
        found: Ints = self._touched[self._begins[plan] : self._begins[plan + 1]]
        return found

    def starts(self, numbers: Numbers, plan: int) -> Ints:
        """Of the steps of one of the plans.

        Raises
        ------
        PlanError
            There are none, so that ranks might wait for each other.
        """
        edges, weights = self._edges(numbers)
        first = self._first(numbers)
        level: list[int] = first.tolist()
        self._settle(self._sorted(edges, weights), edges, weights, level)
        settled: Ints = np.array(level, np.int64)
        late = np.flatnonzero((self._peer >= 0) & (settled > first))
        if self._rounds is not None and len(late) > 0:
            raise self._wrong(int(late[0]), "goes in a round before what it waits for")
        mine = slice(self._begins[plan], self._begins[plan + 1])
        starts: Ints = settled[self._node[mine]] + self._after[mine]
        return starts

    def _first(self, numbers: Numbers) -> Ints:
        """Before which levels nothing starts: messages in rounds start at these."""
        if self._rounds is None:
            return np.ones(len(self._plan), np.int64)
        lanes, hops = PACE * numbers.pieces * numbers.each, PACE * (LAG + numbers.parts)
        return np.where(self._peer >= 0, 1 + lanes * self._rounds.lanes + hops * self._rounds.hops, 1)

    def _edges(self, numbers: Numbers) -> tuple[Ints, Ints]:
        """Which node starts after which, by how much at least."""
        (a, b), message = self._deps, self._peer >= 0
        behind = (numbers.pieces - 1) * np.maximum(self._touched[a] - self._touched[b], 0) + self._touched[a] - 1
        alike = ~message[a] | (message[b] & (self._units[a] == self._units[b]))  # or the last part is what it waits for
        deps = 1 + PACE * (behind * numbers.each + np.where(alike, 0, numbers.parts - 1))
        lanes = PACE * numbers.pieces * numbers.each * self._touched[self._lanes[0]]
        edges = np.concatenate([self._lanes, self._deps], axis=1)
        weights = np.concatenate([lanes, deps]) + self._after[edges[0]] - self._after[edges[1]]
        return self._node[edges], weights

    def _sorted(self, edges: Ints, weights: Ints) -> list[int]:
        """The nodes, each after those that it starts after."""
        (earlier, later), nodes = edges[:, weights > 0], len(self._plan)
        by, missing = np.argsort(earlier, kind="stable"), np.bincount(later, minlength=nodes).tolist()
        at, laters = np.searchsorted(earlier[by], np.arange(nodes + 1)).tolist(), later[by].tolist()
        ready = deque(node for node, count in enumerate(missing) if not count)
        order = []
        while ready:
            node = ready.popleft()
            order.append(node)
            for other in laters[at[node] : at[node + 1]]:
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        if len(order) < len(missing):
            raise self._deadlock(next(node for node, count in enumerate(missing) if count))
        return order

    def _settle(self, order: list[int], edges: Ints, weights: Ints, level: list[int]) -> None:
        """Raise levels until each edge has its weight. In this order of nodes nothing is left to do after one turn,
        but for edges back, where a rank sends before it receives what it needed no less."""
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        by = np.argsort(place[edges[0]], kind="stable")
        rows = list(zip(*edges[:, by].tolist(), weights[by].tolist(), strict=True))
        back = int((place[edges[0]] >= place[edges[1]]).sum())
        raised: int | None = 0
        for _ in range(back + 2):
            raised = None
            for earlier, later, weight in rows:
                if level[earlier] + weight > level[later]:
                    level[later] = level[earlier] + weight
                    raised = later if place[earlier] >= place[later] else raised
            if raised is None:
                return
        assert raised is not None
        raise self._deadlock(raised)

    def _deadlock(self, node: int) -> Exception:
        return self._wrong(node, f"deadlock with {SLOTS} slots of one message each")

    def _wrong(self, node: int, problem: str) -> Exception:
        plan = int(self._plan[node])
        return wrong(self.plans[plan], node - int(self._begins[plan]), problem)


def _joined(plans: Sequence[Plan]) -> Columns:
    """All their steps, whose deps are numbers of steps of their own plan. Those of small plans, of which there may be
    thousands, become columns at once."""
    parts: list[Columns] = []
    for many, group in groupby(plans, lambda plan: isinstance(plan.steps, Columns)):
        some = [*group]
        parts += [plan.columns for plan in some] if many else [columns_of([*chain(*(plan.steps for plan in some))])]
    return Columns.joined(parts)


def receives(op: Ints) -> NDArray[np.bool_]:
    """Which of these operations take messages."""
    found: NDArray[np.bool_] = (op == _RECV) | (op == _RECV_REDUCE)
    return found
