"""Communicators that come from another one: parts of it, and what is left of it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Self

import numpy as np

from .. import calls
from ..calls import check_int
from ..errors import InitError, PeerLostError
from ..health.diagnosis import Kind
from ..plan.topology import restrict
from ..types import Format
from .compression import parse_format
from .core import Core


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
        return self._make(name, members, self._config.init_timeout, form)

    def shrink(self, *, timeout: float | None = None) -> Self:
        """A communicator of the ranks that are left after a failure, in the order of their ranks here.

        Every rank that goes on calls it; it returns when all ranks of this communicator have called it or are gone.
        Ranks that do not call it within `timeout` seconds (default: HETCOLL_INIT_TIMEOUT) are left out, and when they
        call it later they get an `InitError`. The new communicator has memory, connections and signatures of its own,
        so nothing that is still under way from before can reach it. This one is afterwards good for `close` only.

        Raises PeerLostError where the process that hosts the job's store is gone, most often rank 0's: there is nobody
        left to decide.
        """
        if self._closed or self._engine.forked:
            self._check_usable()
        seconds = self._config.init_timeout if timeout is None else self._seconds(timeout)
        deadline = time.monotonic() + seconds
        self._engine.fail(Kind.ABORTED, self._rank, "shrink() replaced this communicator")
        attempts = self._size
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            number, ranks = self._session.control.shrink(self._group, left)
            try:
                return self._regroup(number, ranks, deadline)
            except (PeerLostError, InitError):  # one more is gone: all of them notice, and try again
                attempts -= 1
                if attempts == 0 or time.monotonic() >= deadline:
                    raise

    def _regroup(self, number: int, ranks: list[int], deadline: float) -> Self:
        """The communicator that follows the roll call `number`, or an error on every rank that is alive."""
        name = hashlib.blake2b(self._group + f"shrink {number}".encode(), digest_size=16).digest()
        comm = self._make(name, ranks, deadline - time.monotonic())
        try:
            self._session.control.exchange(name, b"shrink", b"", max(deadline - time.monotonic(), 0.1))
        except BaseException:
            comm.close()
            raise
        return comm

    def _make(self, name: bytes, members: list[int], timeout: float, form: Format | None = None) -> Self:
        """The communicator called `name` of these ranks, this one among them."""
        compress = self._config.compress if form is None else form
        config = replace(self._config, islands=restrict(self._config.islands, members), compress=compress)
        return type(self)(self._session, name, members.index(self._rank), len(members), config, timeout)
