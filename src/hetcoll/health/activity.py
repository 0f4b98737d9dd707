"""What a process tells `hetcoll top` of all its communicators: counters that only rise, from which rates follow.

Nothing is counted for it while calls run: the engine counts bytes and calls anyway, and its flight recorder has the
times of the last calls. They are added up when somebody asks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import hetcoll._native as _native

from ..rendezvous.protocol.wire import ACTIVITY
from .desync_report import Called
from .flight_recorder import MOST

EDGES = 16  # of a rank that are told: those that carried most since it was asked before
_TEXT = 160

_lock = threading.Lock()
_open: list[Activity] = []  # of this process, in the order in which they came to be


class Activity:
    """Of one communicator, the one of `job_id` that is called `group`. `host`: what its ranks of this host have in
    common. `describe` as for `FlightRecorder`."""

    def __init__(
        self,
        job_id: bytes,
        group: bytes,
        rank: int,
        size: int,
        host: str,
        engine: _native.Engine,
        describe: Callable[[int], tuple[Called, int] | None],
    ) -> None:
        self._name = f"{job_id.hex()} {group.hex()}"
        self._rank, self._size, self._host, self._engine, self._describe = rank, size, host, engine, describe
        self._counted = 0  # collectives up to this one are in what follows
        self._spent = 0.0
        self._timed = 0
        self._before = [0] * size  # bytes that had gone to each rank when it was asked last
        with _lock:
            _open.append(self)

    def close(self) -> None:
        """The communicator is closed: it is told of no more."""
        with _lock, contextlib.suppress(ValueError):  # closed twice
            _open.remove(self)

    def answers(self) -> dict[str, Callable[[int], Any]]:
        """What this rank answers to others' questions."""
        return {ACTIVITY: lambda _: tell()}

    def tell(self) -> dict[str, Any]:
        """`calls` and `messages` that were begun. `spent`: seconds within collectives that have ended, estimated where
        more ended since the last question than the recorder holds; None where their ends are not seen, on a GPU.
        `waits`: seconds since the one began that runs, with `what` it is and `site`, where. `sent` bytes in all, and of
        them by rank in `edges`."""
        engine = self._engine
        state = engine.describe()
        running = self._add_up(busy=bool(state))
        sent = engine.sent()
        busiest = sorted(range(self._size), key=lambda peer: self._before[peer] - sent[peer])[:EDGES]
        self._before, edges = sent, {str(peer): sent[peer] for peer in busiest if sent[peer]}
        called, _ = (None if running is None else self._describe(running[1])) or (None, 0)
        calls = engine.collectives
        return {
            "name": self._name,
            "rank": self._rank,
            "size": self._size,
            "on": self._host,
            "calls": calls,
            "messages": engine.messages,
            "spent": None if self._counted and not self._timed else self._spent,
            "waits": 0.0 if running is None else (time.monotonic_ns() - running[2]) / 1e9,
            "what": "" if called is None else called.what[:_TEXT],
            "site": "" if called is None else called.site,
            "state": state[:_TEXT],
            "failed": engine.failure[2][:_TEXT] if engine.failed else "",
            "sent": sum(sent),
            "edges": edges,
        }

    def _nbytes(self, shape: int) -> int:
        found = self._describe(shape)
        return found[1] if found else 0

    def _add_up(self, *, busy: bool) -> tuple[int, int, int, int] | None:
        """Count the collectives that have ended since; the one that runs, where the host is `busy` with any."""
        engine = self._engine
        most = min(MOST, max(1, engine.collectives - self._counted))
        records = [record for record in engine.records(False, most) if record[0] > self._counted]
        ended = [record for record in records if record[3]]
        last = records[-1][0] if records else self._counted
        running = None
        if busy and records and not records[-1][3]:
            first = next(i for i in range(len(records), 0, -1) if i == 1 or records[i - 2][3]) - 1
            # What runs on a GPU has no end, too; but what has bytes runs here.
            running = next((record for record in records[first:] if self._nbytes(record[1])), records[-1])
            last = running[0] - 1
        took = sum((end - begin) / 1e9 for number, _, begin, end in ended if number <= last)
        if (known := sum(record[0] <= last for record in ended)) and self._counted:
            forgotten = max(0, last - self._counted - sum(record[0] <= last for record in records))
            took *= 1 + forgotten / known
        self._counted, self._spent, self._timed = last, self._spent + took, self._timed + known
        return running


def tell() -> dict[str, Any]:
    """This process's answer. Rates are differences by `clock`, seconds of its own."""
    with _lock:
        groups = [each.tell() for each in _open if not each._engine.forked]
        return {
            "clock": time.monotonic(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "program": " ".join(sys.argv)[:_TEXT],
            "groups": groups,
        }
