"""The planner's part for calls on GPUs: which way each takes, by what it is found again, and why, in words.

A collective takes the first of these ways that it can have: pulls out of windows (`pulls`), one kernel a rank
(`one_kernel`), a plan (`plans`), which is one call of a vendor's library where that serves all ranks. A message between
two ranks is the library's, a kernel's (`message_kernel`), or goes by copies through slots.

All that decides is the same on all ranks, or ranks write it down and compare it (`Place`, see `shared`). A rank without
a GPU asks as those that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..calls import Call
from ..errors import spell_ranks
from ..plan import one_kernel, tuned
from ..plan.algorithms import Algorithm
from ..plan.algorithms.islands import ISLANDS
from ..plan.pieces import message_pieces, piece_bytes
from ..plan.topology import Islands, spell_islands
from ..runtime.planner import Planner
from ..types import REDUCING, Collective, DType, Format, ReduceOp
from ..vendors.ccl.native import BYTES, Native
from ..vendors.devices.kernels.table import MESSAGE_MOST, ONESHOT_RANKS
from .float8 import two_kinds

if TYPE_CHECKING:
    from ..calls.messages import SendRecv
    from ..runtime.executor import Seen
    from .near import NearMemory
    from .shared import GpuShare
    from .vendor_comm import GpuIslands

T = TypeVar("T")

PULLED = {
    Collective.ALLGATHER: "direct", Collective.ALLGATHERV: "direct", Collective.ALLTOALL: "pairwise",
    Collective.BROADCAST: "direct",
}  # fmt: skip
"""The algorithms whose messages pulls take the place of."""
MOST_BY_KERNEL = MESSAGE_MOST  # bytes of a message up to which a kernel beats copies, and
MOST_INSIDE = 256 << 10  # inside an island a library
_PULLED_NAMES = ", ".join(f"{collective.label}:{name}" for collective, name in PULLED.items())


class Place(NamedTuple):
    """Where a call's data lies on every rank: a window, and bytes into it. `parts`: from there on is what is gathered,
    of which each rank gives its own part."""

    window: int
    offset: int
    parts: bool

    def __str__(self) -> str:
        return f"{'in place in' if self.parts else 'out of'} window {self.window} at byte {self.offset}"


class Mechanism(Enum):
    """How a collective goes."""

    PULLS = "out of windows"
    KERNEL = "one kernel a rank"
    MESSAGES = "a message for each pair"
    PLAN = "a plan"


class Carrier(Enum):
    """What carries a message between two ranks."""

    LIBRARY = "the library that serves both"
    ITSELF = "a copy on the rank that sends it to itself"
    KERNEL = "the kernel of small messages"
    COPIES = "copies through slots"


class Choice(NamedTuple):
    """What is to be bound for a collective.

    Pulls have a `place`, a kernel has a `name`. Messages go by the library to its `mates`; `aside`: all that is sent is
    copied first, since it is where what comes goes. A plan is drawn by `algorithm` over `islands`, whose libraries
    reduce as `local` says.
    """

    by: Mechanism
    place: Place | None = None
    name: str = ""
    mates: frozenset[int] = frozenset()
    aside: bool = False
    algorithm: Algorithm | None = None
    islands: Islands = ()
    local: Native | None = None


def by_copies(peer: int, nbytes: int) -> Carrier:
    """For what tries the slots on the way to a rank."""
    return Carrier.COPIES


def by_library(peer: int, nbytes: int) -> Carrier:
    """For what has the library connect two ranks."""
    return Carrier.LIBRARY


class GpuPlanner:
    """Chooses for this rank, of what `planner` knows of the communicator. `windows` are those that all GPUs see, by
    number; they come and go. `near`: where one library serves all ranks."""

    def __init__(
        self,
        planner: Planner,
        share: GpuShare,
        islands: GpuIslands,
        windows: Mapping[int, Seen],
        near: NearMemory | None,
    ) -> None:
        self._planner, self._share, self._islands, self._windows = planner, share, islands, windows
        self._rank, self._size = share.rank, len(islands.alone)
        self._near = near is not None
        self._library = str(islands.island.library) if islands.island is not None else "their vendors' library"
        self._all_mates = frozenset(islands.mates(self._rank))
        self.mates = self._all_mates.intersection(share.locals)
        """The ranks to which messages go by the library, this one among them, but for the `small` ones."""
        self.small: frozenset[int] = frozenset()
        """The ranks to which small messages are a kernel's: none until `settle`."""
        self._no_kernel = self._why_no_kernels() if near is None else near.why_no_rings
        """Why no collective is one kernel; empty where some are."""
        self._no_pulls = "8-bit floats may have to be converted" if two_kinds(share.gpus) else ""

    def settle(self, *, given_up: bool, no_rings: str = "", unmapped: str | None) -> None:
        """The ways inside the host were tried: some were `given_up`; kernels find none, as `no_rings` says; who is
        `unmapped` has no memory that all GPUs have mapped (`GpuEdges.why_not_captured`)."""
        if given_up:
            self._no_kernel = "not all ranks reach each other through memory that their GPUs have mapped"
        if no_rings:
            self._no_kernel = f"the GPUs do not reach each other's memory: {no_rings}"
        if unmapped:
            self._no_pulls = f"wanted GPUs of one host, {unmapped}"
        self.small = frozenset(peer for peer in self._share.locals if not self._why_no_message_kernel(peer))

    def _why_no_kernels(self) -> str:
        share = self._share
        if without := [rank for rank, gpu in enumerate(share.gpus) if not gpu.vendor]:
            return f"{spell_ranks(without)} without a GPU"
        if any(share.topology.far(self._rank, peer) for peer in range(self._size)):
            return "not all ranks reach each other through memory that their GPUs have mapped"
        return "" if share.kernels or self._size == 1 else "HETCOLL_PINNED_BYTES leaves no room for their rings"

    def _why_no_message_kernel(self, peer: int) -> str:
        """Why messages to `peer`, or from there, are never the kernel's; empty where small ones are."""
        share, rank = self._share, self._rank
        if peer == rank or (peer in self.mates and not self._near):
            return "something else carries them"
        if peer in self.mates:
            return self._no_kernel  # which has rings where they have
        if share.topology.far(rank, peer):
            return "no memory is mapped on both"
        if len(share.locals) > ONESHOT_RANKS:
            return f"the host has over {ONESHOT_RANKS} ranks"
        if not share.rings:
            return "HETCOLL_PINNED_BYTES leaves no room for its rings"
        if not (share.gpus[rank].kernels and share.gpus[peer].kernels):
            return f"rank {peer if share.gpus[rank].kernels else rank} has none"
        return ""

    # Choosing.

    def bound(self, call: Call, bind: Callable[[Choice], T]) -> T:
        """What was bound for such a call; `bind` makes it of what is chosen for the first one."""
        place = self._place(call)
        key = (*call.binding, self._islands.whole and _in_place(call), place)
        return self._planner.bound("gpu", key, lambda: bind(self._choose(call, place)))

    def _choose(self, call: Call, place: Place | None) -> Choice:
        """The way of a call that is made."""
        if place is not None:
            return Choice(Mechanism.PULLS, place)
        if not self._why_no_kernel(call):
            return Choice(Mechanism.KERNEL, name=self._kernel(call) or "")
        return self._plan(call)

    def _plan(self, call: Call) -> Choice:
        """That by no kernel, and out of no window."""
        kind, named = call.collective, self._named(call.collective)
        if kind is Collective.ALLTOALLV or (kind is Collective.ALLTOALL and self._islands.whole and not named):
            return Choice(Mechanism.MESSAGES, mates=frozenset() if named else self._all_mates, aside=_in_place(call))
        islands, local = self._serving(call)
        if call.compress:
            entry = ISLANDS[kind.plain]
        else:
            entry = self._planner.on_gpus(kind, call.nbytes, islands, self._share.topology)
        return Choice(Mechanism.PLAN, algorithm=entry, islands=islands, local=local)

    def _serving(self, call: Call) -> tuple[Islands, Native | None]:
        """The islands that a call's plan is drawn for, and how their libraries reduce: see `_why_alone`."""
        if self._why_alone(call):
            return self._islands.alone, None
        if call.collective not in REDUCING:
            return self._islands.islands, Native(BYTES, ReduceOp.SUM)
        return self._islands.islands, self._islands.reduction(call.dtype, call.op)

    def _why_alone(self, call: Call) -> str:
        """Why no library serves a call, so that each rank is an island; empty where one does. Libraries promise no
        order, and have algorithms of their own."""
        if all(len(island) == 1 for island in self._islands.islands):
            return "none serves two ranks"
        if self._planner.ordered and call.collective in REDUCING:
            return "reproducible, and it promises no order"
        if self._named(call.collective):
            return f"HETCOLL_ALGO asks for {self._planner.asked(call.collective)}"
        if call.collective in REDUCING and self._islands.reduction(call.dtype, call.op) is None:
            return f"it does not do {call.op.label} of {call.dtype.label} on all ranks"
        return ""

    def _why_no_kernel(self, call: Call) -> str:
        """Why a call is not one kernel; empty where it is."""
        kind = call.collective
        if self._no_kernel:
            return self._no_kernel
        if (asked := self._planner.asked(kind)) is not None:
            return f"HETCOLL_ALGO asks for {asked}"
        if call.compress:
            return "none compresses"
        if self._kernel(call) is not None:
            return ""
        if kind not in one_kernel.BY_KERNEL:
            return f"none does {kind.label}"
        if not 1 < self._size <= one_kernel.MOST_RANKS:
            return f"wanted 2 to {one_kernel.MOST_RANKS} ranks"
        if not call.nbytes:
            return "there is nothing to move"
        by_library = self._islands.whole and not self._why_alone(call)
        return f"{self._library} is faster" if by_library else "copies are faster"

    def _kernel(self, call: Call) -> str | None:
        islands, alone = len(self._islands.islands), bool(self._why_alone(call))
        return one_kernel.choose(call.collective, call.nbytes, self._size, islands, alone=alone)

    def _named(self, collective: Collective) -> bool:
        """Whether HETCOLL_ALGO takes it from the library that serves all ranks."""
        return self._islands.whole and self._planner.asked(collective) is not None

    def to_measure(self, collective: Collective, nbytes: int) -> tuple[tuned.Placed, list[str]] | None:
        """The algorithms of which a call on float32, with sums, takes the fastest, and for which islands that is
        measured; None where there is no choice: one kernel does it, a library, or there is one plan."""
        call = Call(collective, None, None, DType.FLOAT32, -1, nbytes)
        islands, _ = self._serving(call)
        if not self._why_no_kernel(call) or len(islands) == 1:
            return None
        names = self._planner.choices_on_gpus(collective, islands, self._share.topology)
        return (tuned.Placed.among(self._share.topology, islands), names) if len(names) > 1 else None

    # Windows.

    @property
    def watched(self) -> list[Collective]:
        """The collectives of which it counts where their buffers are."""
        return [kind for kind in Collective if not self._why_no_pulls(kind)]

    def _why_no_pulls(self, collective: Collective) -> str:
        """Why such calls are not pulled out of windows; empty where they are, if they lie there."""
        if not self._islands.whole:
            return "no library serves all ranks"
        if collective not in PULLED:
            return f"only {_PULLED_NAMES} are"
        if self._planner.asked(collective) != PULLED[collective]:
            return f"HETCOLL_ALGO does not ask for {PULLED[collective]}"
        return self._no_pulls or ("" if self._windows else "none is open that all GPUs see")

    def _place(self, call: Call) -> Place | None:
        """Where in a window a call's data is; None where it takes slots."""
        if call.nbytes == 0 or call.compress or self._why_no_pulls(call.collective):
            return None
        assert call.send is not None
        assert call.recv is not None
        parts, first, most = False, call.send, call.send.nbytes
        if call.collective.plain is Collective.ALLGATHER:
            counts = call.shares(self._size)[1]
            if not all(counts):  # who gives nothing may have it anywhere
                return None
            most = max(counts) * call.dtype.itemsize
            if call.send.overlaps(call.recv):
                parts, first, most = True, call.recv, call.recv.nbytes
        for number, window in sorted(self._windows.items()):
            offset = first.ptr - window.base
            if 0 <= offset <= window.nbytes - most:
                return Place(number, offset, parts)
        return None

    # Messages.

    def carrier(self, peer: int, nbytes: int) -> Carrier:
        """Of a message between this rank and `peer`, either way: that rank chooses alike."""
        inside = peer in self.mates
        if peer in self.small and 0 < nbytes <= (MOST_INSIDE if inside else MOST_BY_KERNEL):
            return Carrier.KERNEL
        if inside:
            return Carrier.LIBRARY
        return Carrier.ITSELF if peer == self._rank else Carrier.COPIES

    def part_carrier(self, choice: Choice) -> Callable[[int, int], Carrier]:
        """The same for the parts of an all-to-all that was chosen to be `Mechanism.MESSAGES`."""

        def carrier(peer: int, nbytes: int) -> Carrier:
            if peer in choice.mates:
                return Carrier.LIBRARY
            return Carrier.ITSELF if peer == self._rank else Carrier.COPIES

        return carrier

    def by_kernel(self, ends: SendRecv) -> bool:
        """Whether nothing but the kernel carries these."""
        return all(self.carrier(m.peer, m.buffer.nbytes) is Carrier.KERNEL for m in ends.halves)

    # Telling.

    def explain(self, collective: Collective, nbytes: int, form: Format) -> str:
        """For people: how a collective on float32, with sums, is done in this format, and why not in other ways."""
        if collective is Collective.BARRIER:
            return "by the hosts"
        if collective is Collective.P2P:
            return self._tell_p2p(nbytes)
        call = Call(collective, None, None, DType.FLOAT32, -1, nbytes, compress=form)
        plan, why = self._plan(call), list[str]()
        if plan.mates == set(range(self._size)):
            told = f"one call of {self._library}"
        elif plan.by is Mechanism.MESSAGES:
            told = self._tell_messages(nbytes, self.part_carrier(plan))
        else:
            told, why = self._tell_plan(call, plan), [self._why_algorithm(call, plan)]
        if no_kernel := self._why_no_kernel(call):
            why.append(f"not by one kernel: {no_kernel}")
        else:
            kernel = self._choose(call, None)
            told, why = f"{kernel.name}, {kernel.by.value}", [f"before {told}"]
        if plan.by is Mechanism.PLAN and (alone := self._why_alone(call)):
            why.append(f"not by a library: {alone}")
        told += f" ({'; '.join(why)})"
        if no_pulls := self._why_no_pulls(collective):
            return f"{told}; out of no window: {no_pulls}" if self._islands.whole else told
        numbers = ", ".join(map(str, sorted(self._windows)))
        where = f"what lies in window {numbers}, at one offset on all ranks"
        return f"{told}; {where}, is pulled out of there and passes no slot"

    def _tell_p2p(self, nbytes: int) -> str:
        copies = [peer for peer in range(self._size) if self.carrier(peer, nbytes) is Carrier.COPIES]
        most = f"it takes 1 to {MOST_BY_KERNEL} bytes"
        why = sorted({self._why_no_message_kernel(peer) or most for peer in copies})
        return self._tell_messages(nbytes, self.carrier) + (f" (not by one kernel: {'; '.join(why)})" if why else "")

    def _why_algorithm(self, call: Call, plan: Choice) -> str:
        """Why a plan is drawn by its algorithm."""
        if call.compress:
            return "the one that compresses"
        return self._planner.why_on_gpus(call.collective, call.nbytes, plan.islands, self._share.topology)

    def _tell_plan(self, call: Call, plan: Choice) -> str:
        assert plan.algorithm is not None
        name, islands = plan.algorithm.name, plan.islands
        if self._size > 1 and len(islands) == 1:
            return f"one call of {self._library}"
        if self._planner.ordered and call.collective in REDUCING:
            name += ", in the order of ranks"
        if len(islands) < self._size:
            among = "" if name == "islands" else " among islands"
            name += f"{among} {spell_islands(islands)}, their libraries inside and messages between"
        return f"{name}, {_tell_pieces(piece_bytes(call.nbytes, self._share.slot_bytes))}"

    def _tell_messages(self, nbytes: int, carrier: Callable[[int, int], Carrier]) -> str:
        peers: dict[Carrier, list[int]] = {}
        for peer in range(self._size):
            if peer != self._rank:
                peers.setdefault(carrier(peer, nbytes), []).append(peer)
        words = {Carrier.LIBRARY: f"by {self._library}", Carrier.KERNEL: "by one kernel"}
        pieces = _tell_pieces(message_pieces(nbytes, self._share.slot_bytes))
        told = [words.get(by, pieces) + f" to {spell_ranks(ranks)}" * (len(peers) > 1)
                for by, ranks in peers.items()]  # fmt: skip
        return f"{Mechanism.MESSAGES.value}, {', '.join(told)}"


def _tell_pieces(first_and_most: tuple[int, int]) -> str:
    return "in pieces of up to {1} bytes, the first of {0}".format(*first_and_most)


def _in_place(call: Call) -> bool:
    """Whether it is an all-to-all whose buffers are one."""
    return call.collective is Collective.ALLTOALL and call.in_place
