"""Plans as tasks that occupy servers: what ``native/plan/timeline.cc`` runs.

Every step is a task, in pieces; a vendor's collective has one more, which waits for all members. What a task occupies
is the hardware's to say (`Hardware`), in seconds a byte, so one graph serves every size.

Where hosts are alike and an algorithm draws alike for each, only the ranks of the first ones are in the graph
(`Symmetry`): what they send to another host arrives, by the same rules, from yet another. Their times are those of a
graph of all ranks, but for ties: where messages of several ranks come to a card or switch at the same instant, one goes
first, and which one may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import hetcoll._native as _native

from ..ir import Op, Plan, Span, Step
from ..symmetry import Symmetry
from .node import follows, wrong
from .streams import Lane, Piecewise, cut_up

PIECE = 16 << 10  # bytes that move at a time: about what sockets and slots hand over
LEAST_PIECES, MOST_PIECES = 8, 256  # bounds of what a task is cut into at most; fewer where there are many tasks
EVENTS = 4_000_000  # about so many in a run
SEND, RECV_REDUCE, LOCAL = Op.SEND, Op.RECV_REDUCE, Op.LOCAL  # members of an enum are slow to look up

Floats = NDArray[np.float64]
Server = tuple[str, int, int]
"""What kind, of which rank, host or switch, and which of several."""


class Use(NamedTuple):
    """A server's part in a task: seconds for each byte, and before the first."""

    server: Server
    per_byte: float
    first: float = 0.0


class Route(NamedTuple):
    """What a message occupies at its source and on its way, what at its end, and how much later it is seen there;
    between GPUs also how long each piece takes to begin, at its source and at its end."""

    out: tuple[Use, ...]
    into: tuple[Use, ...]
    delay: float
    starts: tuple[float, float] = (0.0, 0.0)


class Hardware(Protocol):
    """What tasks occupy."""

    def route(self, a: int, b: int, reduces: bool) -> Route:
        """Of a message from rank `a` to rank `b`, which adds what comes, or not."""

    def work(self, rank: int, op: Op) -> tuple[Use, ...]:
        """Of a step that moves nothing between ranks."""

    def local(self, rank: int, island: tuple[int, ...], step: Step) -> tuple[Use, ...]:
        """Of a vendor's collective, on one member."""

    def host(self, rank: int, op: Op) -> float:
        """Seconds in which the host of a GPU enqueues a piece of a step."""

    def slack(self, server: Server) -> float:
        """Seconds of work that a server does at once when it has rested."""

    def name(self, server: Server) -> str:
        """For people."""


def _count(span: Span | None) -> int:
    return 0 if span is None else span.count


def _units(step: Step) -> int:
    if step.local is not None and step.local.parts:
        return sum(_count(part) for part in step.local.parts)
    return _count(step.dst or step.src)


class Outcome(NamedTuple):
    """`seconds` until the last task ends; by server, the seconds that it worked; by task, when it began and ended."""

    seconds: float
    busy: Floats
    begin: Floats
    end: Floats


@dataclass(slots=True)
class Tasks:
    """The tasks of a set of plans. `steps` has the rank and step of each; a step is None where members gather, and
    where a call begins. `piecewise` and what lies between `messages` and `fifos` are for GPUs, see `streams`."""

    whole: int  # units of the larger buffer
    hardware: Hardware
    home: Callable[[Server], Server]
    piecewise: Piecewise | None = None
    steps: list[tuple[int, Step | None]] = field(default_factory=list)
    messages: list[bool] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)  # seconds of the host for each piece
    begun: dict[int, int] = field(default_factory=dict)  # by rank, where its call begins
    lanes: list[Lane] = field(default_factory=list)
    fifos: list[tuple[list[int], list[int]]] = field(default_factory=list)  # sends and receives
    servers: dict[Server, int] = field(default_factory=dict)
    units: list[int] = field(default_factory=list)
    one: list[bool] = field(default_factory=list)  # whether it is of one piece at any size
    uses: list[tuple[int, int, float, float]] = field(default_factory=list)  # task, server, seconds a unit, first
    then: list[tuple[int, int, bool, float]] = field(default_factory=list)  # task, waiting, paced, delay
    _arrays: tuple[NDArray[Any], ...] = ()

    def add(
        self,
        rank: int,
        step: Step | None,
        units: int,
        uses: Iterable[Use],
        *,
        one: bool = False,
        start: float = 0.0,
    ) -> int:
        """A task; its number."""
        task = len(self.steps)
        self.steps.append((rank, step))
        self.units.append(units)
        self.one.append(one)
        self.messages.append(step is not None and step.peer >= 0)
        self.starts.append(start)
        self.hosts.append(0.0 if step is None or self.piecewise is None else self.hardware.host(rank, step.op))
        for use in uses:
            server = self.servers.setdefault(self.home(use.server), len(self.servers))
            self.uses.append((task, server, use.per_byte * units, use.first))
        return task

    def run(self, nbytes: int) -> Outcome:
        """With a larger buffer of `nbytes`."""
        if self.piecewise is not None:
            return self._run_pieces(self.piecewise, nbytes)
        if not self._arrays:
            self._arrays = self._columns()
        units, one, uses_at, server, per_unit, first, then_at, then, paced, delay, used = self._arrays
        unit = nbytes / self.whole
        most = min(MOST_PIECES, max(LEAST_PIECES, EVENTS // max(1, len(self.steps))))
        pieces = np.clip(np.ceil(units * (unit / PIECE)), 1, np.where(one, 1, most)).astype(np.int32)
        each = per_unit * unit / pieces[used]
        arrays = (pieces, uses_at, server, each, first, then_at, then, paced, delay)
        return self._timed(arrays, np.arange(len(self.steps)))

    def _run_pieces(self, how: Piecewise, nbytes: int) -> Outcome:
        graph = cut_up(self, how, nbytes)
        return self._timed(graph.arrays, graph.first)

    def _timed(self, arrays: tuple[NDArray[Any], ...], firsts: NDArray[np.int64]) -> Outcome:
        """`firsts`: where in the arrays each task begins."""
        slack = np.array([self.hardware.slack(server) for server in self.servers], np.float64)
        begin, end, busy = map(np.frombuffer, _native.run_tasks((*arrays, slack)))
        if len(end) and end.min() < 0:
            rank, step = self.steps[int(np.searchsorted(firsts, int(np.argmin(end)), side="right")) - 1]
            raise ValueError(f"rank {rank} waits for ever at {step}")
        begin, end = np.minimum.reduceat(begin, firsts), np.maximum.reduceat(end, firsts)
        return Outcome(float(end.max(initial=0.0)), busy, begin, end)

    def _columns(self) -> tuple[NDArray[Any], ...]:
        task, server, per_unit, first = _table(self.uses, 4)
        source, then, paced, delay = _table(self.then, 4)
        order = np.argsort(source, kind="stable")
        n = len(self.steps)
        return (
            np.array(self.units, np.float64), np.array(self.one, np.bool_), _offsets(task, n),
            server.astype(np.int32), per_unit, first, _offsets(source, n), then[order].astype(np.int32),
            paced[order].astype(np.uint8), np.ascontiguousarray(delay[order]), task.astype(np.int64),
        )  # fmt: skip


def _table(rows: Sequence[Sequence[float]], width: int) -> list[Floats]:
    return [np.array([row[i] for row in rows], np.float64) for i in range(width)]


def _offsets(task: Floats, n: int) -> NDArray[np.int64]:
    counts = np.bincount(task.astype(np.int64), minlength=n)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


class Weaver:
    """Makes tasks of plans, one plan after another: plans of all ranks, or of those that stand for all."""

    def __init__(
        self,
        whole: int,
        hardware: Hardware,
        symmetry: Symmetry,
        home: Callable[[Server], Server],
        piecewise: Piecewise | None = None,
    ) -> None:
        self.tasks = Tasks(max(1, whole), hardware, home, piecewise)
        self._hardware, self._symmetry = hardware, symmetry
        self._sends: dict[tuple[int, int, int], list[int]] = {}
        self._recvs: dict[tuple[int, int, int], list[int]] = {}
        self._delays: dict[tuple[int, int], float] = {}
        self._gates: dict[tuple[int, int], int] = {}  # of the k-th collective of an island, by its first stand-in
        self._firsts: dict[int, int] = {}
        self._plans: dict[int, Plan] = {}

    def add(self, plan: Plan) -> None:
        """The steps of one rank."""
        tasks, rank = self.tasks, plan.rank
        heads: dict[int, int] = {}
        routes: dict[tuple[int, bool], Route] = {}
        row: list[int] = []
        lanes: dict[int, Lane] = {}
        locals_seen = 0
        begun = None
        if tasks.piecewise is not None:
            begun = tasks.begun[rank] = tasks.add(rank, None, 0, (), one=True)
        for step in plan.steps:
            op, peer = step.op, step.peer
            units = _units(step)
            gate = None
            if peer >= 0:
                key = (peer, op is RECV_REDUCE)
                if key not in routes:
                    ends = (rank, peer) if op is SEND else (peer, rank)
                    routes[key] = self._hardware.route(*ends, key[1])
                route = routes[key]
                uses, start = (route.out, route.starts[0]) if op is SEND else (route.into, route.starts[1])
                task = tasks.add(rank, step, units, uses, start=start)
                self._meet(rank, step, task, route.delay)
            elif op is LOCAL:
                gate = self._gate(plan, locals_seen)
                locals_seen += 1
                task = tasks.add(rank, step, units, self._hardware.local(rank, plan.island, step), one=True)
                tasks.then.append((gate, task, True, 0.0))
            else:
                task = tasks.add(rank, step, units, self._hardware.work(rank, op))
            target = task if gate is None else gate
            for d in step.deps:
                paced = begun is not None or (gate is None and follows(plan, plan.steps[d], step))
                tasks.then.append((row[d], target, paced, 0.0))
            if begun is not None:
                lanes.setdefault(step.lane, Lane()).add(task, target, together=gate is not None and not step.deps)
                if not step.deps:
                    tasks.then.append((begun, target, True, 0.0))
            elif (before := heads.get(step.lane)) is not None:
                tasks.then.append((before, target, False, 0.0))
            heads[step.lane] = task
            row.append(task)
        tasks.lanes += lanes.values()
        self._plans[rank] = replace(plan, steps=())

    def _meet(self, rank: int, step: Step, task: int, delay: float) -> None:
        """Put a message's end where its other end will be looked for: as the receiver's stand-in sees it."""
        if step.op is SEND:
            source, into = self._symmetry.fifo(rank, step.peer)
            self._sends.setdefault((into, source, step.channel), []).append(task)
            self._delays[into, source] = delay
        else:
            self._recvs.setdefault((rank, step.peer, step.channel), []).append(task)

    def _gate(self, plan: Plan, number: int) -> int:
        """The task that waits for all members of an island to begin their next collective."""
        if plan.rank not in self._firsts:
            for island in plan.islands:
                first = min(self._symmetry.home(rank)[0] for rank in island)
                self._firsts.update(dict.fromkeys(island, first))
        key = (self._firsts[plan.rank], number)
        if key not in self._gates:
            self._gates[key] = self.tasks.add(plan.rank, None, 0, (), one=True)
        return self._gates[key]

    def done(self) -> Tasks:
        """When all plans are there. Raises PlanError when they do not fit together."""
        tasks = self.tasks
        for into, source, channel in sorted(self._sends.keys() | self._recvs.keys()):
            sends = self._sends.get((into, source, channel), [])
            recvs = self._recvs.get((into, source, channel), [])
            name = f"the channel {channel} from rank {source} to rank {into}"
            if len(sends) != len(recvs):
                problem = f"{name} carries {len(sends)} messages but {len(recvs)} are received"
                raise wrong(self._plans[into], None, problem)
            tasks.fifos.append((sends, recvs))
            for send, recv in zip(sends, recvs, strict=True):
                if tasks.units[send] != tasks.units[recv]:
                    problem = f"wanted a message of {tasks.units[recv]} units, got {tasks.units[send]} on {name}"
                    raise wrong(self._plans[into], None, problem)
                tasks.then.append((send, recv, True, self._delays[into, source]))
        return tasks
