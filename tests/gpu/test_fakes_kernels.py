"""Kernels and graphs on the fake drivers, and the errors that tests inject."""

from __future__ import annotations

import ctypes
from pathlib import Path

import fakes
import numpy as np
import pytest
from fakes.drivers import Cuda, Driver, DriverError
from fakes.harness import (
    CAPTURE_INVALIDATED,
    CAPTURE_UNJOINED,
    CAPTURE_UNSUPPORTED,
    ILLEGAL_ADDRESS,
    INVALID_IMAGE,
    INVALID_VALUE,
    KERNELS,
    LAUNCH_FAILED,
    NO_BINARY,
    NOT_FOUND,
    TIMED_OUT,
    On,
    call,
    download,
    kernel,
    refused,
    upload,
    words,
)
from ranks import Job, Ranks
from thorough import HOUSE

pytestmark = [pytest.mark.fakes, HOUSE]


def kernels(driver: Driver, job: Job) -> None:
    module = driver.load(driver.compile(KERNELS))
    stream = driver.stream()
    a, b = np.arange(1001, dtype=np.float32), np.full(1001, 0.5, np.float32)
    to = driver.allocate(a.nbytes)
    driver.launch(driver.function(module, "add"), 3, 64, stream, to, upload(driver, a), upload(driver, b), 1001)
    driver.synchronize(stream)
    assert (download(driver, to, a) == a + b).all()

    values = np.arange(5000, dtype=np.uint32)
    driver.launch(driver.function(module, "total"), 1, 256, stream, to, upload(driver, values), np.uint32(5000))
    driver.synchronize(stream)
    assert download(driver, to, np.empty(1, np.uint64))[0] == values.sum()

    lanes = driver.allocate(4 * 128)
    warp = 32 if isinstance(driver, Cuda) else 64
    driver.launch(driver.function(module, "rotate"), 1, 128, stream, lanes)
    driver.synchronize(stream)
    thread = np.arange(128)
    wanted = thread // warp * warp + (thread + 1) % warp + 1000
    assert (download(driver, lanes, np.empty(128, np.uint32)) == wanted).all()

    class Pair(ctypes.Structure):
        _fields_ = (("at", ctypes.c_uint64), ("value", ctypes.c_uint32))

    driver.launch(driver.function(module, "store"), 1, 1, stream, np.int8(-2), Pair(to, 44))
    driver.launch(driver.function(module, "count"), 70, 33, stream, to)
    driver.synchronize(stream)
    assert download(driver, to, np.empty(1, np.uint64))[0] == 42 + 70 * 33
    assert refused(driver.function, module, "absent") == NOT_FOUND
    assert refused(driver.launch, driver.function(module, "count"), 1, 1025, stream, to) == INVALID_VALUE
    driver.unload(module)


def test_kernels_run_in_blocks_and_threads(on: On) -> None:
    on(kernels)


def spinning(driver: Driver, job: Job) -> None:
    """Four threads wait for the host, which sees that they run while another stream goes on."""
    at, word = words(driver, 2)
    stream, other = driver.stream(), driver.stream()
    driver.launch(kernel(driver, "spin"), 1, 4, stream, at)
    driver.write(other, at + 8, 1)
    driver.synchronize(other)
    assert not driver.idle(stream)
    word[0] = 1
    driver.synchronize(stream)


def test_kernels_may_wait_for_others(on: On) -> None:
    on(spinning)


def stray(driver: Driver, job: Job, where: str) -> list[int]:
    stream, function = driver.stream(), kernel(driver, "add")
    count = 1000
    good = upload(driver, np.ones(count, np.float32))
    pageable = np.ones(count, np.float32)
    bad, count = {
        "past the end": (good, count + 1),
        "before the beginning": (good - 4, count),
        "pageable": (pageable.ctypes.data, count),
        "freed": (driver.allocate(4 * count), count),
        "null": (0, count),
    }[where]
    if where == "freed":
        driver.free(bad)
    driver.launch(function, 2, 64, stream, good, good, bad, count)
    return [refused(driver.synchronize, stream), refused(driver.allocate, 8), refused(driver.synchronize, stream)]


@pytest.mark.parametrize("where", ["past the end", "before the beginning", "pageable", "freed", "null"])
def test_kernels_stay_inside_allocations(vendor: str, where: str) -> None:
    with Ranks(1, fakes.environment(vendor, timeout=3), join=False) as ranks:
        assert ranks.run(call, vendor, stray, 0, (where,)) == [[ILLEGAL_ADDRESS] * 3]
        assert "a load of 4 bytes at 0x" in ranks.output(0)


def endless(driver: Driver, job: Job) -> int:
    at, _ = words(driver, 1)
    stream = driver.stream()
    driver.launch(kernel(driver, "spin"), 1, 1, stream, at)
    return refused(driver.synchronize, stream)


def test_a_kernel_without_end_fails_the_device(on: On) -> None:
    assert on(endless, timeout=0.5, fresh=True) == TIMED_OUT


def broken_sources(driver: Driver, job: Job) -> tuple[int, str, int]:
    try:
        driver.compile('extern "C" __global__ void f() { nonsense }')
    except DriverError as error:
        code, log = error.code, str(error)
    return code, log, refused(driver.load, b"\x7fELF" + bytes(100))


def test_compilers_say_what_is_wrong(on: On) -> None:
    code, log, image = on(broken_sources)
    assert code == 6
    assert "nonsense" in log
    assert image == INVALID_IMAGE


def other_architecture(driver: Driver, job: Job) -> int:
    return refused(kernel, driver, "add")


def test_an_image_is_for_one_architecture(on: On) -> None:
    assert on(other_architecture, arch="sm_80") == NO_BINARY


def replayed(driver: Driver, job: Job) -> None:
    at, word = words(driver, 2)
    stream, side = driver.stream(), driver.stream()
    counter = upload(driver, np.zeros(1, np.uint64))
    function = kernel(driver, "count")
    fork, join = driver.event(), driver.event()
    assert driver.capturing(stream) == 0
    driver.begin_capture(stream)
    assert driver.capturing(stream) == 1
    driver.launch(function, 1, 3, stream, counter)
    driver.record(fork, stream)
    driver.wait_event(side, fork)
    assert driver.capturing(side) == 1
    driver.launch(function, 1, 10, side, counter)
    driver.write(side, at, 1)
    driver.record(join, side)
    driver.wait_event(stream, join)
    driver.wait(stream, at, 1)
    driver.copy(at + 8, counter, 8, stream)
    graph = driver.end_capture(stream)
    assert driver.capturing(stream) == driver.capturing(side) == 0
    assert (word == 0).all()  # nothing has run
    executable = driver.instantiate(graph)
    for i in range(1, 4):
        driver.replay(executable, stream)
        driver.synchronize(stream)
        assert word[1] == 13 * i
    driver.destroy_graph(graph, executable)


def test_graphs_are_captured_and_replayed(on: On) -> None:
    on(replayed)


def branches(driver: Driver, job: Job) -> set[int]:
    """What a copy that only its stream orders has found of what another branch writes, over some replays."""
    at, word = words(driver, 2)
    stream, side = driver.stream(), driver.stream()
    fork, join = driver.event(), driver.event()
    driver.begin_capture(stream)
    driver.write(stream, at, 0)
    driver.record(fork, stream)
    driver.wait_event(side, fork)
    driver.write(side, at, 7)
    driver.record(join, side)
    driver.copy(at + 8, at, 8, stream)
    driver.wait_event(stream, join)
    graph = driver.end_capture(stream)
    executable, seen = driver.instantiate(graph), set()
    for _ in range(30):
        driver.replay(executable, stream)
        driver.synchronize(stream)
        assert word[0] == 7
        seen.add(int(word[1]))
    driver.destroy_graph(graph, executable)
    return seen


def test_branches_of_a_graph_run_in_any_order(on: On) -> None:
    assert on(branches) == {0, 7}


def bad_captures(driver: Driver, job: Job) -> list[int]:
    stream, side, event = driver.stream(), driver.stream(), driver.event()
    at, _ = words(driver, 1)
    codes = []
    driver.begin_capture(stream)
    codes.append(refused(driver.synchronize, stream))
    codes.append(refused(driver.end_capture, stream))
    driver.begin_capture(stream)
    codes.append(refused(driver.allocate, 8))
    codes.append(refused(driver.end_capture, stream))
    driver.begin_capture(stream)
    driver.record(event, stream)
    driver.wait_event(side, event)
    driver.write(side, at, 1)
    codes.append(refused(driver.end_capture, stream))
    driver.write(stream, at, 2)
    driver.synchronize(stream)
    return codes


def test_a_capture_forbids_what_would_wait(on: On) -> None:
    unsupported = [CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED]
    assert on(bad_captures) == [*unsupported, *unsupported, CAPTURE_UNJOINED]


def failing(driver: Driver, job: Job) -> list[int]:
    stream, at = driver.stream(), driver.allocate(8)
    codes = [refused(driver.write, stream, at, i) for i in range(4)]
    return [*codes, refused(driver.copy, at, at, 8, stream), refused(driver.synchronize, stream)]


def test_errors_are_injected(on: On, vendor: str) -> None:
    prefix = {"cuda": "cu", "hip": "hip"}[vendor]
    write, copy = f"{prefix}StreamWriteValue64", f"{prefix}MemcpyAsync"
    assert on(failing, fail=f"{write}:2:{LAUNCH_FAILED},{write}:4+:1", fresh=True) == [0, LAUNCH_FAILED, 0, 1, 0, 0]
    assert on(failing, fail=f"{copy}:1:late{LAUNCH_FAILED}", fresh=True) == [0, 0, 0, 0, 0, LAUNCH_FAILED]


def test_calls_are_logged(on: On, vendor: str, tmp_path: Path) -> None:
    on(failing, log=tmp_path / "log", fresh=True)
    names = [line.split()[2] for line in (tmp_path / "log").read_text().splitlines()]
    assert names.count("cuStreamWriteValue64" if vendor == "cuda" else "hipStreamWriteValue64") == 4
