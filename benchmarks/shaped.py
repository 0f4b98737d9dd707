"""Namespaces on one network of links with a known rate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

import netns

FRAMES = 1448 / 1514  # of what tc counts, so much is data: a segment of TCP in a frame of Ethernet


@contextmanager
def shaped(hosts: int, rate: str, burst: str, second: str = "", control: str = "") -> Iterator[netns.Network]:
    """So many namespaces; of their two networks the first, at `rate` in tc's words beyond a burst, each way, and the
    other one at `second`, where that says one. `control`: TCP's congestion control there, if not the system's.
    SystemExit says why they cannot be made."""
    net = netns.Network(hosts, rate)
    try:
        try:
            net.make()
            if control:
                net.set_control(control)
        except (OSError, subprocess.CalledProcessError) as error:
            why = (getattr(error, "stderr", None) or str(error)).strip()
            raise SystemExit(f"{hosts} hosts cannot be made here, so that nothing is measured: {why}") from error
        for host in range(hosts):
            for card, each in enumerate((rate, second)):
                if each:
                    net.set_rate(host, card, each, burst=burst)
                    net.set_rate_into(host, card, each, burst=burst)
                else:
                    net.cut(host, card)
        yield net
    finally:
        net.close()


def bits(rate: str) -> float:
    """Bytes per second of tc's words."""
    units = {"mbit": 125e3, "gbit": 125e6}
    return float(rate[:-4]) * units[rate[-4:]]
