"""Layouts, and the rounds of messages from one to another: against NumPy, and proved by the simulator."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from blocks import MESHES, values
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from hetcoll.errors import ArgumentError, BufferTypeError
from hetcoll.plan import reshard, spread
from hetcoll.plan.algorithms.p2p import p2p
from hetcoll.plan.layout import Box, Layout, extents, first_of, volume, within
from hetcoll.plan.near import nested
from hetcoll.plan.reshard import BATCH, Message, Move, Piece, Round
from hetcoll.plan.simulator import check
from hetcoll.plan.spread import GRAIN
from hetcoll.plan.topology import RankInfo, Topology
from hetcoll.types import DType


@st.composite
def layouts(draw: Any, shape: tuple[int, ...], size: int) -> Layout:
    mesh = draw(st.sampled_from([mesh for mesh in MESHES if math.prod(mesh) <= size]))
    ranks = draw(st.permutations(range(size)))[: math.prod(mesh)]
    dims = st.sampled_from([None, *range(len(shape))])
    cuts = tuple(draw(dims) for _ in mesh)
    return Layout(shape, tuple(ranks), mesh, cuts, draw(st.sampled_from([(), tuple(reversed(range(len(mesh))))])))


def hosts(*names: str, islands: tuple[tuple[int, ...], ...] | None = None) -> Topology:
    """A rank on each of these."""
    return Topology(tuple(RankInfo(rank, name) for rank, name in enumerate(names)), asked=islands)


@st.composite
def topologies(draw: Any, size: int) -> Topology:
    """On up to three hosts, as up to three islands."""
    numbers = [draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)) for _ in range(2)]
    islands = [tuple(rank for rank in range(size) if numbers[1][rank] == at) for at in range(3)]
    return hosts(*map(str, numbers[0]), islands=tuple(filter(None, islands)))


@st.composite
def exchanges(draw: Any) -> tuple[Topology, tuple[Move, ...]]:
    size, moves = draw(st.integers(1, 8)), []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype = draw(st.sampled_from([DType.INT32, DType.UINT8]))
        moves.append(Move(draw(layouts(shape, size)), draw(layouts(shape, size)), dtype))
    return draw(topologies(size)), tuple(moves)


def lacked(topology: Topology, moves: Sequence[Move]) -> Counter[str]:
    """By host, the bytes of different elements that its ranks want and none of them holds."""
    found: Counter[str] = Counter()
    for source, target, dtype in moves:
        for ranks in topology.hosts:
            wanted = np.zeros(source.shape, bool)
            for boxes, value in ((target.boxes, True), (source.boxes, False)):
                for rank in boxes.keys() & set(ranks):
                    wanted[where(boxes[rank], tuple((0, extent) for extent in source.shape))] = value
            found[topology.ranks[ranks[0]].host] += int(wanted.sum()) * dtype.itemsize
    return found


def where(box: Box, whole: Box) -> Any:
    """The index of a part in the block `whole`."""
    return (..., *(slice(begin, end) for begin, end in within(box, whole)))


def plans_of(rounds: Sequence[Round]) -> list[Any]:
    """A round's messages as the group of each rank, in the order in which it is told to send and receive them."""
    return [
        p2p(
            len(rounds),
            rank,
            [message.target for message in mine.messages if message.source == rank],
            [message.source for message in mine.messages if message.target == rank],
        )
        for rank, mine in enumerate(rounds)
    ]


def between(mine: Round, source: int, target: int) -> list[Message]:
    return [each for each in mine.messages if (each.source, each.target) == (source, target)]


@settings(max_examples=examples(140))
@given(exchanges(), st.sampled_from([1, 20, GRAIN]), st.sampled_from([1, 40, BATCH]))
def test_every_element_comes_once_and_from_where_it_was(
    exchange: tuple[Topology, tuple[Move, ...]], grain: int, batch: int
) -> None:
    """And over the network between hosts only what no rank of a host holds, once."""
    (topology, moves), crossed = exchange, Counter[str]()
    size, host = topology.size, [info.host for info in topology.ranks]
    held = [values(number, move.source) for number, move in enumerate(moves)]
    wanted = [values(number, move.target) for number, move in enumerate(moves)]
    got = [{rank: np.full(each.shape, -1) for rank, each in blocks.items()} for blocks in wanted]

    def deliver(piece: Piece, reads: list[Any], there: str) -> None:
        number, source, target, box = piece
        move = moves[number]
        whole = getattr(move, there).boxes[source]
        taken = reads[number][source][where(box, whole)]
        into = got[number][target][where(box, move.target.boxes[target])]
        assert (into == -1).all(), "written twice"
        into[...] = taken

    grains = (patch.object(module, "GRAIN", grain) for module in (reshard, spread))
    with next(grains), next(grains), patch.object(reshard, "BATCH", batch):
        every = [reshard.schedule(moves, rank, nested(topology)) for rank in range(size)]
    assert len({len(each) for each in every}) == 1
    for rounds in zip(*every, strict=True):
        plans = plans_of(rounds)
        check(plans)
        sent = [message for rank, mine in enumerate(rounds) for message in mine.messages if message.source == rank]
        for source, target in product(range(size), repeat=2):
            assert between(rounds[source], source, target) == between(rounds[target], source, target)
        for message in sent:
            assert len({moves[piece.array].dtype for piece in message.pieces}) == 1
            if host[message.source] != host[message.target]:
                crossed[host[message.target]] += bytes_of(message, moves)
        # What is passed on was there when the round began.
        before = [{rank: each.copy() for rank, each in blocks.items()} for blocks in got]
        for message in sent:
            for piece in message.pieces:
                deliver(piece, *((before, "target") if message.passed_on else (held, "source")))
        for piece in (piece for mine in rounds for piece in mine.copies):
            deliver(piece, held, "source")
    for found, right in zip(got, wanted, strict=True):
        for rank, each in right.items():
            np.testing.assert_array_equal(found[rank], each)
    assert +crossed == +lacked(topology, moves)


def bytes_of(message: Message, moves: Sequence[Move]) -> int:
    return sum(volume(piece.box) * moves[piece.array].dtype.itemsize for piece in message.pieces)


@settings(max_examples=examples(55))
@given(st.data())
def test_what_lies_in_one_piece(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    box = tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape)
    box = tuple((a, max(b, a + 1)) if a < n else (n - 1, n) for (a, b), n in zip(box, shape, strict=True))
    whole = np.arange(math.prod(shape)).reshape(shape)
    view = whole[where(box, tuple((0, n) for n in shape))]
    assert first_of(box, shape) == (view.flat[0] if view.flags.c_contiguous else None)


def sent_by(moves: tuple[Move, ...], ranks: int | Topology, number: int) -> Counter[tuple[int, int]]:
    """Bytes that go over each edge in a round; among so many ranks of one host, or those."""
    found: Counter[tuple[int, int]] = Counter()
    size, groups = (ranks, tuple(range(ranks))) if isinstance(ranks, int) else (ranks.size, nested(ranks))
    for rank in range(size):
        for message in reshard.schedule(moves, rank, groups)[number].messages:
            if message.source == rank:
                found[rank, message.target] += bytes_of(message, moves)
    return found


def test_whoever_holds_a_block_sends_a_part_of_it() -> None:
    """Four trainers in two replicas, two servers with half each: all eight links carry as much."""
    trainers = Layout((512, 1024), (0, 1, 2, 3), (2, 2), (None, 0))
    servers = Layout((512, 1024), (4, 5), (2,), (1,))
    assert sent_by((Move(trainers, servers, DType.FLOAT32),), 6, 0) == {
        (source, target): 512 * 1024 * 4 // 8 for source in range(4) for target in (4, 5)
    }


def test_small_arrays_come_from_whoever_has_least_to_send() -> None:
    replicas, one = Layout((100,), (0, 1, 2, 3), (4,), (None,)), Layout((100,), (4,), (1,), (0,))
    edges = sent_by((Move(replicas, one, DType.FLOAT32),) * 8, 5, 0)
    assert edges == {(source, 4): 2 * 400 for source in range(4)}
    kinds = (DType.FLOAT64, DType.INT8, DType.INT8, DType.INT8)  # by bytes
    few = tuple(Move(Layout((100,), (0, 1), (2,), (None,)), Layout((100,), (2,), (), ()), kind) for kind in kinds)
    assert sent_by(few, 3, 0) == {(0, 2): 800, (1, 2): 300}


def test_more_ranks_than_hold_a_block_pass_it_on() -> None:
    """One trainer, four servers that want all: it sends all once, and they give each other their parts."""
    trainer, servers = Layout((4096, 256), (0,), (1,), (0,)), Layout((4096, 256), (1, 2, 3, 4), (4,), (None,))
    moves, part = (Move(trainer, servers, DType.FLOAT32),), 4096 * 256
    assert sent_by(moves, 5, 0) == {(0, target): part for target in range(1, 5)}
    assert sent_by(moves, 5, 1) == {(a, b): part for a, b in product(range(1, 5), repeat=2) if a != b}


TWO_HOSTS, THREE_HOSTS = hosts(*"AAAABBBB"), hosts(*"AAAABBBBCCCC")
MIB = 1 << 20


def moved(source: Layout, target: Layout) -> tuple[Move, ...]:
    return (Move(source, target, DType.FLOAT32),)


def shards(ranks: range) -> Layout:
    """16 MiB over ranks, by rows."""
    return Layout((2048, 2048), tuple(ranks), (len(ranks),), (0,))


def whole(ranks: range) -> Layout:
    return Layout((2048, 2048), tuple(ranks), (len(ranks),), (None,))


def test_to_another_host_all_of_it_goes_once_between_as_many_ranks_as_there_are() -> None:
    """Each trainer's 4 MiB to the four servers of the other host, who tell each other there."""
    moves = moved(shards(range(4)), whole(range(4, 8)))
    assert sent_by(moves, TWO_HOSTS, 0) == {(a, b): MIB for a in range(4) for b in range(4, 8)}
    assert sent_by(moves, TWO_HOSTS, 1) == {(a, b): 4 * MIB for a, b in product(range(4, 8), repeat=2) if a != b}


def test_what_a_host_has_does_not_come_from_another_one() -> None:
    """Replicas on two hosts, each sharded inside: either host has all of it."""
    replicas = Layout((2048, 2048), tuple(range(8)), (2, 4), (None, 0))
    moves = moved(replicas, whole(range(8)))
    edges = sent_by(moves, TWO_HOSTS, 0) + sent_by(moves, TWO_HOSTS, 1)
    assert {(a // 4, b // 4) for a, b in edges} == {(0, 0), (1, 1)}
    assert sum(edges.values()) == 2 * 4 * 12 * MIB


def test_tensor_parallel_servers_of_two_hosts_get_what_these_lack_once() -> None:
    """As FSDP holds it to four columns on each host: each host has half, and lacks half."""
    moves = moved(shards(range(8)), Layout((2048, 2048), tuple(range(8)), (2, 4), (None, 1)))
    across = Counter[tuple[int, int]]()
    for number in (0, 1):
        for (a, b), nbytes in sent_by(moves, TWO_HOSTS, number).items():
            across[a, b] += nbytes * (a // 4 != b // 4)
    far = {(a, b): MIB // 2 for a, b in product(range(8), repeat=2) if a // 4 != b // 4}
    assert +across == far


def test_hosts_that_lack_it_pass_it_on_to_each_other() -> None:
    """The host that has it sends it once in all, by all its ranks; every rank of the others sends and gets a share."""
    moves = moved(shards(range(4)), whole(range(4, 12)))
    assert sent_by(moves, THREE_HOSTS, 0) == {(a, b): MIB // 2 for a in range(4) for b in range(4, 12)}
    assert sent_by(moves, THREE_HOSTS, 1) == {pair: 2 * MIB for a in range(4, 8) for pair in ((a, a + 4), (a + 4, a))}
    assert sent_by(moves, THREE_HOSTS, 2) == {
        (a, b): 4 * MIB for a, b in product(range(4, 12), repeat=2) if a != b and a // 4 == b // 4
    }


def test_small_arrays_cross_once_and_each_by_another_rank() -> None:
    one, many = Layout((100,), (0,), (), ()), Layout((100,), tuple(range(4, 8)), (4,), (None,))
    moves = moved(one, many) * 4
    assert sent_by(moves, TWO_HOSTS, 0) == {(0, b): 400 for b in range(4, 8)}
    assert sent_by(moves, TWO_HOSTS, 1) == {(a, b): 400 for a, b in product(range(4, 8), repeat=2) if a != b}


def test_hosts_that_hold_it_send_as_much_as_each_other() -> None:
    """Three ranks on one and one on another."""
    topology = hosts(*"AAABCCCC")
    moves = moved(whole(range(4)), whole(range(4, 8)))
    edges = sent_by(moves, topology, 0)
    sent = [sum(nbytes for (a, _), nbytes in edges.items() if a == rank) for rank in range(4)]
    assert sum(sent) == 16 * MIB
    assert sent[3] == 8 * MIB


def test_islands_of_a_host_are_told_once_each() -> None:
    """Ranks 0 and 1 are an island, so are 2 and 3, on the one host; 4 and 5 on the other."""
    topology = hosts(*"AAAABB", islands=((0, 1), (2, 3), (4, 5)))
    assert nested(topology) == (((0, 1), (2, 3)), (4, 5))
    moves = moved(whole(range(4, 6)), whole(range(4)))
    edges = [sent_by(moves, topology, number) for number in range(4)]
    assert edges[0] == {(4 + rank % 2, rank): 4 * MIB for rank in range(4)}
    assert edges[1] == {pair: 4 * MIB for a in (0, 1) for pair in ((a, a + 2), (a + 2, a))}
    assert edges[2] == {pair: 8 * MIB for a in (0, 2) for pair in ((a, a + 1), (a + 1, a))}
    assert edges[3] == {}


def test_a_part_is_of_a_dimension_that_is_long_enough() -> None:
    """Two rows are no four parts."""
    trainer, servers = Layout((2, 1 << 19), (0,), (1,), (0,)), Layout((2, 1 << 19), (1, 2, 3, 4), (4,), (None,))
    assert sent_by((Move(trainer, servers, DType.FLOAT32),), 5, 0) == {(0, target): 1 << 20 for target in range(1, 5)}


def test_batches_are_of_what_a_rank_holds_or_wants() -> None:
    halves, whole = Layout((1000,), (0, 1), (2,), (0,)), Layout((1000,), (2,), (), ())
    moves = (Move(halves, halves, DType.UINT8),) * 4 + (Move(halves, whole, DType.UINT8),) * 3
    with patch.object(reshard, "BATCH", 1000):
        rounds = reshard.schedule(moves, 0, (0, 1, 2))
    pieces = [[*mine.copies, *(each for message in mine.messages for each in message.pieces)] for mine in rounds]
    numbers = [sorted({each.array for each in some}) for some in pieces if some]
    assert numbers == [[0, 1], [2, 3], [4], [5], [6]]


def test_all_stages_of_a_pipeline_send_at_once() -> None:
    """Of which each holds its own layers, and the servers want a part of each."""
    servers = Layout((64, 100), (4, 5, 6, 7), (4,), (0,))
    moves = tuple(
        Move(Layout((64, 100), (stage,), (), ()), servers, DType.INT8) for stage in range(4) for _ in range(6)
    )
    with patch.object(reshard, "BATCH", 2 * 6400):
        every = [reshard.schedule(moves, rank, tuple(range(8))) for rank in range(4)]
    assert [len(rounds) for rounds in every] == [3 + 1] * 4
    for rounds in list(zip(*every, strict=True))[:3]:
        assert [sum(len(message.pieces) for message in mine.messages) for mine in rounds] == [2 * 4] * 4


def test_what_crosses_does_so_while_what_came_before_is_passed_on() -> None:
    """Three batches to another host: in the second round it gets the second one, and passes on the first."""
    moves = moved(shards(range(4)), whole(range(4, 8))) * 3
    with patch.object(reshard, "BATCH", 16 * MIB):
        rounds = reshard.schedule(moves, 5, nested(TWO_HOSTS))
    told = [
        {(mine.passed_on, mine.source // 4, piece.array) for mine in each.messages for piece in mine.pieces}
        for each in rounds
    ]
    assert told == [
        {(False, 0, 0)},
        {(False, 0, 1), (True, 1, 0)},
        {(False, 0, 2), (True, 1, 1)},
        {(True, 1, 2)},
        set(),
    ]


def test_arrays_of_two_kinds_of_float8_share_no_message() -> None:
    one, other = Layout((9,), (0,), (), ()), Layout((9,), (1,), (), ())
    for dtype, messages in ((DType.FLOAT8_E4M3FN, 3), (DType.INT8, 1)):
        assert len(reshard.schedule((Move(one, other, dtype),) * 3, 0, (0, 1))[0].messages) == messages


def test_equal_layouts_are_told_in_equal_words() -> None:
    plain = Layout((4, 4), (0, 1), (2, 1), (0, None), (1, 0))
    fields = plain.shape, plain.ranks, plain.mesh, plain.cuts, plain.order
    odd = Layout(*(tuple(each if each is None else np.int64(each) for each in field) for field in fields))
    assert (odd, repr(odd)) == (plain, repr(plain))
    with pytest.raises(BufferTypeError, match=r"ranks: wanted whole numbers, got \(0, 1.5\)"):
        Layout((4, 4), (0, 1.5), (2,), (0,))  # type: ignore[arg-type]


def test_what_is_there_already_is_not_sent() -> None:
    ranks = Layout((64, 64), (0, 1, 2, 3), (4,), (0,))
    whole = Layout((64, 64), (0, 1, 2, 3), (4,), (None,))
    assert not sent_by((Move(ranks, ranks, DType.FLOAT32), Move(whole, ranks, DType.FLOAT32)), 4, 0)


def test_long_pieces_travel_as_they_are_and_short_ones_together() -> None:
    one, other = Layout((1024, 1024), (0,), (), ()), Layout((1024, 1024), (1,), (), ())
    small = [Layout((7,), (rank,), (), ()) for rank in (0, 1)]
    moves = (Move(one, other, DType.INT8), Move(*small, DType.INT8), Move(*small, DType.INT8))
    messages = reshard.schedule(moves, 1, (0, 1))[0].messages
    assert [[piece.array for piece in message.pieces] for message in messages] == [[0], [1, 2]]


def test_shapes() -> None:
    layout = Layout((5, 3), (4, 1, 0), (3,), (0,))
    assert [layout.shape_on(rank) for rank in range(5)] == [(1, 3), (2, 3), (0,), (0,), (2, 3)]
    both = Layout((7, 5), (6, 2, 4, 0, 1, 3), (2, 3), (1, 0), (1, 0))
    assert {rank: both.shape_on(rank) for rank in both.ranks} == {
        rank: extents(box) for rank, box in both.boxes.items()
    }
    assert both.first == both.boxes[6]
    assert [extents(box) for box in Layout((2,), (0, 1, 2, 3), (4,), (0,)).boxes.values()] == [(1,), (1,), (0,), (0,)]


@pytest.mark.parametrize(
    ("ranks", "mesh", "cuts", "error"),
    [
        ((0, 1, 1), (3,), (0,), "wanted each rank once"),
        ((0, -1), (2,), (0,), "wanted each rank once"),
        ((0, 1), (3,), (0,), "wanted 3 ranks"),
        ((), (0,), (0,), "wanted 0 ranks"),
        ((0, 1), (2,), (0, None), "wanted 1, one for each dimension of the mesh, got 2"),
        ((0, 1), (2,), (2,), r"of shape \(5, 3\), got 2"),
        ((0, 1), (2,), (-1,), "got -1"),
    ],
)
def test_layouts_that_there_are_not(ranks: Any, mesh: Any, cuts: Any, error: str) -> None:
    with pytest.raises(ArgumentError, match=error):
        Layout((5, 3), ranks, mesh, cuts)


def test_an_order_is_of_the_dimensions_of_the_mesh_and_is_told() -> None:
    for order in ((0,), (0, 0), (1, 2)):
        with pytest.raises(ArgumentError, match=r"order: wanted each dimension of the mesh once, got \("):
            Layout((4, 4), (0, 1), (2, 1), (0, 1), order)
    told = "(4, 4) over ranks (0, 1) as (2, 1): [Shard(0), Replicate()]"
    assert str(Layout((4, 4), (0, 1), (2, 1), (0, None))) == told
    assert str(Layout((4, 4), (0, 1), (2, 1), (0, None), (1, 0))) == f"{told} in the order (1, 0)"
