"""What each algorithm takes, one row an algorithm: what the tuner's predictions start from.

The simulator counts the same on the plans themselves; ``test_tuner.py`` holds these formulas to that. An algorithm
without a row is taken only by name, never by itself.

Examples
--------
>>> COSTS[Collective.ALLREDUCE]["ring"](4).messages
12
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cached_property, lru_cache
from itertools import chain
from math import lcm
from typing import NamedTuple

from ..types import ROOTED, WHOLE, Collective

Hosts = tuple[tuple[int, ...], ...]  # the ranks of each host: `Topology.hosts`


class Groups:
    """The ranks of each host or island, of which `size` is the number, or 0 if these do not hold each rank once."""

    def __init__(self, ranks: Hosts) -> None:
        numbers = sorted(chain.from_iterable(ranks))
        self.ranks = ranks
        self.size = len(numbers) if all(ranks) and numbers == list(range(len(numbers))) else 0

    @cached_property
    def common(self) -> int:
        """Into as many parts as all can cut evenly: the least number."""
        return lcm(*map(len, self.ranks))

    @cached_property
    def of(self) -> dict[int, int]:
        """In which group each rank is."""
        return {rank: i for i, group in enumerate(self.ranks) for rank in group}


@lru_cache(maxsize=8)
def one_group(size: int) -> Groups:
    """All ranks on one host."""
    return Groups((tuple(range(size)),))


_LAST = [one_group(1)]


def groups_of(ranks: Hosts) -> Groups:
    """These groups. The last ones are kept, as a rank may draw the plans of many over the same hosts: to compare them,
    and to hash them, takes long."""
    if _LAST[0].ranks is not ranks:
        _LAST[0] = Groups(ranks)
    return _LAST[0]


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
    Elsewhere it is taken only by name. `senders`: so many send to one rank at a time.
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
    senders: int = 1


Levels = tuple[Cost, Cost]
"""The cost of an algorithm that is made for several hosts: what it takes inside them, and what between them, where
bytes are those of a whole host."""


def floor_log2(n: int) -> int:
    return n.bit_length() - 1


def ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


def _doubling(n: int) -> Cost:
    k = n.bit_length() - 1
    extra = n - (1 << k)
    rounds = k + (extra > 0)
    every = 2 * extra + k * (n - extra)  # messages: who sits out sends one, and its partner one back
    mean = every / (n * rounds) if n > 1 else 1.0
    return Cost(k + 2 * (extra > 0), 2 * rounds, rounds, rounds, rounds, mean=mean)


def _halving_doubling(n: int) -> Cost:
    k, folded = n.bit_length() - 1, n & (n - 1) > 0
    once = 1 - 1 / (1 << k)
    moved = 2 * once + folded
    return Cost(2 * k + 2 * folded, 4 * k + 2 * folded, moved, moved, once + folded, stepwise=True)


def _reduce_broadcast(n: int) -> Cost:
    below = (n - 1).bit_length()
    messages = n - 1 + below
    mean = 4 * (n - 1) / (n * messages) if n > 1 else 1.0
    return Cost(n.bit_length(), messages, below, n - 1, n - 1, stepwise=True, mean=mean, senders=max(n - 1, 1))


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
        "oneshot": lambda n: Cost(1, 2 * (n - 1), n - 1, n - 1, n - 1, senders=n - 1),
        "direct": lambda n: Cost(
            2, 4 * (n - 1), 2 * (n - 1) / n, 2 * (n - 1) / n, (n - 1) / n, answered=1 / n, senders=n - 1
        ),
        "chained": _chained,
        "reduce_broadcast": _reduce_broadcast,
        "doubling": _doubling,
        "halving_doubling": _halving_doubling,
        "ring": lambda n: Cost(2 * (n - 1), 4 * (n - 1), 2 * (n - 1) / n, 2 * (n - 1) / n, (n - 1) / n, NEAR),
        "staged": lambda n: Cost(
            2, 4 * (n - 1), 2 * (n - 1) / n, 2 * (n - 1) / n, (n - 1) / n, copied=1, senders=n - 1
        ),
        "tree": _tree_allreduce,
    },
    Collective.REDUCE_SCATTER: {
        "direct": lambda n: Cost(1, 2 * (n - 1), (n - 1) / n, (n - 1) / n, (n - 1) / n, senders=n - 1),
        "halving": lambda n: Cost(
            floor_log2(n), 2 * floor_log2(n), (n - 1) / n, (n - 1) / n, (n - 1) / n, stepwise=True
        ),
        "hypercube": lambda n: Cost(
            floor_log2(n), 2 * floor_log2(n), floor_log2(n) / 2, floor_log2(n) / 2, (n - 1) / n, stepwise=True
        ),
        "ring": lambda n: Cost(n - 1, 2 * (n - 1), (n - 1) / n, (n - 1) / n, (n - 1) / n, NEAR),
    },
    Collective.ALLGATHER: {
        "direct": lambda n: Cost(1, 2 * (n - 1), (n - 1) / n, (n - 1) / n, senders=n - 1),
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
        "direct": lambda n: Cost(1, n - 1, 0, n - 1, n - 1, mean=2 / n, senders=n - 1),
        "binomial": lambda n: Cost(floor_log2(n), ceil_log2(n), 0, ceil_log2(n), ceil_log2(n), NEAR),
        "ring": lambda n: Cost(n - 1, min(n - 1, 2), int(n > 2), 1, 1, NEAR),
        "chain": lambda n: Cost(n, 2, 1, 1, 1, NEAR, stepwise=True),  # a loop: the root waits for its own term
        "reduce_scatter_gather": lambda n: Cost(
            2, 3 * (n - 1), (n - 1) / n, 2 * (n - 1) / n, (n - 1) / n, senders=n - 1
        ),
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


def levels(collective: Collective, cost: Cost, hosts: Hosts, *, led: bool) -> Levels:
    """What an algorithm takes among `hosts` (`algorithms.hosts`) whose `cost` is that of as many ranks.

    Of hosts that are not alike, the largest one's ranks are taken for the busiest inside, the smallest one's between.
    """
    n, m, k, least = sum(map(len, hosts)), len(hosts), max(map(len, hosts)), min(map(len, hosts))
    common = lcm(*map(len, hosts))
    atoms = len({common * j // size for size in set(map(len, hosts)) for j in range(size)})
    inside = _led(collective, cost, n, m, k) if led else _split(collective, cost, m, k, -(-atoms // k))
    if not led:
        cost = cost._replace(messages=cost.messages * -(-atoms // least), reduced=cost.reduced / least)
    if collective in WHOLE:
        return inside, cost
    if not led:  # each region is a message
        cost = cost._replace(messages=max(cost.messages, 2 * (m - 1) * -(-atoms // least)))
    region = m * k / n  # of the largest host, in multiples of a mean one
    sent, received, reduced = cost.sent * region, cost.received * region, cost.reduced * region
    return inside, cost._replace(sent=sent, received=received, reduced=reduced)


def _spans(collective: Collective, cost: Cost, m: int) -> int:
    """In how many pieces a host's ranks exchange a buffer, about: as many as the algorithm names."""
    if collective in ROOTED:
        return m if cost.reach is Reach.ANYONE and cost.hops > 1 else 1 + cost.stepwise
    return min(m, 1 + cost.messages // (4 if collective in WHOLE else 2))


def _split(collective: Collective, cost: Cost, m: int, k: int, atoms: int) -> Cost:
    spans, once = _spans(collective, cost, m) * atoms, (k - 1) / k
    match collective:
        case Collective.ALLREDUCE:
            return Cost(2, 4 * (k - 1) * spans, 2 * once, 2 * once, once)
        case Collective.BROADCAST:
            return Cost(2, 2 * (k - 1) * spans, 2 * once, 0)
        case Collective.REDUCE:
            return Cost(2, 3 * (k - 1) * spans, once, 2 * once, once)
        case Collective.ALLGATHER:
            return Cost(1, 2 * (k - 1) * (1 + (m - 1) * atoms), once, once)
        case _:
            return Cost(1, 2 * (k - 1) * m * atoms, once, once, once)


def _led(collective: Collective, cost: Cost, n: int, m: int, k: int) -> Cost:
    spans = _spans(collective, cost, m)
    match collective:
        case Collective.ALLREDUCE:
            return Cost(2, 2 * (k - 1) * spans, k - 1, k - 1, k - 1)
        case Collective.BROADCAST:
            return Cost(1, (k - 1) * spans, k - 1, 0)
        case Collective.REDUCE:
            return Cost(1, (k - 1) * spans, 0, k - 1, k - 1)
        case Collective.ALLGATHER:
            return Cost(2, (k - 1) * (1 + m), k - 1, (k - 1) / n)
        case _:
            return Cost(2, (k - 1) * (1 + m), (k - 1) / n, k - 1, k - 1)


LEVELS: dict[Collective, dict[str, Callable[[Hosts], Levels]]] = {}
"""Of algorithms that draw several levels themselves, by the ranks of each host, where some have several and there are
several hosts."""
