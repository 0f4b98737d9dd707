"""A member's side of the end of the store: finding the successor that serves the job from then on, or being it."""

from __future__ import annotations

import enum
import errno
import logging
import math
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from ..config.env import environment
from ..config.interfaces import own_hosts
from ..errors import HetcollError, InitError
from .connections.announcing import announce, listens_locally
from .connections.probe import connect_store
from .connections.sockets import SILENT, bind_all, is_itself, spell_address, spell_error, spells_loopback
from .protocol.exchanges import FEW
from .protocol.news import StoreLost
from .protocol.unique_id import UniqueId
from .protocol.wire import F64, U32, unpack
from .uplink import GRACE, SILENCE, pack_places, read_places

log = logging.getLogger("hetcoll.succession")

SECONDS = 30.0  # in which a successor is found
_GREETS = 3.0  # seconds that one which listens is given at a time: it may have yet to notice
_STILL_GREETS = 1.0  # seconds that the lost store is given: its port may have gone to a stranger since
_GIVES_WAY = 2.0  # seconds in which one that looked at this process in vain serves, too
_REFUSES = 1.0  # seconds in which the listener of a process that died is gone, too
_UNSURE_GRACE = 15.0  # seconds between the first and the last who notice that a host has vanished
_BEHIND_RELAYS = 30.0  # more than that where some are behind relays, and others have TCP's patience

assert _STILL_GREETS + _REFUSES < GRACE, "who looks there first comes too late"
assert _GREETS + 2 * _REFUSES < SILENCE, "a look that is slow would be taken for a stop"

Places = tuple[tuple[str, int], ...]


class Succession:
    """Who takes the store's place, as it told last; and this process's own listeners, where it is one of them."""

    def __init__(self, *, hosts: bool) -> None:
        self._count = self._elsewhere = self._silent = 0
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
        """What the store tells all members: SUCCESSORS."""
        self._certain = True
        if body:
            self.told, (counts, *places) = body, unpack(body)
            (self._count,), (self._elsewhere,), (self._silent,) = U32.iter_unpack(counts)
            self._order = [read_places(each) for each in places]

    def find(self, lost: UniqueId, end: StoreLost, stopped: Callable[[], bool]) -> UniqueId | None:
        """Where the job's store is from now on; None where there is none, or once it is `stopped`.

        Where the job is still served at the addresses of the lost one, a successor has those by now; or only this
        connection was lost, and what serves there has gone on without this process, as it will say."""
        if not self._order:
            return None
        order, most = self._order, math.inf
        local, self._local = self._local, b""  # of this store: another one may be where it was
        # Those that fell silent may have gone on with others, of which the lost store had yet to miss some. And also
        # where it serves as yet it may end before we are there.
        self._certain = self._certain and end.sure and not self._silent
        if not end.orderly:
            found = self._look(lost, _STILL_GREETS, local)
            if found is _Found.SERVES:
                return lost
            self._certain = self._certain and found is _Found.DEAD
            if found is _Found.UNREACHABLE:  # with all that is on its host
                there, most = {host for host, _ in lost.addresses}, self._elsewhere
                order = [places for places in order if not there <= {host for host, _ in places}]
        gone = end.orderly or self._certain  # the lost store's own process, which else may come, too
        patient = not self._certain
        while not stopped():
            silent = False
            for number, places in enumerate(order):
                if places == self._mine:
                    if silent and patient:  # where the store fell silent some notice it later than others
                        break
                    return self._serving(lost, order[number + 1 :]) or self._take_over(lost, gone, most)
                home = replace(lost, addresses=places)
                found = self._look(home, _GREETS)
                if found is _Found.SERVES:
                    return home
                silent, self._certain = silent or found is _Found.SILENT, self._certain and found is _Found.DEAD
            if not silent:
                return None
            patient = False
        return None

    def _look(self, home: UniqueId, seconds: float, local: bytes = b"") -> _Found:
        """What is there. Where this took far too long, this process was stopped: the others may be elsewhere."""
        until = time.monotonic() + SILENCE
        found = _look(home, seconds, local)
        self._certain = self._certain and time.monotonic() < until
        return found

    def _serving(self, lost: UniqueId, later: list[Places]) -> UniqueId | None:
        """One that comes after this one and waits for more than half already: those behind relays notice it late."""
        there = (replace(lost, addresses=places) for places in (() if self._certain else later))
        return next((each for each in there if _serves(each, _STILL_GREETS)), None)

    def _take_over(self, lost: UniqueId, gone: bool, most: float) -> UniqueId:
        """Serve the job, also where it was served before if that is here: newcomers look there. `gone`: the lost
        store's process does not come to it; nor do more than `most`."""
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
        passed_over = self._order[: self._order.index(mine)] if self._certain else []  # which are dead
        rivals = tuple(each for each in self._order if each != mine and each not in passed_over)
        quorum = (self._count + (not gone)) // 2 + 1
        seconds = _UNSURE_GRACE + (_BEHIND_RELAYS if self._count >= FEW else 0.0)
        claim = Claim(quorum, rivals, self._certain, seconds, GRACE if self._certain else _UNSURE_GRACE, most)
        log.info("this process serves the job's store from now on, at %s", spell_address(self._mine[0]))
        server = StoreServer(
            listeners,
            lost.secret,
            context,
            taken.to_bytes(),
            open_fetch=bool(opened),
            linger=F64.unpack(linger)[0],
            succeeds=claim,
            tls=bool(tls),
        )
        self._mine = ()
        # Each of two may have looked at the other before that one began: then the later one of the order gives way.
        for places in () if self._certain else self._order[: self._order.index(mine)]:
            home = replace(lost, addresses=places)
            if _serves(home, _GIVES_WAY) and server.withdraw():
                log.info("the one at %s serves, which comes before this one", spell_address(places[0]))
                return home
        self.hosts = True
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
    UNREACHABLE = enum.auto()
    """Nothing at all comes from its host."""


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
    until, heard = 0.0, False
    while True:
        if _serves(unique_id, seconds):
            return _Found.SERVES
        until = until or time.monotonic() + _REFUSES
        if local and listens_locally(local) is False:
            return _Found.DEAD
        answers = {host: _knock((host, port), until) for host, port in unique_id.addresses}
        if all(each is _Found.DEAD for each in answers.values()):
            return _Found.DEAD
        far = {host: each for host, each in answers.items() if not spells_loopback(host)}  # that is this host's own
        heard = heard or not far or any(each is not _Found.UNREACHABLE for each in far.values())
        seconds = until - time.monotonic()
        if seconds <= 0:
            return _Found.SILENT if heard else _Found.UNREACHABLE
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


def _knock(address: tuple[str, int], until: float) -> _Found:
    """What its host says of who listens there."""
    try:
        with socket.create_connection(address, max(0.01, until - time.monotonic())) as sock:
            return _Found.DEAD if is_itself(sock) else _Found.SILENT
    except OSError as error:
        log.debug("%s: %s", spell_address(address), spell_error(error))
        if error.errno == errno.ECONNREFUSED:
            return _Found.DEAD
        silent = isinstance(error, TimeoutError) or error.errno in SILENT
        return _Found.UNREACHABLE if silent else _Found.SILENT
