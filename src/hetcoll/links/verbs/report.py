"""The state of RDMA links for people, out of what the engine says of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...plan.topology import Topology

Links = Mapping[int, Sequence[Mapping[str, Any]]]


def by_peer(links: str) -> Links:
    """What `Engine.links` says, by peer."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for link in json.loads(links):
        found.setdefault(link["peer"], []).append(link)
    return found


def fell_back(links: Links, peer: int) -> bool:
    """Whether a link to this peer goes over TCP since it lost, or never had, a rail that works."""
    return any(link["path"] in ("tcp", "switching to tcp") for link in links.get(peer, ()))


def describe(links: Links, topology: Topology, rank: int, peers: Iterable[int]) -> tuple[str, ...]:
    """A line for each of the `peers` on other hosts, or all that use RDMA: over what, and why."""
    lines: list[str] = []
    for peer in sorted(set(peers) - {rank}):
        path = topology.transport(rank, peer)
        if path == "verbs":
            made = links.get(peer, ())
            parts = [describe_link(link) for link in made] or [
                f"verbs over {planned(topology, rank, peer)}: not connected yet"
            ]
            lines += [f"rank {peer}: {part}" for part in parts]
        elif path == "tcp" and topology.setting == "auto":
            lines.append(f"rank {peer}: tcp, since there is no RDMA: {topology.without_rails(rank, peer)}")
    return tuple(lines)


def planned(topology: Topology, rank: int, peer: int) -> str:
    """The devices of the rails that a link will have."""
    mine, theirs = topology.ranks[rank].nics, topology.ranks[peer].nics
    return ", ".join(f"{mine[i].name} to {theirs[j].name}" for i, j in topology.rails(rank, peer))


def describe_link(link: Mapping[str, Any]) -> str:
    """A link's state, its channel and its rails."""
    rails = ", ".join(map(_rail, link["rails"]))
    resent = f"; {link['resent']} pieces sent again" if link["resent"] else ""
    return f"{link['path']}, channel {link['channel']}, rails {rails}{resent}"


def _rail(rail: Mapping[str, Any]) -> str:
    name = f"{rail['device']} to {rail['peer_device']}"
    if rail["state"] == "up":
        speed = rail["megabytes_per_second"]  # None until enough was sent to tell
        again = f", taken up again {rail['recovered']} times" if rail["recovered"] else ""
        return f"{name} ({'' if speed is None else f'{speed:.3g} MB/s, '}{rail['bytes']} bytes sent{again})"
    why = f": {rail['why']}" if rail["why"] else ""
    last = f", {rail['tried']}" if rail["tried"] else ""
    tried = f"; tried again {rail['tries']} times{last}" if rail["tries"] else ""
    return f"{name} ({rail['state']}{why}{tried})"
