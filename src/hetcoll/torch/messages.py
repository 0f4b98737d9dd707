"""Point to point. Messages between two ranks match by tag, and those of one in the order of the calls.

A GPU's messages match in the order of the calls alone, as NCCL's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .. import ANY_SOURCE, ArgumentError, Communicator
from .. import Work as Operation
from ..types import Format
from .failures import translated
from .launch import BATCHES, LaneName, Launcher, Place, Start
from .sources import Sources
from .tensors import flat, gpu_of
from .work import Bundle, ToSelf

Tensors = Sequence[torch.Tensor]
Halves = list[tuple[int, torch.Tensor, ToSelf]]
Half = tuple[torch.Tensor, int]  # of a message: its memory, and the other rank


class Messages(Launcher):
    """The point-to-point part of `HetcollProcessGroup`."""

    def __init__(
        self, comm: Communicator | Place, store: dist.Store, timeout: float, compress: Format | None = None
    ) -> None:
        super().__init__(comm, store, timeout, compress)
        self._bundle: list[dist.Work] | None = None  # between _start_coalescing and _end_coalescing
        self._halves: tuple[Halves, Halves] = ([], [])  # sends to itself, and receives from itself
        self._sources: dict[Communicator, Sources] = {}

    def _peer(self, rank: int, name: str) -> int:
        """As `calls.check_rank`, of what is an int: every message comes here, and calls of Python cost it."""
        if not 0 <= rank < self._place.size:
            raise ArgumentError(f"{name}: wanted a rank in [0, {self._place.size}), got {rank}")
        return rank

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> dist.Work:
        """Start to send one tensor to `dst_rank` of the group."""
        (tensor,) = tensors
        if tag:
            tag = self._matched(tensor, tag)
        if self._peer(dst_rank, "dst") == self._place.rank:
            return self._to_self(tensor, None, tag)
        memory, comm = flat(tensor), self._comm
        if tag:
            return self._message(
                comm,
                [tensor],
                lambda how: [comm.send(memory, dst_rank, tag=tag, async_op=True, timeout=self._timeout)],
                ("send", dst_rank),
                dst_rank,
            )
        self._sources_of(comm).sending(dst_rank)
        return self._one(comm, tensor, memory, "send", dst_rank)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> dist.Work:
        """Start to receive one tensor from `src_rank` of the group."""
        (tensor,) = tensors
        if tag:
            tag = self._matched(tensor, tag)
        if self._peer(src_rank, "src") == self._place.rank:
            return self._to_self(None, tensor, tag)
        memory, comm = flat(tensor), self._comm
        if tag:
            return self._receive_tagged(tensor, src_rank, tag)
        if not self._sources_of(comm).receiving(src_rank):
            return self._receive_later(comm, tensor, src_rank)
        return self._one(comm, tensor, memory, "recv", src_rank)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Start to receive one tensor from the rank that sends one: which, `source_rank` of the handle tells.

        On a GPU's tensor the host waits until a rank begins to send.
        """
        (tensor,) = tensors
        if tag:
            tag = self._matched(tensor, tag)
        return self._receive_tagged(tensor, ANY_SOURCE, tag) if tag else self._receive_later(self._comm, tensor, None)

    def _matched(self, tensor: torch.Tensor, tag: int) -> int:
        """The tag that a message is matched by: NCCL has none. ValueError where a GPU's is to count."""
        if tag < 0:
            raise ValueError(f"tag: wanted 0 or more, got {tag}")
        if tag == 0 or tensor.is_cpu:
            return tag
        config = distributed_c10d._world.pg_backend_config.get(self, "")
        if "nccl" not in config:
            raise ValueError(
                f"tag: wanted 0 for a tensor on {tensor.device}, got {tag}: a GPU's messages match in the order of the "
                "calls, as NCCL's do. Send and receive in one order without tags, or send copies on the CPU"
            )
        return 0

    def _receive_tagged(self, tensor: torch.Tensor, source: int, tag: int) -> dist.Work:
        comm, memory = self._comm, flat(tensor)
        return self._message(
            comm,
            [tensor],
            lambda how: [comm.recv(memory, source, tag=tag, async_op=True, timeout=self._timeout)],
            ("recv", source),
            source,
        )

    def _receive_later(self, comm: Communicator, tensor: torch.Tensor, source: int | None) -> dist.Work:
        """A receive from any source, or one from `source` after such ones."""
        memory, sources, limit = flat(tensor), self._sources_of(comm), self._timeout
        if not tensor.is_cpu:
            gpu_of(tensor)
            with translated:
                found = sources.now(source, limit)
            return self._one(comm, tensor, memory, "recv", found)

        def start(how: dict[str, Any]) -> Any:
            return [sources.later(source, lambda rank: comm.recv(memory, rank, **how), limit)]

        return self._message(comm, [tensor], start, ("recv", -1), -1)

    def _sources_of(self, comm: Communicator) -> Sources:
        found = self._sources.get(comm)
        if found is None:
            found = self._sources.setdefault(comm, Sources(comm))
        return found

    def _one(self, comm: Communicator, tensor: torch.Tensor, memory: torch.Tensor, kind: str, peer: int) -> dist.Work:
        """A "send" or a "recv" that counts already."""
        sent, received = ([peer], ()) if kind == "send" else ((), [peer])
        call = getattr(comm, kind)
        lane = (kind, peer)
        return self._message(
            comm, [tensor], lambda how: [call(memory, peer, **how)], lane, peer, sent=sent, received=received
        )

    def _message(
        self,
        comm: Communicator,
        tensors: list[torch.Tensor],
        start: Start,
        lane: LaneName,
        peer: int | None,
        *,
        sent: Sequence[int] = (),
        received: Sequence[int] = (),
    ) -> dist.Work:
        """Launch messages, of which `sent` and `received` count already; what is refused does not count after all."""
        try:
            work = self._launch(None, tensors, start, tensors, lane=lane, source=peer)
        except (ValueError, TypeError):
            self._sources_of(comm).take_back(sent=sent, received=received)
            raise
        if self._bundle is not None:
            self._bundle.append(work)
        return work

    # To oneself: the first half waits for the second one.

    def _to_self(self, out: torch.Tensor | None, into: torch.Tensor | None, tag: int) -> dist.Work:
        halves = self._halves[0 if out is None else 1]  # of the other kind
        mine = out if out is not None else into
        assert mine is not None
        work = ToSelf(mine, self.rank())
        found = next((half for half in halves if half[0] == tag), None)
        if found is None:
            self._halves[1 if out is None else 0].append((tag, mine, work))
            return work
        halves.remove(found)
        _, theirs, other = found
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
        for each in operations:  # before anything moves
            self._peer(each.group_peer, "peer")
            if each.tag:
                self._matched(each.tensor, each.tag)
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
        sent, received = ([peer for _, peer in half] for half in (sends, recvs))
        lane = BATCHES
        if len({*sent, *received}) == 1 and not (sent and received):
            lane = ("send" if sent else "recv", operations[0].group_peer)
        tensors = [each.tensor for each in operations]
        start = partial(_exchange, comm, sends, recvs)
        return self._message(comm, tensors, start, lane, None, sent=sent, received=received)


def _exchange(comm: Communicator, sends: Sequence[Half], recvs: Sequence[Half], _: object) -> Sequence[Operation]:
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
