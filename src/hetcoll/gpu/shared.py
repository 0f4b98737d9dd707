"""What all ranks tell each other before the first call on GPUs, and what those of one host then share.

That is the slots through which they pass messages (`slots`), and a ledger of calls (``native/gpu/ledger.h``):
streams move bytes without looking at them, so ranks compare what they call before anything of it is enqueued.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Collection, Sequence
from io import FileIO
from typing import TYPE_CHECKING, NoReturn

import hetcoll._native as _native

from ..calls import SEND, descriptor
from ..calls.messages import SendRecv
from ..errors import DeviceError, InitError, spell_ranks
from ..health.diagnosis import Diagnosis
from ..health.status_report import call_site
from ..health.verdicts import Kind
from ..links.descriptors import new_name, shared_memory
from ..links.facts import Gpu, served
from ..links.wiring import Wiring
from ..plan.topology import Pair, Topology, pair_of
from ..vendors.devices.kernels.source import MESSAGES
from .demand import Demand, find_rooms, slots_that_fit
from .lent import Lender
from .mapped import MappedMemory, whole_pages
from .pinned import Pinned, Told
from .slots import SlotSegment, slot_bytes
from .vendor_comm import Meet

if TYPE_CHECKING:
    from ..vendors.devices.base import Device

log = logging.getLogger("hetcoll")

Note = tuple[_native.Ledger, _native.LedgerEntry]
_MOST_TEXT = 400  # of a problem
_FLOAT8 = re.compile(r"float8_\w+")
_WINDOWS = (
    "calls that HETCOLL_ALGO takes from the library want what they give in one window, at one offset, on all ranks, or"
    " in none on any"
)


class GpuShare:
    """One rank's part in it. `device` is its GPU, None on a rank without; `no_direct` as `links.facts.Gpu` has it,
    `near` as `slot_bytes` has it.

    Making it is collective over all ranks. `close` it when nothing uses the slots any more.
    """

    def __init__(
        self,
        wiring: Wiring,
        diagnosis: Diagnosis,
        device: Device | None,
        no_direct: str,
        meet: Meet,
        timeout: float,
        near: bool = False,
    ) -> None:
        self._wiring, self._diagnosis = wiring, diagnosis
        self.rank, self.locals, self.here = wiring.rank, wiring.locals, wiring.locals.index(wiring.rank)
        ports = () if device is None else wiring.ports_near(device.bus_id)
        message_kernel = device is not None and _has_message_kernel(device)
        self.gpus: Sequence[Gpu] = wiring.facts.choose(
            device, new_name(), no_direct, message_kernel, Told.now(), ports, meet
        )
        kinds = [(gpu.vendor, gpu.bus) for gpu in self.gpus]
        topology = wiring.topology.equipped(kinds, [gpu.no_direct for gpu in self.gpus])
        self.topology = topology.with_ports([gpu.ports for gpu in self.gpus])
        self._failed: dict[Pair, str] = {}
        parts = served(self.topology.islands, self.gpus)
        apart = all(gpu.vendor for gpu in self.gpus) and len(parts) > 1
        whole = len(parts) == 1 < len(self.gpus)
        rooms = find_rooms(self.topology, self.gpus, wiring.pinned_bytes)
        fast = slot_bytes(self.topology, near=near and whole)
        self.slot_bytes = slots_that_fit(self.topology, self.gpus, rooms, fast, kernels=apart)
        with_gpu = [bool(self.gpus[rank].vendor) for rank in wiring.locals]
        self.pinned = Pinned(wiring.pinned_bytes, max(1, sum(with_gpu)))
        self.kernels, self.rings, self._spare = False, False, 0
        if (room := rooms.get(wiring.locals[0])) is not None:
            demand = Demand.of(self.topology, wiring.locals, sum(with_gpu), kernels=apart)
            fit = demand.fit(room.all, self.slot_bytes, self.slot_bytes, part=room.part)
            assert fit is not None
            self.kernels, self.rings, self._spare = fit.kernels, fit.rings, fit.spare
        self.proved: set[int] = set()
        """Ranks to which the way in use has carried known bytes."""
        self.lender: Lender | None = None
        """What lends memory of GPUs to ranks of this host, where one library serves all."""
        self.segment = self._segment(device, timeout, with_gpu, lends=whole)
        if device is not None:
            self.pinned.begin()
        self.ledger = _native.Ledger(self.segment.ledger, self.here, len(wiring.locals))
        self._edges: dict[tuple[int, int], _native.Ledger] = {}  # of messages, by their two ranks

    def spare_slots(self, most: int) -> int:
        """How many an edge to a rank elsewhere may have beyond those that it must: the first ones have more."""
        found = min(most, self._spare)
        self._spare -= found
        return found

    def exclude(self, failed: dict[Pair, str], topology: Topology) -> None:
        """The ways in use between these ranks do not work, and why: `topology` is what is left."""
        self._failed |= failed
        self.topology = topology

    def told_tried(self, peer: int) -> str:
        """Whether the way to `peer` is one of those, for people."""
        return ", tried with bytes" if peer in self.proved else ""

    def given_up(self, peer: int) -> int:
        """How many ways to `peer` did not work."""
        return len(self.topology.failed(self.rank, peer))

    def why(self, peer: int) -> str:
        """Why messages to `peer` go as they do, for people."""
        problem = self._failed.get(pair_of(self.rank, peer))
        return self.topology.why(self.rank, peer) + (f": {problem}" if problem else "")

    def _segment(self, device: Device | None, timeout: float, with_gpu: Sequence[bool], *, lends: bool) -> SlotSegment:
        ranks, name = len(self.locals), self.gpus[self.locals[0]].memory
        nbytes = SlotSegment.nbytes(ranks, self.slot_bytes, kernels=self.kernels)
        with self._memory("hetcoll-slots", nbytes, name, timeout) as memory:
            self.lender = Lender(device, memory.fileno(), self.here) if lends and device is not None else None
            return SlotSegment(memory.fileno(), with_gpu, self.slot_bytes, device, self.pinned, kernels=self.kernels)

    @property
    def room(self) -> int:
        """Bytes that this rank may pin for `map_memory`; 0 unless all ranks pass messages through slots of one host."""
        topology = self.topology
        near = all(peer == self.rank or not topology.far(self.rank, peer) for peer in range(len(self.gpus)))
        return self.pinned.windows if near else 0

    def map_memory(self, device: Device, parts: Sequence[int], meet: Meet, timeout: float) -> MappedMemory | None:
        """Memory of the host of which each rank has so many bytes, where all are on it. Collective; None on all ranks
        where one cannot have it."""
        name = meet("memory for GPUs", new_name().encode())[self.locals[0]].decode()
        made, problem = None, ""
        with self._memory("hetcoll-mapped", sum(map(whole_pages, parts)), name, timeout) as memory:
            try:
                made = MappedMemory(memory.fileno(), parts, device, self.pinned)
            except (InitError, DeviceError) as error:
                problem = f"rank {self.rank}: {error}"[:_MOST_TEXT]
        told = meet("memory for GPUs that is mapped", json.dumps(problem).encode())
        if not any(problems := [json.loads(each) for each in told]):
            return made
        log.info("no memory that all GPUs have mapped: %s", "; ".join(filter(None, problems)))
        if made is not None:
            made.close()
        return None

    def _memory(self, label: str, nbytes: int, name: str, timeout: float) -> FileIO:
        """A file of memory that the ranks of this host have in common."""
        wiring = self._wiring

        def check(peers: Collection[int]) -> None:
            if wiring.engine.failed:
                raise self._diagnosis.error()
            self._diagnosis.check_present(peers)

        return shared_memory(label, nbytes, name, wiring.rank, self.locals, wiring.secret, timeout, check)

    def entry(self, what: str) -> Note:
        """How a collective is written down, for all ranks of this host."""
        return self.ledger, _native.LedgerEntry.make(descriptor(what), _first(what))

    def notes(self, ends: SendRecv) -> list[Note]:
        """How messages are written down, each for its two ranks: where they share a host, and one of them has a GPU.

        Elsewhere frames say what they carry.
        """
        rank, found = self._wiring.rank, []
        for message in ends.halves:
            kind, buffer, peer = message
            edge = (rank, peer) if kind == SEND else (peer, rank)
            if peer != rank and peer in self._wiring.locals and (self.gpus[peer].vendor or self.gpus[rank].vendor):
                same = descriptor(f"message {buffer.dtype.label} {buffer.count}")
                found.append((self._edge(edge), _native.LedgerEntry.make(same, _first(str(message)))))
        return found

    def _edge(self, edge: tuple[int, int]) -> _native.Ledger:
        ledger = self._edges.get(edge)
        if ledger is None:
            src, dst = (self._wiring.locals.index(rank) for rank in edge)
            place = edge.index(self._wiring.rank)
            ledger = self._edges[edge] = _native.Ledger(self.segment.pages(src, dst), place, len(edge))
        return ledger

    def note(self, notes: Sequence[Note]) -> None:
        """Write down what is called next; raises where another rank called something else."""
        for ledger, entry in notes:
            peer = ledger.note(entry)
            if peer >= 0:
                self.differs(ledger, peer)

    def differs(self, ledger: _native.Ledger, peer: int) -> NoReturn:
        """The rank at place `peer` of a ledger wrote something else down under the number of this rank's last call."""
        edge = next((edge for edge, each in self._edges.items() if each is ledger), None)
        ranks = self._wiring.locals if edge is None else edge
        mine = ranks.index(self._wiring.rank)
        number = ledger.calls(mine)
        texts = [f"rank {ranks[i]} called {ledger.text(i, number) or 'something else'}" for i in (mine, peer)]
        kinds = {kind for text in texts for kind in _FLOAT8.findall(text)}
        if len(kinds) > 1:
            texts.append("8-bit floats are converted only between kinds of one format, where ranks have GPUs of both")
        if any(" window " in text for text in texts[:2]):
            texts.append(_WINDOWS)
        self._diagnosis.post(Kind.MISMATCH, ranks[peer], "; ".join(texts))
        raise self._diagnosis.error()

    def _text(self, rank: int, number: int) -> str:
        return self.ledger.text(self._wiring.locals.index(rank), number) or "something else"

    def check_needed(self, awaited: Collection[int]) -> None:
        """Raise where what does not move here needs a rank that has left: then every rank is told. It is one that is
        `awaited`, or has not called what this one has; ranks of other hosts have said how much when they left."""
        ledgers = [(self.locals, self.ledger), *tuple(self._edges.items())]
        counts = [(ledger.calls(ranks.index(self.rank)), rank, ledger.calls(place))
                  for ranks, ledger in ledgers for place, rank in enumerate(ranks)]  # fmt: skip
        self._diagnosis.check_present({rank for mine, rank, calls in counts if calls < mine}.union(awaited))
        self._diagnosis.check_counts()

    def awaited(self) -> list[int]:
        """The ranks for which a kernel of this one has been seen to wait since the last look."""
        return [self.locals[place] for place in self.segment.awaited(self.here)]

    def standing(self, awaited: Collection[int]) -> tuple[int, str]:
        """The rank of this host that is furthest behind, and where each of them is, for people. A kernel that may be a
        replay's waits for those `awaited`."""
        where = [(rank, self.ledger.calls(i)) for i, rank in enumerate(self._wiring.locals)]
        parts = [f"rank {rank} is at GPU call {n}: {self._text(rank, n)}" if n else f"rank {rank} has called nothing"
                 for rank, n in where]  # fmt: skip
        replays = [(rank, self.segment.replays(i)) for i, rank in enumerate(self._wiring.locals)]
        if len({n for _, n in replays}) > 1:  # of calls that were captured, and so written down when that was done
            parts += [f"rank {rank} has begun {n} captured calls" for rank, n in replays]
            where = replays
        if awaited:
            parts.append(f"a kernel waits for {spell_ranks(awaited)}")
        behind = min(awaited) if awaited else min(where, key=lambda pair: pair[1])[0]
        return behind, "; ".join(parts)

    def close(self) -> None:
        """Give back what is lent, and unmap the slots."""
        self.pinned.end()
        with contextlib.closing(self.segment):
            if self.lender is not None:
                self.lender.close()


def _first(what: str) -> str:
    return f"{what} (first called at {call_site()})"


def _has_message_kernel(device: Device) -> bool:
    """Whether the kernel of small messages can be had here. It is compiled, where it never was, and loaded: before
    messages are under way, for which a driver may wait."""
    try:
        device.kernels().function(MESSAGES)
    except DeviceError as error:
        log.info("messages between GPUs go by copies: %s", error)
        return False
    return True
