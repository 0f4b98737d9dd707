"""The plan's form: cutting buffers into units, and the records that the engine reads."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetcoll import _native
from hetcoll.plan import HEADER, MAGIC, STEP, Buf, Builder, Op, Plan, Span, Step, cut
from hetcoll.types import Collective

counts = st.integers(0, 1 << 62)
units = st.integers(1, 4096)


@given(counts, units)
@settings(deadline=None)
def test_cut_covers_the_buffer_in_even_parts(count: int, units: int) -> None:
    offsets = cut(count, units)
    sizes = [b - a for a, b in itertools.pairwise(offsets)]
    assert (offsets[0], offsets[-1], len(sizes)) == (0, count, units)
    assert set(sizes) <= {count // units, -(-count // units)}


@given(st.integers(0, 1 << 40), st.integers(1, 64), st.integers(1, 64))
@settings(deadline=None)
def test_cut_of_a_multiple_is_a_refinement(count: int, units: int, factor: int) -> None:
    assert cut(count, units * factor)[::factor] == cut(count, units)


@given(counts, units, st.data())
@settings(deadline=None)
def test_cut_is_the_engines_cut(count: int, units: int, data: st.DataObject) -> None:
    unit = data.draw(st.integers(0, units))
    assert _native.cut_offset(count, units, unit) == cut(count, units)[unit]


def test_builder_drops_what_lanes_order_anyway() -> None:
    b = Builder()
    first = b.add(Op.RECV, 0, dst=Span(Buf.RECV, 0), peer=1)
    other = b.add(Op.RECV, 1, dst=Span(Buf.RECV, 1), peer=2)
    last = b.add(Op.SEND, 0, src=Span(Buf.RECV, 0), peer=1, deps=[other, None, first, other])
    assert b.steps[last].deps == (other,)


def test_units_of_scratch_are_copies_of_a_buffer() -> None:
    plan = Plan(Collective.ALLGATHER, "x", 3, 0, 1, 3, (), scratch_copies=2, scratch_like=Buf.RECV)
    assert [plan.units(buf) for buf in Buf] == [1, 3, 6]


def example() -> Plan:
    b = Builder()
    got = b.add(Op.RECV_REDUCE, 1, src=Span(Buf.SEND, 2, 3), dst=Span(Buf.SCRATCH, 4, 3), peer=5, channel=1)
    scaled = b.add(Op.SCALE, 3, dst=Span(Buf.SCRATCH, 4, 3), deps=[got])
    b.add(Op.SEND, 0, src=Span(Buf.SCRATCH, 4, 3), peer=6, deps=[scaled, got])
    return Plan(Collective.REDUCE_SCATTER, "x", 7, 2, 7, 1, tuple(b.steps), 0, 1, Buf.SEND, 2)


def test_encoded_records_hold_every_field() -> None:
    plan = example()
    data = plan.encode()
    head = HEADER.unpack_from(data)
    assert head == (MAGIC, 4, Collective.REDUCE_SCATTER, 3, 3, 7, 1, 1, Buf.SEND, plan.credits)
    rows = [STEP.unpack_from(data, HEADER.size + i * STEP.size) for i in range(3)]
    tail = data[HEADER.size + 3 * STEP.size :]
    deps = struct.unpack(f"<{len(tail) // 4}I", tail)
    decoded = []
    for op, lane, channel, peer, sb, ss, sc, db, ds, dc, first, number in rows:
        src = None if sb < 0 else Span(Buf(sb), ss, sc)
        dst = None if db < 0 else Span(Buf(db), ds, dc)
        decoded.append(Step(Op(op), lane, src, dst, peer, channel, deps[first : first + number]))
    assert tuple(decoded) == plan.steps
    assert deps == (0, 0, 1)


def test_dump_names_steps_spans_peers_and_deps() -> None:
    lines = example().dump().splitlines()
    assert lines[0] == "reduce_scatter by x: rank 2 of 7"
    assert lines[1] == "  0  1:recv_reduce send[2:5] -> scratch[4:7] peer 5 channel 1"
    assert lines[3] == "  2  0:send scratch[4:7] peer 6 after 0,1"


def test_edges_are_pairs_of_peer_and_channel() -> None:
    assert example().edges == {(5, 1), (6, 0)}


@pytest.mark.parametrize("kind", list(Collective))
def test_v_forms_run_the_plans_of_their_plain_form(kind: Collective) -> None:
    assert kind.plain.label == kind.label.removesuffix("v")
