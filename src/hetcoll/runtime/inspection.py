"""HETCOLL_CHECK and HETCOLL_DIGEST: calls whose data is looked at, before them and when they are over.

With HETCOLL_CHECK=sampled these are reductions, now and then: the engine says which (``PyEngine::IsDue``), and has all
others on the fast path. Where all ranks have GPUs these look, as they do at replays, and no host waits. Elsewhere hosts
look. Of an asynchronous call they look at a copy of the result, which the engine or the GPU makes before anything
later: a program that knows without `Work.wait` that the call is over may write there before anybody looks.

Collectives are `crosscheck`'s. Before each message goes what its sender has to say of it, in the same order: a hash of
the bytes, and what in them is not finite. Its receiver compares when the message is there. The message comes also where
it is not finite, since its receiver may be at work on it already; then it is an error on both sides.

What is on a GPU is looked at on the host, which before a call waits for the call's stream. It does not wait for what
comes from GPUs: the stream copies that to pinned memory, and the host looks at it in `Work.wait`, or at the
communicator's next call. What a graph captures is looked at by the GPUs at each replay (`gpu.replays`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..calls import RECV, SEND, Call
from ..calls.buffers import Buffer
from ..calls.messages import Message, SendRecv
from ..errors import ArgumentError, HetcollError
from ..health.status_report import call_site
from ..health.verdicts import Kind
from ..work import DONE, Work
from .checked import Checked, Result
from .checksums import foldable
from .crosscheck import CrossCheck, Told, find_odd, hash_of, row_of, said
from .digest import Digest
from .executor import ROW_BYTES, Row

if TYPE_CHECKING:
    import hetcoll._native as _native

    from ..config.env import Config
    from ..health.diagnosis import Diagnosis
    from ..links.wiring import Wiring
    from ..rendezvous.session import Session
    from .executor import Gpus
    from .host import HostExecutor

log = logging.getLogger("hetcoll")

_MOST_SITE = 200  # characters of the file and line of a send
_ENDING = 5.0  # seconds for copies that are under way when the communicator is closed


class Core(Protocol):
    """What is looked at: see `core.Core`."""

    session: Session
    rank: int
    size: int
    config: Config
    diagnosis: Diagnosis
    engine: _native.Engine
    wiring: Wiring
    host: HostExecutor
    gpus: Gpus

    def start(self, call: Call, async_op: bool, seconds: float, stream: object) -> Work: ...

    def exchange(self, ends: SendRecv, async_op: bool, seconds: float, stream: object) -> Work: ...

    def exchange_all(self, messages: Sequence[Message], seconds: float) -> None: ...


class Inspection:
    """Of one communicator's calls."""

    def __init__(self, core: Core) -> None:
        config = core.config
        self._core = core
        self._digest = Digest(config.digest, core.session.rank, core.rank) if config.digest else None
        self._check = self._sampled = None  # of every call, or of some
        if config.check == "1":
            self._check = CrossCheck(core.rank, core.size, self._start, core.diagnosis)
        elif config.check == "sampled":
            self._sampled = CrossCheck(core.rank, core.size, self._start, core.diagnosis, forgives=True)
        self.of_all = self._digest is not None or self._check is not None
        """Whether it looks at every call."""
        self._open: list[Checked] = []
        self._copies: list[Checked] = []  # of calls on GPUs that blocked: nobody need wait for them
        self._lock = threading.Lock()
        self._beginning = threading.Lock()  # held from what is told before a collective until its beginning
        self._orders: dict[tuple[int, int], threading.Lock] = {}  # the same for messages, by kind and peer
        self._warned = False

    def _start(self, call: Call, async_op: bool, seconds: float) -> Work:
        return self._core.start(call, async_op, seconds, None)

    def collective(self, call: Call, async_op: bool, seconds: float, stream: object, due: bool) -> Work:
        """As `Core.start`, with looks before and after. `due`: it is one of those that are sampled."""
        core, digest, buffer = self._core, self._digest, call.send or call.recv
        check = self._check or (self._sampled if due and foldable(call) else None)
        if check is None and (async_op or digest is None):
            if self._open:  # some call before was sampled
                self._look_at_open()
            return core.start(call, async_op, seconds, stream)
        if self._captured(buffer, stream):
            return self._capture(call, async_op, seconds, stream)
        converts = core.gpus.converts(buffer, stream, seconds)
        start = partial(core.start, call, async_op, seconds, stream)
        if check is self._sampled and buffer and buffer.device != "cpu" and not core.wiring.topology.some_without_gpu:
            check, start = None, start if converts else partial(self._have_gpus_look, call, async_op, seconds, stream)
            if async_op or digest is None:
                return start()
        seen, told = self._on_host(call, stream), None
        if digest is not None and not async_op:
            digest.before(seen, converts)
        with contextlib.nullcontext() if check is None else self._beginning:
            if check is not None:
                told = check.tell(seen, converts, async_op, seconds)
                if async_op:
                    work, result = self._begin(call, seconds, stream, converts)
                    return self._look_later(seen, result, converts, check, told, work)
                check.check_input(seen, told)
            work = start()
        seen = self._on_host(call, stream)
        if check is not None and told is not None:
            check.check_result(seen, converts, told)
        if digest is not None:
            digest.after(seen, converts)
        return work

    def _capture(self, call: Call, async_op: bool, seconds: float, stream: object) -> Work:
        """A graph captures it: what checks it is captured with it, and looks at each replay on the GPUs."""
        start = partial(self._core.start, async_op=async_op, seconds=seconds, stream=stream)
        if self._digest is not None and not self._warned:
            self._warned = True
            text = "%s is captured by a graph: HETCOLL_DIGEST has no replays, of it and of what is captured later"
            log.warning(text, call.describe())
        buffer = call.send or call.recv
        if self._check is None or buffer is None:
            return start(call)
        with self._beginning:
            return self._core.gpus.replays(buffer, stream, seconds).collective(call, stream, start)

    def _have_gpus_look(self, call: Call, async_op: bool, seconds: float, stream: object) -> Work:
        """A call that is sampled, where all ranks have GPUs."""
        core, buffer = self._core, call.send
        assert buffer is not None, "it is a sum"
        with self._beginning:
            look = core.gpus.replays(buffer, stream, seconds).once
            return look(call, stream, async_op, lambda each, on: core.start(each, False, seconds, on))

    def _on_host(self, call: Call, stream: object) -> Call:
        """`call` with copies on the host of buffers on a GPU, after what is on `stream`."""
        gpus = self._core.gpus
        send = None if call.send is None else gpus.on_host(call.send, stream)
        recv = None if call.recv is None else send if call.recv is call.send else gpus.on_host(call.recv, stream)
        return replace(call, send=send, recv=recv)

    def _begin(self, call: Call, seconds: float, stream: object, converts: bool) -> tuple[Work, Result | None]:
        """An asynchronous call that is checked, and what is to be looked at when it is over."""
        core, buffer = self._core, call.recv or call.send
        if buffer is None or (self._check is None and (converts or call.recv is None)):
            return core.start(call, True, seconds, stream), None
        if self._check is not None:
            return core.start(call, True, seconds, stream), Result(core.gpus, buffer)
        if buffer.device == "cpu":
            data = np.empty(buffer.nbytes, np.uint8)
            copy = replace(buffer, ptr=int(data.ctypes.data), owner=data)
            return core.start(replace(call, snapshot=copy), True, seconds, stream), Result(core.gpus, copy)
        replays = core.gpus.replays(buffer, stream, seconds)
        work, snapshot = replays.copied(call, stream, lambda on: core.start(call, False, seconds, on))
        return work, Result(core.gpus, buffer, snapshot)

    def _look_later(
        self, seen: Call, result: Result | None, converts: bool, check: CrossCheck, told: Told, work: Work
    ) -> Work:
        """At an asynchronous call that has begun as `work`."""

        def look() -> None:
            check.check_input(seen, told)
            if result is None:
                check.pass_over(seen, told)
                return
            made = result.read()
            last = replace(seen, send=made) if seen.recv is None else replace(seen, recv=made)
            check.check_result(last, converts, told)

        beside = [told.work] if result is None or result.copied is None else [told.work, result.copied]
        return self._watch(Checked(work, beside, look, None if result is None else result.copy))

    def exchange(self, ends: SendRecv, async_op: bool, seconds: float, stream: object) -> Work:
        """As `Core.exchange`, with HETCOLL_CHECK=1."""
        core = self._core
        send, dest, recv, source = ends
        order = [(SEND, dest)] * (send is not None) + [(RECV, source)] * (recv is not None)
        if self._captured(ends.first, stream):
            with self._in_order(order):
                start = partial(core.exchange, async_op=async_op, seconds=seconds, stream=stream)
                return core.gpus.replays(ends.first, stream, seconds).exchange(ends, stream, start)
        on_host = ends.first.device == "cpu"
        out = None if send is None else Message(SEND, send, dest)
        words = None if out is None else self.words(out, stream, seconds)
        odd, incoming = "" if words is None else words[1], None
        begin = partial(core.exchange, ends, async_op or on_host, seconds, stream)
        with self._in_order(order):
            work = None if on_host else begin()  # GPUs may refuse it
            own: deque[Row] = deque()
            if out is not None and words is not None:
                self._announce(out, words[0], seconds, own)
            if recv is not None:
                incoming = self._expect(Message(RECV, recv, source), stream, seconds, own)
            work = work or begin()
        if async_op:
            if incoming is None and not odd:
                return work
            if incoming is None:
                return self._watch(Checked(work, [], partial(_look, [], [odd])))
            look = partial(_look, [incoming.look], [odd])
            return self._watch(Checked(work, [incoming.work], look, incoming.result.copy))
        looks = []
        if on_host:
            work.wait(seconds)
            if incoming is not None:
                incoming.work.wait(seconds)
                looks = [incoming.look]
            work = DONE
        elif incoming is not None:
            work = self._follow(Checked(work, [incoming.work, incoming.result.begin(stream)], incoming.look))
        _look(looks, [odd])
        return work

    @contextlib.contextmanager
    def _in_order(self, ends: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Messages of these kinds and peers begin in the block: what goes before one, and it. A signal handler that
        raises there ends the communicator."""
        with contextlib.ExitStack() as stack:
            for end in sorted(set(ends)):
                stack.enter_context(self._orders.setdefault(end, threading.Lock()))
            try:
                yield
            except HetcollError:
                raise
            except BaseException:
                self._core.host.give_up()
                raise

    def exchange_all(self, messages: Sequence[Message], seconds: float) -> None:
        """As `Core.exchange_all`. What concerns one rank is in the order of the calls."""
        core, rank, on_gpu = self._core, self._core.rank, [m for m in messages if m.buffer.device != "cpu"]
        ends = [(m.kind, m.peer) for m in messages]  # of which GPUs begin all at once, and the host one after another
        if self._captured(on_gpu[0].buffer if on_gpu else None, None):
            with self._in_order(ends):
                all_at_once = partial(core.exchange_all, seconds=seconds)
                core.gpus.replays(on_gpu[0].buffer, None, seconds).exchange_all(on_gpu, all_at_once)
            if rest := [m for m in messages if m.buffer.device == "cpu"]:
                self.exchange_all(rest, seconds)
            return
        words = [self.words(m, None, seconds) if m.kind == SEND else None for m in messages]
        own: deque[Row] = deque()
        works, incoming = list[Work](), list[Incoming]()
        with self._in_order(ends if on_gpu else []):
            core.exchange_all([m for m in messages if m.buffer.device != "cpu" or m.peer == rank], seconds)
            for message, word, end in zip(messages, words, ends, strict=True):
                with self._in_order([] if on_gpu else [end]):
                    if word is not None:
                        self._announce(message, word[0], seconds, own)
                    else:
                        incoming.append(self._expect(message, None, seconds, own))
                    if message.buffer.device == "cpu" and message.peer != rank:
                        works.append(core.host.exchange(message.alone, None, True, seconds, background=False))
        for each in incoming:
            if each.message.buffer.device != "cpu":
                self._follow(Checked(each.result.begin(None), [each.work], each.look))
        for work in works:
            work.wait()
        here = [each for each in incoming if each.message.buffer.device == "cpu"]
        for each in here:
            each.work.wait(seconds)
        _look([each.look for each in here], [word[1] for word in words if word is not None])

    def words(self, message: Message, stream: object, seconds: float) -> tuple[Row, str]:
        """What is to go before a message that this rank sends; and the error where it is not finite."""
        core, buffer = self._core, message.buffer
        converts = core.gpus.converts(buffer, stream, seconds)
        seen, site = core.gpus.on_host(buffer, stream), call_site()
        odd = find_odd(seen)
        row = row_of([hash_of(seen, converts), odd, site.encode("ascii", "replace").decode()[-_MOST_SITE:]], ROW_BYTES)
        return row, _odd(core.rank, message.peer, odd, site) if odd else ""

    def _announce(self, message: Message, row: Row, seconds: float, own: deque[Row]) -> None:
        """Say this before `message`; `own` has what this rank says to itself."""
        if message.peer == self._core.rank:
            own.append(row)
        else:
            self._core.host.start_checksum(SEND, row, message.peer, seconds, str(message))

    def _expect(self, message: Message, stream: object, seconds: float, own: deque[Row]) -> Incoming:
        """What is to become of a message that this rank receives."""
        core, buffer = self._core, message.buffer
        converts, work = core.gpus.converts(buffer, stream, seconds), DONE
        if message.peer == core.rank:
            row = own.popleft()
        else:
            row = np.empty(ROW_BYTES, np.uint8)
            work = core.host.start_checksum(RECV, row, message.peer, seconds, str(message))
        return Incoming(core, message, converts, row, work)

    def incoming(self, message: Message, row: Row) -> Incoming:
        """A message that is there, of which its sender says this."""
        return Incoming(self._core, message, False, row, DONE)

    def _captured(self, buffer: Buffer | None, stream: object) -> bool:
        """Whether a graph captures a call: its data comes with replays. Before anything is told it refuses memory of
        another device, and looks at earlier calls that are over."""
        self._look_at_open()
        self._core.host.check_usable()  # they may have been wrong
        if buffer is None:
            return False
        self._core.gpus.check_place(buffer)
        return self._core.gpus.capturing(buffer, stream)

    # Works that are not over.

    def _watch(self, work: Checked) -> Checked:
        with self._lock:
            self._open.append(work)
        return work

    def _follow(self, work: Checked) -> Checked:
        with self._lock:
            self._copies.append(work)
        return work

    def _look_at_open(self) -> None:
        """At operations that are over, also where nobody waits for them, and at replays."""
        self._core.gpus.look_at_replays()
        over = {id(work) for work in [*self._open, *self._copies] if work.done}
        with self._lock:
            self._open, self._copies = (
                [work for work in works if id(work) not in over] for works in (self._open, self._copies)
            )

    def close(self) -> None:
        """The last looks, before the communicator ends."""
        deadline, engine = time.monotonic() + _ENDING, self._core.engine
        if not engine.failed:
            self._look_at_open()
        while self._copies and not engine.failed and time.monotonic() < deadline:
            time.sleep(0.001)
            self._look_at_open()
        if (left := len(self._open) + len(self._copies)) and not engine.failed:
            log.warning("HETCOLL_CHECK: %d operations were not over at close(), and are unchecked", left)
        self._open, self._copies = [], []


class Incoming:
    """A message that this rank receives. What its sender says of it is in `row` when `work` is over."""

    def __init__(self, core: Core, message: Message, converts: bool, row: Row, work: Work) -> None:
        self._core, self._converts, self._row = core, converts, row
        self.message, self.work, self.result = message, work, Result(core.gpus, message.buffer)

    def look(self) -> None:
        """When it is there. CommunicationError where it is not what was sent, ArgumentError where it is not finite."""
        digest, odd, site = said(self._row) or ("", "", "a place that came changed")
        rank, diagnosis = self._core.rank, self._core.diagnosis
        if hash_of(self.result.read(), self._converts) != digest:
            text = f"rank {rank} received something else than rank {self.message.peer} sent"
            diagnosis.post(Kind.CORRUPT, self.message.peer, f"HETCOLL_CHECK: {text} at {site}: {self.message}")
            raise diagnosis.error()
        if odd:
            raise ArgumentError(_odd(self.message.peer, rank, odd, site))


def _look(looks: Sequence[Callable[[], None]], odd: Sequence[str]) -> None:
    """At all messages that came; what this rank sends has these errors. What fails the communicator is raised first."""
    problems = [ArgumentError(text) for text in odd if text]
    for look in looks:
        try:
            look()
        except ArgumentError as error:
            problems.append(error)
    if problems:
        raise ArgumentError("; ".join(map(str, problems)))


def _odd(source: int, dest: int, odd: str, site: str) -> str:
    return f"HETCOLL_CHECK: what rank {source} sends to rank {dest} is not finite: {odd}, sent at {site}"
