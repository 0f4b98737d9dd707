"""How large slots and pieces of messages between GPUs are: the engine cuts plans by it, and so does the simulator.

Examples
--------
>>> cut(64 << 20, 64 << 20, slot_bytes(2, 1), Lengths(1, 1, 1, False)).at
(0, 1, 3, 6, 10, 14, 18, 22, 26, 30, 33, 37, 41, 45, 49, 53, 57, 61, 63, 64)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

from ..errors import ArgumentError
from .ir import Op, Plan
from .pipeline import longest_message, ramp, share_units

SLOTS = 3  # of an edge and channel
GRAIN = 256  # bytes: units begin at multiples, as copy engines and vector loads like it
LOCAL_MESSAGES = 8  # of a piece, where vendors' libraries take part on all ranks: their calls cost as much as messages
BEGIN_CALLS = 8  # of the driver in a collective, besides those of its pieces: native/gpu/queue.cc
CALLS = {
    Op.SEND: 5, Op.RECV: 5, Op.RECV_REDUCE: 8, Op.COPY: 3, Op.REDUCE: 3, Op.SCALE: 3, Op.ROUND: 3, Op.LOCAL: 2,
}  # fmt: skip
"""Calls of the driver for a piece of a step, about: native/gpu/program.cc. A message is a wait, a copy and a word on
streams of their own, with an event between; what was added waits once more."""
_SMALLEST = 256 << 10  # bytes of a piece
_MOST_SMALLEST = _LEAST_LARGEST = 1 << 20
_QUARTER = 2 << 20  # bytes up to which a message is cut into four
_ENDS, _MIDDLE = 4, 3  # the first and last piece of a message have a part in 2**4 of it, most others one in 2**3
_FAR = 2 << 20  # bytes of a slot where some messages go between hosts: what was measured to be best over sockets
# Bytes of slots in use at once: with half as much again all-reduces of four H200s take a tenth longer.
_CACHED = 24 << 20
_NEAR = 48 << 20  # of those on a GPU, for each channel
SLOT_STEP = 256 << 10
LEAST_SLOT = 32 << 10  # where the budget of pinned memory has no room for a step
_MOST_EQUAL = 1024  # aligned units of a part: more would leave parts that are mostly alignment


class Lengths(NamedTuple):
    """Of a set of plans: units of what lies in one piece in a buffer, and of the longest message; the common multiple
    of their islands' sizes; whether every rank has LOCAL steps."""

    units: int
    longest: int
    inside: int
    local: bool

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Lengths:
        """Of all ranks' plans, or of those that stand for all."""
        first = plans[0]
        local = all(plan.columns.locals for plan in plans)
        return cls(share_units(first), longest_message(plans), lcm(*map(len, first.islands)), local)


class Cut(NamedTuple):
    """Where the pieces of a plan begin and end, in parts that have `equal` aligned runs of units each (`ir.offsets`);
    a message holds `most` parts of one."""

    at: tuple[int, ...]
    most: int
    equal: int

    @property
    def length(self) -> int:
        return self.at[-1]


def spill(fifos: int, slot: int) -> bool:
    """Whether the slots of so many channels of a host do not fit the part of its cache that devices write to."""
    return fifos * SLOTS * slot > _CACHED


def slot_bytes(ranks: int, largest: int, *, far: bool = False, near: bool = False) -> int:
    """Bytes of a slot of so many ranks, the `largest` of whose islands has that many: so small that what is in the
    slots of a host stays in the part of the last-level cache that devices may write to, else large, to hide what a
    message costs. `far`: some messages go between hosts. `near`: ranks of one island have theirs on GPUs.

    Not all ranks fill slots at full speed: those of the largest island wait for the others, which have as much to send.
    """
    if far:
        return _FAR
    if near and largest == ranks:
        return max(SLOT_STEP, _NEAR // (SLOTS * ranks) // SLOT_STEP * SLOT_STEP)
    busy = min(ranks, 2 * (ranks - largest))
    return max(SLOT_STEP, _CACHED // (SLOTS * max(2, busy)) // SLOT_STEP * SLOT_STEP)


def piece_bytes(nbytes: int, slot: int) -> tuple[int, int]:
    """Bytes of the first and last piece of a message, and most of the others: each piece costs some microseconds, and
    nothing of a piece can be used before all of it has come."""
    largest = min(slot, max(_LEAST_LARGEST, _power(nbytes >> _MIDDLE)))
    return min(max(_SMALLEST, _power(nbytes >> _ENDS)), _MOST_SMALLEST, largest // 2), largest


def message_pieces(nbytes: int, slot: int) -> tuple[int, int]:
    """The same of a message that is no collective's: nobody adds to it piece by piece, so that more is lost by the
    microseconds of each than is won by more of them. Four carry 4 and 8 MiB fastest among two H200s."""
    largest = min(slot, max(_LEAST_LARGEST, min(_power(nbytes >> 2), _QUARTER), _power(nbytes >> _MIDDLE)))
    return min(_MOST_SMALLEST, largest), largest


def cut(nbytes: int, share: int, slot: int, lengths: Lengths) -> Cut:
    """Of a collective whose larger buffer has `nbytes` bytes, its longest share `share`."""
    smallest, largest = piece_bytes(nbytes, slot)
    length, equal = parts(lengths, share, smallest, GRAIN)
    most = largest // smallest
    return Cut(ramp(length, most * LOCAL_MESSAGES if lengths.local else most), most, equal)


def parts(lengths: Lengths, nbytes: int, smallest: int, grain: int = 1) -> tuple[int, int]:
    """How many parts of at most `smallest` bytes make the longest message, and how each is aligned.

    Parameters
    ----------
    lengths
        Of the plans, not yet pipelined.
    nbytes
        Bytes of the buffer, or of its longest share, where it consists of shares.
    smallest
        Bytes of the smallest piece. Pieces of up to ``slot // smallest`` parts fit a slot.
    grain
        Bytes that units will be aligned to (see `ir.offsets`).

    Returns
    -------
    length
        What `ramp` wants: at least 1, rounded up to three significant bits, so that few plans serve all sizes.
    equal
        Into how many equal runs of units each part is cut, for `ir.offsets`. All units where these are few, else what
        the members of islands own, since vendors' libraries want that equal; 1 where that is too much, too.

    Raises
    ------
    ArgumentError
        `smallest` does not hold one grain of each unit of the longest message, nor two grains and more.
    """
    units, longest, inside, _ = lengths
    for equal in (units, inside, 1):
        # Bytes that the longest message of a part may have, before alignment; what is cut elsewhere adds a grain.
        room = smallest // longest // grain * grain * longest
        if equal < units:
            room = smallest - grain - -(-longest * equal * grain // units)
        fits = equal == 1 or (equal <= _MOST_EQUAL and (equal == units or 2 * room >= smallest))
        if fits and room > 0:
            wanted = max(1, -(-nbytes * longest // (units * room)))
            coarse = 1 << max(0, wanted.bit_length() - 3)
            return -(-wanted // coarse) * coarse, equal
    raise ArgumentError(f"a piece of {smallest} bytes does not hold {longest} units of {grain} bytes")


def _power(n: int) -> int:
    """The power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
