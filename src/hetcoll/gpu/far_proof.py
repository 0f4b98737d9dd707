"""Ways between hosts, tried by their two ranks when a plan of each first needs them (`path_probe` has the patterns).

A rank that needs such ways has a socket made to each of those ranks, says over it that it is here, and waits until
they say so. While it waits it takes part in what others want of it, so that ranks that wait for each other in a circle
go on. A rank tries one way at a time: of two that are here the lower one asks, and the higher one answers when it has
time. So who waits for an answer waits for a higher rank that is here, and the highest of them waits for none. Both tell
each other what they found, and go on alike.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import InitError, spell_ranks
from ..links.lines import Lines
from ..links.wiring import Check, Wiring
from ..plan.topology import pair_of
from . import path_probe

if TYPE_CHECKING:
    from .shared import GpuShare

_POLL = 0.02  # seconds between looks at what others say, and at `check`
_ANY = -1  # in place of a channel: that of the other one

Exchange = Callable[[int, int, int, float], str]
"""`path_probe.Exchange` on a channel: peer, channel, bytes, seconds."""


class FarProof:
    """Of one rank. `exchange` sends and receives a pattern within `during`, and `leave` ends what goes to a peer by a
    way that is given up."""

    def __init__(
        self,
        wiring: Wiring,
        share: GpuShare,
        exchange: Exchange,
        leave: Callable[[int], None],
        during: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.wiring, self.share, self._exchange = wiring, share, exchange
        self._leave, self._during = leave, during
        self._turn = threading.Lock()
        self._tries: tuple[int, int] | None = None  # the thread that tries a way, and the rank it leads to

    def missing(self, edges: Iterable[tuple[int, int]]) -> dict[int, int]:
        """The ranks on other hosts of these (peer, channel) pairs to which the way has not been tried yet, and the
        first channel."""
        fresh, here = dict[int, int](), threading.get_ident()
        done = self.share.proved.union(self.wiring.locals)
        for peer, channel in edges:
            if peer not in done and self._tries != (here, peer):
                fresh[peer] = min(channel, fresh.get(peer, channel))
        return fresh

    def prove(self, fresh: Mapping[int, int], seconds: float, check: Check) -> None:
        """Find a way to each of these ranks, for a plan that uses this channel. Both ends must ask.

        InitError where one does not in so many seconds, or no way works. `check` is called now and then with the ranks
        that are waited for, and raises to end the wait.
        """
        deadline = time.monotonic() + seconds
        while not self._turn.acquire(timeout=_POLL):
            check(fresh)
        try:
            if left := self.missing(fresh.items()):
                _Meeting(self, deadline, check).run(left)
        finally:
            self._turn.release()

    def find(self, peer: int, channel: int, agree: Callable[[str], str]) -> None:
        """Try ways to `peer`, which does so at the same time, until one works. `agree` tells it what is wrong, if
        anything is, and gives what both found."""
        self._tries = threading.get_ident(), peer
        try:
            with self._during():
                agree("")  # both are about to
                while problem := self._try(peer, channel, agree):
                    path_probe.give_up(self.share, {pair_of(self.share.rank, peer): problem}, self._leave)
        except InitError as error:
            raise InitError(str(error)) from ConnectionError(str(error))  # which is this rank's own, and all hear it
        finally:
            self._tries = None
        self.share.proved.add(peer)

    def _try(self, peer: int, channel: int, agree: Callable[[str], str]) -> str:
        tries = (self._exchange(peer, channel, n, path_probe.SECONDS) for n in path_probe.lengths(self.share))
        return next(filter(None, map(agree, tries)), "")


class _Talk:
    """With one rank. InitError where that ends."""

    def __init__(self, peer: int, lines: Lines, channel: int) -> None:
        self.peer, self.lines, self._channel = peer, lines, channel
        self._theirs: int | None = None
        self.asks = self.answers = False
        self.found = deque[str]()
        self.say("here", channel)

    @property
    def here(self) -> bool:
        """Whether the other one is."""
        return self._theirs is not None

    @property
    def channel(self) -> int:
        """On which the way is tried."""
        return min(each for each in (self._channel, self._theirs) if each not in (None, _ANY))

    def say(self, word: str, value: Any = None) -> None:
        try:
            self.lines.say(word, value)
        except ConnectionError as error:
            raise self._ended(error) from None

    def listen(self) -> None:
        """To what has come."""
        try:
            came = self.lines.hear()
        except ConnectionError as error:
            raise self._ended(error) from None
        for word, value in came:
            if word == "here":
                self._theirs = int(value)
            elif word == "found":
                self.found.append(str(value))
            else:
                self.asks, self.answers = self.asks or word == "ask", self.answers or word == "answer"

    def _ended(self, why: ConnectionError) -> InitError:
        return InitError(f"rank {self.peer} does not try its way to this rank any more: {why}")


class _Meeting:
    """A rank's part in it while it needs ways. It has begun when others can be here, too."""

    def __init__(self, proof: FarProof, deadline: float, check: Check) -> None:
        self._proof, self._deadline, self._check = proof, deadline, check
        self._rank = proof.share.rank
        self._talks: dict[int, _Talk] = {}

    def run(self, fresh: Mapping[int, int]) -> None:
        try:
            self._open(fresh)
            while self._talks:
                self._open(dict.fromkeys(self._proof.wiring.callers() - self._talks.keys(), _ANY))
                for talk in self._talks.values():
                    talk.listen()
                lower = [peer for peer, talk in self._talks.items() if peer < self._rank and talk.asks]
                higher = [peer for peer, talk in self._talks.items() if peer > self._rank and talk.here]
                for peer in (lower or higher)[:1]:
                    self._meet(self._talks[peer])
                    self._talks.pop(peer).lines.close()
                if not lower and not higher:
                    self._wait(self._talks.values())
        finally:
            for talk in self._talks.values():
                talk.lines.close()

    def _open(self, fresh: Mapping[int, int]) -> None:
        left = max(0.1, self._deadline - time.monotonic())
        made = self._proof.wiring.talks(fresh, left, self._check) if fresh else {}
        try:
            for peer in list(made):
                self._talks[peer] = _Talk(peer, made[peer], fresh[peer])
                del made[peer]
        finally:
            for lines in made.values():
                lines.close()

    def _meet(self, talk: _Talk) -> None:
        talk.say("answer" if talk.asks else "ask")
        self._await(talk, lambda: talk.asks or talk.answers)

        def agree(problem: str) -> str:
            talk.say("found", problem[: path_probe.MOST])
            self._deadline = max(self._deadline, time.monotonic() + 3 * path_probe.SECONDS)
            self._await(talk, lambda: bool(talk.found))
            told = sorted([(self._rank, problem[: path_probe.MOST]), (talk.peer, talk.found.popleft())])
            return "; ".join(f"rank {who}: {text}" for who, text in told if text)

        self._proof.find(talk.peer, talk.channel, agree)

    def _await(self, talk: _Talk, there: Callable[[], bool]) -> None:
        talk.listen()
        while not there():
            self._wait([talk])
            talk.listen()

    def _wait(self, talks: Iterable[_Talk]) -> None:
        """For words of any of them; what is encrypted may have come already."""
        waits = {talk.peer for talk in talks}
        self._check(waits)
        if time.monotonic() > self._deadline:
            raise InitError(f"{spell_ranks(waits)} did not come to try the way to this rank")
        poll = select.poll()
        for peer in waits:
            poll.register(self._talks[peer].lines, select.POLLIN)
        poll.poll(1000 * _POLL)
