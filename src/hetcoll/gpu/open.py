"""Which way calls take to GPUs, this rank's own or others'; each is set up by the first call that needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..calls.buffers import VENDOR_OF, Buffer
from ..config.env import Config
from ..config.limits import Held
from ..errors import ArgumentError, BufferTypeError, DeviceError, RegistrationError
from ..health.diagnosis import Diagnosis
from ..health.verdicts import Kind
from ..links.wiring import Wiring
from ..runtime.executor import Meet, Prepare, Seen
from ..types import FNUZ_OF, OCP_OF, Collective, Format
from . import streams

if TYPE_CHECKING:
    from ..links.verbs.memory import Lease, Memory
    from ..plan.tuned import Placed
    from ..runtime.planner import Planner
    from ..vendors.devices.base import Device
    from .copies import Copies
    from .cpu_rank import CpuRank
    from .executor import GpuExecutor
    from .mapped import MappedMemory
    from .pinned import PinnedMemory
    from .replays import Replays
    from .snapshot import GpuSnapshot


class Gpus:
    """Of one rank. `meet` exchanges bytes among all ranks, in so many seconds if not as usual; `prepare` watches over
    what connects them. Setting a path up is collective over all ranks."""

    def __init__(
        self,
        wiring: Wiring,
        diagnosis: Diagnosis,
        planner: Planner,
        config: Config,
        *,
        meet: Meet,
        prepare: Prepare,
    ) -> None:
        self._wiring, self._diagnosis, self._planner, self._config = wiring, diagnosis, planner, config
        self._meet, self._prepare = meet, prepare
        self._meetings = 0
        self.turn = threading.RLock()
        """Who sets a path up, or takes it the slow path: one thread at a time."""
        self._windows: dict[int, Seen] = {}
        self._closing: set[int] = set()  # windows that calls under way may still read
        self._far_windows: tuple[str, ...] = ()
        self.executor: GpuExecutor | None = None
        self.cpu_rank: CpuRank | None = None

    def check_place(self, buffer: Buffer) -> None:
        """Whether a buffer is where this rank said that its buffers are."""
        wish, mine = self._config.device, VENDOR_OF.get(buffer.device, buffer.device)
        if wish is None or (wish.kind == mine and wish.index in (None, buffer.index)):
            return
        if mine == "cpu" and not self._wiring.topology.some_without_gpu:
            return  # calls of all ranks on host memory
        raise BufferTypeError(
            f"wanted memory of {wish}, the device that rank {self._wiring.rank} said it uses,"
            f" got some of {buffer.place}"
        )

    def on_gpu(self, buffer: Buffer, stream: object, seconds: float) -> GpuExecutor:
        """The way of calls on a GPU's memory, such as `buffer`, of which the first one is on `stream`, and waits so
        long in each step of the setting up."""
        with self.turn:
            if self.executor is not None:
                return self.executor
            with self._prepared():
                return self._make_gpu(buffer, stream, seconds)

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """What this rank's system refuses in the block all ranks are told: they would wait for it."""
        try:
            yield
        except OSError as error:
            if error.errno is None:  # not the system's: as what a signal handler raises
                raise
            raise self._diagnosis.unprepared(error) from error

    def _make_gpu(self, buffer: Buffer, stream: object, seconds: float) -> GpuExecutor:
        from .device_of import device_of
        from .executor import GpuExecutor

        device, capturing = device_of(buffer), self.capturing(buffer, stream)
        path = self.executor = GpuExecutor(
            self._wiring,
            self._diagnosis,
            device,
            self._planner,
            self._config.timeout,
            seconds,
            capturing=capturing,
            meet=partial(self._meet_soon, seconds),
            prepare=self._prepare,
            windows=self._windows,
        )
        self._diagnosis.on_failure.append(path.fail)
        if self._wiring.engine.failed:  # before it was there
            path.fail()
        self._prove(lambda: path.prove(partial(self._meet_slow, seconds), seconds))
        return path

    def among_gpus(self, seconds: float) -> CpuRank:
        """How a rank without a GPU takes part in the calls of those that have one (`Topology.some_without_gpu`), of
        which the first waits so long in each step of the setting up."""
        with self.turn:
            if self.cpu_rank is not None:
                return self.cpu_rank
            with self._prepared():
                return self._make_host(seconds)

    def _make_host(self, seconds: float) -> CpuRank:
        from .cpu_rank import CpuRank

        path = self.cpu_rank = CpuRank(
            self._wiring,
            self._diagnosis,
            self._planner,
            seconds,
            meet=partial(self._meet_soon, seconds),
        )
        self._prove(lambda: path.prove(partial(self._meet_slow, seconds), self._prepare, seconds))
        return path

    def device_of(self, buffer: Buffer) -> Device:
        """The GPU that holds a buffer."""
        from .device_of import device_of

        return device_of(buffer)

    def see_window(self, number: int, window: Seen) -> None:
        """See `runtime.executor.Gpus`."""
        with self.turn:
            self._windows[number] = window
            if self.executor is not None:
                self.executor.look_at_windows()

    def forget_window(self, number: int, seconds: float) -> None:
        """See `runtime.executor.Gpus`."""
        with self.turn:
            executor = self.executor
            if self._windows.pop(number, None) is not None and executor is not None:
                self._closing.add(number)
                executor.look_at_windows()
        if number in self._closing and executor is not None:
            executor.pulls.end(seconds)
            self._closing.discard(number)

    def room(self, buffer: Buffer, stream: object, seconds: float) -> int:
        """See `runtime.executor.Gpus`."""
        return self.on_gpu(buffer, stream, seconds).share.room

    def map_memory(self, buffer: Buffer, parts: Sequence[int], seconds: float) -> MappedMemory | None:
        """See `runtime.executor.Gpus`."""
        assert self.executor is not None, "there is room"
        return self.executor.share.map_memory(self.device_of(buffer), parts, partial(self._meet_soon, seconds), seconds)

    def timed(self, what: str, stream: int, seconds: float) -> AbstractContextManager[None]:
        """See `runtime.executor.Gpus`."""
        assert self.executor is not None, "there were calls"
        return self.executor.timed(what, stream, seconds)

    def pin(self, nbytes: int) -> PinnedMemory:
        """See `runtime.executor.Gpus`."""
        assert self.executor is not None, "there were calls"
        return self.executor.pin(nbytes)

    def copies(self, buffer: Buffer) -> Copies:
        """See `runtime.executor.Gpus`."""
        from .copies import Copies
        from .pinned import Pinned

        wiring = self._wiring
        pinned = Pinned(wiring.pinned_bytes, len(wiring.locals))
        return Copies(self.device_of(buffer), wiring.engine, wiring.size, pinned)

    def lease(self, memory: Memory, buffer: Buffer) -> Lease:
        """See `runtime.executor.Gpus`."""
        from .direct import ruled_out

        device = self.device_of(buffer)
        try:
            with device.active():
                if reason := ruled_out(self._wiring):
                    raise RegistrationError(reason)
                lease = memory.lease(buffer.ptr, buffer.nbytes, buffer.owner, device)
        except RegistrationError as error:
            self._far_windows = (f"windows between hosts: through pinned memory (staged; not direct: {error})",)
            raise
        self._far_windows = ("windows between hosts: by RDMA from and to the GPU's memory (direct)",)
        return lease

    def on_host(self, buffer: Buffer, stream: object) -> Buffer:
        """See `runtime.executor.Gpus`."""
        if buffer.device == "cpu":
            return buffer
        return self._read(buffer, streams.handle(stream, buffer))

    def read(self, buffer: Buffer) -> Buffer:
        """See `runtime.executor.Gpus`."""
        return buffer if buffer.device == "cpu" else self._read(buffer, None)

    def _read(self, buffer: Buffer, stream: int | None) -> Buffer:
        """On that stream, if there is one: on the default one another thread's receive may stand, whose peer waits for
        what this one is about to send."""
        device, data = self.device_of(buffer), np.empty(buffer.nbytes, np.uint8)
        with device.active():
            device.copy(int(data.ctypes.data), buffer.ptr, buffer.nbytes, stream)
            if stream is not None:
                device.synchronize(stream)
        return replace(buffer, ptr=int(data.ctypes.data), owner=data, device="cpu", index=0, stream=None)

    def snapshot(self, buffer: Buffer, stream: object) -> GpuSnapshot:
        """See `runtime.executor.Gpus`."""
        from .snapshot import GpuSnapshot

        assert self.executor is not None, "there was a call"
        return GpuSnapshot(self.executor.spares, buffer, streams.handle(stream, buffer))

    def capturing(self, buffer: Buffer, stream: object) -> bool:
        """See `runtime.executor.Gpus`."""
        if buffer.device == "cpu":
            return False
        try:
            return self.device_of(buffer).capturing(streams.handle(stream, buffer))
        except DeviceError as error:
            raise ArgumentError(f"stream: wanted one of {buffer.place}: {error}") from error

    def replays(self, buffer: Buffer, stream: object, seconds: float) -> Replays:
        """See `runtime.executor.Gpus`."""
        return self.on_gpu(buffer, stream, seconds).replays

    def look_at_replays(self) -> None:
        """See `runtime.executor.Gpus`."""
        if self.executor is not None:
            self.executor.look_at_replays()

    def converts(self, buffer: Buffer | None, stream: object, seconds: float) -> bool:
        """See `runtime.executor.Gpus` and `float8`. As `on_gpu`."""
        if buffer is None or (buffer.dtype not in FNUZ_OF and buffer.dtype not in OCP_OF):
            return False
        self.check_place(buffer)
        if buffer.device != "cpu":
            return self.on_gpu(buffer, stream, seconds).two_kinds
        return self._wiring.topology.some_without_gpu and self.among_gpus(seconds).two_kinds

    def _prove(self, prove: Callable[[], None]) -> None:
        """Try the ways to GPUs. Where that fails, nothing may use them."""
        try:
            prove()
        except BaseException as error:
            self._wiring.engine.fail(Kind.ABORTED, self._wiring.rank, f"{type(error).__name__}: {error}")
            raise

    def _meet_soon(self, seconds: float, label: str, blob: bytes) -> list[bytes]:
        return self._meet(label, blob, seconds)

    def _meet_slow(self, seconds: float, label: str, blob: bytes) -> list[bytes]:
        """While some ranks may still try what does not work: then an engine that takes part carries nothing else."""
        from .path_probe import SECONDS

        seconds += 3 * SECONDS
        if not self._wiring.topology.some_without_gpu:
            return self._meet(label, blob, seconds)
        self._meetings += 1
        with self._diagnosis.while_sound():
            return self._wiring.exchange(f"{label} {self._meetings}", blob, seconds)

    def counters(self) -> dict[str, int]:
        """What the path has counted, as `Communicator.counters` tells it."""
        return {} if self.executor is None else {f"gpu_{name}": n for name, n in self.executor.counters().items()}

    def holds(self) -> Held:
        """See `runtime.executor.Gpus`. A rank without a GPU pins nothing."""
        return Held() if self.executor is None else self.executor.holds()

    def explain(self, collective: Collective, nbytes: int, form: Format) -> str:
        """For people: how a collective on GPUs runs, once there were some."""
        path = self.executor or self.cpu_rank
        return "" if path is None else path.choices.explain(collective, nbytes, form)

    def to_measure(self, collective: Collective, nbytes: int) -> tuple[Placed, list[str]] | None:
        """See `planner.GpuPlanner.to_measure`."""
        path = self.executor or self.cpu_rank
        assert path is not None, "there were calls"
        return path.choices.to_measure(collective, nbytes)

    def describe(self) -> tuple[str, ...]:
        """For people: how data goes to each GPU, once that is known."""
        path = self.executor or self.cpu_rank
        return (() if path is None else path.paths()) + self._far_windows
