"""What each algorithm takes, one row an algorithm: what the tuner's predictions start from.

The simulator counts the same on the plans themselves; ``test_tuner.py`` holds these formulas to that. An algorithm
without a row is taken only by name, never by itself.

Examples
--------
>>> COSTS[Collective.ALLREDUCE]["ring"](4).messages
12
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from math import lcm
from typing import NamedTuple

from ..types import Collective

Hosts = tuple[tuple[int, ...], ...]  # the ranks of each host: `Topology.hosts`


class Reach(Enum):
    """Whom an algorithm talks to: it decides how many ranks of a host share its network card at a time."""

    NEAR = "ranks that are next to each other: few messages leave a host"
    ANYONE = "anyone"


NEAR = Reach.NEAR


class Cost(NamedTuple):
    """What an algorithm takes. Bytes are in multiples of the larger of the collective's two buffers.

    `hops` is the longest chain of messages that wait for each other; the rest is about the rank that moves the most:
    messages sent and received, bytes sent, bytes received, and how many of these are added on arrival. `stepwise` says
    that ranks wait for each other at every step: whole messages depend on each other, or several streams meet in one
    rank. `answered` are bytes sent that were reduced from what the same peer sent: in shared memory they go back in the
    slots that they came in, at no cost. `mean` is what the average rank sends, as a part of what the busiest one does,
    where that was found to count: ranks that share cores are held up by all that is sent. `copied`: so much of the
    buffer is copied first, to scratch memory that ranks of a host have mapped; what is sent is read there. `turns`: for
    ranks that share at most so many cores, fewer than there are ranks; hops go from one to the next on its core.
    Elsewhere it is taken only by name.
    """

    hops: int
    messages: int
    sent: float
    received: float
    reduced: float = 0.0
    reach: Reach = Reach.ANYONE
    stepwise: bool = False
    answered: float = 0.0
    mean: float = 1.0
    copied: float = 0.0
    turns: int = 0


Levels = tuple[Cost, Cost]
"""The cost of an algorithm that is made for several hosts: what it takes inside them, and what between them, where
bytes are those of a whole host."""


def floor_log2(n: int) -> int:
    return n.bit_length() - 1


def ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


def _doubling(n: int) -> Cost:
    k = floor_log2(n)
    extra = n - (1 << k)
    rounds = k + (extra > 0)
    every = 2 * extra + k * (n - extra)  # messages: who sits out sends one, and its partner one back
    mean = every / (n * rounds) if n > 1 else 1.0
    return Cost(k + 2 * (extra > 0), 2 * rounds, rounds, rounds, rounds, mean=mean)


def _halving_doubling(n: int) -> Cost:
    k, folded = floor_log2(n), n & (n - 1) > 0
    once = 1 - 1 / (1 << k)
    moved = 2 * once + folded
    return Cost(2 * k + 2 * folded, 4 * k + 2 * folded, moved, moved, once + folded, stepwise=True)


_MOST_CORES = 32  # the most on which `chained` was measured


def _chained(n: int) -> Cost:
    """Of two chains; the last rank of the longer one does most."""
    short, long = n // 2 / n, (n - n // 2) / n
    first = n == 2  # and begins the other
    sent, received, reduced = (n - 1) * long + short, 1 + short * (not first), 1 - short * first
    return Cost(n, n + 3 - first, sent, received, reduced, copied=0.5, turns=_MOST_CORES)


def _below(n: int) -> float:
    """How often the buffer goes to the children of a tree's inner rank: two halves, but one or none among few ranks."""
    return min(n - 2, 2) / 2


def _tree_allreduce(n: int) -> Cost:
    below = _below(n)
    added = 1 if n == 2 else below  # of two ranks, one adds both halves
    return Cost(2 * ceil_log2(n), min(2 * n, 8), 1 + below, 1 + below, added, NEAR, stepwise=True)


def _tree_reduce(n: int) -> Cost:
    sent, received = (0, 1) if n == 2 else (1, _below(n))
    return Cost(ceil_log2(n), min(n, 4), sent, received, received, NEAR, stepwise=True)


COSTS: dict[Collective, dict[str, Callable[[int], Cost]]] = {
    Collective.ALLREDUCE: {
        "oneshot": lambda n: Cost(1, 2 * (n - 1), n - 1, n - 1, n - 1),
        "direct": lambda n: Cost(2, 4 * (n - 1), 2 * (n - 1) / n, 2 * (n - 1) / n, (n - 1) / n, answered=1 / n),
        "chained": _chained,
        "doubling": _doubling,
        "halving_doubling": _halving_doubling,
        "ring": lambda n: Cost(2 * (n - 1), 4 * (n - 1), 2 * (n - 1) / n, 2 * (n - 1) / n, (n - 1) / n, NEAR),
        "staged": lambda n: Cost(2, 4 * (n - 1), 2 * (n - 1) / n, 2 * (n - 1) / n, (n - 1) / n, copied=1),
        "tree": _tree_allreduce,
    },
    Collective.REDUCE_SCATTER: {
        "direct": lambda n: Cost(1, 2 * (n - 1), (n - 1) / n, (n - 1) / n, (n - 1) / n),
        "halving": lambda n: Cost(
            floor_log2(n), 2 * floor_log2(n), (n - 1) / n, (n - 1) / n, (n - 1) / n, stepwise=True
        ),
        "ring": lambda n: Cost(n - 1, 2 * (n - 1), (n - 1) / n, (n - 1) / n, (n - 1) / n, NEAR),
    },
    Collective.ALLGATHER: {
        "direct": lambda n: Cost(1, 2 * (n - 1), (n - 1) / n, (n - 1) / n),
        "doubling": lambda n: Cost(floor_log2(n), 2 * floor_log2(n), (n - 1) / n, (n - 1) / n, stepwise=True),
        "ring": lambda n: Cost(n - 1, 2 * (n - 1), (n - 1) / n, (n - 1) / n, 0, NEAR),
    },
    Collective.BROADCAST: {
        "direct": lambda n: Cost(1, n - 1, n - 1, 0),
        "binomial": lambda n: Cost(floor_log2(n), ceil_log2(n), ceil_log2(n), 0, 0, NEAR),
        "ring": lambda n: Cost(n - 1, min(n - 1, 2), 1, int(n > 2), 0, NEAR),
        "tree": lambda n: Cost(ceil_log2(n), min(n, 4), _below(n), 1, 0, NEAR, stepwise=True),
    },
    Collective.REDUCE: {
        "direct": lambda n: Cost(1, n - 1, 0, n - 1, n - 1),
        "binomial": lambda n: Cost(floor_log2(n), ceil_log2(n), 0, ceil_log2(n), ceil_log2(n), NEAR),
        "ring": lambda n: Cost(n - 1, min(n - 1, 2), int(n > 2), 1, 1, NEAR),
        "chain": lambda n: Cost(n, 2, 1, 1, 1, NEAR),
        "tree": _tree_reduce,
    },
    Collective.GATHER: {"direct": lambda n: Cost(1, n - 1, 0, (n - 1) / n)},
    Collective.SCATTER: {"direct": lambda n: Cost(1, n - 1, (n - 1) / n, 0)},
    Collective.ALLTOALL: {"pairwise": lambda n: Cost(1, 2 * (n - 1), (n - 1) / n, (n - 1) / n)},
    Collective.BARRIER: {
        "direct": lambda n: Cost(1, 2 * (n - 1), 0, 0),
        "dissemination": lambda n: Cost(ceil_log2(n), 2 * ceil_log2(n), 0, 0),
    },
}
"""By the number of ranks."""


def _allreduce_levels(hosts: Hosts) -> Levels:
    m, k = len(hosts), max(map(len, hosts))
    fewest = min(hosts, key=len)
    sizes = set(map(len, hosts))
    common = lcm(*sizes)
    atoms = len({common * j // size for size in sizes for j in range(size)})
    each = -(-atoms // len(fewest))  # atoms of the largest interval
    parts = -(-atoms // k) * m
    inside = Cost(2, 4 * (k - 1) * parts, 2 * (k - 1) / k, 2 * (k - 1) / k, (k - 1) / k)
    once = (m - 1) / m
    return inside, Cost(2, 4 * (m - 1) * each, 2 * once, 2 * once, once / len(fewest))


def _allgather_levels(hosts: Hosts) -> Levels:
    n, m, k = sum(map(len, hosts)), len(hosts), max(map(len, hosts))
    passing = 1 + -(-(n - k) // k)  # units that pass through one rank of the largest host
    inside = Cost(1, (k - 1) * passing + n - passing, (k - 1) * passing / n, (n - passing) / n)
    return inside, Cost(1, m - 1 + passing - 1, k * (m - 1) / n, (n - k) / n)


def _reduce_scatter_levels(hosts: Hosts) -> Levels:
    """The same the other way round: what was given is added."""
    (inside, between), n, m = _allgather_levels(hosts), sum(map(len, hosts)), len(hosts)
    inside = Cost(1, inside.messages, inside.received, inside.sent, inside.sent)
    return inside, Cost(1, between.messages, between.received, between.sent, (m - 1) / n)


LEVELS: dict[Collective, dict[str, Callable[[Hosts], Levels]]] = {
    Collective.ALLREDUCE: {"hierarchical": _allreduce_levels},
    Collective.ALLGATHER: {"hierarchical": _allgather_levels},
    Collective.REDUCE_SCATTER: {"hierarchical": _reduce_scatter_levels},
}
"""By the ranks of each host, where some have several and there are several hosts."""


def stated(collective: Collective, names: Iterable[str], size: int, hosts: Hosts) -> dict[str, Cost | Levels]:
    """What these algorithms take; without those that state nothing for `size` ranks on these `hosts`."""
    found: dict[str, Cost | Levels] = {}
    flat = COSTS.get(collective, {})
    levels = LEVELS.get(collective, {}) if 1 < len(hosts) < size else {}
    for name in names:
        if name in flat:
            found[name] = flat[name](size)
        elif name in levels:
            found[name] = levels[name](hosts)
    return found
