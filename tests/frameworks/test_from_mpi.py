"""`hetcoll.from_mpi`: with mpi4py where it is installed, and with something that does what it uses of it."""

from __future__ import annotations

import os
import pickle
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed import find_mpi4py, find_program
from patience import DEADLINE
from ranks import Job, Ranks

import hetcoll

PROGRAM = """
import numpy as np
from mpi4py import MPI
import hetcoll

world = MPI.COMM_WORLD
with hetcoll.from_mpi(world) as comm:
    x = np.full(5, comm.rank + 1.0)
    comm.allreduce(x)
    assert (comm.rank, comm.size) == (world.rank, 3)
    assert (x == 6).all()
with hetcoll.from_mpi(world.Split(world.rank == 1, -world.rank)) as part:
    assert part.size == (1 if world.rank == 1 else 2)
    assert part.rank == (1 if world.rank == 0 else 0)
    x = np.array([float(world.rank)])
    part.allreduce(x)
    assert x[0] == (1 if world.rank == 1 else 2)
print("fine")
"""


def test_with_mpi4py(tmp_path: Path) -> None:
    mpirun = find_program("mpirun", "openmpi", lambda version: "Open MPI" in version)
    python = find_mpi4py(mpirun)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    env = {k: v for k, v in os.environ.items() if not k.startswith("HETCOLL_")}
    env |= {"PYTHONPATH": str(Path(hetcoll.__file__).parents[1]), "HETCOLL_LINGER": "0"}
    words = [mpirun, "--allow-run-as-root", "-n", "3", "--map-by", ":OVERSUBSCRIBE", python, str(script)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["fine"] * 3


class Files:
    """What `from_mpi` uses of an MPI communicator, through a folder."""

    def __init__(self, folder: str, rank: int, size: int) -> None:
        self._path, self._rank, self._size = Path(folder) / "told", rank, size

    def Get_rank(self) -> int:  # noqa: N802
        return self._rank

    def Get_size(self) -> int:  # noqa: N802
        return self._size

    def bcast(self, obj: Any, root: int = 0) -> Any:
        assert (obj is None) == (self._rank != root)
        if obj is not None:
            self._path.with_suffix(".part").write_bytes(pickle.dumps(obj))
            self._path.with_suffix(".part").rename(self._path)
        while not self._path.exists():
            time.sleep(0.002)
        return pickle.loads(self._path.read_bytes())


def meet(job: Job, folder: str) -> tuple[int, int, float]:
    with hetcoll.from_mpi(Files(folder, job.rank, job.size)) as comm:
        x = np.array([comm.rank + 1.0])
        comm.allreduce(x)
        return comm.rank, comm.size, float(x[0])


def test_ranks_are_those_of_the_other_communicator(tmp_path: Path) -> None:
    with Ranks(3, join=False, tidy=False) as ranks:  # rank 0 keeps the job's store
        assert ranks.run(meet, str(tmp_path)) == [(rank, 3, 6.0) for rank in range(3)]


def test_where_rank_0_cannot_begin_all_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever in MPI's broadcast."""

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("hetcoll.job.get_unique_id", refuse)
    with pytest.raises(hetcoll.InitError, match=r"did not come together on this rank: .*Too many open files"):
        hetcoll.from_mpi(Files(str(tmp_path), 0, 2))
    with pytest.raises(hetcoll.InitError, match=r"rank 0 could not begin the job: .*Too many open files"):
        hetcoll.from_mpi(Files(str(tmp_path), 1, 2))


def test_what_is_no_communicator_of_mpi() -> None:
    for wrong in (None, 5, "world"):
        with pytest.raises(hetcoll.BufferTypeError, match=f"comm: wanted a communicator of mpi4py, .*got {wrong!r}"):
            hetcoll.from_mpi(wrong)
