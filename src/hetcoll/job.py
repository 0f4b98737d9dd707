"""How a process enters a job: `init` for launched jobs, `join` for those that carry the unique id themselves."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any

from . import _native
from .communicator import Communicator
from .config import variables
from .config.env import DEVICES, Config, configuration, environment
from .errors import ArgumentError, InitError
from .rendezvous.bootstrap import bootstrap, get_unique_id
from .rendezvous.control import WORLD
from .rendezvous.session import Session
from .rendezvous.unique_id import UniqueId
from .runtime.compression import parse_format

_world: Communicator | None = None


def init(
    *,
    timeout: float | None = None,
    islands: str | Sequence[Sequence[int]] | None = None,
    device: str | None = None,
    compress: str | None = None,
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
    """
    global _world
    if _world is not None and not _world.closed:
        raise InitError("hetcoll.init() was called already and its communicator is open; use comm.split(0) for another")
    env = environment()
    config = _with_device(_with_islands(env.config, islands), device)
    if compress is not None:
        config = replace(config, compress=parse_format(compress))
    configure(config)
    seconds = env.config.init_timeout if timeout is None else timeout
    start = time.monotonic()
    unique_id = bootstrap(env.launch, env.config)
    left = seconds - (time.monotonic() - start)
    _world = _enter(unique_id, env.launch.rank, env.launch.size, config, left)
    return _world


def join(size: int, rank: int, unique_id: UniqueId | str | bytes, timeout: float | None = None) -> Communicator:
    """See `Communicator.init`. `unique_id` may be what `str` or `to_bytes` made of one."""
    if size < 1 or not 0 <= rank < size:
        raise ArgumentError(f"rank and size: wanted 0 <= rank < size, got rank {rank} of size {size}")
    if isinstance(unique_id, str):
        unique_id = UniqueId.parse(unique_id)
    elif isinstance(unique_id, bytes):
        unique_id = UniqueId.from_bytes(unique_id)
    config = configuration()
    configure(config)
    return _enter(unique_id, rank, size, config, config.init_timeout if timeout is None else timeout)


def from_mpi(comm: Any, *, timeout: float | None = None) -> Communicator:
    """A communicator of the ranks of an MPI communicator (mpi4py's, such as ``MPI.COMM_WORLD``), numbered as there.

    Collective over `comm`, of which it uses the rank, the size and one broadcast; nothing of MPI is used afterwards.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    unique_id = comm.bcast(get_unique_id().to_bytes() if rank == 0 else None, root=0)
    return join(size, rank, unique_id, timeout)


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
    except (AttributeError, ValueError) as error:
        raise ArgumentError(f"device: wanted {DEVICES}, got {asked!r}") from error


def configure(config: Config) -> None:
    """Settings that hold for the whole process: logging and the kernels' instruction set."""
    log = logging.getLogger("hetcoll")
    level = {"none": logging.CRITICAL, "warn": logging.WARNING, "info": logging.INFO}.get(config.debug, logging.DEBUG)
    if config.debug != "warn" and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(name)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(level)
    if config.isa is not None and not _native.set_kernel_isa(config.isa):
        raise ArgumentError(f"HETCOLL_ISA: wanted an instruction set that this processor has, got {config.isa!r}")


def _enter(unique_id: UniqueId, rank: int, size: int, config: Config, timeout: float) -> Communicator:
    deadline = time.monotonic() + timeout
    session = Session(unique_id, rank, size, timeout)
    try:
        return Communicator(session, WORLD, rank, size, config, deadline - time.monotonic())
    except BaseException:
        session.control.close()
        raise
