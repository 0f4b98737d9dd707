"""Topologies that nobody has, and groups of ranks."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import strategies as st

from hetcoll.plan.costs import Hosts
from hetcoll.plan.topology import RankInfo, Topology


def cluster(*hosts: int, cores: int = 64, setting: str = "auto") -> Topology:
    """Hosts with these numbers of ranks, one host's ranks after the other's."""
    names = [f"host{h}" for h, n in enumerate(hosts) for _ in range(n)]
    return Topology(tuple(RankInfo(r, name, cores=cores) for r, name in enumerate(names)), setting)  # type: ignore[arg-type]


def side_by_side(*sizes: int) -> Hosts:
    """Groups of these sizes, one's ranks after the other's."""
    ends = list(accumulate(sizes))
    return tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))


@st.composite
def any_groups(draw: st.DrawFn) -> Hosts:
    """2 to 5 groups of 1 to 5 ranks, which lie anywhere."""
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 3, 5]), min_size=2, max_size=5))
    ranks = draw(st.permutations(range(sum(sizes))))
    return tuple(tuple(ranks[i] for i in group) for group in side_by_side(*sizes))


def any_islands() -> st.SearchStrategy[Hosts]:
    """Islands of any sizes, of which some have common divisors, and of any ranks."""
    sizes = st.tuples(st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=5))
    return sizes.flatmap(lambda x: _any_order([x[0] * k for k in x[1]]))


def _any_order(sizes: list[int]) -> st.SearchStrategy[Hosts]:
    ends = [*accumulate(sizes, initial=0)]
    return st.permutations(range(ends[-1])).map(lambda r: tuple(tuple(r[a:b]) for a, b in pairwise(ends)))
