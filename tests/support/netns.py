"""Several hosts on this machine: network namespaces, each with two interfaces, joined by two bridges.

Host h reaches the others as ``10.78.0.h+1`` over eth0 and as ``10.78.1.h+1`` over eth1. Ranks of one namespace count
as one host (`links.descriptors.host_identity`). Needs root, ip(8), tc(8), nsenter(1): `why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from far import Delay
from patience import PATIENCE

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_OWN = "/proc/thread-self/ns/net"
_serial = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def _within(host: str, *words: str, lines: Sequence[str] = ()) -> None:
    """Run a command at a host; ip(8) or tc(8) with these `lines`."""
    command = ["nsenter", f"--net={_place(host)}", *words, *(["-batch", "-"] if lines else [])]
    seconds = PATIENCE * 20
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds, input="\n".join(lines))


def _place(host: str) -> str:
    """The file that stands for a host's namespace."""
    return host if "/" in host else f"/run/netns/{host}"


def why_not() -> str:
    """What this machine lacks for hosts; nothing where they may be had."""
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if os.geteuid() == 0 and not missing:
        return ""
    return f"network namespaces need root{''.join(f' and {tool}(8)' for tool in missing)}"


class Network:
    """`hosts` namespaces; `rate` is each interface's, in tc's words (``200mbit``).

    Those that are not `named` are gone with this process, however it ends, and the processes that are there.
    """

    def __init__(self, hosts: int, rate: str, *, named: bool = True) -> None:
        tag = f"hetcoll-{os.getpid()}-{next(_serial)}"
        self.hosts = [f"{tag}-{i}" for i in range(hosts)]
        self._switch = f"{tag}-switch"
        self._named, self._rate = named, rate
        self._made: list[str] = []
        self._held: list[int] = []

    def make(self) -> None:
        if not self._named:
            self._held = [_nameless() for _ in (self._switch, *self.hosts)]
            self._switch, *self.hosts = (f"/proc/{os.getpid()}/fd/{fd}" for fd in self._held)
        for name in (self._switch, *self.hosts) if self._named else ():
            subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, timeout=PATIENCE * 20)
            self._made.append(name)
        bridges = [f"{kind}{net}" for kind in ("br", "cut") for net in range(2)]
        lines = [line for name in bridges for line in (f"link add {name} type bridge", f"link set {name} up")]
        for host, name in enumerate(self.hosts):
            for net in range(2):
                lines.append(f"link add port{host}.{net} type veth peer name eth{net} netns {name}")
                lines.append(f"link set port{host}.{net} master br{net} up")
        _within(self._switch, "ip", lines=lines)
        for host, name in enumerate(self.hosts):
            lines = ["link set lo up"]
            for net in range(2):
                lines += [f"addr add 10.78.{net}.{host + 1}/24 dev eth{net}", f"link set eth{net} up"]
            _within(name, "ip", lines=lines)
            shape = f"root tbf rate {self._rate} burst 256kb latency 50ms"
            _within(name, "tc", lines=[f"qdisc replace dev eth{net} {shape}" for net in range(2)])

    def set_rate(self, host: int, net: int, rate: str, burst: str = "256kb", latency: str = "50ms") -> None:
        """How fast a host may send over one of its interfaces, beyond a burst; what would wait longer is lost. So is
        what waits now: a packet of many segments that the new burst has no room for would stop the queue for ever."""
        shape = f"root tbf rate {rate} burst {burst} latency {latency}"
        lines = [f"qdisc del dev eth{net} root", f"qdisc add dev eth{net} {shape}"]
        _within(self.hosts[host], "tc", lines=lines)

    def set_rate_into(self, host: int, net: int, rate: str, burst: str = "256kb", latency: str = "50ms") -> None:
        """How fast it may receive there: what more comes waits in the switch; what would wait longer is lost."""
        shape = ("root", "tbf", "rate", rate, "burst", burst, "latency", latency)
        _within(self._switch, "tc", "qdisc", "replace", "dev", f"port{host}.{net}", *shape)

    def set_tcp(self, **settings: str) -> None:
        """The kernel's settings of TCP on every host, for connections that are made from now on: tcp(7) has them, with
        `tcp_` before their names."""
        for host in self.hosts:
            _within(host, "sysctl", "-w", *(f"net.ipv4.tcp_{name}={value}" for name, value in settings.items()))

    def set_segments(self, host: int, net: int, nbytes: int) -> None:
        """How long the packets are at most that the kernel hands to an interface for it to cut into segments."""
        _within(self.hosts[host], "ip", "link", "set", f"eth{net}", "gso_max_size", str(nbytes))

    @contextmanager
    def delayed(self, seconds: float) -> Iterator[None]:
        """What goes to a host, and what comes from it, is held for so long."""
        ports = [f"{host}.{net}" for host in range(len(self.hosts)) for net in range(2)]
        delay = Delay([(f"near{port}", f"far{port}") for port in ports], seconds, lambda: enter(self._switch))
        try:
            lines = []
            for port in ports:
                lines += [f"link add own{port} type bridge", f"link set own{port} up"]
                lines += [f"link set {name}{port} master own{port} up" for name in ("port", "near")]
                lines.append(f"link set far{port} master br{port[-1]} up")
            _within(self._switch, "ip", lines=lines)
            yield
        finally:
            delay.close()
            _within(self._switch, "ip", lines=[f"link del own{port}" for port in ports])
            self.mend()

    def cut(self, host: int, *nets: int) -> None:
        """Take the interfaces down at the switch's end: the host sees no carrier and nobody says goodbye."""
        _within(self._switch, "ip", lines=[f"link set port{host}.{net} down" for net in nets])

    def part(self, hosts: Iterable[int], *nets: int) -> None:
        """These hosts and the others reach each other no more, and no host sees anything of it."""
        _within(
            self._switch, "ip", lines=[f"link set port{host}.{net} master cut{net}" for host in hosts for net in nets]
        )

    def mend(self) -> None:
        """All hosts reach each other again."""
        ports = [f"port{host}.{net} master br{net} up" for host in range(len(self.hosts)) for net in range(2)]
        _within(self._switch, "ip", lines=[f"link set {port}" for port in ports])

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=PATIENCE * 20)
        for fd in self._held:
            os.close(fd)


def _nameless() -> int:
    """A new namespace, as long as this descriptor is open."""
    home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")
        made = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        enter(f"/proc/self/fd/{home}")
        return made
    finally:
        os.close(home)


@contextmanager
def network(hosts: int, rate: str = "400mbit") -> Iterator[Network]:
    """A network that is gone afterwards. Skips the test where it cannot be made."""
    if reason := why_not():
        pytest.skip(reason)
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
    fd = os.open(_place(host), os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {host}")
    finally:
        os.close(fd)


def sent_bytes() -> dict[str, int]:
    """What each interface of this host has sent so far."""
    rows = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return {row[0].rstrip(":"): int(row[9]) for row in rows}
