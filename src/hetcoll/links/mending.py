"""TCP sockets that broke between ranks that live are made again: who connects, and what both ends tell each other.

A connection that is reset (by a firewall, by a NAT that forgot it) is no death: of that the control connections tell.
The lower rank connects again, by the same handshake that made the link, with the job's proofs; the key says that it is
a further try for that socket, and which. Where the lower rank has not noticed, the other one connects after a moment.
Behind the handshake each end tells how many bytes ever came to it over the link's socket, and which were spoiled; the
other sends those again and goes on from there (``native/transport/tcp_mending.h``). A try that is no later than what
the other end knows of is refused, so an old connection that turns up late is of no account. An end that has left the
link, as a GPU's way that was given up, says so in place of a count, and the other one gives it up at once.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .. import lifetime
from ..errors import ClosedError, HetcollError, InitError
from ..rendezvous.connections.sockets import close_hard, receive_exactly, send_all, spell_error
from .edges import CAME, LEFT, Address, Came, EdgeKey, Request
from .listener import Listener

log = logging.getLogger("hetcoll")

SECONDS = 30.0  # until a socket that cannot be made again is an error, if the timeout of calls is not shorter
_REFUSED_SECONDS = 5.0  # where nobody listens any more: the peer's end is told of before that
_GRACE = 0.1  # seconds until the higher rank connects itself
_HELD_SECONDS = 1.0  # the same for whom the peer has reached already: that connection may have broken, too
_PAUSE = 0.1  # seconds between tries
_TELLING_SECONDS = 5.0
_SETTLING_SECONDS = 5.0  # in which some byte has to arrive


class Owner(Protocol):
    """Who has TCP links: the engine, or a proxy. A socket is (peer, channel, stripe)."""

    def mend_tcp(self) -> int:
        """From now on links are mended; the descriptor that is readable while `take_lost` has something."""

    def take_lost(self) -> list[tuple[int, int, int, int, bool, bool, str]]:
        """Sockets that broke, each with how often it was tried to make it again, whether the peer is about to, whether
        what came over it was spoiled, and why it broke."""

    def is_lost(self, peer: int, channel: int, stripe: int) -> bool: ...

    def hold_socket(
        self, peer: int, channel: int, stripe: int, number: int, first: bool
    ) -> tuple[int, int, int] | None:
        """That try begins: a `Came`; None where it is to be refused."""

    def resume_socket(self, peer: int, channel: int, stripe: int, number: int, fd: int, came: Came) -> bool:
        """That try came through. Takes `fd` over, or it is False."""

    def give_up_socket(self, peer: int, channel: int, stripe: int, why: str) -> None: ...

    def undelivered(self) -> dict[int, int]:
        """By peer, bytes that were sent and that the peer's kernel may lack."""


@dataclass(eq=False, slots=True)
class _Lost:
    owner: Owner
    shift: int
    peer: int
    channel: int  # the owner's
    stripe: int
    tries: int
    why: str

    @property
    def place(self) -> tuple[int, int, int]:
        return self.peer, self.channel, self.stripe

    @property
    def still(self) -> bool:
        return self.owner.is_lost(*self.place)

    def __str__(self) -> str:
        return f"channel {self.channel}, stripe {self.stripe}: {self.why}"


class Mending:
    """Makes the broken sockets of one rank's links in one communicator again.

    `places` says where the peers listen. `check` is called now and then with a rank that is waited for, and raises when
    that is of no use. Each peer that must be connected has a thread for the while.
    """

    def __init__(
        self,
        rank: int,
        comm: bytes,
        listener: Listener,
        places: Mapping[int, Sequence[Address]],
        timeout: float,
        check: Callable[[int], None],
    ) -> None:
        self._rank, self._comm, self._listener, self._places = rank, comm, listener, places
        self._seconds, self._check = min(SECONDS, timeout), check
        self._owners: list[tuple[Owner, int]] = []
        self._lock = threading.Lock()
        self._lost: dict[int, list[_Lost]] = {}  # by peer, each of which has a thread
        self._threads: set[threading.Thread] = set()
        self._warned: set[tuple[int, bool]] = set()  # by peer, whether of spoiled bytes
        self._why: dict[int, tuple[str, bool]] = {}
        listener.mending = self

    def add(self, owner: Owner, shift: int = 0) -> None:
        """Links that `owner` is given from now on are mended. Keys have its channels' numbers plus `shift`."""
        fd = owner.mend_tcp()
        self._owners.append((owner, shift))
        self._listener.watch(fd, lambda: self._take(owner, shift))

    def _take(self, owner: Owner, shift: int) -> None:
        """On the listener's thread: sockets broke."""
        for peer, channel, stripe, tries, held, spoiled, why in owner.take_lost():
            lost = _Lost(owner, shift, peer, channel, stripe, tries, why)
            log.debug("rank %d: the connection to rank %d broke: %s", self._rank, peer, lost)
            with self._lock:
                if spoiled or peer not in self._why:
                    self._why[peer] = why, spoiled
                waiting = self._lost.get(peer)
                if waiting is not None:
                    waiting.append(lost)
                    continue
                self._lost[peer] = [lost]
            pause = _HELD_SECONDS if held else _GRACE if self._rank > peer else 0.0
            thread = threading.Thread(target=self._mend, args=(peer, pause), name="hetcoll-mending", daemon=True)
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
            try:
                lifetime.begin(thread)
            except OSError as error:
                self._give_up(peer, str(error))

    def settle(self) -> None:
        """Before this rank leaves: wait until what it sent has come to those who are there, since nobody could send it
        again. A peer that takes nothing for seconds ends the wait."""
        gone: set[int] = set()
        least, until, pause = sys.maxsize, 0.0, 0.0005
        while True:
            left = {peer: n for owner, _ in self._owners for peer, n in owner.undelivered().items() if peer not in gone}
            if not left:
                return
            for peer in left:
                try:
                    self._check(peer)
                except ClosedError:
                    return
                except HetcollError:
                    gone.add(peer)
            now = time.monotonic()
            if sum(left.values()) < least:
                least, until = sum(left.values()), now + min(self._seconds, _SETTLING_SECONDS)
            if now >= until:
                log.debug("rank %d leaves before these ranks have all bytes (rank: bytes): %s", self._rank, left)
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def close(self) -> None:
        """The listener is closed: wait for the threads, which see that."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(1.0)

    # The end that connects.

    def _mend(self, peer: int, pause: float) -> None:
        deadline, refused, told, failed = time.monotonic() + self._seconds, 0.0, "", 0
        try:
            while self._pause(peer, pause):
                try:
                    if self._connect(peer, min(deadline, time.monotonic() + _TELLING_SECONDS), failed):
                        deadline, refused = time.monotonic() + self._seconds, 0.0  # what breaks next breaks anew
                except InitError as error:
                    now, failed = time.monotonic(), failed + 1
                    refused, told = refused or now, str(error) if now < deadline else told or str(error)
                    if now >= min(deadline, refused + _REFUSED_SECONDS):
                        self._give_up(peer, told)
                        return
                pause = _PAUSE
        except ClosedError:
            return
        except HetcollError as error:  # it is lost, or has left
            self._give_up(peer, str(error))

    def _pause(self, peer: int, seconds: float) -> bool:
        """Wait for the peer to connect; whether any of its sockets are still lost. If not, this thread is over."""
        until = time.monotonic() + seconds
        while True:
            self._check(peer)
            with self._lock:
                lost = self._lost[peer] = [each for each in self._lost[peer] if each.still]
                if not lost:
                    del self._lost[peer]
                    return False
            left = until - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, 0.01))

    def _connect(self, peer: int, deadline: float, failed: int) -> bool:
        """One try for all that is lost; whether it made some. InitError where nobody listens there, or answers.

        After so many that `failed` it begins with another address: one that answers nothing takes all of the time, and
        is on a network that may be dead while another one is not."""
        hurried = self._rank > peer
        turn = failed % max(1, len(self._places[peer]))
        addresses = [*self._places[peer][turn:], *self._places[peer][:turn]]
        tries: dict[EdgeKey, tuple[_Lost, Came]] = {}
        for lost in list(self._lost[peer]):
            lost.tries += 1
            came = lost.owner.hold_socket(*lost.place, lost.tries, False)
            if came is not None and came != LEFT:
                src, dst = sorted((self._rank, peer))
                key = EdgeKey(self._comm, src, dst, lost.channel + lost.shift, lost.stripe, lost.tries)
                tries[key] = lost, Came(*came)
        requests = [Request(key, addresses, hurried) for key in tries]
        made = self._listener.connect_many(requests, deadline, lambda: self._check(peer))
        resumed = False
        for key, sock in made.items():
            lost, came = tries[key]
            try:
                send_all(sock, CAME.pack(*came), deadline)
                theirs = Came(*CAME.unpack(receive_exactly(sock, CAME.size, deadline)))
            except OSError as error:
                log.debug("rank %d: %s: %s", self._rank, key, spell_error(error))
                close_hard(sock)
                continue
            if theirs == LEFT:
                close_hard(sock)
                self._give_up(peer, f"rank {peer} has left it", lost)
                continue
            self._resume(lost.owner, lost.place, lost.tries, sock, theirs)
            resumed = True
        return resumed

    def _give_up(self, peer: int, why: str, one: _Lost | None = None) -> None:
        """All sockets to a peer that are lost, or one of them, after which its thread goes on with the others."""
        with self._lock:
            lost = self._lost.pop(peer, []) if one is None else [one]
            if one is not None:
                self._lost[peer].remove(one)
        for each in lost:
            text = f"the connection broke ({each}) and could not be made again: {why}"
            each.owner.give_up_socket(*each.place, text)

    # The end that is connected to; on the listener's thread.

    def admit(self, key: EdgeKey, *, hurried: bool) -> Came | None:
        """A peer makes a socket again: what came over it, or `LEFT`; None: that is refused."""
        peer = key.dst if hurried else key.src
        if key.comm != self._comm or {self._rank, peer} != {key.src, key.dst} or not key.src < key.dst:
            return None
        for owner, shift in self._owners:
            came = owner.hold_socket(peer, key.channel - shift, key.stripe, key.life, not hurried)
            if came is not None:
                return Came(*came)
        return None

    def resume(self, key: EdgeKey, sock: socket.socket, came: Came) -> None:
        """The peer has confirmed an admitted socket, and told what came to it."""
        peer = key.dst if key.src == self._rank else key.src
        for owner, shift in self._owners:
            place = peer, key.channel - shift, key.stripe
            if owner.is_lost(*place):
                self._resume(owner, place, key.life, sock, came)
                return
        close_hard(sock)

    def _resume(self, owner: Owner, place: tuple[int, int, int], number: int, sock: socket.socket, came: Came) -> None:
        peer, fd = place[0], sock.detach()
        if not owner.resume_socket(*place, number, fd, came):
            close_hard(socket.socket(fileno=fd))
            return
        with self._lock:
            why, spoiled = self._why.pop(peer, ("", False))
            first = (peer, spoiled) not in self._warned
            self._warned.add((peer, spoiled))
        if first:
            log.warning(
                "rank %d: a connection to rank %d, on host %s, %s (%s) and was made again. Nothing is lost; further"
                " ones are counted only: %s of counters()",
                self._rank,
                peer,
                self._places[peer][0].host,
                "was dropped" if spoiled else "broke",
                why,
                "spoiled_pieces and resent_pieces" if spoiled else "tcp_reconnects",
            )
