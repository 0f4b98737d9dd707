"""Communicators that come from another one: parts of it, what is left of it, and with newcomers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from .. import calls
from ..calls import check_int
from ..config.env import Config
from ..config.variables import parse_format
from ..errors import ArgumentError, CommunicationError, InitError, PeerLostError, spell_ranks
from ..health.verdicts import Kind, tell_interrupted
from ..plan.topology import restrict
from ..rendezvous import decisions
from ..rendezvous.session import Session
from ..types import Format
from .core import Core

_REASON = 1.0  # seconds: who leaves a group in the making ends that first, and only then says why
_ROUNDS = 4  # times the timeout of `shrink`: after so long it tries no more


class Made(Protocol):
    """A communicator."""

    _core: Core

    def close(self) -> None: ...


C = TypeVar("C", bound=Made)
D = TypeVar("D", bound=Made, covariant=True)


class Make(Protocol[D]):
    """Makes the communicator of a name and of these ranks of another one, within so many seconds."""

    def __call__(self, name: bytes, members: list[int], timeout: float, form: Format | None = None) -> D: ...


def split(core: Core, color: int | None, key: int, compress: str | None, make: Make[C]) -> C | None:
    """See `Communicator.split`."""
    core.host.check_usable()
    form = None if compress is None else parse_format(compress)
    color = None if color is None else check_int(color, "color")  # its name is that of True, too
    name = b""
    try:
        members = _members(core, color, key)
        core.splits += 1
        if color is None:
            return None
        name = name_of(core.group, f"split {core.splits} {color}")
        with while_whole(core, name):
            part = make(name, members, core.config.init_timeout, form)
            part._core.epoch = core.epoch
        return part
    except (KeyboardInterrupt, SystemExit):
        interrupted(core, name)
        raise


def _members(core: Core, color: int | None, key: int) -> list[int]:
    """The ranks that split with this one's `color`, by `key`; none where it has no color. Collective."""
    mine = [0, 0] if color is None else [1, color]
    rows = np.empty((core.size, 3), np.int64)
    core.launch(calls.meeting(core.rank, "split()", np.array([*mine, check_int(key, "key")]), rows), False, None)
    same = [(row[2], rank) for rank, row in enumerate(rows.tolist()) if color is not None and row[:2] == mine]
    return [rank for _, rank in sorted(same)]


@contextlib.contextmanager
def while_whole(core: Core, group: bytes) -> Iterator[Callable[[str], None]]:
    """The block makes a group of ranks of `core`, and ends when that fails, since others may never come to it then.
    Raises what `core` has failed with, where that is why. Gives what ends it for another reason, from any thread, with
    an InitError of these words."""
    told = threading.Event()  # why it ends, where this rank is to know
    with core.session.control.while_wanted(group) as give_up:

        def stop(words: str) -> None:
            give_up(words)
            told.set()

        end = partial(stop, "the communicator that it was to come from has failed")
        core.diagnosis.on_failure.append(end)
        try:
            if core.engine.failed:
                end()
            yield stop
        except (CommunicationError, InitError) as error:
            told.wait(_REASON)
            if core.engine.failed:
                raise core.diagnosis.error() from error
            raise
        finally:
            core.diagnosis.on_failure.remove(end)


def interrupted(core: Core, group: bytes) -> None:
    """A signal handler raised while `group` was made of ranks of `core`, or on its way to the program, which has
    nothing of it then: nobody must wait for this rank here or there, however long the exception keeps what was made."""
    core.host.give_up()
    membership = core.session.control.membership(group)
    if membership is not None:
        tell_interrupted(core.session.control, group, membership.rank)


def name_of(parent: bytes, what: str) -> bytes:
    """Of a communicator that comes from `parent`, the same on all of its ranks."""
    return hashlib.blake2b(parent + what.encode(), digest_size=16).digest()


def configure(config: Config, members: Sequence[int], compress: Format | None, check: bool) -> Config:
    """The settings of a communicator of these ranks of another one, which has `config`; without `check`, one that
    carries what the other one checks."""
    compress = config.compress if compress is None else compress
    checked = config.check if check else "0"
    return replace(config, islands=restrict(config.islands, members), compress=compress, check=checked)


def shrink(core: Core, timeout: float | None, make: Make[C]) -> C:
    """See `Communicator.shrink`."""
    if core.host.closed or core.engine.forked:
        core.host.check_usable()
    seconds = core.config.init_timeout if timeout is None else core.seconds(timeout)
    core.engine.fail(Kind.ABORTED, core.rank, "shrink() replaced this communicator")
    start, attempts, patience = time.monotonic(), core.size, seconds
    while True:
        number, ranks = decisions.shrink(core.session.control, core.group, patience)
        patience = seconds / 2  # not what is left: a rank that is stopped by now must not use up the others' time
        try:
            name = name_of(core.group, f"shrink {number}")
            return _follow(core, name, ranks, time.monotonic() + patience, make)
        except (PeerLostError, InitError):  # one more is gone or stopped: all of them notice, and try again
            attempts -= 1
            if attempts == 0 or time.monotonic() >= start + _ROUNDS * seconds:
                raise


def agree(core: Core, flag: int, timeout: float | None) -> int:
    """See `Communicator.agree`."""
    if core.host.closed or core.engine.forked:
        core.host.check_usable()
    if not -(1 << 63) <= (flag := check_int(flag, "flag")) < 1 << 63:
        raise ArgumentError(f"flag: wanted 64 bits, got {flag}")
    seconds = core.seconds(timeout)
    core.agreements += 1  # of calls that are not refused: the number is the same on all ranks
    return decisions.agree(core.session.control, core.group, core.agreements, flag, seconds)


def grow(core: Core, newcomers: int, timeout: float | None, make: Make[C]) -> C:
    """See `Communicator.grow`."""
    core.host.check_usable()
    if not 1 <= (count := check_int(newcomers, "newcomers")) < 1 << 31:
        raise ArgumentError(f"newcomers: wanted {'1 or more' if count < 1 else 'fewer than 2^31'}, got {count}")
    seconds = core.config.init_timeout if timeout is None else core.seconds(timeout)
    deadline = time.monotonic() + seconds
    told = json.dumps([core.epoch + 1, core.config.compress.label, core.config.islands]).encode()
    while True:
        core.growths += 1
        left = max(deadline - time.monotonic(), 0.0)
        place = decisions.grow(core.session.control, core.group, core.growths, count, told, left)
        making = time.monotonic() + core.config.init_timeout  # whoever only looked for newcomers has some now
        try:
            return _follow(core, place.group, list(range(place.size)), max(making, deadline), make)
        except PeerLostError as error:
            if core.engine.failed:  # a rank of this one is gone, too
                raise core.diagnosis.error() from error
            if time.monotonic() >= deadline:
                raise  # else: it was a newcomer, and another one may come


def _follow(core: Core, name: bytes, ranks: list[int], deadline: float, make: Make[C]) -> C:
    """The communicator of the next epoch, or an error on every rank that is alive."""
    comm = make(name, ranks, deadline - time.monotonic())
    with in_ranks_of_parent(ranks):
        return confirm(comm, core.session, name, core.epoch + 1, deadline)


def confirm(comm: C, session: Session, name: bytes, epoch: int, deadline: float) -> C:
    """`comm`, which is called `name`, once all of its ranks have it; else it is closed."""
    try:
        session.control.exchange(name, b"epoch", b"", max(deadline - time.monotonic(), 0.1))
    except BaseException:
        comm.close()
        raise
    comm._core.epoch = epoch
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
