"""The vendors' drivers through their real Python packages, in the same words: what the tests of the fakes call.

Addresses, streams and events are ints. A call that fails raises `DriverError`, which holds the vendor's number.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np

HANDLE_BYTES = 64


class DriverError(Exception):
    """A call was refused: the vendor's number, and the call (or what a compiler said)."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(code, call)
        self.code = code


def arguments(*values: int | np.generic | ctypes.Structure) -> tuple[ctypes.Array[ctypes.c_void_p], list[Any]]:
    """A kernel's parameters as launches take them, and what must live until then; an int is an address or a count."""
    held: list[Any] = []
    for value in values:
        if isinstance(value, np.generic):
            held.append(ctypes.create_string_buffer(value.tobytes(), value.nbytes))
        else:
            held.append(value if isinstance(value, ctypes.Structure) else ctypes.c_uint64(value))
    return (ctypes.c_void_p * max(1, len(held)))(*(ctypes.addressof(each) for each in held)), held


class Driver:
    """What both have: it frees whatever it allocated."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._blocks: list[int] = []
        self._host_blocks: list[int] = []

    def allocate(self, nbytes: int) -> int:
        self._blocks.append(self._allocate(nbytes))
        return self._blocks[-1]

    def free(self, address: int) -> None:
        self._free(address)
        self._blocks.remove(address)

    def allocate_host(self, nbytes: int) -> int:
        self._host_blocks.append(self._allocate_host(nbytes))
        return self._host_blocks[-1]

    def free_host(self, address: int) -> None:
        self._free_host(address)
        self._host_blocks.remove(address)

    def close(self) -> None:
        self.use()
        with contextlib.suppress(DriverError):  # a device that failed says so once more
            self.synchronize_device()
        for free, blocks in ((self._free, self._blocks), (self._free_host, self._host_blocks)):
            while blocks:
                with contextlib.suppress(DriverError):
                    free(blocks.pop())

    def ready(self, name: str, handle: int) -> bool:
        """A query: False when it answers "not ready"."""
        try:
            self.call(name, handle)
        except DriverError as error:
            if error.code != 600:
                raise
            return False
        return True

    use: Any
    call: Any
    synchronize_device: Any
    _allocate: Any
    _free: Any
    _allocate_host: Any
    _free_host: Any


class Cuda(Driver):
    """cuda.bindings.driver and cuda.bindings.nvrtc."""

    arch = "sm_90"

    def __init__(self, device: int = 0) -> None:
        from cuda.bindings import driver, nvrtc

        super().__init__(device)
        self.api, self.nvrtc = driver, nvrtc
        self.call("cuInit", 0)
        self.context = self.call("cuDevicePrimaryCtxRetain", device)
        self.use()

    def use(self) -> None:
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name: str, *args: Any) -> Any:
        code, *values = getattr(self.api, name)(*args)
        if int(code):
            raise DriverError(int(code), name)
        return values[0] if len(values) == 1 else tuple(values)

    def count(self) -> int:
        return int(self.call("cuDeviceGetCount"))

    def bus_id(self) -> str:
        return bytes(self.call("cuDeviceGetPCIBusId", 32, self.device)).split(b"\0")[0].decode()

    def _allocate(self, nbytes: int) -> int:
        return int(self.call("cuMemAlloc", nbytes))

    def _free(self, address: int) -> None:
        self.call("cuMemFree", address)

    def allocate_in_order(self, nbytes: int, stream: int) -> int:
        return int(self.call("cuMemAllocAsync", nbytes, stream))

    def free_in_order(self, address: int, stream: int) -> None:
        self.call("cuMemFreeAsync", address, stream)

    def _allocate_host(self, nbytes: int) -> int:
        return int(self.call("cuMemHostAlloc", nbytes, 3))

    def _free_host(self, address: int) -> None:
        self.call("cuMemFreeHost", address)

    def register(self, address: int, nbytes: int) -> int:
        self.call("cuMemHostRegister", address, nbytes, 3)
        return int(self.call("cuMemHostGetDevicePointer", address, 0))

    def unregister(self, address: int) -> None:
        self.call("cuMemHostUnregister", address)

    def copy(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        if stream is None:
            self.call("cuMemcpy", to, source, nbytes)
        else:
            self.call("cuMemcpyAsync", to, source, nbytes, stream)

    def fill(self, to: int, value: int, nbytes: int, stream: int) -> None:
        self.call("cuMemsetD8Async", to, value, nbytes, stream)

    def pointer(self, address: int) -> tuple[str, int]:
        """What kind of memory it is, and of which device."""
        kind = self.api.CUpointer_attribute
        mapped = self.call("cuPointerGetAttribute", kind.CU_POINTER_ATTRIBUTE_MAPPED, address)
        if not mapped:
            return "unknown", -1
        memory = int(self.call("cuPointerGetAttribute", kind.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address))
        device = int(self.call("cuPointerGetAttribute", kind.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address))
        return {1: "host", 2: "device"}[memory], device

    def extent(self, address: int) -> tuple[int, int]:
        base, nbytes = self.call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def ipc_handle(self, address: int) -> bytes:
        handle = self.call("cuIpcGetMemHandle", address)  # which owns the bytes
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open_ipc(self, data: bytes) -> int:
        handle = self.api.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), data, HANDLE_BYTES)
        return int(self.call("cuIpcOpenMemHandle", handle, 1))

    def close_ipc(self, address: int) -> None:
        self.call("cuIpcCloseMemHandle", address)

    def dmabuf(self, address: int, nbytes: int) -> int:
        return int(self.call("cuMemGetHandleForAddressRange", address, nbytes, self.api.CUmemRangeHandleType(1), 0))

    def stream(self, priority: int = 0) -> int:
        return int(self.call("cuStreamCreateWithPriority", 1, priority))

    def blocking_stream(self) -> int:
        return int(self.call("cuStreamCreate", 0))

    def destroy_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy", stream)

    def idle(self, stream: int) -> bool:
        return self.ready("cuStreamQuery", stream)

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", stream)

    def synchronize_device(self) -> None:
        self.call("cuCtxSynchronize")

    def event(self, flags: int = 2) -> int:
        return int(self.call("cuEventCreate", flags))

    def destroy_event(self, event: int) -> None:
        self.call("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", event, stream)

    def reached(self, event: int) -> bool:
        return self.ready("cuEventQuery", event)

    def synchronize_event(self, event: int) -> None:
        self.call("cuEventSynchronize", event)

    def elapsed(self, start: int, end: int) -> float:
        return float(self.call("cuEventElapsedTime", start, end))

    def wait_event(self, stream: int, event: int) -> None:
        self.call("cuStreamWaitEvent", stream, event, 0)

    def event_handle(self, event: int) -> bytes:
        handle = self.call("cuIpcGetEventHandle", event)  # which owns the bytes
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open_event(self, data: bytes) -> int:
        handle = self.api.CUipcEventHandle()
        ctypes.memmove(handle.getPtr(), data, HANDLE_BYTES)
        return int(self.call("cuIpcOpenEventHandle", handle))

    def wait(self, stream: int, address: int, value: int, compare: int = 0, bits: int = 64) -> None:
        self.call(f"cuStreamWaitValue{bits}", stream, address, value, compare)

    def write(self, stream: int, address: int, value: int, bits: int = 64) -> None:
        self.call(f"cuStreamWriteValue{bits}", stream, address, value, 0)

    def host_function(self, stream: int, function: int, argument: int) -> None:
        self.call("cuLaunchHostFunc", stream, self.api.CUhostFn(function), argument)

    def enable_peer(self, device: int) -> None:
        self.call("cuCtxEnablePeerAccess", self.call("cuDevicePrimaryCtxRetain", device), 0)

    def compile(self, source: str, *options: str) -> bytes:
        code, program = self.nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
        words = [f"--gpu-architecture={self.arch}".encode(), b"-std=c++17", *(each.encode() for each in options)]
        (code,) = self.nvrtc.nvrtcCompileProgram(program, len(words), words)
        if int(code):
            log = b" " * self.nvrtc.nvrtcGetProgramLogSize(program)[1]
            self.nvrtc.nvrtcGetProgramLog(program, log)
            raise DriverError(int(code), log.decode())
        image = b" " * self.nvrtc.nvrtcGetCUBINSize(program)[1]
        self.nvrtc.nvrtcGetCUBIN(program, image)
        self.nvrtc.nvrtcDestroyProgram(program)
        return image

    def load(self, image: bytes) -> int:
        return int(self.call("cuModuleLoadData", image))

    def unload(self, module: int) -> None:
        self.call("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        return int(self.call("cuModuleGetFunction", module, name.encode()))

    def launch(self, function: int, grid: int, block: int, stream: int, *values: Any) -> None:
        parameters, held = arguments(*values)
        address = ctypes.addressof(parameters)
        self.call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, address, 0)
        del held

    def begin_capture(self, stream: int, mode: int = 0) -> None:
        self.call("cuStreamBeginCapture", stream, self.api.CUstreamCaptureMode(mode))

    def end_capture(self, stream: int) -> int:
        return int(self.call("cuStreamEndCapture", stream))

    def capturing(self, stream: int) -> int:
        return int(self.call("cuStreamIsCapturing", stream))

    def instantiate(self, graph: int) -> int:
        return int(self.call("cuGraphInstantiate", graph, 0))

    def replay(self, executable: int, stream: int) -> None:
        self.call("cuGraphLaunch", executable, stream)

    def destroy_graph(self, graph: int, executable: int) -> None:
        self.call("cuGraphExecDestroy", executable)
        self.call("cuGraphDestroy", graph)
