"""Runs collective calls on a rank and checks everything that can be seen: result, input, and the memory around them."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from reference import LOGICAL, Array, Case, alltoallv_counts, expected, make_input, numpy_type

import hetcoll
from hetcoll.types import REDUCING, DType, ReduceOp, supports

_FENCE = 192  # bytes before and after each buffer
_FILL = 0xA5


class Fenced:
    """An array with memory around it that nobody may touch."""

    def __init__(self, count: int, dtype: str, shift: int = 0) -> None:
        kind = numpy_type(dtype)
        self._begin = _FENCE + shift * kind.itemsize
        self._end = self._begin + count * kind.itemsize
        self._raw = np.full(self._end + _FENCE, _FILL, np.uint8)
        self.array: Array = self._raw[self._begin : self._end].view(kind)

    def become(self, other: Fenced) -> None:
        """What `other` is, which is as long."""
        self._raw[:] = other._raw

    def check(self) -> None:
        assert (self._raw[: self._begin] == _FILL).all(), "the memory before a buffer was written"
        assert (self._raw[self._end :] == _FILL).all(), "the memory behind a buffer was written"


def variant(comm: hetcoll.Communicator, **changes: Any) -> hetcoll.Communicator:
    """A communicator of the same ranks with another configuration; made once, then kept. Collective."""
    kept = vars(comm).setdefault("variants", {})
    key = tuple(sorted(changes.items()))
    if not changes:
        return comm
    if key not in kept:
        name = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
        config = dataclasses.replace(comm._config, **changes)
        kept[key] = type(comm)(comm._session, name, comm.rank, comm.size, config, 30.0)
    found: hetcoll.Communicator = kept[key]
    return found


def truths(counts: tuple[int, ...]) -> list[Case]:
    """Calls whose result is 0 or 1 whatever one rank gives: every type that has logical reductions."""
    return [
        Case(kind.label, dtype.label, count, op, inplace=inplace, counts=(count,) if kind.plain is not kind else ())
        for kind in REDUCING
        for dtype in DType
        for op in LOGICAL
        for count in counts
        for inplace in (False, True)
        if supports(dtype, ReduceOp[op.upper()])
    ]


def run_cases(
    comm: hetcoll.Communicator, cases: Sequence[Case], config: dict[str, Any], async_op: bool = False
) -> list[bytes]:
    """Each case twice, since a second call takes another way; a digest of what came out of each."""
    chosen = variant(comm, **config)
    return [run_case(chosen, case, async_op=async_op) for case in cases]


def run_case(comm: hetcoll.Communicator, case: Case, *, async_op: bool = False) -> bytes:
    digest = b""
    for turn in range(2):
        try:
            digest += _run_once(comm, dataclasses.replace(case, seed=2 * case.seed + turn), async_op)
        except AssertionError as error:
            raise AssertionError(f"{case} on rank {comm.rank} of {comm.size}, call {turn + 1}: {error}") from error
    return digest


def run_mixed(comm: hetcoll.Communicator, cases: Sequence[Case], config: dict[str, Any]) -> None:
    """Each case in place on every second rank, and then on the others."""
    chosen = variant(comm, **config)
    for case in cases:
        for turn in range(2):
            run_case(chosen, dataclasses.replace(case, inplace=comm.rank % 2 == turn))


def run_sequence(comm: hetcoll.Communicator, calls: Sequence[tuple[Case, bool]]) -> None:
    """These calls, of which those that are asynchronous are waited for at the end, the first one last."""
    waiting = []
    for number, (case, async_op) in enumerate(calls):
        end = _begin(comm, case, async_op)
        if async_op:
            waiting.append((number, case, end))
            continue
        try:
            end()
        except AssertionError as error:
            raise AssertionError(f"call {number}, {case} on rank {comm.rank} of {comm.size}: {error}") from error
    for number, case, end in reversed(waiting):
        try:
            end()
        except AssertionError as error:
            raise AssertionError(f"asynchronous call {number}, {case} on rank {comm.rank}: {error}") from error


def result_of(comm: hetcoll.Communicator, case: Case) -> bytes:
    """What one call leaves in this rank's RECV, right or wrong; nothing where it has none."""
    inputs = [make_input(case, each, comm.size) for each in range(comm.size)]
    want = expected(case, inputs, comm.rank)
    _, send, recv = _place(case, inputs[comm.rank], want, comm.rank)
    _call(comm, case, send, recv, False)
    return b"" if want is None else recv.tobytes()


def _run_once(comm: hetcoll.Communicator, case: Case, async_op: bool) -> bytes:
    return _begin(comm, case, async_op)()


class Call:
    """A call whose arrays stay while what is in them changes."""

    def __init__(self, comm: hetcoll.Communicator, case: Case) -> None:
        self._comm = comm
        self._fences, self.send, self.recv = self._fill(case)

    def _fill(self, case: Case) -> tuple[list[Fenced], Any, Any]:
        rank, size = self._comm.rank, self._comm.size
        self.case, self._inputs = case, [make_input(case, each, size) for each in range(size)]
        self._want = expected(case, self._inputs, rank)
        return _place(case, self._inputs[rank], self._want, rank)

    @property
    def arrays(self) -> list[Array]:
        return [array for array in (self.send, self.recv) if array is not None]

    def again(self, seed: int) -> None:
        """New input, and nothing received yet."""
        fresh, *_ = self._fill(dataclasses.replace(self.case, seed=seed))
        for mine, other in zip(self._fences, fresh, strict=True):
            mine.become(other)

    def begin(self, comm: hetcoll.Communicator, *, async_op: bool = False) -> hetcoll.Work:
        """`comm` has the same ranks as that of the call, and may take arrays elsewhere."""
        return _call(comm, self.case, self.send, self.recv, async_op)

    def check(self) -> bytes:
        """The result, and all that must be as it was. A digest of what came out."""
        for fence in self._fences:
            fence.check()
        _check(self.case, self._comm, self._inputs, self._want, self.send, self.recv)
        return b"" if self._want is None else zlib.crc32(self.recv.view(np.uint8)).to_bytes(4)


def _begin(comm: hetcoll.Communicator, case: Case, async_op: bool) -> Callable[[], bytes]:
    """Start a call; what it gives waits for it, checks all and returns a digest of what came out."""
    call = Call(comm, case)
    work = call.begin(comm, async_op=async_op)

    def end() -> bytes:
        work.wait()
        return call.check()

    return end


def _check(
    case: Case, comm: hetcoll.Communicator, inputs: Sequence[Array], want: Array | None, send: Any, recv: Any
) -> None:
    """The result, and that the input is as it was."""
    rank = comm.rank
    if want is None:
        return
    _compare(case, recv, want)
    if case.inplace and case.collective in ("reduce_scatter", "reduce_scatterv"):
        assert send is not None
        begin = rank * case.count if not case.counts else sum(case.counts[:rank])
        rest = np.ones(len(send), bool)
        rest[begin : begin + len(recv)] = False
        assert send[rest].tobytes() == inputs[rank][rest].tobytes(), "the rest of the input was written"
    elif send is not None and not _same_memory(case):
        assert send.tobytes() == inputs[rank].tobytes(), "the input was written"


def _same_memory(case: Case) -> bool:
    return case.inplace or case.collective == "broadcast"


def _compare(case: Case, got: Array, want: Array) -> None:
    if case.exact or case.collective in ("broadcast", "allgather", "gather", "scatter", "alltoall"):
        if got.dtype == np.bool_:  # a bool that is neither 0 nor 1 is wrong, too
            got, want = got.view(np.uint8), want.view(np.uint8)
        wrong = np.flatnonzero(got != want).tolist()
        assert not wrong, f"element {wrong[0]}: wanted {want[wrong[0]]!r}, got {got[wrong[0]]!r}; {len(wrong)} differ"
        return
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    slack = {1: 0.6, 2: 0.05, 4: 1e-5, 8: 1e-5 if got.dtype.kind == "c" else 1e-13, 16: 1e-13}[got.dtype.itemsize]
    np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=slack, atol=slack)


def _place(case: Case, mine: Array, want: Array | None, rank: int) -> tuple[list[Fenced], Any, Any]:
    """Fenced memory, and the sendbuf and recvbuf in it. What a rank does not have is None."""
    given = case.collective not in ("broadcast", "scatter") or rank == case.root
    if case.collective == "broadcast":
        fence = Fenced(case.count, case.dtype, case.shift)
        if given:
            fence.array[:] = mine
        return [fence], fence.array, fence.array
    if not case.inplace or (case.collective in ("reduce", "gather", "scatter") and rank != case.root):
        fences = []
        send = recv = None
        if given:
            fences.append(Fenced(len(mine), case.dtype, case.shift))
            send = fences[-1].array
            send[:] = mine
        if want is not None:
            fences.append(Fenced(len(want), case.dtype, case.shift // 2))
            recv = fences[-1].array
            recv.view(np.uint8)[:] = _FILL
        return fences, send, recv
    assert want is not None
    fence = Fenced(max(len(mine), len(want)), case.dtype, case.shift)
    whole = fence.array
    whole.view(np.uint8)[:] = _FILL
    if len(mine) >= len(want):
        whole[:] = mine
    part = slice(0, len(whole))
    if case.collective in ("allgather", "gather", "reduce_scatter", "scatter"):
        part = slice(rank * case.count, (rank + 1) * case.count)
    elif case.counts:
        begin = sum(case.counts[:rank])
        part = slice(begin, begin + case.counts[rank])
    if case.collective in ("allgather", "allgatherv", "gather"):
        whole[part] = mine
        return [fence], whole[part], whole
    return [fence], whole, whole[part]


def _call(comm: hetcoll.Communicator, case: Case, send: Any, recv: Any, async_op: bool) -> hetcoll.Work:
    op, root = case.op, case.root
    match case.collective:
        case "allreduce":
            return comm.allreduce(send, None if case.inplace else recv, op, async_op=async_op)
        case "allgather":
            return comm.allgather(send, recv, async_op=async_op)
        case "reduce_scatter":
            return comm.reduce_scatter(send, recv, op, async_op=async_op)
        case "broadcast":
            return comm.broadcast(send, root, async_op=async_op)
        case "reduce":
            return comm.reduce(send, None if case.inplace else recv, op, root, async_op=async_op)
        case "gather":
            return comm.gather(send, recv, root, async_op=async_op)
        case "scatter":
            return comm.scatter(send, recv, root, async_op=async_op)
        case "alltoall":
            return comm.alltoall(send, recv, async_op=async_op)
        case "alltoallv":
            counts = alltoallv_counts(case, comm.size)
            into = [row[comm.rank] for row in counts]
            return comm.alltoall(send, recv, sendcounts=counts[comm.rank], recvcounts=into, async_op=async_op)
        case "allgatherv":
            return comm.allgatherv(send, recv, case.counts, async_op=async_op)
        case "reduce_scatterv":
            return comm.reduce_scatterv(send, recv, op, counts=case.counts, async_op=async_op)
    raise AssertionError(case)
