"""A simulated network: hosts, connections whose bytes take their time, resets, cuts, and hosts that vanish.

It does what Linux does where the control plane relies on it. The end of a process ends its streams, or resets them
where something was left unread. What comes to a closed socket is answered by a reset. Who has sent more than the other
end has read has to wait. What is under way while a network is cut comes when it is whole again, but for a reset, which
is never sent again: a probe finds that the other end is gone. If it takes too long, both ends see a timeout.
"""

from __future__ import annotations

import errno
import itertools
import socket as real
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .kernel import Kernel, Process, Queue

_DEAD_AFTER = 30.0, 36.0  # seconds: TCP_USER_TIMEOUT, and up to a probe more
_KEEP_ALIVE = 5.0  # seconds: TCP_KEEPIDLE, in which both ends of a connection hear of each other
_UNREACHABLE = 3.0  # seconds until a system says that a neighbour does not answer
_GIVEN_UP = 130.0  # seconds that it tries to connect, where nobody says even that
_PROBED = 5.0  # seconds in which a system sees that the other end of a silent connection is none any more
_TCP_INFO = struct.Struct("8B24I")
_EPHEMERAL = 32768
POLLIN, POLLOUT, POLLERR, POLLHUP = 1, 4, 8, 16


@dataclass
class Weather:
    """How a network is. Delays are in seconds, one way: most are `delay` to twice that; of some packets (`spikes`) the
    first is lost and they come `spike` later. `room`: bytes that a connection holds in each direction."""

    delay: float = 1e-4
    spikes: float = 0.0
    spike: float = 0.2
    room: int = 1 << 18


@dataclass
class Host:
    """A machine of one address. `cuts`: the addresses to which its packets do not come now."""

    address: str
    network: Network
    gone: bool = False
    cuts: set[str] = field(default_factory=set)
    listeners: dict[Any, File] = field(default_factory=dict)  # by port, or name
    _ports: Any = field(default_factory=lambda: itertools.count(_EPHEMERAL))

    def pick_port(self) -> int:
        return next(self._ports)


class Network:
    """All hosts and connections."""

    def __init__(self, kernel: Kernel, weather: Weather) -> None:
        self.kernel, self.weather = kernel, weather
        self.hosts: dict[str, Host] = {}
        self.streams: dict[File, None] = {}  # of TCP, open

    def host(self, address: str) -> Host:
        return self.hosts.setdefault(address, Host(address, self))

    def delay(self) -> float:
        draw, weather = self.kernel.random.random, self.weather
        late = weather.spike * (1 + draw()) if weather.spikes and draw() < weather.spikes else 0.0
        return weather.delay * (1 + draw()) + late

    @staticmethod
    def reaches(a: Host, b: Host) -> bool:
        return a is b or not (a.gone or b.gone or b.address in a.cuts)

    def cut(self, one: list[Host], other: list[Host]) -> None:
        """No packet comes from any of `one` to any of `other`, or back."""
        for a, b in itertools.product(one, other):
            a.cuts.add(b.address)
            b.cuts.add(a.address)
        self._notice()

    def mend(self) -> None:
        """All cuts end, and what was under way goes on."""
        for host in self.hosts.values():
            host.cuts.clear()
        for stream in list(self.streams):
            stream.reached()

    def vanish(self, host: Host) -> None:
        """The machine is switched off."""
        host.gone = True
        self._notice()

    def _notice(self) -> None:
        for stream in list(self.streams):
            stream.notice()

    def reset(self, stream: File) -> None:
        """Something between the hosts resets a connection that is made: both ends hear of it some time."""
        if stream.peer is not None and stream.state == stream.peer.state == "open":
            for end in (stream, stream.peer):
                self.kernel.after(self.delay(), end.break_now)


class File:
    """A socket: new, listening, connecting, or one end of a connection. `queue`: who waits for a change of it;
    `selectors`: which are told of each, and under which number."""

    def __init__(self, network: Network, host: Host, process: Process | None, family: int) -> None:
        self.network, self.kernel, self.host, self.process = network, network.kernel, host, process
        self.family = family
        self.local: Any = None
        self.remote: Any = None
        self.state = "new"
        self.queue: Queue = {}
        self.selectors: dict[Any, int] = {}
        self.backlog: deque[File] = deque()
        self.peer: File | None = None
        self.error = 0
        self.kept_alive = False
        self.hard = False  # SO_LINGER of 0: its close is a reset
        self._came = bytearray()
        self._ended = False  # the other end sends no more
        self._deaf = False  # SHUT_RD
        self._said_end = False
        self._broken = False
        self._under_way = 0  # bytes that the other end has not read
        self._due = 0.0  # when what was sent last comes
        self._held: list[tuple[str, bytes]] = []  # while the network is cut
        self._apart: float | None = None  # since when it is
        self._heard: float | None = None  # when a packet of the other end came last, where it was not just now
        self._again = 0  # packets under way that were held
        self._behind: list[tuple[str, bytes]] = []  # what has to wait for these

    def changed(self) -> None:
        """Who waits looks again."""
        if self.queue:
            self.kernel.wake(self.queue)
        for selector, number in self.selectors.items():
            selector.moved[number] = None
            if selector.queue:
                self.kernel.wake(selector.queue)

    def events(self, wanted: int) -> int:
        """Those of `wanted` that a poll would tell of now."""
        failed = self._broken or self.error > 0
        found = POLLERR if failed else 0
        if wanted & POLLIN and (failed or self._came or self.backlog or self._ended or self._deaf):
            found |= POLLIN
        if wanted & POLLOUT and self.writable:
            found |= POLLOUT
        return found

    # What a program asks.

    @property
    def readable(self) -> bool:
        if self.state == "listening":
            return bool(self.backlog)
        return bool(self._came) or self._ended or self._deaf or self._broken or self.error > 0

    @property
    def writable(self) -> bool:
        if self.state == "open":
            return self._broken or self.error > 0 or self._under_way < self.network.weather.room
        return self.error > 0

    @property
    def _ceased(self) -> bool:
        """Whether it answers with resets."""
        return self.state == "closed" or self._broken

    @property
    def failed(self) -> bool:
        """Whether a poll says so unasked."""
        return self.error > 0 or self._broken

    def bind(self, address: Any) -> None:
        if self.family == real.AF_UNIX:
            key: Any = address if isinstance(address, bytes) else address.encode()
            self.local = key
        else:
            host, port = address[:2]
            if host not in ("", "0.0.0.0", "127.0.0.1", self.host.address):
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            key = port or self.host.pick_port()
            self.local = (host or "0.0.0.0", key)
        if key in self.host.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self.host.listeners[key] = self
        self.state = "bound"

    def listen(self) -> None:
        self.state = "listening"

    def connect(self, address: Any) -> int:
        """0, EINPROGRESS, or why not."""
        if self.family == real.AF_UNIX:
            key = address if isinstance(address, bytes) else address.encode()
            listener = self.host.listeners.get(key)
            if listener is None or listener.state != "listening":
                return errno.ECONNREFUSED
            self._join(listener, b"", key)
            return 0
        host, port = address[:2]
        there = self.host if host == "127.0.0.1" else self.network.host(host)
        self.local, self.remote = (
            (self.host.address if there is not self.host else host, self.host.pick_port()),
            address,
        )
        self.state = "connecting"
        self.network.streams[self] = None
        self._knock(there, port)
        return errno.EINPROGRESS

    def _knock(self, there: Host, port: int) -> None:
        if Network.reaches(self.host, there):
            self.kernel.after(self.network.delay(), lambda: self._arrive_at(there, port))
            return
        self._apart = self.kernel.now
        self._held = [("syn", struct.pack("<H", port))]
        rude = there.gone or self.kernel.random.random() < 0.5
        seconds = _UNREACHABLE if rude else _GIVEN_UP
        code = errno.EHOSTUNREACH if rude else errno.ETIMEDOUT
        self.kernel.after(seconds, lambda: self._fail(code) if self._held and self.state == "connecting" else None)

    def _arrive_at(self, there: Host, port: int) -> None:
        if self.state != "connecting":
            return
        if not Network.reaches(self.host, there):
            self._knock(there, port)
            return
        listener = there.listeners.get(port)
        if listener is None or listener.state != "listening" or listener.family == real.AF_UNIX:
            self.kernel.after(self.network.delay(), lambda: self._fail(errno.ECONNREFUSED))
            return
        self._join(listener, self.local, (self.remote[0], port))
        self.state = "connecting"
        self.kernel.after(self.network.delay(), self._become_open)

    def _become_open(self) -> None:
        if self.state == "connecting":
            self.state = "open"
            self.changed()

    def _join(self, listener: File, ours: Any, theirs: Any) -> None:
        """The other end stands in the listener's queue from now on."""
        other = File(self.network, listener.host, listener.process, self.family)
        other.local, other.remote, self.local, self.remote = theirs, ours, ours, theirs
        other.peer, self.peer = self, other
        other.state = self.state = "open"
        if self.family != real.AF_UNIX:
            self.network.streams[other] = None
        listener.backlog.append(other)
        listener.changed()

    def _fail(self, code: int) -> None:
        if self.state in ("connecting", "open") and not self._broken:
            self.error, self._broken = code, True
            self._heard = self.kernel.now if self._heard is None else self._heard
            self.changed()

    def take_error(self) -> int:
        code, self.error = self.error, 0
        return code

    def send(self, data: Any) -> int:
        """How many bytes it takes; 0: none now."""
        if self.error:
            raise _error(self.take_error())
        if self._broken or self._said_end or self.state != "open":
            raise _error(errno.EPIPE if self.state == "open" else errno.ENOTCONN)
        count = min(len(data), self.network.weather.room - self._under_way)
        if count > 0:
            self._under_way += count
            self._post("data", bytes(data[:count]))
        return max(count, 0)

    def receive(self, size: int) -> bytes | None:
        """`b""` at the end; None: nothing now."""
        if self._came:
            # A packet may end anywhere.
            most = min(size, len(self._came))
            count = most if self.kernel.random.random() < 0.9 else 1 + int(self.kernel.random.random() * most)
            data = bytes(self._came[:count])
            del self._came[:count]
            if self.peer is not None:
                full = self.peer._under_way >= self.network.weather.room
                self.peer._under_way -= count
                if full:
                    self.peer.changed()
            return data
        if self.error:
            raise _error(self.take_error())
        if self.state not in ("open", "closed"):
            raise _error(errno.ENOTCONN)
        return b"" if self._ended or self._deaf or self._broken else None

    def shut(self, how: int) -> None:
        if self.state != "open":
            raise _error(errno.ENOTCONN)
        if how in (real.SHUT_RD, real.SHUT_RDWR):
            self._deaf = True
        if how in (real.SHUT_WR, real.SHUT_RDWR):
            self._say_end()
        self.changed()

    def _say_end(self) -> None:
        if not self._said_end and not self._broken:
            self._said_end = True
            self._post("end")

    def close(self) -> None:
        if self.state == "closed":
            return
        if self.state in ("bound", "listening"):
            for key in [key for key, file in self.host.listeners.items() if file is self]:
                del self.host.listeners[key]
            for waiting in self.backlog:
                waiting.hard = True
                waiting.close()
        elif self.state == "open" and not self._broken:
            if self.hard or self._came:
                self._post("reset")
            else:
                self._say_end()
        self.state = "closed"
        self.network.streams.pop(self, None)
        self.changed()

    def tcp_info(self) -> bytes:
        """With the milliseconds since data and since an acknowledgement came, which a reset is none of."""
        silent = 0.0 if self._heard is None else self.kernel.now - self._heard
        fields = [0] * 32
        fields[19] = fields[20] = int(silent * 1000)
        return _TCP_INFO.pack(*fields)

    # Packets.

    def _post(self, what: str, data: bytes = b"", again: bool = False) -> None:
        """Send to the other end, behind what is under way; perhaps `again`, what was held."""
        peer = self.peer
        if peer is None:
            return
        now = self.kernel.now
        local = self.family == real.AF_UNIX or self.host is peer.host
        delay = 5e-6 if local else self.network.delay()
        due = self._due = max(self._due, now + delay)
        self._again += again
        self.kernel.after(due - now, self._arrive, what, data, again)

    def _arrive(self, what: str, data: bytes, again: bool = False) -> None:
        if again:
            self._again -= 1
        elif self._again:  # it was under way when the network was whole again, behind what was held until then
            self._behind.append((what, data))
            return
        self._take(what, data)
        if again and not self._again:
            behind, self._behind = self._behind, []
            for each in behind:
                self._take(*each)

    def _take(self, what: str, data: bytes) -> None:
        peer = self.peer
        assert peer is not None
        if self._held or not Network.reaches(self.host, peer.host):
            self._held.append((what, data))
            self.network.streams[self] = None  # also of one that is closed
        elif peer._ceased:
            if what == "data" and not self.host.gone:
                peer._post("reset")
        elif what == "reset":
            peer.break_now()
        elif what == "end":
            peer._ended = True
            peer.changed()
        else:
            peer._came += data
            peer.changed()

    def break_now(self) -> None:
        """A reset has come."""
        self._fail(errno.EPIPE if self._ended else errno.ECONNRESET)

    def notice(self) -> None:
        """Perhaps the network is cut between the ends."""
        if self.peer is None or self._apart is not None or Network.reaches(self.host, self.peer.host):
            return
        began = self._apart = self.kernel.now
        low, high = _DEAD_AFTER
        late = self.kernel.random.random()
        seconds = low + (high - low) * late
        self._heard = began - _KEEP_ALIVE * (1 - late) if self._heard is None else self._heard
        if self.kept_alive:
            self.kernel.after(seconds, lambda: self._fail(errno.ETIMEDOUT) if self._apart == began else None)

    def reached(self) -> None:
        """The network is whole again."""
        if self._apart is not None and self.kept_alive:
            self.kernel.after(_PROBED, self._probe)
        self._apart = None
        if not self._broken and self.peer is not None and not self.peer._ceased:
            self._heard = None
        held, self._held = self._held, []
        if self.state == "closed":
            self.network.streams.pop(self, None)
            if ("reset", b"") in held:
                return
        for what, data in held:
            if what == "syn":
                self._knock(self.network.host(self.remote[0]), *struct.unpack("<H", data))
            else:
                self._post(what, data, again=True)

    def _probe(self) -> None:
        peer = self.peer
        if peer is None or self._ended or self._broken or not Network.reaches(self.host, peer.host):
            return
        if peer._ceased:
            self.break_now()


def _error(code: int) -> OSError:
    return OSError(code, _TEXTS.get(code) or errno.errorcode[code])


_TEXTS = {
    errno.ECONNRESET: "Connection reset by peer",
    errno.EPIPE: "Broken pipe",
    errno.ECONNREFUSED: "Connection refused",
    errno.ETIMEDOUT: "Connection timed out",
    errno.EHOSTUNREACH: "No route to host",
}
