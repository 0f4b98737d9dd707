"""What runs calls: an executor for each kind of memory, with one protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

import hetcoll._native as _native

from ..calls import Call
from ..calls.buffers import Buffer
from ..calls.messages import Message, SendRecv
from ..config.env import Config
from ..config.limits import Held
from ..health.diagnosis import Diagnosis
from ..links.wiring import Check, Wiring
from ..types import Collective, Format
from ..work import Work

if TYPE_CHECKING:
    from ..links.verbs.memory import Lease, Memory
    from ..plan.tuned import Placed
    from .planner import Planner  # a communicator loads it

T = TypeVar("T")

FastPath = Callable[[int, Any, Any, Any, int], Work | None]
"""A call that was bound before, at once; None for all others, which take the slow path. See `Engine.call`."""

Meet = Callable[[str, bytes, float | None], list[bytes]]
"""Every rank's bytes, by rank, in so many seconds if not as usual; a collective call of this label."""


class Prepare(Protocol):
    """Watches over what connects ranks for at most so many seconds: see `HostExecutor.prepare`."""

    def __call__(self, find: Callable[[Check], T], seconds: float) -> T: ...


class Executor(Protocol):
    """Runs calls on one kind of memory: the host's (`host.HostExecutor`) or a GPU's (`gpu.executor.GpuExecutor`).

    Arguments are checked. `seconds` bounds what the host waits for, `stream` is what work on a GPU comes after.
    """

    @property
    def fast_path(self) -> FastPath: ...

    def run(self, call: Call, stream: object, async_op: bool, seconds: float) -> Work:
        """A collective."""

    def exchange(self, ends: SendRecv, stream: object, async_op: bool, seconds: float) -> Work:
        """A message, or two at once."""

    def exchange_all(self, messages: Sequence[Message], seconds: float) -> None:
        """Messages that are under way together; those of this rank to itself match."""

    def fail(self) -> None:
        """The communicator has failed: nothing may wait, or touch the memory of calls, from now on."""

    def close(self) -> None:
        """Give everything back."""


class CpuRank(Protocol):
    """How a rank without a GPU takes part in the calls of ranks that have one (`gpu.cpu_rank.CpuRank`): what it binds,
    and what it makes of 8-bit floats that they have in another kind."""

    def shape(self, call: Call, timeout: float, check: Check) -> _native.Shape: ...

    def point(self, ends: SendRecv, timeout: float, check: Check) -> _native.Shape: ...

    def converted(self, call: Call) -> tuple[Call, Callable[[], None] | None]: ...

    def converted_message(self, ends: SendRecv) -> tuple[SendRecv, Callable[[], None] | None]: ...

    def note(self, call: Call) -> None: ...

    def note_message(self, ends: SendRecv) -> None: ...

    def close(self) -> None: ...


class Shared(NamedTuple):
    """By what other processes of the host open a rank's memory of its GPU: the allocation, where in it the memory
    begins, and the allocation of a sample of bytes. Handles are hexadecimal."""

    vendor: str
    memory: str
    offset: int
    sample: str


class Seen(NamedTuple):
    """A window where this rank's GPU sees it: its own part, the bytes that every rank's part has at least, and where
    the other ranks' parts are, by rank."""

    base: int
    nbytes: int
    peers: Mapping[int, int]


class Mapped(Protocol):
    """Memory of the host that its GPUs have mapped (`gpu.mapped.MappedMemory`)."""

    @property
    def at(self) -> Sequence[int]:
        """Where this rank's GPU sees the part of each rank."""

    def close(self) -> None: ...


class Pinned(Protocol):
    """Memory of the host that one GPU has mapped, too (`gpu.pinned.PinnedMemory`). It is given back with this."""

    at: int

    def buffer(self, first: int, nbytes: int) -> Buffer: ...

    def word(self, first: int) -> Buffer: ...


class Copies(Protocol):
    """What copies pieces of one-sided messages to and from this rank's GPU (`gpu.copies.Copies`)."""

    @property
    def pinned(self) -> int:
        """Bytes of pinned memory."""

    @property
    def vendor(self) -> str: ...

    def check(self, buffer: Buffer, name: str) -> None: ...

    def after(self, stream: object, buffer: Buffer) -> _native.Gate | None: ...

    def share(self, buffer: Buffer, rank: int) -> Shared | None: ...

    def open(self, shared: Shared, rank: int) -> int | None: ...

    def close_shared(self, handle: str) -> None: ...

    def signals(self, count: int) -> int: ...

    def spare(self, at: int, count: int) -> None: ...

    def wait(self, word: int, value: int, stream: object) -> None: ...

    def close(self) -> None: ...


Row = np.ndarray[Any, np.dtype[np.uint8]]
"""What a rank says of a message that it sends, as bytes: see `inspection`."""
ROW_BYTES = 1024


class Snapshot(Work):
    """A copy on the host of what a buffer on a GPU holds at one point of a stream (`gpu.snapshot.GpuSnapshot`)."""

    def take(self) -> Buffer:
        """The copy, once it is there; gives back what it needed."""
        raise NotImplementedError


class Replays(Protocol):
    """HETCOLL_CHECK of what graphs capture, and of what is sampled (`gpu.replays.Replays`)."""

    def collective(self, call: Call, stream: object, start: Callable[[Call], Work]) -> Work:
        """Have `start` capture `call` on `stream`, and what checks its replays around it."""

    def once(self, call: Call, stream: object, async_op: bool, start: Callable[[Call, object], Work]) -> Work:
        """Have `start` enqueue `call`, which no graph captures, on the stream it is given, and what checks it around
        it. What comes on `stream` later begins after both, unless `async_op`; the work is over when both are."""

    def copied(self, call: Call, stream: object, start: Callable[[object], Work]) -> tuple[Work, Snapshot]:
        """Have `start` enqueue an asynchronous call, which no graph captures, on the stream it is given, and behind it
        a copy of its result, in which the program cannot write."""

    def exchange(self, ends: SendRecv, stream: object, start: Callable[[SendRecv], Work]) -> Work:
        """The same as `collective` of a message, or two at once."""

    def exchange_all(self, messages: Sequence[Message], start: Callable[[Sequence[Message]], None]) -> None:
        """The same of messages that are under way together."""


class Gpus(Protocol):
    """One communicator's GPU side, set up by the first call that needs it, collectively (`gpu.open.Gpus`)."""

    @property
    def executor(self) -> Executor | None:
        """This rank's GPU executor, once there is one."""

    @property
    def cpu_rank(self) -> CpuRank | None:
        """This rank's part in others' GPU calls, once there is one."""

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """Held by the one thread that sets up or takes the slow path."""

    def check_place(self, buffer: Buffer) -> None:
        """BufferTypeError unless a buffer is where this rank said that its buffers are."""

    def on_gpu(self, buffer: Buffer, stream: object, seconds: float) -> Executor:
        """The executor of calls on memory such as `buffer`, of which the first one is on `stream`, and waits so long in
        each step of the setting up."""

    def among_gpus(self, seconds: float) -> CpuRank:
        """How a rank without a GPU takes part in the calls of those that have one (`Topology.some_without_gpu`). The
        first call waits so long in each step of the setting up."""

    def device_of(self, buffer: Buffer) -> Any:
        """The GPU that holds a buffer."""

    def see_window(self, number: int, window: Seen) -> None:
        """All GPUs see this window of this communicator on all others. Every rank says so, before it goes on."""

    def forget_window(self, number: int, seconds: float) -> None:
        """It is being closed here: when this returns no call reads it on other GPUs, or lets them read it here.
        CollectiveTimeoutError where calls under way have not ended in so many seconds."""

    def room(self, buffer: Buffer, stream: object, seconds: float) -> int:
        """Bytes of the host that this rank may pin for `map_memory`; 0 where not all ranks have GPUs on one host that
        have its memory mapped. As `on_gpu`."""

    def map_memory(self, buffer: Buffer, parts: Sequence[int], seconds: float) -> Mapped | None:
        """Memory of the host of which each rank has so many bytes, mapped by all GPUs; that of this rank has `buffer`.
        Collective, where there is `room`. None on all ranks where one cannot have it."""

    def pin(self, nbytes: int) -> Pinned:
        """Memory of the host that this rank's GPU has mapped, of whose calls there were some. InitError or DeviceError
        where there is none left."""

    def timed(self, what: str, stream: int, seconds: float) -> AbstractContextManager[None]:
        """The block has a stream of this rank's GPU wait for others, beside calls of this communicator, of which there
        were some: a CollectiveTimeoutError on all ranks where that is not over in so many seconds."""

    def copies(self, buffer: Buffer) -> Copies:
        """For the windows of this communicator, where memory is a GPU's such as `buffer`. Local."""

    def lease(self, memory: Memory, buffer: Buffer) -> Lease:
        """Have a window's memory, which is a GPU's, registered: peers' RDMA goes there. RegistrationError where it does
        not: says why, as `describe` does from then on."""

    def on_host(self, buffer: Buffer, stream: object) -> Buffer:
        """The buffer itself, or a copy on the host of one on a GPU, after what is on `stream`."""

    def read(self, buffer: Buffer) -> Buffer:
        """The same, of what is there now."""

    def snapshot(self, buffer: Buffer, stream: object) -> Snapshot:
        """The same of a buffer on a GPU, which the host does not wait for."""

    def capturing(self, buffer: Buffer, stream: object) -> bool:
        """Whether a graph captures a call on it, on `stream`."""

    def replays(self, buffer: Buffer, stream: object, seconds: float) -> Replays:
        """What checks the replays of calls on such memory. As `on_gpu`."""

    def look_at_replays(self) -> None:
        """Tell of what has been found in replays: all ranks, where it is a wrong result."""

    def converts(self, buffer: Buffer | None, stream: object, seconds: float) -> bool:
        """Whether it is of 8-bit floats, of which ranks may pass two kinds."""

    def counters(self) -> dict[str, int]: ...

    def holds(self) -> Held:
        """What this rank's part in GPU calls holds."""

    def explain(self, collective: Collective, nbytes: int, form: Format) -> str: ...

    def to_measure(self, collective: Collective, nbytes: int) -> tuple[Placed, list[str]] | None:
        """For `hetcoll tune`: how the ranks are placed, and the algorithms of which such a call takes the fastest, of
        float32 and sums; None where it has no choice. There were calls on GPUs."""

    def describe(self) -> tuple[str, ...]: ...


class OpenGpus(Protocol):
    """Makes the GPU side of a communicator. It imports nothing of GPUs until a call needs them."""

    def __call__(
        self,
        wiring: Wiring,
        diagnosis: Diagnosis,
        planner: Planner,
        config: Config,
        *,
        meet: Meet,
        prepare: Prepare,
    ) -> Gpus: ...
