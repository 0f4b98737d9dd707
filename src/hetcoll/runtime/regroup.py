"""Communicators that come from another one: parts of it, and what is left of it."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from .. import calls
from ..calls import check_int
from ..errors import InitError, PeerLostError, spell_ranks
from ..health.diagnosis import Kind
from ..plan.topology import restrict
from ..types import Format
from .compression import parse_format
from .core import Core

_ROUNDS = 4  # times the timeout of `shrink`: after so long it tries no more


class Regrouping(Core):
    """The part of `hetcoll.Communicator` that makes others."""

    _splits = 0

    def split(self, color: int | None, key: int = 0, *, compress: str | None = None) -> Self | None:
        """A communicator for each `color`: this rank's, with ranks ordered by `key` and then by rank here.

        Collective over this communicator. A rank with `color` None belongs to none and gets None. Both are 64-bit.
        `compress`: as `hetcoll.init` has it; by default as here.
        """
        self._check_usable()
        form = None if compress is None else parse_format(compress)
        mine = [0, 0] if color is None else [1, check_int(color, "color")]
        rows = np.empty((self._size, 3), np.int64)
        self._launch(calls.meeting(self._rank, "split()", np.array([*mine, check_int(key, "key")]), rows), False, None)
        self._splits += 1
        if color is None:
            return None
        members = [r for _, r in sorted((row[2], r) for r, row in enumerate(rows.tolist()) if row[:2] == mine)]
        name = hashlib.blake2b(self._group + f"split {self._splits} {color}".encode(), digest_size=16).digest()
        try:
            return self._make(name, members, self._config.init_timeout, form)
        except (PeerLostError, InitError):
            self._check_failed()  # where a rank is gone, that is what this communicator failed with
            raise

    def shrink(self, *, timeout: float | None = None) -> Self:
        """A communicator of the ranks that are left after a failure, in the order of their ranks here.

        Every rank that goes on calls it; it returns when all ranks of this communicator have called it or are gone.
        Ranks that do not call it within `timeout` seconds (default: HETCOLL_INIT_TIMEOUT) are left out, and when they
        call it later they get an `InitError`. So are those that have called it and then do not answer for half as long:
        the others agree anew, for which they wait half as long again. The new communicator has memory, connections and
        signatures of its own, so nothing that is still under way from before can reach it. This one is afterwards good
        for `close` only.

        Raises PeerLostError where the process that hosts the job's store is gone, most often rank 0's: there is nobody
        left to decide.
        """
        if self._closed or self._engine.forked:
            self._check_usable()
        seconds = self._config.init_timeout if timeout is None else self._seconds(timeout)
        start = time.monotonic()
        self._engine.fail(Kind.ABORTED, self._rank, "shrink() replaced this communicator")
        attempts, patience = self._size, seconds
        while True:
            number, ranks = self._session.control.shrink(self._group, patience)
            patience = seconds / 2  # not what is left: a rank that is stopped by now must not use up the others' time
            try:
                return self._regroup(number, ranks, time.monotonic() + patience)
            except (PeerLostError, InitError):  # one more is gone or stopped: all of them notice, and try again
                attempts -= 1
                if attempts == 0 or time.monotonic() >= start + _ROUNDS * seconds:
                    raise

    def _regroup(self, number: int, ranks: list[int], deadline: float) -> Self:
        """The communicator that follows the roll call `number`, or an error on every rank that is alive."""
        name = hashlib.blake2b(self._group + f"shrink {number}".encode(), digest_size=16).digest()
        comm = self._make(name, ranks, deadline - time.monotonic())
        try:
            with _in_ranks_of_parent(ranks):
                self._session.control.exchange(name, b"shrink", b"", max(deadline - time.monotonic(), 0.1))
        except BaseException:
            comm.close()
            raise
        return comm

    def _make(self, name: bytes, members: list[int], timeout: float, form: Format | None = None) -> Self:
        """The communicator called `name` of these ranks, this one among them."""
        compress = self._config.compress if form is None else form
        config = replace(self._config, islands=restrict(self._config.islands, members), compress=compress)
        with _in_ranks_of_parent(members):
            return type(self)(self._session, name, members.index(self._rank), len(members), config, timeout)


_RANKS = re.compile(r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)(?: of \d+)?")  # as `errors.spell_ranks` spells them


@contextlib.contextmanager
def _in_ranks_of_parent(members: Sequence[int]) -> Iterator[None]:
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
