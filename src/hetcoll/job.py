"""How a process enters the job that a launcher, or MPI, describes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any

from .communicator import Communicator
from .config import variables
from .config.env import DEVICES, Config, configuration, environment
from .config.launchers import Launch
from .config.process import configure
from .errors import ArgumentError, BufferTypeError, HetcollError, InitError
from .rendezvous.bootstrap import bootstrap, get_unique_id
from .rendezvous.session import coming_together
from .types import FormatName, as_seconds

_world: weakref.ref[Communicator] | None = None


def init(
    *,
    timeout: float | None = None,
    islands: str | Sequence[Sequence[int]] | None = None,
    device: str | None = None,
    compress: FormatName | None = None,
    reproducible: bool | None = None,
    join: bool | None = None,
) -> Communicator:
    """The communicator of all ranks of this job, as the launcher's environment describes it.

    Understands torchrun, ``hetcoll run``, Open MPI's and Hydra's mpirun and srun; alone, the size is 1. Blocks until
    all ranks are there; `InitError` after `timeout` seconds (default: HETCOLL_INIT_TIMEOUT, 120) names those that never
    came. Calling it again while that communicator is open is an error: use `Communicator.split`.

    `islands` are the ranks whose GPUs one vendor's library serves: ``"0,1|2,3"`` or ``[[0, 1], [2, 3]]``, the same on
    all ranks, each rank once. Default: HETCOLL_ISLANDS, else all GPUs of a vendor.

    `device` is what this rank's buffers are on: ``"cuda"`` or ``"hip"``, with or without the number of the GPU
    (``"cuda:1"``), or ``"cpu"``. Default: HETCOLL_DEVICE, else what the first call is given. Where some ranks have a
    GPU and others none, every rank must say which; each then passes buffers of its own device to the same calls.

    `compress` is how sums and averages of 64 KiB and more travel between hosts, or between the `islands` if they are
    given: ``"none"``, ``"bf16"``, ``"fp8"`` or ``"int8"``, in `Communicator.allreduce` and `reduce_scatter`; the same
    on all ranks. Default: HETCOLL_COMPRESS, else ``"none"``.

    `reproducible`: every all-reduce, reduce and reduce-scatter combines each element in the order of ranks,
    ``((x0 + x1) + x2) + ...``, rounds to the arrays' dtype after every step, and divides last (``avg``). So the same
    inputs give the same bits, whatever the size of a message, the cut into buckets, the algorithm, the transport, and
    the layout of hosts and islands. Vendors' libraries, which promise no order, then do no reductions, and nothing is
    compressed. The same on all ranks; parts of this communicator inherit it. Default: HETCOLL_REPRODUCIBLE, else False.

    `join`: this process comes as a newcomer to a job that runs already, which takes it in by `Communicator.grow`. The
    environment says where rank 0 is and how many ranks the job began with, as it told these. `islands` and `compress`
    are then those of the communicator that grows; its `epoch` is above 0. Default: HETCOLL_JOIN, else False.
    """
    global _world
    world = None if _world is None else _world()
    if world is not None and not world.closed:
        raise InitError("hetcoll.init() was called already and its communicator is open; use comm.split(0) for another")
    asked = None if timeout is None else as_seconds(timeout)
    if timeout is not None and asked is None:
        raise ArgumentError(f"timeout: wanted seconds above 0, got {timeout!r}")
    env = environment()
    config = _with_device(_with_islands(env.config, islands), device)
    if compress is not None:
        config = replace(config, compress=variables.parse_format(compress))
    if reproducible is not None:
        if not isinstance(reproducible, bool):
            raise ArgumentError(f"reproducible: wanted True or False, got {reproducible!r}")
        config = replace(config, reproducible=reproducible)
    configure(config)
    seconds = env.config.init_timeout if asked is None else asked
    if join is not None and not isinstance(join, bool):
        raise ArgumentError(f"join: wanted True or False, got {join!r}")
    launch = env.launch if join is None else env.launch._replace(joins=join)
    if launch.joins and launch.size == 1:
        raise InitError("join: wanted RANK and WORLD_SIZE as the ranks of the job that runs were told, got a size of 1")
    start = time.monotonic()
    with coming_together():
        unique_id = bootstrap(launch, replace(env.config, init_timeout=seconds))
    left = seconds - (time.monotonic() - start)
    world = Communicator.enter(unique_id, launch.rank, launch.size, config, left, join=launch.joins)
    _world = weakref.ref(world)
    return world


def from_mpi(comm: Any, *, timeout: float | None = None) -> Communicator:
    """A communicator of the ranks of an MPI communicator (mpi4py's, such as ``MPI.COMM_WORLD``), numbered as there.

    Collective over `comm`, of which it uses the rank, the size and one broadcast; nothing of MPI is used afterwards.
    """
    if not all(hasattr(comm, name) for name in ("Get_rank", "Get_size", "bcast")):
        raise BufferTypeError(f"comm: wanted a communicator of mpi4py, such as MPI.COMM_WORLD, got {comm!r}")
    rank, size = comm.Get_rank(), comm.Get_size()
    told: bytes | str | None = None
    problem: HetcollError | None = None
    if rank == 0:
        try:
            with coming_together():
                told = get_unique_id().to_bytes()
        except HetcollError as error:  # MPI lets the others wait for ever
            told, problem = str(error), error
    unique_id = comm.bcast(told, root=0)
    if problem is not None:
        raise problem
    if isinstance(unique_id, str):
        raise InitError(f"rank 0 could not begin the job: {unique_id}")
    return Communicator.init(size, rank, unique_id, timeout=timeout)


def at_address(address: str, rank: int, size: int, *, device: str, timeout: float) -> Communicator:
    """A communicator of processes that nobody has launched together: rank 0 listens at `address`, ``host:port``, or ""
    for HETCOLL_MASTER. `device` as for `init`; `timeout` is in seconds."""
    config = replace(_with_device(configuration(), device), init_timeout=timeout)
    try:
        master = variables.endpoint(address) if address else config.master
    except ValueError:
        master = None
    if master is None:
        raise ArgumentError(f"address: wanted host:port of rank 0, here or in HETCOLL_MASTER, got {address!r}")
    configure(config)
    unique_id = bootstrap(Launch(rank, size, None, None, master, "torchrun"), replace(config, master=None))
    return Communicator.enter(unique_id, rank, size, config, timeout)


def _with_islands(config: Config, asked: str | Sequence[Sequence[int]] | None) -> Config:
    if asked is None:
        return config
    try:
        text = asked if isinstance(asked, str) else "|".join(",".join(str(index(r)) for r in part) for part in asked)
        return replace(config, islands=variables.islands(text))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"islands: wanted ranks such as '0,1|2,3' or [[0, 1], [2, 3]], got {asked!r}") from error


def _with_device(config: Config, asked: str | None) -> Config:
    if asked is None:
        return config
    try:
        return replace(config, device=variables.auto(variables.DeviceChoice.parse)(asked))
    except (AttributeError, TypeError, ValueError) as error:
        raise ArgumentError(f"device: wanted {DEVICES}, got {asked!r}") from error
