"""Messages between two ranks: send, receive, both at once, and groups of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from ..calls import RECV, SEND, check_rank, whole
from ..calls.buffers import read_buffer
from ..calls.messages import Message, SendRecv
from ..errors import ArgumentError, BufferTypeError
from ..types import ANY_SOURCE
from ..work import DONE, Work
from .core import Core


class Group(contextlib.AbstractContextManager[None]):
    """What `Communicator.group` gives: notes the messages of the ``with`` block, and has `end` start them."""

    def __init__(self, core: Core, end: Callable[[bool], None]) -> None:
        self._core, self._end = core, end

    def __enter__(self) -> None:
        core, thread = self._core, threading.get_ident()
        core.host.check_usable()
        if thread in core.batches:
            raise ArgumentError("group(): already inside a group")
        core.batches[thread] = []
        core.choose_fast_path()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._end(kind is None)


def end_group(core: Core, run: bool) -> None:
    """The end of a group's block: start what it has noted, if it is to `run`, and wait for all of it."""
    batch = core.batches.pop(threading.get_ident(), None)
    if batch is None:
        raise ArgumentError("group(): wanted its end on the thread that began it")
    core.choose_fast_path()
    core.host.check_usable()
    if not run or not batch or (core.message_check is None and core.engine.run_messages(batch)):
        return
    every = [Message(kind, read_buffer(buf, "buf", writable=kind == RECV), peer) for kind, buf, peer in batch]
    _check_own(core.rank, every)
    for message in every:
        core.gpus.check_place(message.buffer)
    (core.exchange_all if core.message_check is None else core.message_check.exchange_all)(every, core.config.timeout)


def one_way(
    core: Core, kind: int, buf: Any, peer: int, async_op: bool, timeout: float | None, stream: object, tag: int = 0
) -> Work:
    """One half of a message, `kind` is SEND or RECV; in a group it is only noted."""
    if tag != 0 or (kind == RECV and whole(peer) == ANY_SOURCE):
        from . import tags  # few programs use them, and imports count

        return tags.tagged(core, kind, buf, peer, tag, async_op, timeout)
    batch = core.batches.get(threading.get_ident()) if core.batches else None
    if batch is not None:
        if timeout is not None or stream is not None:
            raise ArgumentError("group(): wanted messages without a timeout or stream of their own")
        if not core.engine.knows(kind, buf, peer):
            core.host.check_usable()
            peer = check_rank(peer, core.size, "peer")
            read_buffer(buf, "buf", writable=kind == RECV)
        batch.append((kind, buf, peer))
        return DONE
    core.host.check_usable()
    other = check_rank(peer, core.size, "peer")
    buffer = read_buffer(buf, "buf", writable=kind == RECV)
    if other == core.rank:
        raise ArgumentError(f"peer: rank {other} is this rank; a message to oneself needs both halves in a group()")
    return _exchange(core, Message(kind, buffer, other).alone, async_op, timeout, stream)


def both_ways(
    core: Core,
    sendbuf: Any,
    dest: object,
    recvbuf: Any,
    source: object,
    async_op: bool,
    timeout: float | None,
    stream: object,
) -> Work:
    """A message to `dest` and one from `source` at the same time."""
    if core.in_group():
        raise ArgumentError("group(): wanted send and recv, got sendrecv")
    core.host.check_usable()
    to, origin = check_rank(dest, core.size, "dest"), check_rank(source, core.size, "source")
    send = read_buffer(sendbuf, "sendbuf", writable=False)
    recv = read_buffer(recvbuf, "recvbuf", writable=True)
    if send.dtype is not recv.dtype:
        raise BufferTypeError(f"sendbuf and recvbuf: wanted one dtype, got {send.dtype.label} and {recv.dtype.label}")
    if (send.device, send.index) != (recv.device, recv.index):
        raise BufferTypeError(f"sendbuf and recvbuf: wanted memory of one device, got {send.place} and {recv.place}")
    if send.overlaps(recv):
        raise ArgumentError("sendbuf and recvbuf overlap")
    if (to == core.rank) != (origin == core.rank):
        raise ArgumentError(f"dest and source: a message to oneself needs both to be rank {core.rank}")
    if to == core.rank and send.device == "cpu":
        own = [Message(SEND, send, to), Message(RECV, recv, origin)]
        _check_own(core.rank, own)
        core.host.exchange_all(own, core.config.timeout)
        return DONE
    return _exchange(core, SendRecv(send, to, recv, origin), async_op, timeout, stream)


def _exchange(core: Core, ends: SendRecv, async_op: bool, timeout: float | None, stream: object) -> Work:
    """The slow path."""
    run = core.exchange if core.message_check is None else core.message_check.exchange
    return run(ends, async_op, core.seconds(timeout), stream)


def _check_own(rank: int, batch: list[Message]) -> None:
    """ArgumentError unless this rank's sends to itself match its receives."""
    outgoing, incoming = (
        [(b.count, b.dtype, b.device) for k, b, peer in batch if k == kind and peer == rank] for kind in (SEND, RECV)
    )
    if outgoing != incoming:
        raise ArgumentError(f"group(): the sends of rank {rank} to itself do not match its receives")
