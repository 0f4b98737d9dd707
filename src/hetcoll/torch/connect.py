"""From a torch store to a communicator.

Ranks meet through the store that torch hands to a backend, which all members of the group share and nobody else uses.
The first group of a job starts hetcoll's own store in the process of its rank 0; later groups join that one under a
name of their own, which costs one message a rank, no thread, and no rank that is not a member.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from .. import Communicator, InitError
from ..config.env import Config, configuration
from ..config.process import configure
from ..rendezvous.bootstrap import get_unique_id
from ..rendezvous.protocol.unique_id import UniqueId, hosted_here
from ..rendezvous.protocol.wire import WORLD
from ..rendezvous.session import Session
from ..types import Format

_NAME_BYTES = 16


def connect(
    store: dist.Store, rank: int, size: int, timeout: float, session: Session | None, compress: Format | None = None
) -> Communicator:
    """A communicator of the `size` ranks that share `store`; each calls this. `InitError` after `timeout` seconds.

    `session` is this process's membership in the job, where all these ranks already belong to one. `compress`: in
    place of HETCOLL_COMPRESS.
    """
    deadline, config = time.monotonic() + timeout, _settings(timeout, compress)
    told = _agree(store, rank, session, config)
    name, unique_id = told[:_NAME_BYTES], UniqueId.from_bytes(told[_NAME_BYTES:])
    if session is not None:
        return Communicator(session, name, rank, size, config, deadline - time.monotonic())
    return _enter(unique_id, rank, size, config, deadline)


def join(unique_id: UniqueId, rank: int, size: int, timeout: float, compress: Format | None) -> Communicator:
    """As `connect`, of the ranks that have this unique id, which `get_unique_id` made on rank 0."""
    deadline = time.monotonic() + timeout
    return _enter(unique_id, rank, size, _settings(timeout, compress), deadline)


def _settings(timeout: float, compress: Format | None) -> Config:
    config = replace(configuration(), timeout=timeout)
    if compress is not None:
        config = replace(config, compress=compress)
    configure(config)
    return config


def _enter(unique_id: UniqueId, rank: int, size: int, config: Config, deadline: float) -> Communicator:
    """The communicator of all ranks of a job that begins."""
    try:
        session = Session(unique_id, rank, size, deadline - time.monotonic())
        try:
            return Communicator(session, WORLD, rank, size, config, deadline - time.monotonic())
        except BaseException:
            session.control.close()
            raise
    finally:
        if (here := hosted_here(unique_id.job_id)) is not None:  # who is not there by now does not know it
            here.retire()


def _agree(store: dist.Store, rank: int, session: Session | None, config: Config) -> bytes:
    """A name for the group and the unique id of its job, which rank 0 tells the others.

    A store may serve the same group again after it was destroyed: the n-th time on one rank is the n-th on all.
    """
    key = f"hetcoll/{store.add(f'hetcoll/times/{rank}', 1)}"
    if rank == 0:
        unique_id = get_unique_id(config) if session is None else session.control.unique_id
        told = os.urandom(_NAME_BYTES) + unique_id.to_bytes()
        store.set(key, told)  # torch takes bytes as well
        return told
    try:
        store.wait([key], timedelta(seconds=config.timeout))
    except RuntimeError as error:
        raise InitError(f"rank 0 of this process group did not appear in {config.timeout:g} s: {error}") from error
    return store.get(key)
