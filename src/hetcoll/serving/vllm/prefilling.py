"""The workers of the instance that prefills: each sends a layer as soon as it is computed and has been asked for.

A thread hears what receivers ask for and looks after what is under way, also while the engine rests; the model's thread
says what is computed. One lock is between them, under which nothing waits but `_flush`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ... import CollectiveTimeoutError, Communicator, HetcollError
from ..handoff import Handoff, Sending
from .meeting import Mailbox, Note, key_of
from .steps import Prefill, Report, Step

log = logging.getLogger("hetcoll.serving.vllm")

_LOOK = 0.02  # seconds between looks whether a receiver has given up
_REMEMBERED = 1024  # transfers that are over, for which late receivers need not wait


@dataclass
class _Asked:
    """A note and its slot."""

    note: Note
    sending: Sending
    ended: bool = False

    def end(self) -> None:
        """Without what is missing, it failed."""
        self.ended = True
        self.sending.end()


@dataclass
class _Outgoing:
    """A request of which something is computed. By layer: tokens, blocks that were sent, and whether the last was."""

    request: str
    key: bytes
    ready: list[int]
    sent: list[int]
    whole: list[bool]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # by the step that runs
    stream: Any = None
    asked: _Asked | None = None
    deadline: float | None = None  # once nothing more is computed
    over: bool = False


class PrefillWorker:
    """`expand` turns the scheduler's blocks into the tensors'. `streams` gives that which computes a layer."""

    def __init__(self, comm: Communicator, handoff: Handoff, mailbox: Mailbox, expand: Any, timeout: float) -> None:
        self._comm, self._handoff, self._mailbox, self._expand = comm, handoff, mailbox, expand
        self._timeout, self._layers = timeout, handoff.src.layers
        self._block_tokens = handoff.src.block_tokens
        self._requests: dict[str, _Outgoing] = {}
        self._asked: dict[int, _Asked] = {}  # by slot
        self._past: dict[bytes, None] = {}  # transfers, in the order in which they ended
        self._step: list[_Outgoing] = []
        self._told: set[str] = set()  # requests that the scheduler says have finished
        self.lost = ""
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="hetcoll-prefill", daemon=True)
        self._thread.start()

    # Of the model's thread.

    def flush(self, requests: Iterable[str]) -> None:
        """Wait until the blocks of these may be written."""
        with self._lock, self._failing():
            for request in requests:
                out = self._requests.get(request)
                if out is not None:
                    out.ready = [0] * self._layers
                    if out.asked is not None:
                        out.asked.sending.flush(self._timeout)

    def begin(self, step: Step) -> None:
        """What is to be computed now."""
        self.flush(step.preempted)
        with self._lock:
            self._step = [self._take(each) for each in step.prefills]
            for request in step.finished:
                out = self._requests.get(request) or self._new(request, b"", over=True)  # nothing of it was computed
                out.deadline = time.monotonic() + self._timeout
                self._advance(out)

    def _new(self, request: str, key: bytes, *, over: bool) -> _Outgoing:
        zeros = [0] * self._layers
        out = _Outgoing(request, key, zeros, list(zeros), [False] * self._layers, over=over)
        self._requests[request] = out
        return out

    def _take(self, prefill: Prefill) -> _Outgoing:
        out = self._requests.get(prefill.request)
        if out is None:
            out = self._new(prefill.request, key_of(prefill.transfer), over=bool(self.lost))
            waiting = (each for each in self._asked.values() if each.note.transfer == out.key and not each.ended)
            out.asked = next(waiting, None)
        if prefill.anew:
            out.blocks, out.ready = [], [0] * self._layers
        out.blocks += self._expand(prefill.blocks)
        out.computed = prefill.computed
        return out

    def save(self, layer: int, stream: Any) -> None:
        """This layer of the step is computed, once `stream` comes to it."""
        with self._lock:
            for out in self._step:
                out.ready[layer], out.stream = out.computed, stream
                self._advance(out, (layer,))

    def save_rest(self, stream: Any) -> None:
        """The step is computed: also what said nothing, as where a graph was replayed."""
        with self._lock:
            for out in self._step:
                rest = [layer for layer, ready in enumerate(out.ready) if ready < out.computed]
                for layer in rest:
                    out.ready[layer], out.stream = out.computed, stream
                self._advance(out, rest)
            self._step = []

    def results(self, finished: set[str]) -> tuple[set[str], set[str], set[int]]:
        """Requests that were sent, or never will be, of those that have finished; none that came, no bad blocks."""
        with self._lock:
            self._told |= finished
            done = {each for each in self._told if each in self._requests and self._requests[each].over}
            for request in done:
                self._forget(self._requests.pop(request).key)
            self._told = {each for each in self._told if each in self._requests}
            return done, set(), set()

    def report(self) -> Report | None:
        return None

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.closing(self._handoff):
            self._mailbox.close()

    # Under the lock, of either thread.

    def _advance(self, out: _Outgoing, layers: Iterable[int] | None = None) -> None:
        """Send what is computed and asked for."""
        if out.asked is None or out.over:
            return
        with self._failing():
            for layer in range(self._layers) if layers is None else layers:
                self._send(out, out.asked, layer)
            if all(out.whole) or out.deadline is not None:
                out.asked.end()

    def _send(self, out: _Outgoing, asked: _Asked, layer: int) -> None:
        note, full = asked.note, out.ready[layer] // self._block_tokens
        end = note.first + len(note.blocks)
        last = out.ready[layer] >= note.tokens
        begin, stop = max(out.sent[layer], note.first), end if last else min(full, end)
        if out.whole[layer] or asked.ended or asked.sending.cancelled or (stop <= begin and not last):
            return
        here, there = out.blocks[begin:stop], note.blocks[begin - note.first : stop - note.first]
        asked.sending.layer(layer, np.array(here, np.int64), there, last=last, stream=out.stream)
        out.sent[layer], out.whole[layer] = max(stop, begin), last

    def _forget(self, key: bytes) -> None:
        self._past[key] = None
        if len(self._past) > _REMEMBERED:
            del self._past[next(iter(self._past))]

    @contextlib.contextmanager
    def _failing(self) -> Any:
        """Where the other side is gone, nothing is sent any more, and the engine goes on."""
        try:
            yield
        except HetcollError as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        if not self.lost:
            self.lost = f"{type(error).__name__}: {error}"
            log.error("nothing is handed over from now on: %s", self.lost)
        for out in self._requests.values():
            out.over, out.asked = True, None
        self._asked.clear()
        self._handoff.close()  # nor read

    # Of the thread of its own.

    def _run(self) -> None:
        while not self._stop.is_set() and not self.lost:
            try:
                with contextlib.suppress(CollectiveTimeoutError):
                    self._mailbox.wait(_LOOK)
                with self._lock, self._failing():
                    if self._comm.error is not None:
                        raise self._comm.error
                    self._look()
            except Exception as error:  # receivers would wait, and requests never end
                if not isinstance(error, HetcollError):  # as the mailbox's are
                    log.exception("the thread that sends")
                with self._lock:
                    self._lose(error)

    def _look(self) -> None:
        for note in self._mailbox.new():
            if note.slot in self._asked:  # whose end the receivers have seen before this thread did
                self._close(note.slot)
            asked = self._asked[note.slot] = _Asked(note, self._handoff.send(note.slot))
            wanted = [each for each in self._requests.values() if each.key == note.transfer and not each.over]
            if wanted:
                wanted[0].asked = asked
                self._advance(wanted[0])
            elif note.transfer in self._past:
                asked.end()
        for slot, asked in list(self._asked.items()):
            if asked.sending.cancelled:
                asked.end()
            if asked.sending.done:
                self._close(slot)
        now = time.monotonic()
        for out in self._requests.values():  # nobody came for it
            out.over = out.over or (out.asked is None and out.deadline is not None and out.deadline < now)

    def _close(self, slot: int) -> None:
        asked = self._asked.pop(slot)
        asked.sending.close(self._timeout)
        for out in self._requests.values():
            out.over = out.over or out.asked is asked
