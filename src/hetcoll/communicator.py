"""The communicator: what users call.

A call that was made before with the same type and counts is one C++ call (`Engine.call`). Everything else takes the
slow path: `calls.py` checks the arguments, and `core.py` has an algorithm chosen, its plan made and connected, and runs
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

from . import calls, lifetime
from ._native import fast_exchange, fast_path, ranks_key
from .calls import OP_LABELS, RECV, SEND, SENDRECV
from .config.env import Config, configuration
from .config.process import configure
from .errors import ArgumentError
from .gpu.open import Gpus
from .rendezvous.session import Session, coming_together
from .rendezvous.unique_id import UniqueId
from .rendezvous.wire import WORLD
from .runtime.messages import Messages
from .runtime.regroup import Regrouping
from .types import Collective
from .work import Work

_SUM = OP_LABELS[0]
_ALLREDUCE, _ALLGATHER, _REDUCE_SCATTER = map(
    int, (Collective.ALLREDUCE, Collective.ALLGATHER, Collective.REDUCE_SCATTER)
)
_BROADCAST, _REDUCE, _ALLTOALL = map(int, (Collective.BROADCAST, Collective.REDUCE, Collective.ALLTOALL))
_GATHER, _SCATTER, _BARRIER = map(int, (Collective.GATHER, Collective.SCATTER, Collective.BARRIER))
_NOTHING = bytearray()

Array = Any
"""NumPy, anything with DLPack or the buffer protocol; C-contiguous."""


class Communicator(Messages, Regrouping):
    """A group of ranks that run collectives together. Made by `hetcoll.init`, `Communicator.init` and `split`.

    Every rank must call the same collectives in the same order; a mismatch is a `CollectiveMismatchError` on every
    rank. `sendbuf` is never written unless it is also where the result goes. Results are bitwise the same on all ranks,
    NaNs as well. `timeout` is in seconds (default: HETCOLL_TIMEOUT, 300). Errors after a call has begun are
    `CommunicationError`s and leave the communicator fit only for `close` and `shrink`. `stream` is ignored for host
    buffers.

    Any thread may use a communicator, several at once as well. Collectives run one after another in the order in which
    they were begun here: where several threads begin them it is for the program to see to the same order on all ranks,
    as with ``async_op=True`` under a lock. So with messages of several threads to one rank, or from one.
    """

    _open_gpus = Gpus

    @classmethod
    def init(cls, size: int, rank: int, unique_id: UniqueId | str | bytes, *, timeout: float | None = None) -> Self:
        """Join as `rank` of `size` the job that `hetcoll.get_unique_id` on one rank described.

        Blocks until all ranks are there; `InitError` after `timeout` seconds (default: HETCOLL_INIT_TIMEOUT, 120) names
        those that never came. `unique_id` may be what `str` or `to_bytes` made of one.
        """
        if size < 1 or not 0 <= rank < size:
            raise ArgumentError(f"rank and size: wanted 0 <= rank < size, got rank {rank} of size {size}")
        if isinstance(unique_id, str):
            unique_id = UniqueId.parse(unique_id)
        elif isinstance(unique_id, bytes):
            unique_id = UniqueId.from_bytes(unique_id)
        config = configuration()
        configure(config)
        return cls.enter(unique_id, rank, size, config, config.init_timeout if timeout is None else timeout)

    @classmethod
    def enter(cls, unique_id: UniqueId, rank: int, size: int, config: Config, timeout: float) -> Self:
        """As `init`, with the settings in `config` in place of the environment's. For `hetcoll.init`."""
        deadline = time.monotonic() + timeout
        lifetime.await_drops()  # this rank may have been in the same job until then
        with coming_together():
            session = Session(unique_id, rank, size, timeout)
            try:
                return cls(session, WORLD, rank, size, config, deadline - time.monotonic())
            except BaseException:
                session.control.close()
                raise

    # Collectives.

    @fast_path(_ALLREDUCE, _SUM, 3)
    def allreduce(
        self,
        sendbuf: Array,
        recvbuf: Array | None = None,
        op: str = _SUM,
        *,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
        compress: str | None = None,
    ) -> Work:
        """Reduce `sendbuf` over all ranks, element by element, into `recvbuf` on every rank; in place without one.

        Both have the same dtype and count, which is the same on all ranks. `op`: sum, prod, max, min, avg, land, lor,
        lxor, band, bor, bxor, where the dtype has it (`hetcoll.types.supports`). 8- and 16-bit floats are computed in
        float32 and rounded once per reduction.

        `compress`: ``"bf16"``, ``"fp8"`` or ``"int8"``: how sums and averages of float32, float16 and bfloat16
        travel between hosts, or between islands that were asked for; the same on all ranks. What rounding takes
        from this memory is added at the next call on it (`reset_feedback`). ``"none"``: not at all. Default: the
        communicator's setting, for calls of 64 KiB and more.
        """
        if not async_op and timeout is None and stream is None and compress is None:
            done = self._call(_ALLREDUCE, sendbuf, recvbuf, op, 0)
            if done is not None:
                return done
        call = calls.allreduce(self._rank, self._size, sendbuf, recvbuf, op)
        return self._launch(self._compression.choose(call, compress), async_op, timeout, stream)

    @fast_path(_ALLGATHER, _SUM, 2)
    def allgather(
        self,
        sendbuf: Array,
        recvbuf: Array,
        *,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Gather every rank's `sendbuf` (count elements) into `recvbuf` (size x count) on every rank, by rank.

        In place when `sendbuf` is ``recvbuf[rank * count : (rank + 1) * count]``.
        """
        if not async_op and timeout is None and stream is None:
            done = self._call(_ALLGATHER, sendbuf, recvbuf, _SUM, 0)
            if done is not None:
                return done
        return self._launch(calls.allgather(self._rank, self._size, sendbuf, recvbuf), async_op, timeout, stream)

    @fast_path(_REDUCE_SCATTER, _SUM, 3)
    def reduce_scatter(
        self,
        sendbuf: Array,
        recvbuf: Array,
        op: str = _SUM,
        *,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
        compress: str | None = None,
    ) -> Work:
        """Reduce `sendbuf` (size x count elements) over all ranks and leave part `rank` of it in `recvbuf` (count).

        In place when `recvbuf` is ``sendbuf[rank * count : (rank + 1) * count]``. `op` and `compress` as in
        `allreduce`.
        """
        if not async_op and timeout is None and stream is None and compress is None:
            done = self._call(_REDUCE_SCATTER, sendbuf, recvbuf, op, 0)
            if done is not None:
                return done
        call = calls.reduce_scatter(self._rank, self._size, sendbuf, recvbuf, op)
        return self._launch(self._compression.choose(call, compress), async_op, timeout, stream)

    def broadcast(
        self,
        buf: Array,
        root: int = 0,
        *,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Copy the root's `buf` into every other rank's. Only the root may pass a read-only array."""
        if not async_op and timeout is None and stream is None:
            done = self._call(_BROADCAST, buf, None, _SUM, root)
            if done is not None:
                return done
        return self._launch(calls.broadcast(self._rank, self._size, buf, root), async_op, timeout, stream)

    def reduce(
        self,
        sendbuf: Array,
        recvbuf: Array | None = None,
        op: str = _SUM,
        root: int = 0,
        *,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Reduce `sendbuf` over all ranks into the root's `recvbuf`; in place there without one.

        Other ranks' `recvbuf` is not looked at, and their `sendbuf` is not written.
        """
        into = recvbuf if self._rank == root else None
        if not async_op and timeout is None and stream is None:
            done = self._call(_REDUCE, sendbuf, into, op, root)
            if done is not None:
                return done
        return self._launch(calls.reduce(self._rank, self._size, sendbuf, into, op, root), async_op, timeout, stream)

    def gather(
        self,
        sendbuf: Array,
        recvbuf: Array | None = None,
        root: int = 0,
        *,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Gather every rank's `sendbuf` (count elements) into the root's `recvbuf` (size x count), by rank.

        In place on the root when `sendbuf` is ``recvbuf[rank * count : (rank + 1) * count]``. Other ranks' `recvbuf`
        is not looked at.
        """
        into = recvbuf if self._rank == root else None
        plain = not async_op and timeout is None and stream is None and (into is None) == (self._rank != root)
        if plain and (done := self._call(_GATHER, sendbuf, into, _SUM, root)) is not None:
            return done
        return self._launch(calls.gather(self._rank, self._size, sendbuf, recvbuf, root), async_op, timeout, stream)

    def scatter(
        self,
        sendbuf: Array | None = None,
        recvbuf: Array | None = None,
        root: int = 0,
        *,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Send part r of the root's `sendbuf` (size x count elements) to rank r's `recvbuf` (count).

        In place on the root when `recvbuf` is ``sendbuf[rank * count : (rank + 1) * count]``. Other ranks' `sendbuf`
        is not looked at.
        """
        if not async_op and timeout is None and stream is None and recvbuf is not None:
            source, into = (sendbuf, recvbuf) if self._rank == root else (recvbuf, None)
            if (done := self._call(_SCATTER, source, into, _SUM, root)) is not None:
                return done
        return self._launch(calls.scatter(self._rank, self._size, sendbuf, recvbuf, root), async_op, timeout, stream)

    @fast_path(_ALLTOALL, _SUM, 2)
    def alltoall(
        self,
        sendbuf: Array,
        recvbuf: Array,
        *,
        sendcounts: Sequence[int] | None = None,
        recvcounts: Sequence[int] | None = None,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Send part r of `sendbuf` to rank r, and receive part r of `recvbuf` from rank r.

        Parts are equal, or as long as `sendcounts` and `recvcounts` say (elements, one a rank; rank a's
        ``sendcounts[b]`` must be rank b's ``recvcounts[a]``). In place (the same array) only with equal parts.
        """
        plain = sendcounts is None and recvcounts is None and not async_op and timeout is None and stream is None
        if plain and (done := self._call(_ALLTOALL, sendbuf, recvbuf, _SUM, 0)) is not None:
            return done
        call = calls.alltoall(self._rank, self._size, sendbuf, recvbuf, sendcounts, recvcounts)
        return self._launch(call, async_op, timeout, stream)

    def allgatherv(
        self,
        sendbuf: Array,
        recvbuf: Array,
        counts: Sequence[int],
        *,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """`allgather` of unequal parts: rank r contributes ``counts[r]`` elements; the same `counts` on all ranks."""
        return self._launch(
            calls.allgatherv(self._rank, self._size, sendbuf, recvbuf, counts), async_op, timeout, stream
        )

    def reduce_scatterv(
        self,
        sendbuf: Array,
        recvbuf: Array,
        op: str = _SUM,
        *,
        counts: Sequence[int],
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """`reduce_scatter` into unequal parts: rank r receives ``counts[r]`` elements; the same on all ranks."""
        call = calls.reduce_scatterv(self._rank, self._size, sendbuf, recvbuf, op, counts)
        return self._launch(call, async_op, timeout, stream)

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work:
        """Return (or be done) only when every rank has called it."""
        if not async_op and timeout is None and (done := self._call(_BARRIER, _NOTHING, None, _SUM, 0)) is not None:
            return done
        return self._launch(calls.barrier(), async_op, timeout)

    # Point to point.

    def send(
        self,
        buf: Array,
        peer: int,
        *,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Send `buf` to `peer`, which calls `recv` with as many elements. Returns when `buf` may be reused.

        Messages between two ranks arrive in order. A send may or may not wait for its receive: ranks that send to each
        other first must use `group` or ``async_op=True``.
        """
        plain = not async_op and timeout is None and stream is None and not self._batches
        if plain and (done := self._call(SEND, buf, None, _SUM, peer)) is not None:
            return done
        return self._message(SEND, buf, peer, async_op, timeout, stream)

    def recv(
        self,
        buf: Array,
        peer: int,
        *,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Receive `buf` from `peer`, which calls `send` with as many elements."""
        plain = not async_op and timeout is None and stream is None and not self._batches
        if plain and (done := self._call(RECV, buf, None, _SUM, peer)) is not None:
            return done
        return self._message(RECV, buf, peer, async_op, timeout, stream)

    @fast_exchange(SENDRECV, _SUM)
    def sendrecv(
        self,
        sendbuf: Array,
        dest: int,
        recvbuf: Array,
        source: int,
        *,
        stream: object = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Send `sendbuf` to `dest` and receive `recvbuf` from `source` at the same time.

        The other halves may be `send`, `recv` or `sendrecv` calls. Both buffers have one dtype; they do not overlap.
        """
        if not async_op and timeout is None and stream is None:
            done = self._call(SENDRECV, sendbuf, recvbuf, _SUM, ranks_key(dest, source))
            if done is not None:
                return done
        return self._sendrecv(sendbuf, dest, recvbuf, source, async_op, timeout, stream)
