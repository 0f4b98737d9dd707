"""Puts and gets between GPUs of one vendor in one host: the receiving GPU reads the other one's memory by itself."""

from __future__ import annotations

import os
import sys
import time
import unittest.mock
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from gpu_kinds import Own, device_of, has_gpu
from ranks import Ranks, close_all, wait_until
from thorough import parametrize

import hetcoll
from hetcoll import DeviceError, PeerLostError
from hetcoll.gpu.array import DeviceArray
from hetcoll.runtime.device_memory import DeviceMemory
from hetcoll.vendors.devices.kernels.source import PIECES
from hetcoll.vendors.devices.kernels.table import KernelTable

BLOCK, BLOCKS = 1000, 64


def put_blocks(comm: hetcoll.Communicator, turns: int) -> int:
    """Each rank puts blocks of its own half of the window into its part of every other rank's other half, scattered,
    and gets them back. How many bytes came here from GPU to GPU."""
    size, rank = comm.size, comm.rank
    half = BLOCK * BLOCKS
    mine = Own(comm, np.zeros(half * (1 + size), np.float32))
    with comm.window(mine.array, signals=size) as window:
        for turn in range(1, turns + 1):
            random = np.random.default_rng(100 * turn + rank)
            own = random.random(half, np.float32)
            values = mine.get()
            values[:half] = own
            if has_gpu(comm):
                mine.array.set(values)
            else:
                mine.array[:] = values
            comm.barrier()
            into = random.permutation(BLOCKS)
            works = [
                window.put(mine.array, peer, half * (1 + rank) + into * BLOCK, src_offset=np.arange(BLOCKS) * BLOCK,
                           count=BLOCK, signal=rank, async_op=True)
                for peer in range(size) if peer != rank
            ]  # fmt: skip
            back = np.zeros(half, np.float32)
            window.get(back, (rank + 1) % size, half * (1 + rank), count=half)
            assert (back.reshape(BLOCKS, BLOCK)[into] == own.reshape(BLOCKS, BLOCK)).all()
            for work in works:
                work.wait()
            for peer in range(size):
                if peer != rank:
                    window.wait_signal(peer, turn)
                    theirs = np.random.default_rng(100 * turn + peer)
                    sent, there = theirs.random(half, np.float32), theirs.permutation(BLOCKS)
                    got = mine.get()[half * (1 + peer) : half * (2 + peer)]
                    assert (got.reshape(BLOCKS, BLOCK)[there] == sent.reshape(BLOCKS, BLOCK)).all()
            comm.barrier()
        direct = comm.counters()["window_direct"]
        comm.barrier()
    return direct


@pytest.mark.parametrize(
    ("kinds", "sees"),
    [("nn", {0: 1, 1: 1}), ("nac", {}), ("aca", {0: 1, 2: 1}), ("nna", {0: 1, 1: 1})],
)
def test_scattered_blocks(whole: Any, kinds: str, sees: dict[int, int]) -> None:
    """Those of one vendor see each other, and nobody else does."""
    ranks: Ranks = whole(kinds)
    before = ranks.run(direct_so_far)
    found = ranks.run(put_blocks, 3)
    nbytes = 3 * 4 * BLOCK * BLOCKS
    assert [n - b for n, b in zip(found, before, strict=True)] == [nbytes * sees.get(r, 0) for r in range(len(kinds))]


def direct_so_far(comm: hetcoll.Communicator) -> int:
    return comm.counters().get("window_direct", 0)


def test_other_hosts_see_nothing(whole: Any) -> None:
    ranks: Ranks = whole("nn", HETCOLL_HOST_ID=("a", "b"))
    assert ranks.run(put_blocks, 2) == [0, 0]


def of_one_allocation(comm: hetcoll.Communicator) -> None:
    """Two windows of parts of one allocation, of which one is closed first. What lies in another window than that it
    is put to goes through the host."""
    device = device_of(comm)
    whole = DeviceArray.of(device, np.arange(4000, dtype=np.int32) + 10_000 * comm.rank)
    first, second = whole.buffer(0, 1000), whole.buffer(1000, 3000)
    before = direct_so_far(comm)  # the other one may be ahead once the windows are made
    a, b = comm.window(first), comm.window(second)
    peer = 1 - comm.rank
    a.put(first, peer, 500, src_offset=0, count=500, signal=0)
    a.wait_signal()
    comm.barrier()
    a.put(second, peer, 0, src_offset=500, count=500, signal=0)
    a.wait_signal(0, 2)
    comm.barrier()
    a.close()
    b.put(second, peer, 2000, src_offset=0, count=500, signal=0)
    b.wait_signal()
    values = whole.get()
    assert (values[:500] == np.arange(1500, 2000) + 10_000 * peer).all()
    assert (values[500:1000] == np.arange(500) + 10_000 * peer).all()
    assert (values[3000:3500] == np.arange(1000, 1500) + 10_000 * peer).all()
    assert comm.counters()["window_direct"] - before == 4 * 1000
    comm.barrier()
    b.close()


@pytest.mark.parametrize("kinds", ["nn", "aa"])
def test_windows_of_one_allocation(whole: Any, kinds: str) -> None:
    whole(kinds).run(of_one_allocation)


def get_blocks(comm: hetcoll.Communicator, turns: int) -> int:
    """Each rank gets scattered blocks of the next one's window, which then writes over them, and gets those again."""
    size, rank = comm.size, comm.rank
    mine, got = Own(comm, np.zeros(BLOCK * BLOCKS, np.float32)), Own(comm, np.zeros(BLOCK * BLOCKS, np.float32))
    other = Own(comm, np.full(BLOCK, -1, np.float32))
    with comm.window(mine.array) as window:
        before = comm.counters()["window_direct"]
        for turn in range(turns):
            values = [np.random.default_rng([turn, each]).random(BLOCK * BLOCKS, np.float32) for each in range(size)]
            if has_gpu(comm):
                mine.array.set(values[rank])
            else:
                mine.array[:] = values[rank]
            comm.barrier()
            peer, at = (rank + 1) % size, np.random.default_rng(turn).permutation(BLOCKS) * BLOCK
            works = [window.get(got.array, peer, at, dst_offset=np.arange(BLOCKS) * BLOCK, count=BLOCK, async_op=True)]
            works.append(window.put(other.array, peer, at[0], async_op=True))  # what is got is what was there before
            works.append(window.get(other.array, peer, at[1], count=1, dst_offset=5, async_op=True))
            for work in works:
                work.wait()
            want = values[peer].reshape(BLOCKS, BLOCK)[at // BLOCK]
            assert (got.get().reshape(BLOCKS, BLOCK) == want).all()
            assert other.get()[5] == values[peer][at[1]]
            comm.barrier()
            assert (mine.get()[at[0] : at[0] + BLOCK][:5] == -1).all()
            comm.barrier()
        direct = comm.counters()["window_direct"] - before
        comm.barrier()
    return direct


@pytest.mark.parametrize(("kinds", "seen"), [("nn", (0, 1)), ("nac", ()), ("aca", (0,)), ("aa", (0, 1))])
def test_scattered_gets(whole: Any, kinds: str, seen: tuple[int, ...]) -> None:
    """`seen`: whose window is read by the GPU of the rank before."""
    found = whole(kinds).run(get_blocks, 3)
    assert found == [3 * 4 * (BLOCK * BLOCKS + 1) * (rank in seen) for rank in range(len(kinds))]


def odd_pieces(comm: hetcoll.Communicator) -> int:
    """Lengths and places of any alignment, few and many, from one byte to more than a copy engine's share."""
    room = 5 << 20
    mine = Own(comm, np.random.default_rng(comm.rank).integers(0, 256, 2 * room, np.uint8))
    theirs = np.random.default_rng(1 - comm.rank).integers(0, 256, 2 * room, np.uint8)
    before = direct_so_far(comm)
    with comm.window(mine.array) as window:
        for turn, most in enumerate((1, 3, 4, 300), start=1):
            want = mine.get()
            for rank in range(2):  # what this rank puts, and what the other does
                random = np.random.default_rng([turn, rank])
                count = np.minimum(2 ** random.integers(0, 22, most), room // (2 * most))
                starts = np.cumsum(count + random.integers(0, 9, most)) - count
                into, sources = room + starts, random.permutation(starts)
                if rank == comm.rank:
                    window.put(mine.array, 1 - rank, into, src_offset=sources, count=count, signal=0, async_op=True)
                else:
                    for to, at, n in zip(into, sources, count, strict=True):
                        want[to : to + n] = theirs[at : at + n]
            window.wait_signal(0, turn)
            assert (mine.get() == want).all()
            comm.barrier()
        return comm.counters()["window_direct"] - before


@pytest.mark.parametrize("kinds", ["nn", "aa"])
def test_pieces_of_any_length(whole: Any, kinds: str) -> None:
    ranks: Ranks = whole(kinds)
    assert min(ranks.run(odd_pieces, timeout=100)) > 1 << 20
    assert not [rank for rank in range(2) if "no kernel for pieces" in ranks.output(rank)]


def without_a_kernel(comm: hetcoll.Communicator) -> int:
    found = KernelTable.function

    def function(table: KernelTable, name: str) -> int:
        if name == PIECES:
            raise DeviceError("nothing compiles it")
        return found(table, name)

    with unittest.mock.patch.object(KernelTable, "function", function):
        return odd_pieces(comm)


@pytest.mark.parametrize("kinds", ["nn", "aa"])
def test_pieces_without_a_kernel(mixed: Any, kinds: str) -> None:
    """As where nothing can compile it: copy engines take its place, and it is said."""
    ranks: Ranks = mixed(kinds, HETCOLL_DEVICE="cuda" if kinds == "nn" else "hip")
    assert min(ranks.run(without_a_kernel, timeout=100)) > 1 << 20
    assert all("no kernel for pieces" in ranks.output(rank) for rank in range(2))


def put_and_look(comm: hetcoll.Communicator) -> int:
    mine = Own(comm, np.full(BLOCK, comm.rank, np.int32))
    before = comm.counters().get("window_direct", 0)
    with comm.window(mine.array) as window:
        window.put(mine.array, 1 - comm.rank, BLOCK // 2, count=BLOCK // 2, signal=0)
        window.wait_signal()
        assert (mine.get()[BLOCK // 2 :] == 1 - comm.rank).all()
        comm.barrier()
    return comm.counters()["window_direct"] - before


@pytest.mark.parametrize("kinds", ["nn", "aa"])
def test_memory_that_cannot_be_opened_goes_through_the_host(mixed: Any, kinds: str) -> None:
    """As where one GPU has no way to the other's memory: on rank 0 alone, so rank 1 still reads."""
    name, call = ("CUDA", "cuIpcOpenMemHandle") if kinds == "nn" else ("HIP", "hipIpcOpenMemHandle")
    settings = {"HETCOLL_DEVICE": name.lower(), f"FAKE_{name}_FAIL": (f"{call}:1:217", "")}
    assert mixed(kinds, **settings).run(put_and_look) == [0, 4 * (BLOCK // 2)]


def put_at_once(comm: hetcoll.Communicator) -> int:
    """Rank 1 is slow to come out of `window`, and rank 0 puts."""
    seen_by = DeviceMemory.seen_by

    def late(devices: DeviceMemory, window: int, ranks: list[int]) -> None:
        assert ranks == [1 - comm.rank]
        if comm.rank == 1:
            time.sleep(0.5)
        seen_by(devices, window, ranks)

    with unittest.mock.patch.object(DeviceMemory, "seen_by", late):
        return put_and_look(comm)


@pytest.mark.parametrize("kinds", ["nn", "aa"])
def test_a_put_to_who_is_late_out_of_window(mixed: Any, kinds: str) -> None:
    assert mixed(kinds, HETCOLL_DEVICE="cuda" if kinds == "nn" else "hip").run(put_at_once) == [4 * (BLOCK // 2)] * 2


def read_the_dead(comm: hetcoll.Communicator) -> str:
    """Rank 1 is killed while the GPU of rank 0 reads from its memory; that GPU must work on."""
    device = device_of(comm)
    mine = DeviceArray.of(device, np.full(1 << 24, 1 + comm.rank, np.uint8))
    window = comm.window(mine)
    comm.barrier()
    at = np.arange(1 << 8) << 15
    while comm.rank == 1:
        works = [window.put(mine, 0, at[::-1], src_offset=at, count=1 << 15, async_op=True) for _ in range(8)]
        print("moved", flush=True)
        for work in works:
            work.wait()
    try:
        window.wait_signal(timeout=60)
    except PeerLostError as error:
        told = str(error)
    device.synchronize()
    assert set(np.unique(mine.get())) <= {1, 2}
    assert (DeviceArray.of(device, np.arange(1000, dtype=np.int64)).get() == np.arange(1000)).all()
    return told


@parametrize("kinds", ["nn", "aa"], first=1)
def test_a_rank_that_dies_while_its_memory_is_read(placed: Any, kinds: str) -> None:
    ranks: Ranks = placed(kinds)
    ranks.start(read_the_dead)
    wait_until(lambda: ranks.output(1).count("moved") > 3, 60)
    ranks.kill(1)
    outcome = ranks.finish(only=[0])[0]
    assert "rank 1" in (outcome.value or ""), outcome.trace


def leave_while_reading(comm: hetcoll.Communicator) -> float:
    """Rank 1 closes its communicator with gets under way; rank 0 has its memory back at once."""
    mine = DeviceArray.of(device_of(comm), np.zeros(1 << 22, np.uint8))
    got = DeviceArray.of(device_of(comm), np.zeros(1 << 22, np.uint8))
    window = comm.window(mine)
    comm.barrier()
    at = np.arange(1 << 10) << 12
    if comm.rank == 1:
        works = [window.get(got, 0, at[::-1], dst_offset=at, count=1 << 12, async_op=True) for _ in range(4)]
        works[0].wait()  # else rank 0 might never have heard of any
        comm.close()
        return 0.0
    wait_until(lambda: comm.counters()["window_gets"] > 0, 60)
    begun = time.monotonic()
    window.close()
    return time.monotonic() - begun


@pytest.mark.parametrize("kinds", ["nn", "aa"])
def test_a_rank_that_leaves_while_it_reads(placed: Any, kinds: str) -> None:
    assert placed(kinds, HETCOLL_TIMEOUT="60").run(leave_while_reading, timeout=90)[0] < 30


def calls_of(path: str, name: str) -> int:
    """How often this process has called that function of the driver."""
    with open(path) as log:
        return sum(line.split()[::2] == [str(os.getpid()), name] for line in log)


def few_calls(comm: hetcoll.Communicator, log: str) -> tuple[int, int]:
    """Calls of Python's for the second of two puts of 512 pieces, and the receiving GPU's launches for both."""
    piece, count = 64, 512
    mine = Own(comm, np.zeros(piece * count, np.uint8))
    at = np.random.default_rng(1).permutation(count) * piece
    calls = 0

    def look(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with comm.window(mine.array) as window:
        before = calls_of(log, "cuLaunchKernel")
        for turn in (1, 2):
            comm.barrier()
            if comm.rank == 0:
                sys.setprofile(look if turn == 2 else None)
                window.put(mine.array, 1, at[::-1].copy(), src_offset=at, count=piece, signal=0)
                sys.setprofile(None)
            else:
                window.wait_signal(0, turn)
        launches = calls_of(log, "cuLaunchKernel") - before
        comm.barrier()
    return calls, launches


@pytest.mark.fakes
def test_a_put_of_many_pieces_takes_few_calls(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    environment = {**fakes.environments(["cuda"] * 2, 2, log=log), "HETCOLL_DEVICE": "cuda"}
    ranks = Ranks(2, environment, tidy=False)  # the log stays open
    try:
        (calls, _), (_, launches) = ranks.run(few_calls, log)
    finally:
        close_all([ranks])
    assert 0 < calls <= 32
    assert launches == 2
