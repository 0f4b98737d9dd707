"""Tasks of GPUs, cut into the pieces that `plan.pieces` cuts plans into: each piece is an operation on a stream.

What is enqueued cannot follow element by element, so here every piece is a task of its own. A message's piece waits for
the one before the last in its lane, as two streams take turns in each direction; for the piece of what it depends on;
and for a slot. Then it takes some time to begin, while the engine that will carry it works for others. A vendor's
collective has longer pieces, of several messages each, on one stream. And nothing begins before the host has enqueued
it: all operations of a rank one after another, in the order of `plan.order`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import hetcoll._native as _native

from ..ir import Step

TURNS = 2  # streams of a lane

Indices = NDArray[np.int64]
Seconds = NDArray[np.float64]


class Cut(Protocol):
    """Where pieces begin and end, in parts; so many of these are a message: `plan.pieces.Cut`."""

    @property
    def at(self) -> tuple[int, ...]: ...
    @property
    def most(self) -> int: ...


class Piecewise(NamedTuple):
    """How the tasks of a set of plans are cut at each size: `longest` has the units of the longest message, `slots`
    how many messages of a FIFO are under way at most; a call begins after `begin` seconds of its host."""

    cut: Callable[[int], Cut]
    longest: int
    slots: int
    begin: float


class Graph(NamedTuple):
    """What `native/plan/timeline.cc` takes but for the number of servers; `first` has the first piece of each task."""

    arrays: tuple[NDArray[Any], ...]
    first: Indices


class Lane:
    """The tasks of a lane in their order, and beside each what has to wait for those before it: itself, or where an
    island's members gather. Collectives of which only the first waits take turns, piece by piece."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[int, int]]] = []
        self.gathers = False

    def add(self, task: int, target: int, *, together: bool) -> None:
        """The next one; `together`: takes turns with the one before, if that is a collective."""
        self.gathers |= target != task
        if together and self.groups and self.groups[-1][-1][0] != self.groups[-1][-1][1]:
            self.groups[-1].append((task, target))
        else:
            self.groups.append([(task, target)])


class Tasks(Protocol):
    """What is to be cut up: `graph.Tasks`."""

    whole: int
    steps: list[tuple[int, Step | None]]
    units: list[int]
    messages: list[bool]
    starts: list[float]
    hosts: list[float]
    begun: dict[int, int]
    uses: list[tuple[int, int, float, float]]
    then: list[tuple[int, int, bool, float]]
    lanes: list[Lane]
    fifos: list[tuple[list[int], list[int]]]


class _Kind(NamedTuple):
    """Tasks that are cut alike: of each operation the piece that it is part of, and its part of the task."""

    piece: Indices
    share: Seconds


def cut_up(tasks: Tasks, how: Piecewise, nbytes: int) -> Graph:
    """All tasks, one for each operation."""
    cut = how.cut(nbytes)
    units = np.where(tasks.messages, np.array(tasks.units, np.int64), 0)
    classes, kind_of = np.unique(units, return_inverse=True)
    kinds = [_kind(cut, int(n), how.longest) for n in classes]
    counts = np.array([len(kind.piece) for kind in kinds])[kind_of]
    first = np.concatenate([[0], np.cumsum(counts)])
    edges = _Edges(first, kind_of, kinds)
    edges.piece_by_piece(tasks.then)
    for lane in tasks.lanes:
        edges.lane(lane)
    for sends, recvs in tasks.fifos:
        edges.fifo(sends, recvs, how.slots)
    share = np.concatenate([kinds[k].share for k in kind_of]) if len(kind_of) else np.zeros(0)
    starts = np.repeat(np.array(tasks.starts), counts)
    edges.enqueued(tasks, np.repeat(np.arange(len(counts)), counts), how.begin)
    source, then, delay = edges.all()
    delay = delay + starts[then]
    uses_at, server, each = _uses(tasks, first, counts, share, nbytes / tasks.whole)
    return Graph(_arrays(int(first[-1]), uses_at, server, each, source, then, delay), first[:-1])


def _arrays(
    total: int,
    uses_at: Indices,
    server: NDArray[np.int32],
    each: Seconds,
    source: Indices,
    then: Indices,
    delay: Seconds,
) -> tuple[NDArray[Any], ...]:
    order = np.argsort(source, kind="stable")
    then_at = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=total))]).astype(np.int64)
    return (
        np.ones(total, np.int32), uses_at, server, each, np.zeros_like(each), then_at, then[order].astype(np.int32),
        np.zeros(len(order), np.uint8), np.ascontiguousarray(delay[order]),
    )  # fmt: skip


def _kind(cut: Cut, units: int, longest: int) -> _Kind:
    """Of messages of so many units; 0: of what is not cut to fit a slot."""
    piece, share = [], []
    for k, (begin, end) in enumerate(zip(cut.at, cut.at[1:], strict=False)):
        messages = max(1, -(-units * (end - begin) // (cut.most * longest)))
        piece += [k] * messages
        share += [(end - begin) / cut.at[-1] / messages] * messages
    return _Kind(np.array(piece, np.int64), np.array(share))


class _Edges:
    """Which operation waits for which."""

    def __init__(self, first: Indices, kind_of: Indices, kinds: Sequence[_Kind]) -> None:
        self._first, self._kind_of, self._kinds = first, kind_of, kinds
        self._found: list[tuple[Indices, Indices, Seconds]] = []

    def all(self) -> tuple[Indices, Indices, Seconds]:
        """Sources, what waits for them, and how much longer."""
        columns = [np.concatenate(column) for column in zip(*self._found, strict=True)]
        return columns[0].astype(np.int64), columns[1].astype(np.int64), columns[2].astype(np.float64)

    def piece_by_piece(self, then: Sequence[tuple[int, int, bool, float]]) -> None:
        """Each operation of a task waits for its own, or for the last one of its piece."""
        rows = np.array([(a, b) for a, b, _, _ in then], np.int64).reshape(-1, 2)
        delays = np.array([delay for *_, delay in then], np.float64)
        pairs = self._kind_of[rows]
        for a, b in np.unique(pairs, axis=0):
            picked = (pairs[:, 0] == a) & (pairs[:, 1] == b)
            before, after = self._kinds[a].piece, self._kinds[b].piece
            one = np.arange(len(after))
            if len(before) != len(after):
                one = np.searchsorted(before, after, side="right") - 1
            source = self._first[rows[picked, 0]][:, None] + one[None, :]
            target = self._first[rows[picked, 1]][:, None] + np.arange(len(after))[None, :]
            self._found.append((source.ravel(), target.ravel(), np.repeat(delays[picked], len(after))))

    def lane(self, lane: Lane) -> None:
        """Operations wait for those before them in their lane."""
        sources, targets = ([self._group([pair[i] for pair in group]) for group in lane.groups] for i in (0, 1))
        self._behind(np.concatenate(sources), np.concatenate(targets), 1 if lane.gathers else TURNS)

    def fifo(self, sends: Sequence[int], recvs: Sequence[int], slots: int) -> None:
        """Sends wait until a slot is empty."""
        before, after = (np.concatenate([self._group([task]) for task in row]) for row in (recvs, sends))
        self._behind(before, after, slots)

    def enqueued(self, tasks: Tasks, task_of: Indices, begin: float) -> None:
        """No operation begins before its rank's host has enqueued it, in the order of what they wait for in a chain,
        as if each took as long as any other; of equals, sends come first."""
        rank = np.array([rank for rank, _ in tasks.steps])[task_of]
        op = np.array([-1 if step is None else int(step.op) for _, step in tasks.steps])[task_of]
        source, then, _ = self.all()
        nothing = np.zeros(len(task_of) + 1, np.int64), np.zeros(0, np.int32), np.zeros(0)
        arrays = _arrays(len(task_of), *nothing, source, then, np.ones(len(source)))
        level = np.frombuffer(_native.run_tasks((*arrays, np.zeros(0)))[0])
        order = np.lexsort((op, level, rank))
        until = np.cumsum(np.array(tasks.hosts)[task_of][order])
        new = np.diff(rank[order], prepend=-1) != 0
        until -= np.maximum.accumulate(np.where(new, np.concatenate([[0.0], until[:-1]]), 0.0))
        picked = op[order] >= 0
        begun = np.array([tasks.begun[r] for r in rank[order][picked]], np.int64)
        self._found.append((self._first[begun], order[picked], begin + until[picked]))

    def _behind(self, before: Indices, after: Indices, lag: int) -> None:
        if len(before) > lag:
            self._found.append((before[:-lag], after[lag:], np.zeros(len(before) - lag)))

    def _group(self, tasks: Sequence[int]) -> Indices:
        """The operations of tasks that take turns."""
        rows = [np.arange(self._first[task], self._first[task + 1]) for task in tasks]
        return rows[0] if len(rows) == 1 else np.stack(rows, axis=1).ravel()


def _uses(
    tasks: Tasks, first: Indices, counts: Indices, share: Seconds, unit: float
) -> tuple[Indices, NDArray[np.int32], Seconds]:
    """What operations occupy: where those of each begin, servers, and seconds."""
    rows = np.array(tasks.uses, np.float64).reshape(-1, 4)
    each_of = np.bincount(rows[:, 0].astype(np.int64), minlength=len(counts))
    begin = np.cumsum(each_of) - each_of
    task_of = np.repeat(np.arange(len(counts)), counts)
    each = each_of[task_of]
    at = np.concatenate([[0], np.cumsum(each)]).astype(np.int64)
    row = np.arange(at[-1]) + np.repeat(begin[task_of] - at[:-1], each)
    seconds = rows[row, 2] * unit * np.repeat(share, each) + rows[row, 3]
    return at, rows[row, 1].astype(np.int32), np.ascontiguousarray(seconds)
