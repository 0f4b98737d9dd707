"""The vendors' Python packages, as far as users of hetcoll would mix them with it, run on the fakes."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any

import fakes
import numpy as np
import pytest
from fakes.drivers import Cuda
from fakes.harness import download, finish, upload
from ranks import Job, Ranks
from thorough import HOUSE, parametrize

pytestmark = [pytest.mark.fakes, HOUSE]

ADD_ONE = """
extern "C" __global__ void add_one(float* x, unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) x[i] += 1;
}
"""


def needs(vendor: str, *modules: str) -> None:
    fakes.require(vendor)
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def cuda_core(job: Job) -> None:
    from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, Program, ProgramOptions, launch

    device = Device(0)
    device.set_current()
    assert device.name == "Fake GPU"
    assert device.compute_capability == (9, 0)
    stream = device.create_stream()
    image = Program(ADD_ONE, "c++", ProgramOptions(arch="sm_90", std="c++17")).compile("cubin")
    pinned = LegacyPinnedMemoryResource().allocate(4096)
    array = np.from_dlpack(pinned).view(np.float32)
    array[:] = np.arange(1024)
    buffer = device.allocate(4096, stream=stream)
    buffer.copy_from(pinned, stream=stream)
    for _ in range(2):
        launch(stream, LaunchConfig(grid=1, block=64), image.get_kernel("add_one"), buffer, np.uint32(1024))
    buffer.copy_to(pinned, stream=stream)
    event = stream.record()
    event.sync()
    assert (array == np.arange(1024) + 2).all()
    del array
    buffer.close(stream)
    stream.sync()
    pinned.close()
    stream.close()


def test_cuda_core() -> None:
    needs("cuda", "cuda.core")
    with Ranks(1, fakes.environment("cuda"), join=False) as ranks:
        ranks.run(cuda_core)


def nccl_id(job: Job) -> bytes:
    from nccl.core import get_unique_id

    return bytes(get_unique_id())


class DeviceArray:
    """What CuPy and PyTorch say of an array of floats on a device."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": "<f4",
            "version": 3,
            "stream": None,
        }


def nccl_sum(job: Job, identity: bytes) -> float:
    from nccl.core import SUM, Communicator, UniqueId

    driver = Cuda(job.rank)
    stream = driver.stream()
    comm = Communicator.init(job.size, job.rank, UniqueId.from_bytes(identity))
    assert (comm.nranks, comm.rank) == (job.size, job.rank)
    ours = np.full(100, job.rank + 1, np.float32)
    buffer = upload(driver, ours)
    array = DeviceArray(buffer, ours.size)
    comm.allreduce(array, array, SUM, stream=stream)
    driver.synchronize(stream)
    comm.destroy()
    total = download(driver, buffer, ours)
    driver.close()
    return float(total[0])


def rccl_id(job: Job) -> bytes:
    from rocm.bindings import rccl

    code, identity = rccl.ncclGetUniqueId()
    assert int(code) == 0
    return ctypes.string_at(identity.as_c_void_p(), 128)


def rccl_sum(job: Job, identity: bytes) -> float:
    from rocm.bindings import hip, rccl

    def check(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result
        return result[1] if len(result) == 2 else None

    check(hip.hipSetDevice(job.rank))
    unique_id = rccl.ncclUniqueId()
    ctypes.memmove(unique_id.as_c_void_p(), identity, 128)
    comm = check(rccl.ncclCommInitRank(job.size, unique_id, job.rank))
    stream = check(hip.hipStreamCreateWithFlags(1))
    array = np.full(100, job.rank + 1, np.float32)
    buffer = check(hip.hipMalloc(400))
    check(hip.hipMemcpy(buffer, array, 400, hip.hipMemcpyKind.hipMemcpyHostToDevice))
    check(
        rccl.ncclAllReduce(buffer, buffer, 100, rccl.ncclDataType_t.ncclFloat32, rccl.ncclRedOp_t.ncclSum, comm, stream)
    )
    check(hip.hipStreamSynchronize(stream))
    check(hip.hipMemcpy(array, buffer, 400, hip.hipMemcpyKind.hipMemcpyDeviceToHost))
    check(rccl.ncclCommDestroy(comm))
    check(hip.hipFree(buffer))
    return float(array[0])


@parametrize(
    ("vendor", "module", "make", "function"),
    [("cuda", "nccl.core", nccl_id, nccl_sum), ("hip", "rocm.bindings.rccl", rccl_id, rccl_sum)],
    first=1,
)
def test_collectives(vendor: str, module: str, make: Callable[..., Any], function: Callable[..., Any]) -> None:
    needs(vendor, *(["nccl"] if vendor == "cuda" else []), module)
    with Ranks(3, fakes.environment(vendor, devices=3, timeout=5), join=False) as ranks:
        ranks.start(make, only=[0])
        [identity] = finish(ranks, [0])
        assert ranks.run(function, identity) == [6.0] * 3
