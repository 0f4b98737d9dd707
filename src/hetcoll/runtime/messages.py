"""Messages between two ranks: send, receive, both at once, and groups of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..buffers import Buffer, read_buffer
from ..calls import RECV, SEND, Call, Message, check_rank
from ..errors import ArgumentError, BufferTypeError
from ..work import DONE, Work
from .core import Core


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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._batches: dict[int, list[tuple[int, Any, int]]] = {}  # of open groups, by thread: kind, buffer, peer
        super().__init__(*args, **kwargs)

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Sends and receives inside the ``with`` block start together at its end, which waits for all of them.

        So their order does not matter: every rank may send before it receives. Messages to oneself are allowed here.
        It is of the thread that opens it: what other threads send meanwhile is not held back. Nothing else is allowed
        inside: collectives of this thread are an ArgumentError, as are messages with a `timeout` or `stream` of their
        own.
        """
        return Group(self)

    def _begin_group(self) -> None:
        self._check_usable()
        if threading.get_ident() in self._batches:
            raise ArgumentError("group(): already inside a group")
        self._batches[threading.get_ident()] = []
        self._choose_fast_path()

    def _end_group(self, run: bool) -> None:
        batch = self._batches.pop(threading.get_ident(), None)
        if batch is None:
            raise ArgumentError("group(): wanted its end on the thread that began it")
        self._choose_fast_path()
        self._check_usable()
        if not run or not batch or self._engine.run_messages(batch):
            return
        every = [Message(kind, read_buffer(buf, "buf", writable=kind == RECV), peer) for kind, buf, peer in batch]
        self._check_own(every)
        on_gpu = [message for message in every if message.buffer.device != "cpu"]
        for message in every:
            self._gpus.check_place(message.buffer)
        for some in (on_gpu, [message for message in every if message.buffer.device == "cpu"]):
            if some:
                with self._executor(some[0].buffer, None) as executor:
                    executor.exchange_all(some, self._config.timeout)

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

    def _in_group(self) -> bool:
        """Whether this thread is in the block of a `group`."""
        return threading.get_ident() in self._batches

    def _takes_fast_path(self) -> bool:
        return not self._batches and super()._takes_fast_path()  # the slow one tells what is no message

    def _launch(self, call: Call, async_op: bool, timeout: float | None, stream: object = None) -> Work:
        if self._in_group():
            raise ArgumentError(
                f"group(): wanted sends and receives only, got {call.describe()}: call it after the block"
            )
        return super()._launch(call, async_op, timeout, stream)

    def _message(self, kind: int, buf: Any, peer: int, async_op: bool, timeout: float | None, stream: object) -> Work:
        """One half of a message, `kind` is SEND or RECV; in a `group` it is only noted."""
        batch = self._batches.get(threading.get_ident()) if self._batches else None
        if batch is not None:
            if timeout is not None or stream is not None:
                raise ArgumentError("group(): wanted messages without a timeout or stream of their own")
            if not self._engine.knows(kind, buf, peer):
                self._check_usable()
                peer = check_rank(peer, self._size, "peer")
                read_buffer(buf, "buf", writable=kind == RECV)
            batch.append((kind, buf, peer))
            return DONE
        self._check_usable()
        other = check_rank(peer, self._size, "peer")
        buffer = read_buffer(buf, "buf", writable=kind == RECV)
        if other == self._rank:
            raise ArgumentError(f"peer: rank {other} is this rank; a message to oneself needs both halves in a group()")
        halves = Message(kind, buffer, other).halves
        return self._exchange(*halves, async_op, timeout, stream)

    def _exchange(
        self,
        send: Buffer | None,
        dest: int,
        recv: Buffer | None,
        source: int,
        async_op: bool,
        timeout: float | None,
        stream: object = None,
    ) -> Work:
        """The slow path of a message to `dest`, one from `source`, or both at once."""
        buffer = send or recv
        assert buffer is not None
        seconds = self._seconds(timeout)
        with self._executor(buffer, stream) as executor:
            return executor.exchange(send, dest, recv, source, stream, async_op, seconds)

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
        if self._in_group():
            raise ArgumentError("group(): wanted send and recv, got sendrecv")
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
            self._host.exchange_all(own, self._config.timeout)
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
