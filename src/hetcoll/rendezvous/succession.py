"""A member's side of the end of the store: finding the successor that serves the job from then on, or being it."""

from __future__ import annotations

import enum
import errno
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from ..config.env import environment
from ..errors import HetcollError, InitError
from .connections.announcing import announce, listens_locally
from .connections.interfaces import own_hosts
from .connections.probe import connect_store
from .connections.sockets import bind_all, is_itself, spell_address, spell_error
from .protocol.exchanges import FEW
from .protocol.news import StoreLost
from .protocol.unique_id import UniqueId
from .protocol.wire import F64, U32, unpack
from .uplink import GRACE, pack_places, read_places

log = logging.getLogger("hetcoll.succession")

SECONDS = 30.0  # in which a successor is found
_GREETS = 3.0  # seconds that one which listens is given at a time: it may have yet to notice
_STILL_GREETS = 1.0  # seconds that the lost store is given: its port may have gone to a stranger since
_REFUSES = 1.0  # seconds in which the listener of a process that died is gone, too
_UNSURE_GRACE = 15.0  # seconds between the first and the last who notice that a host has vanished
_BEHIND_RELAYS = 30.0  # more than that where some are behind relays, and others have TCP's patience

assert _STILL_GREETS + _REFUSES < GRACE, "who looks there first comes too late"

Places = tuple[tuple[str, int], ...]


class Succession:
    """Who takes the store's place, as it told last; and this process's own listeners, where it is one of them."""

    def __init__(self, *, hosts: bool) -> None:
        self._count = 0
        self._order: list[Places] = []
        self.told = b""
        """The last SUCCESSORS that says something."""
        self._mine: Places = ()
        self._listeners: list[socket.socket] = []
        self._charge: list[bytes] = []
        self._local = b""  # an abstract name at which the store listens on this host, if it does
        self._certain = True
        self.hosts = hosts
        """Whether the store is, or was, in this process."""

    @property
    def certain(self) -> bool:
        """Whether every store before this one is dead, or more than half of the members are here."""
        return self._certain

    @property
    def places(self) -> bytes:
        """Where this process listens as a successor, packed."""
        return pack_places(self._mine)

    @property
    def descriptors(self) -> int:
        return len(self._listeners)

    def stand(self, charge: bytes) -> bytes:
        """Listen, as the store wants; where, packed. Nothing where that cannot be had."""
        *self._charge, local = unpack(charge)
        self._local = local if local and listens_locally(local) else b""
        if not self._listeners:
            try:
                self._listeners = bind_all(own_hosts(environment().config.socket_ifname), 0)
            except HetcollError as error:
                log.warning("this process cannot be a successor of the job's store: %s", error)
            self._mine = tuple(each.getsockname()[:2] for each in self._listeners)
        return self.places

    def hear(self, body: bytes) -> None:
        """What the store tells all members: how many of the job's processes it is not in, and where its successors
        listen; nothing: as before."""
        self._certain = True
        if body:
            self.told, (count, *places) = body, unpack(body)
            (self._count,), self._order = U32.unpack(count), [read_places(each) for each in places]

    def find(self, lost: UniqueId, end: StoreLost, stopped: Callable[[], bool]) -> UniqueId | None:
        """Where the job's store is from now on; None where there is none, or once it is `stopped`.

        Where the job is still served at the addresses of the lost one, a successor has those by now; or only this
        connection was lost, and what serves there has gone on without this process, as it will say."""
        if not self._order:
            return None
        local, self._local = self._local, b""  # of this store: another one may be where it was
        if not end.orderly:
            self._certain = self._certain and end.sure  # also where it serves as yet: it may end before we are there
            found = _look(lost, _STILL_GREETS, local)
            if found is _Found.SERVES:
                return lost
            self._certain = self._certain and found is _Found.DEAD
            if found is _Found.SILENT:  # and its host most likely: who is there, too, comes last
                there = {host for host, _ in lost.addresses}
                self._order.sort(key=lambda places: there <= {host for host, _ in places})
        gone = end.orderly or self._certain  # the lost store's own process, which else may come, too
        patient = not self._certain
        while not stopped():
            silent = False
            for number, places in enumerate(self._order):
                if places == self._mine:
                    if silent and patient:  # where the store fell silent some notice it later than others
                        break
                    return self._serving(lost, number) or self._take_over(lost, number, gone)
                home = replace(lost, addresses=places)
                found = _look(home, _GREETS)
                if found is _Found.SERVES:
                    return home
                silent, self._certain = silent or found is _Found.SILENT, self._certain and found is _Found.DEAD
            if not silent:
                return None
            patient = False
        return None

    def _serving(self, lost: UniqueId, number: int) -> UniqueId | None:
        """One that comes after this one and waits for more than half already: those behind relays notice it late."""
        later = () if self._certain else self._order[number + 1 :]
        there = (replace(lost, addresses=places) for places in later)
        return next((each for each in there if _serves(each, _STILL_GREETS)), None)

    def _take_over(self, lost: UniqueId, number: int, gone: bool) -> UniqueId:
        """Serve the job, also where it was served before if that is here: newcomers look there. This process is the
        successor of this number; `gone`: the lost store's process does not come to it."""
        from .store.returns import Claim  # few processes need them, and imports count
        from .store.server import StoreServer

        listeners, self._listeners = self._listeners, []
        mine = self._mine
        taken = replace(lost, addresses=mine)
        for address in set(lost.addresses) - set(self._mine):
            try:
                listeners += bind_all(address[:1], address[1])
            except InitError as error:
                log.info("newcomers will not find the store at %s: %s", spell_address(address), error)
        context, (opened, tls), linger = self._charge
        listeners += announce(lost.job_id)
        rivals = tuple(self._order[number + 1 :] if self._certain else (each for each in self._order if each != mine))
        quorum = (self._count + (not gone)) // 2 + 1
        seconds = _UNSURE_GRACE + (_BEHIND_RELAYS if self._count >= FEW else 0.0)
        claim = Claim(quorum, rivals, self._certain, seconds, GRACE if self._certain else _UNSURE_GRACE)
        log.info("this process serves the job's store from now on, at %s", spell_address(self._mine[0]))
        StoreServer(
            listeners,
            lost.secret,
            context,
            taken.to_bytes(),
            open_fetch=bool(opened),
            linger=F64.unpack(linger)[0],
            succeeds=claim,
            tls=bool(tls),
        )
        self._mine, self.hosts = (), True
        return taken

    def close(self) -> None:
        """Close the listeners."""
        for listener in self._listeners:
            listener.close()
        self._listeners = []


class _Found(enum.Enum):
    SERVES = enum.auto()
    DEAD = enum.auto()
    """Nobody listens at any of the addresses any more, as far as their host says so."""
    SILENT = enum.auto()


def _look(unique_id: UniqueId, seconds: float, local: bytes = b"") -> _Found:
    """What is there of the job's store, which has so many seconds to greet.

    A process that ends closes its listeners last or first, but soon; and the next store may listen where one died.

    Who accepts there and does not greet may be a stranger, or the store, stopped: the kernel accepts for it. Nor does a
    stranger's greeting say that the store is dead: ports are forwarded, and several listeners may share one. But where
    the store listened at `local`, too, as this process has seen, both are in one network namespace, and that name says
    it as surely as a connection that is refused: the store closes all of its listeners at once, when it ends, and the
    kernel keeps this one as long as any process has it open, stopped or not. If somebody else took the name, which has
    the job's id in it, the store would only count as alive.
    """
    until = 0.0
    while True:
        if _serves(unique_id, seconds):
            return _Found.SERVES
        until = until or time.monotonic() + _REFUSES
        if local and listens_locally(local) is False:
            return _Found.DEAD
        if all(_refused(address, until) for address in unique_id.addresses):
            return _Found.DEAD
        seconds = until - time.monotonic()
        if seconds <= 0:
            return _Found.SILENT
        time.sleep(0.01)


def _serves(unique_id: UniqueId, seconds: float) -> bool:
    """Whether the job's store is there."""
    try:
        sock, _ = connect_store(unique_id, time.monotonic() + seconds, there=True)
    except HetcollError as error:
        log.debug("no store: %s", error)
        return False
    sock.close()
    return True


def _refused(address: tuple[str, int], until: float) -> bool:
    try:
        with socket.create_connection(address, max(0.01, until - time.monotonic())) as sock:
            return is_itself(sock)
    except OSError as error:
        log.debug("%s: %s", spell_address(address), spell_error(error))
        return error.errno == errno.ECONNREFUSED
