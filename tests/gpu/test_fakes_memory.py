"""Memory of the fake drivers: what it is, who reaches it, who shares it."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from fakes.drivers import Driver
from fakes.harness import (
    ALREADY_REGISTERED,
    DRIVERS,
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_VALUE,
    NOT_REGISTERED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    Array,
    On,
    call,
    download,
    finish,
    kernel,
    refused,
    upload,
    words,
)
from ranks import Job, Ranks
from thorough import HOUSE

PAGE = mmap.PAGESIZE

pytestmark = [pytest.mark.fakes, HOUSE]


def kinds(driver: Driver, job: Job) -> None:
    device, host = driver.allocate(1000), driver.allocate_host(1000)
    own = mmap.mmap(-1, 3 * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(own))
    assert driver.pointer(device + 999) == ("device", 0)
    assert driver.extent(device + 999) == (device, 1000)
    assert driver.pointer(host) == ("host", 0)
    assert driver.pointer(base) == ("unknown", -1)
    assert driver.register(base + 64, 2 * PAGE) == base + 64
    assert driver.pointer(base + PAGE) == ("host", 0)
    assert driver.pointer(base) == ("unknown", -1)
    assert refused(driver.register, base + PAGE, 8) == ALREADY_REGISTERED
    driver.unregister(base + 64)
    assert refused(driver.unregister, base + 64) == NOT_REGISTERED
    assert refused(driver.register, 4096, PAGE) == INVALID_VALUE  # nothing is there
    assert (device % 256, host % 256) == (0, 0)


def test_pointers_say_what_they_are(on: On) -> None:
    on(kinds)


def sealed(driver: Driver, job: Job) -> int:
    """What the processor must not touch: copies still go there and back, and a child that reads it is killed."""
    data = np.arange(1000, dtype=np.uint8)
    first, second = driver.allocate(1000), driver.allocate(1000)
    for address in (first, second):
        fakes.seal(address)
    driver.copy(first, data.ctypes.data, 1000)
    driver.copy(second, first, 1000)
    assert (download(driver, second, data) == data).all()
    child = os.fork()
    if child == 0:
        ctypes.string_at(second, 1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_sealed_memory_is_the_devices_alone(on: On) -> None:
    assert os.WTERMSIG(on(sealed)) == signal.SIGSEGV


def shrunken_file(driver: Driver, job: Job) -> int:
    """Registering a mapping that is longer than its file: there are no pages to pin."""
    descriptor = os.memfd_create("short")
    os.ftruncate(descriptor, 2 * PAGE)
    with mmap.mmap(descriptor, 2 * PAGE) as memory:
        os.ftruncate(descriptor, PAGE)
        held = ctypes.c_char.from_buffer(memory)
        code = refused(driver.register, ctypes.addressof(held), 2 * PAGE)
        del held
    os.close(descriptor)
    return code


def test_memory_without_pages_cannot_be_registered(on: On) -> None:
    assert on(shrunken_file) == INVALID_VALUE


def capacity(driver: Driver, job: Job) -> list[int]:
    first = driver.allocate(3 << 20)
    codes = [refused(driver.allocate, 2 << 20)]
    driver.free(first)
    return [*codes, refused(driver.allocate, 4 << 20)]


def test_a_device_has_so_much_memory(on: On) -> None:
    assert on(capacity, memory=4 << 20) == [OUT_OF_MEMORY, 0]


def copies_out_of_bounds(driver: Driver, job: Job) -> list[int]:
    device, host, stream = driver.allocate(1000), driver.allocate_host(2000), driver.stream()
    return [
        refused(driver.copy, device, host, 1001, stream),
        refused(driver.copy, host, device + 1, 1000, stream),
        refused(driver.fill, device, 0, 1001, stream),
        refused(driver.copy, device, host, 1000, stream),
    ]


def test_copies_stay_inside_allocations(on: On) -> None:
    assert on(copies_out_of_bounds) == [INVALID_VALUE] * 3 + [0]


def pageable_copies(driver: Driver, job: Job) -> None:
    at, word = words(driver, 1)
    stream, other = driver.stream(), driver.stream()
    source = np.arange(1000)
    device = driver.allocate(source.nbytes)
    driver.wait(stream, at, 1)
    driver.copy(device, source.ctypes.data, source.nbytes, stream)
    source[:] = -1  # it was read before the call returned
    driver.wait(other, at, 1)
    driver.write(stream, at, 2)
    word[0] = 1
    back = np.zeros_like(source)
    driver.synchronize(stream)
    driver.copy(back.ctypes.data, device, back.nbytes, stream)
    assert (back == np.arange(1000)).all()  # complete when the call returned
    driver.synchronize(other)


def test_copies_of_pageable_memory_are_staged(on: On) -> None:
    on(pageable_copies)


def stream_ordered_memory(driver: Driver, job: Job) -> int:
    stream = driver.stream()
    address = driver.allocate_in_order(1000, stream)
    driver.fill(address, 3, 1000, stream)
    driver.synchronize(stream)
    assert download(driver, address, np.empty(1000, np.uint8)).sum() == 3000
    code = refused(driver.ipc_handle, address)
    driver.free_in_order(address, stream)
    driver.synchronize(stream)
    assert driver.pointer(address) == ("unknown", -1)
    return code


def test_memory_of_a_pool_has_no_handle(on: On) -> None:
    assert on(stream_ordered_memory) == INVALID_VALUE


def freeing_waits(driver: Driver, job: Job) -> None:
    at, word = words(driver, 1)
    stream, value = driver.stream(), driver.allocate(8)
    driver.wait(stream, at, 1)
    driver.write(stream, value, 7)
    release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: word.__setitem__(0, 1))
    driver.host_function(driver.stream(), ctypes.cast(release, ctypes.c_void_p).value or 0, 0)
    driver.free(value)  # implicitly after all that was enqueued
    assert driver.idle(stream)


def test_freeing_synchronises_the_device(on: On) -> None:
    on(freeing_waits)


def exported(driver: Driver, job: Job, nbytes: int) -> dict[str, Any]:
    data = (np.arange(nbytes) % 251).astype(np.uint8)
    address = driver._allocate(nbytes)  # stays until the peer has read it
    driver.copy(address, data.ctypes.data, nbytes)
    gone = driver._allocate(nbytes)
    stale = driver.ipc_handle(gone)
    driver._free(gone)
    handle = driver.ipc_handle(address + nbytes // 2)
    return {"address": address, "handle": handle, "stale": stale, "own": refused(driver.open_ipc, handle)}


def imported(driver: Driver, job: Job, offer: dict[str, Any], nbytes: int) -> None:
    assert refused(driver.open_ipc, offer["stale"]) == INVALID_VALUE
    assert refused(driver.open_ipc, b"\1" * 64) == INVALID_VALUE
    address = driver.open_ipc(offer["handle"])
    assert driver.open_ipc(offer["handle"]) == address  # counted
    assert driver.extent(address) == (address, nbytes)
    data = download(driver, address, np.empty(nbytes, np.uint8))
    assert (data == np.arange(nbytes) % 251).all()
    driver.copy(address, (data + 1).astype(np.uint8).ctypes.data, nbytes)
    driver.close_ipc(address)
    driver.close_ipc(address)
    assert refused(driver.close_ipc, address) == INVALID_VALUE


def released(driver: Driver, job: Job, offer: dict[str, Any], nbytes: int) -> Array:
    data = download(driver, offer["address"], np.empty(nbytes, np.uint8))
    driver._free(offer["address"])
    return data


@pytest.mark.parametrize("nbytes", [1000, 1 << 20])
def test_device_memory_is_shared_between_processes(vendor: str, nbytes: int) -> None:
    with Ranks(2, fakes.environment(vendor), join=False) as ranks:

        def run(rank: int, function: Callable[..., Any], *args: Any) -> Any:
            ranks.start(call, vendor, function, 0, args, only=[rank])
            return finish(ranks, [rank])[0]

        offer = run(0, exported, nbytes)
        assert offer["own"] == INVALID_CONTEXT
        run(1, imported, offer, nbytes)
        data = run(0, released, offer, nbytes)
    assert (data == (np.arange(nbytes) % 251 + 1).astype(np.uint8)).all()


def dmabuf(driver: Driver, job: Job) -> list[int]:
    address = driver.allocate(2 * PAGE)
    data = np.arange(2 * PAGE, dtype=np.uint8)
    driver.copy(address, data.ctypes.data, data.nbytes)
    descriptor = driver.dmabuf(address, 2 * PAGE)
    with mmap.mmap(descriptor, 2 * PAGE) as memory:
        assert memory[:] == data.tobytes()
    os.close(descriptor)
    return [refused(driver.dmabuf, address + 8, PAGE), refused(driver.dmabuf, address, 100)]


def test_memory_is_exported_as_a_file(on: On) -> None:
    assert on(dmabuf) == [INVALID_VALUE] * 2
    assert on(no_dmabuf, dmabuf=0) == NOT_SUPPORTED


def no_dmabuf(driver: Driver, job: Job) -> int:
    return refused(driver.dmabuf, driver.allocate(PAGE), PAGE)


def exchange(driver: Driver, job: Job, path: str) -> float:
    """Two ranks signal each other through a segment that both have registered."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), PAGE) as memory:
        held = ctypes.c_char.from_buffer(memory)
        base = driver.register(ctypes.addressof(held), PAGE)
        stream, scratch = driver.stream(), driver.allocate(8)
        mine, other = base + 64 * job.rank, base + 64 * (1 - job.rank)
        for i in range(1, 51):
            driver.fill(scratch, i, 8, stream)
            driver.copy(mine + 8, scratch, 8, stream)
            driver.write(stream, mine, i)
            driver.wait(stream, other, i)
            driver.copy(scratch, other + 8, 8, stream)
        driver.synchronize(stream)
        value = int(download(driver, scratch, np.empty(8, np.uint8))[0])
        driver.unregister(ctypes.addressof(held))
        del held
    return value


def test_streams_of_two_processes_signal_each_other(on: On, tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(PAGE))
    assert on(exchange, str(path), ranks=2, jitter="3:200") == [50, 50]


def test_streams_of_two_vendors_signal_each_other(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(PAGE))
    one, other = fakes.environment("cuda"), fakes.environment("hip")
    with Ranks(2, {name: (one[name], other[name]) for name in one}, join=False) as ranks:
        for rank, vendor in enumerate(DRIVERS):
            ranks.start(call, vendor, exchange, 0, (str(path),), only=[rank])
        assert finish(ranks) == [50, 50]


def two_devices(driver: Driver, job: Job) -> list[int]:
    other = type(driver)(1)
    assert (driver.count(), driver.bus_id() != other.bus_id()) == (2, True)
    theirs = upload(other, np.ones(100, np.float32))
    driver.use()
    ours = upload(driver, np.ones(100, np.float32))
    assert driver.pointer(theirs) == ("device", 1)
    driver.copy(ours, theirs, 400)  # copies reach anything
    driver.enable_peer(1)
    driver.launch(kernel(driver, "add"), 1, 32, 0, ours, ours, theirs, 100)
    assert (download(driver, ours, np.empty(100, np.float32)) == 2).all()
    other.close()
    driver.use()
    return [refused(driver.enable_peer, 1)]


def test_peers_reach_each_other(on: On) -> None:
    assert on(two_devices, fresh=True) == [704]


def no_peer(driver: Driver, job: Job) -> int:
    other = type(driver)(1)
    theirs = upload(other, np.ones(100, np.float32))
    driver.use()
    stream = driver.stream()
    driver.launch(kernel(driver, "add"), 1, 32, stream, theirs, theirs, theirs, 100)
    code = refused(driver.synchronize, stream)
    other.close()
    return code


def test_kernels_reach_peers_alone(on: On) -> None:
    assert on(no_peer, fresh=True) == ILLEGAL_ADDRESS
