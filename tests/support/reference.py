"""What collectives must give, worked out by NumPy alone; and a plain run of plans, step by step, element by element."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hetcoll.plan.ir import Buf, Op, Plan, Span, cut
from hetcoll.plan.simulator.network import network
from hetcoll.plan.simulator.progress import run

Array = NDArray[Any]
LOGICAL = ("land", "lor", "lxor")
_OF_BOOL = {"sum": "lor", "max": "lor", "bor": "lor", "prod": "land", "min": "land", "band": "land", "bxor": "lxor"}
_BINARY = {
    "sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One collective call. `count` is what each rank gives or gets of it; `counts` makes it a v-collective.

    `shift` moves buffers by so many elements off their alignment.
    """

    collective: str
    dtype: str = "float32"
    count: int = 1
    op: str = "sum"
    root: int = 0
    inplace: bool = False
    counts: tuple[int, ...] = ()
    seed: int = 0
    shift: int = 0
    exact: bool = True  # values whose reduction does not depend on the order


def numpy_type(label: str) -> np.dtype[Any]:
    """The NumPy type of that name, or ml_dtypes'."""
    return np.dtype(getattr(ml_dtypes, label, None) or label)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether it is a float of any kind: NumPy says V for those of ml_dtypes."""
    return dtype.kind in "fV"


def make_input(case: Case, rank: int, size: int) -> Array:
    """What `rank` gives to the call: other values for other ranks, seeds, types and reductions."""
    return make_values(case, input_count(case, rank, size), rank, size)


_REPEATS = 65521  # a prime: a chunk that comes from the wrong place has other values
_BLOCK = 1 << 15  # elements that are reduced at a time: what is in between stays in the processor's cache


def make_values(case: Case, count: int, rank: int, size: int) -> Array:
    """`count` elements; with `case.exact` such that their reduction over `size` ranks is exact in their type. Long
    arrays repeat themselves: random numbers took most of the time."""
    if count > _REPEATS:
        return np.resize(make_values(case, _REPEATS, rank, size), count)
    dtype, op = numpy_type(case.dtype), case.op
    random = np.random.default_rng([case.seed, rank, zlib.crc32(f"{case.collective} {case.dtype} {op}".encode())])
    if dtype == np.bool_:
        return random.integers(0, 2, count).astype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        low, high = int(info.min), int(info.max)
        if op == "avg":
            low, high = -(high // size) if low < 0 else 0, high // size
        values = random.integers(low, high, count, dtype, endpoint=True)
        return values * random.integers(0, 2, count, dtype) if op in LOGICAL else values
    if not case.exact:
        values = random.standard_normal(count)
        if dtype.kind == "c":
            return (values + 1j * random.standard_normal(count)).astype(dtype)
        return values.astype(dtype)
    if op == "prod":
        return random.choice([1, -1, 2, 1j] if dtype.kind == "c" else [1, -1, 2, 0.5], count).astype(dtype)
    if op in ("max", "min"):
        return random.standard_normal(count).astype(dtype)
    most = max(1, (8 if dtype.itemsize == 1 else 128) // size)
    whole = random.integers(-most, most + 1, count)
    return (whole + 1j * whole[::-1] if dtype.kind == "c" else whole).astype(dtype)


def input_count(case: Case, rank: int, size: int) -> int:
    """How many elements `rank` gives."""
    match case.collective:
        case "allgatherv":
            return case.counts[rank]
        case "reduce_scatterv":
            return sum(case.counts)
        case "alltoallv":
            return sum(alltoallv_counts(case, size)[rank])
        case "reduce_scatter" | "scatter" | "alltoall":
            return case.count * size
        case _:
            return case.count


def alltoallv_counts(case: Case, size: int) -> list[list[int]]:
    """``[a][b]``: how many elements rank a sends to rank b. About a third of them are 0."""
    random = np.random.default_rng([case.seed, case.count, size])
    counts = random.integers(0, case.count + 1, (size, size)) * (random.random((size, size)) < 0.7)
    return [[int(n) for n in row] for row in counts]


def reduced(op: str, parts: Sequence[Array]) -> Array:
    """All parts in one, in their type. AVG of whole numbers truncates; bool has NumPy's meaning."""
    begins = range(0, len(parts[0]), _BLOCK)
    if len(begins) < 2:
        return _reduced(op, parts)
    return np.concatenate([_reduced(op, [part[at : at + _BLOCK] for part in parts]) for at in begins])


def _reduced(op: str, parts: Sequence[Array]) -> Array:
    dtype = parts[0].dtype
    if dtype == np.bool_:
        op = _OF_BOOL.get(op, op)
    if op in LOGICAL:
        truth = np.array([part != 0 for part in parts])
        whole: Array = {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}[op].reduce(truth)
        return whole.astype(dtype)
    if dtype.kind not in "iub":
        parts = [part.astype(np.complex128 if dtype.kind == "c" else np.float64) for part in parts]
    total: Array = reduce(_BINARY[op], parts)
    if op == "avg":
        if dtype.kind in "iu":
            total = np.sign(total) * (np.abs(total) // len(parts))
        else:  # each part of a complex number by itself, since NumPy's quotient of two is rounded more often
            total = (total.view(np.float64) / len(parts)).view(total.dtype)
    return total.astype(dtype)


def expected(case: Case, inputs: Sequence[Array], rank: int) -> Array | None:
    """What `rank` must hold in the end; None where it gets nothing."""
    size, n = len(inputs), case.count
    match case.collective:
        case "allreduce":
            return reduced(case.op, inputs)
        case "reduce":
            return reduced(case.op, inputs) if rank == case.root else None
        case "reduce_scatter":
            return reduced(case.op, inputs)[rank * n : (rank + 1) * n]
        case "reduce_scatterv":
            begin = sum(case.counts[:rank])
            return reduced(case.op, inputs)[begin : begin + case.counts[rank]]
        case "broadcast":
            return inputs[case.root]
        case "allgather" | "allgatherv":
            return np.concatenate(inputs)
        case "gather":
            return np.concatenate(inputs) if rank == case.root else None
        case "scatter":
            return inputs[case.root][rank * n : (rank + 1) * n]
        case "alltoall":
            return np.concatenate([each[rank * n : (rank + 1) * n] for each in inputs])
        case "alltoallv":
            offsets = [[0, *accumulate(row)] for row in alltoallv_counts(case, size)]
            return np.concatenate([each[o[rank] : o[rank + 1]] for each, o in zip(inputs, offsets, strict=True)])
    raise AssertionError(case)


# A plain run of plans.


def blank_output(case: Case, size: int) -> Array:
    """RECV as the plan sees it, also on ranks that have none."""
    whole = case.collective in ("allgather", "gather", "alltoall")
    return np.zeros(case.count * (size if whole else 1), numpy_type(case.dtype))


def pairwise(op: str, a: Array, b: Array) -> Array:
    """One reduction of two arrays as the library defines it: 8- and 16-bit floats in float32, rounded once."""
    dtype = a.dtype
    if is_float(dtype) and dtype.itemsize < 4:
        a, b = a.astype(np.float32), b.astype(np.float32)
    return reduced("sum", [a, b]).astype(dtype) if dtype == np.bool_ else _BINARY[op](a, b).astype(dtype)


class _Rank:
    """One rank's memory: SEND and RECV as the caller sees them, and scratch."""

    def __init__(self, plan: Plan, send: Array, recv: Array) -> None:
        self.plan = plan
        like = send if plan.scratch_like is Buf.SEND else recv
        self.memory = {
            Buf.SEND: send,
            Buf.RECV: recv,
            Buf.SCRATCH: np.zeros(len(like) * plan.scratch_copies, like.dtype),
        }

    def at(self, span: Span | None) -> Array:
        """The elements of a span."""
        assert span is not None
        plan, buf = self.plan, span.buf
        like = plan.scratch_like if buf is Buf.SCRATCH else buf
        units = plan.units(like)
        offsets = cut(len(self.memory[like]), units)
        copy, first = divmod(span.start, units)
        base = copy * len(self.memory[like])
        return self.memory[buf][base + offsets[first] : base + offsets[first + span.count]]


def interpret(plans: Sequence[Plan], sends: Sequence[Array], recvs: Sequence[Array], op: str) -> None:
    """Run the plans over these buffers, one step after another. They are changed as the engine would change them."""
    ranks = [_Rank(*each) for each in zip(plans, sends, recvs, strict=True)]
    messages: dict[int, Array] = {}
    for node in run(plans, network(plans), max(plan.credits for plan in plans)):
        me, step = ranks[node.rank], node.step
        if step.op is Op.SEND:
            messages[node.id] = me.at(step.src).copy()
            continue
        target = me.at(step.dst)
        match step.op:
            case Op.RECV:
                assert node.other is not None
                target[:] = messages.pop(node.other.id)
            case Op.RECV_REDUCE:
                assert node.other is not None
                target[:] = pairwise(op, me.at(step.src), messages.pop(node.other.id))
            case Op.COPY:
                target[:] = me.at(step.src)
            case Op.REDUCE:
                target[:] = pairwise(op, target, me.at(step.src))
            case Op.SCALE:
                target[:] = _scaled(target, len(plans))


def _scaled(values: Array, size: int) -> Array:
    dtype = values.dtype
    if dtype.kind in "iu":
        return (np.sign(values) * (np.abs(values) // size)).astype(dtype)
    wide = values.astype(np.float32) if is_float(dtype) and dtype.itemsize < 4 else values
    return (wide / wide.dtype.type(size)).astype(dtype)
