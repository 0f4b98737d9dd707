"""How a rank hands descriptors to the ranks of its host, and to nobody else."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupting import interrupt_at
from ranks import Job, Ranks, wait_until

import hetcoll._native as _native
from hetcoll.errors import AuthenticationError, InitError, PeerLostError
from hetcoll.links.descriptors import new_name, receive_fd, share_fd

Launch = Callable[..., Ranks]
SECRET = b"s" * 32


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def test_a_descriptor_reaches_the_ranks_of_this_host() -> None:
    name, memory = new_name(), os.memfd_create("test")
    os.write(memory, b"shared")
    with ThreadPoolExecutor(3) as pool:
        peers = [pool.submit(receive_fd, name, rank, SECRET, 10) for rank in (1, 2)]
        pool.submit(share_fd, name, memory, [1, 2], SECRET, 10).result(15)
        for file in (peer.result(5) for peer in peers):
            assert os.pread(file.fileno(), 10, 0) == b"shared"
            assert not os.get_inheritable(file.fileno())
            file.close()
    os.close(memory)


def names_like(names: list[str]) -> list[str]:
    """What somebody who sees these in /proc/net/unix may think of."""
    stems = [*names, *(name.rpartition("-")[0] for name in names)]
    return [*stems, *(f"{stem}-{rank}" for stem in stems for rank in range(4))]


def join_beside_squatters(job: Job, seen: Path) -> float:
    """Rank 1 makes its engine when all names are taken that follow from those of rank 0."""
    make, taken = _native.Engine, ExitStack()

    def make_between(**options: Any) -> _native.Engine:
        if job.rank:
            wait_until(seen.exists)
        engine = make(**options)
        if not job.rank:
            mine = set()
            for fd in os.listdir("/proc/self/fd"):
                with suppress(OSError):  # that of the list itself
                    mine.add(os.readlink(f"/proc/self/fd/{fd}"))
            rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
            names = [row[7][1:] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in mine]
            assert names, "its doorbell"
            for name in names_like([name for name in names if name.startswith("hetcoll-")]):
                for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
                    with suppress(OSError):  # it is bound by who had it first
                        taken.enter_context(socket.socket(socket.AF_UNIX, kind)).bind("\0" + name)
            seen.touch()
        return engine

    with taken, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "Engine", make_between)
        comm = job.join(20)
        comm.allreduce(x := np.ones(4))
        comm.close()
    return float(x[0])


def test_who_takes_names_like_those_that_it_sees_does_not_prevent_a_start(launch: Launch, tmp_path: Path) -> None:
    """Another user may, of abstract Unix sockets."""
    assert launch(2, join=False).run(join_beside_squatters, tmp_path / "seen") == [2.0] * 2


def lost_when(over: threading.Event) -> Callable[[Collection[int]], None]:
    """A `check` by which rank 0 is lost from then on."""

    def check(peers: Collection[int]) -> None:
        if over.is_set():
            raise PeerLostError("rank 0 was lost", 0)

    return check


@pytest.mark.parametrize("accepts", [True, False])
def test_who_is_lost_while_it_hands_a_descriptor_over_is_named(accepts: bool) -> None:
    """And no error of the connection is raised in place of that: it is closed, or stands, as the system makes it though
    the process that listens does nothing any more."""
    name, over = new_name(), threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind("\0" + name)
        listener.listen()
        fetching = pool.submit(receive_fd, name, 1, SECRET, 60.0, 0, lost_when(over))
        if accepts:
            for _ in range(2):  # it tries again until it is told
                listener.accept()[0].close()
        else:
            wait_until(lambda: bool(select.select([listener], [], [], 0)[0]))  # it has connected
        over.set()
        with pytest.raises(PeerLostError, match="rank 0 was lost"):
            fetching.result(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of sockets that are dropped
def test_ctrl_c_anywhere_while_a_descriptor_is_handed_over_leaves_none_open() -> None:
    """Once the exception is gone; and who was to get it hears of the lost rank, and not of a connection."""
    memory, finished, count = os.memfd_create("test"), False, 0
    while not finished:
        name, over, count = new_name(), threading.Event(), count + 1
        with ThreadPoolExecutor(1) as pool:
            before = len(os.listdir("/proc/self/fd"))
            fetching = pool.submit(receive_fd, name, 1, SECRET, 60.0, 0, lost_when(over))
            try:
                interrupt_at(count, socket.__file__)
                share_fd(name, memory, [1], SECRET, 60.0)
                finished = True
            except KeyboardInterrupt:
                over.set()
            finally:
                sys.setprofile(None)
            try:
                fetching.result(30).close()
            except PeerLostError:
                assert not finished
            assert len(os.listdir("/proc/self/fd")) == before, f"at place {count}"
    assert count > 20
    os.close(memory)


def test_descriptors_stay_from_strangers_and_absent_ranks_are_named() -> None:
    name, memory = new_name(), os.memfd_create("test")
    with ThreadPoolExecutor(1) as pool:
        sharing = pool.submit(share_fd, name, memory, [1, 4], SECRET, 0.5)
        with pytest.raises(AuthenticationError):
            receive_fd(name, 1, b"x" * 32, 5)
        with pytest.raises(InitError, match="ranks 1, 4 of this host"):
            sharing.result(10)
    with pytest.raises(InitError, match="nobody offers it"):
        receive_fd(name, 1, SECRET, 0.1)
    os.close(memory)


def test_sharing_ends_when_a_rank_that_is_waited_for_is_lost() -> None:
    asked: list[list[int]] = []

    def check(ranks: Collection[int]) -> None:
        asked.append(sorted(ranks))
        if len(asked) > 2:
            raise PeerLostError("rank 2 was lost", 2)

    for wait in (
        lambda: receive_fd(new_name(), 1, SECRET, 60, 0, check),
        lambda: share_fd(new_name(), 0, [1, 2], SECRET, 60, check),
    ):
        asked.clear()
        started = time.monotonic()
        with pytest.raises(PeerLostError):
            wait()
        assert time.monotonic() - started < 10
    assert asked == [[1, 2]] * 3
