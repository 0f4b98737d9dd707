"""The ways of pieces from one rank to another that serving.py measures: each class is one of two ranks of a library.

A cache has `Shape.total` pieces; put k of those that are under way together has the k-th part of them. `move` is what
is timed: so often, each part. It returns on rank `clock` when all pieces are there. Where the library lets it, the next
put begins when the oldest of those under way is over.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from launched import Meeting
from serving_caches import Cache, Shape, gpu

SECONDS = 300
NIXL = ("nixl_cu13", "nixl_cu12")


def present(modules: Sequence[str]) -> str | None:
    """The first of them that this Python has."""
    return next((name for name in modules if importlib.util.find_spec(name)), None)


class Way:
    """One rank's side."""

    clock = 0

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        lies = name.split()[-1].split(">") if ">" in name else ["cpu", "cpu"]
        self.on_gpu = lies[rank] == "gpu"
        self.cache: Any = None
        self._meeting = Meeting(rank, Path(os.environ["BENCH_FOLDER"]), SECONDS)

    def prepare(self, shape: Shape) -> None:
        """Make caches of another shape."""
        if self.cache is not None:
            self.cache.free()
        self.shape = shape
        self.source, self.target = shape.places()
        self.cache = Cache(self.rank, shape.nbytes, self.on_gpu)

    def parts(self) -> list[slice]:
        """Of each put."""
        return [slice(at, at + self.shape.pieces) for at in range(0, self.shape.total, self.shape.pieces)]

    def fill(self, values: Any) -> None:
        self.cache.set(values)

    def came(self) -> Any:
        return self.cache.get()

    def meet(self) -> None:
        self._meeting.exchange()

    def move(self, repeats: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Hetcoll(Way):
    def __init__(self, rank: int, name: str) -> None:
        super().__init__(rank, name)
        import hetcoll

        self._comm, self._direct = hetcoll.init(), 0
        self._window: Any = None

    def prepare(self, shape: Shape) -> None:
        if self._window is not None:
            self.meet()
            self._window.close()
            self.meet()
        super().prepare(shape)
        offers = self.rank == 1 or "direct" in self.name
        self._window = self._comm.window(self.cache.array if offers else None)
        self._came = 0
        piece = shape.piece
        self._puts = [(self.target[at] * piece, self.source[at] * piece) for at in self.parts()]

    def meet(self) -> None:
        self._comm.barrier()

    def move(self, repeats: int) -> None:
        self._came += repeats * self.shape.depth
        if self.rank == 1:
            self._window.wait_signal(0, self._came)
            return
        put, cache, piece = self._window.put, self.cache.array, self.shape.piece
        works: deque[Any] = deque()
        for to, at in repeats * self._puts:
            if len(works) == self.shape.depth:
                works.popleft().wait()
            works.append(put(cache, 1, to, src_offset=at, count=piece, signal=0, async_op=True))
        for work in works:
            work.wait()

    def came(self) -> Any:
        before, self._direct = self._direct, self._comm.counters()["window_direct"]
        assert (self._direct > before) == ("direct" in self.name), "they went another way"
        return super().came()

    def close(self) -> None:
        self._comm.barrier()
        self._window.close()
        self._comm.close()


class Torch(Way):
    """`batch_isend_irecv`, one for each put: NCCL's pieces lie on GPUs; Gloo's are copied out of pinned memory and
    into it, where the caches are GPUs'."""

    def __init__(self, rank: int, name: str) -> None:
        super().__init__(rank, name)
        import torch
        import torch.distributed as dist

        self._nccl = name.startswith("nccl")
        self._torch, self._dist = torch, dist
        self._device = torch.device("cuda", rank % torch.cuda.device_count()) if ">" in name else torch.device("cpu")
        dist.init_process_group("nccl" if self._nccl else "gloo", **({"device_id": self._device} if self._nccl else {}))

    def prepare(self, shape: Shape) -> None:
        self.shape = shape
        self.source, self.target = shape.places()
        torch, on_gpu = self._torch, self._device.type == "cuda"
        self._done = torch.zeros(1, device=self._device if self._nccl else "cpu")
        self._there = torch.zeros(shape.total, shape.piece, dtype=torch.uint8, device=self._device)
        self._rows = self._there
        if on_gpu and not self._nccl:
            self._rows = torch.zeros(shape.total, shape.piece, dtype=torch.uint8, pin_memory=True)

    def fill(self, values: Any) -> None:
        if isinstance(values, int):
            self._there.fill_(values)
        else:
            self._there.copy_(self._torch.from_numpy(values).view_as(self._there))

    def came(self) -> Any:
        return self._there.cpu().numpy().reshape(-1)

    def meet(self) -> None:
        self._dist.barrier()
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)

    def move(self, repeats: int) -> None:
        for _ in range(repeats):
            self._move()

    def _move(self) -> None:
        dist, rows = self._dist, self._rows
        if self.rank == 0 and rows is not self._there:
            rows.copy_(self._there)
        order, call = (self.source, dist.isend) if self.rank == 0 else (self.target, dist.irecv)
        works = []
        for part in self.parts():
            works += dist.batch_isend_irecv([dist.P2POp(call, rows[at], 1 - self.rank) for at in order[part]])
        for work in works:
            work.wait()
        if self.rank == 1 and rows is not self._there:
            self._there.copy_(rows)
            self._synchronize()
        # As a put is over when its data is there.
        if self.rank == 0:
            dist.recv(self._done, 1)
        else:
            dist.send(self._done, 0)
        self._synchronize()

    def close(self) -> None:
        self._dist.destroy_process_group()


class Nixl(Way):
    """Prepared WRITEs of the pieces of each put with a notification, which both ranks poll for, as vLLM's connector
    does."""

    def __init__(self, rank: int, name: str) -> None:
        super().__init__(rank, name)
        if self.on_gpu:
            gpu(rank).activate()
        api = importlib.import_module(f"{present(NIXL)}._api")
        self._agent = api.nixl_agent(str(rank), api.nixl_agent_config(backends=["UCX"]))
        self._kind = "VRAM" if self.on_gpu else "DRAM"
        self._registered: Any = None
        self._due = 0  # notifications
        self._puts: list[Any] = []

    def prepare(self, shape: Shape) -> None:
        agent = self._agent
        if self._registered is not None:
            self.meet()
            if self.rank == 0:
                for put in self._puts:
                    agent.release_xfer_handle(put)
                agent.remove_remote_agent("1")
            self.meet()
            agent.deregister_memory(self._registered)
        super().prepare(shape)
        mine = self.cache.array.ptr if self.on_gpu else self.cache.array.ctypes.data
        index = gpu(self.rank).index if self.on_gpu else 0
        self._registered = agent.register_memory([(mine, shape.nbytes, index, "")], self._kind)
        told = self._meeting.exchange(agent.get_agent_metadata())
        there, its = map(int, self._meeting.exchange(f"{mine} {index}".encode()).split())
        if self.rank == 1:
            return
        agent.add_remote_agent(told)
        here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._descriptors(mine, index), self._kind)
        far = agent.prep_xfer_dlist("1", self._descriptors(there, its), self._kind)
        self._puts = [
            agent.make_prepped_xfer("WRITE", here, self.source[at].astype(np.int32), far,
                                    self.target[at].astype(np.int32), f"{number}".encode())
            for number, at in enumerate(self.parts())
        ]  # fmt: skip

    def _descriptors(self, address: int, index: int) -> Any:
        total, piece = self.shape.total, self.shape.piece
        rows = [address + np.arange(total) * piece, np.full(total, piece), np.full(total, index)]
        return np.stack(rows, 1).astype(np.uint64)

    def move(self, repeats: int) -> None:
        agent = self._agent
        if self.rank == 1:
            self._due += repeats * self.shape.depth
            while self._due > 0:
                self._due -= sum(map(len, agent.get_new_notifs().values()))
            return
        flying: deque[Any] = deque()
        for put in repeats * self._puts:
            if len(flying) == self.shape.depth:
                self._await(flying.popleft())
            assert agent.transfer(put) != "ERR"
            flying.append(put)
        for put in flying:
            self._await(put)

    def _await(self, put: Any) -> None:
        while (state := self._agent.check_xfer_state(put)) == "PROC":
            pass
        assert state == "DONE", state

    def close(self) -> None:
        self.meet()
        os._exit(0)  # it may crash when it is taken down


class PinnedCopy(Way):
    """What the sender's GPU copies to pinned memory in one piece."""

    def prepare(self, shape: Shape) -> None:
        super().prepare(shape)
        self._device = gpu(self.rank)
        self._stream = self._device.stream()

    def move(self, repeats: int) -> None:
        cache, device = self.cache, self._device
        for part in repeats * self.parts() if self.rank == 0 else ():
            at = part.start * self.shape.piece
            device.copy(cache._pinned + at, cache.array.ptr + at, self.shape.pieces * self.shape.piece, self._stream)
        device.synchronize(self._stream)

    def came(self) -> Any:
        return None


class GpuCopy(Way):
    """What the receiver's GPU reads of the sender's cache in one piece for each put, mapped as a put's is."""

    clock = 1
    _theirs = 0

    def prepare(self, shape: Shape) -> None:
        device = self._device = gpu(self.rank)
        if self._theirs:
            device.close_ipc(self._theirs)
        if self.cache is not None:
            self.meet()
        super().prepare(shape)
        with device.active():
            handle = self._meeting.exchange(device.ipc_handle(device.pointer(self.cache.array.ptr).base))
            if self.rank == 1:
                self._theirs, self._stream = device.open_ipc(handle), device.stream()

    def move(self, repeats: int) -> None:
        nbytes = self.shape.pieces * self.shape.piece
        if self.rank == 0:
            return
        for part in repeats * self.parts():
            at = part.start * self.shape.piece
            self._device.copy(self.cache.array.ptr + at, self._theirs + at, nbytes, self._stream)
            if self.shape.depth == 1:
                self._device.synchronize(self._stream)
        self._device.synchronize(self._stream)

    def came(self) -> Any:
        """As if the pieces had come to their places."""
        rows = self.cache.get().reshape(self.shape.total, self.shape.piece)
        found = np.empty_like(rows)
        found[self.target] = rows[self.source]
        return found.reshape(-1)


class Socket(Way):
    """What the link can do: the bytes as they lie, in one stream."""

    def __init__(self, rank: int, name: str) -> None:
        super().__init__(rank, name)
        path = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if rank == 0:
            with socket.create_server(path) as server:
                self._link = server.accept()[0]
            return
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                self._link = socket.create_connection(path)
                return
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def move(self, repeats: int) -> None:
        memory = memoryview(self.cache.array)
        for _ in range(repeats):
            if self.rank == 0:
                self._link.sendall(memory)
                assert self._link.recv(1) == b"x"
                continue
            at = 0
            while at < len(memory):
                at += self._link.recv_into(memory[at:])
            self._link.sendall(b"x")

    def came(self) -> Any:
        return None


WAYS: dict[str, type[Way]] = {
    "socket": Socket, "gloo": Torch, "nccl": Torch, "nixl": Nixl, "hetcoll": Hetcoll, "pinned": PinnedCopy,
    "gpu": GpuCopy,
}  # fmt: skip
