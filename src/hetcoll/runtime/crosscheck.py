"""HETCOLL_CHECK=1: blocking collectives are checked across the ranks, for programs whose results are wrong.

Before anything moves the ranks meet and tell each other whether their input holds what is not finite (NaN, infinity):
if so every rank raises the same error, which says whose it is, and no buffer was touched. The meeting is called after
the call, so ranks that call different things are found there, too. Afterwards, where all ranks must hold the same, they
compare a hash of it. Where ranks may pass 8-bit floats of two kinds (`float8`), kinds of
one format are the same, and hashes are of values.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import hetcoll._native as _native

from ..calls import Call
from ..calls.buffers import Buffer, element_type
from ..errors import ArgumentError, spell_ranks
from ..health.diagnosis import Diagnosis, Kind
from ..types import COMPLEX, FLOATS, OCP_OF, ROOTED, SAME, Collective

Meet = Callable[[str, bytes, float], list[bytes]]
_EMPTY: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)


class CrossCheck:
    """One communicator's checks. `meet` gives every rank's blob, by rank."""

    def __init__(self, rank: int, meet: Meet, diagnosis: Diagnosis) -> None:
        self._rank, self._meet, self._diagnosis = rank, meet, diagnosis

    def before(self, call: Call, converts: bool, seconds: float) -> None:
        """ArgumentError on every rank where the input of one is not finite. `converts`: ranks may have other kinds of
        8-bit floats."""
        source = given(call, self._rank)
        found = "" if source is None else find_odd(source)
        told = self._tell(f"HETCOLL_CHECK before {_common(call, converts)}", found, seconds)
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
        if problems:
            raise ArgumentError(f"HETCOLL_CHECK: the input of {call.describe()} is not finite: {'; '.join(problems)}")

    def after(self, call: Call, converts: bool, seconds: float) -> None:
        """CommunicationError on every rank where ranks hold different results."""
        if call.collective not in SAME:
            return
        result = call.recv or call.send
        mine = "" if result is None else hash_of(result, converts)
        holders: dict[str, list[int]] = {}
        for rank, told in enumerate(self._tell(f"HETCOLL_CHECK after {_common(call, converts)}", mine, seconds)):
            if told:
                holders.setdefault(told, []).append(rank)
        if len(holders) > 1:
            parts = [f"{spell_ranks(ranks)}: {told}" for told, ranks in holders.items()]
            text = f"HETCOLL_CHECK: the result of {call.describe()} is not the same everywhere: {'; '.join(parts)}"
            self._diagnosis.post(Kind.CORRUPT, -1, text)
            raise self._diagnosis.error()

    def _tell(self, label: str, mine: str, seconds: float) -> list[str]:
        return [json.loads(blob) for blob in self._meet(label, json.dumps(mine).encode(), seconds)]


def given(call: Call, rank: int) -> Buffer | None:
    """What `rank` gives to a collective."""
    gives = call.collective not in ROOTED or call.collective in (Collective.REDUCE, Collective.GATHER)
    return call.send if gives or call.root == rank else None


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
