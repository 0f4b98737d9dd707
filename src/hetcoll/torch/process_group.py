"""A process group of torch on a `hetcoll.Communicator`.

What torch calls is in three parts: collectives (`collectives.py`), point to point (`messages.py`) and what is here:
how a group comes to be, is asked about, and ends. Each call becomes calls of the communicator, which `launch.py` runs
blocking, in the background or on a GPU's stream, as the call's options say.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._dynamo import eval_frame

from .. import Communicator, lifetime
from ..config.env import configuration
from ..rendezvous.bootstrap import get_unique_id
from ..rendezvous.protocol.unique_id import UniqueId, hosted_here
from ..rendezvous.session import Session
from ..types import Format
from . import barriers
from .collectives import Collectives
from .connect import connect, join
from .launch import Place
from .messages import Messages
from .names import DEVICES, NAME
from .options import asked_format
from .tensors import seconds
from .work import Bundle, HostWork, StreamWork, ToSelf


class HetcollProcessGroup(Collectives, Messages):
    """What `torch.distributed.init_process_group("hetcoll")` makes; scripts use it through `torch.distributed`.

    `comm` is the communicator beneath it, for what torch has no words for: `explain`, `counters`, `topology`.
    """

    def __init__(
        self, comm: Communicator | Place, store: dist.Store, timeout: float, compress: Format | None = None
    ) -> None:
        super().__init__(comm, store, timeout, compress)
        self._name, self._description = "", "undefined"
        self._session = None if isinstance(comm, Place) else comm.session
        self._first_store = store
        self._handle: UniqueId | None = None
        self._inner = Inner(self)
        for device in DEVICES:
            # None: what this class does not override fails in torch's dispatcher, and never runs on something else.
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, None)
        lifetime.watch(self)

    @classmethod
    def make(cls, options: Any, ours: object = None) -> HetcollProcessGroup:
        """The group that torch describes by its `_DistributedBackendOptions`; all its ranks call this. With
        `enable_reconfigure` nobody is waited for: who they are `reconfigure` tells."""
        timeout, compress = seconds(options.timeout) or 0.0, asked_format(ours)
        if getattr(options, "enable_reconfigure", False):  # since PyTorch 2.14
            return cls(Place(options.group_rank, options.group_size), options.store, timeout, compress)
        comm = connect(options.store, options.group_rank, options.group_size, timeout, job_session(), compress)
        return cls(comm, options.store, timeout, compress)

    # What torch asks. It calls the names in camel case from C++.

    def getBackendName(self) -> str:  # noqa: N802
        return NAME  # also where it replaces another: torch's C++ casts what is called gloo or nccl to these

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def get_group_store(self) -> dist.Store:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in DEVICES:
            raise RuntimeError(f"device: wanted {' or '.join(DEVICES)}, got {device}")
        return self._inner

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        return

    def _set_sequence_number_for_group(self) -> None:
        return

    def _get_sequence_number_for_group(self) -> int:
        """How many operations this rank has called."""
        return self._records.count

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations that bring none of their own."""
        self._timeout = seconds(timeout) or self._timeout

    def get_error(self) -> c10d.ErrorType:
        """What the group has failed with, without blocking."""
        return self._error_type()

    def dump(self) -> list[dict[str, Any]]:
        """The last calls, oldest first: number, operation, tensors, when they started (time.time) and their state.

        Comparing the ranks' dumps shows which call one of them has not made. Never blocks.
        """
        return self._records.dump()

    # Other groups.

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
        *,
        compress: Format | None = None,
    ) -> HetcollProcessGroup | None:
        """A group of these ranks of this one, which all call it; None on ranks that are not among them.

        `compress`: in place of this group's.
        """
        if self.rank() not in new_ranks:
            return None
        limit = seconds(timeout) or self._timeout
        store = dist.PrefixStore(f"{group_name or sorted(new_ranks)}/", self._store)
        rank, session = list(new_ranks).index(self.rank()), self._session
        compress = self._compress if compress is None else compress
        comm = connect(store, rank, len(new_ranks), limit, session, compress)
        made = type(self)(comm, store, limit, compress)
        made.setGroupName(group_name or "")
        made.setGroupDesc(group_desc or f"{self._description}:split")
        if self.bound_device_id is not None:
            made.bound_device_id = self.bound_device_id
        return made

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """See `torch.distributed.monitored_barrier`: rank 0 says which ranks did not come; nothing else fails."""
        limit = self._timeout if timeout is None else timeout.total_seconds()
        barriers.monitored(self._store, self.rank(), self.size(), limit, wait_all_ranks)

    # Other ranks, as torch has it since PyTorch 2.14. It reads and calls these by their names.

    supports_reconfigure = True

    def get_reconfigure_handle(self) -> str:
        """What others are to be told of this rank before they all call `reconfigure`. It is good for one call, and
        contains a key: who has it can join the group."""
        if self._handle is None:
            self._handle = get_unique_id(configuration())
        return str(self._handle)

    def reconfigure(self, opts: Any) -> dist.Work:
        """`torch.distributed._reconfigure`: from now on the group's ranks are those of ``opts.handles``, in that order,
        or in any order of theirs where they are a set. Each of them calls this with the same, and waits for all.

        What is under way on this group fails, and so do calls of ranks that are left out. `hetcoll.InitError` where
        somebody does not come within ``opts.timeout``, the group's without one: then it takes new handles.
        """
        handles = sorted(opts.handles) if isinstance(opts.handles, set) else list(opts.handles)
        mine = None if self._handle is None else str(self._handle)
        if mine is None or sorted({*handles, mine}) != sorted(handles):
            raise ValueError(
                f"handles: wanted one of each rank, and this rank's latest get_reconfigure_handle(), got {len(handles)}"
                f" of which {len({*handles})} differ and {handles.count(mine)} is of this rank"
            )
        unique_id, limit = UniqueId.parse(handles[0]), seconds(opts.timeout) or self._timeout
        place = Place(handles.index(mine), len(handles))
        self._leave()
        if place.rank > 0:
            self._let_go_of_handle()
        self._handle = None
        comm = join(unique_id, *place, limit, self._compress)
        self._store = dist.PrefixStore(f"{opts.uuid}/", self._first_store)
        self._place, self._session, self._last_failure = place, comm.session, None
        self._comms.append(comm)
        if self.bound_device_id is not None:
            self.prepare(self.bound_device_id)
        return Bundle([], [])

    def _leave(self) -> None:
        """Whoever the ranks are, they are no more."""
        for sources in self._sources.values():
            sources.leave()
        for comm in self._comms:
            comm.close()
        for sources in self._sources.values():
            sources.close()
        # torch may keep the group until the process ends, as its caches of device meshes do: not the engine with it.
        self._last_failure = self._failure()
        self._comms.clear()
        self._sources.clear()

    def _let_go_of_handle(self) -> None:
        """Nobody joins the job that it is of."""
        if self._handle is not None and (here := hosted_here(self._handle.job_id)) is not None:
            here.retire()
        self._handle = None

    # The end.

    def shutdown(self) -> None:
        """End the group. Does not wait for other ranks; operations in flight fail."""
        self.close()

    def close(self) -> None:
        """See `shutdown`. More than once is fine."""
        lifetime.forget(self)
        self._leave()
        self._let_go_of_handle()
        self._futures.close()
        self._in_use.clear()

    def abandon(self) -> None:
        """In a forked child: the communicator looks after itself, and the threads are not there."""

    def abort(self) -> None:
        """Fail every operation in flight, here at once and soon on the other ranks. Never blocks."""
        for comm in self._comms:
            comm.abort("torch.distributed")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} rank {self.rank()} of {self.size()}>"


class Inner:
    """What `ProcessGroup._get_backend` answers: the questions that torch asks a group's backend for one device.

    There is no backend in torch's sense, whose C++ class can only be subclassed by code built for one version of torch.
    """

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False
    supports_shrinking = True

    def __init__(self, group: HetcollProcessGroup) -> None:
        self._group = group

    @property
    def options(self) -> Any:
        return c10d.Backend.Options(NAME, timedelta(seconds=self._group._timeout))

    def name(self) -> str:
        return NAME

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def get_error(self) -> c10d.ErrorType:
        return self._group.get_error()

    def abort(self) -> None:
        self._group.abort()

    def shutdown(self) -> None:
        self._group.shutdown()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        self._group._set_sequence_number_for_group()

    def shrink(self, excluded: Sequence[int], flags: int, options: object) -> HetcollProcessGroup:
        """`torch.distributed.shrink_group`: the group of all other ranks, which all call it; these need not be there.

        Whatever this group has failed with does not matter. What is under way on it ends only with SHRINK_ABORT.
        """
        if flags & dist.distributed_c10d.SHRINK_ABORT:
            self._group.abort()
        left = [rank for rank in range(self._group.size()) if rank not in excluded]
        made = self._group.split_group(left, compress=asked_format(options))
        assert made is not None  # torch lets no excluded rank come here
        return made

    def perform_nocolor_split(self, device: torch.device) -> None:
        """For ranks that will not be in a group made from this one: they have no part in it here."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """``device_id=`` of `init_process_group`: set the GPU up now, on all ranks, where these are known."""
        self._group.bound_device_id = device
        if self._group._comms:
            self._group.prepare(device)


def _hide_from_compiler() -> None:
    """torch.compile traces Python that C++ calls within a compiled region, as DistributedDataParallel's does: not us.

    (`torch.compiler.disable` does the same, but loads the compiler, which takes seconds.)
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for kind in (Collectives, Messages, HetcollProcessGroup, HostWork, StreamWork, Bundle, ToSelf):
        for method in vars(kind).values():
            if hasattr(method, "__code__"):
                eval_frame.set_code_exec_strategy(method.__code__, skip)


_hide_from_compiler()


def job_session() -> Session | None:
    """This process's membership in the job, where torch's default group is one of ours: all ranks have it, or none."""
    world = dist.group.WORLD
    return world._session if isinstance(world, HetcollProcessGroup) else None
