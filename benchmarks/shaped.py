"""Namespaces on one network of links with a known rate, for predict.py and hosts.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import netns

FRAMES = 1448 / 1514  # of what tc counts, so much is data: a segment of TCP in a frame of Ethernet


@contextmanager
def shaped(hosts: int, rate: str, burst: str, second: str = "") -> Iterator[netns.Network]:
    """So many namespaces; of their two networks the first, at `rate` in tc's words beyond a burst, each way, and the
    other one at `second`, where that says one."""
    with netns.network(hosts, rate) as net:
        for host in range(hosts):
            for card, each in enumerate((rate, second)):
                if each:
                    net.set_rate(host, card, each, burst=burst)
                    net.set_rate_into(host, card, each, burst=burst)
                else:
                    net.cut(host, card)
        yield net


def bits(rate: str) -> float:
    """Bytes per second of tc's words."""
    units = {"mbit": 125e3, "gbit": 125e6}
    return float(rate[:-4]) * units[rate[-4:]]
