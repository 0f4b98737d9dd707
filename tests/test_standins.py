"""The stand-ins for the vendors' drivers behave as drivers do, where collectives depend on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import standins
from ranks import Job, RankError, Ranks, wait_until
from standins.drivers import Cuda, DriverError

pytestmark = pytest.mark.standins

DRIVERS = {"cuda": Cuda}
Driver = Cuda
INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, NOT_SUPPORTED = 1, 2, 201, 801
ILLEGAL_ADDRESS, TIMED_OUT = 700, 702

KERNELS = """
extern "C" __global__ void add(float* to, const float* a, const float* b, unsigned long long count) {
  unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = a[i] + b[i];
  }
}
extern "C" __global__ void total(unsigned long long* sum, const unsigned* values, unsigned count) {
  __shared__ unsigned part[256];
  unsigned own = 0;
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) own += values[i];
  part[threadIdx.x] = own;
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) *sum = part[0];
}
struct Pair { unsigned long long* at; unsigned value; };
extern "C" __global__ void store(Pair pair, char unaligned) { *pair.at = pair.value + unaligned; }
extern "C" __global__ void bump(unsigned long long* counter) { atomicAdd(counter, 1ull); }
extern "C" __global__ void spin(volatile unsigned long long* word) { while (*word == 0) {} }
"""


@pytest.fixture(params=DRIVERS)
def vendor(request: pytest.FixtureRequest) -> str:
    why_not = standins.why_not(request.param)
    if why_not:
        pytest.skip(why_not)
    return str(request.param)


@pytest.fixture
def on(vendor: str) -> Callable[..., list[Any]]:
    """Runs a function on new processes that have the driver: ``on(f, ranks=2, devices=2, JITTER...)``."""

    def run(function: Callable[..., Any], *args: Any, ranks: int = 1, env: dict[str, str] | None = None, **settings):
        settings.setdefault("timeout", 5)
        with Ranks(ranks, {**standins.environment(vendor, **settings), **(env or {})}, join=False) as processes:
            return processes.run(function, vendor, *args)

    return run


def refused(call: Callable[..., Any], *args: Any) -> int:
    """The code that a call is refused with; 0 when it is not."""
    try:
        call(*args)
    except DriverError as error:
        return error.code
    return 0


def word(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address)


def upload(driver: Driver, array: np.ndarray) -> int:
    address = driver.allocate(array.nbytes)
    driver.copy(address, array.ctypes.data, array.nbytes)
    return address


def download(driver: Driver, address: int, like: np.ndarray) -> np.ndarray:
    out = np.empty_like(like)
    driver.copy(out.ctypes.data, address, out.nbytes)
    return out


def kernel(driver: Driver, name: str) -> int:
    return driver.function(driver.load(driver.compile(KERNELS)), name)


# Streams.


def _streams_are_asynchronous(job: Job, vendor: str) -> None:
    driver = DRIVERS[vendor]()
    gate, value = driver.allocate_host(8), driver.allocate_host(8)
    word(gate).value = word(value).value = 0
    stream, other = driver.stream(), driver.stream()
    driver.wait(stream, gate, 1)
    driver.write(stream, value, 7)
    end = driver.event()
    driver.record(end, stream)
    driver.wait_event(other, end)
    assert not driver.idle(stream)
    assert not driver.idle(other)
    assert not driver.reached(end)
    assert word(value).value == 0
    word(gate).value = 1
    driver.synchronize_event(end)
    assert word(value).value == 7
    driver.synchronize(other)
    assert driver.idle(stream)


def test_streams_run_by_themselves(on: Callable[..., Any]) -> None:
    on(_streams_are_asynchronous)


def _shared_queue(job: Job, vendor: str) -> bool:
    """Whether a stream that waits holds up another."""
    driver = DRIVERS[vendor]()
    gate, value = driver.allocate_host(8), driver.allocate_host(8)
    word(gate).value = word(value).value = 0
    first, *others = [driver.stream() for _ in range(3)]
    driver.wait(first, gate, 1)
    for stream in others:
        driver.write(stream, value, 7)
    try:
        wait_until(lambda: word(value).value == 7, 0.5)
        free = True
    except RankError:
        free = False
    word(gate).value = 1
    driver.synchronize_device()
    return not free


@pytest.mark.parametrize(("queues", "held_up"), [(1, True), (2, False), (8, False)])
def test_streams_share_hardware_queues(on: Callable[..., Any], queues: int, held_up: bool) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "GPU_MAX_HW_QUEUES": str(queues)}
    assert on(_shared_queue, env=env) == [held_up]
