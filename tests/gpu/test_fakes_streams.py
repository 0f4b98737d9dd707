"""Streams, events and host functions of the fake drivers are as asynchronous, and as bound, as a driver's."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import fakes
import pytest
from fakes.drivers import Cuda, Driver
from fakes.harness import (
    INVALID_VALUE,
    NOT_SUPPORTED,
    TIMED_OUT,
    On,
    call,
    finish,
    refused,
    words,
)
from fakes.hip_driver import Hip
from ranks import Job, RankError, Ranks, wait_until
from thorough import HOUSE

pytestmark = [pytest.mark.fakes, HOUSE]


def streams_run_by_themselves(driver: Driver, job: Job) -> None:
    at, word = words(driver, 2)
    stream, other = driver.stream(), driver.stream()
    driver.wait(stream, at, 1)
    driver.write(stream, at + 8, 7)
    end = driver.event()
    driver.record(end, stream)
    driver.wait_event(other, end)
    time.sleep(0.02)
    assert not driver.idle(stream)
    assert not driver.idle(other)
    assert not driver.reached(end)
    assert word[1] == 0
    word[0] = 1
    driver.synchronize_event(end)
    assert word[1] == 7
    driver.synchronize(other)
    assert driver.idle(stream)


def test_streams_run_by_themselves(on: On) -> None:
    on(streams_run_by_themselves)


def waiting_stream_holds_up_others(driver: Driver, job: Job) -> bool:
    at, word = words(driver, 2)
    first, *others = [driver.stream() for _ in range(3)]
    driver.wait(first, at, 1)
    for stream in others:
        driver.write(stream, at + 8, 7)
    try:
        wait_until(lambda: word[1] == 7, 0.3)
        held_up = False
    except RankError:
        held_up = True
    word[0] = 1
    driver.synchronize_device()
    assert word[1] == 7
    return held_up


@pytest.mark.parametrize(("queues", "held_up"), [(1, True), (2, False), (8, False)])
def test_streams_share_hardware_queues(on: On, queues: int, held_up: bool) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "GPU_MAX_HW_QUEUES": str(queues)}
    assert on(waiting_stream_holds_up_others, env=env, fresh=True) == held_up


def order_of_writes(driver: Driver, job: Job) -> list[int]:
    """Two streams append their numbers to a list; what each does itself stays in order."""
    append = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda which: seen.append(which or 0))
    address = ctypes.cast(append, ctypes.c_void_p).value or 0
    seen: list[int] = []
    streams = [driver.stream(), driver.stream()]
    for i in range(20):
        for which, stream in enumerate(streams):
            driver.host_function(stream, address, 10 * i + which)
    driver.synchronize_device()
    for which in range(2):
        own = [number // 10 for number in seen if number % 10 == which]
        assert own == list(range(20))
    return seen


def test_streams_run_late_and_out_of_order(on: On) -> None:
    plain = sorted(range(0, 200, 10), key=int)
    orders = [on(order_of_writes, jitter=f"{seed}:2000", fresh=True) for seed in (1, 2)]
    interleaved = [number for i in plain for number in (i, i + 1)]
    assert any(order != interleaved for order in orders)
    assert orders[0] != orders[1]


def default_stream_is_ordered(driver: Driver, job: Job) -> None:
    at, word = words(driver, 2)
    blocking, free = driver.blocking_stream(), driver.stream()
    driver.wait(blocking, at, 1)
    driver.write(0, at + 8, 7)  # the default stream follows the blocking one
    driver.synchronize(free)
    time.sleep(0.02)
    assert word[1] == 0
    word[0] = 1
    driver.synchronize(0)
    assert word[1] == 7


def test_the_default_stream_follows_blocking_streams_alone(on: On) -> None:
    on(default_stream_is_ordered)


def comparisons(driver: Driver, job: Job) -> None:
    at, word = words(driver, 1)
    stream = driver.stream()
    for compare, before, after, value in ((0, 4, 5, 5), (1, 4, 5, 5), (2, 4, 6, 3), (3, 2**64 - 1, 0, 0)):
        for bits in (64, 32):
            word[0] = before
            driver.wait(stream, at, value & (2**bits - 1), compare, bits)
            time.sleep(0.005)
            assert not driver.idle(stream), (compare, bits)
            word[0] = after
            driver.synchronize(stream)
    driver.write(stream, at, 2**40 + 1)
    driver.write(stream, at, 5, bits=32)
    driver.synchronize(stream)
    assert word[0] == 2**40 + 5


def test_streams_wait_for_values(on: On) -> None:
    on(comparisons)


def wrapping_counter(driver: Driver, job: Job) -> bool:
    at, word = words(driver, 1)
    word[0] = 3
    stream = driver.stream()
    driver.wait(stream, at, 2**64 - 5)  # which a counter that wraps has passed
    time.sleep(0.05)
    passed = driver.idle(stream)
    word[0] = 2**64 - 1
    driver.synchronize(stream)
    return passed


def test_waits_compare_as_the_vendor_says(on: On, vendor: str) -> None:
    assert on(wrapping_counter) == (vendor == "cuda")


def refused_words(driver: Driver, job: Job) -> list[int]:
    stream, at = driver.stream(), driver.allocate(64)
    pageable = (ctypes.c_uint64 * 2)()
    places = (ctypes.addressof(pageable), at + 4, at + 64)
    return [refused(call, stream, place, 1) for place in places for call in (driver.wait, driver.write)]


def test_waits_refuse_memory_of_others(on: On) -> None:
    assert on(refused_words) == [INVALID_VALUE] * 6


def refused_waits(driver: Driver, job: Job) -> list[int]:
    stream = driver.stream()
    at, _ = words(driver, 1)
    return [refused(driver.wait, stream, at, 0), refused(driver.write, stream, at, 1)]


def test_streams_without_waits(on: On) -> None:
    assert on(refused_waits, stream_waits=0) == [NOT_SUPPORTED, NOT_SUPPORTED]


def signal_memory(driver: Hip, job: Job) -> list[int]:
    stream, signal = driver.stream(), driver.allocate_signal()
    codes = refused_waits(driver, job)
    driver.write(stream, signal, 9)
    driver.wait(stream, signal, 9)
    driver.synchronize(stream)
    codes.append(refused(driver.wait, stream, signal, 1, 0, 32))
    driver.call("hipFree", signal)
    return codes


def test_waits_that_take_signal_memory_alone(on: On, vendor: str) -> None:
    if vendor != "hip":
        pytest.skip("of AMD's runtime")
    assert on(signal_memory, env={"GPU_STREAMOPS_CP_WAIT": "1"}) == [INVALID_VALUE, 0, INVALID_VALUE]


def hopeless_wait(driver: Driver, job: Job) -> tuple[float, list[int]]:
    at, _ = words(driver, 1)
    stream = driver.stream()
    driver.wait(stream, at, 5)
    start = time.monotonic()
    codes = [refused(driver.synchronize, stream), refused(driver.write, stream, at, 1), refused(driver.allocate, 8)]
    return time.monotonic() - start, codes


def test_a_wait_without_end_fails_the_device_in_bounded_time(vendor: str) -> None:
    with Ranks(1, fakes.environment(vendor, timeout=0.5), join=False) as ranks:
        [(seconds, codes)] = ranks.run(call, vendor, hopeless_wait, 0, ())
        assert codes == [TIMED_OUT] * 3
        assert 0.4 < seconds < 5
        text = ranks.output(0)
    assert "waited 0.5 s" in text
    assert "it is 0, wanted (comparison 0) 5" in text


def host_functions(driver: Driver, job: Job) -> tuple[list[int], int]:
    name = "cuStreamQuery" if isinstance(driver, Cuda) else "hipStreamQuery"
    library = ctypes.CDLL(None)
    query = library[name]
    codes: list[int] = []
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda argument: codes.append(query(None) + (argument or 0)))
    stream = driver.stream()
    driver.host_function(stream, ctypes.cast(call, ctypes.c_void_p).value or 0, 10000)
    driver.synchronize(stream)
    return codes, query(None)


def test_host_functions_may_not_call_the_driver(on: On, vendor: str) -> None:
    codes, outside = on(host_functions)
    assert codes == [10000 + (800 if vendor == "cuda" else NOT_SUPPORTED)]
    assert outside == 0


def timing(driver: Driver, job: Job) -> tuple[float, int]:
    start, end = driver.event(0), driver.event(0)
    at, word = words(driver, 1)
    stream = driver.stream()
    driver.record(start, stream)
    driver.wait(stream, at, 1)
    driver.record(end, stream)
    driver.synchronize_event(start)
    time.sleep(0.05)
    early = refused(driver.elapsed, start, end)
    word[0] = 1
    driver.synchronize_event(end)
    return driver.elapsed(start, end), early


def test_events_measure_time(on: On) -> None:
    milliseconds, early = on(timing)
    assert milliseconds > 49
    assert early == 600


def shared_event(driver: Driver, job: Job, path: str) -> int:
    event = driver.event(2 | 4)
    at, word = words(driver, 1)
    stream = driver.stream()
    driver.wait(stream, at, 1)
    driver.record(event, stream)
    Path(path).write_bytes(driver.event_handle(event))
    Path(path).rename(path + ".done")
    wait_until(lambda: Path(path + ".open").exists())
    word[0] = 1
    driver.synchronize(stream)
    wait_until(lambda: Path(path + ".seen").exists())
    driver.destroy_event(event)
    return 1


def awaited_event(driver: Driver, job: Job, path: str) -> int:
    wait_until(lambda: Path(path + ".done").exists())
    event = driver.open_event(Path(path + ".done").read_bytes())
    stream = driver.stream()
    driver.wait_event(stream, event)
    assert not driver.idle(stream)
    assert not driver.reached(event)
    Path(path + ".open").touch()
    driver.synchronize(stream)
    assert driver.reached(event)
    Path(path + ".seen").touch()
    driver.destroy_event(event)
    return 2


def test_events_are_shared_between_processes(vendor: str, tmp_path: Path) -> None:
    with Ranks(2, fakes.environment(vendor, timeout=5), join=False) as ranks:
        for rank, function in enumerate((shared_event, awaited_event)):
            ranks.start(call, vendor, function, 0, (str(tmp_path / "event"),), only=[rank])
        assert finish(ranks) == [1, 2]


def torn_copy(driver: Driver, job: Job) -> bool:
    """Whether a reader that does not wait sees one of some copies half done: it may be late for one."""
    stream = driver.stream()
    source, to = driver.allocate_host(1 << 20), driver.allocate_host(1 << 20)
    ctypes.memset(source, 1, 1 << 20)
    first, last = (ctypes.c_ubyte.from_address(to + at) for at in (0, (1 << 20) - 1))
    for _ in range(100):
        ctypes.memset(to, 0, 1 << 20)
        driver.copy(to, source, 1 << 20, stream)
        wait_until(lambda: last.value == 1)
        torn = first.value == 0
        driver.synchronize(stream)
        assert first.value == 1
        if torn:
            return True
    return False


def test_copies_take_their_time(on: On) -> None:
    assert on(torn_copy, jitter="1:20000", fresh=True)


def allocation_waits(driver: Driver, job: Job) -> bool:
    at, word = words(driver, 2)
    stream = driver.stream()
    driver.wait(stream, at, 1)
    release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(0.1) or word.__setitem__(0, 1))
    driver.host_function(driver.stream(), ctypes.cast(release, ctypes.c_void_p).value or 0, 0)
    driver.allocate(8)
    waited = bool(word[0] == 1)
    driver.synchronize_device()
    return waited


@pytest.mark.parametrize("strict", [0, 1])
def test_allocation_may_wait_for_the_device(on: On, strict: int) -> None:
    assert on(allocation_waits, strict=strict) == bool(strict)
