"""Ranks of which a test needs the control plane alone: clients in threads, and in processes of their own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hetcoll.rendezvous import control
from hetcoll.rendezvous.control import ControlClient
from hetcoll.rendezvous.protocol.news import Event, Query
from hetcoll.rendezvous.protocol.unique_id import UniqueId

T = TypeVar("T")


class Events:
    """Records what a client's handler is told; answers questions with its rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.seen: list[Event] = []
        self._news = threading.Condition()

    def __call__(self, group: bytes, event: Event) -> bytes | None:
        with self._news:
            self.seen.append(event)
            self._news.notify_all()
        return b"answer of %d" % self.rank if isinstance(event, Query) else None

    def wait_for(self, wanted: Callable[[Event], bool], seconds: float = 5.0) -> Event:
        with self._news:
            assert self._news.wait_for(lambda: any(map(wanted, self.seen)), seconds), self.seen
            return next(event for event in self.seen if wanted(event))


def in_parallel(calls: list[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


# A rank in a process of its own: joins, answers questions, says so, and lives until its stdin ends.
MEMBER = """
import sys
from hetcoll.rendezvous.control import WORLD, ControlClient
from hetcoll.config.env import Config
from hetcoll.rendezvous.bootstrap import get_unique_id
from hetcoll.rendezvous.protocol.unique_id import UniqueId

rank, size, text = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
unique_id = UniqueId.parse(text) if text else get_unique_id(Config(linger=0))
client = ControlClient(unique_id, rank, size, 20, lambda group, event: b"here")
print(unique_id, flush=True)
sys.stdin.read()
"""


@contextmanager
def member(rank: int, size: int, unique_id: UniqueId | None, ending: str = "") -> Iterator[subprocess.Popen[str]]:
    """Rank `rank` in a process of its own; it hosts the store where there is no unique id. `ending`: more code."""
    command = [sys.executable, "-c", MEMBER + ending, str(rank), str(size), str(unique_id or "")]
    env = os.environ | {"PYTHONPATH": str(Path(control.__file__).parents[2])}
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str], seconds: float = 30.0) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    assert ready
    return process.stdout.readline().strip()


def join_all(unique_id: UniqueId, size: int) -> tuple[list[ControlClient], list[Events]]:
    events = [Events(rank) for rank in range(size)]
    clients = in_parallel([lambda r=r: ControlClient(unique_id, r, size, 60, events[r]) for r in range(size)])
    return clients, events
