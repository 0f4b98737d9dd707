"""Messages between two ranks: send, receive, both at once, and groups of them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..buffers import Buffer, read_buffer
from ..calls import check_rank
from ..errors import ArgumentError, BufferTypeError
from ..work import DONE, Work, finished
from .core import Core
from .selection import RECV, SEND, Message, describe_message


class Group(contextlib.AbstractContextManager[None]):
    """What `Communicator.group` gives: notes the messages of the ``with`` block, and starts them at its end."""

    def __init__(self, comm: Messages) -> None:
        self._comm = comm

    def __enter__(self) -> None:
        self._comm._begin_group()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._comm._end_group(kind is None)


class Messages(Core):
    """The point-to-point part of `hetcoll.Communicator`."""

    _batch: list[tuple[int, Any, int]] | None = None  # of the group() that is open: SEND or RECV, buffer, peer
    _batcher = 0  # the thread that is in it

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Sends and receives inside the ``with`` block start together at its end, which waits for all of them.

        So their order does not matter: every rank may send before it receives. Messages to oneself are allowed here.
        """
        return Group(self)

    def _begin_group(self) -> None:
        self._check_usable()
        if self._batch is not None:
            raise ArgumentError("group(): already inside a group")
        self._batch, self._batcher = [], threading.get_ident()

    def _end_group(self, run: bool) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        self._check_usable()
        if not run or not batch or self._engine.run_messages(batch):
            return
        every = [Message(kind, read_buffer(buf, "buf", writable=kind == RECV), peer) for kind, buf, peer in batch]
        self._check_own(every)
        read = [message for message in every if message.buffer.device == "cpu"]
        on_gpu = [message for message in every if message.buffer.device != "cpu"]
        if on_gpu:
            self._enqueue_group(on_gpu)
        self._deliver_to_self(read)
        works = [
            self._start_message(kind, buffer, peer, True, None, background=False)
            for kind, buffer, peer in read
            if peer != self._rank
        ]
        for work in works:
            work.wait()

    def _enqueue_group(self, messages: list[Message]) -> None:
        """Messages of GPU buffers. Where some are converted they go a send and a receive at a time: each has to be
        read before its conversion's memory is written again."""
        for message in messages:
            self._paths.check_place(message.buffer)
        on_gpu = self._on_gpu(messages[0].buffer, None).messages
        if not on_gpu.converts(messages):
            on_gpu.group(messages, None)
            return
        for others in (False, True):  # messages to oneself have both halves
            sends, recvs = (
                [(b, p) for kind, b, p in messages if kind == half and (p != self._rank) == others]
                for half in (SEND, RECV)
            )
            for out, into in itertools.zip_longest(sends, recvs):
                send, dest = out or (None, -1)
                recv, source = into or (None, -1)
                if send is not None and recv is not None and send.dtype is not recv.dtype:
                    self._exchange(send, dest, None, -1, False, None)
                    self._exchange(None, -1, recv, source, False, None)
                else:
                    self._exchange(send, dest, recv, source, False, None)

    def answer(self, question: str, function: Callable[[int], Any]) -> None:
        """What this rank answers other ranks' `ask`: `function` of the asking rank, quick, from any thread; as JSON."""
        self._diagnosis.answers[question] = function

    def leave_answers(self, question: str, answers: Sequence[Any]) -> None:
        """What each rank's `ask` is told once this rank has left in order: to be called before `close`."""
        self._diagnosis.leave_answers(question, answers)

    def ask(self, question: str, seconds: float) -> dict[int, Any]:
        """Every rank's answer, out of band, whatever their threads are doing; None from who gave none in `seconds`."""
        self._check_usable()
        return self._diagnosis.ask(question, seconds)

    def _message(self, kind: int, buf: Any, peer: int, async_op: bool, timeout: float | None, stream: object) -> Work:
        """One half of a message, `kind` is SEND or RECV; in a `group` it is only noted."""
        if self._batch is not None and self._batcher == threading.get_ident():
            if not self._engine.knows(kind, buf, peer):
                self._check_usable()
                peer = check_rank(peer, self._size, "peer")
                read_buffer(buf, "buf", writable=kind == RECV)
            self._batch.append((kind, buf, peer))
            return DONE
        self._check_usable()
        other = check_rank(peer, self._size, "peer")
        buffer = read_buffer(buf, "buf", writable=kind == RECV)
        if other == self._rank:
            raise ArgumentError(f"peer: rank {other} is this rank; a message to oneself needs both halves in a group()")
        return self._start_message(kind, buffer, other, async_op, timeout, stream)

    def _start_message(
        self,
        kind: int,
        buffer: Buffer,
        peer: int,
        async_op: bool,
        timeout: float | None,
        stream: object = None,
        *,
        background: bool = True,
    ) -> Work:
        if kind == SEND:
            return self._exchange(buffer, peer, None, -1, async_op, timeout, stream, background=background)
        return self._exchange(None, -1, buffer, peer, async_op, timeout, stream, background=background)

    def _exchange(
        self,
        send: Buffer | None,
        dest: int,
        recv: Buffer | None,
        source: int,
        async_op: bool,
        timeout: float | None,
        stream: object = None,
        *,
        background: bool = True,
    ) -> Work:
        """The long way for a message to `dest`, one from `source`, or both at once."""
        seconds = self._seconds(timeout)
        buffer = send or recv
        assert buffer is not None
        self._paths.check_place(buffer)
        if buffer.device != "cpu":
            return self._on_gpu(buffer, stream).messages.one(send, dest, recv, source, stream, async_op)
        among = self._paths.on_host()
        finish = None
        if among is not None:
            send, recv, finish = among.converted_message(send, dest, recv)
        plans = among or self._selection
        calls, thread = self._witness.calls, threading.get_ident()
        calls[thread] = describe_message(send, dest, recv, source)
        try:
            shape = self._prepare(lambda check: plans.point(send, dest, recv, source, seconds, check), seconds)
            if among is not None:
                among.note_message(send, dest, recv, source)
            ptrs = (0 if send is None else send.ptr, 0 if recv is None else recv.ptr)
            work = self._run(shape, *ptrs, async_op, seconds, (send, recv), background=background)
            return finished(work, finish)
        finally:
            calls.pop(thread, None)

    def _sendrecv(
        self,
        sendbuf: Any,
        dest: object,
        recvbuf: Any,
        source: object,
        async_op: bool,
        timeout: float | None,
        stream: object,
    ) -> Work:
        self._check_usable()
        to, origin = check_rank(dest, self._size, "dest"), check_rank(source, self._size, "source")
        send = read_buffer(sendbuf, "sendbuf", writable=False)
        recv = read_buffer(recvbuf, "recvbuf", writable=True)
        if send.dtype is not recv.dtype:
            raise BufferTypeError(
                f"sendbuf and recvbuf: wanted one dtype, got {send.dtype.label} and {recv.dtype.label}"
            )
        if send.overlaps(recv):
            raise ArgumentError("sendbuf and recvbuf overlap")
        if (to == self._rank) != (origin == self._rank):
            raise ArgumentError(f"dest and source: a message to oneself needs both to be rank {self._rank}")
        if to == self._rank and send.device == "cpu":
            own = [Message(SEND, send, to), Message(RECV, recv, origin)]
            self._check_own(own)
            self._deliver_to_self(own)
            return DONE
        return self._exchange(send, to, recv, origin, async_op, timeout, stream)

    def _check_own(self, batch: list[Message]) -> None:
        """ArgumentError unless this rank's sends to itself match its receives."""
        outgoing, incoming = (
            [(b.count, b.dtype, b.device) for k, b, peer in batch if k == kind and peer == self._rank]
            for kind in (SEND, RECV)
        )
        if outgoing != incoming:
            raise ArgumentError(f"group(): the sends of rank {self._rank} to itself do not match its receives")

    def _deliver_to_self(self, batch: list[Message]) -> None:
        outgoing, incoming = ([b for k, b, peer in batch if k == kind and peer == self._rank] for kind in (SEND, RECV))
        for source, target in zip(outgoing, incoming, strict=True):
            self._selection.copy(source, target)
