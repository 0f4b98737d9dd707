"""From init to close: what is there meanwhile, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import LINKS, add, use_everything
from patience import DEADLINE
from ranks import Job, Ranks, Resources, elapsed, wait_until
from thorough import parametrize

import hetcoll
from hetcoll.rendezvous.control import ControlClient
from hetcoll.rendezvous.protocol.wire import Frame, Op
from hetcoll.rendezvous.store import server as store

Launch = Callable[..., Ranks]


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
    x, place = np.ones(comm.size), (comm.rank, comm.size)
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
    assert (comm.rank, comm.size) == place
    pending.wait()
    assert pending.done
    assert pending.error is None
    return said


def test_use_after_close(launch: Launch) -> None:
    for said in launch(2).run(works_after_close):
        assert set(said) == {"this communicator was closed"}


IMPORT = """
import sys, numpy
before = set(sys.modules)
import hetcoll
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("_")))
"""

STANDARD = {
    "array", "atexit", "base64", "binascii", "copy", "ctypes", "dataclasses", "errno", "fcntl", "gc", "hashlib", "hmac",
    "ipaddress", "json", "logging", "resource", "select", "selectors", "socket", "string", "threading", "traceback",
    "zlib",
}  # fmt: skip
"""What the library needs of Python's own, beside what NumPy loads. Of ctypes Python 3.14 loads a part later."""

LATER = (
    "cli", "gpu.cpu_rank", "gpu.edges", "gpu.executor", "gpu.path_probe", "gpu.plans", "gpu.proxy", "gpu.shared",
    "gpu.slots", "runtime.inspection", "jax", "links.verbs.library", "links.verbs.memory", "links.verbs.local_nics",
    "plan.algorithms", "plan.simulator", "tools", "torch", "vendors.ccl", "vendors.devices", "gpu.float8",
)  # fmt: skip
"""What is loaded when a call or a setting first needs it: all of GPUs, most of RDMA, plans, commands."""


def of_ours(names: Iterable[str], later: Sequence[str]) -> list[str]:
    """Those that are one of these modules of hetcoll, or in it."""
    return [name for name in names if f"{name}.".startswith(tuple(f"hetcoll.{each}." for each in later))]


def copy_and_go_on(comm: hetcoll.Communicator) -> float:
    """What a collective gives after each way to make a second object of a communicator was tried."""
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^<hetcoll\.Communicator rank \d of 2> cannot be copied or pickled"):
            way(comm)
    buf = np.ones(1)
    comm.allreduce(buf)
    return float(buf[0])


def test_a_communicator_has_no_copies(launch: Launch) -> None:
    """A copy that nobody refers to any more would close what the communicator still uses."""
    assert launch(2).run(copy_and_go_on) == [2.0, 2.0]


def test_import_loads_nothing_that_is_not_needed() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=DEADLINE)
    loaded = done.stdout.split()
    assert {name.partition(".")[0] for name in loaded} <= STANDARD | {"hetcoll"}
    assert "hetcoll.communicator" in loaded
    assert of_ours(loaded, LATER) == []


CPU_JOB = """
import sys, numpy, hetcoll
with hetcoll.init() as comm:
    comm.allreduce(numpy.ones(9))
    comm.barrier()
    print("loaded:", *sorted(sys.modules))
"""


def test_calls_on_cpus_load_nothing_of_gpus(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(CPU_JOB)
    words = [sys.executable, "-m", "hetcoll", "run", "-n", "2", str(script)]
    env = os.environ | {"HETCOLL_DEVICE": "cpu"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=DEADLINE, env=env)
    loaded = [line.split() for line in done.stdout.splitlines() if "loaded:" in line]
    assert len(loaded) == 2
    for names in loaded:
        assert "hetcoll.plan.algorithms" in names
        assert of_ours(names, [name for name in LATER if name != "plan.algorithms"]) == []


# Beginnings.


def join_late(job: Job, absent: tuple[int, ...], timeout: float) -> str:
    """`absent` ranks never come; the error's text, and what is left of the attempt."""
    if job.rank in absent:
        return ""
    before = Resources.now()
    try:
        job.join(timeout)
    except hetcoll.InitError as error:
        wait_until(lambda: not Resources.now().left_over(before))
        return str(error)
    return "joined"


def test_ranks_that_never_come_are_named(launch: Launch) -> None:
    ranks = launch(4, join=False)
    with elapsed() as took:
        zero, one, two, three = ranks.run(join_late, (1, 2), 1.0)
    assert took[0] < 4.0
    assert (one, two) == ("", "")
    assert "ranks 1-2 of 4 never joined the job" in zero
    assert "ranks 1-2 of 4 never joined the job" in three


def join_and_count(job: Job) -> tuple[int, int, float]:
    """What a rank asked the store while it joined, the bytes of its answers, and a sum."""
    answers: list[int] = []
    call = ControlClient._call

    def count(self: ControlClient, op: Op, *args: Any) -> Frame:
        frame = call(self, op, *args)
        answers.extend([len(frame.body)] * (op != Op.QUERY))  # of ranks that are late, which is a matter of time
        return frame

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlClient, "_call", count)
        comm = job.join(60)
    return len(answers), sum(answers), add(comm)


@pytest.mark.calm
@pytest.mark.slow
@parametrize("size", [64, 256], first=1, whole=True)
def test_many_ranks(launch: Launch, size: int) -> None:
    """One request more than with few ranks, for the names of this host's processes, and bytes for each other rank."""
    few, found = (launch(n, join=False).run(join_and_count, timeout=100) for n in (3, size))
    assert 0 < max(row[0] for row in found) <= max(row[0] for row in few) + 1
    assert max(row[1] for row in found) / size <= max(row[1] for row in few) / 3
    assert {total for _, _, total in found} == {size * (size + 1) / 2}


def join_and_tell(job: Job, absent: tuple[int, ...], folder: Path) -> None:
    """`absent` ranks never come; the others leave their name in the folder when they have joined and wait."""
    exchange = ControlClient.exchange_columns

    def tell(self: ControlClient, *args: Any) -> Any:
        (folder / str(job.rank)).mkdir()
        return exchange(self, *args)

    if job.rank not in absent:
        ControlClient.exchange_columns = tell  # type: ignore[method-assign]
        job.join(30)


def test_ctrl_c_while_joining(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(2, join=False)
    ranks.start(join_and_tell, (1,), tmp_path)
    wait_until((tmp_path / "0").exists, 20)
    ranks.signal(0, signal.SIGINT)
    zero, one = ranks.finish(10)
    assert isinstance(zero.error, KeyboardInterrupt), zero.trace
    assert one.error is None


def test_a_rank_that_dies_while_others_join_is_named(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(3, join=False)
    ranks.start(join_and_tell, (1,), tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 20)
    killed = time.monotonic()
    ranks.kill(2)
    zero = ranks.finish(10, only=[0])[0]
    assert isinstance(zero.error, hetcoll.PeerLostError), zero.trace
    assert zero.error.rank == 2
    assert zero.ended - killed < 5


def test_the_death_of_the_stores_host_ends_joining(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(3, join=False)
    ranks.start(join_and_tell, (1,), tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 20)
    killed = time.monotonic()
    ranks.kill(0)
    two = ranks.finish(10, only=[2])[0]
    assert isinstance(two.error, hetcoll.PeerLostError), two.trace
    assert "hosts the job's store" in str(two.error)
    assert two.ended - killed < 5


def join_twice(comm: hetcoll.Communicator) -> list[str]:
    """Another process cannot be a rank that is there already; sizes must agree."""
    said = []
    unique_id = comm._session.control.unique_id
    for size, rank in ((2, 0), (3, 2), (2, 5), (0, 0)):
        try:
            hetcoll.Communicator.init(size, rank, unique_id, timeout=5)
            said.append("joined")
        except hetcoll.HetcollError as error:
            said.append(f"{type(error).__name__}: {error}")
    for words in (
        ("2", 0, unique_id), (2, None, unique_id), (True, False, unique_id), (1 << 40, 0, unique_id),
        (2, 0, None), (2, 0, "text"), (2, 0, b""), (2, 0, 5),
    ):  # fmt: skip
        with pytest.raises((hetcoll.ArgumentError, hetcoll.BufferTypeError)):
            hetcoll.Communicator.init(*words, timeout=5)
    for timeout in (0, -1, math.nan, "5", True):
        with pytest.raises(hetcoll.ArgumentError, match="timeout: wanted seconds above 0, got"):
            hetcoll.Communicator.init(2, 0, unique_id, timeout=timeout)
        with pytest.raises(hetcoll.ArgumentError, match="timeout: wanted seconds above 0, got"):
            hetcoll.Communicator.join(unique_id, timeout=timeout)
    return said


def test_wrong_ranks_and_sizes(launch: Launch) -> None:
    for taken, larger, outside, empty in launch(2).run(join_twice):
        assert re.match(r"InitError: two processes say that they are rank 0: .*", taken)
        assert re.match(r"InitError: rank 2 .* says that the job has 3 ranks", larger)
        assert outside == "ArgumentError: rank and size: wanted 0 <= rank < size, got rank 5 of size 2"
        assert empty == "ArgumentError: rank and size: wanted 0 <= rank < size, got rank 0 of size 0"


SETTINGS = {
    "HETCOLL_ALGO": ("ring", "tree"),
    "HETCOLL_TRANSPORT": ("auto", "tcp"),
    "HETCOLL_SHM_BYTES": ("4096", "8192"),
    "HETCOLL_SOCKET_STRIPES": ("1", "2"),
    "HETCOLL_PINNED_BYTES": ("1G", "2G"),
    "HETCOLL_CHECK": ("0", "sampled"),
    "HETCOLL_OBJECTS": ("0", "1"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_must_be_equal(launch: Launch, name: str) -> None:
    """Found at init, and not by data at the wrong place."""
    ranks = launch(2, join=False, **{name: SETTINGS[name]})
    for said in ranks.run(join_late, (), 20.0):
        assert re.match(rf"{name} is '?\w+'? on rank 0 and '?\w+'? on rank 1", said), said


def join_badly(job: Job, message: str) -> str:
    before = Resources.now()
    with pytest.raises(hetcoll.HetcollError, match=message) as caught:
        job.join(20)
    del caught
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not Resources.now().left_over(before))
    return Resources.now().left_over(before)


WRONG_SETTINGS = {
    "HETCOLL_ALGO": ("quantum", "names no algorithm: 'quantum'; there are "),
    "HETCOLL_FAULT": ("delay=often", "HETCOLL_FAULT: "),
    "HETCOLL_TUNED": (
        "/",
        "HETCOLL_TUNED: wanted a readable file, or none, got '/'",
    ),  # also where rank 0 alone reads it
    "HETCOLL_ISA": ("abacus", "HETCOLL_ISA: wanted an instruction set that this processor has, got 'abacus'"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_settings_that_cannot_be_obeyed(launch: Launch, name: str) -> None:
    """Said at init by name; nothing is left of the attempt."""
    value, message = WRONG_SETTINGS[name]
    ranks = launch(2, join=False, HETCOLL_TRANSPORT="tcp", **{name: value})
    assert ranks.run(join_badly, message) == ["", ""]


# Endings of a communicator while it is in use.


def close_under_a_call(comm: hetcoll.Communicator, how: str) -> str:
    """One thread is in a call that cannot end; another closes the communicator."""
    x = np.ones(10)
    comm.allreduce(x)
    if comm.rank == 0:
        return ""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            if how == "hot":
                comm.allreduce(x)
            elif how == "long":
                comm.allreduce(np.ones(1 << 20))
            elif how == "wait":
                comm.allreduce(np.ones(1 << 20), async_op=True).wait()
            else:
                comm.alltoall(np.ones(2), np.ones(2))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.3)
    comm.close()
    thread.join(5)
    assert not thread.is_alive()
    (error,) = errors
    assert isinstance(error, hetcoll.AbortedError | hetcoll.ClosedError), error
    return str(error)


@LINKS
@parametrize("how", ["first use", "hot", "wait", "long"], first=2)
def test_close_while_another_thread_is_in_a_call(launch: Launch, how: str, transport: str) -> None:
    said = launch(2, HETCOLL_TRANSPORT=transport).run(close_under_a_call, how)
    assert re.fullmatch("(the|this) communicator was closed", said[1])


def open_and_close_many(comm: hetcoll.Communicator, times: int) -> str:
    """Communicators that come and go leave nothing, on any rank and in the store."""
    for i in range(times):
        if i == 5:
            comm.barrier()  # so that nobody is still about to close the one before
            before = Resources.now()
        other = comm.split(comm.rank % 2 if i % 3 else 0)
        assert other is not None
        other.allreduce(np.ones(100))
        other.allreduce(np.ones(100), async_op=True).wait()
        other.close()
    comm.barrier()
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not Resources.now().left_over(before))
    if comm.rank == 0:
        (server,) = store._hosted.values()
        assert len(server._groups._groups) <= 3
    assert len(comm._session._handlers) == 1
    assert not comm._session._early
    return Resources.now().left_over(before)


@parametrize("transport", ["auto", "tcp"], first=1)
def test_communicators_that_come_and_go(launch: Launch, transport: str) -> None:
    assert launch(3, HETCOLL_TRANSPORT=transport).run(open_and_close_many, 40) == [""] * 3
