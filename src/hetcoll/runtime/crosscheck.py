"""HETCOLL_CHECK=1: collectives are checked across the ranks, for programs whose results are wrong.

Beside each call the ranks tell each other whether their input holds what is not finite (NaN, infinity), and checksums
of what they give (`checksums`): of parts that are cut by rank each rank is told of its own alone. The name of what they
tell has the call in it, so ranks that call different things are found there, too. A blocking call waits for it before
anything moves: where an input is not finite every rank raises the same error, which says whose it is, and no buffer was
touched. An asynchronous call begins at once, and is looked at when it is over. What a rank got is what the inputs make,
so memory and GPUs that spoil data are found. And after a blocking all-reduce, whose checksums allow for rounding, the
ranks compare a hash of the result. Where ranks may pass 8-bit floats of two kinds (`float8`), kinds of one format are
the same, hashes are of values, and sums have no checksum.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np

import hetcoll._native as _native

from .. import calls
from ..calls import Call
from ..calls.buffers import Buffer, element_type
from ..errors import ArgumentError, spell_ranks
from ..health.diagnosis import Diagnosis, Kind
from ..types import COMPLEX, CUT, FLOATS, FROM_ROOT, OCP_OF, REDUCING, TO_ROOT, Collective, Format
from ..work import Work
from .checksums import Fold, foldable, room

Start = Callable[[Call, bool, float], Work]
_TEXT = 256  # bytes as JSON to say what is not finite, or of a hash
_EMPTY: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)


class Told:
    """What each rank tells this one beside a call. It can be read once `work` is over."""

    def __init__(self, work: Work, rows: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.work, self._rows = work, rows

    def read(self) -> list[Any]:
        """By rank."""
        return [json.loads(row.tobytes()) for row in self._rows]


class CrossCheck:
    """One communicator's checks of collectives. `start` begins a call, asynchronous or not, of so many seconds."""

    def __init__(self, rank: int, size: int, start: Start, diagnosis: Diagnosis) -> None:
        self._rank, self._size, self._start, self._diagnosis = rank, size, start, diagnosis

    def tell(self, call: Call, converts: bool, async_op: bool, seconds: float) -> Told:
        """Begin to tell the others of this rank's input. `converts`: ranks may have other kinds of 8-bit floats."""
        source, parts = given(call, self._rank), _shares(call, self._size)[0]
        odd = "" if source is None else find_odd(source)
        sums = [None] * len(parts) if source is None else self._checksums(call, source, converts)
        label, space = f"HETCOLL_CHECK before {_common(call, converts)}", _TEXT + room(len(parts))
        mine = np.stack([row_of([odd, each], space) for each in sums])
        rows = np.empty((self._size, space), np.uint8)
        if call.collective.plain in CUT:
            telling = replace(calls.alltoall(self._rank, self._size, mine, rows), label=label)
        else:
            telling = calls.meeting(self._rank, label, mine, rows)
        return Told(self._start(telling, async_op, seconds), rows)

    def check_input(self, call: Call, told: Told) -> None:
        """ArgumentError, on every rank, where the input of one is not finite."""
        problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told.read()) if text]
        if problems:
            raise ArgumentError(f"HETCOLL_CHECK: the input of {call.describe()} is not finite: {'; '.join(problems)}")

    def check_result(self, call: Call, converts: bool, told: Told) -> None:
        """CommunicationError, which all ranks hear of, where this one has got something else than the inputs make."""
        result = call.recv or call.send
        if result is None or (call.collective in TO_ROOT and call.root != self._rank):
            return
        if problem := self._wrong(call, result, converts, [given for _, given in told.read()]):
            self._fail(f"the result of {call.describe()} on rank {self._rank} is wrong: {problem}")

    def check_same(self, call: Call, converts: bool, seconds: float) -> None:
        """CommunicationError on every rank where their results of an all-reduce differ. All ranks call it."""
        result = call.recv or call.send
        if call.collective is not Collective.ALLREDUCE or result is None:
            return
        mine = row_of(hash_of(result, converts), _TEXT)
        rows = np.empty((self._size, _TEXT), np.uint8)
        label = f"HETCOLL_CHECK after {_common(call, converts)}"
        told = Told(self._start(calls.meeting(self._rank, label, mine, rows), False, seconds), rows)
        holders: dict[str, list[int]] = {}
        for rank, text in enumerate(told.read()):
            holders.setdefault(text, []).append(rank)
        if len(holders) > 1:
            parts = [f"{spell_ranks(ranks)}: {text}" for text, ranks in holders.items()]
            self._fail(f"the result of {call.describe()} is not the same everywhere: {'; '.join(parts)}")

    def _checksums(self, call: Call, source: Buffer, converts: bool) -> list[Any]:
        parts = _parts(source, _shares(call, self._size)[0])
        if call.collective not in REDUCING:
            return [hash_of(part, converts) for part in parts]
        if converts or not foldable(call):
            return [None] * len(parts)
        fold = Fold(call, self._size, len(parts))
        return [fold.of(view(part)) for part in parts]

    def _wrong(self, call: Call, result: Buffer, converts: bool, given: list[Any]) -> str:
        """What is wrong with what this rank has got, if anything, where the ranks gave what has these checksums."""
        if call.compress is not Format.NONE:
            return ""
        if call.collective in REDUCING:
            if converts or not foldable(call):
                return ""
            return Fold(call, self._size, len(_shares(call, self._size)[0])).differs(given, view(result))
        sources = [call.root] if call.collective in FROM_ROOT else range(self._size)
        parts = _parts(result, _shares(call, self._size)[1])
        wrong = [rank for rank, part in zip(sources, parts, strict=True) if hash_of(part, converts) != given[rank]]
        return f"what {spell_ranks(wrong)} gave came changed" if wrong else ""

    def _fail(self, problem: str) -> NoReturn:
        self._diagnosis.post(Kind.CORRUPT, -1, f"HETCOLL_CHECK: {problem}")
        raise self._diagnosis.error()


def row_of(what: object, space: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`what` as JSON in so many bytes."""
    blob = json.dumps(what).encode()
    assert len(blob) <= space, f"{len(blob)} bytes, room for {space}"
    return np.frombuffer(blob.ljust(space), np.uint8)


def _shares(call: Call, size: int) -> tuple[list[int], list[int]]:
    """Elements of the parts that a rank gives and gets, by rank where they are cut so."""
    if call.collective is Collective.ALLTOALLV:
        send, recv = ([b - a for a, b in pairwise(table)] for table in (call.send_table, call.recv_table))
        return send, recv
    return call.shares(size)


def _parts(buffer: Buffer, shares: Sequence[int]) -> list[Buffer]:
    offsets = accumulate(shares, initial=0)
    return [
        replace(buffer, ptr=buffer.ptr + at * buffer.dtype.itemsize, count=count)
        for at, count in zip(offsets, shares, strict=False)
    ]


def given(call: Call, rank: int) -> Buffer | None:
    """What `rank` gives to a collective."""
    return call.send if call.collective not in FROM_ROOT or call.root == rank else None


def _common(call: Call, converts: bool) -> str:
    """The call as all ranks have it."""
    return (replace(call, dtype=OCP_OF.get(call.dtype, call.dtype)) if converts else call).describe()


def view(buffer: Buffer) -> np.ndarray[Any, Any]:
    """A host buffer as an array."""
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ptr)) if buffer.nbytes else _EMPTY
    return raw.view(element_type(buffer.dtype.label))


def find_odd(buffer: Buffer) -> str:
    """How many elements are not finite, and the first of them; nothing where all are."""
    if buffer.dtype not in FLOATS | COMPLEX:
        return ""
    values = view(buffer)
    odd = np.flatnonzero(~np.isfinite(values))
    return f"{odd.size} of {values.size} elements, the first is {values[odd[0]]} at {odd[0]}" if odd.size else ""


def hash_of(buffer: Buffer, converts: bool = False) -> str:
    """16 hexadecimal digits that are equal where the bytes are; with `converts`, where the values are that both kinds
    of 8-bit floats hold."""
    values = _in_common(buffer) if converts else view(buffer)
    return hashlib.blake2b(values.view(np.uint8).data, digest_size=8).hexdigest()


def _in_common(buffer: Buffer) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A host buffer's values that both kinds hold: the same numbers, and one NaN, of whatever kind it is."""
    ocp = OCP_OF.get(buffer.dtype, buffer.dtype)
    codes = np.empty(buffer.count, np.uint8)
    _native.convert_float8(int(codes.ctypes.data), buffer.ptr, buffer.count, buffer.dtype, ocp)
    _native.convert_float8(int(codes.ctypes.data), int(codes.ctypes.data), buffer.count, ocp, ocp)
    values = codes.view(element_type(ocp.label)).astype(np.float32) + np.float32(0)  # no -0
    values[np.isnan(values)] = np.nan
    return values
