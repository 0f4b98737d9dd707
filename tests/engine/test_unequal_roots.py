"""Ranks that disagree on the root: also where all of them get through the call, as each only sends, they are told by
the next one."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from ranks import Ranks
from thorough import parametrize

import hetcoll

Launch = Callable[..., Ranks]
CALLS: dict[str, Callable[[hetcoll.Communicator, int], Any]] = {
    "gather": lambda c, root: c.gather(np.ones(4), np.ones(4 * c.size), root),
    "scatter": lambda c, root: c.scatter(np.ones(4 * c.size), np.ones(4), root),
    "reduce": lambda c, root: c.reduce(np.ones(4), np.ones(4), root=root),
    "broadcast": lambda c, root: c.broadcast(np.ones(4), root),
}


def _disagree(comm: hetcoll.Communicator, roots: tuple[int, ...], name: str, warm: bool) -> None:
    if warm:
        for root in range(comm.size):
            CALLS[name](comm, root)
        comm.barrier()
    CALLS[name](comm, roots[comm.rank])
    comm.barrier()


def _roots(size: int) -> list[tuple[int, ...]]:
    """Nobody is its own root, at each distance; everybody is; and one alone has another."""
    apart = [tuple((rank + d) % size for rank in range(size)) for d in range(1, size)]
    return [*apart, tuple(range(size)), (*[0] * (size - 1), 1)]


@parametrize("transport", ["shm", "tcp"], first=1)
@parametrize(("size", "warm"), [(3, True), (2, False), (4, False), (4, True)], first=1)
def test_unequal_roots_are_found_by_the_next_barrier(launch: Launch, size: int, warm: bool, transport: str) -> None:
    """All at a time, each in a job of its own, since some wait until the ranks ask each other. The barrier has no
    message over a distance of 3, where those of the wrong calls among 4 ranks then lie."""
    names = CALLS if size < 4 else (["scatter", "reduce"] if warm else ["gather", "broadcast"])
    cases = [(roots, name) for roots, name in product(_roots(size), names)]
    jobs = [(launch(size, HETCOLL_TRANSPORT=transport, HETCOLL_ALGO="barrier:dissemination"), *case) for case in cases]
    for ranks, roots, name in jobs:
        ranks.start(_disagree, roots, name, warm)
    for ranks, roots, name in jobs:
        for outcome in ranks.finish(30):
            problem = f"{name} with roots {roots}, rank {outcome.rank}: {outcome.trace}"
            assert isinstance(outcome.error, hetcoll.CollectiveMismatchError), problem
            assert len(set(re.findall(rf"{name}\(.*?root=(\d)\)", str(outcome.error)))) > 1, problem
