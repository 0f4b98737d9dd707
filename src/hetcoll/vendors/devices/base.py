"""What every GPU gives to the rest of the library, whoever made it.

Addresses and handles (streams, events, functions) are plain ints: the vendor's own pointers. Sizes are bytes, times
seconds. Everything a driver refuses is a `DeviceError` that names the call and the driver's own word for the reason.
No method but `activate` changes which device is current on the calling thread. Methods may be called from any thread,
but not from a fork's child: a driver's state does not survive a fork.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ...errors import ArgumentError

if TYPE_CHECKING:
    from .kernels import KernelTable

Vendor = Literal["cuda", "hip"]
IPC_BYTES = 64  # of a memory handle, with both vendors

# The names under which the engine looks for a driver's functions; `Device.functions` gives their addresses.
CUDA_FUNCTIONS = (
    "cuCtxGetCurrent", "cuCtxSetCurrent",
    "cuMemcpyAsync", "cuStreamWriteValue64", "cuStreamWaitValue64", "cuLaunchKernel",
    "cuLaunchHostFunc", "cuEventCreate", "cuEventDestroy", "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent",
    "cuStreamIsCapturing", "cuStreamGetCaptureInfo", "cuThreadExchangeStreamCaptureMode", "cuStreamSynchronize",
    "cuStreamQuery", "cuStreamCreateWithPriority", "cuStreamDestroy", "cuGetErrorName",
)  # fmt: skip
HIP_FUNCTIONS = (
    "hipGetDevice", "hipSetDevice",
    "hipMemcpyAsync", "hipStreamWriteValue64", "hipStreamWaitValue64", "hipModuleLaunchKernel",
    "hipLaunchHostFunc", "hipEventCreateWithFlags", "hipEventDestroy", "hipEventRecord", "hipEventQuery",
    "hipStreamWaitEvent", "hipStreamIsCapturing", "hipStreamGetCaptureInfo", "hipThreadExchangeStreamCaptureMode",
    "hipStreamSynchronize", "hipStreamQuery", "hipStreamCreateWithPriority", "hipStreamDestroy", "hipGetErrorName",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a driver knows about an address.

    `device` is the index of the GPU that owns the memory, -1 for host memory that no GPU owns. `base` and `nbytes`
    are the allocation's; of memory that the driver does not know ("unknown") they are the address itself and 0.
    """

    kind: Literal["device", "host", "managed", "unknown"]
    device: int
    base: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DmaBuf:
    """Device memory as a file descriptor, for a network card: the caller closes `fd`.

    The memory asked for starts `offset` bytes into it and is `nbytes` long.
    """

    fd: int
    offset: int
    nbytes: int


URGENT = -(1 << 10)
"""The highest priority of a stream that there is: our kernels are short, and a piece goes on only after them."""

PATIENT = 1 << 10
"""The lowest one, for copies that streams may wait for which got their work before. On AMD GPUs hardware queues are
shared by streams of the same priority alone, so ours of the highest hold none up; NVIDIA's copies are held up by no
other stream that waits."""


def check_handle(handle: bytes) -> None:
    """ArgumentError unless `handle` can be one that `Device.ipc_handle` gave."""
    if len(handle) != IPC_BYTES:
        raise ArgumentError(f"handle: wanted {IPC_BYTES} bytes, got {len(handle)}")


class Device(Protocol):
    """One GPU, as this process sees it."""

    @property
    def vendor(self) -> Vendor: ...

    @property
    def index(self) -> int:
        """The driver's number for it in this process (after CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES)."""

    @property
    def name(self) -> str:
        """The product's name, e.g. ``NVIDIA H200``."""

    @property
    def arch(self) -> str:
        """What kernels are compiled for: ``sm_90``, ``gfx942:sramecc+:xnack-``."""

    @property
    def bus_id(self) -> str:
        """PCI address in lower case, ``0000:1a:00.0``: the same GPU in every process of a host."""

    @property
    def uuid(self) -> str:
        """32 hexadecimal digits: the same GPU in every process, whatever is visible there."""

    @property
    def memory(self) -> int:
        """Bytes on the device."""

    @property
    def multiprocessors(self) -> int:
        """Streaming multiprocessors, or compute units."""

    @property
    def dlpack(self) -> int:
        """DLPack's device type: 2 (kDLCUDA) or 10 (kDLROCM)."""

    @property
    def stream_memory_ops(self) -> bool:
        """Whether streams can write a 64-bit value and wait for one, as the driver has it (no proof that it works)."""

    def activate(self) -> None:
        """Make the device current on this thread and leave it so. Cheap when it already is."""

    def active(self) -> AbstractContextManager[object]:
        """The device is current on this thread for as long as the block runs; afterwards what was before."""

    # ---- Memory ----

    def allocate(self, nbytes: int, *, uncached: bool = False) -> int:
        """Device memory, which IPC handles and dma-buf reach (not from a pool), at least 256-byte aligned. `uncached`:
        kernels of several GPUs may read and write it at once, none of which keeps it in a cache of its own."""

    def free(self, address: int) -> None:
        """Give back what `allocate` gave. May wait until the device is idle."""

    def allocate_host(self, nbytes: int) -> int:
        """Pinned host memory, coherent, at one address for the host and for all devices of the vendor."""

    def free_host(self, address: int) -> None:
        """Give back what `allocate_host` gave."""

    def register_host(self, address: int, nbytes: int) -> int:
        """Pin host memory of ours and map it for the device; returns the address that the device uses.

        Whole pages. Memory of a file must have its room (``posix_fallocate``): what cannot be pinned is refused.
        """

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`; `address` is the host's."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int | None = None) -> None:
        """Copy in any direction: in order on `stream`, or (None) complete on return and after earlier work.

        A blocking copy waits for work on the default stream only; other streams must be synchronised by the caller.
        """

    def clear(self, address: int, nbytes: int) -> None:
        """Write zeros into the device's memory, or pinned memory. Complete on return, as a blocking `copy` is; allowed
        while a stream of the thread is captured."""

    def pointer(self, address: int) -> Pointer:
        """What the driver knows about `address`."""

    def ipc_handle(self, address: int) -> bytes:
        """64 bytes from which another process of the host opens the allocation that begins at `address`."""

    def open_ipc(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here."""

    def close_ipc(self, address: int) -> None:
        """Unmap what `open_ipc` gave."""

    def dmabuf(self, address: int, nbytes: int) -> DmaBuf:
        """Device memory for `ibv_reg_dmabuf_mr`. `address` need not be aligned: the result says the offset."""

    # ---- Streams and events ----

    def stream(self, priority: int = 0) -> int:
        """A stream that does not wait for the default stream. Lower priorities are more urgent; 0 is the usual."""

    def destroy_stream(self, stream: int) -> None:
        """Destroy it; what is enqueued still runs."""

    def event(self, timing: bool = False) -> int:
        """An event; with `timing`, one that `elapsed` takes."""

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """`event` is done when all that `stream` has now is done."""

    def wait(self, stream: int, event: int) -> None:
        """What `stream` gets from now on runs after `event`."""

    def query(self, event: int) -> bool:
        """Whether it is done (one that was never recorded is)."""

    def synchronize_event(self, event: int) -> None:
        """Block until it is done."""

    def elapsed(self, start: int, end: int) -> float:
        """Seconds between two events that are done and were made with `timing`."""

    def synchronize(self, stream: int | None = None) -> None:
        """Block until the stream's work is done; None: all of the device's."""

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph. One whose capture is broken counts as captured."""

    # ---- For the engine ----

    def functions(self) -> Mapping[str, int]:
        """Addresses of the driver's functions by the names above, and `context` (CUcontext) or `device` (ordinal).

        An optional one that the driver lacks is 0: the stream memory operations.
        """

    def kernels(self) -> KernelTable:
        """The device's kernels: the same table at every call."""

    def load(self, image: bytes) -> int:
        """A module from what the vendor's compiler made; stays until the process ends.

        May wait until the device is idle, so not while a kernel waits for something that is still to be enqueued.
        """

    def function(self, module: int, name: str) -> int:
        """A kernel of a loaded module, ready to run (nothing is loaded lazily at its first launch)."""

    def launch(self, function: int, grid: int, block: int, arguments: list[bytes], stream: int) -> None:
        """Run a kernel of `grid` blocks with `block` threads; `arguments` are the values' bytes, in order.

        For set-up and tests: the engine launches through `functions`.
        """
