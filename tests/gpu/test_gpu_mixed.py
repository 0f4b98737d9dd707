"""GPUs of NVIDIA and of AMD in one communicator, on fakes of both runtimes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from gpu_calls import (
    OTHERS,
    SOME,
    cases_of,
    check,
    device_of_rank,
    every_reduction,
    exchange,
    overlap,
)
from gpu_kinds import start_gpus
from ranks import Ranks, wait_until
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll.errors import CollectiveMismatchError, CommunicationError, PeerLostError
from hetcoll.gpu.array import DeviceArray
from hetcoll.types import DType
from hetcoll.vendors.devices import hip
from hetcoll.vendors.devices.kernels.table import MESSAGE_MOST

pytestmark = pytest.mark.fakes

ODD = (0, 5, 1009, 70_001)


@parametrize("gpus", ["nnaa", "na", "aa", "nnna", "naaaa"], first=1)
def test_every_collective(mixed: Any, gpus: str) -> None:
    check(mixed(gpus), list(cases_of(len(gpus), ODD if len(gpus) == 2 else (5, 70_001))))


@parametrize("islands", ["0,1|2|3", "0|1|2|3"], first=0)
def test_every_collective_where_islands_are_asked_for(mixed: Any, islands: str) -> None:
    check(mixed("nnaa", HETCOLL_ISLANDS=islands), list(cases_of(4, (5, 70_001), alone=islands == "0|1|2|3")))


@pytest.mark.thorough
def test_every_collective_between_hosts(mixed: Any) -> None:
    """Each vendor's GPUs in hosts of their own, and both in both."""
    check(mixed("nnaa", HETCOLL_HOST_ID=("a", "a", "b", "b")), list(cases_of(4, (5, 70_001))))
    check(mixed("nana", HETCOLL_HOST_ID=("a", "a", "b", "b")), list(cases_of(4, (5, 70_001))))


@parametrize(("gpus", "types"), [("na", SOME), ("na", OTHERS), ("naa", DType)], first=1, ids=["some", "others", "all"])
def test_every_type_with_every_reduction(mixed: Any, gpus: str, types: Iterable[DType]) -> None:
    """Alone, all are reduced by our kernels; two of AMD's are RCCL's, where it knows the type and the reduction."""
    check(mixed(gpus), every_reduction(list(types), older_float8=False))


@pytest.mark.thorough
def test_chunks_that_each_rank_reduces_a_part_of(mixed: Any) -> None:
    """Two shots in one kernel beside one shot: odd parts, several chunks to a block, calls one after another."""
    sizes = [("float32", 16_385), ("int8", 350_001), ("bfloat16", 190_001), ("float64", 50_003), ("uint8", 1_300_007)]
    cases = [Case("allreduce", dtype, count, "avg" if dtype == "bfloat16" else "sum", inplace=at % 2 == 1, seed=at)
             for at, (dtype, count) in enumerate([*sizes, *sizes[::-1]])]  # fmt: skip
    check(mixed("nnaa"), cases)
    check(mixed("naaaa"), cases[:3])


def test_parts_of_unequal_size(mixed: Any) -> None:
    counts = (70_001, 0, 3, 5)
    cases = [Case("allgatherv", "int16", counts=counts), Case("reduce_scatterv", op="avg", counts=counts)]
    check(mixed("nnaa"), [*cases, Case("alltoallv", "int32", 30_001)])


def explained(comm: hetcoll.Communicator) -> tuple[str, ...]:
    comm.allreduce(DeviceArray(device_of_rank(comm.rank), 9).buffer()).wait(60)
    return comm.explain("allreduce", 1 << 20).paths


def test_explain_says_how_gpus_reach_each_other(mixed: Any) -> None:
    one, two = mixed("naa").run(explained)[1:]
    assert one[0] == (
        "from the GPU to that of rank 0 (cuda sm_90): through slots in the host's memory that both GPUs have mapped"
        " (mapped: one host), tried with bytes"
    )
    assert "rank 2 (hip gfx942): by RCCL" in one[1]
    assert one[2].startswith("8-bit floats: ranks 1-2 fnuz, rank 0 not; calls on them run in OCP's kind")
    assert one[0] == two[0]
    far = mixed("na", HETCOLL_HOST_ID=("a", "b")).run(explained)
    way = r"to that of rank 1 \(hip gfx942\): through pinned slots and \d+ sockets \(staged: another host\)"
    assert re.search(way, "".join(far[0]))


def test_messages(mixed: Any) -> None:
    mixed("naa").run(exchange, timeout=200)


@parametrize("queues", ["1", "2", "4"], first=0)
def test_streams_that_are_late_and_share_hardware_queues(mixed: Any, queues: str) -> None:
    few = {"CUDA_DEVICE_MAX_CONNECTIONS": queues, "GPU_MAX_HW_QUEUES": queues}
    check(mixed("nnaa", jitter=f"{queues}:100", **few), [*cases_of(4, (1009,)), Case("allreduce", count=1_000_003)])


@pytest.mark.thorough
def test_order_on_streams(mixed: Any) -> None:
    mixed("na", jitter="3:200").run(overlap, timeout=200)


@parametrize("refusing", [{"GPU_STREAMOPS_CP_WAIT": "1"}, {"stream_waits": 0}], first=0)
def test_streams_that_cannot_wait_for_our_memory(mixed: Any, refusing: dict[str, Any]) -> None:
    """Kernels signal for AMD's streams, which refuse it, or for all; with one hardware queue, too."""
    one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "GPU_MAX_HW_QUEUES": "1"}
    for more in ({}, one_queue):
        check(mixed("na", **refusing, **more), [*cases_of(2, (5, 70_001)), Case("allgather", count=1_500_003)])


@pytest.mark.thorough
def test_libraries_that_may_wait_for_the_device(mixed: Any) -> None:
    check(mixed("naa", strict=1, jitter="7:50"), list(cases_of(3, (5, 1009))))


# What goes wrong.


def reduce_until_told(
    comm: hetcoll.Communicator, count: int, kinds: tuple[str, ...], begun: Path | None = None
) -> None:
    array = DeviceArray(device_of_rank(comm.rank), count, kinds[comm.rank % len(kinds)])
    for _ in range(100_000):
        comm.allreduce(array.buffer(), op="max").wait(60)
        if begun is not None:
            (begun / str(comm.rank)).touch()


@parametrize(
    ("failing", "named"),  # after the 92 copies of the try of each way
    [
        ({"hip_fail": "hipMemcpyAsync:120:719"}, "hipMemcpyAsync"),
        ({"cuda_fail": "cuMemcpyAsync:120:late719"}, "CUDA_ERROR_LAUNCH_FAILED"),
        ({"hip_fail": "hipStreamWaitValue64:9:1"}, "hipStreamWaitValue64"),
    ],
    first=1,
)
def test_errors_of_a_vendor_end_the_call_everywhere(failing: dict[str, str], named: str) -> None:
    ranks = start_gpus("na", HETCOLL_ISLANDS="0|1", **failing)
    try:
        ranks.start(reduce_until_told, 1_500_001, ("float32",))
        outcomes = ranks.finish(120)
    finally:
        ranks.kill_all()
    culprit = 1 if "hip_fail" in failing else 0
    for outcome in outcomes:
        assert isinstance(outcome.error, CommunicationError), outcome.trace
        assert f"rank {culprit}" in str(outcome.error)
        assert named in str(outcome.error)


@parametrize(("gpus", "killed"), [("aan", 0), ("nnaa", 3), ("nnaa", 0)], first=1)
def test_a_killed_rank_is_named(gpus: str, killed: int, tmp_path: Path) -> None:
    ranks = start_gpus(gpus)
    try:
        ranks.start(reduce_until_told, 300_001, ("float32",), tmp_path)
        wait_until(lambda: len(list(tmp_path.iterdir())) == len(gpus), 60)
        ranks.kill(killed)
        outcomes = ranks.finish(120, only=[rank for rank in range(len(gpus)) if rank != killed])
    finally:
        ranks.kill_all()
    for outcome in outcomes:
        assert isinstance(outcome.error, PeerLostError), outcome.trace
        assert f"rank {killed}" in str(outcome.error)


def test_kinds_of_fp8_are_not_mixed_up() -> None:
    """OCP's and AMD's older one differ in what their bytes mean: GPUs of one kind have them converted nowhere."""
    ranks = start_gpus("aa", HETCOLL_ISLANDS="0|1")
    try:
        ranks.start(reduce_until_told, 1009, ("float8_e4m3fn", "float8_e4m3fnuz"))
        outcomes = ranks.finish(120)
    finally:
        ranks.kill_all()
    for outcome in outcomes:
        assert isinstance(outcome.error, CollectiveMismatchError), outcome.trace
        assert "float8_e4m3fn," in str(outcome.error)
        assert "converted only between kinds of one format, where ranks have GPUs of both" in str(outcome.error)


def send_differently(comm: hetcoll.Communicator, kinds: tuple[str, str], counts: tuple[int, int]) -> None:
    """A message that both call alike, and then one that they do not: their communicator alone is of no use then."""
    device, rank, part = device_of_rank(comm.rank), comm.rank, comm.split(0)
    assert part is not None
    try:
        for kind, count in (("float32", 9), (kinds[rank], counts[rank])):
            array = DeviceArray(device, count, kind).buffer()
            (part.send(array, 1) if rank == 0 else part.recv(array, 0)).wait(60)
        part.barrier()
    finally:
        part.close()


@pytest.mark.parametrize(
    ("kinds", "counts", "said"),
    [
        (("float8_e4m3fn", "float8_e5m2"), (9, 9), "8-bit floats are converted only between kinds of one format"),
        (("int32", "float32"), (9, 9), "recv(float32, count=9) from rank 0"),
        (("int32", "int32"), (9, 10), "recv(int32, count=10) from rank 0"),
    ],
)
def test_messages_that_differ(mixed: Any, kinds: tuple[str, str], counts: tuple[int, int], said: str) -> None:
    """Slots do not say what is in them: no bytes may be taken for another type."""
    for outcome in mixed("na").outcomes(send_differently, kinds, counts, timeout=120):
        assert isinstance(outcome.error, CollectiveMismatchError), outcome.trace
        assert f"rank 0 called send({kinds[0]}, count={counts[0]}) to rank 1" in str(outcome.error)
        assert said in str(outcome.error)


def reduce_where_there_is_memory(comm: hetcoll.Communicator) -> None:
    if comm.rank == 1:
        comm.allreduce(np.ones(1009, np.float32))
    else:
        reduce_until_told(comm, 1009, ("float32",))


def test_a_rank_without_a_gpu_is_named() -> None:
    ranks = Ranks(3, fakes.environments(["cuda", None, "hip"], 3, timeout=120))
    try:
        ranks.start(reduce_where_there_is_memory)
        outcomes = ranks.finish(120)
    finally:
        ranks.kill_all()
    for outcome in outcomes:
        assert isinstance(outcome.error, CollectiveMismatchError), outcome.trace
        assert "rank 1 called allreduce(float32, count=1009, op=sum)" in str(outcome.error)


# What AMD's GPUs are known to do otherwise; 8-bit floats are above, streams that refuse to wait as well.


def move_sealed(comm: hetcoll.Communicator) -> None:
    """What kernels have no part in, on memory that kills a processor which touches it."""
    device, rank, size = device_of_rank(comm.rank), comm.rank, comm.size
    for count in (5, 300_001):
        mine, all_ = DeviceArray.of(device, np.full(count, rank, np.int32)), DeviceArray(device, count * size, "int32")
        for array in (mine, all_):
            fakes.seal(array.ptr)
        if mine.nbytes > MESSAGE_MOST or comm.topology.far(0, 1):  # what is shorter is a kernel's inside a host
            comm.allgather(mine.buffer(), all_.buffer()).wait(60)
            assert (all_.get() == np.repeat(np.arange(size), count)).all()
            comm.sendrecv(mine.buffer(), (rank + 1) % size, all_.buffer(0, count), (rank - 1) % size).wait(60)
            assert (all_.get()[:count] == (rank - 1) % size).all()
            comm.broadcast(mine.buffer(), root=size - 1).wait(60)
            assert (mine.get() == size - 1).all()


@parametrize("hosts", ["aa", "ab"], first=1)
def test_no_processor_touches_memory_of_a_gpu(mixed: Any, hosts: str) -> None:
    """Nothing is said to be loaded or stored by its address, so a BAR may be small."""
    mixed("na", HETCOLL_HOST_ID=tuple(hosts), large_bar=0).run(move_sealed, timeout=100)


def own_gpu(comm: hetcoll.Communicator) -> tuple[int, str, tuple[tuple[int, ...], ...]]:
    found = hip.devices()
    array = DeviceArray.of(found[0], np.ones(70_001, np.float32))
    comm.allreduce(array.buffer()).wait(60)
    assert (array.get() == comm.size).all()
    path = comm._gpus.executor
    assert path is not None
    return len(found), found[0].bus_id, path._islands.islands


def test_each_rank_sees_the_gpu_that_it_was_given() -> None:
    """HIP_VISIBLE_DEVICES: both call their GPU 0, and are an island of two GPUs."""
    with start_gpus("aa", HIP_VISIBLE_DEVICES=("1", "0")) as ranks:
        (count, first, islands), (_, second, _) = ranks.run(own_gpu, timeout=100)
    assert count == 1
    assert first > second, "the second GPU of the host is rank 0's"
    assert islands == ((0, 1),)


def plans(comm: hetcoll.Communicator) -> list[str]:
    fresh = comm.split(0)
    assert fresh is not None
    assert fresh.explain("allreduce", 8).gpus == ""
    fresh.allreduce(DeviceArray.of(device_of_rank(comm.rank), np.ones(9, np.float32)).buffer()).wait(60)
    told = [fresh.explain("allreduce", nbytes) for nbytes in (8, 1 << 20, 64 << 20)]
    assert all(f"on GPUs: {each.gpus}" in str(each) for each in told)
    rest = [fresh.explain(op, nbytes) for op, nbytes in (("alltoall", 8 << 20), ("p2p", 8 << 20), ("p2p", 8))]
    fresh.close()
    return [each.gpus for each in (*told, *rest)]


ALONE, PIECES = "not by a library: none serves two ranks", "in pieces of up to 1048576 bytes, the first of 262144"


@parametrize(("gpus", "wanted"), [
    ("na", [
        ("oneshot, one kernel a rank (before oneshot, in pieces", ALONE),
        ("exchange, one kernel a rank (before oneshot, in pieces", ALONE),
        ("oneshot, in pieces of up to 4194304 bytes", "(before doubling ("),
        ("pairwise, in pieces", f"(the only one; not by one kernel: copies are faster; {ALONE})"),
        ("a message for each pair, in pieces", "(not by one kernel: it takes 1 to 2097152 bytes)"),
        ("a message for each pair, by one kernel", ""),
    ]),
    ("nnaa", [
        ("oneshot, one kernel a rank (before islands 0,1|2,3, their libraries inside", PIECES),
        ("exchange, one kernel a rank (before islands 0,1|2,3", ""),
        ("islands 0,1|2,3, their libraries inside", "(before doubling ("),
        ("islands 0,1|2,3, their libraries inside", "(the only one; not by one kernel: copies are faster)"),
        ("a message for each pair, by NCCL", " to rank 1, in pieces of up to 2097152 bytes"),
        ("a message for each pair, by NCCL", " to rank 1, by one kernel to ranks 2-3"),
    ]),
    ("aa", [
        *[("oneshot, one kernel a rank (before one call of RCCL", "")] * 2,
        ("one call of RCCL", "(the only one; not by one kernel: RCCL"),
        ("gather, one kernel a rank (before one call of RCCL", ""),
        ("a message for each pair, by RCCL", ""),
        ("a message for each pair, by one kernel", ""),
    ]),
], first=2)  # fmt: skip
def test_explain_says_which_plan_and_why(mixed: Any, gpus: str, wanted: list[tuple[str, str]]) -> None:
    told, *others = mixed(gpus).run(plans, timeout=100)
    assert gpus == "nnaa" or others == [told] * (len(gpus) - 1)  # there ranks are each other's mates
    for text, (begin, part) in zip(told, wanted, strict=True):
        assert (text.startswith(begin), part in text) == (True, True), (text, begin, part)


def receive_before_sending(comm: hetcoll.Communicator) -> list[int]:
    """Both ranks' receives, which another thread calls, stand on the default stream when they send on another one."""
    device, other = device_of_rank(comm.rank), 1 - comm.rank
    mine, got = DeviceArray.of(device, np.arange(2000) + comm.rank), DeviceArray(device, 2000, "int64")
    comm.sendrecv(mine.buffer(), other, got.buffer(), other)  # what the first message takes is made by both together
    side, ready = device.stream(), device.event()
    receiver = threading.Thread(target=lambda: comm.recv(got.buffer(), other))
    receiver.start()

    def stands() -> bool:
        device.record(ready, 0)
        return not device.query(ready)

    wait_until(stands)
    comm.send(mine.buffer(), other, stream=side)
    receiver.join()
    device.destroy_event(ready)
    device.synchronize(side)
    device.destroy_stream(side)
    return [int(each) for each in got.get()[:2]]


def test_what_a_check_reads_before_a_message_does_not_wait_for_another_stream() -> None:
    with start_gpus("na", HETCOLL_CHECK="1") as ranks:
        assert ranks.run(receive_before_sending, timeout=60) == [[1, 2], [0, 1]]
