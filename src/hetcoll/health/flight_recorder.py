"""The last calls of a communicator, as the engine's flight recorder has them (``native/host/flight_recorder.h``): as
text, on a signal, and as a trace of all ranks on one clock.

The recorder is always on and holds the last 1023 collectives, and as many sends and receives.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hetcoll._native as _native

from ..errors import ArgumentError, BufferTypeError, CommunicationError
from .desync_report import Called

log = logging.getLogger("hetcoll")

MOST = 1023  # calls of a kind that the recorder holds
_CLOCK_QUESTIONS = 5  # the one that was answered fastest tells most exactly what a clock shows


class Recorded(NamedTuple):
    """A call. `kind` is ``collective`` or ``message``, which are numbered apart, from 1 on. Times are nanoseconds of
    this host's monotonic clock; `end` is 0 where the call has not ended, or where a GPU runs it."""

    kind: str
    number: int
    what: str
    site: str
    nbytes: int
    begin: int
    end: int


class FlightRecorder:
    """The calls of this rank, and how to ask other ranks for theirs: `ask` as `Diagnosis.ask`."""

    def __init__(
        self,
        rank: int,
        size: int,
        engine: _native.Engine,
        describe: Callable[[int], tuple[Called, int] | None],
        ask: Callable[[str, float], dict[int, Any]],
    ) -> None:
        self._rank, self._size, self._engine, self._describe, self._ask = rank, size, engine, describe, ask
        _recorders.add(self)

    def answers(self) -> dict[str, Callable[[int], Any]]:
        """What this rank answers to others' questions."""
        return {"clock": lambda _: (time.monotonic_ns(), _boot()), "calls": lambda _: self.calls(MOST)}

    def calls(self, most: int) -> list[Recorded]:
        """The last calls in the order in which they began, at most so many of each kind."""
        found = []
        for kind, messages in (("collective", False), ("message", True)):
            for number, shape, begin, end in self._engine.records(messages, most):
                called, nbytes = self._describe(shape) or (Called("a call that is forgotten"), 0)
                found.append(Recorded(kind, number, called.what, called.site, nbytes, begin, end))
        return sorted(found, key=lambda call: call.begin)

    def dump(self, most: int) -> str:
        """See `Communicator.dump`."""
        if most < 0:
            raise ArgumentError(f"most: wanted 0 or more, got {most}")
        now, calls = time.monotonic_ns(), self.calls(most)[-most:]
        lines = [f"rank {self._rank} of {self._size}: {len(calls)} calls, the latest last"]
        for call in calls:
            took = "not ended" if call.end == 0 else f"took {(call.end - call.begin) / 1e3:.1f} us"
            size = f", {call.nbytes} B" if call.nbytes else ""
            at = f" at {call.site}" if call.site else ""
            ago = f"began {(now - call.begin) / 1e9:.6f} s ago"
            lines.append(f"  {call.kind} #{call.number} {call.what}{at}{size}: {ago}, {took}")
        state = self._engine.describe()
        return "\n".join([*lines, *([f"  now: {state}"] if state else [])])

    def trace(self, path: str, seconds: float) -> None:
        """See `Communicator.trace`."""
        if not isinstance(path, str | bytes | os.PathLike):  # a number would be a descriptor of somebody's
            raise BufferTypeError(f"path: wanted a file's name, got {path!r}")
        if not _can_be_written(os.fsdecode(path)):
            raise ArgumentError(f"path: wanted a file that can be written, in a folder that is there, got {path!r}")
        clocks = self._clocks(seconds)
        told = self._ask("calls", seconds)
        silent = [rank for rank in range(self._size) if told.get(rank) is None or rank not in clocks]
        if len(silent) == self._size:
            raise CommunicationError(f"trace: no rank answered within {seconds:g} s")
        events: list[dict[str, Any]] = []
        for rank in sorted(set(clocks) - set(silent)):
            events += _events(rank, clocks[rank][0], [Recorded(*call) for call in told[rank]])
        about = {"silent_ranks": silent, "clock_error_us": {rank: error / 1e3 for rank, (_, error) in clocks.items()}}
        with open(path, "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}, file)

    def _clocks(self, seconds: float) -> dict[int, tuple[int, int]]:
        """By rank: what to add to its times to get ours, and how far that may be off; nanoseconds."""
        found: dict[int, tuple[int, int]] = {}
        deadline = time.monotonic() + seconds
        for _ in range(_CLOCK_QUESTIONS):
            sent = time.monotonic_ns()
            answers = self._ask("clock", max(0.0, deadline - time.monotonic()))
            came = time.monotonic_ns()
            for rank, answer in answers.items():
                if answer is None:
                    continue
                if answer[1] == _boot():  # one host has one clock
                    found[rank] = (0, 0)
                elif rank not in found or (came - sent) // 2 < found[rank][1]:
                    found[rank] = ((sent + came) // 2 - int(answer[0]), (came - sent) // 2)
        return found


def _can_be_written(path: str) -> bool:
    """As far as that is seen without writing."""
    if not os.path.basename(path) or "\0" in path or os.path.isdir(path):
        return False
    return os.access(path if os.path.exists(path) else os.path.dirname(path) or os.curdir, os.W_OK)


def _events(rank: int, offset: int, calls: list[Recorded]) -> Iterator[dict[str, Any]]:
    """Chrome's trace events: a process is a rank, its threads are collectives and messages. Times in microseconds."""
    yield {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    for thread, kind in enumerate(("collective", "message")):
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": f"{kind}s"}}
    for call in calls:
        event: dict[str, Any] = {
            "name": call.what.partition("(")[0], "cat": call.kind, "pid": rank,
            "tid": int(call.kind == "message"), "ts": (call.begin + offset) / 1e3,
            "args": {"what": call.what, "at": call.site, "number": call.number, "bytes": call.nbytes},
        }  # fmt: skip
        if call.end:
            yield {**event, "ph": "X", "dur": (call.end - call.begin) / 1e3}
        else:
            yield {**event, "ph": "i", "s": "t"}


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


_recorders: weakref.WeakSet[FlightRecorder] = weakref.WeakSet()
_SHOWN = 32  # calls of each communicator on the signal


def listen() -> None:
    """From now on SIGUSR2 prints the last calls of all communicators on stderr. A program's own handler stays (with a
    warning)."""
    import signal  # few jobs ask for it, and imports count

    present = signal.getsignal(signal.SIGUSR2)
    if present is _print:
        return
    if threading.current_thread() is not threading.main_thread() or present is not signal.SIG_DFL:
        log.warning("HETCOLL_SIGUSR2: the signal is the program's own, or this is not its main thread: not listened to")
        return
    signal.signal(signal.SIGUSR2, _print)


def _print(_number: int, _frame: object) -> None:
    # A parent's in a forked child: another thread may have held the engine's lock then, and never gives it back here.
    for recorder in [each for each in _recorders if not each._engine.forked]:
        sys.stderr.write(recorder.dump(_SHOWN) + "\n")
    sys.stderr.flush()
