"""From init to close: what is there meanwhile, and that nothing of it stays. Forks, exits, interrupts at any moment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import Job, Ranks, Resources, wait_until

import hetcoll

Launch = Callable[..., Ranks]
LINKS = pytest.mark.parametrize("transport", ["auto", "tcp"])


def add(comm: hetcoll.Communicator, count: int = 4) -> float:
    x = np.full(count, comm.rank + 1.0)
    comm.allreduce(x)
    return float(x.sum()) / max(1, count)


def use_everything(comm: hetcoll.Communicator) -> None:
    """Every link, the engine's own thread, scratch memory, and a message longer than the rings."""
    for count in (1, 10, 100_000):
        add(comm, count)
    comm.allreduce(np.ones(1000), async_op=True).wait()
    comm.alltoall(np.ones(comm.size * 300_000), np.ones(comm.size * 300_000))
    comm.barrier()


def close_and_keep(job: Job, communicators: int) -> str:
    """What is left after close() although the objects still have names."""
    before = Resources.now()
    kept = [job.join()]
    for _ in range(communicators - 1):
        split = kept[0].split(0)
        assert split is not None
        kept.append(split)
    for comm in kept:
        use_everything(comm)
    for comm in kept:
        comm.close()
    job.comm = None
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not Resources.now().left_over(before))
    return Resources.now().left_over(before)


@LINKS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_close_gives_everything_back_at_once(launch: Launch, size: int, transport: str) -> None:
    ranks = launch(size, join=False, HETCOLL_TRANSPORT=transport)
    assert ranks.run(close_and_keep, 3) == [""] * size


def works_after_close(comm: hetcoll.Communicator) -> list[str]:
    """What every method says after close()."""
    x = np.ones(comm.size)
    add(comm)
    pending = comm.allreduce(np.ones(10), async_op=True)
    pending.wait()
    comm.close()
    comm.close()  # once more is fine
    comm.abort()  # and so is this
    said = []
    calls: list[Callable[[], Any]] = [
        lambda: comm.allreduce(x),
        lambda: comm.allreduce(x, async_op=True),
        lambda: comm.allgather(x[:1].copy(), x),
        lambda: comm.reduce_scatter(x, x[:1].copy()),
        lambda: comm.broadcast(x),
        lambda: comm.reduce(x),
        lambda: comm.gather(x[:1].copy(), x),
        lambda: comm.scatter(x, x[:1].copy()),
        lambda: comm.alltoall(x, x.copy()),
        lambda: comm.allgatherv(x[:1], x.copy(), [1] * comm.size),
        lambda: comm.reduce_scatterv(x, x[:1].copy(), counts=[1] * comm.size),
        lambda: comm.barrier(),
        lambda: comm.send(x, 0),
        lambda: comm.recv(x, 0),
        lambda: comm.split(0),
        lambda: comm.explain("allreduce", 8),
        lambda: comm.group().__enter__(),
    ]
    for call in calls:
        try:
            call()
            said.append("nothing")
        except hetcoll.ClosedError as error:
            said.append(str(error))
    assert comm.closed
    assert "closed" in repr(comm)
    assert (comm.rank, comm.size) == (comm.rank, comm.size)
    pending.wait()
    assert pending.done
    assert pending.error is None
    return said


def test_use_after_close(launch: Launch) -> None:
    for said in launch(2).run(works_after_close):
        assert set(said) == {"this communicator was closed"}


# Forks.


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
