"""Forked children: refused the communicators of their parents, which go on; with jobs of their own."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from calls import LINKS, add
from patience import PATIENCE
from ranks import Ranks, wait_until

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
    """The child may not use the communicator, by the fast path or the slow; the parent goes on."""
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
    words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK_AND_END]  # Python 3.12 warns of threads
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE * 30)
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


def refuse_everything(comm: hetcoll.Communicator) -> tuple[int, bool]:
    """The child may not wait for what its parent has in flight, nor ask for it, begin or end anything; the parent gets
    the right data. Rank 1 begins its half only when the child has ended."""
    x, y = np.full(200_000, comm.rank + 1.0), np.zeros(200_000)
    status = 0
    if comm.rank == 1:
        comm._session.control.get(b"the child has ended", 20)
    works = [comm.allreduce(x, async_op=True)]
    if comm.rank == 1:
        works.append(comm.send(np.full_like(x, 5.0), 0, async_op=True))
    else:
        works.append(comm.recv(y, 1, async_op=True))
        lease = comm.register(x)
        group = comm.group()
        with group:

            def child() -> int:
                signal.alarm(8)  # a call that hangs
                calls = [lambda each=each: each.wait() for each in works]
                calls += [lambda each=each: each.done for each in works]
                calls += [lambda each=each: each.wait_stream() for each in works]
                calls += [
                    lambda: group.__exit__(None),
                    lambda: comm.group().__enter__(),
                    lambda: comm.allreduce(x, async_op=True),
                    lambda: comm.send(x, 1),
                    lambda: comm.send(x, 1, async_op=True),
                    lambda: comm.sendrecv(x, 1, y, 1),
                    lambda: comm.empty(4),
                    lambda: comm.register(x),
                    lambda: comm.counters(),
                    lambda: comm.explain("allreduce", 4),
                    lambda: comm.shrink(),
                    lambda: comm.reset_feedback(),
                    lambda: comm.error,
                ]
                wrong = sum(1 << i for i, call in enumerate(calls) if not refused(call))
                print("not refused: ", bin(wrong), flush=True)
                for quiet in (lease.close, comm.abort, comm.close, lambda: comm.__exit__(None, None, None)):
                    quiet()
                works.clear()
                gc.collect()
                return 1 if wrong else 0

            status = fork(child)
        comm._session.control.put(b"the child has ended", b"")
    for each in works:
        each.wait()
    return status, bool((x == 3.0).all() and (y == (5.0 if comm.rank == 0 else 0.0)).all())


@LINKS
def test_a_forked_child_is_refused_everything_about_calls_in_flight(launch: Launch, transport: str) -> None:
    assert launch(2, HETCOLL_TRANSPORT=transport).run(refuse_everything) == [(0, True)] * 2


def drop_in_the_child(comm: hetcoll.Communicator) -> tuple[int, bool, bool]:
    """The child's copies of arrays die there: the memory is the parent's, also what it is given next."""
    lent = comm.empty(1 << 20)
    held = [lent]
    lent[:] = 7.0

    def child() -> int:
        nonlocal lent
        held.clear()
        lent = np.empty(0)
        gc.collect()
        return 0

    status = fork(child)
    intact = bool((lent == 7.0).all())
    comm.allreduce(lent)
    return status, intact, bool((lent == 14.0).all())


def test_arrays_that_die_in_a_forked_child(launch: Launch) -> None:
    assert launch(2, HETCOLL_TRANSPORT="shm").run(drop_in_the_child) == [(0, True, True)] * 2


def sockets() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in found if name.startswith("socket:")}


def count_in_the_child(comm: hetcoll.Communicator) -> tuple[bool, int]:
    before = sockets()
    part = comm.split(0)
    assert part is not None
    add(part)
    own = sockets() - before
    return len(own) > 1, fork(lambda: len(own & sockets()))


@LINKS
def test_a_forked_child_closes_its_copies_of_sockets(launch: Launch, transport: str) -> None:
    assert launch(2, HETCOLL_TRANSPORT=transport).run(count_in_the_child)[0][1] == 0
