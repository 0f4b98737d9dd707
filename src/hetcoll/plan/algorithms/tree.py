"""Trees: double binary trees for streams, binomial trees for small messages.

Two binary trees carry half the buffer each. A rank that is inner in one is a leaf in the other, so nobody sends or
receives more than the buffer's size: full bandwidth with about log2 n hops. Sanders, Speck and Träff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan" (Parallel Computing 2009).

Each child has a lane of its own, so that an inner rank streams: what it gets from one it adds to what came from the
other at the pace of elements.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...types import ROOTED, Collective
from ..costs import floor_log2
from ..ir import Op, Plan, Span
from .base import Draft, Rounds, inp, out, register, tmp


def _parent(place: int, n: int) -> int:
    """The in-order binary tree of places 1..n-1, hung below place 0: odd places are leaves."""
    bit = place & -place
    up = (place ^ bit) | (bit << 1)
    return up if up < n else place ^ bit


def _place(v: int, n: int, tree: int) -> int:
    """Where rank v (counted from the root) stands in `tree`. In the second tree, inner places go to the first's leaves.

    With an even number of places below the root they are mirrored, with an odd number shifted by one.
    """
    if tree == 0 or v == 0:
        return v
    return n - v if n % 2 else v % (n - 1) + 1


def _at(place: int, n: int, tree: int) -> int:
    """The inverse of `_place`: which rank stands there."""
    if tree == 0 or place == 0:
        return place
    if n % 2:
        return n - place
    return place - 1 if place > 1 else n - 1


def _below_place(place: int, n: int) -> list[int]:
    """The places whose `_parent` this is, in order."""
    if place == 0:
        return [1 << floor_log2(n - 1)] if n > 1 else []
    half = (place & -place) >> 1
    left = [place - half] if half else []
    while half and place + half >= n:
        half >>= 1
    return [*left, place + half] if half else left


class Family(NamedTuple):
    """A rank's neighbours in one tree; the root's parent is None."""

    parent: int | None
    children: tuple[int, ...]


def family(size: int, rank: int, root: int, tree: int) -> Family:
    """The neighbours of `rank` in the first or second tree over all ranks, both with `root` on top."""
    place = _place((rank - root) % size, size, tree)

    def who(place: int) -> int:
        return (_at(place, size, tree) + root) % size

    up = who(_parent(place, size)) if rank != root else None
    return Family(up, tuple(map(who, _below_place(place, size))))


def _rounds(plan: Plan) -> Rounds:
    """Up, the higher a rank the later it is sent to, by its second child after its first; then down, the higher the
    sooner. A place is as high as its trailing zeros are many."""
    n, top = plan.size, 1 + plan.size.bit_length()
    root = plan.root if plan.collective in ROOTED else 0
    turned = 0 if plan.collective is Collective.BROADCAST else top + 1
    hops = np.zeros(len(plan.steps), np.int64)
    for i, step in enumerate(plan.steps):
        if step.peer >= 0:
            a, b = (_place((r - root) % n, n, step.channel) for r in (plan.rank, step.peer))
            over, under = (a, b) if b and (not a or a & -a > b & -b) else (b, a)
            height = (over & -over).bit_length() if over else top
            up = (over == a) is (step.op is not Op.SEND)
            hops[i] = 2 * height + (under > over) if up else 2 * (turned + top - height)
    return Rounds(np.zeros_like(hops), hops)


def _up(p: Draft, tree: int, lane: int, mine: Family, partial: Span) -> int | None:
    """Adds what the children send to the own input, in lanes `lane` and `lane + 1`; the root's total goes to RECV."""
    total, ready = inp(tree), None
    for i, child in enumerate(mine.children):
        ready = p.recv_reduce(lane + i, partial, total, child, channel=tree, after=[ready])
        total = partial
    if mine.parent is not None:
        p.send(lane + 2, total, mine.parent, channel=tree, after=[ready])
    return ready


def _down(p: Draft, tree: int, lane: int, mine: Family, held: Span, ready: int | None) -> None:
    """Takes the parent's result and hands it to the children, in lanes `lane` to `lane + 2`."""
    if mine.parent is not None:
        ready = p.recv(lane, out(tree), mine.parent, channel=tree)
    for i, child in enumerate(mine.children):
        p.send(lane + 1 + i, held, child, channel=tree, after=[ready])


@register(Collective.ALLREDUCE, "tree", rounds=_rounds)
def allreduce(p: Draft) -> None:
    """Up and down both trees: 2 ceil(log2 n) hops. No rank sends or receives more than twice the buffer."""
    p.units = 2
    for tree in (0, 1):
        lane, mine = 8 * tree, family(p.size, p.rank, 0, tree)
        ready = _up(p, tree, lane, mine, out(tree))
        if mine.parent is None:
            ready = p.scaled(lane + 3, out(tree), ready)
        _down(p, tree, lane + 4, mine, out(tree), ready)


@register(Collective.BROADCAST, "tree", rounds=_rounds)
def broadcast(p: Draft) -> None:
    """Down both trees: ceil(log2 n) hops. No rank sends more than the buffer's size, the root sends each half once."""
    p.units = 2
    for tree in (0, 1):
        mine = family(p.size, p.rank, p.root, tree)
        _down(p, tree, 4 * tree, mine, inp(tree) if mine.parent is None else out(tree), None)


@register(Collective.REDUCE, "tree", rounds=_rounds)
def reduce(p: Draft) -> None:
    """Up both trees: ceil(log2 n) hops. No rank receives more than the buffer's size, the root gets each half once."""
    p.units = 2
    for tree in (0, 1):
        mine = family(p.size, p.rank, p.root, tree)
        if mine.parent is not None and mine.children:
            p.scratch_copies = 1
        ready = _up(p, tree, 4 * tree, mine, out(tree) if mine.parent is None else tmp(tree))
        if mine.parent is None:
            p.scaled(4 * tree + 3, out(tree), ready)
