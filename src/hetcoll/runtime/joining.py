"""How a process joins a job of which it knows the unique id: the communicator of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from .. import lifetime
from ..config.env import Config, configuration
from ..config.process import configure
from ..errors import ArgumentError
from ..rendezvous.session import Session, coming_together
from ..rendezvous.unique_id import UniqueId
from ..rendezvous.wire import WORLD

C = TypeVar("C")

Make = Callable[[Session, bytes, int, int, Config, float], C]
"""The class of communicators, as it is called: session, group, rank, size, settings, seconds."""


def init(make: Make[C], size: int, rank: int, unique_id: UniqueId | str | bytes, timeout: float | None) -> C:
    """See `Communicator.init`."""
    if size < 1 or not 0 <= rank < size:
        raise ArgumentError(f"rank and size: wanted 0 <= rank < size, got rank {rank} of size {size}")
    if isinstance(unique_id, str):
        unique_id = UniqueId.parse(unique_id)
    elif isinstance(unique_id, bytes):
        unique_id = UniqueId.from_bytes(unique_id)
    config = configuration()
    configure(config)
    if config.objects is None:  # who has the unique id has the job's secret
        config = replace(config, objects=True)
    return enter(make, unique_id, rank, size, config, config.init_timeout if timeout is None else timeout)


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
