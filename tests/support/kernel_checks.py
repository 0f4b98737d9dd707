"""What every build of the GPU kernels must do, wherever it runs: compiled as plain C++, over a fake, on a GPU.

The host's kernels are the reference: the same bits, but that any NaN is as good as another.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from elements import AVERAGED, NARROW, NUMPY, Array, assert_same, bit_patterns, part_type, special_values

from hetcoll import _native
from hetcoll.types import DType, ReduceOp
from hetcoll.vendors.devices.kernels import (
    KernelTable,
    Oneshot,
    oneshot_name,
    reduce_name,
    reductions,
    scale_name,
)
from hetcoll.vendors.devices.kernels.table import (
    AWAITED,
    MESSAGE_COUNTERS,
    MESSAGE_MOST,
    MESSAGE_RING,
    MESSAGE_STATE,
    MESSAGE_THREADS,
    MESSAGE_WORDS,
    RING_SLOTS,
    Messages,
)

GUARD = 32  # bytes before and after a result that must stay as they were
LINE = 64  # bytes of the cache line that an abort word begins
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Machine(Protocol):
    """Memory that kernels reach, and a way to run them."""

    def allocate(self, nbytes: int, shared: bool = False) -> int:
        """Memory until the machine goes, at a multiple of 256; `shared`: of the host, and mapped."""

    def write(self, address: int, data: Bytes) -> None: ...

    def read(self, address: int, nbytes: int) -> Bytes: ...

    def run(self, launches: Sequence[Launch]) -> None:
        """Run all of them at the same time, each on a stream of its own, to their ends."""


class Launch:
    """A kernel and its arguments, as bytes."""

    def __init__(self, name: str, grid: int, block: int, *arguments: int | bytes | tuple[int, str]) -> None:
        self.name, self.grid, self.block = name, grid, block
        self.arguments = [self._pack(x) for x in arguments]

    @staticmethod
    def _pack(x: int | bytes | tuple[int, str]) -> bytes:
        if isinstance(x, bytes):
            return x
        return struct.pack("Q", x) if isinstance(x, int) else struct.pack(x[1], x[0])


def as_bytes(x: Array) -> Bytes:
    return np.ascontiguousarray(x).view(np.uint8)


class Operands:
    """Three stretches of a machine's memory, at chosen distances from a multiple of 256; guards around the first."""

    def __init__(self, machine: Machine, nbytes: int = 1 << 20) -> None:
        self.machine = machine
        self.size = nbytes
        self.bases = [machine.allocate(nbytes) for _ in range(3)]

    def run(
        self,
        name: str,
        shape: tuple[int, int],
        places: Sequence[tuple[int, int]],
        inputs: Sequence[Bytes],
        dtype: DType,
        *extra: tuple[int, str],
    ) -> Array:
        """dst, inputs... each at (stretch, offset); returns dst after the launch."""
        nbytes = inputs[0].size
        addresses = [self.bases[i] + 64 + offset for i, offset in places]
        guarded = np.full(nbytes + 2 * GUARD, 0xA5, np.uint8)
        self.machine.write(addresses[0] - GUARD, guarded)
        for address, data in zip(addresses[1:], inputs, strict=True):
            self.machine.write(address, data)
        self.machine.run([Launch(name, *shape, *addresses, nbytes // dtype.itemsize, *extra)])
        after = self.machine.read(addresses[0] - GUARD, guarded.size)
        assert (after[:GUARD] == 0xA5).all(), f"{name} wrote before its result"
        assert (after[GUARD + nbytes :] == 0xA5).all(), f"{name} wrote after its result"
        return after[GUARD : GUARD + nbytes].view(part_type(dtype))


def pairs_of(dtype: DType, count: int) -> tuple[Array, Array]:
    """`count` random elements a side, then every pair of the values where formats bend."""
    special = np.array(special_values(dtype), f"u{part_type(dtype).itemsize}").view(part_type(dtype))
    per_element = dtype.itemsize // part_type(dtype).itemsize
    a = np.concatenate([bit_patterns(dtype, count, 1), np.repeat(special, special.size * per_element)])
    b = np.concatenate([bit_patterns(dtype, count, 2), np.tile(special, special.size * per_element)])
    return a, b


def host_reduce(dtype: DType, op: ReduceOp, a: Array, b: Array) -> Array:
    result = np.empty_like(a)
    _native.reduce_bytes(as_bytes(result), as_bytes(a), as_bytes(b), dtype, op, False)
    return result


def host_scale(dtype: DType, x: Array, divisor: int) -> Array:
    result = x.copy()
    _native.scale_bytes(as_bytes(result), dtype, divisor)
    return result


# dst, a, b: which stretch each is in, and how far from a multiple of 16 bytes, in bytes or (as text) in elements.
PLACES: tuple[tuple[tuple[int, int | str], ...], ...] = (
    ((0, 0), (1, 0), (2, 0)),
    ((0, 0), (0, 0), (1, 0)),
    ((0, 0), (1, 0), (0, 0)),
    ((0, "1"), (1, "1"), (2, "1")),
    ((0, 0), (1, "1"), (2, "3")),
    ((0, 3), (1, 0), (2, 0)),
    ((0, 0), (1, 5), (2, 0)),
    ((0, 7), (0, 7), (2, 1)),
)


def in_bytes(places: Sequence[tuple[int, int | str]], dtype: DType) -> list[tuple[int, int]]:
    return [(i, offset if isinstance(offset, int) else int(offset) * dtype.itemsize) for i, offset in places]


def check_reduce(operands: Operands, dtype: DType, op: ReduceOp, shape: Callable[[int, int], tuple[int, int]]) -> None:
    """Any place, any count, any number of threads."""
    a, b = pairs_of(dtype, 1003)
    want = host_reduce(dtype, op, a, b)
    name = reduce_name(dtype, op)
    count = as_bytes(a).size // dtype.itemsize
    for places in PLACES:
        where = in_bytes(places, dtype)
        got = operands.run(name, shape(count, dtype.itemsize), where, [as_bytes(a), as_bytes(b)], dtype)
        # An input that is the destination was overwritten with a guard: it is what was written last that counts.
        assert_same(dtype, got, want, a, b)
    for few in (0, 1, 2, 3, 5, 16, 17, 63, 129):
        x, y = (as_bytes(v)[: few * dtype.itemsize].view(part_type(dtype)) for v in (a, b))
        for launch in ((1, 1), (1, 33), (3, 64)):
            got = operands.run(name, launch, [(0, 0), (1, 0), (2, 0)], [as_bytes(x), as_bytes(y)], dtype)
            assert_same(dtype, got, as_bytes(want)[: few * dtype.itemsize].view(want.dtype), x, y)


def check_scale(operands: Operands, dtype: DType, shape: Callable[[int, int], tuple[int, int]]) -> None:
    x, _ = pairs_of(dtype, 517)
    count = as_bytes(x).size // dtype.itemsize
    for divisor in (1, 2, 3, 7, 1000, 16777217, 3000000000):
        want = host_scale(dtype, x, divisor)
        for places in (((0, 0), (1, 0)), ((0, 0), (0, 0)), ((0, "1"), (1, "1")), ((0, 1), (1, 2))):
            where = in_bytes(places, dtype)
            launch = shape(count, dtype.itemsize)
            got = operands.run(scale_name(dtype), launch, where, [as_bytes(x)], dtype, (divisor, "I"))
            assert_same(dtype, got, want, x)


def check_every_code(operands: Operands, dtype: DType, shape: Callable[[int, int], tuple[int, int]]) -> None:
    """Of a narrow type: every pair of 8-bit codes; every 16-bit code with partners near and far."""
    codes = np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(NUMPY[dtype])
    if dtype.itemsize == 1:
        a, b = np.repeat(codes, 256), np.tile(codes, 256)
    else:
        with np.errstate(all="ignore"):
            near = [(codes.astype(np.float32) * np.float32(2.0**-k)).astype(codes.dtype) for k in (1, 8, 11)]
        a, b = np.tile(codes, 4), np.concatenate([*near, np.random.default_rng(5).permutation(codes)])
    launch = shape(a.size, dtype.itemsize)
    for op in reductions(dtype):
        where = [(0, 0), (1, 0), (2, 0)]
        got = operands.run(reduce_name(dtype, op), launch, where, [as_bytes(a), as_bytes(b)], dtype)
        assert_same(dtype, got, host_reduce(dtype, op, a, b), a, b)
    for divisor in (3, 16, 31):
        got = operands.run(scale_name(dtype), launch, [(0, 0), (1, 0)], [as_bytes(codes)], dtype, (divisor, "I"))
        assert_same(dtype, got, host_scale(dtype, codes, divisor), codes)


# ---- One-shot ----


def expected(dtype: DType, op: ReduceOp, operands: Sequence[Array], divisor: int, *, rounds: bool = False) -> Array:
    """Combined in rank order; sums and products of narrow floats in float32, rounded once, or after each operand."""
    if not rounds and dtype in NARROW and op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD):
        with np.errstate(all="ignore"):
            total = operands[0].astype(np.float32)
            for x in operands[1:]:
                total = total * x.astype(np.float32) if op is ReduceOp.PROD else total + x.astype(np.float32)
            return (total / np.float32(divisor)).astype(operands[0].dtype)
    result = operands[0]
    for x in operands[1:]:
        result = host_reduce(dtype, op, result, x)
    return host_scale(dtype, result, divisor) if divisor > 1 else result


class Ring:
    """The ranks of a one-shot all-reduce on one machine, with all that they share; `pushed`: each reads areas of its
    own."""

    def __init__(self, machine: Machine, size: int, nbytes: int, *, pushed: bool = False) -> None:
        self.machine, self.size, self.pushed = machine, size, pushed
        self.words = KernelTable.oneshot_words(nbytes)
        self.areas = [machine.allocate(16 * self.words, shared=True) for _ in range(size * size if pushed else size)]
        self.states = [machine.allocate(8) for _ in range(size)]
        self.abort = machine.allocate(LINE, shared=True)
        self.buffers = [(machine.allocate(nbytes + 512), machine.allocate(nbytes + 512)) for _ in range(size)]
        for area in self.areas:
            machine.write(area, np.zeros(16 * self.words, np.uint8))
        self.set_calls(0)
        machine.write(self.abort, np.zeros(LINE, np.uint8))

    def set_calls(self, number: int) -> None:
        for state in self.states:
            self.machine.write(state, np.array([number, 0], np.uint32).view(np.uint8))

    def calls(self) -> list[tuple[int, int]]:
        """What each rank's state says: calls made, blocks done."""
        found = [self.machine.read(state, 8).view(np.uint32) for state in self.states]
        return [(int(x[0]), int(x[1])) for x in found]

    def launch(
        self, rank: int, dtype: DType, op: ReduceOp, count: int, divisor: int, dst: int, src: int, rounds: bool = False
    ) -> Launch:
        arguments = Oneshot(
            dst, src, count, state=self.states[rank], abort=self.abort, rank=rank, size=self.size, divisor=divisor,
            words=self.words, rounds=rounds,
        )  # fmt: skip
        to = [self.areas[rank]]
        sources = [0 if peer == rank else self.areas[peer] for peer in range(self.size)]
        if self.pushed:
            to = [self.areas[rank * self.size + peer] for peer in range(self.size) if peer != rank]
            sources = [0 if peer == rank else self.areas[peer * self.size + rank] for peer in range(self.size)]
        arguments.copies = len(to)
        arguments.from_[: self.size], arguments.to[: len(to)] = sources, to
        shape = KernelTable.oneshot_launch(count, dtype.itemsize, 32)
        return Launch(oneshot_name(dtype, op), *shape, bytes(arguments))

    def check(
        self, dtype: DType, op: ReduceOp, count: int, divisor: int = 1, offset: int = 0, inplace: bool = False,
        *, rounds: bool = False,
    ) -> None:  # fmt: skip
        """One call on all ranks: the right bits, the same on every rank, and nothing beside them touched."""
        inputs = [bit_patterns(dtype, count, 10 + rank) for rank in range(self.size)]
        nbytes = count * dtype.itemsize
        launches = []
        for rank, (dst, src) in enumerate(self.buffers):
            place = (dst if inplace else src) + 64 + offset
            self.machine.write(dst + 64 + offset - GUARD, np.full(nbytes + 2 * GUARD, 0x5A, np.uint8))
            self.machine.write(place, as_bytes(inputs[rank]))
            launches.append(self.launch(rank, dtype, op, count, divisor, dst + 64 + offset, place, rounds))
        self.machine.run(launches)
        results = []
        for dst, _ in self.buffers:
            after = self.machine.read(dst + 64 + offset - GUARD, nbytes + 2 * GUARD)
            assert (after[:GUARD] == 0x5A).all()
            assert (after[GUARD + nbytes :] == 0x5A).all()
            results.append(after[GUARD : GUARD + nbytes])
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0], err_msg="ranks hold different bits")
        want = expected(dtype, op, inputs, divisor, rounds=rounds)
        assert_same(dtype, results[0].view(part_type(dtype)), want, *inputs)


def check_oneshot(machine: Machine, dtype: DType, size: int) -> None:
    """Every reduction, several counts, places and divisors, one call after another on the same areas."""
    for pushed in (False, True):
        _check_oneshot(Ring(machine, size, 8192, pushed=pushed), dtype)


def _check_oneshot(ring: Ring, dtype: DType) -> None:
    counts = (1, 3, 67, 8192 // dtype.itemsize)
    calls = 0
    for op in reductions(dtype):
        for count in counts:
            offset = (0, 0, 1, 0)[counts.index(count)]
            ring.check(dtype, op, count, offset=offset, inplace=count == 67)
            calls += 1
    if dtype in AVERAGED:
        ring.check(dtype, ReduceOp.AVG, 61, divisor=ring.size)
        ring.check(dtype, ReduceOp.AVG, 61, divisor=1000)
        ring.check(dtype, ReduceOp.AVG, 61, divisor=ring.size, rounds=True)
        ring.check(dtype, ReduceOp.SUM, counts[-1], rounds=True)
        calls += 4
    assert ring.calls() == [(calls, 0)] * ring.size


def check_oneshot_numbers(machine: Machine) -> None:
    """Numbers pass 2^32, and every 2^16 calls no word of an area is older than the call."""
    for pushed in (False, True):
        _check_oneshot_numbers(machine, Ring(machine, 3, 4096, pushed=pushed))


def _check_oneshot_numbers(machine: Machine, ring: Ring) -> None:
    ring.set_calls(2**32 - 3)
    for _ in range(6):
        ring.check(DType.INT32, ReduceOp.SUM, 5)
    assert ring.calls() == [(3, 0)] * 3
    for at, area in enumerate(ring.areas):
        if ring.pushed and at // 3 == at % 3:  # nobody sends to itself
            continue
        # Calls 0 and 1 swept both halves; 2 and 3 wrote five words each.
        numbers = machine.read(area, 16 * ring.words).view(np.uint32)[1::2].reshape(2, ring.words)
        assert numbers[0].tolist() == [2] * 5 + [0] * (ring.words - 5)
        assert numbers[1].tolist() == [3] * 5 + [1] * (ring.words - 5)


# ---- Messages ----


class MessageRings:
    """Two ranks of a host, and the rings between them; `number` chunks have gone through every block of them."""

    def __init__(self, machine: Machine, number: int = 0) -> None:
        self.machine = machine
        self.rings = [machine.allocate(MESSAGE_RING, shared=True) for _ in range(2)]  # by sender
        self.states = {(rank, sends): machine.allocate(MESSAGE_STATE) for rank in (0, 1) for sends in (0, 1)}
        self.abort = machine.allocate(LINE, shared=True)
        self.buffers = [(machine.allocate(MESSAGE_MOST + 512), machine.allocate(MESSAGE_MOST + 512)) for _ in (0, 1)]
        blank = np.zeros(MESSAGE_RING, np.uint8)
        blank[MESSAGE_COUNTERS:].view(np.uint64)[:] = number
        blank[:MESSAGE_COUNTERS].view(np.uint32)[1::2] = max(0, number - 2**19)  # of the last sweep, in words
        for ring in self.rings:
            machine.write(ring, blank)
        for state in self.states.values():
            machine.write(state, np.full(MESSAGE_STATE // 8, number, np.uint64).view(np.uint8))
        machine.write(self.abort, np.zeros(LINE, np.uint8))
        self.sent = 0

    def launch(self, rank: int, sends: Sequence[tuple[int, int]], recvs: Sequence[tuple[int, int]]) -> Launch:
        """A kernel of at most one message each way: addresses and lengths."""
        arguments, blocks = Messages(abort=self.abort), 0
        for out, half in ((True, sends), (False, recvs)):
            for at, nbytes in half:
                ring, state = self.rings[rank if out else 1 - rank], self.states[rank, out]
                made = KernelTable.message(nbytes, ring, state, blocks, 1 - rank, sends=out)
                made.at = at
                arguments.message[arguments.count] = made
                arguments.count += 1
                blocks += made.blocks
        return Launch("messages", blocks, MESSAGE_THREADS, bytes(arguments))

    def cross(self, there: int, back: int, offset: int = 0, *, apart: bool = False) -> None:
        """Rank 0 sends `there` bytes and rank 1 `back`, at `offset` from a multiple of 64, 0: none; `apart`: each has a
        kernel for what it sends, which ends by itself, and then one for what it receives."""
        data = []
        for rank, nbytes in enumerate((there, back)):
            self.sent += 1
            data.append(np.random.default_rng(self.sent).integers(0, 256, nbytes, np.uint8))
            out, into = self.buffers[rank]
            self.machine.write(out + 64 + offset, data[-1])
            self.machine.write(into + 64 + offset - GUARD, np.full((there, back)[1 - rank] + 2 * GUARD, 0x5A, np.uint8))
        launches = []
        for rank, (out, into) in enumerate(self.buffers):
            send, recv = ([(at + 64 + offset, data[who].size)] for at, who in ((out, rank), (into, 1 - rank)))
            halves = [(send, []), ([], recv)] if apart else [(send, recv)]
            launches.append([self.launch(rank, *([x for x in half if x[1]] for half in each)) for each in halves])
        for turn in zip(*launches, strict=True):
            self.machine.run([launch for launch in turn if launch.grid])
        for rank, (_, into) in enumerate(self.buffers):
            want = data[1 - rank]
            after = self.machine.read(into + 64 + offset - GUARD, want.size + 2 * GUARD)
            assert (after[:GUARD] == 0x5A).all(), "written before the message"
            assert (after[GUARD + want.size :] == 0x5A).all(), "written after the message"
            np.testing.assert_array_equal(after[GUARD : GUARD + want.size], want)


def check_messages(machine: Machine) -> None:
    """Lengths at which blocks, chunks and kinds change, at any address, one after another through the same rings."""
    rings = MessageRings(machine)
    edges = (MESSAGE_WORDS, MESSAGE_MOST // 2, MESSAGE_MOST)
    for nbytes in (1, 7, 8, 9, 100, 2048, 2049, *(n + d for n in edges for d in (-1, 0, 1) if n + d <= MESSAGE_MOST)):
        rings.cross(nbytes, nbytes, nbytes % 3)
    for turn in range(20):  # more than slots
        rings.cross(5, MESSAGE_WORDS + 1 + turn, turn)
        rings.cross(0, 3)
    for nbytes in (8, MESSAGE_WORDS, MESSAGE_MOST):
        rings.cross(nbytes, nbytes, apart=True)


def check_message_numbers(machine: Machine) -> None:
    """Chunks are numbered past 2^32, and words of slots that went unused for so long are swept."""
    rings = MessageRings(machine, 2**32 - 4)
    for _ in range(20):
        rings.cross(8, 3000)
        rings.cross(MESSAGE_WORDS + 5, 4)
    slot = machine.read(rings.rings[0], RING_SLOTS * 4096).view(np.uint32)[1::2].reshape(RING_SLOTS, 512)
    assert (slot[:, 1:] < 20).all(), "words of old numbers are left"


def integers(machine: Machine, *values: int) -> list[int]:
    """A mapped word of 8 bytes for each value; returns their addresses."""
    addresses = [machine.allocate(8, shared=True) for _ in values]
    for address, value in zip(addresses, values, strict=True):
        machine.write(address, np.array([value], np.uint64).view(np.uint8))
    return addresses


def read_integer(machine: Machine, address: int) -> int:
    return int(machine.read(address, 8).view(np.uint64)[0])


def check_abort(machine: Machine, launch: Launch, abort: int, *, says: bool = True) -> None:
    """A kernel that waits in vain ends when the abort word is set, and `says` meanwhile that it waits for rank 1."""
    running = threading.Thread(target=machine.run, args=([launch],))
    running.start()
    time.sleep(0.1)
    assert running.is_alive()
    while says and not ctypes.c_uint8.from_address(abort + AWAITED + 1).value:
        assert running.is_alive()
        time.sleep(0.001)
    ctypes.c_uint32.from_address(abort).value = 1
    running.join(20)
    assert not running.is_alive()


def check_aborts(machine: Machine) -> None:
    """A peer that never comes, a counter that nobody moves, a message that nobody sends or takes."""
    ring = Ring(machine, 2, 1024)
    check_abort(machine, ring.launch(0, DType.INT32, ReduceOp.SUM, 100, 1, *ring.buffers[0]), ring.abort)
    for nbytes in (8, MESSAGE_WORDS + 1):
        rings = MessageRings(machine)
        check_abort(machine, rings.launch(0, [], [(rings.buffers[0][0], nbytes)]), rings.abort)
        rings = MessageRings(machine)
        for _ in range(RING_SLOTS):
            machine.run([rings.launch(0, [(rings.buffers[0][0], nbytes)], [])])
        check_abort(machine, rings.launch(0, [(rings.buffers[0][0], nbytes)], []), rings.abort)
    counter, base, abort = integers(machine, 0, 0, 0)
    check_abort(machine, Launch("await", 1, 1, counter, base, 1, abort), abort, says=False)


def check_signals(machine: Machine) -> None:
    """bump and await, as the replays of a graph use them: two streams that take turns."""
    counters = integers(machine, 0, 0)
    bases = integers(machine, 0, 0)
    (abort,) = integers(machine, 0)
    for replay in range(3):
        # Each raises its own counter to 1 past its base, then waits for the other's.
        machine.run([Launch("bump", 1, 1, counters[i], bases[i], 1) for i in (0, 1)])
        machine.run([Launch("await", 1, 1, counters[1 - i], bases[i], 1, abort) for i in (0, 1)])
        machine.run([Launch("bump", 1, 1, bases[i], bases[i], 1) for i in (0, 1)])
        assert [read_integer(machine, x) for x in counters + bases] == [replay + 1] * 4
    machine.run(
        [
            Launch("await", 1, 1, counters[0], bases[0], 7, abort),
            Launch("bump", 1, 1, counters[0], bases[0], 7),
        ]
    )
    assert read_integer(machine, counters[0]) == 10
