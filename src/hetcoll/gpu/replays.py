"""HETCOLL_CHECK of calls that graphs capture: each replay is checked on the GPUs, and no host waits for it.

With the call are captured kernels (`folds`) that fold what this rank gives before it and what it has got after it, a
collective by which the ranks tell each other of their folds, and a kernel that compares them. Before a message goes
another one that says what its sender has. What a comparison finds it writes to pinned memory, for `look`, which the
GPU's watchdog calls each second and the communicator's next call does. A replay is not a call: there is nobody to whom
an input that is not finite could be an error, so that is logged.

A call that is sampled has the same around it once, on its own stream, or behind that where it is asynchronous: what
waits for the call waits for its check. There an input that is not finite is nobody's error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

import hetcoll._native as _native

from ..calls import RECV, SEND, Call, allgather, alltoall
from ..calls.buffers import Buffer
from ..calls.messages import Message, SendRecv
from ..health.diagnosis import Diagnosis
from ..health.status_report import call_site
from ..health.verdicts import Kind
from ..runtime.checksums import Fold, foldable
from ..runtime.crosscheck import given, shares
from ..runtime.executor import Snapshot
from ..types import COMPLEX, CUT, FLOATS, FROM_ROOT, REDUCING, TO_ROOT, Collective, DType, ReduceOp
from ..vendors.devices.base import URGENT
from ..vendors.devices.kernels import table
from ..work import Work
from .folds import RECORD, Executor, Folds, Parts
from .lanes import SideStream
from .snapshot import GpuSnapshot

log = logging.getLogger("hetcoll")

_CAME, _FOLDED = 1, 2  # Wrong of checks.h
_LANE_BYTES = 16


class Ranks(Protocol):
    """Who takes part (`links.wiring.Wiring`)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Captured:
    """A call that a graph has, or one that is sampled, and what is found of it. `own` is what this rank gives."""

    what: str
    site: str
    own: Buffer | None
    found: table.Findings
    fold: str = ""
    """The name of a reduction that has folds."""
    number: str = "uint64"
    """What a fold is."""
    source: int = -1
    """Of a message that this rank receives."""
    said: bool = False
    once: Folds | None = None
    """What a call that is sampled gives back once that is found."""


class Replays:
    """Of one communicator's calls on this rank's GPU. Graphs may be replayed until it is closed."""

    def __init__(
        self,
        path: Executor,
        queue: _native.DeviceQueue,
        calls: _native.GpuCalls,
        diagnosis: Diagnosis,
        ranks: Ranks,
    ) -> None:
        self._path, self._folds, self._diagnosis = path, Folds(path, queue, calls), diagnosis
        self._rank, self._size = ranks.rank, ranks.size
        self._lock = threading.Lock()  # of what follows
        self._captured: list[_Captured] = []
        self._side: SideStream | None = None  # of asynchronous calls that are sampled

    # Capturing, and sampling.

    def collective(self, call: Call, stream: object, start: Callable[[Call], Work]) -> Work:
        """See `runtime.executor.Replays`."""
        handle = self._path.stream(stream, sendbuf=call.send, recvbuf=call.recv)
        return self._around(call, handle, start, self._folds, None)

    def once(self, call: Call, stream: object, async_op: bool, start: Callable[[Call, object], Work]) -> Work:
        """See `runtime.executor.Replays`."""
        handle = self._path.stream(stream, sendbuf=call.send, recvbuf=call.recv)
        self.look()  # which gives memory back
        with self._path.device.active():
            handle = self._behind(handle) if async_op else handle
            folds = self._folds.once()
            return self._around(call, handle, lambda each: start(each, handle), folds, folds)

    def copied(self, call: Call, stream: object, start: Callable[[object], Work]) -> tuple[Work, Snapshot]:
        """See `runtime.executor.Replays`."""
        handle, result = self._path.stream(stream, sendbuf=call.send, recvbuf=call.recv), call.recv or call.send
        assert result is not None, "it has memory on a GPU"
        with self._path.device.active():
            on = self._behind(handle)
            return start(on), GpuSnapshot(self._path.spares, result, on)

    def _behind(self, stream: int) -> int:
        """The stream of asynchronous calls that are sampled."""
        self._side = self._side or SideStream(self._path.device, URGENT)
        return self._side.behind(stream)

    def _around(self, call: Call, handle: int, start: Callable[[Call], Work], folds: Folds, once: Folds | None) -> Work:
        rank, size = self._rank, self._size
        source, result = given(call, rank), call.recv or call.send
        assert result is not None, "it has memory on a GPU"
        like, (gives, gets) = result, shares(call, size)
        own = None if source is None else folds.parts(source, gives)
        gets_it = call.collective not in TO_ROOT or call.root == rank
        same, cut = call.collective is Collective.ALLREDUCE, call.collective.plain in CUT
        fold = Fold(call, size, 1) if call.collective in REDUCING and foldable(call) else None
        op = table.MOVED if fold is None else ReduceOp.AVG if fold.rounds else call.op
        stride, rows = 1 + same, size if cut else 1  # a row of two records has the result's, too
        mine, theirs = folds.records(rows * stride), folds.records(size * stride)
        made = mine + RECORD if same else folds.records(len(gets))
        if own is not None:
            folds.fold(own, op, mine, handle)
        work = start(call)
        if gets_it:
            folds.fold(folds.parts(result, gets), op, made, handle)
        mine_and_theirs = _row(mine, rows * stride, like, handle), _row(theirs, size * stride, like, handle)
        telling = (alltoall if cut else allgather)(rank, size, *mine_and_theirs)
        start(replace(telling, label=f"HETCOLL_CHECK after {call.describe()}"))
        compares = gets_it and (fold is not None or call.collective not in REDUCING)
        arguments = table.Comparison(
            given=theirs, made=made, same=same, stride=stride, rank=rank, size=size,
            root=call.root if call.collective in FROM_ROOT else size, parts=len(gets) if compares else 0,
            op=op if compares else table.MOVED, **_given(own, mine), **self._bounds(call, fold, gets[0]),
        )  # fmt: skip
        captured = _Captured(call.describe(), call_site(), source, folds.findings(), said=once is not None, once=once)
        if fold is not None:
            captured.fold, captured.number = call.op.label, _number(call, fold)
        if once is not None:
            captured.own = None  # which would keep the program's memory
        self._compare(captured, call.dtype, arguments, handle, folds)
        return work

    def _bounds(self, call: Call, fold: Fold | None, elements: int) -> dict[str, Any]:
        """What the comparison of sums needs."""
        if fold is None or not fold.rounds:
            return {}
        packs = -(-elements * call.dtype.itemsize // _LANE_BYTES)
        numbers = -(-packs // table.FOLD_LANES) * (_LANE_BYTES // call.dtype.itemsize)
        slope, floor = fold.bounds(numbers * (2 if call.dtype in COMPLEX else 1))
        whole = call.dtype not in FLOATS | COMPLEX
        divisor = self._size if call.op is ReduceOp.AVG else 1
        return {"slope": slope, "floor": floor, "most": fold.most, "whole": whole, "divisor": divisor}

    def exchange(self, ends: SendRecv, stream: object, start: Callable[[SendRecv], Work]) -> Work:
        """See `runtime.executor.Replays`."""
        handle = self._path.stream(stream, sendbuf=ends.send, recvbuf=ends.recv)
        rows = {message.kind: self._row_of(message, handle) for message in ends.halves}
        start(SendRecv(rows.get(SEND), ends.dest, rows.get(RECV), ends.source))
        work = start(ends)
        for message in ends.halves:
            self._check(message, rows[message.kind], handle)
        return work

    def exchange_all(self, messages: Sequence[Message], start: Callable[[Sequence[Message]], None]) -> None:
        """See `runtime.executor.Replays`."""
        handle = self._path.stream(None, **{f"buf of message {i}": m.buffer for i, m in enumerate(messages)})
        rows = [Message(m.kind, self._row_of(m, handle), m.peer) for m in messages]
        start([each for both in zip(rows, messages, strict=True) for each in both])  # others may have them one by one
        for row, message in zip(rows, messages, strict=True):
            self._check(message, row.buffer, handle)

    def _row_of(self, message: Message, stream: int) -> Buffer:
        """What its sender says of a message, or the place for it."""
        buffer, at = message.buffer, self._folds.records(1)
        if message.kind == SEND:
            self._folds.fold(self._folds.parts(buffer, [buffer.count]), table.MOVED, at, stream)
        return _row(at, 1, buffer, stream)

    def _check(self, message: Message, row: Buffer, stream: int) -> None:
        """Of a message that comes: whether it is what its sender says. Of another one: whether it is finite."""
        kind, buffer, peer = message
        folds, parts = self._folds, self._folds.parts(buffer, [buffer.count])
        captured = _Captured(str(message), call_site(), None if kind == RECV else buffer, folds.findings())
        arguments = table.Comparison(given=row.ptr, size=1, op=table.MOVED)
        if kind == RECV:
            arguments.made, arguments.parts, captured.source = folds.records(1), 1, peer
            folds.fold(parts, table.MOVED, arguments.made, stream)
        else:
            arguments.own, arguments.own_parts, arguments.offsets = row.ptr, 1, parts.offsets
        self._compare(captured, buffer.dtype, arguments, stream, folds)

    def _compare(
        self, captured: _Captured, dtype: DType, arguments: table.Comparison, stream: int, folds: Folds
    ) -> None:
        folds.compare(dtype, arguments, captured.found, stream)
        with self._lock:
            self._captured.append(captured)

    # Looking.

    def look(self) -> None:
        """Tell of what has been found since the last look. What is wrong fails the communicator."""
        if not self._captured:
            return
        wrong = []
        with self._lock:
            for each in self._captured:
                if each.found.odd_replay and not each.said:
                    each.said = True
                    self._tell_odd(each)
                if each.found.wrong_replay:
                    wrong.append(self._spell(each))
            over = [each for each in self._captured if each.once is not None and each.found.replays]
            self._captured = [each for each in self._captured if each not in over and not each.found.wrong_replay]
            for each in over:
                assert each.once is not None, "it is sampled"
                each.once.close()
        if wrong:
            log.error("%s", "; ".join(wrong))
            self._diagnosis.post(Kind.CORRUPT, -1, wrong[0])

    def _tell_odd(self, each: _Captured) -> None:
        assert each.own is not None, "it is what this rank gives"
        log.error(
            "HETCOLL_CHECK: the input of %s on rank %d is not finite %s: %d of %d elements, the first at %d",
            each.what, self._rank, _replay(each, each.found.odd_replay), each.found.odd, each.own.count,
            each.found.first,
        )  # fmt: skip

    def _spell(self, each: _Captured) -> str:
        found, when = each.found, _replay(each, each.found.wrong_replay)
        if each.source >= 0:
            text = f"rank {self._rank} received something else than rank {each.source} sent {when}: {each.what}"
            return f"HETCOLL_CHECK: {text}"
        if found.what == _CAME:
            problem = f" on rank {self._rank} is wrong: what rank {found.where} gave came changed"
        elif found.what == _FOLDED:
            got, wanted = (np.uint64(bits).view(each.number) for bits in (found.got, found.wanted))
            every = f"every {table.FOLD_LANES}th {_LANE_BYTES} bytes from byte {_LANE_BYTES * found.where} on"
            folds = f"{each.fold} of {every} is {got}, and of what the ranks gave {wanted}"
            problem = f" on rank {self._rank} is wrong: {folds}"
        else:
            problem = f" is not the same everywhere: rank {self._rank} and rank {found.where} hold different ones"
        return f"HETCOLL_CHECK: the result of {each.what}{problem}, {when}"

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            self._captured = []
            self._folds.close()
            if self._side is not None:
                self._side.close()


def _row(at: int, records: int, like: Buffer, stream: int) -> Buffer:
    """Records as the communicator sends them."""
    return Buffer(at, records * table.RECORD_WORDS, DType.UINT64, None, like.device, like.index, stream)


def _given(own: Parts | None, at: int) -> dict[str, int]:
    return {} if own is None else {"own": at, "own_parts": len(own.elements), "offsets": own.offsets}


def _number(call: Call, fold: Fold) -> str:
    """What a word of a fold is in `checks.h`."""
    if fold.rounds or call.dtype in FLOATS:
        return "float64"
    return "int64" if call.dtype.label.startswith("int") else "uint64"


def _replay(each: _Captured, number: int) -> str:
    if each.once is not None:
        return f"called at {each.site}"
    return f"in replay {number} of the graph that captured it at {each.site}"
