"""AMD GPUs, through hip-python's bindings of the HIP runtime and of hipRTC.

hip-python has two lines: ``rocm.bindings`` (10 and later) and ``hip`` (up to 7). Their functions are the same.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from mmap import PAGESIZE
from typing import Any

from ...errors import DeviceError
from .base import HIP_FUNCTIONS, IPC_BYTES, DmaBuf, Pointer, Vendor, check_handle
from .calls import Arguments, Calls
from .kernels import KernelTable, kept

_UUID_BYTES = 16
_UNCACHED = 3  # hip_runtime_api.h: hipDeviceMallocUncached, which neither line of hip-python names
INSTALL = "pip install 'hetcoll[rocm]'"


def _import(name: str) -> Calls:
    for package in ("rocm.bindings", "hip"):
        try:
            return Calls(importlib.import_module(f"{package}.{name}"))
        except ImportError as error:
            problem = error
    raise DeviceError(f"hip-python is not installed ({problem}): {INSTALL}")


@functools.cache
def _start() -> Calls | str:
    """The runtime, initialised, or why there is none."""
    try:
        calls = _import("hip")
    except DeviceError as error:
        return str(error)
    try:
        calls("hipInit", 0)
        if not calls("hipGetDeviceCount"):
            return "AMD's runtime sees no GPU (HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES may hide it)"
        _library()
    except DeviceError as error:
        said = re.search(r"failed to dlopen .*: b'(.*)'", str(error))
        return f"AMD's runtime cannot be loaded: {said[1]}" if said else f"AMD's runtime cannot be used: {error}"
    return calls


def why_not() -> str | None:
    """Why no AMD GPU can be used here; None when one can."""
    found = _start()
    return found if isinstance(found, str) else None


def _runtime() -> Calls:
    found = _start()
    if isinstance(found, str):
        raise DeviceError(found)
    return found


@functools.cache
def device(index: int) -> HipDevice:
    """The GPU of that number, the same object at every call."""
    count = _runtime()("hipGetDeviceCount")
    if not 0 <= index < count:
        raise DeviceError(f"wanted one of {count} HIP devices, got {index}")
    return HipDevice(index)


def devices() -> list[HipDevice]:
    """All that this process sees; empty where `why_not` says why."""
    found = _start()
    return [] if isinstance(found, str) else [device(i) for i in range(found("hipGetDeviceCount"))]


def current() -> HipDevice:
    """The device that is current on this thread; HIP always has one."""
    return device(_runtime()("hipGetDevice"))


class HipDevice:
    """One GPU."""

    vendor: Vendor = "hip"
    dlpack = 10

    def __init__(self, index: int) -> None:
        self._calls = _runtime()
        about = _filled(self._calls, "hipGetDeviceProperties", "hipDeviceProp_t", index)
        self.index = index
        self.name = _text(about.name)
        self.arch = _text(about.gcnArchName)
        self.bus_id = f"{about.pciDomainID:04x}:{about.pciBusID:02x}:{about.pciDeviceID:02x}.0"
        self.uuid = _raw(self._calls("hipDeviceGetUuid", index), _UUID_BYTES).hex()
        self.memory = int(about.totalGlobalMem)
        self.multiprocessors = int(about.multiProcessorCount)
        self.stream_memory_ops = bool(self._attribute("CanUseStreamWaitValue"))
        # Whether the host may load from and store to device memory by its address.
        self.large_bar = bool(self._attribute("IsLargeBar"))

    def __repr__(self) -> str:
        return f"<HIP device {self.index}: {self.name}>"

    def _attribute(self, name: str) -> int:
        key = getattr(self._calls.module.hipDeviceAttribute_t, f"hipDeviceAttribute{name}")
        return int(self._calls("hipDeviceGetAttribute", key, self.index))

    def activate(self) -> None:
        if self._calls("hipGetDevice") != self.index:
            self._calls("hipSetDevice", self.index)

    def active(self) -> AbstractContextManager[object]:
        return self._active()

    @contextmanager
    def _active(self) -> Iterator[Calls]:
        """The runtime, with this device current for as long as the block runs."""
        before = self._calls("hipGetDevice")
        if before == self.index:
            yield self._calls
            return
        self._calls("hipSetDevice", self.index)
        try:
            yield self._calls
        finally:
            self._calls("hipSetDevice", before)

    @contextmanager
    def _during_capture(self) -> Iterator[Calls]:
        """The same; what would break a capture that other streams of this thread are in is allowed."""
        # hip-python's own wrapper has no way in for the mode.
        exchange = _library().hipThreadExchangeStreamCaptureMode
        mode = ctypes.c_int(self._calls.module.hipStreamCaptureMode.hipStreamCaptureModeRelaxed)
        with self._active() as calls:
            exchange(ctypes.byref(mode))
            try:
                yield calls
            finally:
                exchange(ctypes.byref(mode))

    # ---- Memory ----

    def allocate(self, nbytes: int, *, uncached: bool = False) -> int:
        with self._during_capture() as calls:
            return int(calls("hipExtMallocWithFlags", nbytes, _UNCACHED) if uncached else calls("hipMalloc", nbytes))

    def free(self, address: int) -> None:
        with self._during_capture() as calls:
            calls("hipFree", address)

    def allocate_host(self, nbytes: int) -> int:
        hip = self._calls.module
        # Coherent: fine-grained, so that a kernel that still runs and the host see each other's words.
        flags = hip.hipHostMallocPortable | hip.hipHostMallocMapped | hip.hipHostMallocCoherent
        with self._during_capture() as calls:
            return int(calls("hipHostMalloc", nbytes, flags))

    def free_host(self, address: int) -> None:
        with self._during_capture() as calls:
            calls("hipHostFree", address)

    def register_host(self, address: int, nbytes: int) -> int:
        flags = self._calls.module.hipHostRegisterPortable | self._calls.module.hipHostRegisterMapped
        with self._during_capture() as calls:
            calls("hipHostRegister", address, nbytes, flags)
            return int(calls("hipHostGetDevicePointer", address, 0))

    def unregister_host(self, address: int) -> None:
        with self._during_capture() as calls:
            calls("hipHostUnregister", address)

    def copy(self, dst: int, src: int, nbytes: int, stream: int | None = None) -> None:
        if not nbytes:
            return
        with self._during_capture() as calls:
            calls("hipMemcpyAsync", dst, src, nbytes, calls.module.hipMemcpyKind.hipMemcpyDefault, stream or 0)
            if stream is None:
                _block(calls, "hipStreamSynchronize", 0)

    def clear(self, address: int, nbytes: int) -> None:
        if not nbytes:
            return
        with self._during_capture() as calls:
            calls("hipMemsetAsync", address, 0, nbytes, 0)
            _block(calls, "hipStreamSynchronize", 0)

    def pointer(self, address: int) -> Pointer:
        unknown = Pointer("unknown", -1, address, 0)
        kinds = self._calls.module.hipMemoryType
        with self._active() as calls:
            try:
                found = _filled(calls, "hipPointerGetAttributes", "hipPointerAttribute_t", address)
            except DeviceError as error:
                if error.code == "hipErrorInvalidValue":
                    return unknown
                raise
            kind = int(found.type)
            if kind == kinds.hipMemoryTypeUnregistered:
                return unknown
            base, nbytes = self._range(address)
        if found.isManaged or kind == kinds.hipMemoryTypeManaged:
            return Pointer("managed", int(found.device), base, nbytes)
        if kind == kinds.hipMemoryTypeHost:
            return Pointer("host", -1, base, nbytes)
        return Pointer("device", int(found.device), base, nbytes)

    def _range(self, address: int) -> tuple[int, int]:
        try:
            base, nbytes = self._calls("hipMemGetAddressRange", address)
        except DeviceError:  # of registered host memory some versions know none
            return address, 0
        return int(base), int(nbytes)

    def ipc_handle(self, address: int) -> bytes:
        with self._active() as calls:
            return _raw(calls("hipIpcGetMemHandle", address), IPC_BYTES)

    def open_ipc(self, handle: bytes) -> int:
        check_handle(handle)
        native = self._calls.module.hipIpcMemHandle_st.fromObj(handle)
        with self._during_capture() as calls:
            return int(calls("hipIpcOpenMemHandle", native, calls.module.hipIpcMemLazyEnablePeerAccess))

    def close_ipc(self, address: int) -> None:
        with self._during_capture() as calls:
            calls("hipIpcCloseMemHandle", address)

    def dmabuf(self, address: int, nbytes: int) -> DmaBuf:
        # Whole pages of the host, as the driver wants them.
        start = address // PAGESIZE * PAGESIZE
        end = -(-(address + nbytes) // PAGESIZE) * PAGESIZE
        kind = self._calls.module.hipMemRangeHandleType.hipMemRangeHandleTypeDmaBufFd
        fd = ctypes.c_int(-1)
        with self._active() as calls:
            calls("hipMemGetHandleForAddressRange", ctypes.addressof(fd), start, end - start, kind, 0)
        os.set_inheritable(fd.value, False)
        return DmaBuf(fd.value, address - start, nbytes)

    # ---- Streams and events ----

    def stream(self, priority: int = 0) -> int:
        with self._active() as calls:
            least, greatest = calls("hipDeviceGetStreamPriorityRange")
            urgency = min(max(priority, greatest), least)
            return int(calls("hipStreamCreateWithPriority", calls.module.hipStreamNonBlocking, urgency))

    def destroy_stream(self, stream: int) -> None:
        with self._active() as calls:
            calls("hipStreamDestroy", stream)

    def event(self, timing: bool = False) -> int:
        with self._active() as calls:
            flags = calls.module.hipEventDefault if timing else calls.module.hipEventDisableTiming
            return int(calls("hipEventCreateWithFlags", flags))

    def destroy_event(self, event: int) -> None:
        with self._active() as calls:
            calls("hipEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        with self._active() as calls:
            calls("hipEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        with self._active() as calls:
            calls("hipStreamWaitEvent", stream, event, 0)

    def query(self, event: int) -> bool:
        with self._during_capture() as calls:
            code = calls.status("hipEventQuery", event)
        if code not in ("", "hipErrorNotReady"):
            raise DeviceError(f"hipEventQuery: {code}", code)
        return not code

    def synchronize_event(self, event: int) -> None:
        with self._active() as calls:
            _block(calls, "hipEventSynchronize", event)

    def elapsed(self, start: int, end: int) -> float:
        with self._active() as calls:
            return float(calls("hipEventElapsedTime", start, end)) / 1000

    def synchronize(self, stream: int | None = None) -> None:
        with self._active() as calls:
            if stream is None:
                _block(calls, "hipDeviceSynchronize")
            else:
                _block(calls, "hipStreamSynchronize", stream)

    def capturing(self, stream: int) -> bool:
        none = self._calls.module.hipStreamCaptureStatus.hipStreamCaptureStatusNone
        with self._active() as calls:
            return bool(calls("hipStreamIsCapturing", stream) != none)

    # ---- For the engine ----

    def functions(self) -> Mapping[str, int]:
        return {**_functions(), "device": self.index}

    @functools.cached_property
    def _kernels(self) -> KernelTable:
        return KernelTable(self, Hiprtc(self.arch), kept())

    def kernels(self) -> KernelTable:
        return self._kernels

    def load(self, image: bytes) -> int:
        with self._during_capture() as calls:
            return int(calls("hipModuleLoadData", image))

    def function(self, module: int, name: str) -> int:
        with self._during_capture() as calls:
            return int(calls("hipModuleGetFunction", module, name.encode()))

    def launch(self, function: int, grid: int, block: int, arguments: list[bytes], stream: int) -> None:
        given = Arguments(arguments)
        with self._active() as calls:
            calls("hipModuleLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, given.address, None)


def _filled(calls: Calls, name: str, struct: str, *arguments: Any) -> Any:
    """The struct that a function fills: the older line of hip-python wants it as an argument, the newer returns it."""
    if calls.module.__name__.startswith("rocm."):
        return calls(name, *arguments)
    made = getattr(calls.module, struct)()
    calls(name, made, *arguments)
    return made


@functools.cache
def _library() -> ctypes.CDLL:
    """The runtime that hip-python has loaded, for what only its addresses can do."""
    with open("/proc/self/maps") as maps:
        paths = sorted(set(re.findall(r"(/\S*/libamdhip64\.so\S*)", maps.read())))
    if len(paths) != 1:  # two runtimes know nothing of each other's memory and streams
        raise DeviceError(f"wanted one libamdhip64.so in this process, got {', '.join(paths) or 'none'}")
    return ctypes.CDLL(paths[0])


def _block(calls: Calls, name: str, *handles: int) -> None:
    """A call that waits, while other threads run: the older line of hip-python keeps Python's lock."""
    error = getattr(_library(), name)(*map(ctypes.c_void_p, handles))
    if error:
        code = calls.module.hipError_t(error).name
        raise DeviceError(f"{name}: {code}", code)


@functools.cache
def _functions() -> dict[str, int]:
    return {name: ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0 for name in HIP_FUNCTIONS}


def _text(raw: bytes | str) -> str:
    text = raw if isinstance(raw, str) else raw.split(b"\0", 1)[0].decode()
    return text.strip()


def _raw(struct: Any, nbytes: int) -> bytes:
    """A struct's bytes. (The older line of hip-python takes arrays of chars for text, and ends them at a zero.)"""
    return ctypes.string_at(struct.as_c_void_p().value, nbytes)


class Hiprtc:
    """AMD's run-time compiler, for one architecture."""

    def __init__(self, arch: str) -> None:
        self._calls = _import("hiprtc")
        try:
            version = self._calls("hiprtcVersion")
        except DeviceError as error:
            raise DeviceError(f"hipRTC, which compiles kernels, cannot be used: {error}") from error
        # No contraction: a product and a sum are rounded each, as on the host.
        self._options = (f"--offload-arch={arch}", "-std=c++17", "-O3", "-ffp-contract=off")
        self.key = f"hiprtc {version[0]}.{version[1]} {' '.join(self._options)}"

    def compile(self, name: str, source: str) -> bytes:
        program = self._calls("hiprtcCreateProgram", source.encode(), f"{name}.hip".encode(), 0, None, None)
        try:
            options = [option.encode() for option in self._options]
            code = self._calls.status("hiprtcCompileProgram", program, len(options), options)
            if code:
                log = self._output("hiprtcGetProgramLog", program).decode(errors="replace").strip("\0\n ")
                raise DeviceError(f"hipRTC cannot compile the kernels of {name}: {code}\n{log}", code)
            return self._output("hiprtcGetCode", program)
        finally:
            self._calls("hiprtcDestroyProgram", program.createRef())

    def _output(self, what: str, program: Any) -> bytes:
        data = bytearray(self._calls(f"{what}Size", program))
        self._calls(what, program, data)
        return bytes(data)
