"""Messages by whom they are from and to, counted, so that a receive can be from any source.

A plan names whom it receives from, and a first message connects two ranks with the help of both. So each rank counts
the messages that it began to send to every other one, and those that it began to receive. A receive from any source
asks all ranks, out of band, until one has begun to send more than is being received from it, and then receives from
that one. Ordinary messages pay for the counting only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from .. import CollectiveTimeoutError, Communicator
from .. import Work as Operation
from ..runtime.worker import Worker

_QUESTION = "messages to you"
_ASKING = 2.0  # seconds for the answers
_PAUSES = (100e-6, 5e-3)  # seconds between questions: at first, and at most


class Deferred(Operation):
    """A receive that a thread begins, once its source is known. `source` is that rank, when it is complete."""

    __slots__ = ("_begun", "_failed", "_inner", "_source")

    def __init__(self) -> None:
        super().__init__(what="a receive from any source")
        self._begun = threading.Event()
        self._inner: Operation | None = None
        self._failed: Exception | None = None
        self._source = -1

    def begin(self, find: Callable[[], int], start: Callable[[int], Operation]) -> None:
        try:
            self._source = find()
            self._inner = start(self._source)
        except Exception as error:
            self._failed = error
        self._begun.set()

    @property
    def source(self) -> int:
        return self._source

    def wait(self, timeout: float | None = None) -> None:
        if not self._begun.wait(timeout):
            raise CollectiveTimeoutError(f"{self._what}: no rank began to send in {timeout:g} s")
        if self._failed is not None:
            raise self._failed
        assert self._inner is not None
        self._inner.wait(timeout)

    @property
    def done(self) -> bool:
        return self._begun.is_set() and (self._inner is None or self._inner.done)

    @property
    def error(self) -> Exception | None:
        return self._failed if self._inner is None else self._inner.error


class Sources:
    """The messages of one communicator. Receives from any source, and those after one of these, wait for their turn."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._diagnosis = comm, comm._core.diagnosis
        self._sent, self._received = [0] * comm.size, [0] * comm.size
        self._mutex = threading.Lock()
        self._turns = threading.Condition(self._mutex)
        self._waiting = 0  # receives whose turn has not come
        self._latest = comm.rank
        self._worker = Worker("hetcoll-any-source")
        sent = self._sent
        self._diagnosis.questions.answers[_QUESTION] = lambda asker: sent[asker]

    def sending(self, dest: int) -> None:
        """A send to `dest` is about to start: it counts before it can wait for the receiver."""
        with self._mutex:
            self._sent[dest] += 1

    def receiving(self, source: int) -> bool:
        """The same of a receive from `source`. False where it must wait for its turn, `later`: then nothing counts."""
        with self._mutex:
            if self._waiting:
                return False
            self._received[source] += 1
            return True

    def take_back(self, *, sent: Sequence[int] = (), received: Sequence[int] = ()) -> None:
        """Sends to these ranks and receives from those were refused: nothing was sent."""
        with self._mutex:
            for rank in sent:
                self._sent[rank] -= 1
            for rank in received:
                self._received[rank] -= 1

    def _find(self, limit: float) -> int:
        """The rank that the next message is from, which now counts as received. Waits for it, `limit` seconds at most.

        Ranks that are equally ready have their turns.
        """
        deadline, pause = time.monotonic() + limit, _PAUSES[0]
        while True:
            if self._comm.error is not None:
                raise self._comm.error
            told = self._diagnosis.questions.ask(_QUESTION, _ASKING)
            with self._mutex:
                ready = [rank for rank, sent in told.items() if isinstance(sent, int) and sent > self._received[rank]]
                if ready:
                    self._latest = min(ready, key=lambda rank: (rank - self._latest - 1) % self._comm.size)
                    self._received[self._latest] += 1
                    return self._latest
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"a receive from any source: no rank began to send to rank {self._comm.rank} in {limit:g} s"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSES[1])

    def later(self, source: int | None, start: Callable[[int], Operation], limit: float) -> Deferred:
        """A receive from `source`, or from any, after those that wait already."""
        work = Deferred()

        def begin() -> None:
            work.begin(lambda: self._take(source, limit), start)
            with self._mutex:
                self._waiting -= 1
                self._turns.notify_all()

        with self._mutex:
            self._waiting += 1
        self._worker.put(begin)
        return work

    def now(self, source: int | None, limit: float) -> int:
        """The same on the calling thread, which waits for its turn and, without a source, for a message: from whom."""
        with self._mutex:
            self._turns.wait_for(lambda: not self._waiting, limit)  # those that wait have as long at most
        return self._take(source, limit)

    def _take(self, source: int | None, limit: float) -> int:
        if source is None:
            return self._find(limit)
        with self._mutex:
            self._received[source] += 1
        return source

    def leave(self) -> None:
        """Before the communicator is closed: others may yet receive what was sent."""
        if any(self._sent) and self._comm.error is None:
            self._diagnosis.questions.leave_answers(_QUESTION, self._sent)

    def close(self) -> None:
        """End the thread; the communicator must have been closed or aborted."""
        self._worker.close()
