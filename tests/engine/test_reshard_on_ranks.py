"""Arrays that change their layout on real ranks: over shared memory and TCP, and what is refused on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from blocks import in_batches_of, random_layout, values
from cases import variant
from ranks import Ranks

import hetcoll
import hetcoll.plan.reshard as plan
from hetcoll.errors import ArgumentError, BufferTypeError, HetcollError
from hetcoll.plan.layout import Layout
from hetcoll.runtime.reshard import Item, reshard

Pool = Callable[..., Ranks]
SIZE = 5
TRAINERS, SERVERS = (0, 1, 2), (3, 4)


def move(comm: hetcoll.Communicator, pairs: list[tuple[Layout, Layout]], dtypes: list[str], into: bool) -> None:
    """All at once; twice, since a second call takes another way. `into`: arrays for the results are given."""
    kinds = [np.dtype(getattr(ml_dtypes, dtype, None) or dtype) for dtype in dtypes]
    rank, items, wanted = comm.rank, [], []
    for number, ((source, target), kind) in enumerate(zip(pairs, kinds, strict=True)):
        held = values(number, source, kind.name)
        mine = held[rank].copy() if rank in held else np.empty(0, kind)
        right = values(number, target, kind.name).get(rank, np.empty(0, kind))
        items.append(Item(mine, source, target, np.zeros_like(right, order="C") if into else None))
        wanted.append(right)
    before = [item.array.copy() for item in items]
    for _ in range(2):
        for found, right, item in zip(reshard(comm._core, lambda: items), wanted, items, strict=True):
            assert found is item.out or not into
            assert (found.dtype, found.shape) == (right.dtype, right.shape)
            assert found.tobytes() == right.tobytes()
    assert all(old.tobytes() == item.array.tobytes() for old, item in zip(before, items, strict=True))


def move_all(comm: hetcoll.Communicator, config: dict[str, Any], batch: int = plan.BATCH) -> None:
    with in_batches_of(batch):
        _move_all(comm, config)


def _move_all(comm: hetcoll.Communicator, config: dict[str, Any]) -> None:
    comm, rng = variant(comm, **config), np.random.default_rng(7)
    for turn in range(12):
        shapes = [tuple(map(int, rng.integers(0, 9, rng.integers(0, 4)))) for _ in range(4)]
        pairs = [(random_layout(rng, shape, SIZE), random_layout(rng, shape, SIZE)) for shape in shapes]
        move(comm, pairs, ["float32", "bfloat16", "float32", "bool"], turn % 2 == 0)
    grown = [
        (Layout((1000, 700), TRAINERS, (3,), (0,)), Layout((1000, 700), SERVERS, (2,), (1,))),  # packed here, or there
        (Layout((1000, 700), TRAINERS, (3,), (0,)), Layout((1000, 700), (1, 4), (2,), (0,))),  # as it lies
        (Layout((700, 1000), TRAINERS, (3,), (None,)), Layout((700, 1000), SERVERS, (2,), (None,))),
        (Layout((1000, 700), (4,), (), ()), Layout((1000, 700), (0, 1, 2, 3), (4,), (None,))),  # passed on
        (Layout((9, 7), TRAINERS, (3,), (1,)), Layout((9, 7), (3, 1, 0, 2), (2, 2), (None, 0))),
    ]
    for into in (False, True):
        move(comm, grown, ["float32", "float32", "int16", "float32", "float64"], into)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_from_any_layout_to_any(pool: Pool, transport: str) -> None:
    pool(SIZE).run(move_all, {} if transport == "auto" else {"transport": transport}, timeout=60)


def test_in_many_batches(pool: Pool) -> None:
    pool(SIZE).run(move_all, {}, 1000, timeout=60)


def check_many(comm: hetcoll.Communicator) -> str:
    """Rank 0 gives ranks 1 and 2 an array each, the former with a NaN, in two batches of one reshard."""
    comm = variant(comm, check="1")
    pairs = [Layout((1000,), (0,), (), ()), *(Layout((1000,), (rank,), (), ()) for rank in (1, 2))]
    arrays = [np.ones(pairs[0].shape_on(comm.rank), np.float32) for _ in range(2)]
    arrays[0][:1] = np.nan
    items = [Item(array, pairs[0], pairs[to]) for array, to in zip(arrays, (1, 2), strict=True)]
    with in_batches_of(1):
        try:
            found = reshard(comm._core, lambda: items)
        except ArgumentError as error:
            return str(error)
        assert comm.rank != 2 or (found[1] == 1).all()
    return "moved"


def test_a_nan_of_one_batch_keeps_nobody_from_the_next(pool: Pool) -> None:
    told = pool(SIZE).run(check_many, timeout=60)
    assert ["not finite" in each for each in told] == [True, True, False, False, False]
    assert told[2:] == ["moved"] * 3


def across(comm: hetcoll.Communicator, source: Layout, target: Layout, hosts: str) -> int:
    """Bytes that this rank sends to other hosts while an array changes its layout."""
    held = values(0, source, "float32").get(comm.rank, np.empty(0, np.float32)).copy()
    item = Item(held, source, target)
    comm.barrier()
    before = comm._core.engine.sent()
    found = reshard(comm._core, lambda: [item])[0]
    after = comm._core.engine.sent()
    assert found.tobytes() == values(0, target, "float32").get(comm.rank, np.empty(0, np.float32)).tobytes()
    comm.barrier()
    return sum(after[peer] - before[peer] for peer, host in enumerate(hosts) if host != hosts[comm.rank])


MIB = 1 << 20
WHOLE = Layout((2048, 512), (0, 1, 2, 3), (4,), (None,))
FROM_HALF = Layout((2048, 512), (0, 1), (2,), (0,))


@pytest.mark.parametrize(
    ("source", "target", "shares"),
    [
        (Layout((2048, 512), (0, 1, 2, 3), (4,), (0,)), WHOLE, [1, 1, 1, 1]),  # each host lacks half
        (Layout((2048, 512), (0, 1, 2, 3), (2, 2), (None, 0)), WHOLE, [0, 0, 0, 0]),  # none of it
        (FROM_HALF, WHOLE, [2, 2, 0, 0]),  # one of them all of it
        (FROM_HALF, Layout((2048, 512), (0, 1, 2, 3), (2, 2), (None, 1)), [2, 2, 0, 0]),
    ],
)
def test_between_hosts_goes_only_what_one_lacks_and_once(
    pool: Pool, source: Layout, target: Layout, shares: list[int]
) -> None:
    """4 MiB; `shares`: MiB that each rank sends. With them goes what ranks tell each other before, if anything."""
    hosts = "aabb"
    sent = pool(4, HETCOLL_HOST_ID=tuple(hosts)).run(across, source, target, hosts, timeout=60)
    assert [nbytes // MIB for nbytes in sent] == shares
    assert sum(sent) - sum(shares) * MIB < 16 << 10


def nothing(comm: hetcoll.Communicator) -> list[Any]:
    return reshard(comm._core, list)


def test_nothing_to_move(pool: Pool) -> None:
    assert pool(SIZE).run(nothing) == [[]] * SIZE


ROWS, COLUMNS = Layout((6, 4), TRAINERS, (3,), (0,)), Layout((6, 4), SERVERS, (2,), (1,))


def right(rank: int) -> Item:
    return Item(np.ones(ROWS.shape_on(rank), np.float32), ROWS, COLUMNS)


def give_nothing_of_another_shape(comm: hetcoll.Communicator) -> None:
    item = right(comm.rank)
    if comm.rank == 4:  # which holds none of it
        item = item._replace(array=np.ones((0, 4), np.float32))
    assert (reshard(comm._core, lambda: [item])[0] == 1).all()


def test_nothing_has_any_shape(pool: Pool) -> None:
    pool(SIZE).run(give_nothing_of_another_shape)


def another_shape(rank: int) -> Item:
    return right(rank)._replace(target=Layout((4, 6), SERVERS, (2,), (1,)))


def a_stranger(rank: int) -> Item:
    return right(rank)._replace(target=Layout((6, 4), (3, SIZE), (2,), (1,)))


def a_rank_twice(rank: int) -> Item:
    return right(rank)._replace(target=Layout((6, 4), (3, 3), (2,), (1,)))


def one_wrong_block(rank: int) -> Item:
    return right(rank)._replace(array=np.ones((3, 4), np.float32)) if rank == 1 else right(rank)


def one_that_holds_nothing_gives_some(rank: int) -> Item:
    return right(rank)._replace(array=np.ones(2, np.float32)) if rank == 4 else right(rank)


def one_gives_nothing(rank: int) -> Item:
    return right(rank)._replace(array=np.ones((0, 4), np.float32)) if rank == 1 else right(rank)


def one_strided(rank: int) -> Item:
    return right(rank)._replace(array=np.ones((4, 2), np.float32).T) if rank == 0 else right(rank)


def one_other_type(rank: int) -> Item:
    return right(rank)._replace(array=right(rank).array.astype(np.int32)) if rank == 2 else right(rank)


def one_other_layout(rank: int) -> Item:
    return right(rank)._replace(target=Layout((6, 4), (4, 3), (2,), (1,))) if rank == 3 else right(rank)


def another_out(rank: int) -> Item:
    return right(rank)._replace(out=np.ones((6, 3) if rank == 3 else COLUMNS.shape_on(rank), np.float32))


def another_type_of_out(rank: int) -> Item:
    return right(rank)._replace(out=np.ones(COLUMNS.shape_on(rank), np.float64))


def out_over_the_source(rank: int) -> Item:
    array = np.ones(ROWS.shape_on(rank), np.float32)
    return Item(array, ROWS, ROWS, array)


def one_of_a_kind_that_nobody_makes(rank: int) -> Item:
    """Its result has no memory of its own."""
    item = right(rank)
    return item._replace(array=memoryview(item.array)) if rank == 1 else item


def one_that_raises_without_words(rank: int) -> Item:
    if rank == 2:
        raise MemoryError
    return right(rank)


def one_that_raises(rank: int) -> Item:
    return right(rank) if rank != 2 else right(rank)._replace(source={}["rows"])


def attempt(comm: hetcoll.Communicator, make: Callable[[int], Item]) -> tuple[type, str]:
    """The error of what `make` gives for the second of two arrays. The communicator stays whole; nothing was sent."""
    before = comm.counters()["messages"]
    try:
        reshard(comm._core, lambda: [right(comm.rank), make(comm.rank)])
    except (HetcollError, KeyError, MemoryError) as error:
        assert comm.counters()["messages"] - before <= 2 * SIZE, "more than ranks tell each other was sent"
        found = reshard(comm._core, lambda: [right(comm.rank)])[0]
        assert found.shape == COLUMNS.shape_on(comm.rank)
        assert (found == 1).all()
        return type(error), str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("make", "kind", "own", "others"),
    [
        (another_shape, ArgumentError, r"array 1: wanted one shape, got \(6, 4\) and \(4, 6\)", None),
        (a_stranger, ArgumentError, r"array 1: wanted meshes of ranks below 5, got \(3, 5\)", None),
        (a_rank_twice, ArgumentError, r"mesh: wanted each rank once, got \(3, 3\)", None),
        (one_wrong_block, ArgumentError, r"array 1: wanted shape \(2, 4\) of .* on rank 1, got \(3, 4\)", 1),
        (one_that_holds_nothing_gives_some, ArgumentError, r"wanted shape \(0,\) of .* on rank 4, got \(2,\)", 4),
        (one_gives_nothing, ArgumentError, r"array 1: wanted shape \(2, 4\) of .* on rank 1, got \(0, 4\)", 1),
        (one_strided, BufferTypeError, "array 1: wanted a C-contiguous array", 0),
        (another_out, ArgumentError, r"array 1: out: wanted shape \(6, 2\) of .* on rank 3, got \(6, 3\)", 3),
        (another_type_of_out, BufferTypeError, "out: wanted float32 on cpu, got float64 on cpu", None),
        (out_over_the_source, ArgumentError, "out: wanted other memory than the source's", -1),
        (one_of_a_kind_that_nobody_makes, BufferTypeError, "wanted an array, since none like a memoryview can be", 1),
        (one_that_raises, KeyError, "rows", 2),
        (one_that_raises_without_words, MemoryError, r"^$|MemoryError\(\)", 2),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(
    pool: Pool, make: Callable[[int], Item], kind: type, own: str, others: int | None
) -> None:
    """`others`: the only rank that gives what is wrong, which the others name; -1 for some, the first of them."""
    for rank, (got, text) in enumerate(pool(SIZE).run(attempt, make)):
        if others is None or rank == others or (others == -1 and rank in ROWS.ranks):
            assert issubclass(got, kind)
            assert_found(own, text)
        else:
            assert got is ArgumentError
            assert_found(f"reshard: rank {max(others, 0)}: .*{own}", text)


def assert_found(pattern: str, text: str) -> None:
    with pytest.raises(ArgumentError, match=pattern):
        raise ArgumentError(text)


def over_others(comm: hetcoll.Communicator) -> list[str]:
    """Two arrays of which one's result is the other's source, or both results are one; rank 1 holds and wants both."""
    layouts = (ROWS, Layout((6, 4), TRAINERS, (3,), (None,)))
    a, b, c = (np.ones((6, 4), np.float32) for _ in range(3))
    mine = ROWS.shape_on(comm.rank)
    found = []
    for outs in ((b, c), (c, a), (c, c)):
        items = []
        for held, out in zip((a, b), outs, strict=True):
            empty = np.empty(0, np.float32)
            part = held[: mine[0]] if comm.rank in TRAINERS else empty
            items.append(Item(part, *layouts, out if comm.rank in TRAINERS else None))
        with pytest.raises(ArgumentError) as caught:
            reshard(comm._core, lambda items=items: items)  # type: ignore[misc]
        found.append(str(caught.value))
    return found


def test_results_lie_over_nothing_else(pool: Pool) -> None:
    """They would be right or wrong by who comes first."""
    texts = [f"array {one}: out: wanted other memory than array {two}'s" for one, two in ((0, 1), (1, 0), (1, 0))]
    for rank, found in enumerate(pool(SIZE).run(over_others)):
        assert found == [text if rank in TRAINERS else f"reshard: rank 0: {text}" for text in texts]


@pytest.mark.parametrize(("make", "rank"), [(one_other_type, 2), (one_other_layout, 3)])
def test_layouts_that_differ_between_ranks(pool: Pool, make: Callable[[int], Item], rank: int) -> None:
    for kind, text in pool(SIZE).run(attempt, make):
        assert kind is ArgumentError
        assert_found(
            f"wanted the same on all ranks: rank {rank} has another dtype or layout for array 1, which is", text
        )


def too_few(comm: hetcoll.Communicator) -> str:
    try:
        reshard(comm._core, lambda: [right(comm.rank)] * (1 + (comm.rank == 3)))
    except ArgumentError as error:
        return str(error)
    return ""


def test_other_numbers_of_arrays(pool: Pool) -> None:
    assert pool(SIZE).run(too_few) == ["reshard: wanted the same on all ranks: rank 3 has 2 arrays, rank 0 1"] * SIZE


def many(comm: hetcoll.Communicator, number: int) -> str:
    """40 arrays, of which rank 3 has another layout for one, or the last of which nobody can name."""
    items = [right(comm.rank)] * 40
    items[number] = one_other_layout(comm.rank)
    if number < 0:
        items[number] = right(comm.rank)._replace(source=Layout((6, 4), tuple(range(1000)), (1000,), (0,)))
    try:
        reshard(comm._core, lambda: items)
    except ArgumentError as error:
        return str(error)
    return ""


def test_many_arrays_and_long_errors(pool: Pool) -> None:
    """What ranks tell each other has little room."""
    wanted = "reshard: wanted the same on all ranks: rank 3 has another dtype or layout for"
    late, early, long = (pool(SIZE).run(many, number) for number in (35, 31, -1))
    assert late == [f"{wanted} one of the arrays from 32 on"] * SIZE
    assert all(each.startswith(f"{wanted} array 31, which is float32 (6, 4) over ranks") for each in early)
    assert all(each.startswith("array 39: wanted meshes of ranks below 5, got (0, 1, 2") for each in long)
