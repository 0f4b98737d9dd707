"""NIXL's `nixl_agent` (1.5) over hetcoll's one-sided messages: for programs that move data by it, between any ranks.

    from hetcoll.serving.nixl import nixl_agent, nixl_agent_config

Each agent is a rank of one job, and made by all ranks together: that of `hetcoll.init()`, or `comm` of the
configuration. Memory is registered by each for itself, at any time, and others hear of it by metadata, as there.

What is not here is an `ArgumentError`: files, blocks and objects; metadata by sockets or etcd (give the bytes of
`get_agent_metadata` to `add_remote_agent`); costs, telemetry and memory views.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Self

import numpy as np

import hetcoll

from ... import ArgumentError, HetcollError, Work
from ...calls.buffers import Buffer
from ...runtime.offsets import MOST_PIECES
from ..layouts import whole_numbers
from . import descriptors, handles
from .descriptors import Descriptors, Region, Rows
from .handles import check_backends, nixl_agent_config, nixl_prepped_dlist_handle, nixl_xfer_handle
from .mappings import Mappings
from .notifications import Notifications

__all__ = ["nixl_agent", "nixl_agent_config", "nixl_prepped_dlist_handle", "nixl_xfer_handle"]

_OPERATIONS = {"WRITE": False, "READ": True}


class nixl_agent:  # noqa: N801  # as there
    """See the module. A context manager, or `close` it: a rank that ends without is lost to the others."""

    def __init__(
        self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False
    ) -> None:
        self.name = handles.check_name(agent_name)
        comm = handles.comm_of(nixl_conf)
        self._owns = comm is None
        self._comm = hetcoll.init() if comm is None else comm
        with contextlib.ExitStack() as undo:
            if self._owns:
                undo.callback(self._comm.close)
            self._meet()
            undo.pop_all()

    def _meet(self) -> None:
        mine = [self.name, secrets.token_hex(8)]
        told = [json.loads(blob) for blob in self._comm._core.meet("nixl_agent()", json.dumps(mine).encode())]
        self._names, self._job = [name for name, _ in told], told[0][1]
        if len(set(self._names)) < len(self._names):
            raise ArgumentError(f"agent_name: wanted one of its own for each rank, got {self._names}")
        self._notifications = Notifications(self._comm, lambda peer, message: self._mappings.hear(peer, message))
        self._side = self._notifications.side
        self._mappings = Mappings(self._side, lambda peer, message: self._notifications.post(peer, message, inner=True))
        self._come: dict[int, list[bytes]] = {}
        self._regions: dict[int, Region] = {}
        self._buffers: dict[int, Buffer] = {}
        self._remote: dict[int, list[Region]] = {}
        self._flying: list[nixl_xfer_handle] = []
        self.notifs: dict[str, list[bytes]] = {}

    def close(self) -> None:
        """Take all memory back, and leave. Waits for transfers that are at it, since the communicator stays open."""
        deadline = time.monotonic() + self._side.core.config.timeout
        for work in [] if self._owns else [work for handle in self._flying for work in handle._works or ()]:
            with contextlib.suppress(HetcollError):
                work.wait(max(deadline - time.monotonic(), 1e-3))
        for number in list(self._regions):
            self._close_region(number)
        self._mappings.close()
        self._notifications.close()
        if self._owns:
            self._comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # What there is.

    def get_plugin_list(self) -> list[str]:
        return ["HETCOLL"]

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        check_backends([backend])
        return ["DRAM", "VRAM"]

    get_backend_mem_types = get_plugin_mem_types

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:  # noqa: N803  # as there
        check_backends([backend])

    def make_connection(self, remote_agent: str | bytes, backends: Sequence[str] = ()) -> None:
        """All ranks are connected from the start."""
        self._rank_of(remote_agent)

    # Memory.

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> Descriptors:
        return descriptors.read(descs, mem_type)

    get_xfer_descs = get_reg_descs

    def register_memory(self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()) -> Descriptors:
        """Open it for the other agents. What it belongs to is the program's to keep until `deregister_memory`."""
        check_backends(backends)
        descs = descriptors.read(reg_list, mem_type)
        buffers = [descriptors.memory_at(descs.memory, row) for row in descs.rows]
        for buffer in buffers:  # all of them, or none
            if buffer.device != "cpu":
                self._side.devices.copies(buffer, "reg_list")
        for buffer in buffers:
            number, on_gpu = next(self._side.own_numbers), buffer.device != "cpu"
            self._side.core.engine.add_window(number, buffer.ptr, buffer.nbytes, 0, on_gpu)
            shared = self._mappings.share(number, buffer) if on_gpu else None
            self._regions[number] = Region(number, descs.memory, buffer.ptr, buffer.nbytes, shared)
            self._buffers[number] = buffer
        return descs

    def deregister_memory(self, dereg_list: Descriptors, backends: Sequence[str] = ()) -> None:
        """When it returns nothing touches the memory any more. What comes later is an ERR for who sent it.
        ArgumentError, and nothing is deregistered, while a transfer of this agent's is at it."""
        check_backends(backends)
        descs = descriptors.read(dereg_list, None)
        gone: list[int] = []
        under_way = [each for each in self._flying if any(not work.done for work in each._works or ())]
        used = {own for handle in under_way for own, _, _ in handle._parts}
        for address, nbytes, _ in descs:
            wanted = (descs.memory, address, nbytes)
            left = [each.number for each in self._regions.values() if each.place == wanted and each.number not in gone]
            if not left:
                raise ArgumentError(f"dereg_list: wanted registered memory, got {nbytes} bytes at {address:#x}")
            if left[0] in used:
                raise ArgumentError(f"dereg_list: wanted memory that no transfer is at, got that at {address:#x}")
            gone.append(left[0])
        for number in gone:
            self._close_region(number)

    def _close_region(self, number: int) -> None:
        self._side.core.engine.close_window(number)
        self._side.devices.settle(number)
        self._mappings.closed(number)
        del self._regions[number], self._buffers[number]

    # Metadata.

    def get_agent_metadata(self) -> bytes:
        return self.get_partial_agent_metadata(None)

    def get_partial_agent_metadata(
        self, descs: Descriptors | None, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        check_backends(backends)
        named = None if descs is None else descriptors.read(descs, None)
        wanted = None if named is None else {(named.memory, address, nbytes) for address, nbytes, _ in named}
        regions = [each for each in self._regions.values() if wanted is None or each.place in wanted]
        return json.dumps({"job": self._job, "agent": self.name, "regions": regions}).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Its name, as bytes as there. More metadata of an agent that is known adds to what is."""
        try:
            told = json.loads(metadata)
            regions = [Region._make([*each, shared and tuple(shared)]) for *each, shared in told["regions"]]
            job, name = told["job"], told["agent"]
        except (ValueError, TypeError, KeyError) as error:
            raise ArgumentError(f"metadata: wanted that of an agent of hetcoll, got {metadata!r:.60}") from error
        if job != self._job or name not in self._names:
            raise ArgumentError(
                f"metadata: wanted that of an agent of this job, {self._names}, got {name!r} of another"
            )
        peer = self._names.index(name)
        # Memory that was registered anew has a new number, which goes before those that its place had earlier.
        self._remote[peer] = sorted({*self._remote.get(peer, ()), *regions}, key=lambda each: each.number)
        return str(name).encode()

    def remove_remote_agent(self, agent: str | bytes) -> None:
        self._remote.pop(self._rank_of(agent), None)

    def check_remote_metadata(self, agent: str | bytes, descs: Descriptors | None = None) -> bool:
        peer = self._rank_of(agent)
        if peer not in self._remote or descs is None:
            return peer in self._remote
        return bool((descriptors.place(descriptors.read(descs, None), self._remote[peer])[0] >= 0).all())

    def get_serialized_descs(self, descs: Descriptors) -> bytes:
        return descriptors.read(descs, None).to_bytes()

    def deserialize_descs(self, serialized_descs: bytes) -> Descriptors:
        return Descriptors.from_bytes(serialized_descs)

    # Transfers.

    def prep_xfer_dlist(
        self, agent_name: str | bytes, xfer_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixl_prepped_dlist_handle:
        check_backends(backends)
        descs, name = descriptors.read(xfer_list, mem_type), handles.as_text(agent_name)
        if name in handles.SELF:
            return self._prepare(None, descs, self._regions.values(), "this agent")
        peer = self._rank_of(name)
        own = self._regions.values() if peer == self._comm.rank else self._remote.get(peer, ())
        return self._prepare(peer, descs, own, f"{name}, as far as its metadata came")

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        check_backends(backends)
        if operation not in _OPERATIONS:
            raise ArgumentError(f"operation: wanted WRITE or READ, got {operation!r}")
        peer = handles.check_sides(local_xfer_side, remote_xfer_side)
        here, there = whole_numbers(local_indices, "local_indices"), whole_numbers(remote_indices, "remote_indices")
        if len(here) != len(there) or not 0 < len(here) <= MOST_PIECES:
            wanted = f"as many local as remote ones, 1 to {MOST_PIECES}"
            raise ArgumentError(f"descriptors: wanted {wanted}, got {len(here)} and {len(there)}")
        for side, at, name in ((local_xfer_side, here, "local"), (remote_xfer_side, there, "remote")):
            if at.min() < 0 or at.max() >= len(side.descs):
                raise ArgumentError(f"{name}_indices: wanted 0 to {len(side.descs) - 1}, got {at.min()} to {at.max()}")
        lengths = local_xfer_side.descs.rows[here, 1]
        if (lengths != remote_xfer_side.descs.rows[there, 1]).any():
            raise ArgumentError("descriptors: wanted each remote one as long as its local one")
        rows = np.stack([local_xfer_side.offsets[here], remote_xfer_side.offsets[there], lengths], axis=-1)
        pairs = np.stack([local_xfer_side.regions[here], remote_xfer_side.regions[there]], axis=-1)
        parts = [
            (int(own), int(other), np.ascontiguousarray(rows[(pairs == (own, other)).all(axis=1)]))
            for own, other in np.unique(pairs, axis=0)
        ]
        return nixl_xfer_handle(self, _OPERATIONS[operation], peer, parts, handles.as_bytes(notif_msg))

    def initialize_xfer(
        self,
        operation: str,
        local_descs: Descriptors,
        remote_descs: Descriptors,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        here, there = self.prep_xfer_dlist("", local_descs), self.prep_xfer_dlist(remote_agent, remote_descs)
        every = np.arange(len(here.descs)), np.arange(len(there.descs))
        return self.make_prepped_xfer(operation, here, every[0], there, every[1], notif_msg, backends)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes | str = b"") -> str:
        """Its state: `check_xfer_state`."""
        if handles.check_handle(handle)._works is not None and self.check_xfer_state(handle) == "PROC":
            raise ArgumentError("transfer: wanted a transfer that is over, got one in flight")
        if any(own not in self._buffers for own, _, _ in handle._parts):
            raise ArgumentError("transfer: wanted registered memory here, got some that was deregistered")
        handle._notif = handles.as_bytes(notif_msg) or handle._notif
        handle._works, handle.error = [], None
        handle._told, handle._over = not handle._notif, False
        try:
            for own, number, rows in handle._parts:
                handle._works.append(self._begin(handle, own, number, rows))
        except HetcollError as error:
            handle.error = error
        self._flying.append(handle)
        return self.check_xfer_state(handle)

    def _begin(self, handle: nixl_xfer_handle, own: int, number: int, rows: Rows) -> Work:
        side, peer, buffer = self._side, handle._peer, self._buffers[own]
        side.core.host.check_usable()
        device, after = side.devices.reach(buffer, "descs", None)
        if device:
            self._map_for(handle._gets, own, peer, number)
        ticket = side.core.engine.transfer(handle._gets, number, peer, buffer.ptr, rows, -1, device, after, own)
        what = f"{'READ from' if handle._gets else 'WRITE to'} agent {self._names[peer]} of {len(rows)} descriptors"
        begun: Work = side.begun(ticket, buffer, what, True, side.core.config.timeout)
        return begun

    def _map_for(self, gets: bool, own: int, peer: int, number: int) -> None:
        """Have what is to be read mapped by the reader's GPU, where it can."""
        theirs = next((each for each in self._remote.get(peer, ()) if each.number == number), None)
        if peer == self._comm.rank or theirs is None or theirs.shared is None:
            return
        if gets:
            self._mappings.map(peer, number, theirs.shared, theirs.nbytes)
        else:
            self._mappings.offer(peer, own)

    def _progress(self) -> None:
        """Tell of what is over, also where the program only looks for what others tell; and take what these do."""
        self._notifications.take(self._come)
        self._flying = [each for each in self._flying if self._state(each) == "PROC"]

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """DONE, PROC, or ERR: then the handle's `error` says why."""
        if handles.check_handle(handle)._works is None:
            raise ArgumentError("check_xfer_state: wanted a transfer that was posted")
        self._progress()
        return self._state(handle)

    def _state(self, handle: nixl_xfer_handle) -> str:
        assert handle._works is not None
        while handle._works:
            try:
                if not handle._works[0].done:
                    return "PROC"  # also where another part has failed: the memory of this one is in use
                handle._works[0].wait()
            except HetcollError as error:
                handle.error = handle.error or error
            handle._works.pop(0)
        try:
            if not handle._over and handle.error is None:
                if not handle._told:
                    handle._told = True
                    self._notifications.post(handle._peer, handle._notif)
                handle._over = not handle._notif or self._notifications.pump(handle._peer)
        except HetcollError as error:
            handle.error = error
        return "ERR" if handle.error is not None else "DONE" if handle._over else "PROC"

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        return "HETCOLL"

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        handles.check_handle(handle).release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    # Notifications.

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        check_backends(backends)
        self._progress()
        come, self._come = self._come, {}
        return {self._names[sender]: messages for sender, messages in come.items()}

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        for name, messages in self.get_new_notifs(backends).items():
            self.notifs.setdefault(name, []).extend(messages)
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str | bytes,
        lookup_tag: bytes,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        tag = handles.as_bytes(lookup_tag, "lookup_tag")
        held = self.update_notifs(backends).get(handles.as_text(remote_agent_name), [])
        for at, message in enumerate(held):
            if message.startswith(tag) if tag_is_prefix else tag in message:
                del held[at]
                return True
        return False

    def send_notif(self, remote_agent_name: str | bytes, notif_msg: bytes | str, backend: str | None = None) -> None:
        """Returns when it is under way; what finds the peer's ring full goes on with the next call for that peer."""
        check_backends([] if backend is None else [backend])
        self._notifications.post(self._rank_of(remote_agent_name), handles.as_bytes(notif_msg))

    # What there is not.

    def _refuse(self, *arguments: object, **options: object) -> NoReturn:
        raise ArgumentError(
            "wanted one of the calls that hetcoll.serving.nixl has: metadata goes by get_agent_metadata and"
            " add_remote_agent, and there are no costs, telemetry, views or storage"
        )

    send_local_metadata = fetch_remote_metadata = invalidate_local_metadata = send_partial_agent_metadata = _refuse
    estimate_xfer_cost = get_xfer_telemetry = query_memory = get_remote_descs = _refuse
    prep_mem_view = release_mem_view = get_plugin_params = get_backend_params = _refuse

    def _rank_of(self, name: str | bytes) -> int:
        if handles.as_text(name) not in self._names:
            raise ArgumentError(f"agent: wanted one of {self._names}, got {handles.as_text(name)!r}")
        return self._names.index(handles.as_text(name))

    def _prepare(
        self, peer: int | None, descs: Descriptors, regions: Iterable[Region], whose: str
    ) -> nixl_prepped_dlist_handle:
        numbers, offsets = descriptors.place(descs, regions)
        if (numbers < 0).any():
            address, nbytes, _ = descs[int((numbers < 0).argmax())]
            raise ArgumentError(
                f"descs: wanted registered {descs.memory} of {whose}, got {nbytes} bytes at {address:#x}"
            )
        return nixl_prepped_dlist_handle(peer, descs, numbers, offsets)
