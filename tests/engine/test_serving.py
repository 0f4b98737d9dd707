"""Paged KV caches that change hands: re-cut heads and orders against NumPy, layers, cancelled and late requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks, wait_until
from thorough import examples

import hetcoll
from hetcoll import ArgumentError, BufferTypeError, CollectiveTimeoutError, CommunicationError
from hetcoll.serving import CacheLayout, Handoff, cuts, pieces
from hetcoll.serving import handoff as handoff_module

Pool = Callable[..., Ranks]
AXES = ("layer", "kv", "block", "token", "head", "dim")
ORDERS = [(*order, "dim") for order in itertools.permutations(AXES[:-1])]


def whole(layout: CacheLayout, seed: int) -> Any:
    """A cache with all heads, by AXES."""
    shape = (layout.layers, layout.kv, layout.blocks, layout.block_tokens, layout.heads, layout.head_dim)
    return np.random.default_rng(seed).integers(1, 1 << 30, shape, np.int32)


def part(layout: CacheLayout, cache: Any, member: int) -> Any:
    """What one rank of a group has of it."""
    heads = layout.heads_of(member)
    mine = cache[..., heads.start : heads.stop, :]
    return np.ascontiguousarray(mine.transpose([AXES.index(axis) for axis in layout.axes]))


@settings(max_examples=examples(24))
@given(st.data())
def test_pieces_move_the_heads_that_numpy_would(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from([1, 2, 4, 8]))
    alike = {"layers": 2, "block_tokens": data.draw(st.sampled_from([1, 3])), "heads": heads, "head_dim": 4}
    alike["kv"] = data.draw(st.sampled_from([1, 2]))
    ranks, order = st.sampled_from([1, 2, 4, 8]), st.sampled_from(ORDERS)
    src, dst = (CacheLayout(**alike, blocks=n, ranks=data.draw(ranks), axes=data.draw(order)) for n in (5, 7))
    count, layer = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 1))
    from_blocks, to_blocks = data.draw(st.permutations(range(5)))[:count], data.draw(st.permutations(range(7)))[:count]
    source, target = whole(src, 1), whole(dst, 2)
    sources = [part(src, source, member).reshape(-1) for member in range(src.ranks)]
    targets = [part(dst, target, member).reshape(-1) for member in range(dst.ranks)]
    for cut in cuts(src, dst):
        for here, there, n in zip(*pieces(src, dst, cut, layer, from_blocks, to_blocks), strict=True):
            targets[cut.target][there : there + n] = sources[cut.source][here : here + n]
    target[layer][:, list(to_blocks)] = source[layer][:, list(from_blocks)]
    for member, got in enumerate(targets):
        assert (got == part(dst, target, member).reshape(-1)).all()


def test_as_few_pieces_as_can_be() -> None:
    """Four ranks to two: a target's token has the heads of two sources side by side. Blocks that neighbour in both."""
    alike = {"layers": 3, "blocks": 8, "block_tokens": 16, "heads": 8, "head_dim": 64}
    by_head = ("layer", "kv", "block", "head", "token", "dim")
    src, dst = CacheLayout(**alike, ranks=4), CacheLayout(**alike, ranks=2)
    assert [cut[:2] for cut in cuts(src, dst)] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert len(pieces(src, dst, cuts(src, dst)[0], 1, [1, 2], [4, 5])[0]) == 2 * 2 * 16
    src, dst = CacheLayout(**alike, ranks=4, axes=by_head), CacheLayout(**alike, ranks=2, axes=by_head)
    here, _, count = pieces(src, dst, cuts(src, dst)[1], 1, [1, 2], [4, 5])
    assert len(here) == 2 * 2
    assert set(count) == {2 * 16 * 64}
    assert len(pieces(src, src, cuts(src, src)[0], 0, [1, 2], [4, 5])[0]) == 2


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"ranks": 3}, "ranks: wanted a divisor or multiple of the 4 heads, got 3"),
        ({"blocks": 0}, "blocks: wanted 1 or more, got 0"),
        ({"axes": AXES[::-1]}, "with dim last"),
        ({"axes": None}, "with dim last"),
        ({"axes": (*AXES, "dim")}, "with dim last"),
    ],
)
def test_layouts_that_cannot_be(changes: dict[str, Any], wanted: str) -> None:
    sizes: dict[str, Any] = {"layers": 1, "blocks": 2, "block_tokens": 4, "heads": 4, "head_dim": 8}
    with pytest.raises(ArgumentError, match=wanted):
        CacheLayout(**(sizes | changes))


LAYERS = 4
SIZES: dict[str, Any] = {"layers": LAYERS, "blocks": 6, "block_tokens": 4, "heads": 4, "head_dim": 32}


class OnAnotherDevice:
    """As PyTorch's tensors of GPUs, which NumPy cannot read."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def hand_over(comm: hetcoll.Communicator, senders: list[int], receivers: list[int]) -> None:
    """Two requests after one another in one slot, layer by layer; then one that is given up, and one that is late."""
    src = CacheLayout(**SIZES, ranks=len(senders))
    dst = CacheLayout(**SIZES, ranks=len(receivers), axes=("block", "layer", "kv", "head", "token", "dim"))
    source, target = whole(src, 3), whole(dst, 4)
    sends = comm.rank in senders
    member = (senders if sends else receivers).index(comm.rank)
    cache = part(src if sends else dst, source if sends else target, member)
    if comm.rank == 0:
        with pytest.raises(ArgumentError, match="layouts: wanted one head_dim, got 32 and 16"):
            Handoff(comm, cache, src, CacheLayout(**(SIZES | {"head_dim": 16})), senders, receivers)
        with pytest.raises(ArgumentError, match="cache: wanted"):
            Handoff(comm, np.zeros(3, np.int32), src, dst, senders, receivers)
        with pytest.raises(ArgumentError, match="layouts: wanted a CacheLayout, got None"):
            Handoff(comm, cache, src, None, senders, receivers)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="receivers: wanted a list of ranks, got None"):
            Handoff(comm, cache, src, dst, senders, None)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="slots: wanted 1 to 209715, got 209716"):
            Handoff(comm, cache, src, dst, senders, receivers, slots=209716)
    handoff = Handoff(comm, cache, src, dst, senders, receivers, slots=2)
    for turn, (from_blocks, to_blocks) in enumerate([([0, 3], [5, 1]), ([4], [5])]):
        if sends:
            with handoff.send(1) as sending:
                with pytest.raises(ArgumentError, match="src_blocks: wanted blocks in"):
                    sending.layer(0, [6], [0])
                with pytest.raises(ArgumentError, match="src_blocks: wanted a sequence of whole numbers"):
                    sending.layer(0, [[0], [1, 2]], [0])
                with pytest.raises(ArgumentError, match="dst_blocks: wanted a sequence of whole numbers"):
                    sending.layer(0, [0], OnAnotherDevice())
                with pytest.raises(BufferTypeError, match=r"layer: wanted a whole number, got 1\.5"):
                    sending.layer(1.5, [0], [0])
                with pytest.raises(ArgumentError, match="timeout: wanted seconds above 0, got 'a'"):
                    sending.flush("a")
                for layer in range(LAYERS):
                    assert sending.layer(layer, from_blocks, to_blocks)
        else:
            receiving = handoff.receive(1)
            with pytest.raises(BufferTypeError, match="layer: wanted a whole number, got '0'"):
                receiving.arrived("0")
            with pytest.raises(ArgumentError, match="timeout: wanted seconds above 0, got 'a'"):
                receiving.wait(0, "a")
            receiving.wait(True)  # the whole number 1, not NumPy's index
            for layer in range(LAYERS):
                receiving.wait(layer)
                target[layer][:, to_blocks] = source[layer][:, from_blocks]
                blocks = dst.axes.index("block"), dst.axes.index("layer")
                got = np.moveaxis(cache, blocks, (0, 1))[to_blocks, layer]
                assert (got == np.moveaxis(part(dst, target, member), blocks, (0, 1))[to_blocks, layer]).all(), turn
            receiving.close()
        comm.barrier()  # the next request may have these blocks
    if sends:
        with handoff.send(1) as sending:
            assert sending.layer(0, [1], [0])
            wait_until(lambda: sending.cancelled, 60)
            assert not sending.layer(1, [1], [0])
    else:
        receiving = handoff.receive(1)
        with pytest.raises(ArgumentError, match="slot: 1 is still in use"):
            handoff.receive(1)
        receiving.wait(0)
        with pytest.raises(CollectiveTimeoutError):
            receiving.wait(1, timeout=0.15)
        receiving.cancel()
        cache[:] = 7  # the blocks are ours again
    comm.barrier()
    if sends:
        handoff.send(1).close()
    else:
        receiving = handoff.receive(1)
        with pytest.raises(CommunicationError, match="have ended the request without layer 2"):
            receiving.wait(2)
        receiving.close()
        assert (cache == 7).all()
    comm.barrier()
    handoff.close()


@pytest.mark.parametrize(("senders", "receivers"), [([2, 0], [1]), ([1], [0, 2])])
def test_caches_change_hands(pool: Pool, senders: list[int], receivers: list[int]) -> None:
    pool(3).run(hand_over, senders, receivers)


def hand_over_in_parts(comm: hetcoll.Communicator, apart: tuple[bool, bool]) -> None:
    """Ranks 0 and 1 to rank 2: a layer's blocks in two calls, with layers in arrays of their own on some sides. Rank 1
    has them in more pieces than a put takes."""
    most = handoff_module.MOST_PIECES
    src, dst = CacheLayout(**SIZES, ranks=2, apart=apart[0]), CacheLayout(**SIZES, apart=apart[1])
    source, target = whole(src, 5), whole(dst, 6)
    sends, own = comm.rank < 2, src if comm.rank < 2 else dst
    cache: Any = part(own, source if sends else target, comm.rank % 2)
    if own.apart:
        with pytest.raises(ArgumentError, match="cache: wanted a list of 4 arrays, one a layer, got ndarray"):
            Handoff(comm, cache, src, dst, [0, 1], [2])
        cache = [np.ascontiguousarray(cache[layer : layer + 1]) for layer in range(LAYERS)]
    with Handoff(comm, cache, src, dst, [0, 1], [2]) as handoff:
        if sends:
            sending = handoff.send(3)
            handoff_module.MOST_PIECES = 5 if comm.rank == 1 else most
            for layer in range(LAYERS):
                sending.layer(layer, [1, 0], [4, 2], last=False)
            sending.flush()
            comm.barrier()
            comm.barrier()
            for layer in range(LAYERS):
                sending.layer(layer, [5], [0])
                with pytest.raises(ArgumentError, match=f"layer: the last part of {layer} was sent"):
                    sending.layer(layer, [5], [0])
            handoff_module.MOST_PIECES = most
            assert not sending.done
            sending.end()
            with pytest.raises(ArgumentError, match="layer: this request was ended"):
                sending.layer(0, [5], [0])
            wait_until(lambda: sending.done, 60)
            sending.close()
        else:
            receiving = handoff.receive(3)
            comm.barrier()
            assert not any(receiving.arrived(layer) for layer in range(LAYERS))
            assert not receiving.ended
            assert not receiving.complete
            comm.barrier()
            receiving.wait(LAYERS - 1)
            wait_until(lambda: receiving.ended, 60)
            receiving.close()
            assert receiving.complete
            target[:, :, [4, 2, 0]] = source[:, :, [1, 0, 5]]
            assert (np.concatenate(cache if own.apart else [cache]) == target).all()
        comm.barrier()


@pytest.mark.parametrize("apart", list(itertools.product([False, True], repeat=2)))
def test_layers_in_parts_and_apart(pool: Pool, apart: tuple[bool, bool]) -> None:
    pool(3).run(hand_over_in_parts, apart)


def never_sent(comm: hetcoll.Communicator) -> None:
    layout = CacheLayout(**SIZES)
    with Handoff(comm, np.zeros(layout.shape, np.int32), layout, layout, [0], [1]) as handoff:
        if comm.rank == 1:
            receiving = handoff.receive(0)
            with pytest.raises(CollectiveTimeoutError, match="is not over after"):
                receiving.wait(0)
        comm.barrier(timeout=30)
        if comm.rank == 0:
            handoff.send(0).close(30)
        else:
            receiving.close(30)
        comm.barrier(timeout=30)


def test_a_layer_that_nobody_sends_is_waited_for_as_long_as_the_communicator_says(
    launch: Callable[..., Ranks],
) -> None:
    launch(2, HETCOLL_TIMEOUT="3").run(never_sent)


def ask_for_others(comm: hetcoll.Communicator) -> None:
    """Each time the ranks find out together, and stay in step."""
    other, layout = CacheLayout(**SIZES, axes=(AXES[1], AXES[0], *AXES[2:])), CacheLayout(**SIZES)
    cache, rank = np.zeros(layout.shape, np.int32), comm.rank
    for name, call in [
        ("src", lambda: Handoff(comm, cache, (layout, other)[rank], layout, [0], [1])),
        ("dst", lambda: Handoff(comm, cache, layout, (layout, other)[rank], [0], [1])),
        ("senders", lambda: Handoff(comm, cache, layout, layout, [rank], [1 - rank])),
        ("slots", lambda: Handoff(comm, cache, layout, layout, [0], [1], slots=2 + rank)),
    ]:
        with pytest.raises(ArgumentError, match=f"{name}: wanted the same on all ranks, got another one on rank 1"):
            call()
    cache.flags.writeable = rank == 1  # a sender's is only read
    with pytest.raises(BufferTypeError, match=r"cache: wanted one dtype on all ranks, got other ones on .* \[0, 1\]"):
        Handoff(comm, cache.astype((np.int32, np.float32)[rank]), layout, layout, [0], [1])
    own: Any = {name: (int, np.int64)[rank](size) for name, size in SIZES.items()} | {"axes": (AXES, list(AXES))[rank]}
    Handoff(comm, cache, CacheLayout(**own), CacheLayout(**own), [0], [1]).close()


def test_ranks_that_ask_for_other_hand_offs_find_out(pool: Pool) -> None:
    pool(2).run(ask_for_others)


def with_a_sender_too_many(comm: hetcoll.Communicator) -> None:
    """Two have the one head; the receiver asks the first of them."""
    one = SIZES | {"heads": 1}
    src, dst = CacheLayout(**one, ranks=2), CacheLayout(**one)
    cache = np.zeros((src if comm.rank < 2 else dst).shape, np.int32)
    with Handoff(comm, cache, src, dst, [0, 1], [2]) as handoff:
        if comm.rank == 2:
            handoff.receive(0).close()
        else:
            with handoff.send(0) as sending:
                for wrong, error in ((LAYERS, ArgumentError), (-1, ArgumentError), ("0", BufferTypeError)):
                    with pytest.raises(error, match="layer: wanted"):
                        sending.layer(wrong, [0], [0])  # type: ignore[arg-type]
                assert sending.layer(0, [0], [0])
        comm.barrier()


def test_a_sender_whom_nobody_asks_tells_wrong_layers_too(pool: Pool) -> None:
    pool(3).run(with_a_sender_too_many)
