"""Arrays that change their layout: this rank's part of what `plan.reshard` draws.

Arrays are NumPy's, PyTorch's or CuPy's: what they have alike (`shape`, `reshape`, blocks by index) is all that is used.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..calls import RECV, SEND
from ..calls.buffers import Buffer, read_buffer
from ..calls.messages import Message as OneWay
from ..errors import ArgumentError, BufferTypeError, spell_ranks
from ..plan.layout import Layout, extents, first_of, volume, within
from ..plan.near import Nested, nested
from ..plan.reshard import Message, Move, Piece, schedule
from ..types import OCP_OF
from .core import Core
from .results import made_like

__all__ = ["Item", "Layout", "reshard"]

_NAMED, _TEXT = 32, 400  # arrays whose difference is named, and characters of an error: what `Core.meet` has room for


class Item(NamedTuple):
    """An array to move: this rank's block of `source`, C-contiguous, or one without elements where it holds none. It
    goes to `out`, a block of `target`, or to a new array like it."""

    array: Any
    source: Layout
    target: Layout
    out: Any = None


def reshard(core: Core, asked: Callable[[], Sequence[Item]]) -> list[Any]:
    """This rank's blocks of the targets, one for each of what is `asked`; without elements where it holds none.

    Every rank of the communicator calls it, with the same layouts in the same order. The sources are not written. On a
    GPU the blocks are there once the current stream has come so far.

    Raises
    ------
    ArgumentError, BufferTypeError
        On every rank, before anything is sent, where one of them was asked for what cannot be.
    """
    problem: Exception | None = None
    prepared = _NOTHING
    sources: list[_Array] = []
    results: list[_Array] = []
    try:
        items = asked()
        checked = [_checked(core, number, item) for number, item in enumerate(items)]
        sources = [source for source, _ in checked]
        if len(places := {buffer.place for _, buffer in sources}) > 1:
            raise ArgumentError(f"wanted arrays of one device on a rank, got some of {' and '.join(sorted(places))}")
        _check_apart(checked)
        results = [
            _Array(*made_like(*source, item.target.shape_on(core.rank))) if out is None else out
            for item, (source, out) in zip(items, checked, strict=True)
        ]
        prepared = _prepare(tuple(map(_move, items, sources)), core.rank, nested(core.wiring.topology))
    except Exception as error:  # whatever it is: the others are not to wait for this rank
        problem = error
    _agree(core, prepared, sources, problem)
    odd: list[ArgumentError] = []
    for steps in prepared.steps:
        _exchange(core, steps.messages, sources, results, odd)
        for number, target, source in steps.copies:
            results[number].array[target] = sources[number].array[source]
    if odd:
        raise odd[0]
    return [each.array for each in results]


class _Array(NamedTuple):
    array: Any
    buffer: Buffer


Index = tuple[Any, ...]  # an ellipsis and slices


class _Block(NamedTuple):
    """A part of an array: its index, its shape, and where it begins in the array, in elements, if it lies in one."""

    number: int
    where: Index
    shape: tuple[int, ...]
    begin: int | None


class _End(NamedTuple):
    """This rank's end of a message: blocks that travel one behind the other."""

    kind: int  # SEND or RECV
    peer: int
    elements: int
    blocks: tuple[_Block, ...]
    of_sources: bool  # what it sends; else of results, as is all that it receives


class _Steps(NamedTuple):
    """This rank's part of a round. Copies are an array's number, and the index in its result and in its source."""

    messages: tuple[_End, ...]
    copies: tuple[tuple[int, Index, Index], ...]


class _Prepared(NamedTuple):
    """What the same layouts need each time. `each` and `all` are hashes, of each array and of all."""

    moves: tuple[Move, ...]
    each: tuple[str, ...]
    all: str
    steps: tuple[_Steps, ...]


_NOTHING = _Prepared((), (), "", ())


@lru_cache(maxsize=64)
def _prepare(moves: tuple[Move, ...], rank: int, groups: Nested) -> _Prepared:
    def block(piece: Piece, layout: Layout) -> _Block:
        whole = layout.boxes[rank]
        box, shape = within(piece.box, whole), extents(piece.box)
        index = (..., *(slice(begin, end) for begin, end in box))
        return _Block(piece.array, index, shape, first_of(box, extents(whole)))

    def end(message: Message) -> _End:
        sends = message.source == rank
        of_sources = sends and not message.passed_on
        blocks = tuple(
            block(each, moves[each.array].source if of_sources else moves[each.array].target) for each in message.pieces
        )
        count = sum(volume(each.box) for each in message.pieces)
        return _End(SEND if sends else RECV, message.target if sends else message.source, count, blocks, of_sources)

    def copy(piece: Piece) -> tuple[int, Index, Index]:
        move = moves[piece.array]
        return piece.array, block(piece, move.target).where, block(piece, move.source).where

    steps = tuple(
        _Steps(tuple(map(end, mine.messages)), tuple(map(copy, mine.copies)))
        for mine in schedule(moves, rank, groups)
        if mine.messages or mine.copies
    )
    each = tuple(_hash(repr(move)) for move in moves)
    return _Prepared(moves, each, _hash("".join(each)), steps)


def _exchange(
    core: Core, ends: Sequence[_End], sources: Sequence[_Array], results: Sequence[_Array], odd: list[ArgumentError]
) -> None:
    """One group of messages. What does not lie in one piece is packed before, or unpacked after. What HETCOLL_CHECK
    finds odd is noted: the other ranks are to get theirs."""
    messages, unpack = [], []
    for kind, peer, count, blocks, of_sources in ends:
        first, arrays = blocks[0], sources if of_sources else results
        array, buffer = arrays[first.number]
        if len(blocks) == 1 and first.begin is not None:
            travels = buffer.part(first.begin, count)
        elif kind == SEND:
            memory, travels = made_like(array, buffer, (count,))
            for number, index, part in _parts(blocks, memory):
                part[...] = arrays[number].array[index]
        else:
            memory, travels = made_like(array, buffer, (count,))
            unpack.append((blocks, memory))
        messages.append(OneWay(kind, travels, peer))
    if messages:
        if (check := core.message_check) is None:
            core.exchange_all(messages, core.config.timeout)
        else:
            try:
                check.exchange_all(messages, core.config.timeout)
            except ArgumentError as error:
                odd.append(error)
    for blocks, memory in unpack:
        for number, index, part in _parts(blocks, memory):
            results[number].array[index] = part


def _parts(blocks: Sequence[_Block], memory: Any) -> Iterator[tuple[int, Index, Any]]:
    """Each block of a message: whose it is, where in it, and where it travels."""
    at = 0
    for number, index, shape, _ in blocks:
        count = math.prod(shape)
        yield number, index, memory[at : at + count].reshape(shape)
        at += count


# Checking.


def _move(item: Item, source: _Array) -> Move:
    """As all ranks have it: where GPUs have other 8-bit floats, these are converted on the way."""
    dtype = source.buffer.dtype
    return Move(item.source, item.target, OCP_OF.get(dtype, dtype))


def _checked(core: Core, number: int, item: Item) -> tuple[_Array, _Array | None]:
    """The array, and `out` if it is given, if this rank can do what is asked. ArgumentError or BufferTypeError where
    not."""
    name = f"array {number}"
    if item.source.shape != item.target.shape:
        raise ArgumentError(f"{name}: wanted one shape, got {item.source.shape} and {item.target.shape}")
    for layout in (item.source, item.target):
        if max(layout.ranks) >= core.size:
            raise ArgumentError(f"{name}: wanted meshes of ranks below {core.size}, got {layout.ranks}")
    buffer = _block(core, name, item.array, item.source, writable=False)
    source = _Array(item.array, buffer)
    if item.out is None:
        return source, None
    out = _block(core, f"{name}: out", item.out, item.target, writable=True)
    if (out.dtype, out.place) != (buffer.dtype, buffer.place):
        wanted, got = (f"{each.dtype.label} on {each.place}" for each in (buffer, out))
        raise BufferTypeError(f"{name}: out: wanted {wanted}, got {got}")
    if out.overlaps(buffer):
        raise ArgumentError(f"{name}: out: wanted other memory than the source's")
    return source, _Array(item.out, out)


def _check_apart(checked: Sequence[tuple[_Array, _Array | None]]) -> None:
    """ArgumentError where a result is to lie where another one does, or what is yet to be read: nobody says which is
    written first. Sources may share their memory."""
    parts = [
        (each.buffer.ptr, each.buffer.nbytes, number, written)
        for number, pair in enumerate(checked)
        for written, each in enumerate(pair)
        if each is not None and each.buffer.count
    ]
    ends, arrays = [0, 0], [0, 0]  # of sources and of results so far: where the last byte is, and whose it is
    for begin, nbytes, number, written in sorted(parts):
        for other in (0, 1):
            if begin < ends[other] and (written or other):
                here, there = (number, arrays[other]) if written else (arrays[other], number)
                raise ArgumentError(f"array {here}: out: wanted other memory than array {there}'s")
        if begin + nbytes > ends[written]:
            ends[written], arrays[written] = begin + nbytes, number


def _block(core: Core, name: str, array: Any, layout: Layout, *, writable: bool) -> Buffer:
    buffer = read_buffer(array, name, writable=writable)
    core.gpus.check_place(buffer)
    wanted, got = layout.shape_on(core.rank), tuple(getattr(array, "shape", (buffer.count,)))
    if got != wanted and (buffer.count or 0 not in wanted):
        raise ArgumentError(f"{name}: wanted shape {wanted} of {layout} on rank {core.rank}, got {got}")
    return buffer


def _agree(core: Core, prepared: _Prepared, sources: Sequence[_Array], problem: Exception | None) -> None:
    """Raise on every rank where one has found a problem, or was asked for something else than rank 0.

    GPUs are set up by all ranks together, also by those that no message will go to or come from.
    """
    moves, each = prepared.moves, prepared.each[:_NAMED]
    text = "" if problem is None else (str(problem) or repr(problem)).encode("ascii", "replace").decode()[:_TEXT]
    on_gpu = any(buffer.device != "cpu" for _, buffer in sources)
    mine = {"problem": text, "gpu": on_gpu, "count": len(moves), "all": prepared.all, "each": each}
    blobs = core.meet("reshard", json.dumps(mine).encode())
    read = {blob: json.loads(blob) for blob in set(blobs)}
    told = [read[blob] for blob in blobs]
    if problem is not None:
        raise problem
    for rank, theirs in enumerate(told):
        if theirs["problem"]:
            raise ArgumentError(f"reshard: rank {rank}: {theirs['problem']}")
    for rank, theirs in enumerate(told):
        if (difference := _difference(moves, told[0], theirs)) is not None:
            raise ArgumentError(f"reshard: wanted the same on all ranks: rank {rank} has {difference}")
    if gpus := [rank for rank, theirs in enumerate(told) if theirs["gpu"]]:
        if len(gpus) < core.size and not core.wiring.topology.some_without_gpu:
            raise ArgumentError(
                f"reshard: wanted arrays on GPUs, as on {spell_ranks(gpus)}, on all ranks without HETCOLL_DEVICE=cpu"
            )
        _set_up(core, sources[0].buffer)


def _difference(moves: tuple[Move, ...], first: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """In what a rank has something else than rank 0."""
    if theirs["count"] != first["count"]:
        return f"{theirs['count']} arrays, rank 0 {first['count']}"
    if theirs["all"] == first["all"]:
        return None
    pairs = zip(first["each"], theirs["each"], strict=True)
    number = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    return "another dtype or layout for " + (
        f"one of the arrays from {_NAMED} on" if number is None else f"array {number}, which is {moves[number]} here"
    )


def _set_up(core: Core, buffer: Buffer) -> None:
    """See `_agree`. Nothing where that was done before."""
    if buffer.device == "cpu":
        core.gpus.among_gpus(core.config.timeout)
    else:
        with core.executor(buffer, None, core.config.timeout):
            pass


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
