"""A vendor's library of collectives, opened at run time, and communicators of it.

NCCL 2.18 (2023) or newer, and RCCL of the same age: nccl.h, "Communicator Creation and Management". Setting up and
ending is done here, in Python; collectives are called by the engine, by the addresses in `Library.functions`.

A communicator comes to be in two steps. One that does not block is joined first, because only such a one can be waited
for with a deadline and be given up safely while it forms. But every call to a communicator that does not block is
launched by a thread of the library's, at a time of its own, and is on the stream only later. So the one that is kept is
split off the first and blocks: its calls enqueue and return.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ArgumentError, CommunicationError, DeviceError, HetcollError, InitError
from ...types import DType

if TYPE_CHECKING:
    from ..devices.base import Device

UNIQUE_ID_BYTES = 128
OLDEST = 21800  # ncclCommSplit
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t
_UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
_HOST_SCALAR = 1  # ncclScalarHostImmediate

_P, _I, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t

# Names under which the engine and its users look for functions; `Library.functions` gives their addresses.
FUNCTIONS = (
    "ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast", "ncclReduce", "ncclSend", "ncclRecv",
    "ncclGroupStart", "ncclGroupEnd", "ncclGetErrorString", "ncclGetLastError", "ncclGetVersion", "ncclGetUniqueId",
    "ncclCommInitRankConfig", "ncclCommSplit", "ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort",
    "ncclCommGetAsyncError", "ncclRedOpCreatePreMulSum", "ncclRedOpDestroy",
)  # fmt: skip
LATER_FUNCTIONS = ("ncclCommRegister", "ncclCommDeregister")  # 2.19


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of 2.18, which later versions of both libraries only add to.

    `traffic_class` is 2.27's, and padding before: 2.18's own size ends in the middle of a word that is read.
    """

    _fields_ = (
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", _I),
        ("cga_cluster_size", _I), ("min_ctas", _I), ("max_ctas", _I), ("net_name", ctypes.c_char_p),
        ("split_share", _I), ("traffic_class", _I),
    )  # fmt: skip

    @classmethod
    def make(cls, *, blocking: bool) -> _Config:
        return cls(
            ctypes.sizeof(cls), 0xCAFEBEEF, OLDEST, int(blocking), _UNDEFINED, _UNDEFINED, _UNDEFINED, None,
            _UNDEFINED, _UNDEFINED,
        )  # fmt: skip


_SIGNATURES = {
    "ncclGetErrorString": ctypes.CFUNCTYPE(ctypes.c_char_p, _I),
    "ncclGetLastError": ctypes.CFUNCTYPE(ctypes.c_char_p, _P),
    "ncclGetVersion": ctypes.CFUNCTYPE(_I, _P),
    "ncclGetUniqueId": ctypes.CFUNCTYPE(_I, _P),
    "ncclCommInitRankConfig": ctypes.CFUNCTYPE(_I, _P, _I, _UniqueId, _I, _P),
    "ncclCommSplit": ctypes.CFUNCTYPE(_I, _P, _I, _I, _P, _P),
    "ncclCommFinalize": ctypes.CFUNCTYPE(_I, _P),
    "ncclCommDestroy": ctypes.CFUNCTYPE(_I, _P),
    "ncclCommAbort": ctypes.CFUNCTYPE(_I, _P),
    "ncclCommGetAsyncError": ctypes.CFUNCTYPE(_I, _P, _P),
    "ncclRedOpCreatePreMulSum": ctypes.CFUNCTYPE(_I, _P, _P, _I, _I, _P),
    "ncclRedOpDestroy": ctypes.CFUNCTYPE(_I, _I, _P),
    "ncclCommRegister": ctypes.CFUNCTYPE(_I, _P, _P, _Z, _P),
    "ncclCommDeregister": ctypes.CFUNCTYPE(_I, _P, _P),
}


class Library:
    """``libnccl.so.2`` or ``librccl.so.1``. `name` is ``NCCL`` or ``RCCL``; `path` is what the loader is given.

    Raises
    ------
    DeviceError
        It cannot be opened, or is too old.
    """

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise DeviceError(f"{name} cannot be opened: {error}") from error
        self._addresses: dict[str, int] = {}
        for function in (*FUNCTIONS, *LATER_FUNCTIONS):
            if hasattr(library, function):
                self._addresses[function] = ctypes.cast(getattr(library, function), _P).value or 0
        self.version_code = self._version_code()
        missing = [function for function in FUNCTIONS if function not in self._addresses]
        if missing or self.version_code < OLDEST:
            raise DeviceError(f"{self}: wanted 2.18 or newer" + (f", with {', '.join(missing)}" if missing else ""))

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.path})"

    @property
    def version(self) -> str:
        """Such as ``2.28.9``."""
        major, rest = divmod(self.version_code, 10000)
        return f"{major}.{rest // 100}.{rest % 100}"

    def functions(self) -> Mapping[str, int]:
        """The addresses of those of `FUNCTIONS` and `LATER_FUNCTIONS` that there are."""
        return self._addresses

    def unique_id(self) -> bytes:
        """128 bytes that make one communicator, for all of its ranks. The caller's process then listens for them until
        all have come, or for as long as it lives: the library cannot be told that some never will.

        Raises
        ------
        DeviceError
            The library refuses, for instance for lack of a network interface.
        """
        made = _UniqueId()
        self.check("ncclGetUniqueId", ctypes.byref(made), error=DeviceError)
        return ctypes.string_at(ctypes.addressof(made), UNIQUE_ID_BYTES)

    def call(self, name: str, *arguments: object) -> int:
        """One function's ncclResult_t. DeviceError where this version lacks it."""
        if name not in self._addresses:
            raise DeviceError(f"{self} has no {name}")
        code: int = _SIGNATURES[name](self._addresses[name])(*arguments)
        return code

    def check(self, name: str, *arguments: object, error: type[HetcollError] = CommunicationError) -> None:
        """Call a function; anything but success raises `error` with the library's own words."""
        code = self.call(name, *arguments)
        if code != _SUCCESS:
            raise error(f"{name}: {self.words(code)}")

    def words(self, code: int) -> str:
        """The library's words for an ncclResult_t, and for the last thing that went wrong."""
        text: bytes = _SIGNATURES["ncclGetErrorString"](self._addresses["ncclGetErrorString"])(code)
        last: bytes | None = _SIGNATURES["ncclGetLastError"](self._addresses["ncclGetLastError"])(None)
        detail = (last or b"").decode(errors="replace").strip()
        return f"{self.name} {self.version}: {text.decode(errors='replace')}" + (f" ({detail})" if detail else "")

    def _version_code(self) -> int:
        code = ctypes.c_int()
        if "ncclGetVersion" not in self._addresses or self.call("ncclGetVersion", ctypes.byref(code)) != _SUCCESS:
            raise DeviceError(f"{self.path} is not {self.name}")
        return code.value


class Island:
    """A communicator of the library's among the members of one island.

    `handle` is its ncclComm_t; it is 0 after `abort` and `close`, after which nothing may call it any more. Methods may
    be called from any thread.

    Parameters
    ----------
    library
        The same version on all members.
    size, rank
        The number of members, and this one's place among them.
    unique_id
        What `Library.unique_id` gave to one of them, anew for each communicator.
    device
        This rank's GPU, on which no other member is.
    timeout
        Seconds for all members to come.
    sound
        Asked while they come: raises where some never will.

    Raises
    ------
    InitError
        Not all came in time, or the library refuses: has its words.
    """

    def __init__(
        self,
        library: Library,
        size: int,
        rank: int,
        unique_id: bytes,
        device: Device,
        timeout: float,
        sound: Callable[[], None] = lambda: None,
    ) -> None:
        if len(unique_id) != UNIQUE_ID_BYTES or not 0 <= rank < size:
            raise ArgumentError(f"wanted 128 bytes and a rank below {size}, got {len(unique_id)} bytes and rank {rank}")
        self.library, self.size, self.rank, self.handle = library, size, rank, 0
        self._lock = threading.Lock()
        self._what = f"{library.name} among {size} ranks"
        self._timeout, self._deadline, self._sound = timeout, time.monotonic() + timeout, sound
        device.activate()
        start, held, config = _P(), _UniqueId.from_buffer_copy(unique_id), _Config.make(blocking=False)
        try:
            self._begin("ncclCommInitRankConfig", ctypes.byref(start), size, held, rank, ctypes.byref(config))
            self._wait(start)
            self.handle = self._split(start)
            self._begin("ncclCommFinalize", start)
            self._wait(start)
        except BaseException:
            self.abort()
            if start:
                library.call("ncclCommAbort", start)
            raise
        library.check("ncclCommDestroy", start)

    def _begin(self, name: str, *arguments: object) -> None:
        """Call what goes on by itself."""
        code = self.library.call(name, *arguments)
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise InitError(f"{self._what}: {name}: {self.library.words(code)}")

    def _wait(self, comm: ctypes.c_void_p) -> None:
        pause = 20e-6
        while (code := self._state(comm)) == _IN_PROGRESS:
            if time.monotonic() > self._deadline:
                raise InitError(f"{self._what}: not all have come within {self._timeout:g} s")
            self._sound()
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        if code != _SUCCESS:
            raise InitError(f"{self._what}: {self.library.words(code)}")

    def _state(self, comm: ctypes.c_void_p) -> int:
        state = ctypes.c_int()
        self.library.check("ncclCommGetAsyncError", comm, ctypes.byref(state))
        return state.value

    def _split(self, start: ctypes.c_void_p) -> int:
        kept, config = _P(), _Config.make(blocking=True)
        self._begin("ncclCommSplit", start, 0, self.rank, ctypes.byref(kept), ctypes.byref(config))
        self._wait(start)
        if not kept.value:
            raise InitError(f"{self._what}: ncclCommSplit made nothing")
        return kept.value

    def functions(self) -> Mapping[str, int]:
        """See `Library.functions`."""
        return self.library.functions()

    def async_error(self) -> str | None:
        """What went wrong since, in the library's words: a peer that is gone, a network that failed. None: nothing."""
        with self._lock:
            if not self.handle:
                return None
            code = self._state(_P(self.handle))
            return None if code in (_SUCCESS, _IN_PROGRESS) else self.library.words(code)

    def register(self, address: int, nbytes: int) -> int:
        """Tell the library about device memory that collectives use often; the number is for `deregister`."""
        registration = _P()
        self.library.check("ncclCommRegister", self._live(), address, nbytes, ctypes.byref(registration))
        return registration.value or 0

    def deregister(self, registration: int) -> None:
        """Undo `register`, before the memory is freed."""
        self.library.check("ncclCommDeregister", self._live(), registration)

    def weighted_sum(self, factor: float, dtype: DType) -> int:
        """An operation that multiplies this rank's terms by `factor` before it adds them; for `drop` at the end."""
        scalar = ctypes.create_string_buffer(_scalar(factor, dtype), 8)
        op = ctypes.c_int()
        arguments = (ctypes.byref(op), scalar, int(dtype), _HOST_SCALAR, self._live())
        self.library.check("ncclRedOpCreatePreMulSum", *arguments)
        return op.value

    def drop(self, op: int) -> None:
        """Give back what `weighted_sum` made."""
        self.library.check("ncclRedOpDestroy", op, self._live())

    def abort(self) -> None:
        """End it at once, whatever its peers do; its kernels stop. Does nothing when it has ended already.

        First let go whatever else the streams of its collectives wait for: it waits until the streams are done.
        """
        self._end("ncclCommAbort")

    def close(self) -> None:
        """End it in good order, when its collectives are done everywhere. Does nothing when it has ended already."""
        self._end("ncclCommDestroy")

    def _live(self) -> ctypes.c_void_p:
        if not self.handle:
            raise CommunicationError(f"{self._what} has ended")
        return _P(self.handle)

    def _end(self, name: str) -> None:
        with self._lock:
            handle, self.handle = self.handle, 0
        if handle:
            self.library.check(name, handle)


def _scalar(factor: float, dtype: DType) -> bytes:
    if dtype is DType.BFLOAT16:
        bits = int(np.float32(factor).view(np.uint32))
        return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    if dtype not in (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64):
        raise ArgumentError(f"weights of {dtype.label} are not supported: float16, bfloat16, float32 and float64 are")
    return bytes(np.array(factor, dtype.label))
