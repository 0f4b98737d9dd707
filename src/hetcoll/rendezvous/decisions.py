"""A rank's side of what ranks decide together through the store: see `rolls`."""

from __future__ import annotations

from typing import NamedTuple

from .control import ControlClient
from .protocol.wire import I64, U32, Op


class Place(NamedTuple):
    """Where a rank is in a group that has grown: the group's name, its rank there, the size, and what members told."""

    group: bytes
    rank: int
    size: int
    told: bytes


def shrink(control: ControlClient, group: bytes, timeout: float) -> tuple[int, list[int]]:
    """Which ranks of `group` go on: all of them that call this, once no other is alive or `timeout` has passed.

    All get the same answer: the number of this roll call, and the ranks in rising order. InitError where the others
    have gone on already.
    """
    membership = control.membership(group)
    fields = group, U32.pack((membership.rolls if membership else 0) + 1)
    number, *ranks = (U32.unpack(field)[0] for field in control.decide(Op.SHRINK, fields, timeout))
    return number, ranks


def agree(control: ControlClient, group: bytes, number: int, flag: int, timeout: float) -> int:
    """The bits that the `flag` of every rank has that calls this with the same `number`, once no other is alive.

    InitError on all where a rank that is alive does not call within `timeout` seconds.
    """
    (said,) = control.decide(Op.AGREE, (group, U32.pack(number), I64.pack(flag)), timeout)
    return int(I64.unpack(said)[0])


def grow(control: ControlClient, group: bytes, number: int, count: int, told: bytes, timeout: float) -> Place:
    """Take `count` newcomers in, which are told what rank 0 told; all members call this with the same `number`.

    InitError on all where a member or newcomers do not come within `timeout` seconds, PeerLostError where one dies.
    """
    return _read(control.decide(Op.GROW, (group, U32.pack(number), U32.pack(count), told), timeout))


def come(control: ControlClient, timeout: float) -> Place:
    """Wait to be taken in. InitError where no group grows within `timeout` seconds."""
    return _read(control.decide(Op.ADMIT, (), timeout))


def _read(fields: list[bytes]) -> Place:
    name, rank, size, told = fields
    return Place(name, U32.unpack(rank)[0], U32.unpack(size)[0], told)
