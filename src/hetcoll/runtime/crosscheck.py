"""HETCOLL_CHECK=1: collectives are checked across the ranks, for programs whose results are wrong; with `sampled` some.

Before each call the ranks tell each other whether their input holds what is not finite (NaN, infinity), and checksums
of what they give (`checksums`): of parts that are cut by rank each rank is told of its own alone. The name of what they
tell has the call in it, so ranks that call different things are found there, too. A blocking call waits for it before
anything moves: where an input is not finite every rank raises the same error, which says whose it is, and no buffer was
touched. An asynchronous call begins at once, and is looked at when it is over. What a rank got is what the inputs make,
so memory and GPUs that spoil data are found. Checksums of sums allow for rounding; so with their next calls the ranks
also tell each other hashes of what all-reduces made, which must be the same everywhere. There is no exchange after a
call, since one rank may make it asynchronously and another one not. Where ranks may pass 8-bit floats of two kinds
(`float8`), kinds of one format are the same, hashes are of values, and sums have no checksum.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np

import hetcoll._native as _native

from .. import calls
from ..calls import Call
from ..calls.buffers import Buffer, array_of, element_type
from ..errors import ArgumentError, spell_ranks
from ..health.diagnosis import Diagnosis
from ..health.verdicts import Kind
from ..types import COMPLEX, CUT, FLOATS, FROM_ROOT, OCP_OF, REDUCING, TO_ROOT, Collective, Format
from ..work import Work
from .checksums import Fold, foldable, room

Start = Callable[[Call, bool, float], Work]
_DIGEST = 8  # bytes of a hash
_TEXT = 256  # bytes as JSON to say what is not finite
_MADE, _HASH = 4, 32  # hashes of all-reduces that are told at a time, and the bytes of one


class Told:
    """What each rank tells this one before a call. It can be read once `work` is over."""

    def __init__(self, work: Work, rows: np.ndarray[Any, np.dtype[np.uint8]], number: int) -> None:
        self.work, self.number, self._rows = work, number, rows

    def read(self) -> list[tuple[str, Any, list[tuple[int, str]]] | None]:
        """By rank: what is not finite, a checksum, and of some earlier calls their numbers and hashes; see `said`."""
        return [said(row) for row in self._rows]


class CrossCheck:
    """One communicator's checks of collectives. `start` begins a call, asynchronous or not, of so many seconds. With
    `forgives` an input that is not finite is no error, and nothing is known of its result."""

    def __init__(self, rank: int, size: int, start: Start, diagnosis: Diagnosis, *, forgives: bool = False) -> None:
        self._rank, self._size, self._start, self._diagnosis = rank, size, start, diagnosis
        self._forgives = forgives
        self._lock = threading.Lock()  # guards what follows
        self._number = 0  # of calls
        self._untold: deque[tuple[int, str]] = deque()  # of all-reduces: their numbers, and hashes of the results
        self._made: dict[int, dict[int, str]] = {}  # by number: the hashes of the ranks
        self._calls: dict[int, str] = {}

    def tell(self, call: Call, converts: bool, async_op: bool, seconds: float) -> Told:
        """Begin to tell the others of this rank's input. `converts`: ranks may have other kinds of 8-bit floats."""
        source, parts = given(call, self._rank), shares(call, self._size)[0]
        odd = "" if source is None else find_odd(source)
        sums = [None] * len(parts) if source is None else self._checksums(call, source, converts)
        with self._lock:
            made = [self._untold.popleft() for _ in range(min(_MADE, len(self._untold)))]
            self._number = number = self._number + 1
            if call.collective is Collective.ALLREDUCE:
                self._calls[number] = call.describe()
        label, space = f"HETCOLL_CHECK before {_common(call, converts)}", _TEXT + room(len(parts)) + _MADE * _HASH
        mine = np.stack([row_of([odd, each, made], space) for each in sums])
        rows = np.empty((self._size, space), np.uint8)
        if call.collective.plain in CUT:
            telling = replace(calls.alltoall(self._rank, self._size, mine, rows), label=label)
        else:
            telling = calls.meeting(self._rank, label, mine, rows)
        return Told(self._start(telling, async_op, seconds), rows, number)

    def check_input(self, call: Call, told: Told) -> None:
        """ArgumentError, on every rank, where the input of one is not finite. CommunicationError where they say that
        they hold different results of an earlier all-reduce."""
        problems = []
        for rank, found in enumerate(told.read()):
            if found is None:
                self._fail(f"what rank {rank} told rank {self._rank} of {call.describe()} came changed")
            odd, _, made = found
            if odd:
                problems.append(f"rank {rank}: {odd}")
            for number, text in made:
                self._compare(rank, number, text)
        if problems:
            with self._lock:
                self._calls.pop(told.number, None)
            if self._forgives:
                return
            raise ArgumentError(f"HETCOLL_CHECK: the input of {call.describe()} is not finite: {'; '.join(problems)}")

    def check_result(self, call: Call, converts: bool, told: Told) -> None:
        """CommunicationError, which all ranks hear of, where this one has got something else than the inputs make."""
        result = call.recv or call.send
        if result is None or (call.collective in TO_ROOT and call.root != self._rank):
            return
        rows = told.read()
        if self._forgives and any(row is not None and row[0] for row in rows):
            return
        if problem := self._wrong(call, result, converts, [row and row[1] for row in rows]):
            self._fail(f"the result of {call.describe()} on rank {self._rank} is wrong: {problem}")
        if call.collective is Collective.ALLREDUCE:
            with self._lock:
                self._untold.append((told.number, hash_of(result, converts)))

    def pass_over(self, call: Call, told: Told) -> None:
        """In place of `check_result`."""
        if call.collective is Collective.ALLREDUCE:
            with self._lock:
                self._untold.append((told.number, ""))

    def _compare(self, rank: int, number: int, text: str) -> None:
        """What `rank` holds of an all-reduce, with what the others do, once all have told."""
        with self._lock:
            found = self._made.setdefault(number, {})
            found[rank] = text
            if len(found) < self._size:
                return
            del self._made[number]
            call = self._calls.pop(number)
        holders: dict[str, list[int]] = {}
        for each, told in sorted(found.items()):
            if told:  # it has looked
                holders.setdefault(told, []).append(each)
        if len(holders) > 1:
            parts = [f"{spell_ranks(ranks)}: {told}" for told, ranks in holders.items()]
            self._fail(f"the result of {call} is not the same everywhere: {'; '.join(parts)}")

    def _checksums(self, call: Call, source: Buffer, converts: bool) -> list[Any]:
        parts = _parts(source, shares(call, self._size)[0])
        if call.collective not in REDUCING:
            return [hash_of(part, converts) for part in parts]
        if converts or not foldable(call):
            return [None] * len(parts)
        fold = Fold(call, self._size, len(parts))
        return [fold.of(array_of(part)) for part in parts]

    def _wrong(self, call: Call, result: Buffer, converts: bool, given: list[Any]) -> str:
        """What is wrong with what this rank has got, if anything, where the ranks gave what has these checksums."""
        if call.compress is not Format.NONE:
            return ""
        if call.collective in REDUCING:
            if converts or not foldable(call):
                return ""
            return Fold(call, self._size, len(shares(call, self._size)[0])).differs(given, array_of(result))
        sources = [call.root] if call.collective in FROM_ROOT else range(self._size)
        parts = _parts(result, shares(call, self._size)[1])
        wrong = [rank for rank, part in zip(sources, parts, strict=True) if hash_of(part, converts) != given[rank]]
        return f"what {spell_ranks(wrong)} gave came changed" if wrong else ""

    def _fail(self, problem: str) -> NoReturn:
        self._diagnosis.post(Kind.CORRUPT, -1, f"HETCOLL_CHECK: {problem}")
        raise self._diagnosis.error()


def row_of(what: object, space: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`what` as JSON in so many bytes, behind a hash of it."""
    blob = json.dumps(what).encode()
    assert len(blob) + _DIGEST <= space, f"{len(blob)} bytes, room for {space}"
    blob = blob.ljust(space - _DIGEST)
    return np.frombuffer(_digest(blob) + blob, np.uint8)


def said(row: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    """What `row_of` was given; None where the bytes have changed since."""
    digest, blob = row[:_DIGEST].tobytes(), row[_DIGEST:].tobytes()
    return json.loads(blob) if _digest(blob) == digest else None


def _digest(blob: bytes) -> bytes:
    return hashlib.blake2b(blob, digest_size=_DIGEST).digest()


def shares(call: Call, size: int) -> tuple[list[int], list[int]]:
    """Elements of the parts that a rank gives and gets, by rank where they are cut so."""
    if call.collective is Collective.ALLTOALLV:
        send, recv = ([b - a for a, b in pairwise(table)] for table in (call.send_table, call.recv_table))
        return send, recv
    return call.shares(size)


def _parts(buffer: Buffer, shares: Sequence[int]) -> list[Buffer]:
    offsets = accumulate(shares, initial=0)
    return [buffer.part(at, count) for at, count in zip(offsets, shares, strict=False)]


def given(call: Call, rank: int) -> Buffer | None:
    """What `rank` gives to a collective."""
    return call.send if call.collective not in FROM_ROOT or call.root == rank else None


def _common(call: Call, converts: bool) -> str:
    """The call as all ranks have it."""
    return (replace(call, dtype=OCP_OF.get(call.dtype, call.dtype)) if converts else call).describe()


def find_odd(buffer: Buffer) -> str:
    """How many elements are not finite, and the first of them; nothing where all are."""
    if buffer.dtype not in FLOATS | COMPLEX:
        return ""
    values = array_of(buffer)
    odd = np.flatnonzero(~np.isfinite(values))
    return f"{odd.size} of {values.size} elements, the first is {values[odd[0]]} at {odd[0]}" if odd.size else ""


def hash_of(buffer: Buffer, converts: bool = False) -> str:
    """16 hexadecimal digits that are equal where the bytes are; with `converts`, where the values are that both kinds
    of 8-bit floats hold."""
    values = _in_common(buffer) if converts else array_of(buffer)
    return hashlib.blake2b(values.view(np.uint8).data, digest_size=_DIGEST).hexdigest()


def _in_common(buffer: Buffer) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A host buffer's values that both kinds hold: the same numbers, and one NaN, of whatever kind it is."""
    ocp = OCP_OF.get(buffer.dtype, buffer.dtype)
    codes = np.empty(buffer.count, np.uint8)
    _native.convert_float8(int(codes.ctypes.data), buffer.ptr, buffer.count, buffer.dtype, ocp)
    _native.convert_float8(int(codes.ctypes.data), int(codes.ctypes.data), buffer.count, ocp, ocp)
    values = codes.view(element_type(ocp.label)).astype(np.float32) + np.float32(0)  # no -0
    values[np.isnan(values)] = np.nan
    return values
