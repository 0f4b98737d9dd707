"""Arrays of CuPy and Numba on GPUs: in place, and in the order of the stream on which their library works."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from installed import why_no_jax_gpus
from ranks import Ranks, close_all

import hetcoll
from hetcoll.calls.buffers import read_buffer

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(120)]
COUNT = 3_000_001
Case = Callable[[hetcoll.Communicator], None]


@pytest.fixture(params=["0,1", "0|1"], ids=["nccl", "two islands"])
def two(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if why := why_no_jax_gpus():
        pytest.skip(why)
    ranks = Ranks(2, {"HETCOLL_ISLANDS": request.param}, tidy=False)
    yield ranks
    close_all([ranks])


def need(*libraries: str) -> None:
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def late(cupy: Any, x: Any, value: float) -> None:
    """Enqueue: `x` becomes `value` after some 50 ms. Who reads it on another stream comes too early."""
    work = cupy.ones((2048, 2048), cupy.float32)
    for _ in range(200):
        work = work @ work * 1e-4
    x.fill(value)


def cupy_on_a_stream(comm: hetcoll.Communicator) -> None:
    import cupy

    cupy.cuda.Device(comm.rank).use()
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null, cupy.cuda.Stream.ptds):
        x, warm = cupy.zeros(COUNT, cupy.float32), cupy.zeros(COUNT, cupy.float32)
        late(cupy, warm, 0)
        cupy.cuda.Device().synchronize()
        with stream:
            late(cupy, x, comm.rank + 1)
            comm.allreduce(x)
            y = x * 2
            stream.synchronize()
        assert (y.get() == 6).all(), stream
        assert (x.get() == 3).all(), stream


def cupy_collectives(comm: hetcoll.Communicator) -> None:
    import cupy

    cupy.cuda.Device(comm.rank).use()
    mine, whole = cupy.arange(1009, dtype=cupy.int64) + comm.rank, cupy.empty((2, 1009), cupy.int64)
    comm.allgather(mine, whole)
    assert np.array_equal(whole.get(), np.arange(1009) + np.arange(2)[:, None])
    part = cupy.empty(1009, cupy.int64)
    comm.reduce_scatter(whole, part)
    assert np.array_equal(part.get(), 2 * (np.arange(1009) + comm.rank))
    half = cupy.full(70_001, comm.rank + 1, cupy.float16)
    comm.broadcast(half, 1)
    assert (half.get() == 2).all()
    swapped = cupy.empty_like(half)
    with comm.group():
        comm.send(cupy.full_like(half, comm.rank), 1 - comm.rank)
        comm.recv(swapped, 1 - comm.rank)
    assert (swapped.get() == 1 - comm.rank).all()
    work = comm.allreduce(mine, async_op=True)
    work.wait_stream()  # CuPy's current one
    assert np.array_equal(mine.get(), 2 * np.arange(1009) + 1)
    strided = cupy.zeros((8, 8), cupy.float32).T[:4]
    with pytest.raises(hetcoll.BufferTypeError, match="contiguous"):
        comm.allreduce(strided)


def numba_arrays(comm: hetcoll.Communicator) -> None:
    from numba import cuda

    cuda.select_device(comm.rank)
    assert cuda.current_context().device.id == comm.rank
    stream = cuda.stream()
    x = cuda.to_device(np.full(COUNT, comm.rank + 1, np.float32), stream=stream)
    found = read_buffer(x, "x", writable=True)
    described = (found, hasattr(x, "__dlpack__"), x.__cuda_array_interface__)
    assert (found.device, found.index) == ("cuda", comm.rank), described
    comm.allreduce(x)  # on the stream that the array was made on
    assert (x.copy_to_host(stream=stream) == 3).all()
    y = cuda.to_device(np.full(5, comm.rank, np.int32))
    comm.allreduce(y)
    assert (y.copy_to_host() == 1).all()


@pytest.mark.parametrize("case", [cupy_on_a_stream, cupy_collectives])
def test_cupy(two: Ranks, case: Case) -> None:
    need("cupy")
    two.run(case, timeout=60)


def test_numba(two: Ranks) -> None:
    need("numba", "numba.cuda")
    two.run(numba_arrays, timeout=60)
