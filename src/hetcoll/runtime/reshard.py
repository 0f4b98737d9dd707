"""Arrays that change their layout: this rank's part of what `plan.reshard` draws.

Arrays are NumPy's, PyTorch's or CuPy's: what they have alike (`shape`, `reshape`, blocks by index) is all that is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..calls import RECV, SEND
from ..calls.buffers import Buffer, read_buffer
from ..errors import ArgumentError, BufferTypeError, spell_ranks
from ..plan.layout import Box, Layout, contiguous, extents, volume, within
from ..plan.reshard import Message, Move, Piece, schedule
from ..types import OCP_OF
from .core import Core
from .messages import Group, end_group, one_way
from .results import like

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
    items: Sequence[Item] = ()
    buffers: list[Buffer] = []
    outs: list[Any] = []
    try:
        items = asked()
        buffers = [_checked(core, number, item) for number, item in enumerate(items)]
        if len(places := {buffer.place for buffer in buffers}) > 1:
            raise ArgumentError(f"wanted arrays of one device on a rank, got some of {' and '.join(sorted(places))}")
        _check_apart(items, buffers)
        outs = [like(item.array, item.target.shape_on(core.rank)) if item.out is None else item.out for item in items]
    except Exception as error:  # whatever it is: the others are not to wait for this rank
        problem = error
    moves = tuple(map(_move, items, buffers))
    _agree(core, moves, buffers, problem)
    first, second = schedule(moves, core.rank)
    held = [_Blocks(item.array, item.source.boxes.get(core.rank)) for item in items]
    wanted = [_Blocks(out, item.target.boxes.get(core.rank)) for out, item in zip(outs, items, strict=True)]
    for piece in first.copies:
        wanted[piece.array].at(piece.box)[...] = held[piece.array].at(piece.box)
    _exchange(core, first.messages, held, wanted)
    _exchange(core, second.messages, wanted, wanted)
    return outs


class _Blocks:
    """An array as the block `whole` of a larger one; None where it is no block of it."""

    def __init__(self, array: Any, whole: Box | None) -> None:
        self._array, self._whole = array, whole

    def at(self, box: Box) -> Any:
        """A view of a part, by its place in the larger array."""
        assert self._whole is not None, "the schedule asks for what there is"
        return self._array[(..., *(slice(begin, end) for begin, end in within(box, self._whole)))]

    def lies_in_one(self, box: Box) -> bool:
        """Whether that view is contiguous."""
        assert self._whole is not None, "the schedule asks for what there is"
        return contiguous(within(box, self._whole), extents(self._whole))

    def staged(self, pieces: Sequence[Piece]) -> Any:
        """New memory for these parts, one behind the other."""
        return like(self._array, (sum(volume(piece.box) for piece in pieces),))


def _exchange(core: Core, messages: Sequence[Message], held: list[_Blocks], wanted: list[_Blocks]) -> None:
    """One group of messages. What does not lie in one piece is packed before, or unpacked after."""
    unpack: list[tuple[Any, Message]] = []
    with Group(core, partial(end_group, core)):
        for message in messages:
            sends = message.source == core.rank
            blocks, number = held if sends else wanted, message.pieces[0].array
            memory = _direct(blocks, message)
            if memory is None:
                memory = blocks[number].staged(message.pieces)
                if sends:
                    for block, part in _parts(blocks, message, memory):
                        part[...] = block
                else:
                    unpack.append((memory, message))
            peer = message.target if sends else message.source
            one_way(core, SEND if sends else RECV, memory, peer, False, None, None)
    for memory, message in unpack:
        for block, part in _parts(wanted, message, memory):
            block[...] = part


def _direct(blocks: list[_Blocks], message: Message) -> Any:
    """The memory of a message that is one piece which lies in one, or None."""
    if len(message.pieces) > 1:
        return None
    (piece,) = message.pieces
    found = blocks[piece.array]
    return found.at(piece.box).reshape(-1) if found.lies_in_one(piece.box) else None


def _parts(blocks: list[_Blocks], message: Message, memory: Any) -> list[tuple[Any, Any]]:
    """Each piece of a message: where it lies in its array, and where it travels."""
    found, at = [], 0
    for piece in message.pieces:
        count = volume(piece.box)
        found.append((blocks[piece.array].at(piece.box), memory[at : at + count].reshape(extents(piece.box))))
        at += count
    return found


# Checking.


def _move(item: Item, buffer: Buffer) -> Move:
    """As all ranks have it: where GPUs have other 8-bit floats, these are converted on the way."""
    return Move(item.source, item.target, OCP_OF.get(buffer.dtype, buffer.dtype))


def _checked(core: Core, number: int, item: Item) -> Buffer:
    """The array, if this rank can do what is asked. ArgumentError or BufferTypeError where not."""
    name = f"array {number}"
    if item.source.shape != item.target.shape:
        raise ArgumentError(f"{name}: wanted one shape, got {item.source.shape} and {item.target.shape}")
    for layout in (item.source, item.target):
        if max(layout.ranks) >= core.size:
            raise ArgumentError(f"{name}: wanted meshes of ranks below {core.size}, got {layout.ranks}")
    buffer = _block(core, name, item.array, item.source, writable=False)
    if item.out is not None:
        out = _block(core, f"{name}: out", item.out, item.target, writable=True)
        if (out.dtype, out.place) != (buffer.dtype, buffer.place):
            wanted, got = (f"{each.dtype.label} on {each.place}" for each in (buffer, out))
            raise BufferTypeError(f"{name}: out: wanted {wanted}, got {got}")
        if out.overlaps(buffer):
            raise ArgumentError(f"{name}: out: wanted other memory than the source's")
    return buffer


def _check_apart(items: Sequence[Item], buffers: Sequence[Buffer]) -> None:
    """ArgumentError where a result is to lie where another one does, or what is yet to be read: nobody says which is
    written first. Sources may share their memory."""
    parts = [(buffer.ptr, buffer.nbytes, number, False) for number, buffer in enumerate(buffers)]
    for number, item in enumerate(items):
        if item.out is not None:
            out = read_buffer(item.out, "out", writable=True)
            parts.append((out.ptr, out.nbytes, number, True))
    ends, arrays = [0, 0], [0, 0]  # of sources and of results so far: where the last byte is, and whose it is
    for begin, nbytes, number, written in sorted(part for part in parts if part[1]):
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


def _agree(core: Core, moves: tuple[Move, ...], buffers: Sequence[Buffer], problem: Exception | None) -> None:
    """Raise on every rank where one has found a problem, or was asked for something else than rank 0.

    GPUs are set up by all ranks together, also by those that no message will go to or come from.
    """
    hashes = [_hash(repr(move)) for move in moves] if problem is None else []  # with an error there is less room
    text = "" if problem is None else (str(problem) or repr(problem)).encode("ascii", "replace").decode()[:_TEXT]
    on_gpu = any(buffer.device != "cpu" for buffer in buffers)
    mine = {"problem": text, "gpu": on_gpu, "count": len(moves), "all": _hash("".join(hashes)), "each": hashes[:_NAMED]}
    told = [json.loads(blob) for blob in core.meet("reshard", json.dumps(mine).encode())]
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
        _set_up(core, buffers[0])


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
