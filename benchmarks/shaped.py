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
ROOM = 256 << 20  # bytes that a link lets wait: more than all senders may have on their way
LONGEST = 128 << 10  # bytes, of which half are what the kernel hands a card at once by default
TCP = {
    "congestion_control": "reno",  # BBR paces below a link's rate, and namespaces may not have cubic
    "wmem": f"4096 16384 {512 << 10}",  # a sender's socket: as senders wait where a switch has no room left
    "early_retrans": "0",  # a queue is no loss: nothing is sent again for 1 s
}


@contextmanager
def shaped(hosts: int, rate: str, burst: int, second: str = "") -> Iterator[netns.Network]:
    """So many namespaces; of their two networks the first, at `rate` in tc's words beyond a burst of so many bytes,
    each way, and the other one at `second`, where that says one. SystemExit says why they cannot be made.

    No link loses anything. Like a card whose switch tells senders to wait, it lets wait all that TCP has on its way, of
    which a socket has up to 512 KiB. What the kernel hands a card to be cut is short enough that a burst has room for
    it: tbf would cut it before, and the kernel drops what comes beyond 1,000 packets in a row."""
    net = netns.Network(hosts, rate)
    try:
        try:
            net.make()
            net.set_tcp(**TCP)
        except (OSError, subprocess.CalledProcessError) as error:
            why = (getattr(error, "stderr", None) or str(error)).strip()
            raise SystemExit(f"{hosts} hosts cannot be made here, so that nothing is measured: {why}") from error
        for host in range(hosts):
            for card, each in enumerate((rate, second)):
                if each:
                    latency = f"{ROOM / bits(each):.3f}s"
                    net.set_segments(host, card, min(burst, LONGEST) // 2)
                    net.set_rate(host, card, each, f"{burst}b", latency)
                    net.set_rate_into(host, card, each, f"{burst}b", latency)
                else:
                    net.cut(host, card)
        yield net
    finally:
        net.close()


def bits(rate: str) -> float:
    """Bytes per second of tc's words."""
    units = {"mbit": 125e3, "gbit": 125e6}
    return float(rate[:-4]) * units[rate[-4:]]
