"""Jobs whose address space is limited, as `ulimit -v` and some batch systems do."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from patience import DEADLINE
from ranks import Job, Ranks

import hetcoll
from hetcoll.config.limits import address_space_left

Launch = Callable[..., Ranks]

SCRIPT = """
import numpy as np
import hetcoll

with hetcoll.init() as comm:
    x = np.ones(1 << 20)
    comm.allreduce(x)
    assert (x == comm.size).all()
    lent = comm.empty(1 << 20, "float64")
    lent[:] = 1.0
    comm.allreduce(lent)
    assert (lent == comm.size).all()
    print("right", comm.topology.transport(0, 1))
"""


def test_a_job_under_ulimit_v(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    command = f"ulimit -v {4 << 20}; exec {sys.executable} -m hetcoll run -n 3 {tmp_path / 'job.py'}"
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right shm") == 3


def limit_and_join(job: Job, limited: int, splits: int) -> tuple[int, str]:
    """One rank's limit holds for what all of its host map."""
    if job.rank == limited:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.RLIM_INFINITY))
        left = address_space_left()
        assert left is not None
        assert 0 < left < 4 << 30
    comm = job.join()
    parts = [comm]
    for _ in range(splits):  # each has a heap of its own
        part = parts[-1].split(0)
        assert part is not None
        parts.append(part)
    for part in parts:
        lent = part.empty(1 << 18)
        lent[:] = 1.0
        part.allreduce(lent)
        assert (lent == part.size).all()
    with pytest.raises(ValueError, match="wanted 8589934592 bytes in one piece of this rank's") as caught:
        comm.empty(1 << 31)
    for part in reversed(parts):
        part.close()
    return len(parts), str(caught.value)


def test_one_rank_of_a_host_is_limited(launch: Launch) -> None:
    found = launch(3, join=False).run(limit_and_join, 1, 6)
    assert [n for n, _ in found] == [7, 7, 7]
    assert len({said for _, said in found}) == 1, "all heaps are of one size"


def test_without_a_limit() -> None:
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        assert address_space_left() is None


def no_threads() -> None:
    """As much memory as there is, and no room for the stack of another thread."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (3 << 20), resource.RLIM_INFINITY))


def lack_a_thread(comm: hetcoll.Communicator, what: str) -> str:
    comm.allreduce(x := np.ones(4))
    calls: dict[str, Callable[[], object]] = {
        "part": lambda: comm.split(0),
        "call": lambda: [comm.allreduce(x, async_op=True).wait(), comm.barrier()],
        "tag": lambda: comm.send(x, 0, tag=1) if comm.rank == 1 else comm.recv(x, 1, tag=1),
    }

    def call() -> None:
        comm.barrier()  # where rank 0 may still be when rank 1 fails
        if comm.rank == 1:
            no_threads()
        calls[what]()

    with pytest.raises(hetcoll.HetcollError) as caught:
        call()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(caught.value)


def test_a_call_in_flight_for_which_there_is_no_thread(launch: Launch) -> None:
    (said,) = set(launch(2).run(lack_a_thread, "call"))
    assert said.startswith("rank 1")
    assert "no thread for calls in flight: Resource temporarily unavailable" in said


def test_a_message_with_a_tag_for_which_there_is_no_thread(launch: Launch) -> None:
    (said,) = set(launch(2).run(lack_a_thread, "tag"))
    assert said.startswith("rank 1")
    assert "hetcoll-tags-to-0: can't start new thread" in said


def test_a_part_for_which_there_is_no_memory(launch: Launch) -> None:
    other, own = launch(2, HETCOLL_TRANSPORT="tcp").run(lack_a_thread, "part")
    assert own.startswith("the ranks did not come together on this rank: ")
    assert "can't start new thread" in own
    assert other.startswith("rank 1 has left; ")
