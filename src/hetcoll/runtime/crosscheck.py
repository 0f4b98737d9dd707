"""HETCOLL_CHECK=1: blocking collectives are checked across the ranks, for programs whose results are wrong.

Before anything moves the ranks meet and tell each other whether their input holds what is not finite (NaN, infinity):
if so every rank raises the same error, which says whose it is, and no buffer was touched. The meeting is called after
the call, so ranks that call different things are found there, too. Afterwards, where all ranks must hold the same, they
compare a hash of it. And what a rank got is what the inputs make: at the meeting the ranks tell each other checksums of
what they give (`checksums`), so memory and GPUs that spoil data are found. Where ranks may pass 8-bit floats of two
kinds (`float8`), kinds of one format are the same, hashes are of values, and sums have no checksum.
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

from ..calls import Call
from ..calls.buffers import Buffer, element_type
from ..errors import ArgumentError, spell_ranks
from ..health.diagnosis import Diagnosis, Kind
from ..types import COMPLEX, CUT, FLOATS, FROM_ROOT, OCP_OF, REDUCING, SAME, TO_ROOT, Collective, Format
from .checksums import Fold, foldable, room

Meet = Callable[[str, bytes, float, int], list[bytes]]
_LEAST = 512  # bytes to tell the others what is not finite, or a hash
_EMPTY: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)


class CrossCheck:
    """One communicator's checks. `meet` gives every rank's blob, by rank."""

    def __init__(self, rank: int, size: int, meet: Meet, diagnosis: Diagnosis) -> None:
        self._rank, self._size, self._meet, self._diagnosis = rank, size, meet, diagnosis
        self._given: list[list[Any]] = []  # by rank: the checksums of what it gives, of each part

    def before(self, call: Call, converts: bool, seconds: float) -> None:
        """ArgumentError on every rank where the input of one is not finite. `converts`: ranks may have other kinds of
        8-bit floats."""
        source = given(call, self._rank)
        mine = ("", []) if source is None else (find_odd(source), self._checksums(call, source, converts))
        space = room(len(_shares(call, self._size)[0]))
        told = self._tell(f"HETCOLL_CHECK before {_common(call, converts)}", mine, seconds, space)
        self._given = [given for _, given in told]
        problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text]
        if problems:
            raise ArgumentError(f"HETCOLL_CHECK: the input of {call.describe()} is not finite: {'; '.join(problems)}")

    def after(self, call: Call, converts: bool, seconds: float) -> None:
        """CommunicationError on every rank where ranks hold different results, or one a result that is wrong."""
        result = call.recv or call.send
        if call.collective in SAME:
            mine = "" if result is None else hash_of(result, converts)
            holders: dict[str, list[int]] = {}
            for rank, told in enumerate(self._tell(f"HETCOLL_CHECK after {_common(call, converts)}", mine, seconds)):
                holders.setdefault(told, []).append(rank)
            if len(holders) > 1:
                parts = [f"{spell_ranks(ranks)}: {told}" for told, ranks in holders.items()]
                self._fail(f"the result of {call.describe()} is not the same everywhere: {'; '.join(parts)}")
        if result is None or (call.collective in TO_ROOT and call.root != self._rank):
            return
        if problem := self._wrong(call, result, converts):
            self._fail(f"the result of {call.describe()} on rank {self._rank} is wrong: {problem}")

    def _checksums(self, call: Call, source: Buffer, converts: bool) -> list[Any]:
        parts = _parts(source, _shares(call, self._size)[0])
        if call.collective not in REDUCING:
            return [hash_of(part, converts) for part in parts]
        fold = Fold(call, self._size, len(parts))
        return [fold.of(view(part)) for part in parts] if foldable(call) and not converts else []

    def _wrong(self, call: Call, result: Buffer, converts: bool) -> str:
        """What is wrong with what this rank has got, if anything."""
        if call.compress is not Format.NONE:
            return ""
        at = self._rank if call.collective.plain in CUT else 0  # the part of what each rank gives that is for this one
        if call.collective in REDUCING:
            if converts or not foldable(call):
                return ""
            fold = Fold(call, self._size, len(self._given[0]))
            return fold.differs([given[at] for given in self._given], view(result))
        sources = [call.root] if call.collective in FROM_ROOT else range(self._size)
        parts = _parts(result, _shares(call, self._size)[1])
        wrong = [
            rank for rank, part in zip(sources, parts, strict=True) if hash_of(part, converts) != self._given[rank][at]
        ]
        return f"what {spell_ranks(wrong)} gave came changed" if wrong else ""

    def _fail(self, problem: str) -> NoReturn:
        self._diagnosis.post(Kind.CORRUPT, -1, f"HETCOLL_CHECK: {problem}")
        raise self._diagnosis.error()

    def _tell(self, label: str, mine: object, seconds: float, space: int = 0) -> list[Any]:
        return [json.loads(blob) for blob in self._meet(label, json.dumps(mine).encode(), seconds, _LEAST + space)]


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
