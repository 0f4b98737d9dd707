"""Windows' part on this rank's GPU, where its memory takes part in one-sided messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..calls.buffers import Buffer
from ..errors import ArgumentError, CollectiveTimeoutError, DeviceError
from .core import Core

if TYPE_CHECKING:
    import hetcoll._native as _native

    from .executor import Copies, Shared

_PAUSE = 50e-6  # seconds between looks at a GPU
_PATIENCE = 1.0  # seconds for peers that write a window over RDMA


class DeviceMemory:
    """Of the communicator that carries the messages of windows. Nothing is made before memory of a GPU is used."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._copies: Copies | None = None
        self._shown: dict[int, tuple[int, int]] = {}  # windows' signals for streams: addresses, and how many
        self._opened: dict[tuple[int, int], str] = {}  # by window and rank: handles of others' memory
        self._lock = threading.Lock()

    def copies(self, buffer: Buffer, name: str) -> Copies:
        """What copies memory such as `buffer`, which is a GPU's. BufferTypeError for that of another GPU than before,
        DeviceError where the driver has no room."""
        self._core.gpus.check_place(buffer)
        if self._copies is None:
            with self._lock:
                self._copies = self._copies or self._core.gpus.copies(buffer)
        self._copies.check(buffer, name)
        return self._copies

    def reach(self, buffer: Buffer, name: str, stream: Any, late: bool = False) -> tuple[bool, _native.Gate | None]:
        """Whether memory is a GPU's, and what is on the stream before it may be touched: with a `late` count also where
        it is the host's, which the GPU fills."""
        if buffer.device != "cpu":
            self.copies(buffer, name)
            return True, self._after(stream, buffer)
        if late:
            return False, self._after(stream, buffer)
        if stream is not None:
            raise ArgumentError(f"stream: wanted {name} on a GPU, got host memory, which has no stream")
        return False, None

    def _after(self, stream: Any, buffer: Buffer) -> _native.Gate | None:
        try:
            return self._of_gpu().after(stream, buffer)
        except DeviceError as error:
            raise self._core.device_failed(error) from error

    def _of_gpu(self) -> Copies:
        if self._copies is None:
            raise ArgumentError("stream: wanted a rank whose windows or puts had memory of its GPU, got none so far")
        return self._copies

    def wait_on(self, stream: Any, window: int, signals: int, at: int, least: int) -> None:
        """Let a stream wait for a signal of a window here, one of so many."""
        copies = self._of_gpu()
        with self._lock:  # or the words could be another window's meanwhile
            if window not in self._shown:
                self._shown[window] = copies.signals(signals), signals
                self._core.engine.show_signals(window, self._shown[window][0])
            try:
                return copies.wait(self._shown[window][0] + 8 * at, least, stream)
            except DeviceError as error:
                failed = error
        raise self._core.device_failed(failed) from failed

    def share(self, buffer: Buffer | None) -> Shared | None:
        """How other ranks of the host open a window's memory; None where it is the host's, or they cannot."""
        if buffer is None or buffer.device == "cpu" or self._copies is None:
            return None
        return self._copies.share(buffer, self._core.rank)

    def open(self, window: int, told: Sequence[Shared | None], nbytes: Sequence[int]) -> dict[int, int]:
        """Let this rank's GPU read that window of others by itself: the addresses where it sees it, by rank."""
        if told[self._core.rank] is None:
            return {}
        shared = [(rank, each) for rank, each in enumerate(told) if each is not None]
        opened = {rank: self._open(window, rank, each, nbytes[rank]) for rank, each in shared}
        return {rank: address for rank, address in opened.items() if address is not None}

    def see(self, window: int, rank: int, shared: Shared, nbytes: int) -> bool:
        """Likewise of one rank; False where it cannot."""
        return self._open(window, rank, shared, nbytes) is not None

    def _open(self, window: int, rank: int, shared: Shared, nbytes: int) -> int | None:
        ranks, me = self._core.wiring.topology.ranks, self._core.rank
        near = rank != me and ranks[rank].host == ranks[me].host
        if self._copies is None or not near or shared.vendor != self._copies.vendor:
            return None
        address = self._copies.open(shared, rank)
        if address is not None:
            self._opened[window, rank] = shared.memory
            self._core.engine.see_window(window, rank, address, nbytes)
        return address

    def seen_by(self, window: int, ranks: Sequence[int]) -> None:
        """The GPUs of these read that window of this rank by themselves."""
        for rank in ranks:
            self._core.engine.window_is_seen(window, rank)

    def forget(self, window: int, rank: int) -> None:
        """Undo `open` or `see`. Nothing reads there any more."""
        assert self._copies is not None
        self._core.engine.see_window(window, rank, 0, 0)
        self._copies.close_shared(self._opened.pop((window, rank)))

    def forget_all(self, window: int) -> None:
        """Of all ranks, and its signals for streams."""
        with self._lock:
            shown = self._shown.pop(window, None)
            if shown is not None and self._copies is not None:
                self._copies.spare(*shown)
        for each in [each for each in self._opened if each[0] == window]:
            self.forget(*each)

    def settle(self, window: int) -> None:
        """Wait for the last copies of a closed window, and until no peer's NIC writes it: one that is late loses its
        rails."""
        core = self._core
        began = time.monotonic()
        deadline, patience = began + core.config.timeout, began + _PATIENCE
        while not core.engine.window_settled(window):
            if time.monotonic() > patience:
                core.engine.revoke_window(window)
                patience = deadline
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"close: the GPU of rank {core.rank} has not ended copies of the window after "
                    f"{core.config.timeout:g} s; other streams may hold them up"
                )
            time.sleep(_PAUSE)

    @property
    def pinned(self) -> int:
        """Bytes of pinned memory."""
        return 0 if self._copies is None else self._copies.pinned

    def close(self) -> None:
        """Give all back. The engine is closed."""
        self._opened.clear()
        if self._copies is not None:
            self._copies.close()
