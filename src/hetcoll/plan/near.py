"""Ranks by how near they are to each other: hosts, of each its parts of islands, of each of these its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import TypeAlias

from .topology import Topology

Nested: TypeAlias = "int | tuple[Nested, ...]"
"""A rank, or groups that are nearer to each other than to what is outside."""


def nested(topology: Topology) -> Nested:
    """All ranks of a communicator."""
    island = {rank: number for number, ranks in enumerate(topology.islands) for rank in ranks}
    hosts: list[Nested] = []
    for ranks in topology.hosts:
        parts: dict[int, list[Nested]] = {}
        for rank in ranks:
            parts.setdefault(island[rank], []).append(rank)
        hosts.append(_joined([_joined(part) for part in parts.values()]))
    return _joined(hosts)


def _joined(groups: Sequence[Nested]) -> Nested:
    """One group of several; a single one is itself."""
    return groups[0] if len(groups) == 1 else tuple(groups)


class Group:
    """A group with its ranks, in the order of its parts; a rank has no parts. It is equal to itself alone."""

    def __init__(self, parts: Sequence[Group], rank: int | None = None) -> None:
        self.parts = parts
        self.ranks: tuple[int, ...] = (rank,) if rank is not None else tuple(r for each in parts for r in each.ranks)
        self.members = frozenset(self.ranks)
        self.depth: int = 1 + max(each.depth for each in parts) if parts else 0

    @classmethod
    def of(cls, groups: Nested) -> Group:
        return cls((), groups) if isinstance(groups, int) else cls([cls.of(each) for each in groups])

    def only(self, ranks: Set[int]) -> Group:
        """What there is of these ranks, of which it has one or more; a part that is alone is itself."""
        if self.members <= ranks:
            return self
        return Group.joined(each.only(ranks) for each in self.parts if not ranks.isdisjoint(each.ranks))

    @staticmethod
    def joined(groups: Iterable[Group]) -> Group:
        parts = tuple(groups)
        return parts[0] if len(parts) == 1 else Group(parts)
