"""What went wrong, for people: turns the engine's failures and the control channel's news into errors.

The data path can only say "this frame is not mine" or "nothing came". Who did what instead is found out of band: every
rank answers questions from the thread of its control connection, also while its main thread is stuck in a call. What
one rank finds out it posts as a verdict, so that all ranks raise the same.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import hetcoll._native as _native

from ..errors import (
    CommunicationError,
    HetcollError,
    InitError,
    PeerLostError,
    spell_ranks,
)
from ..rendezvous.control import ON_ITS_WAY
from ..rendezvous.protocol.news import Event, Left, Lost, Query, StoreLost, Verdict
from .desync_report import (
    Answers,
    Called,
    behind,
    doubts,
    find_absent,
    find_deadlock,
    find_failure,
    find_mismatch,
    find_stalls,
    find_wrong_message,
    spell_missing,
    unsure,
)
from .questions import Questions
from .stall_detector import PATIENCE, StallDetector
from .status_report import StatusReporter
from .verdicts import Kind, Report, error_of, interrupted, leave, read, tell, tell_interrupted

if TYPE_CHECKING:
    from ..rendezvous.session import Session

log = logging.getLogger("hetcoll")

_LAST_SECONDS = 1.0  # for all questions when a call is over time; ON_ITS_WAY and 0.1 to tell make 1.5 of the 2 promised
_REASON_SECONDS = 2.0
_SILENT_SECONDS = 6.0  # more, where a rank does not answer: of the death of the store's own process a successor tells


def _receives(call: Called) -> bool:
    return call.what.startswith("recv(")


class Diagnosis:
    """The failure side of one communicator."""

    def __init__(self, session: Session, group: bytes, rank: int, size: int) -> None:
        self._session, self._group, self._rank, self._size = session, group, rank, size
        self._news = threading.Condition()  # guards what follows
        self._engine: _native.Engine | None = None
        self._early: list[Lost | Left | Verdict | StoreLost] = []
        self._left: set[int] = set()
        self._report: Report | None = None
        self._counted = -PATIENCE  # when this one asked for `check_counts`
        self.questions = Questions(session, group, rank)
        self.warn_after = 0.0  # seconds; see `StallDetector`
        self.on_failure: list[Callable[[], None]] = []
        """What ends what the engine does not know of."""

    def attach(self, engine: _native.Engine, reporter: StatusReporter) -> None:
        """From now on there is something to fail: news that came earlier is delivered now."""
        self._reporter = reporter
        with self._news:
            self._engine = engine
            early, self._early = self._early, []
        for event in early:
            self._apply(engine, event)

    # News from the control connection; on its thread.

    def on_event(self, group: bytes, event: Event) -> bytes | None:
        with self._news:
            engine = self._engine
            if engine is None and not isinstance(event, Query):
                self._early.append(event)
        if isinstance(event, Query):
            return self.questions.answer(event, None if engine is None else self._reporter)
        if engine is not None:
            self._apply(engine, event)
        return None

    def _apply(self, engine: _native.Engine, event: Lost | Left | Verdict | StoreLost) -> None:
        if isinstance(event, Lost):
            self._settle(Kind.PEER_GONE, event.rank, self._add_state(event.reason, event.rank))
        elif isinstance(event, Left):
            engine.peer_left(event.rank)
            with self._news:
                self._left.add(event.rank)
                self._news.notify_all()
        elif isinstance(event, Verdict):
            self._settle(*read(event.blob))
        elif not event.orderly:
            text = f"the process that hosts the job's store was lost: {event.reason}"
            self._settle(Kind.PEER_GONE, -1, text)

    def _add_state(self, reason: str, peer: int) -> str:
        """What became of a rank, and what was in flight here then."""
        assert self._engine is not None
        text, inside = f"rank {peer} was lost: {reason}", self._reporter.inside()
        # A broken link may have told the engine first.
        state = self._engine.failure[2] if self._engine.failed else self._engine.describe()
        if inside is None and not state:
            return text
        where = f"rank {self._rank} was in {inside or 'an asynchronous call'}"
        return "; ".join([text, f"{where}: {state}" if state else where])

    def _settle(self, kind: Kind, peer: int, text: str) -> None:
        """What the communicator has failed with, as far as this rank knows."""
        assert self._engine is not None
        with self._news:
            if self._report is None:
                self._report = (kind, peer, text)
            self._news.notify_all()
        self._engine.fail(kind, peer, text)
        for end in tuple(self.on_failure):
            end()

    # Verdicts.

    def post(self, kind: Kind, peer: int, text: str) -> None:
        """Tell every rank, as far as the control channel still works; the first verdict of the group wins."""
        assert self._engine is not None
        self._engine.fail(kind, peer, text)
        try:
            self._settle(*tell(self._session.control, self._group, (kind, peer, text)))
        except HetcollError:
            self._settle(kind, peer, text)

    def interrupted(self) -> None:
        """A signal handler raised here (Ctrl-C): the others must not wait for this rank, nor take that for a goodbye.
        While the communicator is made some may have it, though this rank has no engine yet."""
        if self._engine is not None:
            self.post(*interrupted(self._rank))
        else:
            tell_interrupted(self._session.control, self._group, self._rank)

    def _leave_word(self, kind: Kind, peer: int, text: str) -> None:
        """The store does not answer. This rank goes by its own verdict; the others hear of it when the store runs."""
        leave(self._session.control, self._group, (kind, peer, text))
        self._settle(kind, peer, text)

    @contextlib.contextmanager
    def while_sound(self) -> Iterator[None]:
        """What the block asks the store for ends when the communicator fails, and raises what that failed with."""
        assert self._engine is not None
        try:
            with self._session.control.while_wanted(self._group) as give_up:
                end = functools.partial(give_up, "the communicator has failed")
                self.on_failure.append(end)
                try:
                    if self._engine.failed:
                        end()
                    yield
                finally:
                    self.on_failure.remove(end)
        except (PeerLostError, InitError) as error:
            if self._engine.failed:
                raise self.error() from error
            raise

    def fail_as(self, whole: weakref.ref[Diagnosis]) -> None:
        """Where this communicator carries something for another one of the same ranks, and that has failed."""
        other = whole()
        if other is not None and other._engine is not None:
            kind, peer, text = other._report or other._engine.failure
            self._settle(Kind(kind), peer, text)

    def error(self) -> CommunicationError:
        """The error for the failure that the engine holds. May ask the other ranks what they did."""
        assert self._engine is not None
        number, peer, text = self._engine.failure
        if self._report is None and number == Kind.MISMATCH:
            self.post(Kind.MISMATCH, peer, self._explain_mismatch(peer, text))
        elif self._report is None and number != Kind.ABORTED:  # who aborts or closes says so, or has nothing to say
            if number == Kind.PEER_GONE:
                self._await_reason({peer})
                what = "left while it was needed" if peer in self._left else "closed its connection"
                told = f"rank {peer} {what}"
                text = text if text.startswith(told) else f"{told}: {text}"
            if self._report is None:
                self.post(Kind(number), peer, f"{self._here()}: {text}")
        return self.known_error()

    def known_error(self) -> CommunicationError:
        """`error` as far as it is known, at once."""
        assert self._engine is not None
        kind, peer, text = self._report or self._engine.failure
        return error_of((Kind(kind), peer, text))

    def unconnected(
        self, problem: InitError, peers: Collection[int], deadline: float, seconds: float
    ) -> CommunicationError:
        """For a call whose links to `peers`, or to whom it is not known, could not be made by `deadline`
        (time.monotonic), or not at all."""
        peers = peers or range(self._size)
        if time.monotonic() >= deadline:
            return self.timeout(seconds, str(problem))
        if not isinstance(problem.__cause__, OSError):  # which is this rank's own
            self._await_reason(peers)
            if self._report is None and (gone := self._left.intersection(peers)):
                return self._needed(gone)
        return self.unprepared(problem)

    def unprepared(self, problem: Exception) -> CommunicationError:
        """For a call that this rank could not prepare: nobody else would find out why."""
        if self._report is None:
            self.post(Kind.SYSTEM, self._rank, f"{self._here()}: {problem}")
        return self.error()

    def check_present(self, peers: Collection[int]) -> None:
        """Raise when one of the ranks that a call needs has left in order: it will not connect any more."""
        if gone := self._left.intersection(peers):
            raise self._needed(gone)

    def check_counts(self) -> None:
        """Raise when a rank has left before a collective that another one has called; asks all ranks now and then, once
        one has left."""
        if self._left and time.monotonic() - self._counted > PATIENCE:
            self._counted = time.monotonic()
            self.look({}, math.inf)

    def deserted(self) -> bool:
        """Whether all other ranks have left in order."""
        return 0 < len(self._left) == self._size - 1

    def _needed(self, gone: Collection[int]) -> CommunicationError:
        """For a call that needs ranks which have left."""
        self.post(Kind.PEER_GONE, min(gone), f"{self._here()}: {spell_ranks(gone)} left while it was needed")
        return self.error()

    def _await_reason(self, peers: Collection[int]) -> None:
        """A closed connection has a reason, and the control channel will tell it: a death, a goodbye, an abort."""
        if not self._hear_reason(peers, _REASON_SECONDS):
            answers = self.questions.survey(self._reporter.since())
            if any(answers.get(peer) is None for peer in peers):
                self._hear_reason(peers, _SILENT_SECONDS)

    def _hear_reason(self, peers: Collection[int], seconds: float) -> bool:
        with self._news:
            known = self._news.wait_for(lambda: self._report is not None or self._left.intersection(peers), seconds)
            return bool(known)

    def _here(self) -> str:
        inside = self._reporter.inside(threading.get_ident())
        return f"rank {self._rank}" if inside is None else f"rank {self._rank} in {inside}"

    # Questions.

    def stall_detector(self, deadline: float, waited: float = 0.0) -> StallDetector:
        """For a call that has already waited for so many seconds, and does so until `deadline` (time.monotonic)."""
        return StallDetector(self, self._rank / self._size, waited, deadline, self.warn_after)

    def look(self, before: Answers, deadline: float) -> Answers:
        """Ask all ranks, unless one of them did so just now; raises when they cannot go on. `before` is what they said
        at the last look. Nobody is waited for beyond `deadline`."""
        if time.monotonic() - self.questions.asked < PATIENCE / 2 or deadline - time.monotonic() <= ON_ITS_WAY:
            return before
        ask, since = self.questions.survey, self._reporter.since()
        answers = ask(since, deadline=deadline)
        if edges := doubts(before, answers):
            answers = ask(since, edges, deadline=deadline)
        wrong = self._judge(answers, before)
        if wrong is not None:
            raise wrong
        return answers

    def _judge(self, answers: Answers, before: Answers) -> CommunicationError | None:
        """What the answers say is wrong, if anything; then every rank is told."""
        found, failure = find_mismatch(answers) or find_deadlock(before, answers), find_failure(answers)
        if found:
            self.post(Kind.MISMATCH, -1, found)
        elif failure:
            self.post(Kind(failure[0]), *failure[1:])
        elif gone := find_absent(answers, self._left):
            return self._needed(gone)
        else:
            return None
        return self.error()

    def timeout(self, seconds: float, state: str = "") -> CommunicationError:
        """For a call that did not finish in time: says who is missing and poisons the communicator everywhere.

        `state` is how far it has come, where the engine does not know.
        """
        assert self._engine is not None
        inside = self._reporter.inside(threading.get_ident()) or Called("a call")
        state = state or self._engine.describe()
        ask, since = self.questions.survey, self._reporter.since()
        until = time.monotonic() + _LAST_SECONDS + ON_ITS_WAY
        answers = ask(since, deadline=until)
        wrong = self._judge(answers, {})
        if wrong is not None:
            return wrong
        head = f"{inside} did not finish in {seconds:g} s on rank {self._rank}" + (f": {state}" if state else "")
        silent = [rank for rank, answer in answers.items() if answer is None]
        if not silent and (edges := unsure(answers)):
            answers = ask(since, edges, deadline=until) or answers
        missing, parts = self._missing(inside, answers)
        (self.post if answers else self._leave_word)(Kind.TIMEOUT, [*missing, -1][0], "; ".join([head, *parts]))
        return self.error()

    def warn(self, seconds: float, answers: Answers) -> None:
        """Log for whom this rank waits, if it is the first of those that wait. Who waits in a receive says nothing:
        programs do so on purpose."""
        inside = self._reporter.inside(threading.get_ident()) or Called("a call")
        waiting = [r for r, a in answers.items() if a is not None and a.inside is not None and not _receives(a.inside)]
        if _receives(inside) or min([*waiting, self._rank]) != self._rank:
            return
        _, parts = self._missing(inside, answers)
        for_whom = f": {'; '.join(parts)}" if parts else ""
        log.warning("rank %d has waited %.0f s in %s%s", self._rank, seconds, inside, for_whom)

    def _missing(self, inside: Called, answers: Answers) -> tuple[list[int], list[str]]:
        """The ranks that keep a call from ending, as far as that is known, and what the answers say, for people."""
        assert self._engine is not None
        now = self._engine.collectives + (self._reporter.preparing is not None)
        others = {rank: answer for rank, answer in answers.items() if rank != self._rank}
        late = [] if inside.what.startswith(("send(", "recv(")) else behind(others, now)
        stalls = find_stalls(answers or {self._rank: self._reporter.report(1, self._rank)})
        silent = [rank for rank, answer in answers.items() if answer is None]
        return silent + late, spell_missing(stalls, others if answers else None, late)

    def last_words(self) -> bytes:
        """For the goodbye."""
        return b"" if self._engine is None else self.questions.last_words(self._engine.collectives)

    def _explain_mismatch(self, peer: int, text: str) -> str:
        answers = self.questions.survey(self._reporter.since())
        found = find_mismatch(answers)
        if found:
            return found
        # A proxy names its lane: on the last channel, that of messages, it was a receive, whatever call the host is in.
        gone_on = f"receive from rank {peer} on channel {_native.wire()[2] - 1}" in text
        mine = None if gone_on else self._reporter.inside(threading.get_ident())
        mine = mine or self._reporter.received_from(peer) or Called("an asynchronous call")
        return f"{find_wrong_message(answers, self._rank, peer, mine)} ({text})"
