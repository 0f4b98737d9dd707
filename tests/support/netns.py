"""Several hosts on this machine: network namespaces, each with two interfaces, joined by two bridges.

Host h reaches the others as ``10.78.0.h+1`` over eth0 and as ``10.78.1.h+1`` over eth1. Ranks of one namespace count
as one host (`links.descriptors.host_identity`). Needs root, ip(8) and tc(8): `requires` says what is missing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from patience import PATIENCE

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_serial = itertools.count()


def _tool(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=PATIENCE * 20).stdout


class Network:
    """`hosts` namespaces; `rate` is each interface's, in tc's words (``200mbit``)."""

    def __init__(self, hosts: int, rate: str) -> None:
        tag = f"hetcoll-{os.getpid()}-{next(_serial)}"
        self.hosts = [f"{tag}-{i}" for i in range(hosts)]
        self._switch = f"{tag}-switch"
        self._made: list[str] = []
        self._rate = rate

    def make(self) -> None:
        for name in (self._switch, *self.hosts):
            _tool("ip", "netns", "add", name)
            self._made.append(name)
        for net in range(2):
            _tool("ip", "-n", self._switch, "link", "add", f"br{net}", "type", "bridge")
            _tool("ip", "-n", self._switch, "link", "set", f"br{net}", "up")
        for host, name in enumerate(self.hosts):
            _tool("ip", "-n", name, "link", "set", "lo", "up")
            for net in range(2):
                self._join(host, name, net)

    def _join(self, host: int, name: str, net: int) -> None:
        near, far = f"eth{net}", f"port{host}.{net}"
        _tool("ip", "-n", self._switch, "link", "add", far, "type", "veth", "peer", "name", near, "netns", name)
        _tool("ip", "-n", self._switch, "link", "set", far, "master", f"br{net}", "up")
        _tool("ip", "-n", name, "addr", "add", f"10.78.{net}.{host + 1}/24", "dev", near)
        _tool("ip", "-n", name, "link", "set", near, "up")
        self.set_rate(host, net, self._rate)

    def set_rate(self, host: int, net: int, rate: str, burst: str = "256kb") -> None:
        """How fast a host may send over one of its interfaces, beyond a burst."""
        shape = ("root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
        _tool("tc", "-n", self.hosts[host], "qdisc", "replace", "dev", f"eth{net}", *shape)

    def set_rate_into(self, host: int, net: int, rate: str, burst: str = "256kb") -> None:
        """How fast it may receive there: what more comes at once waits in the switch, and is lost beyond 50 ms."""
        shape = ("root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
        _tool("tc", "-n", self._switch, "qdisc", "replace", "dev", f"port{host}.{net}", *shape)

    def cut(self, host: int, *nets: int) -> None:
        """Take the interfaces down at the switch's end: the host sees no carrier and nobody says goodbye."""
        for net in nets:
            _tool("ip", "-n", self._switch, "link", "set", f"port{host}.{net}", "down")

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=PATIENCE * 20)


@contextmanager
def network(hosts: int, rate: str = "400mbit") -> Iterator[Network]:
    """A network that is gone afterwards. Skips the test where it cannot be made."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"network namespaces need root{''.join(f' and {tool}(8)' for tool in missing)}")
    made = Network(hosts, rate)
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield made
    finally:
        made.close()


def enter(host: str) -> None:
    """Move the calling thread, and the threads that it starts from now on, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{host}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {host}")
    finally:
        os.close(fd)


def sent_bytes() -> dict[str, int]:
    """What each interface of this host has sent so far."""
    rows = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return {row[0].rstrip(":"): int(row[9]) for row in rows}
