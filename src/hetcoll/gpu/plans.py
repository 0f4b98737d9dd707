"""From a call on GPU buffers, and what is chosen for it, to a list of driver calls: in which pieces and order.

Plans are cut into pieces that fit a slot (`pipeline`); small pieces first and last fill and drain the way quickly. The
order is one that no number of hardware queues can turn into a deadlock (`order`). What was compiled is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import hetcoll._native as _native

from ..calls import Call
from ..plan.flat import LAG
from ..plan.ir import P2P_CHANNEL, Buf, Local, Op, Plan, Points, Span, Step, offsets
from ..plan.order import Frame, Ordered, joined, ordered
from ..plan.pieces import GRAIN, SLOTS, cut, message_pieces
from ..plan.pipeline import ramp
from ..runtime.planner import Kept, Planner
from ..types import LOGICAL, REDUCING, Collective, DType, ReduceOp
from ..vendors.devices.kernels import codec_names
from .message_kernel import MessageKernel, Placed, Small
from .planner import Carrier, Choice, GpuPlanner, Mechanism

if TYPE_CHECKING:
    from ..vendors.ccl.native import Native
    from ..vendors.devices.base import Device
    from .vendor_comm import GpuIslands

_BASES = 32  # plans that are kept, before they are cut into pieces
_BLOCK, _MOST_BLOCKS, _PER_BLOCK = 512, 16, 32 << 10  # of a reduction: enough for PCIe, little of the GPU
_CODEC_BLOCK, _MOST_CODEC_BLOCKS, _ELEMENTS = 128, 256, 32  # of a codec, whose threads take so many elements each

End = tuple[int, int]
"""Of a message: the peer, and how many elements."""
Parts = tuple[Span | None, ...]
Smalls = list[tuple[int, Small]]
"""Messages with their numbers."""
Carry = Callable[[int, int], Carrier]
"""What carries a message to this peer, or from there, of so many bytes."""
Link = Callable[[Plan], list[int]]
Kernel = tuple[int, int, int, int]  # function, threads in a block, most blocks, bytes for each
S = TypeVar("S", covariant=True)


class Made(NamedTuple):
    """A plan for a `Binder`: its steps come in this `order` and have these levels (see `plan.order`), over buffers
    whose units begin at the elements in `tables`; with `points`, those of the plan's points.

    `call` is None for messages between two ranks; `local` says how the island's library reduces. `apart` has the
    elements at which messages begin, sends and receives, that have a buffer each. `kernels` carry the messages that the
    plan leaves out.
    """

    plan: Plan
    order: Sequence[int]
    level: Sequence[int]
    dtype: DType
    tables: Sequence[Sequence[int]]
    call: Call | None
    local: Native | None = None
    apart: tuple[Sequence[int], Sequence[int]] = ((), ())
    points: Points | None = None
    kernels: Sequence[Placed] = ()


class Binder(Protocol[S]):
    """What makes a plan ready to run on one rank."""

    def bind(self, made: Made) -> S: ...


class GpuPlans(Generic[S]):
    """The plans of rank `rank` of `size`, made ready by `binder`. Messages fit slots of `slot_bytes`."""

    def __init__(
        self,
        rank: int,
        size: int,
        islands: GpuIslands,
        slot_bytes: int,
        binder: Binder[S],
        planner: Planner,
        choices: GpuPlanner,
    ) -> None:
        self._rank, self._size, self._islands, self._slot_bytes = rank, size, islands, slot_bytes
        self._planner, self._choices = planner, choices
        self._bind = binder.bind
        self.kernel: MessageKernel | None = None
        """What binds messages that are its, once the ways of the host are known to work."""
        self._mates = next(island for island in islands.islands if rank in island)
        self._bases: Kept[tuple[object, ...], Frame] = Kept(_BASES)
        self._drawn: Kept[tuple[object, ...], Ordered] = Kept()

    def compile(self, call: Call, choice: Choice) -> S:
        """A collective, by the messages or the plan that are chosen for it."""
        if choice.by is Mechanism.MESSAGES:
            return self._alltoall(call, choice)
        entry, islands = choice.algorithm, choice.islands
        assert entry is not None, "it is a plan"
        item = call.dtype.itemsize
        grain = max(1, GRAIN // item)
        shares = call.shares(self._size)
        kind = call.collective.plain
        key = (
            kind,
            call.root,
            call.op is ReduceOp.AVG,
            self._logical(call),
            len(islands),
            entry.name,
            bool(call.compress),
        )
        frame = self._bases.get_or(key, lambda: self._base(call, choice))
        made = cut(call.nbytes, item * max(*shares[0], *shares[1]), self._slot_bytes, frame.lengths)
        if len(islands) == 1:
            made = made._replace(at=(0, 1))
        plan, order, rise = self._drawn.get_or((*key, made), lambda: ordered(frame, made))
        points = plan.points()
        tables = [
            offsets(counts, units // len(counts), at, grain, made.length * made.equal)
            for counts, units, at in zip(shares, (plan.send_units, plan.recv_units), points, strict=True)
        ]
        return self._bind(Made(plan, order, rise, call.dtype, tables, call, choice.local, points=points))

    def _alltoall(self, call: Call, choice: Choice) -> S:
        """Each pair of ranks knows its own count, so the pieces are theirs, too."""
        tables: Iterable[Sequence[int]] = (call.send_table, call.recv_table)
        if call.collective is Collective.ALLTOALL:
            each = [r * (call.send_count // self._size) for r in range(self._size + 1)]
            if choice.aside:
                return self._put_aside(call, each)
            tables = (each, each)
        sends, recvs = ([(peer, b - a) for peer, (a, b) in enumerate(pairwise(table))] for table in tables)
        return self.messages(call.dtype, sends, recvs, self._choices.part_carrier(choice), call)

    def _put_aside(self, call: Call, table: Sequence[int]) -> S:
        """An all-to-all in place inside one island: all that is sent is copied first, then sent from there.

        Another rank's may be out of place: to the library both are one group of the same messages.
        """
        parts = [Span(buf, r) if r != self._rank else None for buf in (Buf.SCRATCH, Buf.RECV) for r in self._mates]
        aside = Step(Op.COPY, 0, Span(Buf.SEND, 0, self._size), Span(Buf.SCRATCH, 0, self._size))
        exchange = Step(Op.LOCAL, 1, deps=(0,), local=Local(Collective.ALLTOALL, parts=tuple(parts)))
        n, steps, islands = self._size, (aside, exchange), self._islands.islands
        plan = Plan(Collective.ALLTOALL, "aside", n, self._rank, n, n, steps, scratch_copies=1, islands=islands)
        return self._bind(Made(plan, (0, 1), (0, 1), call.dtype, (table, table), call))

    def messages(
        self,
        dtype: DType,
        sends: Sequence[End],
        recvs: Sequence[End],
        carrier: Carry,
        call: Call | None = None,
        *,
        apart: bool = False,
        channel: int = P2P_CHANNEL,
        whole: bool = False,
    ) -> S:
        """Messages to peers and from peers, all under way together. Those to oneself match in their order. `call`: they
        are what it consists of; `apart`: each has a buffer of its own; `whole`: each fits a slot, and is not cut.

        What one rank sends to another is numbered: pieces, small messages, and what the library carries between two of
        these. So both know it by one number. All is enqueued in the order of numbers: the small messages of each, which
        are one kernel, then sends, then receives, then what the library does. So what peers need comes before what this
        rank waits for, and nothing overtakes what is before it on its way to a peer that makes a call of each message.
        """
        channel = channel if call is None else 0  # messages of two ranks are numbered along the edge
        out = self._half(Op.SEND, channel, dtype.itemsize, sends, carrier, whole)
        into = self._half(Op.RECV, channel, dtype.itemsize, recvs, carrier, whole)
        parts = {n: _parts(out.rows.get(n, []), into.rows.get(n, [])) for n in {*out.rows, *into.rows}}
        inside = [(n, Step(Op.LOCAL, 3, local=Local(Collective.ALLTOALL, parts=each))) for n, each in parts.items()]
        numbered = sorted((*out.pieces, *into.pieces, *inside), key=lambda piece: (piece[0], piece[1].op))
        base = len(sends) if apart else 1
        kernels = self._kernels(out.small, into.small, base, [number for number, _ in numbered])
        numbered += [(0, Step(Op.COPY, 2, src, dst)) for src, dst in zip(out.own, into.own, strict=True)]
        levels = [_level(number, step.op) for number, step in numbered]
        steps = tuple(step for _, step in numbered)
        units = (len(out.table) - 1, len(into.table) - 1)
        islands = self._islands.islands
        plan = Plan(Collective.P2P, "messages", self._size, self._rank, *units, steps, islands=islands)
        begins = (out.begins, into.begins) if apart else ((), ())
        tables, order = (out.table, into.table), tuple(range(len(steps)))
        return self._bind(Made(plan, order, levels, dtype, tables, call, apart=begins, kernels=kernels))

    def _kernels(self, sends: Smalls, recvs: Smalls, base: int, numbers: Sequence[int]) -> list[Placed]:
        """Those of small messages, each of a number; the buffers of what comes count from `base` on, and pieces have
        these `numbers`."""
        rows: dict[int, list[tuple[bool, Small]]] = {}
        for number, each in sends:
            rows.setdefault(number, []).append((True, each))
        for number, each in recvs:
            rows.setdefault(number, []).append((False, each._replace(buffer=base + each.buffer)))
        found = []
        for number, row in sorted(rows.items()):
            assert self.kernel is not None, "who has none has no small messages"
            found.append(Placed(self.kernel.bind(row), bisect_left(numbers, number), _level(number, Op.SEND)))
        return found

    def _half(
        self,
        op: Op,
        channel: int,
        item: int,
        messages: Sequence[End],
        carrier: Carry,
        whole: bool,
    ) -> _Half:
        half, numbers = _Half([0], [], [], [], {}, []), Counter[int]()
        buf = Buf.SEND if op is Op.SEND else Buf.RECV
        inside: dict[int, dict[int, list[Span]]] = {}  # by number and mate
        behind = set[int]()  # the mates of whom the last message was the library's
        for i, (peer, count) in enumerate(messages):
            at, by = len(half.table) - 1, carrier(peer, count * item)
            cuts = (0, 1) if whole or by is not Carrier.COPIES else self._cuts(count * item)
            if by is Carrier.LIBRARY:
                inside.setdefault(numbers[peer], {mate: [] for mate in self._mates})[peer].append(Span(buf, at))
                behind.add(peer)
            elif by is Carrier.ITSELF:
                half.own.append(Span(buf, at))
            elif by is Carrier.KERNEL:
                numbers[peer] += peer in behind
                behind.discard(peer)
                half.small.append((numbers[peer], Small(i, peer, count * item)))
                numbers[peer] += 1
            elif count > 0:
                for a, b in pairwise(cuts):
                    span = Span(buf, at + a, b - a)
                    src, dst = (span, None) if op is Op.SEND else (None, span)
                    half.pieces.append((numbers[peer], Step(op, int(op is Op.RECV), src, dst, peer, channel)))
                    numbers[peer] += 1
            half.begins.append(half.table[-1])
            half.table.extend(half.begins[-1] + x for x in _aligned(count, cuts[-1], max(1, GRAIN // item)))
        half.rows.update((number, [*zip_longest(*each.values())]) for number, each in inside.items())
        return half

    def _cuts(self, nbytes: int) -> tuple[int, ...]:
        """The units of a message at which its pieces begin and end."""
        smallest, largest = message_pieces(nbytes, self._slot_bytes)
        return ramp(max(1, -(-nbytes // smallest)), largest // smallest)

    def _base(self, call: Call, choice: Choice) -> Frame:
        """This rank's plan, and what its pieces and their order follow from."""
        entry, islands = choice.algorithm, choice.islands
        assert entry is not None, "it is a plan"
        scale = call.op is ReduceOp.AVG and len(islands) > 1  # else the library averages by itself
        groups = joined(self._planner.compression.groups, islands) if call.compress else ()
        own = entry.build(
            self._size, self._rank, root=call.root, scale=scale, logical=self._logical(call),
            hosts=islands if call.compress or len(islands) < self._size else None, compress=bool(call.compress),
            groups=groups, ordered=self._planner.ordered,
        )  # fmt: skip
        return Frame(own, entry, islands, scale=scale, groups=groups)

    def _logical(self, call: Call) -> bool:
        return call.op in LOGICAL and self._size == 1


class DeviceBinder:
    """Compiles plans into lists of driver calls for `queue`. `link` gives the queue's numbers of the edges in use."""

    def __init__(self, queue: _native.DeviceQueue, device: Device, link: Link) -> None:
        self._queue, self._device, self._link = queue, device, link

    def bind(self, made: Made) -> _native.DeviceShape:
        """See `Binder`."""
        plan, call, dtype, tables = made.plan, made.call, made.dtype, made.tables
        reduce, scale = (None, None) if call is None else self._kernels(call)
        return self._queue.bind(
            plan=plan.encode(made.points),
            size=plan.size,
            dtype=dtype,
            send_count=tables[0][-1],
            recv_count=tables[1][-1],
            send_table=tables[0],
            recv_table=tables[1],
            order=made.order,
            levels=made.level,
            lag=2 * LAG if plan.collective is Collective.P2P else LAG,
            edges=self._link(plan),
            reduce=reduce,
            scale=scale,
            divisor=plan.size,
            local=made.local,
            p2p=call is None,
            ahead=plan.collective is not Collective.P2P,
            codec=None if call is None or not call.compress else self._codec(call),
            sends=[at * dtype.itemsize for at in made.apart[0]],
            recvs=[at * dtype.itemsize for at in made.apart[1]],
            kernels=made.kernels,
        )

    def _codec(self, call: Call) -> tuple[int, Kernel, Kernel, Kernel, Kernel]:
        """The format, and what rounds to it, encodes, decodes, and adds what it decodes."""
        names, table = codec_names(call.dtype, call.compress), self._device.kernels()
        shape = (_CODEC_BLOCK, _MOST_CODEC_BLOCKS, _CODEC_BLOCK * _ELEMENTS * call.dtype.itemsize)
        kernels = [(table.function(name), *shape) for name in names]
        return int(call.compress), kernels[0], kernels[1], kernels[2], kernels[3]

    def _kernels(self, call: Call) -> tuple[Kernel | None, Kernel | None]:
        if call.collective not in REDUCING:
            return None, None
        op = ReduceOp.SUM if call.op is ReduceOp.AVG else call.op
        table, shape = self._device.kernels(), (_BLOCK, _MOST_BLOCKS, _PER_BLOCK)
        reduce = (table.function(f"reduce_{call.dtype.label}_{op.label}"), *shape)
        if call.op is not ReduceOp.AVG:
            return reduce, None
        return reduce, (table.function(f"scale_{call.dtype.label}"), *shape)


def _level(number: int, op: Op) -> int:
    """Of a piece with this number, or of a kernel of such messages, which is as sends are (`order.levels`). What the
    library does has one that no kernel has, so there are twice as many as elsewhere."""
    return 2 * (number // SLOTS * 2 * LAG + number % SLOTS + LAG * int(op is Op.RECV)) + int(op is Op.LOCAL)


def _aligned(count: int, units: int, grain: int) -> list[int]:
    """Where each of `units` equal units ends."""
    return offsets([count], units, range(1, units + 1), grain, units)


class _Half(NamedTuple):
    """What this rank sends, or what it receives."""

    table: list[int]  # elements at which units begin, and the end
    begins: list[int]  # those at which messages do
    pieces: list[tuple[int, Step]]  # with their numbers
    own: list[Span]  # to this rank itself, or from it
    rows: dict[int, list[tuple[Span | None, ...]]]  # by the island's library: a message of each member, or none
    small: Smalls  # by kernels


def _parts(sends: Sequence[tuple[Span | None, ...]], recvs: Sequence[tuple[Span | None, ...]]) -> Parts:
    """Those of a LOCAL all-to-all of such rows."""
    rows = max(len(sends), len(recvs))
    nothing = (None,) * len((*sends, *recvs)[0])
    return tuple(part for each in (sends, recvs) for row in (*each, *[nothing] * (rows - len(each))) for part in row)
