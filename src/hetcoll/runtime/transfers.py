"""Puts and gets under way, and what carries them: see `one_sided`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..calls.buffers import Buffer
from ..errors import ClosedError, CollectiveTimeoutError, CommunicationError
from ..health.verdicts import Kind
from ..work import DONE, Work
from .core import Core
from .device_memory import DeviceMemory
from .window_memory import WindowMemory

if TYPE_CHECKING:
    import hetcoll._native as _native

    from ..links.verbs.memory import Memory
    from .executor import Gpus

_DONE, _FAILED = 1, 2  # states of tickets
_CLOSED = 1  # native/host/windows.h, Refusal
_CHANNELS = (0, 1)
_OWN = 1 << 24  # first number of such windows; those of all ranks have small ones
_COUNTERS = ("puts", "gets", "pieces", "bytes", "refused", "direct")


class Transfer(Work):
    """A put, a get, or the waiting for a signal.

    As `Work`, but for two things: one that the peer's closed window refused fails alone, with a `ClosedError`; and one
    that is not over when `wait` gives up stays in flight, and may be waited for again.
    """

    __slots__ = ()
    _comm: OneSided | None

    def wait(self, timeout: float | None = None) -> None:
        side, ticket = self._comm, self._ticket
        if side is None or ticket is None:
            return
        side.finish(ticket, side.core.seconds(timeout), self._what)
        self._release()

    @property
    def error(self) -> Exception | None:
        side, ticket = self._comm, self._ticket
        if side is not None and ticket is not None and ticket.refused:
            return side.refusal(ticket, self._what)
        return super().error


class OneSided:
    """What carries the messages of all windows of one communicator: another one, `core`, of the same ranks, whose
    engine has a thread that serves other ranks. Also whom a `Transfer` asks. `memory`: what is registered for RDMA.
    `gpus`: that communicator's own calls, which read windows, too."""

    def __init__(self, core: Core, close: Callable[[], None], memory: Memory | None, gpus: Gpus) -> None:
        self.core, self._close, self._gpus = core, close, gpus
        self._windows: dict[int, Buffer | None] = {}  # keeps their memory
        self._opened = 0
        self.own_numbers = itertools.count(_OWN)  # of windows that this rank opens for itself
        self._pending: dict[int, tuple[_native.Ticket, Any]] = {}  # and that of what is in flight, by the ticket's id
        self._lock = threading.Lock()
        self._prune_at = 16
        edges = [(peer, channel) for peer in range(core.size) if peer != core.rank for channel in _CHANNELS]
        seconds = core.config.timeout
        core.host.prepare(lambda check: core.wiring.ensure(edges, seconds, check), seconds)
        core.engine.serve_windows()
        self.devices, self.registered = DeviceMemory(core), WindowMemory(core, memory, gpus)

    def add_window(self, buffer: Buffer | None, signals: int) -> int:
        """Its number, which is the same on all ranks."""
        number, self._opened = self._opened, self._opened + 1
        ptr, nbytes = (0, 0) if buffer is None else (buffer.ptr, buffer.nbytes)
        self.core.engine.add_window(number, ptr, nbytes, signals, buffer is not None and buffer.device != "cpu")
        self._windows[number] = buffer
        return number

    def close_window(self, number: int) -> None:
        """Fence its memory."""
        if not self.core.engine.forked:
            self.core.engine.close_window(number)
            self.devices.settle(number)
            self._gpus.forget_window(number, self.core.config.timeout)
            self.registered.give_back(number)
            self.devices.forget_all(number)
            self._windows.pop(number, None)

    def begun(self, ticket: _native.Ticket, keep: Any, what: str, async_op: bool, seconds: float) -> Work:
        """The Work of what was started; over, unless it is asynchronous."""
        if keep is not None:  # who waits for a signal again and again, as servers do, would keep every attempt
            self._keep(ticket, keep)
        if async_op:
            return Transfer(self, ticket, keep, what)
        self.finish(ticket, seconds, what)
        return DONE

    def _keep(self, ticket: _native.Ticket, keep: Any) -> None:
        with self._lock:
            if len(self._pending) >= self._prune_at:
                under_way = {key: each for key, each in self._pending.items() if each[0].state not in (_DONE, _FAILED)}
                self._pending = under_way
                self._prune_at = 2 * len(self._pending) + 16
            self._pending[id(ticket)] = (ticket, keep)

    def _let_go(self, ticket: _native.Ticket) -> None:
        """It is over."""
        with self._lock:
            self._pending.pop(id(ticket), None)

    def finish(self, ticket: _native.Ticket, seconds: float, what: str) -> None:
        """Wait for it; raises what it failed with."""
        core = self.core
        core.host.check_parent()
        if ticket.state != _DONE:
            core.engine.wait(ticket, seconds)
        if ticket.state in (_DONE, _FAILED):
            self._let_go(ticket)
        if ticket.state == _DONE:
            return
        core.host.check_parent()
        if ticket.refused:
            raise self.refusal(ticket, what)
        if ticket.state == _FAILED or core.engine.failed:
            core.host.check_open()
            raise core.diagnosis.error()
        state = core.engine.describe()
        raise CollectiveTimeoutError(
            f"{what} is not over after {seconds:g} s on rank {core.rank}, and stays in flight"
            + (f": {state}" if state else "")
        )

    def refusal(self, ticket: _native.Ticket, what: str) -> Exception:
        """Why it failed alone."""
        if ticket.refused == _CLOSED:
            return ClosedError(f"{what}: the window was closed by its rank")
        return CommunicationError(f"{what}: refused, since its rank has no such piece or signal")

    def counters(self) -> dict[str, int]:
        """Of all windows of this rank: what others did to them, and what their links did."""
        counts = zip(_COUNTERS, self.core.engine.window_counts(), strict=True)
        return self.core.engine.counters() | {f"window_{name}": n for name, n in counts}

    def memory(self) -> dict[str, int]:
        """Of what carries the messages."""
        found = self.core.memory()
        return found | {"pinned": found["pinned"] + self.devices.pinned}

    def fail(self, kind: Kind, text: str) -> None:
        """See `core.Rider`."""
        self.core.fail(kind, text)

    def leave(self) -> None:
        """See `core.Rider`."""
        self._close()

    def close(self) -> None:
        """See `core.Rider`."""
        self.devices.close()
        self.registered.close()
        self._windows.clear()
        self._pending.clear()

    # Of a `Work`'s communicator.

    def _wait(self, ticket: _native.Ticket, timeout: float | None) -> None:
        self.finish(ticket, self.core.seconds(timeout), "a one-sided message")

    def _check_limit(self, ticket: _native.Ticket, waited: float) -> None:
        if waited >= self.core.config.timeout:
            raise CollectiveTimeoutError(f"a one-sided message is not over after {waited:g} s")

    def _failure(self) -> CommunicationError | None:
        return self.core.diagnosis.known_error() if self.core.engine.failed else None

    def _check_parent(self) -> None:
        self.core.host.check_parent()
