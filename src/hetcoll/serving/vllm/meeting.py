"""How the workers of a prefilling and a decoding instance become one job, and what they agree on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ... import ArgumentError, Communicator
from ...calls import check_int, check_seconds
from ...calls.buffers import read_buffer
from ...job import at_address
from ..handoff import Handoff
from ..layouts import CacheLayout

_OURS = "kv_connector_extra_config"
_LOGICAL = ("block", "head", "token", "dim")  # of vLLM's tensor of a layer; keys and values share dim
_HEAD = 5  # words of a note before its blocks


@dataclass(frozen=True)
class Settings:
    """What `kv_connector_extra_config` says, the same on both sides. Seconds are those of a request's cache, and of
    the start."""

    prefill_ranks: int
    decode_ranks: int
    address: str = ""
    slots: int = 16
    timeout: float = 60.0
    init_timeout: float = 600.0
    layerwise: bool = False

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        names = cls.__dataclass_fields__
        if unknown := set(extra) - set(names):
            raise ArgumentError(f"{_OURS}: wanted {', '.join(names)}, got {', '.join(sorted(unknown))}")
        if missing := {"prefill_ranks", "decode_ranks"} - set(extra):
            raise ArgumentError(f"{_OURS}: wanted {' and '.join(sorted(missing))}, got {dict(extra)}")
        found = cls(**extra)
        for name in ("prefill_ranks", "decode_ranks", "slots"):
            if check_int(getattr(found, name), name) < 1:
                raise ArgumentError(f"{_OURS}: {name}: wanted 1 or more, got {getattr(found, name)}")
        for name in ("timeout", "init_timeout"):
            check_seconds(getattr(found, name), f"{_OURS}: {name}")
        for name, kind in (("address", str), ("layerwise", bool)):  # "false" would be true
            if not isinstance(getattr(found, name), kind):
                raise ArgumentError(f"{_OURS}: {name}: wanted a {kind.__name__}, got {getattr(found, name)!r}")
        return found


def join(settings: Settings, rank: int, array: Any) -> Communicator:
    """The communicator of all workers, prefilling ones first. The first of them listens at the address."""
    buffer = read_buffer(array, "kv_caches", writable=True)
    place = "cpu" if buffer.device == "cpu" else f"{buffer.device}:{buffer.index}"
    size = settings.prefill_ranks + settings.decode_ranks
    return at_address(settings.address, rank, size, device=place, timeout=settings.init_timeout)


def in_memory_order(name: str, tensor: Any) -> tuple[Any, tuple[str, ...]]:
    """A layer's tensor turned so that it is contiguous, and the names of its axes then."""
    if len(tensor.shape) != len(_LOGICAL):
        raise ArgumentError(f"{name}: wanted a cache by {', '.join(_LOGICAL)}, got shape {tuple(tensor.shape)}")
    order = sorted(range(len(_LOGICAL)), key=lambda axis: (-tensor.stride()[axis], axis))
    axes = tuple(_LOGICAL[axis] for axis in order)
    if axes[-1] != "dim":  # of one element
        order = [axis for axis in order if _LOGICAL[axis] != "dim"] + [_LOGICAL.index("dim")]
        axes = tuple(_LOGICAL[axis] for axis in order)
    turned = tensor.permute(order)
    if not turned.is_contiguous():
        raise ArgumentError(
            f"{name}: wanted a layer in one piece, got shape {tuple(tensor.shape)} with strides {tensor.stride()}: set"
            " VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC"
        )
    return turned, axes


def layout_of(shape: Sequence[int], axes: tuple[str, ...], layers: int, heads: int, ranks: int) -> CacheLayout:
    """Of a group of so many ranks, each of which has `layers` arrays of this shape, by `axes`."""
    sizes = dict(zip(axes, (int(extent) for extent in shape), strict=True))
    blocks, tokens, dim = sizes["block"], sizes["token"], sizes["dim"]
    found = CacheLayout(layers, blocks, tokens, heads, dim, ranks, ("layer", "kv", *axes), kv=1, apart=True)
    if (held := len(found.heads_of(0))) != sizes["head"]:
        raise ArgumentError(f"kv_caches: wanted {held} of {heads} heads on each of {ranks} ranks, got {sizes['head']}")
    return found


def meet(
    comm: Communicator, settings: Settings, arrays: list[Any], names: list[str], layout: CacheLayout, most: int
) -> tuple[Handoff, Mailbox]:
    """The hand-off of all workers, and what receivers tell senders by. `most`: blocks of a request."""
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    shared = asdict(replace(settings, address=""))  # which each side may spell otherwise
    mine = {"settings": shared, "layers": f"{len(names)} ({digest})", "layout": asdict(layout), "most": most}
    told = [json.loads(blob) for blob in comm._core.meet("HetcollConnector", json.dumps(mine).encode())]
    senders = list(range(settings.prefill_ranks))
    receivers = list(range(settings.prefill_ranks, comm.size))
    for what, ranks in (("settings", range(comm.size)), ("layers", range(comm.size)), ("layout", senders),
                        ("layout", receivers)):  # fmt: skip
        for rank in ranks:
            if told[rank][what] != told[ranks[0]][what]:
                found = f"rank {ranks[0]} {told[ranks[0]][what]}, rank {rank} {told[rank][what]}"
                raise ArgumentError(f"HetcollConnector: wanted one {what}, got {found}")
    src, dst = (_layout(told[ranks[0]]["layout"]) for ranks in (senders, receivers))
    handoff = Handoff(comm, arrays, src, dst, senders, receivers, slots=settings.slots)
    return handoff, Mailbox(comm, senders, settings.slots, max(each["most"] for each in told))


def _layout(told: dict[str, Any]) -> CacheLayout:
    return CacheLayout(**(told | {"axes": tuple(told["axes"])}))


class Note(NamedTuple):
    """That a receiver has taken a slot for a transfer: its block `first` goes to the first of `blocks`, and so on."""

    slot: int
    transfer: bytes
    first: int
    tokens: int
    blocks: np.ndarray[Any, np.dtype[np.int64]]


def key_of(transfer: str) -> bytes:
    """By which notes name it: 16 bytes."""
    return hashlib.sha256(transfer.encode()).digest()[:16]


class Mailbox:
    """Where each sender finds the note of each slot. A slot's note is written again only when its use is over."""

    def __init__(self, comm: Communicator, senders: Sequence[int], slots: int, most: int) -> None:
        self._senders, self._most = senders, most
        self._notes = np.zeros((slots if comm.rank in senders else 0, _HEAD + most), np.int64)
        # A signal for each slot, and one for any.
        self._window = comm.window(self._notes if len(self._notes) else None, signals=slots + 1)
        self._seen = [0] * slots
        self._heard = 0

    def post(self, note: Note, timeout: float) -> None:
        """Tell every sender."""
        if len(note.blocks) > self._most:
            raise ArgumentError(f"blocks: wanted {self._most} or fewer, got {len(note.blocks)}")
        words = np.frombuffer(note.transfer, np.int64)
        row = np.concatenate([words, [note.first, note.tokens, len(note.blocks)], note.blocks]).astype(np.int64)
        at = note.slot * (_HEAD + self._most)
        for sender in self._senders:
            self._window.put(row, sender, at, signal=note.slot, async_op=True)
            self._window.put(row, sender, count=0, signal=len(self._seen), timeout=timeout)

    def wait(self, seconds: float) -> None:
        """Until something has come, or the time is over: a CollectiveTimeoutError."""
        self._window.wait_signal(len(self._seen), self._heard + 1, timeout=seconds)

    def new(self) -> list[Note]:
        """What has come since the last call. Never blocks."""
        self._heard = self._window.signal(len(self._seen))
        found = []
        for slot, seen in enumerate(self._seen):
            if (count := self._window.signal(slot)) > seen:
                self._seen[slot] = count
                row = self._notes[slot]
                transfer, (first, tokens, blocks) = row[:2].tobytes(), (int(word) for word in row[2:_HEAD])
                found.append(Note(slot, transfer, first, tokens, row[_HEAD : _HEAD + blocks].copy()))
        return found

    def close(self) -> None:
        self._window.close()
