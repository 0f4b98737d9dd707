"""The kernels of one device: compiled, kept, loaded, found by name."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
from typing import Protocol

from ....errors import ArgumentError, DeviceError
from .cache import Cache
from .source import module_of, source

log = logging.getLogger("hetcoll")

ONESHOT_RANKS, AWAITED = 16, 32  # kOneshotRanks of arguments.h, kAwaited of waits.h
FOLD_LANES, FOLD_THREADS, RECORD_WORDS, MOVED = 16, 256, 36, 255  # kFoldLanes, kFoldThreads; of a Record; kMoved
MESSAGES, MESSAGE_BLOCKS, MESSAGE_THREADS = 2 * (ONESHOT_RANKS - 1), 64, 256  # kMessages, kMessageBlocks
_WORD_SLOT, _PACK_SLOT, RING_SLOTS = 4096, 8192, 4  # of messages.h
MESSAGE_WORDS = MESSAGE_BLOCKS * _WORD_SLOT // 2  # bytes of a message up to which it is words
MESSAGE_MOST = MESSAGE_BLOCKS * RING_SLOTS * _PACK_SLOT  # bytes of the largest one, which fills a ring
MESSAGE_COUNTERS = MESSAGE_BLOCKS * RING_SLOTS * (_WORD_SLOT + _PACK_SLOT)  # bytes of a ring in front of its counters
MESSAGE_RING = MESSAGE_COUNTERS + 4 * MESSAGE_BLOCKS * 64
MESSAGE_STATE = 2 * MESSAGE_BLOCKS * 16  # bytes, of an end of a ring
_LEAST_CHUNK = 4096  # bytes of packs at a time; of more packs a block takes as many as there are slots
_BLOCK = 512  # threads; kMaxThreads of platform.h
_PACK = 16  # bytes that a thread takes at a time
_ONESHOT_BLOCK = 256


class Oneshot(ctypes.Structure):
    """The argument of the one-shot kernels: ``arguments.h`` says what each field is."""

    _fields_ = (
        ("dst", ctypes.c_uint64),
        ("src", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("from_", ctypes.c_uint64 * ONESHOT_RANKS),
        ("to", ctypes.c_uint64 * ONESHOT_RANKS),
        ("state", ctypes.c_uint64),
        ("abort", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("divisor", ctypes.c_uint32),
        ("words", ctypes.c_uint32),
        ("rounds", ctypes.c_uint32),
        ("copies", ctypes.c_uint32),
    )


class Exchange(ctypes.Structure):
    """The argument of the exchange kernels: ``arguments.h`` says what each field is."""

    _fields_ = (
        ("dst", ctypes.c_uint64),
        ("src", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("rings", ctypes.c_uint64 * ONESHOT_RANKS),
        ("words", ctypes.c_uint64 * ONESHOT_RANKS),
        ("state", ctypes.c_uint64),
        ("abort", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("divisor", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("slot_bytes", ctypes.c_uint32),
        ("chunk_bytes", ctypes.c_uint32),
        ("first", ctypes.c_uint16),
        ("sources", ctypes.c_uint16),
        ("gives", ctypes.c_uint8),
        ("cut", ctypes.c_uint8),
        ("two_shot", ctypes.c_uint8),
        ("rounds", ctypes.c_uint8),
    )


class Message(ctypes.Structure):
    """A part of the argument of the message kernel: ``arguments.h`` says what each field is."""

    _fields_ = (
        ("at", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("ring", ctypes.c_uint64),
        ("state", ctypes.c_uint64),
        ("first", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("chunk", ctypes.c_uint32),
        ("sends", ctypes.c_uint8),
        ("words", ctypes.c_uint8),
        ("peer", ctypes.c_uint16),
    )


class Messages(ctypes.Structure):
    """The argument of the message kernel."""

    _fields_ = (
        ("message", Message * MESSAGES),
        ("abort", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class Tokens(ctypes.Structure):
    """The argument of the kernels that carry tokens: ``arguments.h`` says what each field is."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("ids", ctypes.c_uint64),
        ("own", ctypes.c_uint64),
        ("to", ctypes.c_uint64),
        ("via", ctypes.c_uint64),
        ("from_", ctypes.c_uint64),
        ("places", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("longest", ctypes.c_uint64),
        ("sent", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("late", ctypes.c_uint64),
        ("received", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("parts", ctypes.c_uint64),
        ("came", ctypes.c_uint64),
        ("result", ctypes.c_uint64),
        ("state", ctypes.c_uint64),
        ("odd", ctypes.c_uint64),
        ("packed", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("hidden", ctypes.c_uint64),
        ("tokens", ctypes.c_uint32),
        ("most", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("experts", ctypes.c_uint32),
        ("id_bytes", ctypes.c_uint32),
        ("fp8", ctypes.c_uint32),
        ("dense", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("room", ctypes.c_uint32),
        ("incoming", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


class Fold(ctypes.Structure):
    """The argument of the kernels that fold: ``arguments.h`` says what each field is."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("from_", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("partial", ctypes.c_uint64),
        ("tickets", ctypes.c_uint64),
        ("op", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
    )


class Findings(ctypes.Structure):
    """What is found in replays: ``arguments.h`` says what each field is."""

    _fields_ = (
        ("replays", ctypes.c_uint64),
        ("odd_replay", ctypes.c_uint64),
        ("odd", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("wrong_replay", ctypes.c_uint64),
        ("what", ctypes.c_uint64),
        ("where", ctypes.c_uint64),
        ("got", ctypes.c_uint64),
        ("wanted", ctypes.c_uint64),
    )


class Comparison(ctypes.Structure):
    """The argument of the kernels that compare: ``arguments.h`` says what each field is."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("given", ctypes.c_uint64),
        ("own", ctypes.c_uint64),
        ("made", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("slope", ctypes.c_double),
        ("floor", ctypes.c_double),
        ("most", ctypes.c_double),
        ("op", ctypes.c_uint32),
        ("divisor", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("stride", ctypes.c_uint32),
        ("own_parts", ctypes.c_uint32),
        ("parts", ctypes.c_uint32),
        ("root", ctypes.c_uint32),
        ("same", ctypes.c_uint32),
        ("whole", ctypes.c_uint32),
    )


class Compiler(Protocol):
    """A vendor's run-time compiler, set up for one architecture."""

    @property
    def key(self) -> str:
        """All that its results depend on but the source: vendor, version, architecture, options."""

    def compile(self, name: str, source: str) -> bytes:
        """The image that the driver loads. `DeviceError` holds the compiler's words."""


class Loader(Protocol):
    """The part of a device that takes compiled modules (`base.Device`)."""

    @property
    def multiprocessors(self) -> int: ...

    def load(self, image: bytes) -> int: ...

    def function(self, module: int, name: str) -> int: ...


class KernelTable:
    """The kernels of one device in this process. Safe to use from any thread."""

    def __init__(self, device: Loader, compiler: Compiler, cache: Cache | None) -> None:
        self._device = device
        self._compiler = compiler
        self._cache = cache
        self._lock = threading.Lock()
        self._modules: dict[str, int] = {}
        self._functions: dict[str, int] = {}
        self._all_kept = False
        self.loading: str | None = None
        """The module that is being loaded just now: it may wait until the device is idle."""

    def function(self, name: str) -> int:
        """The address of a kernel (CUfunction, hipFunction_t).

        Its module is compiled (some seconds for the narrowest types) and loaded at first use in the process. Loading
        may wait until the device is idle: ask for what a plan needs when it is made, not between two launches.
        """
        with self._lock:
            found = self._functions.get(name)
            if found is None:
                module = module_of().get(name)
                if module is None:
                    raise ArgumentError(f"there is no kernel {name!r}")
                if module not in self._modules:
                    self._modules[module] = self._load(module)
                found = self._find(name, module)
            return found

    def load_kept(self) -> None:
        """Load all kernels that the cache has, the first time that it is called: before the device waits for another
        rank, which may itself wait for what this one calls next."""
        with self._lock:
            if self._all_kept:
                return
            self._all_kept = True
            for module in dict.fromkeys(module_of().values()):
                if module not in self._modules and (loaded := self._from_cache(module)) is not None:
                    self._modules[module] = loaded
            for name, module in module_of().items():
                if module in self._modules and name not in self._functions:
                    self._find(name, module)

    def launch(self, count: int, itemsize: int) -> tuple[int, int]:
        """Blocks and threads for a reduction or a scale of `count` elements: two blocks a multiprocessor at most."""
        packs = -(-count * itemsize // _PACK)
        return max(1, min(2 * self._device.multiprocessors, -(-packs // _BLOCK))), _BLOCK

    @property
    def compiler(self) -> str:
        """Which compiler makes them, its version and options."""
        return self._compiler.key

    @staticmethod
    def oneshot_launch(count: int, itemsize: int, most: int) -> tuple[int, int]:
        """Blocks, at most `most`, and threads for a one-shot all-reduce: the same on all ranks."""
        items = -(-count * itemsize // max(4, itemsize))
        return max(1, min(most, -(-items // _ONESHOT_BLOCK))), _ONESHOT_BLOCK

    @staticmethod
    def oneshot_words(nbytes: int) -> int:
        """Words in a half of an area that serves messages of up to `nbytes` bytes: 8 bytes each."""
        return -(-nbytes // 16) * 4

    @staticmethod
    def message(nbytes: int, ring: int, state: int, first: int, peer: int, *, sends: bool) -> Message:
        """One of 1 to MESSAGE_MOST bytes, but for its buffer, whose first block has this number. `peer`: the other
        rank's place on the host."""
        words = nbytes <= MESSAGE_WORDS
        chunk = _WORD_SLOT // 2
        if not words:
            share = -(-nbytes // (MESSAGE_BLOCKS * RING_SLOTS))
            chunk = max(_LEAST_CHUNK, -(-share // _PACK) * _PACK)
        blocks = min(MESSAGE_BLOCKS, -(-nbytes // chunk))
        return Message(0, nbytes, ring, state, first, blocks, chunk, sends, words, peer)

    def _find(self, name: str, module: str) -> int:
        found = self._functions[name] = self._device.function(self._modules[module], name)
        return found

    def _load(self, module: str) -> int:
        found = self._from_cache(module)
        if found is not None:
            return found
        image = self._compiler.compile(module, source(module))
        loaded = self._load_image(module, image)
        if self._cache:
            self._cache.put(self._key(module), image)
        return loaded

    def _from_cache(self, module: str) -> int | None:
        image = self._cache.get(self._key(module)) if self._cache else None
        if image is None:
            return None
        try:
            return self._load_image(module, image)
        except DeviceError as error:
            log.warning("kernels of %s from the cache: %s; they are compiled again", module, error)
            return None

    def _load_image(self, module: str, image: bytes) -> int:
        self.loading = module
        try:
            return self._device.load(image)
        finally:
            self.loading = None

    def _key(self, module: str) -> str:
        return hashlib.sha256(f"{self._compiler.key}\0{source(module)}".encode()).hexdigest()
