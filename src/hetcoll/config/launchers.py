"""What each launcher tells its processes, read from a mapping: rank, size, place on the host, where rank 0 is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

from ..errors import ArgumentError
from .variables import Environ, flag, read, whole

_COUNT = whole(1, 1 << 24)
_INDEX = whole(0, (1 << 24) - 1)
NAMED_PORTS = range(
    12000, 28000, 40
)  # of jobs with a name, below Linux's ephemeral ports; each may try the 33 from its own on


class Launch(NamedTuple):
    """What the launcher says about this process. `None` means that it did not say.

    `launcher` is "hetcoll", "torchrun" (also for variables set by hand), "openmpi", "hydra" (MPICH and Intel MPI),
    "slurm" or "single". `job` names this job among others that may run beside it; all its ranks have the same. It is
    empty where the launcher does not say: then only the master port tells jobs apart. `agent_store` is true when
    torchrun's agent listens on the master port itself. `joins`: the job runs already, and takes this process in.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = 0
    local_size: int | None = 1
    master: tuple[str, int] | None = None
    launcher: str = "single"
    job: str = ""
    agent_store: bool = False
    joins: bool = False

    @property
    def hosts(self) -> bool:
        """Whether the job's store is to be in this process."""
        return self.rank == 0 and not self.joins

    @property
    def one_host(self) -> bool:
        """Whether the launcher says that all ranks are on this host."""
        return self.local_size == self.size


def read_launch(environ: Environ) -> Launch:
    """Which launcher started this process, and as which rank of how many.

    The most specific one wins: ``RANK`` and ``WORLD_SIZE`` (torchrun, ``hetcoll run``, or set by hand) stand before
    what an MPI set, and an MPI's before srun's, whose variables also reach processes that the MPI started.
    """
    joins = read(environ, "HETCOLL_JOIN", "0 or 1", flag, False)
    return _read_launcher(environ)._replace(joins=joins)


def _read_launcher(environ: Environ) -> Launch:
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torch_style(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _open_mpi(environ)
    if "PMI_RANK" in environ and ("MPI_LOCALRANKID" in environ or "SLURM_STEP_ID" not in environ):
        return _hydra(environ)
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return _slurm(environ)
    return Launch()


def _torch_style(environ: Environ) -> Launch:
    """``RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT``."""
    rank, size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    own, elastic = environ.get("HETCOLL_JOB", ""), "TORCHELASTIC_RUN_ID" in environ
    master = _master(environ)
    # The master's address tells jobs of one run id apart, and the restart count the attempts of one job.
    parts = (environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    job = f"hetcoll {own}" if own else " ".join(("torchrun", *parts, str(master))) if elastic else ""
    return Launch(
        rank, size, _optional(environ, "LOCAL_RANK", _INDEX), _optional(environ, "LOCAL_WORLD_SIZE", _COUNT), master,
        launcher="hetcoll" if own else "torchrun",
        job=job,
        agent_store=elastic and not own and environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
    )  # fmt: skip


def _open_mpi(environ: Environ) -> Launch:
    rank, size = _rank_and_size(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local_rank = _optional(environ, "OMPI_COMM_WORLD_LOCAL_RANK", _INDEX)
    local_size = _optional(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", _COUNT)
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return Launch(rank, size, local_rank, local_size, _master(environ), "openmpi", f"openmpi {job}" if job else "")


def _hydra(environ: Environ) -> Launch:
    """MPICH's and Intel MPI's process manager. It does not name the job; `rendezvous` asks who our parent is."""
    rank, size = _rank_and_size(environ, "PMI_RANK", "PMI_SIZE")
    local_rank = _optional(environ, "MPI_LOCALRANKID", _INDEX)
    local_size = _optional(environ, "MPI_LOCALNRANKS", _COUNT)
    return Launch(rank, size, local_rank, local_size, _master(environ), "hydra")


def _slurm(environ: Environ) -> Launch:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, size = _rank_and_size(environ, "SLURM_PROCID", size_name)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job = f"slurm {environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    master = _master(environ)
    if master is None and nodes:
        master = first_host(nodes), NAMED_PORTS[crc32(job.encode()) % len(NAMED_PORTS)]
    local_rank = _optional(environ, "SLURM_LOCALID", _INDEX)
    return Launch(rank, size, local_rank, _tasks_here(environ), master, "slurm", job)


def _rank_and_size(environ: Environ, rank_name: str, size_name: str) -> tuple[int, int]:
    for name, other in ((rank_name, size_name), (size_name, rank_name)):
        if not environ.get(name, "").strip():
            raise ArgumentError(f"{name}: wanted a number beside {other}={environ.get(other)!r}, got nothing")
    rank = read(environ, rank_name, "a rank, 0 or more", _INDEX, 0)
    size = read(environ, size_name, "a number of ranks, 1 or more", _COUNT, 1)
    if rank >= size:
        raise ArgumentError(f"{rank_name}: wanted a rank below {size_name}={size}, got {rank}")
    return rank, size


def _optional(environ: Environ, name: str, parse: Callable[[str], int]) -> int | None:
    return read(environ, name, "a whole number", parse, None)


def _master(environ: Environ) -> tuple[str, int] | None:
    """``MASTER_ADDR`` and ``MASTER_PORT``, where both are set."""
    address = environ.get("MASTER_ADDR", "").strip()
    port = read(environ, "MASTER_PORT", "a port from 1 to 65535", whole(1, 65535), 0)
    if not (address and port):
        return None
    return address, port


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list.

    Examples
    --------
    >>> first_host("gpu[007-009,12]-ib,cpu1")
    'gpu007-ib'
    """
    first = re.match(r"(?:\[[^\]]*\]|[^,\[\]])+", nodelist.strip())
    if not first:
        raise ArgumentError(f"SLURM_STEP_NODELIST: wanted host names, got {nodelist!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def _tasks_here(environ: Environ) -> int | None:
    """This node's number of tasks, out of ``SLURM_STEP_TASKS_PER_NODE`` such as ``2(x3),1``."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    node = read(environ, "SLURM_NODEID", "a node's number", _INDEX, 0)
    counts: list[int] = []
    for part in text.split(",") if text else ():
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise ArgumentError(f"SLURM_STEP_TASKS_PER_NODE: wanted counts such as 2(x3),1, got {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[node] if node < len(counts) else None
