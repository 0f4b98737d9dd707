"""One-sided messages: random pieces against NumPy, signals, windows that close, bad input, and peers that die."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import variant
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks, wait_until
from scattered import PART, pieces
from thorough import examples
from verdicts import check_lost

import hetcoll
from hetcoll import ArgumentError, BufferTypeError, ClosedError, CollectiveTimeoutError, CommunicationError

Pool = Callable[..., Ranks]
Launch = Callable[..., Ranks]
LINKS: dict[str, dict[str, Any]] = {
    "shm": {},
    "shm-small": {"shm_bytes": 4096},
    "tcp": {"transport": "tcp"},
    "tcp-checked": {"transport": "tcp", "integrity": "all"},
}
TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "tcp"])
FOUND_WITHIN = 8.0  # seconds


CALLS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans(), pieces()), min_size=1, max_size=8)


def put_and_get(comm: hetcoll.Communicator, config: dict[str, Any], calls: list[Any]) -> None:
    """Each call: who, whose window, whether it waits, pieces. What was put is also got back."""
    comm = variant(comm, **config)
    kept = vars(comm).setdefault("kept for test_one_sided", {})
    if not kept:
        kept["mine"] = np.zeros(PART * comm.size, np.int32)
        kept["window"] = comm.window(kept["mine"], signals=comm.size)
    window, mine = kept["window"], kept["mine"]
    mine[:] = 0
    comm.barrier()
    works, model = [], {owner: np.zeros(PART * comm.size, np.int32) for owner in range(comm.size)}
    for number, (who, owner, waits, parts) in enumerate(calls):
        src = np.random.default_rng(number).integers(1, 1 << 30, PART, np.int32)
        here, there, count = (np.array(column) for column in zip(*parts, strict=True))
        base = who * PART
        for a, b, n in parts:
            model[owner][base + b : base + b + n] = src[a : a + n]
        if who != comm.rank:
            continue
        works.append(window.put(src, owner, base + there, src_offset=here, count=count, signal=who, async_op=not waits))
        got = np.zeros(PART, np.int32)
        works.append(window.get(got, owner, base, count=PART, async_op=not waits))
        works[-1].add_done_callback(lambda _: None)
        works[-1].wait()
        assert (got == model[owner][base : base + PART]).all(), "what was got is not what was put"
    for work in works:
        work.wait()
        assert work.done
        assert work.error is None
    for who in range(comm.size):
        arrived = sum(w == who and owner == comm.rank for w, owner, _, _ in calls)
        kept[who] = kept.get(who, 0) + arrived
        window.wait_signal(who, kept[who])
        assert window.signal(who) == kept[who]
    assert (mine == model[comm.rank]).all()
    comm.barrier()


@pytest.mark.parametrize("link", LINKS)
def test_random_pieces(pool: Pool, link: str) -> None:
    ranks = pool(3)

    @settings(max_examples=examples(5), deadline=None)
    @given(CALLS)
    def check(calls: list[Any]) -> None:
        ranks.run(put_and_get, LINKS[link], calls)

    check()


def move_blocks(comm: hetcoll.Communicator, config: dict[str, Any]) -> None:
    """A thousand pieces of a cache in one call, while the owner is in no call of the library."""
    comm = variant(comm, **config)
    block, blocks = 4096, 1000
    cache = np.zeros((blocks, block), np.uint32) if comm.rank == 0 else None
    with comm.window(cache) as window:
        before = comm.counters()
        if comm.rank == 1:
            src = np.random.default_rng(1).integers(0, 1 << 32, (blocks, block), np.uint32)
            order = np.random.default_rng(2).permutation(blocks)
            window.put(src, 0, order * block, src_offset=np.arange(blocks) * block, count=block, signal=0)
            back = np.zeros_like(src)
            window.get(back, 0, order * block, dst_offset=np.arange(blocks) * block, count=block)
            assert (back == src).all()
            comm.send(src[:1], 0)
        if cache is not None:
            wait_until(lambda: window.signal() == 1, 60)
            comm.recv(first := np.zeros((1, block), np.uint32), 1)
            assert (cache[np.random.default_rng(2).permutation(blocks)[0]] == first).all()
            found = comm.counters()
            assert found["window_pieces"] - before["window_pieces"] == 2 * blocks
            assert found["window_bytes"] - before["window_bytes"] == 2 * cache.nbytes
        comm.barrier()


@TRANSPORTS
def test_many_blocks(pool: Pool, transport: str) -> None:
    pool(2).run(move_blocks, {} if transport == "auto" else {"transport": transport})


def put_on(window: Any, src: Any) -> None:
    for _ in range(10_000):
        at = np.arange(16) << 14
        window.put(src, 0, at, src_offset=at, count=1 << 14, signal=0)


def close_windows(comm: hetcoll.Communicator, config: dict[str, Any]) -> int:
    """Rank 0 takes one of two windows back while rank 1 goes on putting."""
    comm = variant(comm, **config)
    mine = np.zeros(1 << 18, np.uint8)
    window, other = comm.window(mine), comm.window(np.zeros(8, np.float64))
    src = np.full(1 << 18, 7, np.uint8)
    if comm.rank == 0:
        window.wait_signal()
        refused = comm.counters()["window_refused"]
        window.close()
        closed = mine.copy()
        with pytest.raises(ClosedError, match="this window was closed"):
            window.put(src, 1)
        wait_until(lambda: comm.counters()["window_refused"] > refused, 60)
        assert (mine == closed).all(), "a window was written after it was closed"
        comm.barrier()
        assert (mine == closed).all(), "a window was written after it was closed"
    else:
        with pytest.raises(ClosedError, match="put to rank 0 of 262144 bytes in 16 pieces: the window was closed"):
            put_on(window, src)
        late = window.put(src, 0, async_op=True)
        with pytest.raises(ClosedError):
            late.wait()
        assert isinstance(late.error, ClosedError)
        with pytest.raises(ClosedError):
            window.get(src, 0)
        comm.barrier()
    other.put(np.full(2, comm.rank, np.float64), 1 - comm.rank, 3, signal=0)
    other.wait_signal()
    back = np.zeros(8)
    other.get(back, comm.rank)
    assert back.tolist() == [0, 0, 0, 1 - comm.rank, 1 - comm.rank, 0, 0, 0]
    with pytest.raises(CollectiveTimeoutError, match=r"wait_signal\(0, 2\) is not over after 0.05 s"):
        other.wait_signal(0, 2, timeout=0.05)
    held = len(other._side._pending)
    for _ in range(20):
        with pytest.raises(CollectiveTimeoutError):
            other.wait_signal(0, 2, timeout=1e-3)
    assert len(other._side._pending) == held, "nobody can wait for those any more"
    comm.barrier()
    with pytest.raises(ClosedError):
        window.get(src, 1 - comm.rank) if comm.rank else window.put(src, 1)
    window.close()
    other.close()
    return comm.counters()["window_refused"]


def open_in_a_group(comm: hetcoll.Communicator) -> None:
    """Rank 0 is refused a window that the others never hear of. The next one is the same on all ranks."""
    refused, mine = np.zeros(4), np.zeros(4)
    with comm.window(np.zeros(1)):
        if comm.rank == 0:
            with comm.group(), pytest.raises(ArgumentError, match=r"wanted sends and receives only, got window\(\)"):
                comm.window(refused)
        with comm.window(mine) as window:
            window.put(np.ones(4), 1 - comm.rank, signal=0)
            comm.barrier()
            assert not refused.any(), "what was put came to another window"
            assert mine.all()
            assert window.signal() == 1
            comm.barrier()


def test_a_window_that_is_refused_has_no_number(pool: Pool) -> None:
    pool(2).run(open_in_a_group)


def let_go(comm: hetcoll.Communicator) -> None:
    """What a call that is over was given is the program's alone: also of the last one."""
    with comm.window(np.zeros(8)) as window:
        for waits_later in (False, True):
            for call in (window.put, window.get):
                array = np.ones(8)
                alive = weakref.ref(array)
                work = call(array, 1 - comm.rank, async_op=waits_later)
                work.wait()
                del array, work
                gc.collect()
                assert alive() is None, f"{call.__name__}, {waits_later}"
        comm.barrier()


def test_memory_of_calls_that_are_over_is_let_go(pool: Pool) -> None:
    pool(2).run(let_go)


def close_again(comm: hetcoll.Communicator) -> None:
    """A close that gave up has not given the memory back: the next one does, or says so again."""
    window = comm.window(np.zeros(8))
    side, busy = window._side, [True, True, False]

    def settle(number: int) -> None:
        if busy.pop(0):
            raise CollectiveTimeoutError("the GPU has not ended copies of the window")

    side.devices.__dict__["settle"] = settle
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError, match="has not ended copies"):
            window.close()
        with pytest.raises(ClosedError, match="this window was closed"):
            window.put(np.zeros(1), 0)
        assert window._number in side._windows, "its memory is kept"
    window.close()
    assert not busy
    assert window._number not in side._windows
    window.close()
    del side.devices.__dict__["settle"]
    comm.barrier()


def test_a_close_that_gave_up_is_made_good(pool: Pool) -> None:
    pool(2).run(close_again)


@TRANSPORTS
def test_closed_windows_refuse(pool: Pool, transport: str) -> None:
    found = pool(2).run(close_windows, {} if transport == "auto" else {"transport": transport})
    assert found[0] > 0


def bad_calls(comm: hetcoll.Communicator) -> None:
    """Each of these is an error before anything is sent: so what is right afterwards finds everything in place."""
    with pytest.raises(BufferTypeError, match="buf: wanted a writable buffer"):
        comm.window(b"1234")
    with pytest.raises(ArgumentError, match="signals: wanted 0 to"):
        comm.window(None, signals=-1)
    with pytest.raises(BufferTypeError, match="buf: wanted one dtype on all ranks, got rank 0 float32, rank 1 int32"):
        comm.window(np.zeros(4, np.float32 if comm.rank == 0 else np.int32))
    window = comm.window(np.zeros(10 * comm.rank, np.float32) if comm.rank else None, signals=2 * comm.rank)
    assert window.counts == (0, 10)
    assert window.dtype.label == "float32"
    x, counts, before = np.ones(10, np.float32), [1, 2, 3], comm.counters()["window_puts"]
    word = np.zeros(1, np.int64)
    for wanted, call in {
        "peer: wanted a rank in": lambda: window.put(x, 2),
        "src: wanted the window's dtype, float32, got float64": lambda: window.put(np.ones(3), 1),
        "src: wanted a C-contiguous array": lambda: window.put(np.ones((4, 4), np.float32)[:, :2], 1),
        "dst: wanted a writable array": lambda: window.get(np.frombuffer(bytes(8), np.float32), 1),
        "offset: piece 0, 10 elements from 1 on, is not inside rank 1's window, which has 10": lambda: window.put(
            x, 1, 1
        ),
        "offset: piece 0, 10 elements from 0 on, is not inside rank 0's window, which has 0": lambda: window.get(x, 0),
        "src_offset: piece 1, 3 elements from 8 on, is not inside src, which has 10": lambda: window.put(
            x, 1, [0, 1], src_offset=[7, 8], count=3
        ),
        "offset: piece 0, 1 elements from -1 on": lambda: window.put(x, 1, -1, count=1),
        "offset: piece 0, 2 elements from 9223372036854775807 on": lambda: window.put(x, 1, (1 << 63) - 1, count=2),
        "offset: wanted a whole number, got None": lambda: window.put(x, 1, None, count=2),
        "src_offset: wanted a whole number, got None": lambda: window.put(x, 1, src_offset=None, count=2),
        "offset: wanted 64 bits": lambda: window.put(x, 1, 1 << 63, count=2),
        "src_offset: piece 0, -1 elements": lambda: window.put(x, 1, count=-1),
        "wanted as many of each, or one, got 1, 2, 3": lambda: window.put(x, 1, [0, 1], count=counts),
        "count: wanted one a piece": lambda: window.put(x, 1, [0, 1]),
        "count: wanted whole numbers": lambda: window.put(x, 1, count=[0.5]),
        "offset: wanted at most": lambda: window.put(x, 1, np.zeros((1 << 20) + 1, np.int64), count=1),
        "signal: wanted one of the 2 of rank 1, got 2": lambda: window.put(x, 1, signal=2),
        "signal: wanted one of the 0 of rank 0, got 0": lambda: window.put(x[:0], 0, signal=0),
        "late: wanted one piece that is not empty, got 0": lambda: window.put(x, 1, count=0, late=word, stream=0),
        "late: wanted one int64 in memory of the host, got 1 of float64": lambda: window.put(
            x, 1, count=0, late=np.zeros(1)
        ),
        "timeout: wanted seconds above 0": lambda: window.put(x, 1, timeout=-1),
        "value: wanted 0 or more": lambda: window.wait_signal(0, -1) if comm.rank else window.put(x, 1, count="3"),
    }.items():
        with pytest.raises((ArgumentError, BufferTypeError)) as caught:
            call()
        assert wanted in str(caught.value) or wanted.startswith("value"), caught.value
    comm.barrier()
    assert comm.counters()["window_puts"] == before
    comm.barrier()
    if comm.rank == 0:
        window.put(x[:0], 1, signal=1)  # a signal alone
        window.put(2 * x, 1, signal=1)
    else:
        window.wait_signal(1, 2)
        got = np.zeros(3, np.float32)
        window.get(got, 1, [9, 0], dst_offset=[0, 2], count=1)
        assert got.tolist() == [2, 0, 2]
    comm.barrier()
    window.close()


def test_bad_input(pool: Pool) -> None:
    pool(2).run(bad_calls)


def lose(comm: hetcoll.Communicator, dies: int, how: str) -> float:
    """Rank 1 is killed once all are about to wait for it."""
    mine = np.zeros(1 << 20, np.uint8)
    window = comm.window(mine, signals=2)
    comm.barrier()
    if comm.rank == dies:
        time.sleep(60)
    src = np.ones(1 << 20, np.uint8)
    print("waiting", flush=True)
    if how == "signal":
        window.wait_signal(1)
    while True:
        (window.put if how == "put" else window.get)(src, dies)
    return 0.0


@pytest.mark.parametrize("how", ["put", "get", "signal"])
@TRANSPORTS
def test_a_peer_that_dies_is_named(launch: Launch, transport: str, how: str) -> None:
    ranks = launch(3, HETCOLL_TRANSPORT=transport)
    ranks.start(lose, 1, how)
    wait_until(lambda: all("waiting" in ranks.output(rank) for rank in (0, 2)), 60)
    asked = time.monotonic()
    ranks.kill(1)
    check_lost(ranks.finish(), 1, asked, FOUND_WITHIN)


def misbehave(comm: hetcoll.Communicator) -> None:
    window = comm.window(np.zeros(1 << 16, np.uint8))
    src = np.ones(1 << 16, np.uint8)
    for _ in range(100):
        window.put(src, 1 - comm.rank, async_op=True)
    window.wait_signal(timeout=20)


@pytest.mark.parametrize("fault", ["drop=20", "duplicate=20"])
@TRANSPORTS
def test_links_that_misbehave_end_in_an_error(launch: Launch, transport: str, fault: str) -> None:
    ranks = launch(2, HETCOLL_TRANSPORT=transport, HETCOLL_FAULT=fault)
    for outcome in ranks.outcomes(misbehave):
        assert isinstance(outcome.error, CommunicationError), outcome.trace
        assert not isinstance(outcome.error, CollectiveTimeoutError), outcome.trace


def fail_beside_a_wait(comm: hetcoll.Communicator) -> str:
    """Rank 0 waits for a signal that nobody will send: the others call different things, and leave."""
    window = comm.window(np.zeros(8, np.uint8))
    comm.barrier()
    try:
        if comm.rank == 0:
            window.wait_signal()
        comm.allreduce(np.ones(comm.rank))
    except hetcoll.HetcollError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@TRANSPORTS
def test_who_waits_for_a_signal_is_told_that_calls_have_failed(launch: Launch, transport: str) -> None:
    said = launch(3, HETCOLL_TRANSPORT=transport).run(fail_beside_a_wait, timeout=60)
    assert said[0].startswith("CollectiveMismatchError: ")
    assert len(set(said)) == 1, said


def leave_one_after_the_other(comm: hetcoll.Communicator) -> None:
    """Ranks close when they are done; those that need nothing of them do not mind."""
    mine = np.zeros(comm.size, np.int32)
    window = comm.window(mine)
    for peer in range(comm.size):
        window.put(np.full(1, comm.rank, np.int32), peer, comm.rank, signal=0)
    window.wait_signal(0, comm.size)
    assert mine.tolist() == list(range(comm.size))
    comm.close()
    with pytest.raises(ClosedError):
        window.put(mine, 0)
    window.close()


@TRANSPORTS
def test_leaving(launch: Launch, transport: str) -> None:
    launch(3, HETCOLL_TRANSPORT=transport).run(leave_one_after_the_other)
