"""The host's network interfaces and their addresses, and which of them to use."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import InitError
from .variables import InterfaceFilter

# ioctls and flags of linux/sockios.h and linux/if.h
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_IFREQ = struct.Struct("16s24x")
_NET = "/sys/class/net"
_NOT_SAID = (1 << 32) - 1  # -1 of older kernels
_VIRTUAL = ("docker", "virbr")  # bridges to this host's own guests: a last resort, as in NCCL


class Interface(NamedTuple):
    """One address of an interface that is up."""

    name: str
    host: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    loopback: bool

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if self.network.version == 6 else socket.AF_INET


def list_interfaces() -> list[Interface]:
    """The addresses of all interfaces that are up, each interface's IPv4 address before its IPv6 ones.

    IPv6 link-local addresses are left out: they mean nothing without a scope.
    """
    found: list[Interface] = []
    six = _ipv6_addresses()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            flags = _ioctl(sock, _SIOCGIFFLAGS, name)
            if flags is None or not struct.unpack_from("<H", flags)[0] & _IFF_UP:
                continue
            loopback = bool(struct.unpack_from("<H", flags)[0] & _IFF_LOOPBACK)
            address, mask = _ioctl(sock, _SIOCGIFADDR, name), _ioctl(sock, _SIOCGIFNETMASK, name)
            hosts = list(six.get(name, ()))
            if address is not None and mask is not None:
                text = f"{socket.inet_ntoa(address[4:8])}/{socket.inet_ntoa(mask[4:8])}"
                hosts.insert(0, text)
            for host in hosts:
                network = ipaddress.ip_network(host, strict=False)
                if not (network.version == 6 and network.is_link_local):
                    found.append(Interface(name, host.partition("/")[0], network, loopback))
    return found


def _ioctl(sock: socket.socket, request: int, name: str) -> bytes | None:
    """The union of struct ifreq after `request`, None where the interface has no such thing."""
    try:
        return fcntl.ioctl(sock, request, _IFREQ.pack(name.encode()))[16:]
    except OSError:
        return None


def _ipv6_addresses() -> dict[str, list[str]]:
    """Addresses with their prefix lengths by interface, out of /proc/thread-self/net/if_inet6."""
    found: dict[str, list[str]] = {}
    try:
        with open("/proc/thread-self/net/if_inet6") as file:  # as the sockets here: the network of this thread
            rows = [line.split() for line in file]
    except OSError:  # a kernel without IPv6
        return found
    for digits, _, prefix, _, _, name in rows:
        found.setdefault(name, []).append(f"{ipaddress.IPv6Address(bytes.fromhex(digits))}/{int(prefix, 16)}")
    return found


def interface_rates(names: Iterable[str], folder: str = _NET) -> list[int]:
    """What the system says of each of these interfaces, in Mbit/s; nothing where it does not say it of each: of some
    virtual ones, and where there is no carrier. veth(4) says 10000, whatever carries it on."""
    rates: list[int] = []
    for name in names:
        try:
            with open(f"{folder}/{name}/speed") as file:
                rate = int(file.read())
        except (OSError, ValueError):  # loopback has a file that cannot be read
            return []
        if not 0 < rate < _NOT_SAID:
            return []
        rates.append(rate)
    return rates


def are_unlike(rates: Sequence[int]) -> bool:
    """Whether one of these cards has half the rate of another one, or less."""
    return bool(rates) and max(rates) >= 2 * min(rates)


def choose_interfaces(wanted: InterfaceFilter, *, loopback: bool = False) -> list[Interface]:
    """The addresses to listen at.

    With `loopback` the loopback interface's. With a filter all that it allows (loopback only where it is
    named, or nothing else is left); InitError where that is none. Else all but loopback and bridges to the host's own
    guests, or, where there is nothing else, those, or loopback.
    """
    found = list_interfaces()
    local = [interface for interface in found if interface.loopback]
    if loopback:
        return local
    if wanted.names:
        chosen = [interface for interface in found if wanted.allows(interface.name)]
        if not chosen:
            names = ", ".join(dict.fromkeys(interface.name for interface in found)) or "none"
            raise InitError(f"HETCOLL_SOCKET_IFNAME: wanted an interface of {str(wanted)!r} that is up, got {names}")
        outside = [interface for interface in chosen if not interface.loopback]
        return outside or chosen if wanted.exclude else chosen
    outside = [interface for interface in found if not interface.loopback]
    return [interface for interface in outside if not interface.name.startswith(_VIRTUAL)] or outside or local


def own_hosts(wanted: InterfaceFilter, *, loopback: bool = False) -> list[str]:
    """Addresses to listen at: loopback's, and those of the chosen interfaces unless `loopback`."""
    interfaces = choose_interfaces(wanted, loopback=True)
    if not loopback:
        interfaces = [*choose_interfaces(wanted), *interfaces]
    return list(dict.fromkeys(interface.host for interface in interfaces))
