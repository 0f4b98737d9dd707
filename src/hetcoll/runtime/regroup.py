"""Communicators that come from another one: parts of it, and what is left of it."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from .. import calls
from ..calls import check_int
from ..config.env import Config
from ..config.variables import parse_format
from ..errors import InitError, PeerLostError, spell_ranks
from ..health.diagnosis import Kind
from ..plan.topology import restrict
from ..types import Format
from .core import Core

_ROUNDS = 4  # times the timeout of `shrink`: after so long it tries no more


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable, covariant=True)


class Make(Protocol[C]):
    """Makes the communicator of a name and of these ranks of another one, within so many seconds."""

    def __call__(self, name: bytes, members: list[int], timeout: float, form: Format | None = None) -> C: ...


def split(core: Core, color: int | None, key: int, compress: str | None, make: Make[C]) -> C | None:
    """See `Communicator.split`."""
    core.host.check_usable()
    form = None if compress is None else parse_format(compress)
    members = _members(core, color, key)
    core.splits += 1
    if color is None:
        return None
    try:
        return make(_name(core.group, f"split {core.splits} {color}"), members, core.config.init_timeout, form)
    except (PeerLostError, InitError) as error:
        if core.engine.failed:  # where a rank is gone, that is what this communicator failed with
            raise core.diagnosis.error() from error
        raise


def _members(core: Core, color: int | None, key: int) -> list[int]:
    """The ranks that split with this one's `color`, by `key`; none where it has no color. Collective."""
    mine = [0, 0] if color is None else [1, check_int(color, "color")]
    rows = np.empty((core.size, 3), np.int64)
    core.launch(calls.meeting(core.rank, "split()", np.array([*mine, check_int(key, "key")]), rows), False, None)
    same = [(row[2], rank) for rank, row in enumerate(rows.tolist()) if color is not None and row[:2] == mine]
    return [rank for _, rank in sorted(same)]


def _name(parent: bytes, what: str) -> bytes:
    """Of a communicator that comes from `parent`, the same on all of its ranks."""
    return hashlib.blake2b(parent + what.encode(), digest_size=16).digest()


def configure(config: Config, members: Sequence[int], compress: Format | None) -> Config:
    """The settings of a communicator of these ranks of another one, which has `config`."""
    compress = config.compress if compress is None else compress
    return replace(config, islands=restrict(config.islands, members), compress=compress)


def shrink(core: Core, timeout: float | None, make: Make[C]) -> C:
    """See `Communicator.shrink`."""
    if core.host.closed or core.engine.forked:
        core.host.check_usable()
    seconds = core.config.init_timeout if timeout is None else core.seconds(timeout)
    core.engine.fail(Kind.ABORTED, core.rank, "shrink() replaced this communicator")
    start, attempts, patience = time.monotonic(), core.size, seconds
    while True:
        number, ranks = core.session.control.shrink(core.group, patience)
        patience = seconds / 2  # not what is left: a rank that is stopped by now must not use up the others' time
        try:
            return _follow(core, number, ranks, time.monotonic() + patience, make)
        except (PeerLostError, InitError):  # one more is gone or stopped: all of them notice, and try again
            attempts -= 1
            if attempts == 0 or time.monotonic() >= start + _ROUNDS * seconds:
                raise


def _follow(core: Core, number: int, ranks: list[int], deadline: float, make: Make[C]) -> C:
    """The communicator that follows the roll call `number`, or an error on every rank that is alive."""
    name = _name(core.group, f"shrink {number}")
    comm = make(name, ranks, deadline - time.monotonic())
    try:
        with in_ranks_of_parent(ranks):
            core.session.control.exchange(name, b"shrink", b"", max(deadline - time.monotonic(), 0.1))
    except BaseException:
        comm.close()
        raise
    return comm


_RANKS = re.compile(r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)(?: of \d+)?")  # as `errors.spell_ranks` spells them


@contextlib.contextmanager
def in_ranks_of_parent(members: Sequence[int]) -> Iterator[None]:
    """Whoever makes a communicator of `members` knows no other ranks than theirs in the one that they come from: so
    what goes wrong meanwhile is told in these."""

    def spell(found: re.Match[str]) -> str:
        runs = [[int(end) for end in run.split("-")] for run in found[1].split(", ")]
        ranks = [rank for run in runs for rank in range(run[0], run[-1] + 1)]
        return spell_ranks(members[r] for r in ranks) if max(ranks) < len(members) else found[0]

    try:
        yield
    except PeerLostError as error:
        rank = members[error.rank] if 0 <= error.rank < len(members) else -1
        raise PeerLostError(_RANKS.sub(spell, str(error)), rank) from error
    except InitError as error:
        raise type(error)(_RANKS.sub(spell, str(error))) from error
