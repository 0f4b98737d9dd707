"""A rank without a GPU among ranks that have one: its processor fills and empties the slots that GPUs use.

It runs the very plans that the GPUs run (`plans`), piece by piece, on its engine. What differs is what carries a
message. To a GPU of the same host it goes through the slots of `slots`; to one of another host through a socket, whose
other end is a proxy (`proxy`); to another rank without a GPU as everything else does. Links to GPUs have channels of
their own.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

import hetcoll._native as _native

from ..calls import Call, descriptor
from ..calls.messages import SendRecv
from ..health.diagnosis import Diagnosis
from ..links.wiring import Check, Wiring
from ..plan.ir import P2P_CHANNEL, Plan
from ..plan.pieces import SLOTS
from ..plan.topology import Way
from ..runtime.executor import Prepare
from ..runtime.planner import Planner
from ..types import OCP_OF, DType, Format, ReduceOp
from . import float8, path_probe
from .far_proof import Exchange, FarProof
from .planner import Choice, GpuPlanner, by_copies
from .plans import GpuPlans, Made
from .shared import GpuShare
from .slots import CHANNELS
from .vendor_comm import GpuIslands, Meet

HELPERS = 7  # threads at most, beside the caller's, that fill and empty slots: one core moves a tenth of what PCIe does
T = TypeVar("T")


class CpuRank:
    """What one communicator keeps on a rank without a GPU. Made together with the others' `executor.GpuExecutor`."""

    def __init__(self, wiring: Wiring, diagnosis: Diagnosis, planner: Planner, timeout: float, *, meet: Meet) -> None:
        self._wiring, self._planner = wiring, planner
        self._share = GpuShare(wiring, diagnosis, None, "it has no GPU", meet, timeout)
        try:
            islands = GpuIslands(wiring, self._share.gpus, None, meet, timeout, diagnosis)
        except BaseException:
            self._share.close()
            raise
        self.two_kinds = float8.two_kinds(self._share.gpus)
        self._links = _Links(wiring, self._share, self._exchange)
        self.choices = GpuPlanner(planner, self._share, islands, {}, None)
        binder = _HostBinder(wiring, self._links)
        self._plans = GpuPlans(wiring.rank, wiring.size, islands, self._share.slot_bytes, binder, planner, self.choices)
        self._unfinished: list[path_probe.Bytes] = []

    def prove(self, meet: Meet, prepare: Prepare, timeout: float) -> None:
        """Try the ways to GPUs together with their ranks: as `executor.GpuExecutor.prove`."""

        def exchange(peer: int, nbytes: int, seconds: float) -> str:
            tried = functools.partial(self._exchange, peer, P2P_CHANNEL, nbytes, seconds)
            return prepare(lambda check: self._links.during(timeout, check, tried), timeout)

        path_probe.prove(self._share, exchange, meet, self._links.give_up, lambda: self._wiring.listen(timeout))

    def _exchange(self, peer: int, channel: int, nbytes: int, seconds: float) -> str:
        """See `far_proof.Exchange`; links may be made meanwhile (`_Links.during`)."""
        engine, tickets, deadline = self._wiring.engine, list[_native.Ticket](), time.monotonic() + seconds
        data, got = path_probe.pattern(self._share.rank, nbytes), np.zeros(nbytes, np.uint8)
        # All at once: that a link has ended comes behind what it brings.
        for at, n in path_probe.messages(self._share, nbytes):
            shape = self._plans.messages(DType.UINT8, [(peer, n)], [(peer, n)], by_copies, channel=channel, whole=True)
            tickets.append(engine.submit(shape, int(data.ctypes.data) + at, int(got.ctypes.data) + at, False))
        if self._over(tickets, deadline):
            return path_probe.wrong(lambda at, n: got[at : at + n], peer, nbytes)
        problem = engine.failure[2] if engine.failed else path_probe.nothing_came(peer, seconds)
        self._links.give_up(peer)
        far = self._share.topology.far(self._share.rank, peer)  # of that way an engine does not let go
        if far or not self._over(tickets, time.monotonic() + seconds):
            self._unfinished += [data, got]  # the engine may still use them
        return problem

    def _over(self, tickets: Sequence[_native.Ticket], deadline: float) -> bool:
        """Whether all of these come to be done by then."""
        wait, done = self._wiring.engine.wait, _native.Status.DONE
        return all(wait(each, max(0.001, deadline - time.monotonic())) is done for each in tickets)

    def shape(self, call: Call, timeout: float, check: Check) -> _native.Shape:
        """As `runtime.host.HostPlans.shape`."""

        def bind(choice: Choice) -> _native.Shape:
            shape = self._links.during(timeout, check, lambda: self._plans.compile(call, choice))
            self._planner.note(shape.id, call.describe(), call.nbytes)
            return shape

        return self.choices.bound(call, bind)

    def point(self, ends: SendRecv, timeout: float, check: Check) -> _native.Shape:
        """As `runtime.host.HostPlans.point`."""
        key = (ends.first.dtype, *ends.counts)

        def bind() -> _native.Shape:
            shape = self._links.during(timeout, check, lambda: self._plans.messages(*key, self.choices.carrier))
            self._planner.note(shape.id, ends.describe(), ends.nbytes)
            return shape

        return self._planner.bound("cpu rank message", key, bind)

    def converted(self, call: Call) -> tuple[Call, Callable[[], None] | None]:
        """The call to make instead, and what is to be done once it is complete: see `float8`."""
        conversion = float8.Float8Conversion.of_call(call, self._wiring.rank) if self.two_kinds else None
        if conversion is None:
            return call, None
        send, recv, finish = float8.on_host(conversion)
        return replace(call, send=send, recv=recv, dtype=OCP_OF.get(call.dtype, call.dtype)), finish

    def converted_message(self, ends: SendRecv) -> tuple[SendRecv, Callable[[], None] | None]:
        """The same for messages."""
        conversion = float8.Float8Conversion.of_message(ends, self._wiring.rank) if self.two_kinds else None
        if conversion is None:
            return ends, None
        send, recv, finish = float8.on_host(conversion)
        return ends._replace(send=send, recv=recv), finish

    def note(self, call: Call) -> None:
        """Write a collective down for this host's other ranks; raises where one of them called something else."""
        what = call.describe()
        self._share.note(self._planner.bound("note", (what,), lambda: [self._share.entry(what)]))

    def note_message(self, ends: SendRecv) -> None:
        """The same for messages."""
        key = (ends.first.dtype, *ends.counts)
        self._share.note(self._planner.bound("note of messages", key, lambda: self._share.notes(ends)))

    def paths(self) -> tuple[str, ...]:
        """For people: how data goes from this rank to every GPU."""
        gpus = enumerate(self._share.gpus)
        return tuple(
            f"from this rank, a CPU, to the GPU of rank {peer} ({gpu.vendor} {gpu.arch}): {self._links.how(peer)}"
            + self._share.told_tried(peer)
            for peer, gpu in gpus
            if gpu.vendor
        )

    def close(self) -> None:
        """Give everything back. The engine must be closed."""
        self._share.close()


def helpers(wiring: Wiring) -> int:
    """How many threads may help this rank: what its share of the host's cores leaves it."""
    share = wiring.topology.shares[wiring.rank]
    return max(0, min(HELPERS, share - 1, len(os.sched_getaffinity(0)) - 1))


class _Waiting(threading.local):
    """How long the call of this thread may wait for links, and what watches over it meanwhile."""

    now: tuple[float, Check] | None = None


class _Links:
    """The engine's links to all other ranks, made when a plan first uses them."""

    def __init__(self, wiring: Wiring, share: GpuShare, exchange: Exchange) -> None:
        self._wiring, self._share = wiring, share
        self._far_proof = FarProof(wiring, share, exchange, self.give_up)
        self._helpers = helpers(wiring)
        self._waiting = _Waiting()

    def during(self, timeout: float, check: Check, make: Callable[[], T]) -> T:
        """`make`, whose links may take so long and are watched over by `check`."""
        self._waiting.now = (timeout, check)
        try:
            return make()
        finally:
            self._waiting.now = None

    def of(self, plan: Plan) -> Plan:
        """`plan` over links that exist now: what goes to GPUs has channels of its own."""
        wiring, waiting = self._wiring, self._waiting.now
        assert waiting is not None
        edges = sorted(plan.edges)
        wiring.ensure([(peer, channel) for peer, channel in edges if not self._gpu(peer)], *waiting)
        if fresh := self._far_proof.missing(edge for edge in edges if self._gpu(edge[0]) and self._far(edge[0])):
            self._far_proof.prove(fresh, *waiting)
        to_gpus = [(peer, self._shifted(peer, channel)) for peer, channel in edges if self._gpu(peer)]
        wiring.attach(to_gpus, self._make, *waiting)
        moved = (
            replace(s, channel=self._shifted(s.peer, s.channel)) if s.peer >= 0 and self._gpu(s.peer) else s
            for s in plan.steps
        )
        return replace(plan, steps=tuple(moved))

    def _make(self, missing: list[tuple[int, int]], timeout: float) -> None:
        """Links to GPUs."""
        wiring, waiting = self._wiring, self._waiting.now
        assert waiting is not None
        far = {edge: 1 for edge in missing if self._far(edge[0])}
        for (peer, channel), fds in wiring.sockets(far, timeout, waiting[1]):
            if self._way(peer) == "staged-rdma":
                wiring.attach_verbs(peer, channel, fds, self._share.topology)
            else:
                wiring.engine.attach_tcp(peer, channel, fds)
        for peer, channel in missing:
            if not self._far(peer):
                self._attach(peer, channel - CHANNELS)

    def _shifted(self, peer: int, channel: int) -> int:
        """The engine's number of a channel to a GPU, and that by which both ends ask for sockets (`proxy`): links
        that take the place of slots that did not work have others."""
        return channel + CHANNELS * (1 + self._share.given_up(peer))

    def give_up(self, peer: int) -> None:
        """Let the engine go that waits for a GPU, where slots of this host are the way."""
        if not self._far(peer):
            self._share.segment.release_edges(self._share.here, self._wiring.locals.index(peer))

    def _attach(self, peer: int, channel: int) -> None:
        segment, here, there = self._share.segment, self._share.here, self._wiring.locals.index(peer)
        out, into = segment.edge(here, there, channel), segment.edge(there, here, channel)
        self._wiring.engine.attach_slots(
            peer=peer,
            channel=channel + CHANNELS,
            out=(out.slots, out.ready, out.credit),
            into=(into.slots, into.ready, into.credit),
            slot_bytes=self._share.slot_bytes,
            count=SLOTS,
            aborts=segment.aborts[0],
            ranks=len(self._wiring.locals),
            helpers=self._helpers,
        )

    def _gpu(self, peer: int) -> bool:
        return bool(self._share.gpus[peer].vendor)

    def _far(self, peer: int) -> bool:
        return self._share.topology.far(self._wiring.rank, peer)

    def _way(self, peer: int) -> Way:
        return self._share.topology.way(self._wiring.rank, peer)

    def how(self, peer: int) -> str:
        """For people: how messages to a GPU go."""
        way = {
            "mapped": "through slots in the host's memory that the GPU has mapped",
            "staged-rdma": "by RDMA to the GPU's pinned slots",
        }.get(self._way(peer), "through 1 socket")
        return f"{way} ({self._share.why(peer)})"


class _HostBinder:
    """Binds plans for the engine."""

    def __init__(self, wiring: Wiring, links: _Links) -> None:
        self._engine, self._links = wiring.engine, links
        self._numbers: dict[bytes, int] = {}  # of the engine's plans, by what they consist of

    def bind(self, made: Made) -> _native.Shape:
        """See `plans.Binder`. Lanes run beside each other here, so the order of the steps is of no use."""
        call, dtype, tables = made.call, made.dtype, made.tables
        encoded = self._links.of(made.plan).encode(made.points)
        if encoded not in self._numbers:
            self._numbers[encoded] = self._engine.add_plan(encoded)
        return self._engine.bind(
            plan=self._numbers[encoded],
            dtype=dtype,
            op=ReduceOp.SUM if call is None else call.op,
            send_count=tables[0][-1],
            recv_count=tables[1][-1],
            send_table=tables[0],
            recv_table=tables[1],
            descriptor=descriptor(f"p2p {dtype.label}" if call is None else call.describe()),
            p2p=call is None,
            skip_empty=True,
            format=Format.NONE if call is None else call.compress,
        )
