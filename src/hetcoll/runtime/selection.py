"""From a checked call to a bound plan: which algorithm, its plan, its links. Everything is kept for the next call.

What draws and chooses plans is imported by the first call that needs a new one: `import hetcoll` costs less without.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from .. import _native
from ..buffers import Buffer
from ..calls import Call, check_int
from ..config.env import Config
from ..errors import ArgumentError
from ..health.desync_report import Called
from ..health.status_report import call_site
from ..links.wiring import Check, Wiring
from ..types import Collective, DType, ReduceOp
from .compression import Compression

if TYPE_CHECKING:
    from ..plan.ir import Plan

_KEEP = 1024  # bound plans kept; the least recently used go first
SEND, RECV, SENDRECV = 13, 14, 15  # native/python/module.cc: Collective.P2P's forms


class Explanation(NamedTuple):
    """What a call will use. `seconds` is the cost model's prediction (nan when it has none).

    `transport` is what carries its data now. `paths` says of each rank of another host, in words, over which devices
    it is reached, what they did so far, and what is wrong with those that are not used; and of each other rank's GPU,
    once there were calls on GPUs, how data goes there. `compress` says which edges are compressed, and how much that
    makes of float32's bytes, or why none are. `gpus` says what arrays on GPUs would have it do, as float32 and sums,
    once there were calls on GPUs.
    """

    collective: str
    nbytes: int
    algorithm: str
    transport: str
    channels: int
    seconds: float
    reason: str
    paths: tuple[str, ...] = ()
    compress: str = ""
    gpus: str = ""

    def __str__(self) -> str:
        time = "" if math.isnan(self.seconds) else f", about {self.seconds * 1e6:.1f} us"
        return (
            f"{self.collective} of {self.nbytes} bytes: {self.algorithm} over {self.transport},"
            f" {self.channels} channel{'s' * (self.channels != 1)}{time} ({self.reason})"
            + (f"\n  {self.compress}" if self.compress else "")
            + (f"\n  on GPUs: {self.gpus}" if self.gpus else "")
            + "".join(f"\n  {path}" for path in self.paths)
        )


class Selection:
    """One communicator's plans."""

    def __init__(self, wiring: Wiring, config: Config, compression: Compression) -> None:
        self._compression = compression
        self._wiring, self._engine = wiring, wiring.engine
        self._forced: dict[Collective, str] = {}
        if config.algo is not None:
            from ..plan import tuner

            self._forced = tuner.named(config.algo)
        self._tables: dict[Collective, list[tuple[int, str]]] = {}
        self._plans: dict[tuple[object, ...], int] = {}
        self._shapes: OrderedDict[tuple[object, ...], _native.Shape] = OrderedDict()
        self._described: OrderedDict[int, Called] = OrderedDict()

    def shape(self, call: Call, timeout: float, check: Check) -> _native.Shape:
        """The bound plan of a call; connects what it needs within `timeout` seconds on the first use."""
        key = (
            call.collective,
            call.dtype,
            call.op,
            call.root,
            call.send_count,
            call.recv_count,
            call.send_table,
            call.recv_table,
            call.label,
            call.compress,
        )
        shape = self._shapes.get(key)
        if shape is not None:
            self._shapes.move_to_end(key)
            return shape
        name = self._choose(call)
        scale = call.op is ReduceOp.AVG
        stretches = self._stretches(call.collective, name, call.nbytes)
        where = (call.collective.plain, name, call.root, scale, bool(call.compress), stretches)
        number = self._plan(where, timeout, check)
        table = self._table(call.send_count, stretches)
        what = call.describe()
        shape = self._engine.bind(
            plan=number,
            dtype=call.dtype,
            op=call.op,
            send_count=call.send_count,
            recv_count=call.recv_count,
            send_table=table or call.send_table,
            recv_table=table or call.recv_table,
            descriptor=descriptor(f"{what} by {name}"),
            p2p=False,
            format=call.compress,
        )
        self._keep(key, shape, what)
        if (short := call.key) is not None:
            self._engine.remember(*short, shape)
        return shape

    def point(
        self, send: Buffer | None, dest: int, recv: Buffer | None, source: int, timeout: float, check: Check
    ) -> _native.Shape:
        """The bound plan of a message to `dest`, one from `source`, or both at once; of one type."""
        key = message_key(send, dest, recv, source)
        shape = self._shapes.get(key)
        if shape is not None:
            self._shapes.move_to_end(key)
            return shape
        peers = ((dest,) if send else (), (source,) if recv else ())
        number = self._plan((Collective.P2P, *peers), timeout, check)
        shape = self._engine.bind(
            plan=number,
            dtype=key[1],
            op=ReduceOp.SUM,
            send_count=send.count if send else 0,
            recv_count=recv.count if recv else 0,
            send_table=(),
            recv_table=(),
            descriptor=descriptor(f"p2p {key[1].label}"),
            p2p=True,
        )
        self._keep(key, shape, describe_message(send, dest, recv, source))
        self._engine.remember(*key, shape)
        return shape

    def copy(self, source: Buffer, target: Buffer) -> None:
        """A message to oneself."""
        _native.copy_bytes(target.ptr, source.ptr, source.nbytes)

    def describe(self, shape_id: int) -> Called | None:
        """The call that a shape was bound for, and where it was first made; None where that is forgotten."""
        return self._described.get(shape_id)

    def announce(self, what: str) -> int:
        """A number for a call that is not the engine's to run, by which `describe` knows it."""
        number = self._engine.new_shape()
        self.note_shape(number, what)
        return number

    def explain(self, op: str, nbytes: int, compress: str | None) -> Explanation:
        """See `Communicator.explain`."""
        try:
            collective = Collective[op.upper()]
        except (KeyError, AttributeError):
            raise ArgumentError(f"op: wanted one of {', '.join(c.label for c in Collective)}, got {op!r}") from None
        if check_int(nbytes, "nbytes") < 0:
            raise ArgumentError(f"nbytes: wanted 0 or more, got {nbytes}")
        op = collective.label
        topology = self._wiring.topology
        if collective is Collective.P2P:
            over, paths = self._paths(range(topology.size))
            return Explanation(op, nbytes, "direct", over, 1, math.nan, "the only one", paths)
        from ..plan import tuner

        form, told = self._compression.explain(collective, nbytes, compress)
        forced = self._compressing(collective) if form else self._forced.get(collective)
        choice = tuner.choose(collective, nbytes, topology, forced)
        if form:
            choice = choice._replace(seconds=math.nan, reason="the one that compresses")
        stretches = self._stretches(collective, choice.name, nbytes)
        plan = self._build((collective.plain, choice.name, 0, False, bool(form), stretches))
        if form:
            told = self._compression.spell(form, sorted({step.peer for step in plan.steps if step.compressed}))
        channels = len({channel for _, channel in plan.edges})
        over, paths = self._paths({peer for peer, _ in plan.edges})
        return Explanation(op, nbytes, choice.name, over, channels, choice.seconds, choice.reason, paths, told)

    def close(self) -> None:
        """Forget the bound plans."""
        self._shapes.clear()

    def _choose(self, call: Call) -> str:
        if call.compress:
            return self._compressing(call.collective)
        table = self._tables.get(call.collective)
        if table is None:
            from ..plan import tuner

            table = tuner.table(call.collective, self._wiring.topology, self._forced.get(call.collective))
            self._tables[call.collective] = table
        return next(name for upper, name in table if call.nbytes <= upper)

    def _stretches(self, collective: Collective, name: str, nbytes: int) -> int:
        from ..plan.algorithms import find

        entry = find(collective, name)
        return 1 if entry.stretches is None else entry.stretches(nbytes, self._wiring.topology.cores)

    def _table(self, count: int, stretches: int) -> tuple[int, ...]:
        from ..plan.algorithms.base import stretched

        return () if stretches == 1 else stretched(count, self._wiring.size, stretches)

    def _compressing(self, collective: Collective) -> str:
        """The algorithm that compresses."""
        from ..plan.algorithms import ALGORITHMS

        names = [name for name, algorithm in ALGORITHMS[collective.plain].items() if algorithm.compresses]
        forced = self._forced.get(collective)
        if forced not in (None, *names):
            raise ArgumentError(
                f"compress: {collective.label} is compressed by {', '.join(names)}, but HETCOLL_ALGO asks for {forced}"
            )
        return forced or names[0]

    def _plan(self, key: tuple[object, ...], timeout: float, check: Check) -> int:
        number = self._plans.get(key)
        if number is None:
            plan = self._build(key)
            self._wiring.ensure(sorted(plan.edges), timeout, check)
            number = self._plans[key] = self._engine.add_plan(plan.encode())
        return number

    def _build(self, key: tuple[object, ...]) -> Plan:
        from ..plan.algorithms import find, p2p

        size, rank = self._wiring.size, self._wiring.rank
        match key:
            case (Collective.P2P, tuple(sends), tuple(recvs)):
                return p2p(size, rank, sends, recvs)
            case (Collective() as collective, str(name), int(root), bool(scale), bool(compress), int(stretches)):
                topology = self._wiring.topology
                hosts = self._compression.groups if compress else topology.hosts
                entry = find(collective, name)
                return entry.build(
                    size, rank, root=root, scale=scale, hosts=hosts, compress=compress, stretches=stretches,
                    cores=topology.cores,
                )  # fmt: skip
        raise AssertionError(key)

    def _keep(self, key: tuple[object, ...], shape: _native.Shape, what: str) -> None:
        self._shapes[key] = shape
        self.note_shape(shape.id, what)
        if len(self._shapes) > _KEEP:
            self._shapes.popitem(last=False)

    def note_shape(self, number: int, what: str) -> None:
        """`describe` is to know this shape."""
        self._described[number] = Called(what, call_site(), exactly=False)
        if len(self._described) > 2 * _KEEP:
            self._described.popitem(last=False)

    def _paths(self, peers: Collection[int]) -> tuple[str, tuple[str, ...]]:
        return self._wiring.transports(peers), self._wiring.paths(peers)


class Message(NamedTuple):
    """One half of a message: what this rank sends to a peer, or receives from it."""

    kind: int  # SEND or RECV
    buffer: Buffer
    peer: int

    @property
    def halves(self) -> tuple[Buffer | None, int, Buffer | None, int]:
        """As others take them: what is sent, where to, what is received, where from."""
        return (self.buffer, self.peer, None, -1) if self.kind == SEND else (None, -1, self.buffer, self.peer)

    def __str__(self) -> str:
        return describe_message(*self.halves)


def message_key(
    send: Buffer | None, dest: int, recv: Buffer | None, source: int
) -> tuple[int, DType, ReduceOp, int, int, int]:
    """By what the short way knows a message to `dest`, one from `source`, or both at once; as `Call.key`."""
    first, second = send or recv, recv or send
    assert first is not None
    assert second is not None
    kind = SENDRECV if send and recv else SEND if send else RECV
    where = _native.ranks_key(dest, source) if send and recv else dest if send else source
    return kind, first.dtype, ReduceOp.SUM, where, first.count, second.count


def describe_message(send: Buffer | None, dest: int, recv: Buffer | None, source: int) -> str:
    """A send, a receive, or both, for people."""
    parts = []
    if send is not None:
        parts.append(f"send({send.dtype.label}, count={send.count}) to rank {dest}")
    if recv is not None:
        parts.append(f"recv({recv.dtype.label}, count={recv.count}) from rank {source}")
    return " and ".join(parts)


def descriptor(text: str) -> int:
    """What travels with every frame: 64 bits of a hash of what all ranks must agree on."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
