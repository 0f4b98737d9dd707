"""Memory that devices may read and write where it lies: which is registered, for how long, and with which keys.

Registering pins pages and takes milliseconds for a few MiB, so it is done once for memory that is used again. An
interval that lies inside a registered one costs nothing. User memory stays registered, and the object that owns it
alive, as long as somebody holds a `Lease` of it. Blocks that came from here (`empty`) stay registered when they are
given back, up to a bound, for the next array.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ...errors import ArgumentError, DeviceError, RegistrationError
from ...vendors.devices.base import Device as Gpu
from .devices import Device

log = logging.getLogger("hetcoll")

MOST_INTERVALS = 1024
MOST_IDLE = 256 << 20  # bytes of blocks that nobody uses
LEAST = 16 << 10  # bytes; smaller arrays are copied faster than they are registered
_PAGE = mmap.PAGESIZE
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Registrar(Protocol):
    """The engine's part: what it is told of memory."""

    def register_memory(
        self, address: int, nbytes: int, keys: Sequence[tuple[int, int, int]], seen_at: int | None = None
    ) -> int: ...
    def unregister_memory(self, handle: int) -> bool: ...


class _Entry:
    """A registered interval. `owner` is kept alive, since stale pages must never be found at a used address; an mmap
    is a block of ours."""

    def __init__(self, start: int, nbytes: int, seen_at: int | None, regions: list[Any], owner: Any) -> None:
        self.start, self.stop, self.nbytes, self.seen_at = start, start + nbytes, nbytes, seen_at
        self.regions, self.owner, self.users = regions, owner, 0
        self.handles: list[int] = []  # by engine


class Lease:
    """One use of a registered interval."""

    def __init__(self, memory: Memory, entry: _Entry) -> None:
        self._memory, self._entry = memory, entry
        self._closed = False

    def close(self) -> None:
        """Give it back. ArgumentError while an operation in flight uses the memory; then it stays. More than once is
        fine."""
        if not self._closed:
            self._memory.give_back(self._entry)
            self._closed = True


class _Loan:
    """What an array of ours is made from: its end is the end of the array and all of its views."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class Memory:
    """One communicator's registered memory, known to all of `ports`: devices with the engine's numbers of their ports,
    and to the engines that `follow`.

    `counters`: ``registered`` and ``unregistered`` intervals, ``hits``, ``evicted`` blocks, ``refused`` arrays, and now
    ``intervals``, ``bytes``, ``idle_bytes``.
    """

    least = LEAST

    def __init__(self, engine: Registrar, ports: Sequence[tuple[Device, int]]) -> None:
        self._engines, self._ports = [engine], ports
        self._entries: list[_Entry] = []
        self._idle: deque[_Entry] = deque()  # the longest unused first
        self._ended: deque[_Entry] = deque()  # whose arrays are gone; filled by the garbage collector, at any time
        self._lock = threading.Lock()
        self._closed = False
        self._counts: Counter[str] = Counter()

    @property
    def ports(self) -> list[tuple[str, int]]:
        """Names of the devices, and the numbers that engines have for their ports."""
        return [(device.name, number) for device, number in self._ports]

    @property
    def counters(self) -> dict[str, int]:
        names = ("registered", "unregistered", "hits", "evicted", "refused")
        with self._lock:
            now = {
                "intervals": len(self._entries),
                "bytes": sum(entry.nbytes for entry in self._entries),
                "idle_bytes": sum(entry.nbytes for entry in self._idle),
            }
            return {name: self._counts[name] for name in names} | now

    def lease(self, address: int, nbytes: int, owner: Any, gpu: Gpu | None = None) -> Lease:
        """Have the interval of `owner`'s memory registered until the result is closed. It is memory of `gpu`, whose
        driver makes a dma-buf of it or tells the kernel about it, or (None) of this process.

        Raises
        ------
        RegistrationError
            Too many intervals are, or the system refused: says why, and what to do.
        """
        with self._lock:
            self._reap()
            return Lease(self, self._hold(address, nbytes, owner, gpu))

    def follow(self, engine: Registrar) -> None:
        """Let another engine use it, that has the same numbers for the ports."""
        with self._lock:
            self._engines.append(engine)
            for entry in self._entries:
                entry.handles.append(self._tell(engine, entry))

    def unfollow(self, engine: Registrar) -> None:
        """It is closed."""
        with self._lock:
            at = self._engines.index(engine)
            del self._engines[at]
            for entry in self._entries:
                del entry.handles[at]

    def empty(self, nbytes: int, raw: Bytes | None) -> Bytes:
        """An uninitialised, registered array; out of `raw`, or of a block of its own.

        Where it cannot be registered it is ordinary memory, which is right and slower: that is logged once.
        """
        with self._lock:
            self._reap()
            if self._closed:
                return np.empty(nbytes, np.uint8) if raw is None else raw
            entry = self._take_idle(nbytes) if raw is None else None
            if entry is None:
                block: Any = mmap.mmap(-1, _round(nbytes)) if raw is None else raw
                start = ctypes.addressof(ctypes.c_char.from_buffer(block)) if raw is None else raw.ctypes.data
                try:
                    entry = self._hold(start, len(block), block)
                except RegistrationError as error:
                    if not self._counts["refused"]:
                        log.warning("memory that is copied before it is sent: %s", error)
                    self._counts["refused"] += 1
                    return np.frombuffer(block, np.uint8, nbytes) if raw is None else raw
            loan = _Loan(entry.start, nbytes)
            weakref.finalize(loan, _end, weakref.ref(self), self._ended, entry).atexit = False
        return np.asarray(loan)

    def give_back(self, entry: _Entry) -> None:
        """See `Lease.close`."""
        with self._lock:
            self._reap()
            if not self._drop(entry):
                raise ArgumentError("this memory is in use by an operation in flight: wait for that first")

    def close(self) -> None:
        """Give everything back. The engine must be closed: nothing may use the memory any more."""
        with self._lock:
            self._closed = True
            for entry in self._entries:
                _deregister(entry)
            self._entries.clear()
            self._idle.clear()

    def abandon(self) -> None:
        """In a forked child: the regions are the parent's, and would give themselves back when they die."""
        self._lock = threading.Lock()
        self._closed = True
        for entry in self._entries:
            for region in entry.regions:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(region))

    # All below: under the lock.

    def _hold(self, start: int, nbytes: int, owner: Any, gpu: Gpu | None = None) -> _Entry:
        for entry in self._entries:
            if entry.start <= start and start + nbytes <= entry.stop:
                self._counts["hits"] += 1
                break
        else:
            entry = self._register(start, nbytes, owner, gpu)
        entry.users += 1
        return entry

    def _register(self, start: int, nbytes: int, owner: Any, gpu: Gpu | None) -> _Entry:
        if len(self._entries) - len(self._idle) >= MOST_INTERVALS:
            raise RegistrationError(
                f"{MOST_INTERVALS} intervals of memory are registered: close some, or register one that holds many"
            )
        seen_at: int | None = None
        if gpu is None:
            regions = self._regions(nbytes, lambda device: device.register(start, nbytes))
        else:
            seen_at, regions = self._gpu_regions(gpu, start, nbytes)
        entry = _Entry(start, nbytes, seen_at, regions, owner)
        entry.handles += [self._tell(engine, entry) for engine in self._engines]
        self._entries.append(entry)
        self._counts["registered"] += 1
        return entry

    def _tell(self, engine: Registrar, entry: _Entry) -> int:
        pairs = zip(self._ports, entry.regions, strict=True)
        keys = [(number, region.lkey, region.rkey) for (_, number), region in pairs]
        return engine.register_memory(entry.start, entry.nbytes, keys, entry.seen_at)

    def _gpu_regions(self, gpu: Gpu, start: int, nbytes: int) -> tuple[int, list[Any]]:
        """The address that devices have for the GPU's memory, and its region with each port: as a dma-buf, or else as
        peer memory."""
        try:
            return self._dmabuf_regions(gpu, start, nbytes)
        except (DeviceError, RegistrationError) as dmabuf:
            try:
                return start, self._regions(nbytes, lambda device: device.register_peer(start, nbytes))
            except RegistrationError as peer:
                raise RegistrationError(
                    f"{nbytes} bytes of {gpu.name}: as a dma-buf: {dmabuf}; as peer memory: {peer}"
                ) from peer

    def _dmabuf_regions(self, gpu: Gpu, start: int, nbytes: int) -> tuple[int, list[Any]]:
        buf = gpu.dmabuf(start, nbytes)
        try:
            return buf.offset, self._regions(nbytes, lambda device: device.register_dmabuf(buf.fd, buf.offset, nbytes))
        finally:
            os.close(buf.fd)  # the regions keep the memory

    def _regions(self, nbytes: int, register: Callable[[Device], Any]) -> list[Any]:
        """A region with each port, or none: RegistrationError."""
        regions: list[Any] = []
        for device, _ in self._ports:
            try:
                regions.append(register(device))
            except device.library.error as error:
                for region in regions:
                    region.close()
                raise RegistrationError(
                    f"{device.name}: registering {nbytes} bytes: {error}; `hetcoll doctor` looks at the limit of "
                    "locked memory (ulimit -l), and at what devices can do with memory of GPUs"
                ) from error
        return regions

    def _take_idle(self, nbytes: int) -> _Entry | None:
        """A block that nobody uses, large enough but not much larger."""
        for entry in self._idle:
            if nbytes <= entry.nbytes <= 2 * _round(nbytes):
                self._idle.remove(entry)
                self._counts["hits"] += 1
                entry.users += 1
                return entry
        return None

    def _drop(self, entry: _Entry) -> bool:
        """One use less; false, and nothing happens, where that was the last one and the engine still needs it."""
        if entry.users == 1 and isinstance(entry.owner, mmap.mmap) and not self._closed:
            self._idle.append(entry)
            while sum(each.nbytes for each in self._idle) > MOST_IDLE and self._unregister(self._idle[0]):
                self._idle.popleft()
                self._counts["evicted"] += 1
        elif entry.users == 1 and not self._closed and not self._unregister(entry):
            return False
        entry.users -= 1
        return True

    def _unregister(self, entry: _Entry) -> bool:
        for at, engine in enumerate(self._engines):
            if not engine.unregister_memory(entry.handles[at]):
                for before in range(at):
                    entry.handles[before] = self._tell(self._engines[before], entry)
                return False
        self._entries.remove(entry)
        _deregister(entry)
        self._counts["unregistered"] += 1
        return True

    def _reap(self) -> None:
        """Take back what arrays left; what is still in use waits for the next time."""
        for _ in range(len(self._ended)):
            entry = self._ended.popleft()
            if not self._drop(entry):
                self._ended.append(entry)


def _end(reference: weakref.ref[Memory], ended: deque[_Entry], entry: _Entry) -> None:
    """An array is gone. The collector may have run inside one of our own calls: then that, or the next, takes it."""
    ended.append(entry)
    memory = reference()
    if memory is not None and memory._lock.acquire(blocking=False):
        try:
            memory._reap()
        finally:
            memory._lock.release()


def _deregister(entry: _Entry) -> None:
    for region in entry.regions:
        region.close()
    entry.regions = []


def _round(nbytes: int) -> int:
    """The size of a block: whole pages, in steps of an eighth, so that blocks fit again."""
    step = max(_PAGE, 1 << max(0, math.ceil(math.log2(max(nbytes, 1))) - 3))
    return (nbytes + step - 1) // step * step
