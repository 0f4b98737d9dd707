"""Topologies that nobody has."""

from __future__ import annotations

from hetcoll.plan.topology import RankInfo, Topology


def cluster(*hosts: int, cores: int = 64, setting: str = "auto") -> Topology:
    """Hosts with these numbers of ranks, one host's ranks after the other's."""
    names = [f"host{h}" for h, n in enumerate(hosts) for _ in range(n)]
    return Topology(tuple(RankInfo(r, name, cores=cores) for r, name in enumerate(names)), setting)  # type: ignore[arg-type]
