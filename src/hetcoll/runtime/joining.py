"""How a process joins a job of which it knows the unique id: the communicator of all ranks, or one that grows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from .. import lifetime
from ..calls import check_int, check_seconds
from ..config.env import Config, configuration
from ..config.process import configure
from ..config.variables import parse_format
from ..errors import ArgumentError, BufferTypeError, PeerLostError
from ..plan.topology import restrict
from ..rendezvous import decisions
from ..rendezvous.protocol.unique_id import UniqueId
from ..rendezvous.protocol.wire import WORLD
from ..rendezvous.session import Session, coming_together
from .regroup import Made, confirm

C = TypeVar("C", bound=Made)

Make = Callable[[Session, bytes, int, int, Config, float], C]
"""The class of communicators, as it is called: session, group, rank, size, settings, seconds."""


def init(make: Make[C], size: int, rank: int, unique_id: UniqueId | str | bytes, timeout: float | None) -> C:
    """See `Communicator.init`."""
    if isinstance(size, bool) or isinstance(rank, bool):
        raise BufferTypeError(f"rank and size: wanted whole numbers, got rank {rank} of size {size}")
    size, rank = check_int(size, "size"), check_int(rank, "rank")
    if not 0 <= rank < size < 1 << 31:
        raise ArgumentError(f"rank and size: wanted 0 <= rank < size, got rank {rank} of size {size}")
    unique_id = parse(unique_id)
    seconds = None if timeout is None else check_seconds(timeout)
    config = configuration()
    configure(config)
    if config.objects is None:  # who has the unique id has the job's secret
        config = replace(config, objects=True)
    return enter(make, unique_id, rank, size, config, config.init_timeout if seconds is None else seconds)


def join(make: Make[C], unique_id: UniqueId | str | bytes, timeout: float | None) -> C:
    """See `Communicator.join`."""
    unique_id = parse(unique_id)
    seconds = None if timeout is None else check_seconds(timeout)
    config = configuration()
    configure(config)
    if config.objects is None:
        config = replace(config, objects=True)
    return come_in(make, unique_id, 0, 1, config, config.init_timeout if seconds is None else seconds)


def parse(unique_id: UniqueId | str | bytes) -> UniqueId:
    """That of a job, in any of its forms."""
    if isinstance(unique_id, str):
        return UniqueId.parse(unique_id)
    if isinstance(unique_id, bytes):
        return UniqueId.from_bytes(unique_id)
    if not isinstance(unique_id, UniqueId):
        raise BufferTypeError(f"unique_id: wanted a UniqueId, or its text or bytes, got {unique_id!r}")
    return unique_id


def come_in(make: Make[C], unique_id: UniqueId, rank: int, size: int, config: Config, timeout: float) -> C:
    """The communicator that takes this process in; `rank` and `size` are what the launcher started it as."""
    deadline = time.monotonic() + timeout
    lifetime.await_drops()  # this process may have been in the same job until then
    while True:
        with coming_together():
            session = Session(unique_id, rank, size, max(deadline - time.monotonic(), 0.1), joins=True)
        place: decisions.Place | None = None
        try:
            place = decisions.come(session.control, max(deadline - time.monotonic(), 0.0))
            with coming_together():
                return _take(make, session, place, config, deadline)
        except BaseException as error:
            session.control.close()
            # Another newcomer, say, with which the others try again; or a store that another one follows.
            lost = isinstance(error, PeerLostError) and (place is not None or session.control.lost_early)
            if not lost or time.monotonic() >= deadline:
                raise


def _take(make: Make[C], session: Session, place: decisions.Place, config: Config, deadline: float) -> C:
    """This process's communicator at a place, once all that are to have it have it."""
    epoch, compress, islands = json.loads(place.told)
    config = replace(config, compress=parse_format(compress), islands=restrict(islands, range(place.size)))
    comm = make(session, place.group, place.rank, place.size, config, deadline - time.monotonic())
    return confirm(comm, session, place.group, epoch, deadline)


def enter(make: Make[C], unique_id: UniqueId, rank: int, size: int, config: Config, timeout: float) -> C:
    """See `Communicator.enter`."""
    deadline = time.monotonic() + timeout
    lifetime.await_drops()  # this rank may have been in the same job until then
    with coming_together():
        session = Session(unique_id, rank, size, timeout)
        try:
            return make(session, WORLD, rank, size, config, deadline - time.monotonic())
        except BaseException:
            session.control.close()
            raise
