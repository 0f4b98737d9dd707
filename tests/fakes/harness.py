"""What the tests of the fakes share: processes that have them, error codes, kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ranks import Job, Ranks

from . import environment, require
from .drivers import Cuda, Driver, DriverError
from .hip_driver import Hip

DRIVERS: dict[str, type[Any]] = {"cuda": Cuda, "hip": Hip}
INVALID_VALUE, OUT_OF_MEMORY, INVALID_IMAGE, INVALID_CONTEXT, NO_BINARY = 1, 2, 200, 201, 209
NOT_FOUND, ILLEGAL_ADDRESS, TIMED_OUT, LAUNCH_FAILED, NOT_SUPPORTED = 500, 700, 702, 719, 801
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED = 900, 901, 904
Array = npt.NDArray[Any]
On = Callable[..., Any]

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
extern "C" __global__ void rotate(unsigned* lanes) {
  unsigned lane = threadIdx.x % warpSize;
  lanes[threadIdx.x] = __shfl_sync(~0ull, threadIdx.x, lane + 1) + 1000 * (__ballot_sync(~0ull, lane == 3) == 8);
}
struct Pair { unsigned long long* at; unsigned value; };
extern "C" __global__ void store(char extra, Pair pair) { *pair.at = pair.value + extra; }
extern "C" __global__ void count(unsigned long long* counter) { atomicAdd(counter, 1ull); }
extern "C" __global__ void spin(const volatile unsigned* word) { while (*word == 0) {} }
"""


def call(job: Job, vendor: str, function: Callable[..., Any], device: int, args: tuple[Any, ...]) -> Any:
    driver = DRIVERS[vendor](device)
    try:
        return function(driver, job, *args)
    finally:
        driver.close()


@pytest.fixture(params=DRIVERS)
def vendor(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


@pytest.fixture
def on(vendor: str, pool: Callable[..., Ranks]) -> Iterator[On]:
    """Calls ``function(driver, job, *args)`` on ranks that have the fakes; gives its results.

    ``fresh`` ranks are this test's own, for what leaves a device that has failed; `settings` are the fakes'.
    """
    fresh_ranks: list[Ranks] = []

    def run(
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 1,
        fresh: bool = False,
        env: dict[str, str] | None = None,
        **settings: object,
    ) -> Any:
        own = {**environment(vendor, **{"timeout": 3, "devices": 2, **settings}), **(env or {})}
        if fresh:
            fresh_ranks.append(Ranks(ranks, own, join=False))
            processes = fresh_ranks[-1]
        else:
            processes = pool(ranks, **own, join=False)
        results = processes.run(call, vendor, function, 0, args)
        return results[0] if ranks == 1 else results

    yield run
    for processes in fresh_ranks:
        processes.close()


def finish(ranks: Ranks, only: Sequence[int] | None = None) -> list[Any]:
    """The results of a call that was started on some ranks; all must have some."""
    outcomes = ranks.finish(only=only)
    problems = "\n".join(filter(None, (outcome.problem() for outcome in outcomes)))
    assert not problems, problems
    return [outcome.value for outcome in outcomes]


def refused(call: Callable[..., Any], *args: Any) -> int:
    """The code that a call is refused with; 0 when it is not."""
    try:
        call(*args)
    except DriverError as error:
        return error.code
    return 0


def words(driver: Driver, count: int) -> tuple[int, Array]:
    """Mapped host memory of zeros: its address, and an array of 64-bit words over it."""
    address = driver.allocate_host(8 * count)
    array = np.ctypeslib.as_array(ctypes.POINTER(ctypes.c_uint64).from_buffer(ctypes.c_void_p(address)), (count,))
    array[:] = 0
    return address, array


def upload(driver: Driver, array: Array) -> int:
    address = driver.allocate(array.nbytes)
    driver.copy(address, array.ctypes.data, array.nbytes)
    return address


def download(driver: Driver, address: int, like: Array) -> Array:
    out = np.empty_like(like)
    driver.copy(out.ctypes.data, address, out.nbytes)
    return out


def kernel(driver: Driver, name: str) -> int:
    return driver.function(driver.load(driver.compile(KERNELS)), name)
