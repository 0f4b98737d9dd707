"""Tokens between ranks by the kernels of ``vendors/devices/kernels/tokens.h``: all of a call is on one stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .. import Communicator
from ..calls.buffers import Buffer
from ..gpu.array import DeviceArray
from ..vendors.devices.kernels.source import NUMBER_TOKENS, PLACE_TOKENS, TELL_TOKENS, tokens_names
from ..vendors.devices.kernels.table import Tokens
from .put_rows import Sizes
from .token_blocks import Blocks, Lists, Route

if TYPE_CHECKING:
    from ..vendors.devices.base import Device

_THREADS, _PLACING, _NUMBERING = 256, 512, 128
_BLOCKS = 8  # of a multiprocessor


class Table(NamedTuple):
    """What a dispatch finds out of its tokens, in memory of the GPU, and its combines need. See ``arguments.h``."""

    own: int
    places: int
    counts: Buffer
    dense: bool
    longest: int = 0
    sent: int = 0  # 0: that of the blocks
    route: Route = Route([], [])

    @classmethod
    def words(cls, sizes: Sizes, ranks: int) -> tuple[int, int, int]:
        """Of 32 bits each: how many there are of `own`, of `places` and of `sent`."""
        own = sizes.most * sizes.topk
        return own, own * ranks, sizes.most * ranks


class TokenKernels:
    """Those of a rank with its tokens on `device`."""

    def __init__(self, comm: Communicator, device: Device, sizes: Sizes, blocks: Blocks) -> None:
        self._device, self._sizes, self._blocks = device, sizes, blocks
        table, size, wire = device.kernels(), comm.size, sizes.wire
        self._place, self._number, self._tell = map(table.function, (PLACE_TOKENS, NUMBER_TOKENS, TELL_TOKENS))
        self._pack, self._spread, self._weigh, self._sum = map(table.function, tokens_names(wire.dtype))
        self.rounds = -(-sizes.most // blocks.room)
        """Those of a call in which some rank has as many tokens as it may."""
        self._rows = size * blocks.room
        self._tells = bool(blocks.lists.tell)
        lists = [each or [0] * size for each in blocks.lists]
        self._lists = DeviceArray.of(device, np.array(lists, np.int64))
        self._state = DeviceArray.of(device, np.zeros(2, np.uint32))
        self._ones = DeviceArray.of(device, np.ones(sizes.most * sizes.topk, np.float32))
        self._sent, taken = blocks.numbers or (0, 0)
        at = {name: self._lists.ptr + 8 * size * i for i, name in enumerate(Lists._fields)}
        self._rows_of, self._told = at.pop("rows"), at.pop("tell")
        self._common = {
            "state": self._state.ptr, "odd": blocks.odd, "packed": blocks.packed, "stride": wire.stride,
            "taken": taken, "hidden": wire.hidden, "most": sizes.most, "columns": sizes.topk, "size": size,
            "rank": comm.rank,
            "experts": sizes.experts, "fp8": int(wire.fp8), "blocks": 1 + max(blocks.lists.via), "room": blocks.room,
            **at,
        }  # fmt: skip
        self._last: int | None = None
        self._done = device.event()

    def place(
        self, x: Buffer, ids: Buffer, tokens: int, table: Table, call: int, stream: int, timeout: float | None
    ) -> None:
        """All ranks see this one's first tokens, and where those of its experts belong: `table`."""
        self._follow(stream)
        self._offer(x, ids, tokens, 0, table, call, stream, timeout)
        self._run(self._place, self._sizes.experts, _PLACING, stream, table, {})
        self._count(stream, table, {"incoming": 1})

    def spread(
        self, x: Buffer, ids: Buffer, tokens: int, received: Buffer, table: Table, call: int, rounds: int, stream: int,
        timeout: float | None,
    ) -> None:  # fmt: skip
        """The tokens to their places: the end of a dispatch. All ranks have as many `rounds`."""
        for first in self._firsts(rounds):
            if first > 0:
                self._offer(x, ids, tokens, first, table, call, stream, timeout)
            words = {"received": received.ptr, "first": first, "from_": self._rows_of}
            self._run(self._spread, self._some(self._rows), _THREADS, stream, table, words)
        self._end(stream)

    def _offer(
        self, x: Buffer, ids: Buffer, tokens: int, first: int, table: Table, call: int, stream: int,
        timeout: float | None,
    ) -> None:  # fmt: skip
        """The tokens of the round that begins with this one."""
        words = {"x": x.ptr, "ids": ids.ptr, "tokens": tokens, "first": first}
        rows = min(tokens - first, self._blocks.room)
        self._count(stream, table, words)
        self._run(self._pack, max(1, rows), _THREADS, stream, table, words)
        self._say(tokens, 0, table, stream)
        self._blocks.tokens(2 * call, table.route, stream, timeout)

    def _count(self, stream: int, table: Table, words: dict[str, int]) -> None:
        """Number the rows that travel, where those alone do."""
        if late := self._blocks.late(words.get("incoming", 0) == 1):
            self._run(self._number, self._common["size"], _NUMBERING, stream, table, {**words, "late": late})

    def _say(self, tokens: int, weights: int, table: Table, stream: int) -> None:
        """The host is told what it tells the others of these tokens: ids, or their weights."""
        if self._tells:
            words = {"tokens": tokens, "x": weights, "to": self._told}
            self._run(
                self._tell, self._some(-(-self._common["size"] * tokens // _THREADS)), _THREADS, stream, table, words
            )

    def combine(
        self, made: Buffer, weights: Buffer | None, to: Buffer, tokens: int, table: Table, call: int, rounds: int,
        stream: int, timeout: float | None,
    ) -> None:  # fmt: skip
        """In as many rounds as the dispatch had."""
        self._follow(stream)
        given = self._ones.buffer() if weights is None else weights
        if given.nbytes:
            for at in self._blocks.given:
                self._device.copy(at, given.ptr, given.nbytes, stream)
        self._say(tokens, given.ptr, table, stream)
        self._blocks.weights(2 * call + 1, table.route, stream, timeout)
        for first in self._firsts(rounds):
            words = {"tokens": tokens, "received": made.ptr, "result": to.ptr, "first": first}
            self._run(self._weigh, self._some(self._rows), _THREADS, stream, table, words)
            self._blocks.sums(2 * call + 1, table.route, stream, timeout)
            self._run(self._sum, self._some(min(tokens - first, self._blocks.room)), _THREADS, stream, table, words)
        self._end(stream)

    def close(self) -> None:
        self._device.synchronize_event(self._done)
        self._blocks.close()
        self._device.destroy_event(self._done)

    def rounds_of(self, tokens: int) -> int:
        """Of a call in which no rank has more."""
        return max(1, -(-tokens // self._blocks.room))

    def _firsts(self, rounds: int) -> range:
        """The first tokens of these rounds."""
        return range(0, rounds * self._blocks.room, self._blocks.room)

    def _some(self, rows: int) -> int:
        return min(max(rows, 1), _BLOCKS * self._device.multiprocessors)

    def _run(self, function: int, blocks: int, threads: int, stream: int, table: Table, words: dict[str, int]) -> None:
        found = {
            "own": table.own, "places": table.places, "counts": table.counts.ptr, "dense": int(table.dense),
            "longest": table.longest, "sent": table.sent or self._sent, "id_bytes": table.counts.dtype.itemsize,
        }  # fmt: skip
        self._device.launch(function, blocks, threads, [bytes(Tokens(**{**self._common, **found, **words}))], stream)

    def _follow(self, stream: int) -> None:
        """Calls on several streams are one after another, too; a graph's are as the graph has them."""
        if self._last not in (None, stream) and not self._device.capturing(stream):
            self._device.wait(stream, self._done)

    def _end(self, stream: int) -> None:
        if not self._device.capturing(stream):
            self._device.record(self._done, stream)
            self._last = stream
