"""The steps that calls become: pieces fit a slot, however unequal shares are, and what a library does is one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest

from hetcoll.calls import Call
from hetcoll.gpu.planner import Carrier, Choice, Mechanism
from hetcoll.gpu.plans import GpuPlans, Made
from hetcoll.plan.algorithms import find
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.ir import Buf, Op, Span, Step
from hetcoll.plan.topology import Islands
from hetcoll.types import Collective, DType

SLOT = 1 << 20  # bytes


def made(call: Call, rank: int, islands: Islands) -> Made:
    """What one of three ranks binds for a call that is a plan among `islands`."""
    found: list[Made] = []
    shared: Any = SimpleNamespace(islands=islands)
    planner: Any = SimpleNamespace(ordered=False)
    plans = GpuPlans(rank, 3, shared, SLOT, SimpleNamespace(bind=found.append), planner, planner)
    kind = call.collective.plain
    entry = ISLANDS[kind] if len(islands) < 3 else find(kind, "ring")
    plans.compile(call, Choice(Mechanism.PLAN, algorithm=entry, islands=islands))
    return found[0]


def buffer(dtype: DType, count: int) -> Any:
    return SimpleNamespace(count=count, nbytes=count * dtype.itemsize)


def gathered(dtype: DType, counts: list[int], rank: int) -> Call:
    table = (0, *accumulate(counts))
    send, recv = buffer(dtype, counts[rank]), buffer(dtype, table[-1])
    return Call(Collective.ALLGATHERV, send, recv, dtype, -1, recv.nbytes, recv_table=table)


def scattered(dtype: DType, counts: list[int], rank: int) -> Call:
    table = (0, *accumulate(counts))
    send, recv = buffer(dtype, table[-1]), buffer(dtype, counts[rank])
    return Call(Collective.REDUCE_SCATTERV, send, recv, dtype, -1, send.nbytes, send_table=table)


def elements(each: Made, step: Step) -> int:
    """Of a message."""
    plan, span = each.plan, step.src if step.op is Op.SEND else step.dst
    assert span is not None
    assert each.points is not None
    buf = plan.scratch_like if span.buf is Buf.SCRATCH else span.buf
    start = span.start % plan.units(buf)
    points, table = each.points[buf], each.tables[buf]
    return table[points.index(start + span.count)] - table[points.index(start)]


@pytest.mark.parametrize("dtype", [DType.UINT8, DType.FLOAT32, DType.COMPLEX128], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("islands", [((0, 1), (2,)), ((0,), (1,), (2,))], ids=["2 and 1", "alone"])
@pytest.mark.parametrize("call", [gathered, scattered])
def test_every_message_fits_a_slot_and_has_one_length(
    call: Callable[..., Call], islands: Islands, dtype: DType
) -> None:
    counts = [0, 3_000_001 // dtype.itemsize, 1]
    sent, received = defaultdict[tuple[int, int], list[int]](list), defaultdict[tuple[int, int], list[int]](list)
    for rank in range(3):
        each = made(call(dtype, counts, rank), rank, islands)
        for step in each.plan.steps:
            if step.peer >= 0:
                ways, way = (sent, (rank, step.peer)) if step.op is Op.SEND else (received, (step.peer, rank))
                ways[way].append(elements(each, step))
    assert sent == received
    assert SLOT // 2 < max(n for lengths in sent.values() for n in lengths) * dtype.itemsize <= SLOT


def test_what_a_library_does_alone_is_not_cut() -> None:
    each = made(gathered(DType.FLOAT32, [3_000_001, 1, 70_001], 1), 1, ((0, 1, 2),))
    assert each.plan.steps == ISLANDS[Collective.ALLGATHER].build(3, 1).steps


@pytest.mark.parametrize(("sends", "recvs"), [(1, 2), (2, 1), (0, 1), (1, 0)])
def test_messages_by_a_library_are_rows_of_one_step(sends: int, recvs: int) -> None:
    """Of a row, what there is none of is None: all that is sent first, then all that is received."""
    found: list[Made] = []
    shared: Any = SimpleNamespace(islands=((0, 1),))
    nothing: Any = None
    plans = GpuPlans(0, 2, shared, SLOT, SimpleNamespace(bind=found.append), nothing, nothing)
    plans.messages(DType.INT8, [(1, 5)] * sends, [(1, 5)] * recvs, lambda *_: Carrier.LIBRARY, apart=True)
    (step,) = found[0].plan.steps
    assert step.local is not None
    rows = max(sends, recvs)
    halves = [
        part
        for buf, count in ((Buf.SEND, sends), (Buf.RECV, recvs))
        for row in range(rows)
        for part in (None, Span(buf, row) if row < count else None)
    ]
    assert list(step.local.parts) == halves
