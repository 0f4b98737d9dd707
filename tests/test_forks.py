"""Forked children: refused the communicators of their parents, which go on; with jobs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from ranks import Ranks, wait_until
from test_lifecycle import LINKS, add

import hetcoll

Launch = Callable[..., Ranks]


def fork(child: Callable[[], int]) -> int:
    """The exit status of a forked child that runs `child` and leaves by os._exit."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = child()
        finally:
            os._exit(status)
    return wait_for_child(pid)


def wait_for_child(pid: int) -> int:
    ended = wait_until(lambda: os.waitpid(pid, os.WNOHANG)[1:] if os.waitid(os.P_PID, pid, _PEEK) else None, 10.0)
    return os.waitstatus_to_exitcode(ended[0])


_PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except hetcoll.ClosedError as error:
        return "forked process" in str(error)
    return False


def fork_idle(comm: hetcoll.Communicator) -> tuple[int, float]:
    """The child may not use the communicator, by the short way or the long; the parent goes on."""
    x = np.ones(4)
    comm.allreduce(x)
    calls = [lambda: comm.allreduce(x), comm.barrier, lambda: comm.split(0)]
    return fork(lambda: 0 if all(map(refused, calls)) else 1), add(comm)


@LINKS
def test_a_forked_child_is_refused_and_the_parent_goes_on(launch: Launch, transport: str) -> None:
    assert launch(2, HETCOLL_TRANSPORT=transport).run(fork_idle) == [(0, 3.0)] * 2


FORK_AND_END = """
import os, threading
import numpy as np
import hetcoll

unique_id = hetcoll.get_unique_id()
ranks = {}

def join(rank):  # both ranks live in this process
    ranks[rank] = hetcoll.Communicator.init(2, rank, unique_id)

threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
works = [ranks[rank].allreduce(np.ones(1 << 20), async_op=True) for rank in range(2) for _ in range(3)]
pid = os.fork()
if pid == 0:
    works.clear()
    ranks.clear()
else:
    [work.wait() for work in works]
    assert os.waitpid(pid, 0)[1] == 0
print("parent" if pid else "child", flush=True)
"""


@LINKS
def test_a_child_forked_amid_asynchronous_calls_ends_in_order(transport: str) -> None:
    """The child's interpreter runs to its end, with the threads gone that its objects think they have."""
    env = {**os.environ, "HETCOLL_TRANSPORT": transport}
    done = subprocess.run([sys.executable, "-c", FORK_AND_END], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["child", "parent"])


def fork_while_another_thread_waits(comm: hetcoll.Communicator) -> tuple[int, float]:
    """The other thread sleeps inside a call, or holds the engine's lock, at the instant of the fork."""
    got: list[float] = []
    thread = threading.Thread(target=lambda: got.append(add(comm, 10)))
    if comm.rank == 0:
        thread.start()
        wait_until(lambda: comm._engine.collectives == 1)
        status = fork(lambda: 0 if refused(comm.barrier) else 1)
        comm._session.control.put(b"forked", b"")
    else:
        comm._session.control.get(b"forked", 10)
        status = 0
        thread.start()
    thread.join(10)
    return status, got[0]


def test_fork_while_a_thread_is_in_a_call(launch: Launch) -> None:
    assert launch(2).run(fork_while_another_thread_waits) == [(0, 3.0)] * 2


def fork_with_new_job(comm: hetcoll.Communicator) -> tuple[int, float]:
    """A child may have communicators of its own."""

    def child() -> int:
        with hetcoll.Communicator.init(1, 0, hetcoll.get_unique_id()) as own:
            return 0 if add(own) == 1.0 and add(own) == 1.0 else 1

    return fork(child), add(comm)


def test_a_forked_child_may_start_a_job_of_its_own(launch: Launch) -> None:
    assert launch(2).run(fork_with_new_job) == [(0, 3.0)] * 2
