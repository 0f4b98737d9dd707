"""What hetcoll may cost: memory, idle CPU time, start-up time.

Times are bounded generously, since the machine may be busy; the figures measured are printed (``pytest -rP``).
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from patience import DEADLINE, PATIENCE
from ranks import Job, Ranks

import hetcoll

pytestmark = pytest.mark.calm
Pool = Callable[..., Ranks]
TRANSPORTS = ("shm", "tcp")
MIB = 1 << 20


def _resident() -> int:
    """Bytes of this process in memory, private and shared."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssFile", "RssShmem")))


def _footprint(job: Job, biggest: int) -> int:
    """Growth from before init to after allreduces of all sizes; the user's arrays are there before."""
    x, y = np.ones(biggest, np.uint8), np.ones(biggest, np.uint8)
    before = _resident()
    comm = job.join()
    nbytes = 1
    while nbytes <= biggest:
        for _ in range(5):
            comm.allreduce(x[:nbytes], y[:nbytes])
            comm.allreduce(y[:nbytes], op="max")
        nbytes *= 2
    assert (y[1:] == comm.size).all()
    return _resident() - before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_of_two_ranks(launch: Pool, transport: str) -> None:
    grown = max(launch(2, join=False, HETCOLL_TRANSPORT=transport).run(_footprint, MIB))
    print(f"2 ranks, {transport}: {grown / MIB:.1f} MiB a rank")
    assert 0 < grown < 32 * MIB


def _work_on(comm: hetcoll.Communicator, operations: int, seed: int) -> None:
    """Operations of changing kinds, types and sizes; every one is checked."""
    random = np.random.default_rng(seed)  # the same on all ranks
    n = comm.size
    buffers = {dtype: np.empty(8000, dtype) for dtype in (np.int8, np.float32, np.int64)}
    dtypes = list(buffers)
    for i, count in enumerate(random.integers(1, 4000, operations).tolist()):
        buffer = buffers[dtypes[i % 3]]
        x, y = buffer[:count], buffer[4000 : 4000 + count]
        x.fill(1)
        if i % 4 == 0:
            comm.allreduce(x, y, async_op=True).wait()
        elif i % 4 == 1:
            comm.allreduce(x, y)
        elif i % 4 == 2:
            y.fill(n if comm.rank == 0 else 0)
            comm.broadcast(y)
        else:
            comm.sendrecv(x, (comm.rank + 1) % n, y, (comm.rank - 1) % n)
            y *= n
        assert y[0] == y[-1] == n, (i, count)


def _growth(comm: hetcoll.Communicator, operations: int) -> int:
    _work_on(comm, operations // 4, 1)
    before = _resident()
    _work_on(comm, operations, 2)
    return _resident() - before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_does_not_grow(pool: Pool, transport: str) -> None:
    grown = max(pool(2, HETCOLL_TRANSPORT=transport).run(_growth, 20_000, timeout=60))
    print(f"20,000 operations, {transport}: {grown / MIB:.2f} MiB more")
    assert grown < 2 * MIB


def _idle(comm: hetcoll.Communicator) -> float:
    x = np.ones(100_000)
    comm.allreduce(x, async_op=True).wait()
    comm.allreduce(x)
    comm.barrier()
    before = time.process_time()  # of all threads
    assert not threading.Event().wait(1.0)
    return time.process_time() - before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_idle_communicator_uses_no_cpu(pool: Pool, transport: str) -> None:
    used = max(pool(2, HETCOLL_TRANSPORT=transport).run(_idle))
    print(f"idle, {transport}: {used * 1e3:.2f} ms of CPU time in 1 s")
    assert used < 0.02


LOOKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/socket.h>
static _Thread_local long looks;
long looks_so_far(void) { return looks; }
ssize_t recv(int fd, void* to, size_t n, int flags) {
  static ssize_t (*next)(int, void*, size_t, int);
  if (!next) next = (ssize_t (*)(int, void*, size_t, int))dlsym(RTLD_NEXT, "recv");
  ++looks;
  return next(fd, to, n, flags);
}
ssize_t recvmsg(int fd, struct msghdr* message, int flags) {
  static ssize_t (*next)(int, struct msghdr*, int);
  if (!next) next = (ssize_t (*)(int, struct msghdr*, int))dlsym(RTLD_NEXT, "recvmsg");
  ++looks;
  return next(fd, message, flags);
}
"""

WAITING = """
import ctypes, os, sys, time
os.environ["HETCOLL_HOST_ID"] = "abcdefgh"[int(os.environ["RANK"])]  # each has all cores, as far as it knows
import numpy as np
import hetcoll

count = ctypes.CDLL(sys.argv[1]).looks_so_far
count.restype = ctypes.c_long
with hetcoll.init() as comm:
    x, out, found = np.ones(2, np.float32), np.ones(2, np.float32), []
    for _ in range(20):
        comm.barrier()
        if comm.rank != 0:
            time.sleep(0.05)
        before = count()
        comm.allreduce(x, out)
        found.append(count() - before)
    if comm.rank == 0:
        print("looks:", *found)
"""


def test_waiting_for_sockets_spins_by_the_clock(tmp_path: Path) -> None:
    """Not by looks, of which each is a call of the system for each peer: 20 us, then 200 us of yielding, then sleep.
    500 looks at seven peers were 3,500 calls; in that time there are less than half of these."""
    words = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library := tmp_path / "looks.so"), "-ldl"]
    subprocess.run(words, input=LOOKS, text=True, check=True)
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    env = {"LD_PRELOAD": str(library), "HETCOLL_SPIN_US": "20", "HETCOLL_ALGO": "oneshot"}
    words = [sys.executable, "-m", "hetcoll", "run", "--no-prefix", "-n", "8", str(script), str(library)]
    done = subprocess.run(words, env=os.environ | env, capture_output=True, text=True, check=True, timeout=DEADLINE)
    looks = [*map(int, done.stdout.partition("looks: ")[2].split())]
    print(f"{min(looks)} to {max(looks)} calls")
    assert len(looks) == 20
    assert 0 < min(looks) < 1750


def _init(job: Job) -> float:
    start = time.monotonic()
    job.join()
    return time.monotonic() - start


def test_init_of_two_ranks(launch: Pool) -> None:
    best = min(max(launch(2, join=False).run(_init)) for _ in range(3))
    print(f"init of 2 ranks: {best * 1e3:.1f} ms")
    assert best < 0.5


def _joined(job: Job) -> tuple[float, int]:
    before = _resident()
    seconds = _init(job)
    comm = job.comm
    assert comm is not None
    x = np.full(1000, comm.rank)
    comm.allreduce(x)
    assert (x == comm.size * (comm.size - 1) // 2).all()
    return seconds, _resident() - before


def test_init_of_64_ranks(launch: Pool) -> None:
    found = launch(64, join=False).run(_joined, timeout=60)
    slowest, grown = max(seconds for seconds, _ in found), max(grown for _, grown in found)
    print(f"init of 64 ranks: {slowest:.2f} s; with an allreduce it takes {grown / MIB:.1f} MiB a rank")
    assert slowest < 30
    assert grown < 64 * MIB


def _cpu_seconds(code: str) -> float:
    """Of a fresh interpreter that runs `code`: the least of three, since what disturbs only adds."""
    code += "\nimport time; print(time.process_time())"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-c", code]
    return min(
        float(subprocess.run(run, env=env, capture_output=True, text=True, check=True, timeout=PATIENCE * 30).stdout)
        for _ in range(3)
    )


def test_import_time() -> None:
    took = _cpu_seconds("import hetcoll") - _cpu_seconds("import numpy")
    print(f"import hetcoll: {took * 1e3:.0f} ms of CPU time more than import numpy")
    assert took < 0.3


def _shared_files(comm: hetcoll.Communicator) -> tuple[int, list[str]]:
    """How many files are mapped to be written and shared, and those whose file has a name that others can see."""
    shared = comm.empty(1000)
    shared[:] = 1
    comm.allreduce(shared)
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    files = [line[5] for line in lines if len(line) > 5 and line[1] == "rw-s"]
    return len(files), [file for file in files if Path(file).exists()]


def test_nothing_appears_in_dev_shm(launch: Pool) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    found = launch(2).run(_shared_files)
    during = {path.name for path in Path("/dev/shm").iterdir()}
    assert all(count > 0 for count, _ in found)  # it does use shared memory
    assert [named for _, named in found] == [[], []]
    assert {name for name in during - before if "hetcoll" in name} == set()
