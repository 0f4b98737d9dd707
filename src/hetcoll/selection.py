"""From a checked call to a bound plan: which algorithm, its plan, its links. Everything is kept for the next call."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from . import _native, tuner
from .algorithms import find, p2p
from .buffers import Buffer
from .calls import Call
from .env import Config
from .errors import ArgumentError
from .inquiry import Called
from .plan import Plan
from .types import Collective, ReduceOp
from .wiring import Check, Wiring
from .witness import call_site

_KEEP = 1024  # bound plans kept; the least recently used go first
_SEND, _RECV = 13, 14  # native/python/module.cc: the two halves of Collective.P2P


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call will use. `seconds` is the cost model's prediction (nan when it has none)."""

    collective: str
    nbytes: int
    algorithm: str
    transport: str
    channels: int
    seconds: float
    reason: str

    def __str__(self) -> str:
        time = "" if math.isnan(self.seconds) else f", about {self.seconds * 1e6:.1f} us"
        return (
            f"{self.collective} of {self.nbytes} bytes: {self.algorithm} over {self.transport},"
            f" {self.channels} channel{'s' * (self.channels != 1)}{time} ({self.reason})"
        )


class Selection:
    """One communicator's plans."""

    def __init__(self, wiring: Wiring, config: Config) -> None:
        self._wiring, self._engine = wiring, wiring.engine
        self._forced = {} if config.algo is None else tuner.named(config.algo)
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
        )
        shape = self._shapes.get(key)
        if shape is not None:
            self._shapes.move_to_end(key)
            return shape
        name = self._choose(call)
        scale = call.op is ReduceOp.AVG
        number = self._plan((call.collective.plain, name, call.root, scale), timeout, check)
        what = call.describe()
        shape = self._engine.bind(
            plan=number,
            dtype=call.dtype,
            op=call.op,
            send_count=call.send_count,
            recv_count=call.recv_count,
            send_table=call.send_table,
            recv_table=call.recv_table,
            descriptor=_descriptor(f"{what} by {name}"),
            p2p=False,
        )
        self._keep(key, shape, what)
        if not call.label and not call.send_table and not call.recv_table and (call.send or call.recv):
            # The short way sees one buffer as both where this rank has only one of the two.
            first, second = call.send or call.recv, call.recv or call.send
            assert first is not None
            assert second is not None
            self._engine.remember(call.collective, call.dtype, call.op, call.root, first.count, second.count, shape)
        return shape

    def point(self, buffer: Buffer, peer: int, sends: bool, timeout: float, check: Check) -> _native.Shape:
        """The bound plan of a send to, or a receive from, `peer`."""
        kind = _SEND if sends else _RECV
        key = (kind, buffer.dtype, peer, buffer.count)
        shape = self._shapes.get(key)
        if shape is not None:
            self._shapes.move_to_end(key)
            return shape
        number = self._plan((Collective.P2P, kind, peer), timeout, check)
        shape = self._engine.bind(
            plan=number,
            dtype=buffer.dtype,
            op=ReduceOp.SUM,
            send_count=buffer.count if sends else 0,
            recv_count=0 if sends else buffer.count,
            send_table=(),
            recv_table=(),
            descriptor=_descriptor(f"p2p {buffer.dtype.label} {buffer.count}"),
            p2p=True,
        )
        self._keep(key, shape, describe_message(buffer, peer, sends))
        self._engine.remember(kind, buffer.dtype, ReduceOp.SUM, peer, buffer.count, buffer.count, shape)
        return shape

    def copy(self, source: Buffer, target: Buffer) -> None:
        """A message to oneself."""
        _native.copy_bytes(target.ptr, source.ptr, source.nbytes)

    def describe(self, shape_id: int) -> Called | None:
        """The call that a shape was bound for, and where it was first made; None where that is forgotten."""
        return self._described.get(shape_id)

    def explain(self, op: str, nbytes: int) -> Explanation:
        """See `Communicator.explain`."""
        try:
            collective = Collective[op.upper()]
        except (KeyError, AttributeError):
            raise ArgumentError(f"op: wanted one of {', '.join(c.label for c in Collective)}, got {op!r}") from None
        topology, rank = self._wiring.topology, self._wiring.rank
        if collective is Collective.P2P:
            return Explanation(
                op, nbytes, "direct", self._transports(range(topology.size)), 1, math.nan, "the only one"
            )
        choice = tuner.choose(collective, nbytes, topology, self._forced.get(collective))
        plan = find(collective.plain, choice.name).build(topology.size, rank, hosts=topology.hosts)
        channels = len({channel for _, channel in plan.edges})
        transport = self._transports(peer for peer, _ in plan.edges)
        return Explanation(op, nbytes, choice.name, transport, channels, choice.seconds, choice.reason)

    def close(self) -> None:
        """Forget the bound plans."""
        self._shapes.clear()

    def _choose(self, call: Call) -> str:
        table = self._tables.get(call.collective)
        if table is None:
            table = tuner.table(call.collective, self._wiring.topology, self._forced.get(call.collective))
            self._tables[call.collective] = table
        return next(name for upper, name in table if call.nbytes <= upper)

    def _plan(self, key: tuple[object, ...], timeout: float, check: Check) -> int:
        number = self._plans.get(key)
        if number is None:
            plan = self._build(key)
            self._wiring.ensure(sorted(plan.edges), timeout, check)
            number = self._plans[key] = self._engine.add_plan(plan.encode())
        return number

    def _build(self, key: tuple[object, ...]) -> Plan:
        size, rank = self._wiring.size, self._wiring.rank
        match key:
            case (Collective.P2P, kind, int(peer)):
                return p2p(size, rank, [peer], []) if kind == _SEND else p2p(size, rank, [], [peer])
            case (Collective() as collective, str(name), int(root), bool(scale)):
                return find(collective, name).build(
                    size, rank, root=root, scale=scale, hosts=self._wiring.topology.hosts
                )
        raise AssertionError(key)

    def _keep(self, key: tuple[object, ...], shape: _native.Shape, what: str) -> None:
        self._shapes[key] = shape
        self._described[shape.id] = Called(what, call_site(), exactly=False)
        if len(self._shapes) > _KEEP:
            self._shapes.popitem(last=False)
        if len(self._described) > 2 * _KEEP:
            self._described.popitem(last=False)

    def _transports(self, peers: Iterable[int]) -> str:
        topology, rank = self._wiring.topology, self._wiring.rank
        found = sorted({topology.transport(rank, p) for p in peers if p != rank})
        return "+".join(found) or "self"


def describe_message(buffer: Buffer, peer: int, sends: bool) -> str:
    """A send or a receive, for people."""
    what = f"({buffer.dtype.label}, count={buffer.count})"
    return f"send{what} to rank {peer}" if sends else f"recv{what} from rank {peer}"


def _descriptor(text: str) -> int:
    """What travels with every frame: 64 bits of a hash of what all ranks must agree on."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
