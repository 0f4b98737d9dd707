"""Collective communication for jobs whose ranks run on NVIDIA GPUs, AMD GPUs and CPUs at once.

>>> import hetcoll, numpy as np
>>> comm = hetcoll.init()      # torchrun, mpirun, srun, `hetcoll run`, or alone
>>> x = np.full(4, comm.rank + 1.0)
>>> comm.allreduce(x)          # in place
<hetcoll.Work done>
>>> comm.close()
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._native import Persistent
from .calls.buffers import Array
from .communicator import Communicator
from .config.version import __version__
from .errors import (
    AbortedError,
    ArgumentError,
    AuthenticationError,
    BufferTypeError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    DeviceError,
    HetcollError,
    InitError,
    PeerLostError,
    PlanError,
    RegistrationError,
)
from .job import from_mpi, init
from .rendezvous.bootstrap import get_unique_id
from .rendezvous.protocol.unique_id import UniqueId
from .types import ANY_SOURCE, DType, OpName, ReduceOp
from .work import Work

__all__ = [
    "ANY_SOURCE", "AbortedError", "ArgumentError", "Array", "AuthenticationError", "BufferTypeError", "ClosedError",
    "CollectiveMismatchError", "CollectiveTimeoutError", "CommunicationError", "Communicator", "DType",
    "DeviceError", "HetcollError", "InitError", "OpName", "PeerLostError", "Persistent", "PlanError", "ReduceOp",
    "RegistrationError", "UniqueId", "Work", "__version__", "from_mpi", "get_unique_id", "init",
]  # fmt: skip

if not _TYPE_CHECKING:  # to which any name would be one of ours, then

    def __getattr__(name: str) -> object:
        from .runtime.hints import missing

        raise missing(name, vars(Communicator))
