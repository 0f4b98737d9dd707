"""The engine (native/python/module.cc). Internal: users meet `hetcoll.Communicator`."""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

class PlanError(ValueError): ...
class Fault(OSError): ...  # noqa: N818

class Status(IntEnum):
    DONE = 1
    FAILED = 2
    TIMED_OUT = 3

class Shape:
    """A plan bound to counts and a type.

    `nbytes` of memory. `residuals`: elements that it rounds. `compressed`: bytes of the messages over compressed edges
    that this rank sends, and of their codes.
    """

    id: int
    nbytes: int
    residuals: int
    compressed: tuple[int, int]

class Ticket:
    """A submitted task. state: 0 running, 1 done, 2 failed."""

    state: int
    refused: int
    """Of a one-sided message that failed alone: 1 the window was closed, 2 a piece was not inside it."""

_Kernel = tuple[int, int, int, int]

class DeviceShape:
    by_library: bool  # one carries all of the call, on all ranks; false until it is set
    """A plan compiled for the streams of a GPU."""

    @property
    def p2p(self) -> bool: ...
    @property
    def by_copies(self) -> bool: ...
    @property
    def edges(self) -> list[int]: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def residuals(self) -> int: ...
    @property
    def compressed(self) -> tuple[int, int]: ...

LEDGER_BYTES: int
STAGED_MESSAGES: int  # slots of device memory that it needs

class LedgerEntry:
    """One call as it stands in a ledger."""

    @staticmethod
    def make(signature: int, text: str) -> LedgerEntry: ...

class Ledger:
    """What the ranks of one host have called; see native/gpu/ledger.h. `pages` is the address of shared memory."""

    def __init__(self, pages: int, rank: int, size: int) -> None: ...
    def note(self, entry: LedgerEntry) -> int: ...
    def calls(self, rank: int) -> int: ...
    def text(self, rank: int, number: int) -> str: ...

class KernelShape:
    """A collective in one kernel, but for its buffers."""

class _Verbs:
    """Whoever has links to other hosts."""

    def mend_tcp(self) -> int: ...
    def take_lost(self) -> list[tuple[int, int, int, int, bool, bool, str]]: ...
    def is_lost(self, peer: int, channel: int, stripe: int) -> bool: ...
    def hold_socket(
        self, peer: int, channel: int, stripe: int, number: int, first: bool
    ) -> tuple[int, int, int] | None: ...
    def resume_socket(
        self, peer: int, channel: int, stripe: int, number: int, fd: int, came: tuple[int, int, int]
    ) -> bool: ...
    def give_up_socket(self, peer: int, channel: int, stripe: int, why: str) -> None: ...
    def undelivered(self) -> dict[int, int]: ...
    def add_nic(
        self,
        *,
        pd: int,
        port: int,
        gid_index: int,
        gid: bytes,
        lid: int,
        mtu: int,
        ethernet: bool,
        device: str,
        traffic_class: int,
        service_level: int,
        timeout: int,
        retries: int,
        rnr_retries: int,
        gbps: float,
    ) -> int:
        """A port for verbs links; its number. `pd` is the address of its `ibv_pd`, which must outlive the engine.

        `gid` is 16 raw bytes, `mtu` the active one in bytes, `timeout` the code of ibv_qp_attr (4.096 us * 2**timeout),
        `gbps` the nominal rate: striping starts from it. Raises Fault where it cannot be used.
        """

    def register_memory(
        self, address: int, nbytes: int, keys: Sequence[tuple[int, int, int]], seen_at: int | None = None
    ) -> int:
        """A handle for memory that NICs may read where it lies; keys are (NIC, local key, remote key).

        `seen_at` is the address that NICs have for a device's memory, which only they are to touch.
        """

    def unregister_memory(self, handle: int) -> bool:
        """False, and nothing is done, while something sent from there may be needed again."""

    def links(self) -> str:
        """The verbs links and their rails, as JSON."""

    def counters(self) -> dict[str, int]: ...
    def events(self) -> list[str]:
        """What verbs links lost, and how they went on, since the last call."""

class ProxyEdge:
    """One direction of a proxy's edge to another rank."""

class Proxy(_Verbs):
    """Carries what lies in a GPU's slots to other hosts, on threads of its own; see native/proxy/proxy.h."""

    def __init__(
        self, *, threads: int, oversubscribed: bool, rank: int, fault: str = "", integrity: int = 0
    ) -> None: ...
    def connect(self, peer: int, channel: int, fds: Sequence[int]) -> None: ...
    def connect_verbs(
        self,
        peer: int,
        channel: int,
        fds: Sequence[int],
        rails: Sequence[tuple[int, str]],
        ring_bytes: int,
        copier: Copier | None,
        pinned: int = 0,
        pinned_bytes: int = 0,
    ) -> None:
        """As `Engine.attach_verbs`. With a copier the slots at both ends lie in memory of GPUs, and while no rail is
        left their bytes go through the `pinned_bytes` of pinned memory, which are this link's."""

    def add_edge(
        self, *, peer: int, channel: int, out: bool, slots: int, ready: int, credit: int, slot_bytes: int, count: int
    ) -> ProxyEdge: ...
    @property
    def idle(self) -> bool: ...
    def try_links(self, on: bool) -> None:
        """From now on, or no more, a link that fails ends what goes to its peer, and nothing else."""

    def problem(self, peer: int) -> str:
        """What links to `peer` failed with meanwhile, or nothing."""

    def leave(self, peer: int) -> None:
        """Nothing goes to or comes from `peer` any more over the links there are; streams that wait are let go."""

    def fail(self, kind: int, peer: int, text: str) -> None: ...
    def await_failure(self, seconds: float) -> tuple[int, int, str]: ...
    def close(self, seconds: float = 0.0) -> None:
        """`seconds` are for NICs that are still sending."""

    def describe(self) -> str: ...
    @property
    def moves(self) -> int: ...

class Gate:
    """Something that ends on a stream."""

    @property
    def open(self) -> bool: ...

class Copier:
    """Copies to and from a GPU on two streams, of which it is the only user; see native/gpu/copier.h."""

    def __init__(self, *, vendor: str, functions: Mapping[str, int], into: int, out: int) -> None: ...
    def after(self, stream: int) -> Gate | None:
        """What is on `stream` now; None where that is done. Fault where it is captured."""

    def use_kernels(self, few: int, many: int, table: int, rows: int) -> None:
        """Short pieces from other GPUs are copied by these (devices/kernels/pieces.h) from now on: by `many`, where a
        table of so many rows in pinned memory has room."""

    def failure(self) -> str:
        """What the device has failed with, or nothing."""

    def wait(self, word: int, value: int, stream: int) -> Gate | None:
        """What comes on `stream` from now on waits for the word. Its end; None where it has ended."""

class DeviceQueue:
    """Runs plans on a GPU. Streams, memory and functions are addresses; see native/gpu/queue.h."""

    def __init__(
        self,
        *,
        vendor: str,
        functions: Mapping[str, int],
        priority: int,
        staging: int,
        slot_bytes: int,
    ) -> None: ...
    def set_island(self, functions: Mapping[str, int], handle: int, place: int, members: int) -> None: ...
    def add_edge(
        self, slots: int, ready: int, credit: int, count: int, proxy: ProxyEdge | None = None, near: bool = False
    ) -> int: ...
    def set_capture(self, *, kernels: Mapping[str, int], staging: int, words: int, seen: int) -> None: ...
    def drop_capture(self) -> None: ...
    def drop_lanes(self) -> None: ...
    def add_capture_edge(self, edge: int, slots: int, ready: int, credit: int, count: int) -> None: ...
    def capture_taken(self, stream: int) -> bool: ...
    def bind(
        self,
        *,
        plan: bytes,
        size: int,
        dtype: int,
        send_count: int,
        recv_count: int,
        send_table: Sequence[int],
        recv_table: Sequence[int],
        order: Sequence[int],
        levels: Sequence[int],
        lag: int,
        edges: Sequence[int],
        reduce: tuple[int, int, int, int] | None,
        scale: tuple[int, int, int, int] | None,
        divisor: int,
        p2p: bool = False,
        ahead: bool = False,
        local: tuple[int, int, int] | None = None,
        codec: tuple[int, _Kernel, _Kernel, _Kernel, _Kernel] | None = None,
        sends: Sequence[int] = (),
        recvs: Sequence[int] = (),
        kernels: Sequence[tuple[tuple[int, bytes, bytes, int, int, Sequence[int], Sequence[int]], int, int]] = (),
    ) -> DeviceShape: ...
    @staticmethod
    def bind_pulls(
        *,
        readers: Sequence[int],
        pulls: Sequence[tuple[int, int, int, int]],
        own: tuple[int, int, int] | None,
        aside: bool,
    ) -> DeviceShape: ...
    @staticmethod
    def bind_kernel(*, function: int, arguments: bytes, captured: bytes, blocks: int, threads: int) -> KernelShape: ...
    def join(self, stream: int) -> None: ...
    def idle(self) -> bool: ...
    def passed(self) -> int:
        """Grows while kernels and the library's calls end."""

    def pulls_done(self) -> bool: ...

class GpuCall:
    """A call that is ready to be enqueued: its program or its kernel, and how it is written down for other ranks."""

    def __init__(
        self,
        *,
        program: DeviceShape | None,
        kernel: KernelShape | None,
        notes: Sequence[tuple[Ledger, LedgerEntry]],
        number: int,
        descriptor: int,
        p2p: bool,
        descriptors: Sequence[int] = (),
    ) -> None: ...
    @property
    def program(self) -> DeviceShape | None: ...

class GpuCalls:
    """Calls of one communicator on one GPU; see native/python/gpu_calls.h. The device type is DLPack's."""

    def __init__(
        self,
        *,
        engine: Engine,
        queue: DeviceQueue,
        device_type: int,
        device_id: int,
        differs: Callable[[Ledger, int], NoReturn],
        refused: Callable[[str], NoReturn],
        captured: Callable[[DeviceShape | None, int], None],
        broken: Callable[[str], NoReturn],
        started: Callable[[], None],
        work: Callable[[Callable[[], int]], object],
    ) -> None: ...
    def call(self, collective: int, send: Any, recv: Any, op: Any, root: int) -> Any: ...
    def remember(
        self, collective: int, dtype: int, op: int, root: int, send_count: int, recv_count: int, call: GpuCall
    ) -> None: ...
    def leave_out(self, collectives: int) -> None: ...
    def run(self, call: GpuCall, send: int, recv: int, stream: int, join: bool, residual: int = 0) -> None: ...
    def run_group(self, call: GpuCall, addresses: Sequence[int], stream: int, join: bool) -> None: ...
    def set_scratch(self, address: int) -> None: ...
    def set_capture_scratch(self, address: int) -> None: ...

class Persistent:
    """A collective that is started again and again with the same arrays, as MPI's persistent operations. Made by
    `Communicator.allreduce_init` and its like. It keeps the arrays. To `start` it is as good as the repeated call."""

    def __init__(
        self,
        engine: Engine,
        collective: int,
        dtype: int,
        op: int,
        root: int,
        send_count: int,
        recv_count: int,
        fast: bool,
        send: int,
        recv: int,
        slow: Callable[[], Any],
    ) -> None: ...
    def start(self) -> None:
        """Begin the operation. ArgumentError where the last one was not waited for."""

    def wait(self) -> None:
        """Block until what `start` has begun is complete, within the communicator's time."""

    @property
    def done(self) -> bool:
        """Whether what `start` has begun is over. Never blocks."""

class Engine(_Verbs):
    def __init__(
        self,
        *,
        rank: int,
        size: int,
        identity: int,
        local_rank: int,
        spin_seconds: float,
        oversubscribed: bool,
        timeout: float,
        fault: str = "",
        integrity: int = 0,
    ) -> None: ...
    def call(self, collective: int, send: Any, recv: Any, op: Any, root: int) -> Any: ...
    def knows(self, kind: int, buffer: Any, peer: Any) -> bool: ...
    def run_messages(self, messages: list[tuple[int, Any, int]]) -> bool: ...
    def run(self, shape: Shape, send: int, recv: int, timeout: float, residual: int = 0) -> Status: ...
    def submit(
        self, shape: Shape, send: int, recv: int, background: bool, residual: int = 0, snapshot: int = 0
    ) -> Ticket:
        """`snapshot`: where the result is copied before it is over and a later collective begins, or 0."""

    def wait(self, ticket: Ticket, timeout: float) -> Status: ...
    def serve_windows(self) -> None:
        """Before all that follows: a thread serves other ranks from here on, and no plan runs any more."""

    def use_copier(self, copier: Copier, pinned: int, nbytes: int) -> None:
        """Before memory of a GPU: what copies it, through this pinned memory."""

    def see_window(self, window: int, peer: int, address: int, nbytes: int) -> None:
        """Where this rank's GPU sees that window of the peer; of 0 bytes: not any more."""

    def window_is_seen(self, window: int, peer: int) -> None:
        """The peer's GPU sees this window of this rank."""

    def add_window(self, window: int, address: int, nbytes: int, signals: int, device: bool = False) -> None: ...
    def place_window(self, window: int, peer: int) -> None:
        """That rank's part of it is registered for RDMA."""

    def revoke_window(self, window: int) -> None:
        """No NIC writes the closed window any more, if rails must end for it."""

    def close_window(self, window: int) -> None:
        """When it returns, nothing touches the window's memory any more but GPUs and NICs, until it is settled."""

    def window_settled(self, window: int) -> bool: ...
    def show_signals(self, window: int, words: int) -> None:
        """Keep the window's signals in 64-bit words, too. From its end on, or a failure, they are 1 << 62."""

    def transfer(
        self,
        gets: bool,
        window: int,
        peer: int,
        address: int,
        pieces: Any,
        signal: int,
        device: bool = False,
        after: Gate | None = None,
        own: int | None = None,
        late: int = 0,
        item: int = 1,
    ) -> Ticket:
        """`pieces` is rows of three 64-bit integers, in bytes: offset here, offset in the window, length. `device`:
        what is at `address` is a GPU's, and not touched before `after`; `own`: and a part of this window of this rank,
        where that has another number than the peer's. `late`: the address of a 64-bit integer that says after that how
        many elements, of `item` bytes, the only piece of a put has: its length is the most."""

    def expect(self, window: int, signal: int, value: int) -> Ticket: ...
    def signal(self, window: int, signal: int) -> int: ...
    def window_counts(self) -> tuple[int, int, int, int, int, int]: ...
    def set_starts(self, starts: bool) -> None: ...
    def sample_calls(self, mixed: bool) -> None: ...
    def take_due(self, collective: int, count: int, dtype: int, on_gpu: bool) -> bool: ...
    def return_due(self, collective: int, count: int, dtype: int, on_gpu: bool, due: bool) -> None: ...
    def new_shape(self) -> int: ...
    def remember(
        self, collective: int, dtype: int, op: int, root: int, send_count: int, recv_count: int, shape: Shape
    ) -> None: ...
    def set_ops(
        self,
        labels: tuple[str, ...],
        done: object,
        on_stuck: Callable[[Status], None],
        on_interrupt: Callable[[], None],
        on_news: Callable[[], None],
        on_wait: Callable[[bool], bool] | None,
    ) -> None: ...
    def close(self) -> None: ...
    def empty(self, nbytes: int) -> Any: ...
    def attach_shm(
        self, fd: int, ring_bytes: int, most_heap: int, local_ranks: Sequence[int], stores: int, reads: int
    ) -> None: ...
    def attach_tcp(self, peer: int, channel: int, fds: Sequence[int]) -> None: ...
    def attach_slots(
        self,
        *,
        peer: int,
        channel: int,
        out: tuple[int, int, int],
        into: tuple[int, int, int],
        slot_bytes: int,
        count: int,
        aborts: int,
        ranks: int,
        helpers: int,
    ) -> None:
        """A link to the GPU of `peer`, through mapped slots. `helpers`: threads that help with all such links."""

    def attach_verbs(
        self, peer: int, channel: int, fds: Sequence[int], rails: Sequence[tuple[int, str]], ring_bytes: int
    ) -> None:
        """A link to `peer`; `rails` pairs a NIC's number with the peer's device for it. Both ends: as many, in order.

        Takes over the sockets: fds[0] carries the handshake, all of them the data once no rail is left. Returns at
        once. `ring_bytes`: a power of two from 64 KiB to 256 MiB; each rail pins twice that.
        """

    @property
    def settled(self) -> bool:
        """Whether no RDMA link is being made or mended, or waits for the network's confirmation."""

    def linked(self, peer: int, channel: int) -> bool: ...
    def add_plan(self, encoded: bytes) -> int: ...
    def bind(
        self,
        plan: int,
        dtype: int,
        op: int,
        send_count: int,
        recv_count: int,
        send_table: Sequence[int],
        recv_table: Sequence[int],
        descriptor: int,
        p2p: bool,
        skip_empty: bool = False,
        format: int = 0,
    ) -> Shape: ...
    def fail(self, kind: int, peer: int, text: str) -> None: ...
    def peer_left(self, peer: int) -> None: ...
    def describe(self) -> str: ...
    def waits_for(self) -> list[tuple[int, int, bool, int, int, int, int]]:
        """The steps in flight that nothing but their peers keep from moving: peer, channel, whether it sends; how many
        bytes of the message were handed over or have come, of how many; bytes and whole messages that ever went through
        this end of the link."""

    def through(self, peer: int, channel: int, sends: bool) -> tuple[int, int]:
        """Bytes and messages that ever went through this end of a link: that which sends, or that which receives."""

    def sent(self) -> list[int]:
        """Bytes that ever went to each rank, over all channels."""

    @property
    def still_seconds(self) -> float:
        """For how long nothing has moved, of what this rank waits for."""

    def records(self, messages: bool, most: int) -> list[tuple[int, int, int, int]]:
        """The last collectives, or sends and receives, the oldest first: number, shape, bytes (0: on a GPU), begin and
        end (0: it runs, or is on a GPU) in nanoseconds of time.monotonic_ns."""

    def history(self, sequence: int) -> int: ...
    def message_history(self, number: int) -> int: ...
    @property
    def failed(self) -> bool: ...
    @property
    def forked(self) -> bool: ...
    def abandon(self) -> None:
        """In a forked child: close the copies of the engine's sockets, once. Nothing else may be used there."""
    @property
    def failure(self) -> tuple[int, int, str]: ...
    @property
    def pending(self) -> Ticket: ...
    @property
    def collectives(self) -> int: ...
    @property
    def messages(self) -> int: ...
    @property
    def naps(self) -> int:
        """How often it went to sleep since nothing that is waited for could move."""

    @property
    def moves(self) -> int: ...
    def memory(self) -> dict[str, int]:
        """Bytes that it holds, by kind, and its descriptors and threads: see `Communicator.memory`."""

    @property
    def scratch_bytes(self) -> int: ...

def fast_path(collective: int) -> Callable[[F], F]:
    """Makes of a communicator's method one that first tries ``self._call(collective, sendbuf, recvbuf, op, root)``.
    Where that gives None, the method is called as it is written.

    It goes by the names of the method's parameters. Those that are not among `sendbuf` or `buf`, `recvbuf`, `op`, and
    `root`, `peer` or `dest` and `source` must be what they are by default; other calls do not try. ``ranks_key(dest,
    source)`` stands in for a root. Buffers that only the root has are dropped on other ranks, which `self._rank` tells.
    """

def ranks_key(dest: object, source: object) -> int:
    """What a call with two ranks has in place of a root; -1 where these cannot be ranks."""

def read_memory(object: Any, writable: bool) -> tuple[int, int, int] | None: ...
def know_dtype(dtype: Any, number: int) -> None: ...
def know_arrays(probe: Any) -> bool: ...
def know_tensor_type(type: type) -> bool: ...
def read_tensor(object: Any) -> tuple[int, int, int, int, int, int | None] | None: ...
def piece_rows(
    here: Any, there: Any, length: Any, here_count: int, there_count: int, itemsize: int
) -> tuple[Any, int] | None:
    """What `runtime.offsets.pieces` says, of ints and NumPy's arrays of int64; None where that is an error, too."""

def shm_bytes(local_size: int, ring_bytes: int, most_heap: int) -> int: ...
def cut_offset(count: int, units: int, unit: int) -> int: ...
def bind_plan(encoded: bytes, size: int, dtype: int, send_count: int, recv_count: int) -> tuple[int, int]:
    """Binds a plan as an engine would, for nobody: the number of its steps, and its bytes of scratch memory."""

def claims_slots(stores: int) -> bool:
    """Whether slots in shared memory are claimed, with this HETCOLL_SHM_STORES."""

def kernel_isa() -> str: ...
def set_kernel_isa(name: str) -> bool: ...
def reduce_bytes(dst: Any, a: Any, b: Any, dtype: int, op: int, stream: bool) -> None: ...
def run_tasks(arrays: Sequence[Any]) -> tuple[bytes, bytes, bytes]:
    """The ten arrays of native/plan/timeline.h's TaskGraph, in its order. As float64: when each task begins and ends,
    and how many seconds each server works."""

def scale_bytes(x: Any, dtype: int, divisor: int) -> None: ...
def round_elements(dst: int, src: int, residual: int, count: int, dtype: int, format: int) -> None: ...
def encode_elements(wire: int, src: int, count: int, dtype: int, format: int) -> int:
    """How many bytes the codes take."""

def decode_elements(dst: int, wire: int, count: int, dtype: int, format: int) -> None: ...
def copy_bytes(dst: int, src: int, nbytes: int) -> None: ...
def convert_float8(dst: int, src: int, count: int, from_: int, to: int) -> None: ...
def wire() -> tuple[list[int], int, int, int, int, int, int]: ...

class Memory:
    """Memory without an array around it: what XLA hands to a handler. `device_type` is DLPack's. `stream`: on which its
    work is; calls on it take the fast path, and nobody else keeps the memory."""

    def __init__(self, address: int, count: int, dtype: int, device_type: int, device: int, stream: int) -> None: ...
    @property
    def stream(self) -> int | None: ...
    address: int
    count: int
    dtype: int
    device_type: int
    device: int

def xla_handler(runner: Callable[[bytes, Memory | None, Memory | None, int], tuple[int, str] | None]) -> Any:
    """A capsule with XLA's FFI handler, which calls `runner` (see `hetcoll.jax.handler.run`)."""

class Tls:
    """TLS 1.3 over a connected, non-blocking socket: native/transport/tls.h. RuntimeError where there is no OpenSSL."""

    def __init__(self, fd: int, key: bytes, server: bool) -> None: ...
    def send(self, data: Any) -> int:
        """As `socket.send`: after less than `data`, or BlockingIOError, what follows must be sent next."""

    def recv(self, n: int) -> bytes:
        """As `socket.recv`: at most 16 KiB."""

    def hand(self, fd: int) -> None:
        """Whoever takes over this descriptor, of the same socket, goes on from here."""

def tls_library() -> str:
    """OpenSSL and its version. RuntimeError where there is none."""
