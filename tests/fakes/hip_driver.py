"""`drivers.Cuda`'s methods on hip-python (``rocm.bindings.hip``, ``rocm.bindings.hiprtc``)."""

from __future__ import annotations

import ctypes
from typing import Any

from .drivers import HANDLE_BYTES, Driver, DriverError, arguments


class Hip(Driver):
    arch = "gfx942"

    def __init__(self, device: int = 0) -> None:
        from rocm.bindings import hip, hiprtc

        super().__init__(device)
        self.api, self.rtc = hip, hiprtc
        self.use()

    def use(self) -> None:
        self.call("hipSetDevice", self.device)

    def call(self, name: str, *args: Any) -> Any:
        code, *values = getattr(self.api, name)(*args)
        if int(code):
            raise DriverError(int(code), name)
        return values[0] if len(values) == 1 else tuple(values)

    def count(self) -> int:
        return int(self.call("hipGetDeviceCount"))

    def bus_id(self) -> str:
        return str(self.call("hipDeviceGetPCIBusId", 32, self.device))

    def _allocate(self, nbytes: int) -> int:
        return int(self.call("hipMalloc", nbytes))

    def _free(self, address: int) -> None:
        self.call("hipFree", address)

    def allocate_signal(self) -> int:
        """The only memory that waits accept with GPU_STREAMOPS_CP_WAIT=1."""
        return int(self.call("hipExtMallocWithFlags", 8, self.api.hipMallocSignalMemory))

    def allocate_in_order(self, nbytes: int, stream: int) -> int:
        return int(self.call("hipMallocAsync", nbytes, stream))

    def free_in_order(self, address: int, stream: int) -> None:
        self.call("hipFreeAsync", address, stream)

    def _allocate_host(self, nbytes: int) -> int:
        return int(self.call("hipHostMalloc", nbytes, 3))

    def _free_host(self, address: int) -> None:
        self.call("hipHostFree", address)

    def register(self, address: int, nbytes: int) -> int:
        self.call("hipHostRegister", address, nbytes, 3)
        return int(self.call("hipHostGetDevicePointer", address, 0))

    def unregister(self, address: int) -> None:
        self.call("hipHostUnregister", address)

    def copy(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        kind = self.api.hipMemcpyKind.hipMemcpyDefault
        if stream is None:
            self.call("hipMemcpy", to, source, nbytes, kind)
        else:
            self.call("hipMemcpyAsync", to, source, nbytes, kind, stream)

    def fill(self, to: int, value: int, nbytes: int, stream: int) -> None:
        self.call("hipMemsetAsync", to, value, nbytes, stream)

    def pointer(self, address: int) -> tuple[str, int]:
        try:
            found = self.call("hipPointerGetAttributes", address)
        except DriverError as error:
            if error.code != 1:
                raise
            return "unknown", -1
        return {1: "host", 2: "device"}[int(found.type)], int(found.device)

    def extent(self, address: int) -> tuple[int, int]:
        base, nbytes = self.call("hipMemGetAddressRange", address)
        return int(base), int(nbytes)

    def ipc_handle(self, address: int) -> bytes:
        handle = self.call("hipIpcGetMemHandle", address)  # which owns the bytes
        return ctypes.string_at(handle.as_c_void_p(), HANDLE_BYTES)

    def open_ipc(self, data: bytes) -> int:
        handle = self.api.hipIpcMemHandle_st()
        ctypes.memmove(handle.as_c_void_p(), data, HANDLE_BYTES)
        return int(self.call("hipIpcOpenMemHandle", handle, 1))

    def close_ipc(self, address: int) -> None:
        self.call("hipIpcCloseMemHandle", address)

    def dmabuf(self, address: int, nbytes: int) -> int:
        descriptor = ctypes.c_int(-1)
        kind = self.api.hipMemRangeHandleType.hipMemRangeHandleTypeDmaBufFd
        self.call("hipMemGetHandleForAddressRange", ctypes.addressof(descriptor), address, nbytes, kind, 0)
        return descriptor.value

    def stream(self, priority: int = 0) -> int:
        return int(self.call("hipStreamCreateWithPriority", 1, priority))

    def blocking_stream(self) -> int:
        return int(self.call("hipStreamCreateWithFlags", 0))

    def destroy_stream(self, stream: int) -> None:
        self.call("hipStreamDestroy", stream)

    def idle(self, stream: int) -> bool:
        return self.ready("hipStreamQuery", stream)

    def synchronize(self, stream: int) -> None:
        self.call("hipStreamSynchronize", stream)

    def synchronize_device(self) -> None:
        self.call("hipDeviceSynchronize")

    def event(self, flags: int = 2) -> int:
        return int(self.call("hipEventCreateWithFlags", flags))

    def destroy_event(self, event: int) -> None:
        self.call("hipEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self.call("hipEventRecord", event, stream)

    def reached(self, event: int) -> bool:
        return self.ready("hipEventQuery", event)

    def synchronize_event(self, event: int) -> None:
        self.call("hipEventSynchronize", event)

    def elapsed(self, start: int, end: int) -> float:
        return float(self.call("hipEventElapsedTime", start, end))

    def wait_event(self, stream: int, event: int) -> None:
        self.call("hipStreamWaitEvent", stream, event, 0)

    def event_handle(self, event: int) -> bytes:
        handle = self.call("hipIpcGetEventHandle", event)  # which owns the bytes
        return ctypes.string_at(handle.as_c_void_p(), HANDLE_BYTES)

    def open_event(self, data: bytes) -> int:
        handle = self.api.hipIpcEventHandle_st()
        ctypes.memmove(handle.as_c_void_p(), data, HANDLE_BYTES)
        return int(self.call("hipIpcOpenEventHandle", handle))

    def wait(self, stream: int, address: int, value: int, compare: int = 0, bits: int = 64) -> None:
        self.call(f"hipStreamWaitValue{bits}", stream, address, value, compare, 2**bits - 1)

    def write(self, stream: int, address: int, value: int, bits: int = 64) -> None:
        self.call(f"hipStreamWriteValue{bits}", stream, address, value, 0)

    def host_function(self, stream: int, function: int, argument: int) -> None:
        self.call("hipLaunchHostFunc", stream, function, argument)

    def enable_peer(self, device: int) -> None:
        self.call("hipDeviceEnablePeerAccess", device, 0)

    def compile(self, source: str, *options: str) -> bytes:
        code, program = self.rtc.hiprtcCreateProgram(source.encode(), b"test.hip", 0, None, None)
        words = [f"--offload-arch={self.arch}".encode(), b"-std=c++17", *(each.encode() for each in options)]
        (code,) = self.rtc.hiprtcCompileProgram(program, len(words), words)
        if int(code):
            log = bytearray(self.rtc.hiprtcGetProgramLogSize(program)[1])
            self.rtc.hiprtcGetProgramLog(program, log)
            raise DriverError(int(code), log.decode())
        image = bytearray(self.rtc.hiprtcGetCodeSize(program)[1])
        self.rtc.hiprtcGetCode(program, image)
        self.rtc.hiprtcDestroyProgram(program.createRef())
        return bytes(image)

    def load(self, image: bytes) -> int:
        return int(self.call("hipModuleLoadData", image))

    def unload(self, module: int) -> None:
        self.call("hipModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        return int(self.call("hipModuleGetFunction", module, name.encode()))

    def launch(self, function: int, grid: int, block: int, stream: int, *values: Any) -> None:
        parameters, held = arguments(*values)
        address = ctypes.addressof(parameters)
        self.call("hipModuleLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, address, None)
        del held

    def begin_capture(self, stream: int, mode: int = 0) -> None:
        self.call("hipStreamBeginCapture", stream, self.api.hipStreamCaptureMode(mode))

    def end_capture(self, stream: int) -> int:
        return int(self.call("hipStreamEndCapture", stream))

    def capturing(self, stream: int) -> int:
        return int(self.call("hipStreamIsCapturing", stream))

    def instantiate(self, graph: int) -> int:
        return int(self.call("hipGraphInstantiateWithFlags", graph, 0))

    def replay(self, executable: int, stream: int) -> None:
        self.call("hipGraphLaunch", executable, stream)

    def destroy_graph(self, graph: int, executable: int) -> None:
        self.call("hipGraphExecDestroy", executable)
        self.call("hipGraphDestroy", graph)
