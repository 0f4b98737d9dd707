"""Point to point. Messages between two ranks match in the order of the calls, as NCCL's do; tags are not looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..communicator import Communicator
from ..types import Format
from ..work import Work as Operation
from .failures import translated
from .launch import Launcher
from .sources import Sources
from .tensors import flat
from .work import Bundle, ToSelf

Tensors = Sequence[torch.Tensor]
Halves = deque[tuple[torch.Tensor, ToSelf]]
Half = tuple[torch.Tensor, int]  # of a message: its memory, and the other rank


class Messages(Launcher):
    """The point-to-point part of `HetcollProcessGroup`."""

    def __init__(self, comm: Communicator, store: dist.Store, timeout: float, compress: Format | None = None) -> None:
        super().__init__(comm, store, timeout, compress)
        self._bundle: list[dist.Work] | None = None  # between _start_coalescing and _end_coalescing
        self._halves: tuple[Halves, Halves] = (deque(), deque())  # sends to itself, and receives from itself
        self._sources: dict[Communicator, Sources] = {}

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> dist.Work:
        """Start to send one tensor to `dst_rank` of the group."""
        (tensor,) = tensors
        if dst_rank == self.rank():
            return self._to_self(tensor, None)
        memory, comm = flat(tensor), self._comm
        sources = self._sources_of(comm)
        sources.sending(dst_rank)
        try:
            return self._message([tensor], lambda how: [comm.send(memory, dst_rank, **how)], "send", dst_rank)
        except (ValueError, TypeError):
            sources.take_back(sent=[dst_rank])
            raise

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> dist.Work:
        """Start to receive one tensor from `src_rank` of the group."""
        (tensor,) = tensors
        if src_rank == self.rank():
            return self._to_self(None, tensor)
        memory, comm = flat(tensor), self._comm
        sources = self._sources_of(comm)
        if not sources.receiving(src_rank):
            return self._receive_later(comm, tensor, src_rank)
        try:
            return self._message([tensor], lambda how: [comm.recv(memory, src_rank, **how)], "recv", src_rank)
        except (ValueError, TypeError):
            sources.take_back(received=[src_rank])
            raise

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Start to receive one tensor from the rank that sends one: which, `source_rank` of the handle tells.

        On a GPU's tensor the host waits until a rank begins to send.
        """
        (tensor,) = tensors
        return self._receive_later(self._comm, tensor, None)

    def _receive_later(self, comm: Communicator, tensor: torch.Tensor, source: int | None) -> dist.Work:
        """A receive from any source, or one from `source` after such ones."""
        memory, sources, limit = flat(tensor), self._sources_of(comm), self._timeout
        if tensor.device.type != "cpu":
            with translated:
                found = sources.now(source, limit)
            return self._message([tensor], lambda how: [comm.recv(memory, found, **how)], "recv", found)

        def start(how: dict[str, Any]) -> Any:
            return [sources.later(source, lambda rank: comm.recv(memory, rank, **how), limit)]

        return self._message([tensor], start, "recv", -1)

    def _sources_of(self, comm: Communicator) -> Sources:
        found = self._sources.get(comm)
        if found is None:
            found = self._sources.setdefault(comm, Sources(comm))
        return found

    def _message(self, tensors: list[torch.Tensor], start: Any, lane: str, peer: int) -> dist.Work:
        work = self._launch(None, tensors, start, tensors, lane=lane, source=peer)
        if self._bundle is not None:
            self._bundle.append(work)
        return work

    # To oneself: the first half waits for the second one.

    def _to_self(self, out: torch.Tensor | None, into: torch.Tensor | None) -> dist.Work:
        halves = self._halves[0 if out is None else 1]  # of the other kind
        mine = out if out is not None else into
        assert mine is not None
        work = ToSelf(mine, self.rank())
        if not halves:
            self._halves[1 if out is None else 0].append((mine, work))
            return work
        theirs, other = halves.popleft()
        target, source = (theirs, mine) if into is None else (mine, theirs)
        if (target.shape.numel(), target.dtype) != (source.shape.numel(), source.dtype):
            raise ValueError(f"to oneself: wanted {source.numel()} elements of {source.dtype}, got {target.numel()} of "
                             f"{target.dtype}")  # fmt: skip
        target.detach().copy_(source.detach().view(target.shape))
        work.done = other.done = True
        return work

    # Many at once.

    def _start_coalescing(self, device: torch.device) -> None:
        self._bundle = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._bundle = self._bundle or [], None
        return Bundle(works, [])

    def batch(self, operations: Sequence[dist.P2POp]) -> list[dist.Work]:
        """The sends and receives of `torch.distributed.batch_isend_irecv`, none of which waits for another.

        Those of a GPU's tensors are enqueued together and have one handle; but for
        messages to oneself, for which no other rank needs to do anything.
        """
        works, rank = [], self.rank()
        if not all(each.tensor.is_cpu for each in operations):
            others = [each for each in operations if each.group_peer != rank]
            operations = [each for each in operations if each.group_peer == rank]
            if others:
                works.append(self._enqueue_batch(others))
        for each in operations:
            start = self.send if each.op is dist.isend else self.recv
            tensor = torch.view_as_real(each.tensor) if each.tensor.is_complex() else each.tensor
            works.append(start([tensor], each.group_peer, each.tag))
        return works

    def _enqueue_batch(self, operations: Sequence[dist.P2POp]) -> dist.Work:
        comm = self._comm
        sends = [(flat(each.tensor), each.group_peer) for each in operations if each.op is dist.isend]
        recvs = [(flat(each.tensor), each.group_peer) for each in operations if each.op is not dist.isend]
        sources = self._sources_of(comm)
        for _, peer in sends:
            sources.sending(peer)
        for _, peer in recvs:
            if not sources.receiving(peer):
                sources.now(peer, self._timeout)
        tensors = [each.tensor for each in operations]
        lane = "batch" if sends and recvs else "send" if sends else "recv"  # behind messages of their kind only
        try:
            return self._launch(None, tensors, lambda how: _exchange(comm, sends, recvs), tensors, lane=lane)
        except (ValueError, TypeError):
            sources.take_back(sent=[peer for _, peer in sends], received=[peer for _, peer in recvs])
            raise


def _exchange(comm: Communicator, sends: Sequence[Half], recvs: Sequence[Half]) -> Sequence[Operation]:
    """All under way together. A group costs the host most, and a pipeline's stages mostly need one message each way."""
    match sends, recvs:
        case [(out, to)], []:
            return [comm.send(out, to)]
        case [], [(into, origin)]:
            return [comm.recv(into, origin)]
        case [(out, to)], [(into, origin)] if out.dtype == into.dtype and not torch._C._is_alias_of(out, into):
            return [comm.sendrecv(out, to, into, origin)]
    with comm.group():
        for memory, peer in sends:
            comm.send(memory, peer)
        for memory, peer in recvs:
            comm.recv(memory, peer)
    return ()
