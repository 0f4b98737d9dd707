"""One-sided messages: memory that other ranks put into and get from, without a call of the rank whose it is."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

from ..calls import check_int, check_rank
from ..calls.buffers import Buffer, read_buffer
from ..errors import ArgumentError, BufferTypeError, ClosedError, DeviceError
from ..types import DType
from ..work import DONE, Work
from .core import Core
from .executor import Seen, Shared
from .offsets import MOST_PIECES, Offsets, pieces
from .regroup import Make, interrupted, name_of, while_whole
from .transfers import OneSided, Transfer

_MOST_SIGNAL = 1 << 62  # native/host/windows.h, Show
_MOST_TEXT = 400  # of a problem


class Carrier(Protocol):
    """The communicator that carries the messages of windows."""

    _core: Core

    def close(self) -> None: ...


class _Exposed(NamedTuple):
    """What one rank offers: elements and signals."""

    elements: int
    signals: int


class Window:
    """Memory of every rank that all of them can reach. Made by `Communicator.window`; a context manager.

    Offsets and counts are in elements of `dtype`. A rank's puts and gets of one peer are done in the order of the
    calls. When a put is over its data is in the window, and `src` may be written again. Where two ranks write the same
    elements, or a rank writes what it lends, either may win; nothing else is torn.

    `mapped`: where this rank's GPU sees the memory of other ranks whose GPUs see its own, by rank. For kernels, until
    `close`.
    """

    def __init__(
        self, side: OneSided, number: int, dtype: DType, exposed: Sequence[_Exposed], mapped: Mapping[int, int]
    ) -> None:
        self._side, self._number, self._exposed = side, number, exposed
        self.dtype, self.mapped = dtype, mapped
        self.closed = False
        self._given_back = False
        self._closing = threading.RLock()  # a signal handler may close it, too

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each rank's window."""
        return tuple(each.elements for each in self._exposed)

    def put(
        self,
        src: Any,
        peer: int,
        offset: Offsets = 0,
        *,
        src_offset: Offsets = 0,
        count: Offsets | None = None,
        signal: int | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
        late: Any = None,
    ) -> Work:
        """Copy `count` elements of `src`, from `src_offset` on, to `offset` of the window of `peer`, which may be this
        rank. By default all that `src` has from there on.

        Sequences of offsets and counts, up to 2**20, are as many pieces in one call. `signal`: that counter of the
        peer's grows by one when all of them are in place. The call returns when they are, or at once with
        ``async_op=True``; then `src` belongs to the operation until its `Work` is over.

        A `src` on a GPU is read after what is now on `stream`, by default the current one of its library. Streams do
        not wait for the end: `Work.wait` is the host's. `late`, an int64 in memory of the host that the GPU writes:
        how many elements a put of one piece has, of `count` at most, once `stream` is there. Then `src` may be memory
        of the host, too, that the GPU fills. More than `count` is a `CommunicationError` on all ranks, and nothing is
        written.

        Raises ArgumentError where a piece is not inside `src` or the window, BufferTypeError for another dtype than the
        window's or another GPU than this rank's, before anything is sent; `ClosedError` where the peer has closed its
        window, `PeerLostError` where it is gone, `CollectiveTimeoutError` after `timeout` seconds (default: the
        communicator's).
        """
        return self._start(False, src, "src", peer, offset, src_offset, count, signal, async_op, timeout, stream, late)

    def get(
        self,
        dst: Any,
        peer: int,
        offset: Offsets = 0,
        *,
        dst_offset: Offsets = 0,
        count: Offsets | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Work:
        """Copy `count` elements of the window of `peer`, from `offset` on, to `dst_offset` of `dst`. As `put`: a `dst`
        on a GPU is written after what is now on `stream`, and is ready for all streams when the call is over."""
        return self._start(True, dst, "dst", peer, offset, dst_offset, count, None, async_op, timeout, stream)

    def signal(self, index: int = 0) -> int:
        """How many puts that name this signal have arrived here."""
        return self._side.core.engine.signal(self._number, self._check_signal(index, self._side.core.rank))

    def wait_signal(
        self,
        index: int = 0,
        value: int = 1,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Work:
        """Wait until `signal` is `value` or more. `timeout` in seconds raises `CollectiveTimeoutError`; the
        communicator stays usable.

        `stream`, of this rank's GPU: what comes on it later waits, and the call returns at once. Where the window is
        closed here or the communicator fails, streams go on without the data, and the `Work` has the error.
        """
        side, at = self._side, self._check_signal(index, self._side.core.rank)
        if not 0 <= (least := check_int(value, "value")) < _MOST_SIGNAL:
            raise ArgumentError(f"value: wanted 0 or more, below 2**62, got {least}")
        self._check_open()
        what, seconds = f"wait_signal({at}, {least})", side.core.seconds(timeout)
        if stream is not None:
            side.devices.wait_on(stream, self._number, self._exposed[side.core.rank].signals, at, least)
            return Transfer(side, side.core.engine.expect(self._number, at, least), None, what)
        ticket = side.core.engine.expect(self._number, at, least)
        return side.begun(ticket, None, what, async_op, seconds)

    def close(self) -> None:
        """Take this rank's memory back. Local. When it returns nothing touches the memory any more: what comes later is
        refused, counted, and a `ClosedError` for who sent it. More than once is fine, also after an error.

        On a GPU it waits for the copies under way, and for collectives called before that read the window;
        `CollectiveTimeoutError` after the communicator's timeout, where other streams or ranks hold them up.
        """
        self.closed = True
        with self._closing:
            if not self._given_back:
                self._side.close_window(self._number)
                self._given_back = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<hetcoll.Window of {self.dtype.label}, {self.counts}{' closed' if self.closed else ''}>"

    def _check_open(self) -> None:
        self._side.core.host.check_usable()
        if self.closed:
            raise ClosedError("this window was closed")

    def _check_signal(self, index: object, peer: int) -> int:
        at, there = check_int(index, "signal"), self._exposed[peer].signals
        if not 0 <= at < there:
            raise ArgumentError(f"signal: wanted one of the {there} of rank {peer}, got {at}")
        return at

    def _start(
        self,
        gets: bool,
        obj: Any,
        name: str,
        peer: int,
        offset: Offsets,
        own_offset: Offsets,
        count: Offsets | None,
        signal: int | None,
        async_op: bool,
        timeout: float | None,
        stream: Any,
        late: Any = None,
    ) -> Work:
        self._check_open()
        side = self._side
        other = check_rank(peer, side.core.size, "peer")
        buffer = read_buffer(obj, name, writable=gets)
        if buffer.dtype is not self.dtype:
            raise BufferTypeError(f"{name}: wanted the window's dtype, {self.dtype.label}, got {buffer.dtype.label}")
        at = -1 if signal is None else self._check_signal(signal, other)
        seconds = side.core.seconds(timeout)
        there = self._exposed[other].elements
        rows, nbytes = pieces(buffer.count, there, own_offset, offset, count, self.dtype.itemsize, name, other)
        word = None if late is None else _check_late(late, buffer, len(rows), stream)
        if nbytes == 0 and at < 0:
            return DONE
        device, after = side.devices.reach(buffer, name, stream, word is not None)
        ticket = side.core.engine.transfer(gets, self._number, other, buffer.ptr, rows, at, device, after,
                                           late=0 if word is None else word.ptr, item=self.dtype.itemsize)  # fmt: skip
        what = f"{'get from' if gets else 'put to'} rank {other} of {nbytes} bytes in {len(rows)} pieces"
        return side.begun(ticket, (buffer, self, word), what, async_op, seconds)


def _check_late(late: Any, src: Buffer, pieces: int, stream: Any) -> Buffer:
    """Where a put finds its count."""
    word = read_buffer(late, "late", writable=False)
    if (word.dtype, word.count, word.device) != (DType.INT64, 1, "cpu"):
        got = f"{word.count} of {word.dtype.label} on {word.place}"
        raise BufferTypeError(f"late: wanted one int64 in memory of the host, got {got}")
    if word.ptr % word.nbytes:  # what is written to it would not be read as one
        raise BufferTypeError(f"late: wanted one int64 at a multiple of 8 bytes, got one at {word.ptr:#x}")
    if src.device == "cpu" and stream is None:
        raise ArgumentError("stream: wanted that of the GPU that fills src, which is memory of the host, got None")
    if pieces != 1:
        raise ArgumentError(f"late: wanted one piece that is not empty, got {pieces}")
    return word


def open_window(parent: Core, make: Make[Carrier], buf: Any, signals: int, timeout: float | None) -> Window:
    """See `Communicator.window`. `make` gives the communicator that is to carry the messages."""
    parent.host.check_usable()
    parent.check_outside_group(lambda: "window()")  # it takes a number, as on all ranks
    buffer = None if buf is None else read_buffer(buf, "buf", writable=True)
    if not 0 <= (own := check_int(signals, "signals")) <= MOST_PIECES:
        raise ArgumentError(f"signals: wanted 0 to {MOST_PIECES}, got {own}")
    seconds = parent.seconds(timeout)
    side, problem = _side(parent, make, seconds), ""
    side.core.host.check_usable()
    if buffer is not None and buffer.device != "cpu":
        try:
            side.devices.copies(buffer, "buf")
        except (DeviceError, BufferTypeError) as error:  # which all ranks hear of
            problem, buffer = f"{type(error).__name__}: {error}"[:_MOST_TEXT], None
    number = side.add_window(buffer, own)
    shared, ready = side.devices.share(buffer), False
    try:
        ready = side.registered.register(number, buffer)
    except DeviceError as error:
        problem = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
    mine = [
        *(-1 if buffer is None else buffer.dtype.value, 0 if buffer is None else buffer.count),
        *(own, problem, shared, ready),
    ]
    told = [json.loads(blob) for blob in parent.meet("window()", json.dumps(mine).encode(), seconds)]
    try:
        dtype = _check_told(told)
    except (BufferTypeError, DeviceError):
        side.close_window(number)
        raise
    exposed = [_Exposed(count, there) for _, count, there, *_ in told]
    side.registered.place(number, [rank for rank, (*_, there) in enumerate(told) if there])
    lengths = [each.elements * dtype.itemsize for each in exposed]
    opened = [None if each is None else Shared(*each) for *_, each, _ in told]
    mapped, by_all = _map(parent, side, number, opened, lengths, seconds)
    if by_all:
        assert buffer is not None  # or nobody would see it
        parent.gpus.see_window(number, Seen(buffer.ptr, min(lengths), mapped))
    return Window(side, number, dtype, exposed, mapped)


def _side(parent: Core, make: Make[Carrier], seconds: float) -> OneSided:
    """What carries the messages of a communicator's windows, made with the first one."""
    name = name_of(parent.group, "windows")

    def begin(_: object) -> OneSided:
        parent.meet("the first window()", b"", seconds)  # who has left will not come to what is made now
        with while_whole(parent, name):
            carrier = make(name, list(range(parent.size)), parent.config.init_timeout)
            side = OneSided(carrier._core, carrier.close, parent.wiring.memory, parent.gpus)
            end = partial(side.core.diagnosis.fail_as, weakref.ref(parent.diagnosis))
            parent.diagnosis.on_failure.append(end)
            if parent.engine.failed:
                end()
            return side

    try:
        return parent.rider(OneSided, begin)
    except (KeyboardInterrupt, SystemExit):
        interrupted(parent, name)
        raise


def _check_told(told: Sequence[Sequence[Any]]) -> DType:
    """The type that all ranks' windows have. DeviceError or BufferTypeError on all ranks where one cannot have a
    window, or two have other types."""
    for rank, (_, _, _, problem, *_) in enumerate(told):
        if problem:
            kind = DeviceError if problem.startswith(DeviceError.__name__) else BufferTypeError
            raise kind(f"buf: that of rank {rank} cannot be a window: {problem}")
    kinds = {rank: DType(kind) for rank, (kind, *_) in enumerate(told) if kind >= 0}
    if len(set(kinds.values())) > 1:
        what = ", ".join(f"rank {rank} {kind.label}" for rank, kind in kinds.items())
        raise BufferTypeError(f"buf: wanted one dtype on all ranks, got {what}")
    return next(iter(kinds.values()), DType.UINT8)


def _map(
    parent: Core, side: OneSided, number: int, shared: Sequence[Shared | None], lengths: Sequence[int], seconds: float
) -> tuple[dict[int, int], bool]:
    """Where this rank's GPU sees the memory of other ranks, of these bytes, whose GPUs see its own; and whether all see
    that of all others. The others hear of what is seen, too."""
    if sum(each is not None for each in shared) < 2:
        return {}, False
    seen = side.devices.open(number, shared, lengths)  # before the others hear of it: they may put at once
    told = parent.meet("window()", json.dumps(sorted(seen)).encode(), seconds)
    theirs = [json.loads(blob) for blob in told]
    readers = [rank for rank, each in enumerate(theirs) if side.core.rank in each]
    side.devices.seen_by(number, readers)
    mutual = {rank: address for rank, address in seen.items() if rank in readers}
    return mutual, all(len(each) == parent.size - 1 for each in theirs)
