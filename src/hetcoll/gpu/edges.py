"""The ways from one rank's GPU to all other ranks: through slots that its host shares, or through a proxy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import hetcoll._native as _native

from ..links.wiring import Check, Wiring
from ..plan.ir import Op, Plan
from ..plan.pieces import SLOTS
from ..runtime.executor import Prepare
from .near import NearMemory
from .proxy import Proxies
from .shared import GpuShare
from .slots import CHANNELS
from .vendor_comm import GpuIslands

End = tuple[bool, int, int]
"""Of an edge: whether this rank sends, the peer, the channel."""
_PULLS = CHANNELS  # in the place of a channel: through no slot

if TYPE_CHECKING:
    from .far_proof import FarProof


class GpuEdges:
    """Edges of `queue`, made when a plan first uses them, with slots of `near` where it has them. `prepare` watches
    over the connecting of those that are far away, which takes at most `seconds`."""

    def __init__(
        self,
        wiring: Wiring,
        queue: _native.DeviceQueue,
        share: GpuShare,
        proxies: Proxies,
        near: NearMemory | None,
        prepare: Prepare,
        seconds: float,
    ) -> None:
        self._wiring, self._queue, self._segment, self._proxies = wiring, queue, share.segment, proxies
        self._share, self._near = share, near
        self._prepare, self._gpus = prepare, share.gpus
        self.seconds = seconds
        """What the call has that is just being made: they take turns."""
        self.far_proof: FarProof | None = None
        """What tries ways to ranks elsewhere before they are used."""
        self._here = share.here
        self._ready: set[End] = set()
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._peers: dict[int, int] = {}  # by number
        self._captured: set[int] = set()  # numbers

    def of(self, plan: Plan) -> list[int]:
        """The queue's numbers of the edges that the plan's steps use, 0 where a step needs none."""
        ends = {(step.op is Op.SEND, step.peer, step.channel) for step in plan.steps if step.peer >= 0}
        if fresh := sorted(ends - self._ready):
            self._prepare(lambda check: self._make(fresh, check), self.seconds)
            self._ready.update(fresh)
        return [0 if step.peer < 0 else self._edge(step.op is Op.SEND, step.peer, step.channel) for step in plan.steps]

    def _make(self, ends: Sequence[End], check: Check) -> None:
        far = [end for end in ends if self.far(end[1])]
        edges = sorted({end[1:] for end in far})
        if self.far_proof is not None and (fresh := self.far_proof.missing(edges)):
            self.far_proof.prove(fresh, self.seconds, check)
        self._proxies.check_room(far)
        self._proxies.connect(edges, self.seconds, check)
        for end in ends:
            self._edge(*end)

    def far(self, peer: int) -> bool:
        """Whether what goes to `peer` does not go through this host's slots."""
        return self._share.topology.far(self._wiring.rank, peer)

    def _edge(self, out: bool, peer: int, channel: int) -> int:
        if self.far(peer):
            number = self._proxies.edge(self._queue, out, peer, channel)
            self._peers[number] = peer
            return number
        other = self._wiring.locals.index(peer)
        key = (self._here, other, channel) if out else (other, self._here, channel)
        found = self._numbers.get(key)
        if found is None:
            words, near = self._words(key)
            found = self._numbers[key] = self._queue.add_edge(*words, near=near)
            self._peers[found] = peer
        return found

    def pulls(self, out: bool, peer: int) -> int:
        """The queue's number of the edge of what `peer` pulls out of this rank's memory, or this rank out of its."""
        return self._edge(out, peer, _PULLS)

    def _words(self, key: tuple[int, int, int], *, captured: bool = False) -> tuple[tuple[int, int, int, int], bool]:
        """Where an edge's slots, its `ready` and its `credit` words are, and how many; and whether its slots are on a
        GPU."""
        src, dst, channel = key
        way = (src, dst, 0 if channel == _PULLS else channel)
        near = 0 if self._near is None else self._near.at(*way, captured=captured)
        edge = self._segment.edge(*way, captured=captured, slots=near)
        if channel == _PULLS:
            return (0, *edge.pulls, 1), False
        return (edge.slots, edge.ready, edge.credit, SLOTS), near != 0

    def why_not_captured(self, numbers: Sequence[int] | None) -> str | None:
        """Why what goes over these edges cannot be part of a graph; None where it can. `numbers` are those of messages
        between two ranks; None: of a collective, for which all ranks of the communicator must be able to."""
        if numbers is None:  # the same on all ranks
            peers = [(one, other) for other in range(self._wiring.size) for one in range(other + 1)]
        else:
            peers = [(self._wiring.rank, self._peers[number]) for number in numbers]
        for one, other in peers:
            if not self._gpus[other].vendor:
                return f"got rank {other}, which has none"
            if one != other and self._share.topology.way(one, other) != "mapped":
                return f"got rank {other} ({self._share.topology.why(one, other)})"
        return None

    def capture(self, numbers: Sequence[int]) -> None:
        """See to it that captured programs have edges in place of these."""
        for key, number in self._numbers.items():
            if number in numbers and number not in self._captured:
                words, _ = self._words(key, captured=True)
                self._queue.add_capture_edge(number, *words)
                self._captured.add(number)

    def describe(self, peer: int) -> str:
        """For people: how messages to `peer` go."""
        why = self._share.why(peer)
        if self.far(peer):
            return f"{self._proxies.describe_way(peer)} ({why})"
        if self._near is not None and peer not in self._near.why_not:
            return f"through slots in the receiving GPU's memory ({why})"
        both = "both GPUs have mapped" if self._gpus[peer].vendor else "it has mapped"
        why += f"; not in the GPU's: {self._near.why_not[peer]}" if self._near is not None else ""
        return f"through slots in the host's memory that {both} ({why})"

    def describe_all(self, islands: GpuIslands) -> list[str]:
        """For people: how data goes from this rank's GPU to every other rank."""
        rank, found = self._wiring.rank, []
        mine = next(island for island in islands.islands if rank in island)
        for peer, gpu in enumerate(self._gpus):
            if peer == rank:
                continue
            way = self.describe(peer) + self._share.told_tried(peer)
            if peer in mine and islands.island is not None:
                way = f"by {islands.island.library}; what that does not do, {way}"
            other = f"to that of rank {peer} ({gpu.vendor} {gpu.arch})" if gpu.vendor else f"to rank {peer}, a CPU"
            found.append(f"from the GPU {other}: {way}")
        return found

    def progress(self) -> int:
        """Grows while messages of this rank move."""
        return self._segment.progress(self._here) + self._proxies.progress

    def problem(self, peer: int) -> str:
        """What the way to `peer` failed with while it was tried, where that is known."""
        return self._proxies.problem(peer) if self.far(peer) else ""

    def give_up(self, peer: int) -> None:
        """Let this rank's streams go that wait for `peer`, on the way that did not work."""
        self._ready = {end for end in self._ready if end[1] != peer}
        if self.far(peer):
            self._proxies.leave(peer)
        else:
            self._segment.release_edges(self._here, self._wiring.locals.index(peer))

    def fail(self, reason: str) -> None:
        """Let every stream and kernel go that waits for a peer; those that wait for this host's ranks, only now."""
        self._proxies.fail(reason)
        self._segment.release(self._here)
