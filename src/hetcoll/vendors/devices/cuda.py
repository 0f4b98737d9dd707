"""NVIDIA GPUs, through cuda-python's bindings of the driver and of NVRTC.

The driver's API alone is used, on primary contexts, so that whatever else uses CUDA in the process shares them.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from mmap import PAGESIZE
from typing import Any

from ...errors import DeviceError
from .base import CUDA_FUNCTIONS, IPC_BYTES, DmaBuf, Pointer, Vendor, check_handle
from .calls import Arguments, Calls
from .kernels import KernelTable, kept

INSTALL = "pip install 'hetcoll[cuda]'"
_ABI = 12000  # the functions' signatures are those of CUDA 12.0


@functools.cache
def _start() -> Calls | str:
    """The driver, initialised, or why there is none."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"cuda-python is not installed ({error}): {INSTALL}"
    calls = Calls(driver)
    try:
        calls("cuInit", 0)
        if not calls("cuDeviceGetCount"):
            return "NVIDIA's driver sees no GPU (CUDA_VISIBLE_DEVICES may hide it)"
    except DeviceError as error:
        if error.code:
            return f"NVIDIA's driver cannot be used: {error}"
        return "NVIDIA's driver is not installed, or too old: libcuda.so.1 with cuInit cannot be loaded"
    return calls


def why_not() -> str | None:
    """Why no NVIDIA GPU can be used here; None when one can."""
    found = _start()
    return found if isinstance(found, str) else None


def _driver() -> Calls:
    found = _start()
    if isinstance(found, str):
        raise DeviceError(found)
    return found


@functools.cache
def device(index: int) -> CudaDevice:
    """The GPU of that number, the same object at every call."""
    count = _driver()("cuDeviceGetCount")
    if not 0 <= index < count:
        raise DeviceError(f"wanted one of {count} CUDA devices, got {index}")
    return CudaDevice(index)


def devices() -> list[CudaDevice]:
    """All that this process sees; empty where `why_not` says why."""
    found = _start()
    return [] if isinstance(found, str) else [device(i) for i in range(found("cuDeviceGetCount"))]


def current() -> CudaDevice:
    """The device that is current on this thread, or the first."""
    calls = _driver()
    return device(int(calls("cuCtxGetDevice")) if int(calls("cuCtxGetCurrent")) else 0)


class CudaDevice:
    """One GPU. Its primary context is made when first needed."""

    vendor: Vendor = "cuda"
    dlpack = 2

    def __init__(self, index: int) -> None:
        self._calls = _driver()
        self._handle = self._calls("cuDeviceGet", index)
        self.index = index
        self.name = _text(self._calls("cuDeviceGetName", 128, self._handle))
        self.bus_id = _text(self._calls("cuDeviceGetPCIBusId", 32, self._handle)).lower()
        self.uuid = bytes(self._calls("cuDeviceGetUuid", self._handle).bytes).hex()
        self.memory = int(self._calls("cuDeviceTotalMem", self._handle))
        self.multiprocessors = self._attribute("MULTIPROCESSOR_COUNT")
        self.arch = f"sm_{self._attribute('COMPUTE_CAPABILITY_MAJOR')}{self._attribute('COMPUTE_CAPABILITY_MINOR')}"
        self.stream_memory_ops = bool(self._attribute("CAN_USE_64_BIT_STREAM_MEM_OPS"))

    def __repr__(self) -> str:
        return f"<CUDA device {self.index}: {self.name}>"

    def _attribute(self, name: str) -> int:
        key = getattr(self._calls.module.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._calls("cuDeviceGetAttribute", key, self._handle))

    @functools.cached_property
    def context(self) -> int:
        """The primary context's address. It is kept for as long as the process lives."""
        return int(self._calls("cuDevicePrimaryCtxRetain", self._handle))

    def activate(self) -> None:
        if int(self._calls("cuCtxGetCurrent")) != self.context:
            self._calls("cuCtxSetCurrent", self.context)

    def active(self) -> AbstractContextManager[object]:
        return self._active()

    @contextmanager
    def _active(self) -> Iterator[Calls]:
        """The driver, with this device current for as long as the block runs."""
        if int(self._calls("cuCtxGetCurrent")) == self.context:
            yield self._calls
            return
        self._calls("cuCtxPushCurrent", self.context)
        try:
            yield self._calls
        finally:
            self._calls("cuCtxPopCurrent")

    @contextmanager
    def _during_capture(self) -> Iterator[Calls]:
        """The same; what would break a capture that other streams of this thread are in is allowed."""
        relaxed = self._calls.module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with self._active() as calls:
            before = calls("cuThreadExchangeStreamCaptureMode", relaxed)
            try:
                yield calls
            finally:
                calls("cuThreadExchangeStreamCaptureMode", before)

    # ---- Memory ----

    def allocate(self, nbytes: int, *, uncached: bool = False) -> int:
        del uncached  # all is, for other GPUs' kernels, by the instructions that these read with (platform.h)
        with self._during_capture() as calls:
            return int(calls("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        with self._during_capture() as calls:
            calls("cuMemFree", address)

    def allocate_host(self, nbytes: int) -> int:
        flags = self._calls.module.CU_MEMHOSTALLOC_PORTABLE | self._calls.module.CU_MEMHOSTALLOC_DEVICEMAP
        with self._during_capture() as calls:
            return int(calls("cuMemHostAlloc", nbytes, flags))

    def free_host(self, address: int) -> None:
        with self._during_capture() as calls:
            calls("cuMemFreeHost", address)

    def register_host(self, address: int, nbytes: int) -> int:
        flags = self._calls.module.CU_MEMHOSTREGISTER_PORTABLE | self._calls.module.CU_MEMHOSTREGISTER_DEVICEMAP
        with self._during_capture() as calls:
            calls("cuMemHostRegister", address, nbytes, flags)
            return int(calls("cuMemHostGetDevicePointer", address, 0))

    def unregister_host(self, address: int) -> None:
        with self._during_capture() as calls:
            calls("cuMemHostUnregister", address)

    def copy(self, dst: int, src: int, nbytes: int, stream: int | None = None) -> None:
        if not nbytes:
            return
        with self._during_capture() as calls:
            calls("cuMemcpyAsync", dst, src, nbytes, stream or 0)
            if stream is None:
                calls("cuStreamSynchronize", 0)

    def clear(self, address: int, nbytes: int) -> None:
        if not nbytes:
            return
        with self._during_capture() as calls:
            calls("cuMemsetD8Async", address, 0, nbytes, 0)
            calls("cuStreamSynchronize", 0)

    def pointer(self, address: int) -> Pointer:
        with self._active():
            kind = self._about(address, "MEMORY_TYPE")
            if kind is None:
                return Pointer("unknown", -1, address, 0)
            base = int(self._about(address, "RANGE_START_ADDR") or address)
            nbytes = int(self._about(address, "RANGE_SIZE") or 0)
            if self._about(address, "IS_MANAGED"):
                return Pointer("managed", self._ordinal(address), base, nbytes)
            if int(kind) == int(self._calls.module.CUmemorytype.CU_MEMORYTYPE_HOST):
                return Pointer("host", -1, base, nbytes)
            return Pointer("device", self._ordinal(address), base, nbytes)

    def _about(self, address: int, name: str) -> Any:
        """An attribute of a pointer; None of memory that the driver does not know."""
        key = getattr(self._calls.module.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        try:
            return self._calls("cuPointerGetAttribute", key, address)
        except DeviceError as error:
            if error.code == "CUDA_ERROR_INVALID_VALUE":
                return None
            raise

    def _ordinal(self, address: int) -> int:
        """The number of the device. From the driver itself: with cuda-python it was 0 for memory of every GPU (seen on
        two H200s, where the driver said 1)."""
        key = self._calls.module.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        found = ctypes.c_int(-1)
        if code := _pointer_attribute()(ctypes.byref(found), int(key), address):
            raise DeviceError(f"cuPointerGetAttribute: error {code}")
        return found.value

    def ipc_handle(self, address: int) -> bytes:
        with self._active() as calls:  # cuda-python shows where the handle's bytes are, not what they are
            return ctypes.string_at(calls("cuIpcGetMemHandle", address).getPtr(), IPC_BYTES)

    def open_ipc(self, handle: bytes) -> int:
        native = self._calls.module.CUipcMemHandle()
        check_handle(handle)
        ctypes.memmove(native.getPtr(), handle, IPC_BYTES)
        flags = self._calls.module.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with self._during_capture() as calls:
            return int(calls("cuIpcOpenMemHandle", native, int(flags)))

    def close_ipc(self, address: int) -> None:
        with self._during_capture() as calls:
            calls("cuIpcCloseMemHandle", address)

    def dmabuf(self, address: int, nbytes: int) -> DmaBuf:
        # Whole pages of the host, as the driver wants them.
        start = address // PAGESIZE * PAGESIZE
        end = -(-(address + nbytes) // PAGESIZE) * PAGESIZE
        kind = self._calls.module.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        with self._active() as calls:
            fd = int(calls("cuMemGetHandleForAddressRange", start, end - start, kind, 0))
        os.set_inheritable(fd, False)
        return DmaBuf(fd, address - start, nbytes)

    # ---- Streams and events ----

    def stream(self, priority: int = 0) -> int:
        flags = int(self._calls.module.CUstream_flags.CU_STREAM_NON_BLOCKING)
        with self._active() as calls:
            least, greatest = calls("cuCtxGetStreamPriorityRange")
            return int(calls("cuStreamCreateWithPriority", flags, min(max(priority, greatest), least)))

    def destroy_stream(self, stream: int) -> None:
        with self._active() as calls:
            calls("cuStreamDestroy", stream)

    def event(self, timing: bool = False) -> int:
        flags = self._calls.module.CUevent_flags
        with self._active() as calls:
            chosen = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
            return int(calls("cuEventCreate", int(chosen)))

    def destroy_event(self, event: int) -> None:
        with self._active() as calls:
            calls("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        with self._active() as calls:
            calls("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        with self._active() as calls:
            calls("cuStreamWaitEvent", stream, event, 0)

    def query(self, event: int) -> bool:
        with self._during_capture() as calls:
            code = calls.status("cuEventQuery", event)
        if code not in ("", "CUDA_ERROR_NOT_READY"):
            raise DeviceError(f"cuEventQuery: {code}", code)
        return not code

    def synchronize_event(self, event: int) -> None:
        with self._active() as calls:
            calls("cuEventSynchronize", event)

    def elapsed(self, start: int, end: int) -> float:
        with self._active() as calls:
            return float(calls("cuEventElapsedTime", start, end)) / 1000

    def synchronize(self, stream: int | None = None) -> None:
        with self._during_capture() as calls:
            if stream is None:
                calls("cuCtxSynchronize")
            else:
                calls("cuStreamSynchronize", stream)

    def capturing(self, stream: int) -> bool:
        none = self._calls.module.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        with self._active() as calls:
            return bool(calls("cuStreamIsCapturing", stream) != none)

    # ---- For the engine ----

    def functions(self) -> Mapping[str, int]:
        return {**_functions(), "context": self.context}

    @functools.cached_property
    def _kernels(self) -> KernelTable:
        return KernelTable(self, Nvrtc(self.arch), kept())

    def kernels(self) -> KernelTable:
        return self._kernels

    def load(self, image: bytes) -> int:
        with self._during_capture() as calls:
            return int(calls("cuModuleLoadData", image))

    def function(self, module: int, name: str) -> int:
        with self._during_capture() as calls:
            found = calls("cuModuleGetFunction", module, name.encode())
            # A first launch that loads would wait for kernels that wait for it.
            calls("cuFuncGetAttribute", calls.module.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, found)
            return int(found)

    def launch(self, function: int, grid: int, block: int, arguments: list[bytes], stream: int) -> None:
        given = Arguments(arguments)
        with self._active() as calls:
            calls("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, given.address, 0)


@functools.cache
def _pointer_attribute() -> Callable[..., int]:
    address = _driver()("cuGetProcAddress", b"cuPointerGetAttribute", _ABI, 0)[0]
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)(int(address))


@functools.cache
def _functions() -> dict[str, int]:
    calls = _driver()
    return {name: int(calls("cuGetProcAddress", name.encode(), _ABI, 0)[0] or 0) for name in CUDA_FUNCTIONS}


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode().strip()


class Nvrtc:
    """NVIDIA's run-time compiler, for one architecture."""

    def __init__(self, arch: str) -> None:
        try:
            from cuda.bindings import nvrtc
        except ImportError as error:
            raise DeviceError(f"cuda-python is not installed ({error}): {INSTALL}") from error
        self._calls = Calls(nvrtc)
        try:
            version = self._calls("nvrtcVersion")
            known = self._calls("nvrtcGetSupportedArchs")
        except DeviceError as error:
            raise DeviceError(f"NVRTC, which compiles kernels, cannot be used: {error}; {INSTALL}") from error
        # What is newer than the compiler gets PTX of the newest that it knows, for the driver to translate.
        wanted = int(arch.removeprefix("sm_"))
        best = max((a for a in known if a <= wanted), default=None)
        if best is None:
            raise DeviceError(f"NVRTC {version[0]}.{version[1]} compiles for {known}, not for {arch}")
        self._binary = best == wanted
        self._options = (
            f"--gpu-architecture={'sm' if self._binary else 'compute'}_{best}",
            "--std=c++17",
            "--fmad=false",  # a product and a sum are rounded each, as on the host
            "-default-device",
        )
        self.key = f"nvrtc {version[0]}.{version[1]} {' '.join(self._options)}"

    def compile(self, name: str, source: str) -> bytes:
        program = self._calls("nvrtcCreateProgram", source.encode(), f"{name}.cu".encode(), 0, [], [])
        try:
            options = [option.encode() for option in self._options]
            code = self._calls.status("nvrtcCompileProgram", program, len(options), options)
            if code:
                log = self._output("nvrtcGetProgramLog", program).decode(errors="replace").strip("\0\n ")
                raise DeviceError(f"NVRTC cannot compile the kernels of {name}: {code}\n{log}", code)
            return self._output("nvrtcGetCUBIN" if self._binary else "nvrtcGetPTX", program)
        finally:
            self._calls("nvrtcDestroyProgram", program)

    def _output(self, what: str, program: Any) -> bytes:
        data = bytes(self._calls(f"{what}Size", program))
        self._calls(what, program, data)
        return data
