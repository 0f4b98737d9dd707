"""In a guest: fake GPUs of both vendors that exchange their memory by RDMA over real verbs.

What devices hold for messages is registered by its address, as peer memory is, and then sealed: a processor that
touches it is killed. So all that arrives went from one device's memory straight to the other's.
"""

from __future__ import annotations

import json
import re
from typing import Any

import fakes
import gpus
import numpy as np
import pytest
from cables import ENDS, Pool
from gpu_calls import device_of_rank, run_on_gpu
from gpu_kinds import run_on_own
from gpus import GPUS, Launch, check, direct, sealed, told
from ranks import RankError
from reference import Case
from window_moves import FEW, PIECE, PIECES, moved

import hetcoll
from hetcoll.errors import CommunicationError, DeviceError, InitError
from hetcoll.gpu.array import DeviceArray
from hetcoll.gpu.slots import CHANNELS

BIG = 300_001


def messages(comm: hetcoll.Communicator) -> None:
    """Both ways at once, of all sizes; the last is more than all slots of an edge hold."""
    device, other = device_of_rank(comm.rank), 1 - comm.rank
    for count in (1, 5000, 70_001, (7 << 20) // 8):
        mine = DeviceArray.of(device, np.arange(count, dtype=np.int64) + comm.rank)
        got = DeviceArray(device, count, "int64")
        comm.sendrecv(mine.buffer(), other, got.buffer(), other).wait(90)
        assert (got.get() == np.arange(count) + other).all()


def test_every_collective_goes_from_device_to_device(pool: Pool) -> None:
    ranks = direct(pool, "na")
    ranks.run(sealed)
    check(ranks, [*GPUS, Case("allreduce", count=BIG, inplace=True), Case("allgather", count=BIG)])
    for rank, (counters, paths) in enumerate(ranks.run(told)):
        (path,) = [line for line in paths if line.startswith(f"from the GPU to that of rank {1 - rank}")]
        assert "slots in both GPUs' memory" in path
        assert "(direct: the RDMA devices of both reach the GPUs' memory), tried with bytes" in path
        assert "rxe" in path
        assert counters["gpu_staged_bytes"] == 0, counters
        assert counters["gpu_direct_bytes"] == counters["gpu_zero_copy_bytes"] > BIG * 4, counters
        assert counters["gpu_lost_rails"] == 0, paths
    ranks.run(messages, timeout=100)


@pytest.mark.parametrize("vendors", ["na", "nc"])
def test_devices_near_the_gpu_that_is_used_come_first(launch: Launch, vendors: str) -> None:
    """A rank finds out with its first array; the other end of the link hears of it, also where it has no GPU."""
    ranks = direct(launch, vendors)
    ranks.run(gpus.near, 0, "rxe2")
    ranks.run(run_on_own if "c" in vendors else run_on_gpu, [Case("allreduce", count=BIG)], timeout=100)
    found = "".join(ranks.run(told)[0][1])
    assert re.search(r"rails rxe2 to rxe3 .*, rxe0 to rxe1 ", found), found
    others = ranks.run(links_to_gpus)[1]
    assert others
    for other in others:
        assert [rail["device"] for rail in other["rails"]] == ["rxe3", "rxe1"], other


def links_to_gpus(comm: hetcoll.Communicator) -> list[Any]:
    """Of this rank's proxy, or, without a GPU, of its engine, where they have channels of their own."""
    path = comm._gpus.executor
    if path is None:
        return [link for link in json.loads(comm._engine.links()) if link["channel"] >= CHANNELS]
    proxy = path._proxies._proxy
    assert proxy is not None
    return list(json.loads(proxy.links()))


def test_pinned_slots_by_rdma(pool: Pool) -> None:
    ranks = direct(pool, "na", HETCOLL_CROSS="staged")
    check(ranks, [*GPUS[::3], Case("allreduce", count=BIG)])
    for counters, paths in ranks.run(told):
        assert "through pinned slots and verbs" in "".join(paths)
        assert "(staged, as HETCOLL_CROSS says)" in "".join(paths)
        assert counters["gpu_links_over_tcp"] == 0, paths
        assert counters["gpu_direct_bytes"] > BIG, counters


def test_a_rank_without_a_gpu(pool: Pool) -> None:
    """Its engine's RDMA meets the proxy's: pinned slots at one end, the user's memory at the other."""
    ranks = direct(pool, "nc")
    ranks.run(run_on_own, GPUS[::4], timeout=200)
    (gpu, _), (_, cpu) = ranks.run(told)
    assert gpu["gpu_bytes"] > 0, gpu
    assert "by RDMA to the GPU's pinned slots (staged: another host; not direct: rank" in "".join(cpu)


def refused(comm: hetcoll.Communicator) -> None:
    comm.allreduce(DeviceArray(device_of_rank(comm.rank), 9).buffer()).wait(60)


def windows(comm: hetcoll.Communicator, host: int, refused: int) -> str:
    """Pieces of 1 MiB out of one's own window, of memory that is registered, and that is not, and back there. The
    window of rank `host` is not its GPU's, and that of rank `refused` not registered."""
    device, count = device_of_rank(comm.rank), PIECE * PIECES
    nbytes = 4 * count
    own, early, plain = arrays = [DeviceArray.of(device, np.full(count, 2 + i, np.float32)) for i in range(3)]
    at, order = np.arange(PIECES) * PIECE, np.random.default_rng(1).permutation(PIECES) * PIECE
    mine = np.full(count, 2, np.float32) if comm.rank == host else own
    zeros, last, seen = np.zeros(count, np.float32), comm.rank == 1, mine if comm.rank == host else own
    with comm.window(mine) as window, comm.register(early if refused != comm.rank else zeros):
        for array in arrays if refused < 0 else ():  # what is registered
            fakes.seal(array.ptr)
        for number, array in enumerate(arrays):
            once = nbytes if array is plain else 0  # what is copied
            few = FEW + (0 if array is not plain and host < 0 else nbytes // 10)  # some of the host's is checked

            def put(array: DeviceArray = array) -> None:
                window.put(array, 1, order, src_offset=at, count=PIECE, signal=0)

            def get(array: DeviceArray = array, value: int = 2 + number) -> None:
                array.set(zeros)
                window.get(array, 1, order, dst_offset=at, count=PIECE)
                assert (array.get() == value).all()

            direct, lent, staged, copied = found = moved(comm, put)
            if refused == 1:
                assert direct == lent == 0, found
            elif last:
                assert copied <= few, found
            else:
                assert direct >= nbytes - few + FEW, found
                assert lent == nbytes - once, found
                assert staged - once <= FEW, found
            if last:
                window.wait_signal(0, number + 1)
                assert ((seen if isinstance(seen, np.ndarray) else seen.get()) == 2 + number).all()
            direct, lent, staged, copied = found = moved(comm, get)
            if refused == 1:
                assert direct == lent == 0, found
            elif last:
                assert direct >= nbytes - once - few + FEW, found
                assert lent == nbytes - once, found
                assert staged - once <= FEW, found
            else:
                assert copied - once <= few, found
        comm.barrier()
    (told,) = [path for path in comm.explain("allreduce", 1).paths if path.startswith("windows")] or [""]
    return told


DIRECT = "windows between hosts: by RDMA from and to the GPU's memory (direct)"


@pytest.mark.parametrize(("vendors", "host"), [("na", -1), ("an", -1), ("na", 1)])
def test_puts_and_gets_of_gpus_are_not_copied(pool: Pool, vendors: str, host: int) -> None:
    told = direct(pool, vendors).run(windows, host, -1)
    assert told[0] == DIRECT
    assert host == 1 or told[1] == DIRECT


def no_window(comm: hetcoll.Communicator) -> None:
    comm.window(DeviceArray(device_of_rank(comm.rank), 1 << 16))


def test_windows_that_no_device_takes(launch: Launch) -> None:
    """They go through pinned memory, and say why; where that is not what was asked for, it is an error on all ranks."""
    for cross in ("auto", "staged", "direct"):
        ranks = direct(launch, "na", HETCOLL_CROSS=cross)
        ranks.run(gpus.refuse, 1)
        if cross != "direct":
            own, others = ranks.run(windows, -1, 1)
            why = "HETCOLL_CROSS is staged" if cross == "staged" else f"{4 * PIECE * PIECES} bytes of "
            assert others.startswith(f"windows between hosts: through pinned memory (staged; not direct: {why}"), others
            assert own == (DIRECT if cross == "auto" else others)
            continue
        for outcome in ranks.outcomes(no_window):
            assert isinstance(outcome.error, DeviceError), outcome.trace
            assert "buf: that of rank 1 cannot be a window: DeviceError: HETCOLL_CROSS=direct: " in str(outcome.error)


def test_what_cannot_be_direct_says_so_by_rank(launch: Launch) -> None:
    env = {"HETCOLL_CROSS": "direct", "HETCOLL_IB_HCA": (ENDS[0], "=rxe9")}
    with pytest.raises(RankError, match=r"InitError: HETCOLL_CROSS=direct: rank 1: no port of an RDMA device"):
        direct(launch, "na", **env)


def test_memory_that_no_device_takes(launch: Launch) -> None:
    """The direct way is not there, since one rank's ports refuse its GPU's memory: asked for, it is an error that says
    whose; else the next way is taken."""
    for cross in ("direct", "auto"):
        ranks = direct(launch, "na", HETCOLL_CROSS=cross)
        ranks.run(gpus.refuse, 1)
        outcomes = ranks.outcomes(refused, timeout=60)
        for outcome in outcomes:
            if cross == "auto":
                assert outcome.error is None, outcome.trace
                continue
            assert isinstance(outcome.error, InitError), outcome.trace
            assert "HETCOLL_CROSS=direct: rank 1: " in str(outcome.error)
            assert "as peer memory" in str(outcome.error)
        if cross == "auto":
            for _, paths in ranks.run(told):
                assert "staged: another host; not direct: rank 1: " in "".join(paths), paths


@pytest.mark.parametrize(
    ("ways", "how", "left"),
    [
        (("direct",), "bytes", "through pinned slots and verbs"),
        (("direct",), "signal", "through pinned slots and verbs"),
        (("direct", "staged-rdma"), "bytes", r"through pinned slots and \d+ sockets"),
    ],
)
def test_ways_that_fail_are_given_up_at_both_ends(launch: Launch, ways: tuple[str, ...], how: str, left: str) -> None:
    ranks = direct(launch, "na")
    ranks.run(gpus.misplace, 1, ways, how)
    check(ranks, [Case("allreduce", count=BIG), Case("allgather", count=5)])
    for rank, (counters, paths) in enumerate(ranks.run(told)):
        (path,) = [line for line in paths if line.startswith(f"from the GPU to that of rank {1 - rank}")]
        assert re.search(left, path), path
        assert f"(staged: {' and '.join(ways)} did not work: rank 0: " in path, path
        assert ("came wrong" if how == "bytes" else "nothing came from rank 1 in") in path, path
        assert counters["gpu_links_over_tcp"] == 0, paths


def test_the_way_that_was_asked_for_and_fails_is_an_error_on_all_ranks(launch: Launch) -> None:
    ranks = direct(launch, "na", HETCOLL_CROSS="direct")
    ranks.run(gpus.misplace, 1, ("direct",), "bytes")
    for outcome in ranks.outcomes(refused, timeout=60):
        assert isinstance(outcome.error, CommunicationError), outcome.trace
        assert "ranks 0 and 1 do not reach each other by RDMA between both GPUs' memory" in str(outcome.error)
        assert "(HETCOLL_CROSS=direct leaves no other way)" in str(outcome.error)


def test_fakes_of_both_vendors_are_here() -> None:
    assert [fakes.why_not(vendor) for vendor in ("cuda", "hip")] == [None, None]
