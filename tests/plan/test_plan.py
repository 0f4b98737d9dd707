"""The plan's form: cutting buffers into units, and the records that the engine reads."""

from __future__ import annotations

import itertools
import random
import struct
import subprocess
import sys
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import DEADLINE

from hetcoll import _native
from hetcoll.errors import ArgumentError
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.plan.ir import HEADER, MAGIC, SPAN, STEP, Buf, Builder, Local, Op, Plan, Span, Spans, Step, cut
from hetcoll.plan.steps import fresh
from hetcoll.types import Collective

counts = st.integers(0, 1 << 62)
units = st.integers(1, 4096)


@given(counts, units)
def test_cut_covers_the_buffer_in_even_parts(count: int, units: int) -> None:
    offsets = cut(count, units)
    sizes = [b - a for a, b in itertools.pairwise(offsets)]
    assert (offsets[0], offsets[-1], len(sizes)) == (0, count, units)
    assert set(sizes) <= {count // units, -(-count // units)}


@given(st.integers(0, 1 << 40), st.integers(1, 64), st.integers(1, 64))
def test_cut_of_a_multiple_is_a_refinement(count: int, units: int, factor: int) -> None:
    assert cut(count, units * factor)[::factor] == cut(count, units)


@given(counts, units, st.data())
def test_cut_is_the_engines_cut(count: int, units: int, data: st.DataObject) -> None:
    unit = data.draw(st.integers(0, units))
    assert _native.cut_offset(count, units, unit) == cut(count, units)[unit]


def test_builder_drops_what_lanes_order_anyway() -> None:
    b = Builder()
    first = b.add(Op.RECV, 0, dst=Span(Buf.RECV, 0), peer=1)
    other = b.add(Op.RECV, 1, dst=Span(Buf.RECV, 1), peer=2)
    last = b.add(Op.SEND, 0, src=Span(Buf.RECV, 0), peer=1, deps=[other, None, first, other])
    assert b.steps[last].deps == (other,)


def drawn(few: int) -> list[Plan]:
    """Plans of every algorithm whose lanes have more steps than so few."""
    hosts, ways = ((0, 1), (2, 3, 5), (4, 6, 7)), ("root", "scale", "compress", "ordered", "stretches")
    entries = [entry for table in ALGORITHMS.values() for entry in table.values() if entry.supports(8)]
    with mock.patch("hetcoll.plan.ir.FEW", few):
        return [
            entry.build(8, 3, hosts=over, **how)
            for entry in entries
            for over in (None, hosts)
            for way in ways
            for how in [dict[str, Any]({way: True})]
            if (way != "compress" or (entry.compresses and over)) and (way != "ordered" or entry.ordered)
        ]


def test_steps_drawn_at_once_are_those_drawn_one_by_one() -> None:
    """And so are a plan's points, edges, lanes and records, which are made of columns."""
    for many, single in zip(drawn(1), drawn(1 << 20), strict=True):
        assert many == single
        assert (many.points(), many.edges, many.lanes) == (single.points(), single.edges, single.lanes)
        assert (many.encode(), many.encode(many.points())) == (single.encode(), single.encode(single.points()))


def test_deps_of_many_steps_are_those_of_single_ones() -> None:
    rng, span = random.Random(7), Span(Buf.RECV, 0)
    for _ in range(100):
        one, many = Builder(), Builder()
        for b in (one, many):
            for lane in (0, 1, 2, 3, 0, 1, 2):
                b.add(Op.COPY, lane, span, span)
        for n in range(2, 6):
            lane, waits = rng.randrange(4), [[rng.randrange(-1, 7) for _ in range(n)] for _ in range(rng.randrange(4))]
            for deps in zip(*waits, strict=True) if waits else [()] * n:
                one.add(Op.COPY, lane, span, span, deps=[d for d in deps if d >= 0])
            with mock.patch("hetcoll.plan.ir.FEW", 1):
                spans = Spans(Buf.RECV, np.zeros(n, np.int64))
                many.add_many(Op.COPY, lane, spans, span, deps=[np.array(row) for row in waits])
        assert tuple(many.steps) == tuple(one.steps)


def test_steps_are_drawn_while_somebody_looks_at_the_frames() -> None:
    """A report of what a thread does holds its frames, whose variables then live on after their functions return."""
    frames: list[FrameType] = []
    sys.setprofile(lambda frame, event, _: frames.append(frame) if event == "return" else None)
    try:
        plans = drawn(1)
    finally:
        sys.setprofile(None)
    assert any(frame.f_code is fresh.__code__ for frame in frames)
    assert plans == drawn(1)


def test_the_engines_records_hold_no_lane_that_is_too_large() -> None:
    b = Builder()
    b.add(Op.COPY, 256, Span(Buf.SEND, 0), Span(Buf.RECV, 0))
    with pytest.raises(ArgumentError, match="lanes and channels of 0 to 255 in a plan, got lane 256"):
        Plan(Collective.ALLREDUCE, "x", 1, 0, 1, 1, b.steps).encode()


def test_units_of_scratch_are_copies_of_a_buffer() -> None:
    plan = Plan(Collective.ALLGATHER, "x", 3, 0, 1, 3, (), scratch_copies=2, scratch_like=Buf.RECV)
    assert [plan.units(buf) for buf in Buf] == [1, 3, 6]


def example() -> Plan:
    b = Builder()
    got = b.add(Op.RECV_REDUCE, 1, src=Span(Buf.SEND, 2, 3), dst=Span(Buf.SCRATCH, 4, 3), peer=5, channel=1)
    scaled = b.add(Op.SCALE, 3, dst=Span(Buf.SCRATCH, 4, 3), deps=[got])
    b.add(Op.SEND, 0, src=Span(Buf.SCRATCH, 4, 3), peer=6, deps=[scaled, got], compressed=True)
    parts = (None, Span(Buf.SEND, 2, 4))
    b.add(Op.LOCAL, 2, dst=Span(Buf.RECV, 0), local=Local(Collective.SCATTER, 2, parts), deps=[got])
    islands = ((0, 1, 3), (4, 5, 6), (1, 2))
    return Plan(Collective.REDUCE_SCATTER, "x", 7, 2, 7, 1, tuple(b.steps), 0, 1, Buf.SEND, 2, 1, islands)


def test_encoded_records_hold_every_field() -> None:
    plan = example()
    data = plan.encode()
    head = HEADER.unpack_from(data)
    assert head == (MAGIC, 4, Collective.REDUCE_SCATTER, 4, 4, 7, 1, 1, Buf.SEND, 0, plan.credits, 2, 2)
    rows = [STEP.unpack_from(data, HEADER.size + i * STEP.size) for i in range(4)]
    tail = data[HEADER.size + 4 * STEP.size :]
    deps = struct.unpack_from("<4I", tail)
    parts = [span(*SPAN.unpack_from(tail, 16 + i * SPAN.size)) for i in range(2)]
    assert len(tail) == 16 + 2 * SPAN.size
    decoded = []
    for op, lane, channel, compressed, peer, sb, ss, sc, db, ds, dc, first, number, part, many in rows:
        local = None
        if op == Op.LOCAL:
            root = plan.island[peer]
            local, channel, peer = Local(Collective(channel), root, tuple(parts[part : part + many])), 0, -1
        ends = span(sb, ss, sc), span(db, ds, dc)
        after = deps[first : first + number]
        decoded.append(Step(Op(op), lane, *ends, peer, channel, after, local, bool(compressed)))
    assert tuple(decoded) == plan.steps
    assert deps == (0, 0, 1, 0)


def span(buf: int, start: int, count: int) -> Span | None:
    return None if buf < 0 else Span(Buf(buf), start, count)


def test_dump_names_steps_spans_peers_and_deps() -> None:
    lines = example().dump().splitlines()
    assert lines[0] == "reduce_scatter by x: rank 2 of 7"
    assert lines[1] == "  0  1:recv_reduce send[2:5] -> scratch[4:7] peer 5 channel 1"
    assert lines[3] == "  2  0:send scratch[4:7] peer 6 compressed after 0,1"
    assert lines[4] == "  3  2:local scatter root 2 of -,send[2:6] -> recv[0:1] after 0"


def test_edges_are_pairs_of_peer_and_channel() -> None:
    assert example().edges == {(5, 1), (6, 0)}


@pytest.mark.parametrize("kind", list(Collective))
def test_v_forms_run_the_plans_of_their_plain_form(kind: Collective) -> None:
    assert kind.plain.label == kind.label.removesuffix("v")


DRAWING = """
import sys
from hetcoll.plan.algorithms import ALGORITHMS
from hetcoll.plan.algorithms.among import among
from hetcoll.plan.algorithms.atoms import AMONG
from hetcoll.plan.algorithms.hosts import among_hosts, runs_among
from hetcoll.plan.algorithms.islands import ISLANDS
from hetcoll.plan.order import Frame, ordered
from hetcoll.plan.pieces import Cut

drawn = 0
for kinds, islands in ((4, 4, 4, 4), (24, 2)), ((2, 2, 2, 2), (3, 1, 1, 3)):
    for sizes in (kinds, islands):
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        hosts = tuple(tuple(range(a, b)) for a, b in zip(ends, ends[1:]))
        n = ends[-1]
        for kind, table in ALGORITHMS.items():
            flat = [entry for entry in table.values() if entry.supports(n)]
            some = [x for x in table.values() if kind in AMONG and not x.equal and x.supports(len(hosts))]
            led = [among_hosts(entry, led=led) for entry in some if runs_among(entry) for led in (False, True)]
            inside = [among(entry) for entry in some] + ([ISLANDS[kind]] if kind in ISLANDS else [])
            for entry in flat + led + inside:
                for compress in (False, True)[: 1 + entry.compresses]:
                    plan = entry.build(n, n - 1, hosts=hosts, compress=compress)
                    plan.encode(plan.points())
                    drawn += 1
                    if entry in inside and not compress:
                        ordered(Frame(plan, entry, hosts), Cut((0, 1, 2), 1, 1))
print(drawn, sorted(name for name in sys.modules if name.startswith("numpy.ma.")))
"""


def test_to_draw_plans_imports_nothing() -> None:
    """np.unique imports masked arrays, which took more time than the first plan."""
    found = subprocess.run(
        [sys.executable, "-c", DRAWING], stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE
    )
    drawn, imported = found.stdout.split(" ", 1)
    assert int(drawn) > 100
    assert imported.strip() == "[]"
