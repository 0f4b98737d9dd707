"""Ranks without a GPU among ranks with one, of NVIDIA and of AMD, on fakes of both runtimes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from gpu_calls import OTHERS, SOME, cases_of, check, every_reduction
from gpu_kinds import Own, device_of, has_gpu, run_on_own, start
from ranks import Ranks, kept, wait_until
from reference import Case
from thorough import parametrize

import hetcoll
from hetcoll.calls.buffers import element_type
from hetcoll.errors import (
    BufferTypeError,
    CollectiveMismatchError,
)
from hetcoll.gpu import cpu_rank
from hetcoll.gpu.array import DeviceArray
from hetcoll.runtime.digest import read
from hetcoll.types import DType
from hetcoll.vendors.devices import cuda, hip

pytestmark = pytest.mark.fakes


@pytest.fixture(scope="module")
def mixed() -> Iterator[Any]:
    """`start`, for ranks that stay whole: they are kept for later tests."""
    with kept(start) as get:
        yield get


@parametrize("kinds", ["nac", "nc", "cnc", "ca", "nnc"], first=1)
def test_every_collective(mixed: Any, kinds: str) -> None:
    check(
        mixed(kinds), list(cases_of(len(kinds), (0, 5, 1009, 70_001) if len(kinds) == 2 else (5, 70_001))), run_on_own
    )


def test_islands_beside_a_cpu(mixed: Any) -> None:
    check(mixed("nnaac"), list(cases_of(5, (7001,))), run_on_own)


@pytest.mark.thorough
def test_every_collective_between_hosts(mixed: Any) -> None:
    """CPUs beside a GPU in one host, and in a host of their own."""
    check(mixed("nacc", HETCOLL_HOST_ID=("a", "b", "a", "c")), list(cases_of(4, (5, 70_001))), run_on_own)


@parametrize(("kinds", "types"), [("nc", SOME), ("nc", OTHERS), ("nac", DType)], first=1, ids=["some", "others", "all"])
def test_every_type_with_every_reduction(mixed: Any, kinds: str, types: Iterable[DType]) -> None:
    check(mixed(kinds), every_reduction(list(types), older_float8=kinds == "nc"), run_on_own)


def test_parts_of_unequal_size(mixed: Any) -> None:
    counts = (70_001, 0, 300_005)
    cases = [Case("allgatherv", "int16", counts=counts), Case("reduce_scatterv", op="avg", counts=counts)]
    check(mixed("nac"), [*cases, Case("alltoallv", "int32", 30_001), Case("alltoallv", "int32", 5, seed=1)], run_on_own)


@pytest.mark.thorough
def test_messages_larger_than_all_slots(mixed: Any) -> None:
    count = (17 << 20) // 4 + 3
    check(mixed("nc"), [Case("allreduce", count=count, inplace=True)], run_on_own)


def paths(comm: hetcoll.Communicator) -> tuple[str, ...]:
    comm.allreduce(Own(comm, np.ones(9, np.float32)).array).wait(60)
    return comm.explain("allreduce", 36).paths


@pytest.mark.thorough
def test_the_way_between_gpus_that_was_asked_for(mixed: Any) -> None:
    ranks = mixed("nac", HETCOLL_CROSS="staged")
    check(ranks, [*cases_of(3, (1009,)), Case("allreduce", count=1_000_003)], run_on_own)
    of_gpu, _, of_cpu = ranks.run(paths, timeout=60)
    assert re.search(r"through pinned slots and \d+ sockets \(staged, as HETCOLL_CROSS says\)", of_gpu[0])
    assert "rank 2, a CPU: through pinned slots and 1 socket (staged" in of_gpu[1]
    assert all("through 1 socket (staged" in path for path in of_cpu)
    path = mixed("na", HETCOLL_CROSS="mapped").run(paths, timeout=60)[0][0]
    assert path.endswith("that both GPUs have mapped (mapped, as HETCOLL_CROSS says), tried with bytes")


@pytest.mark.thorough
def test_streams_that_are_late_and_share_a_hardware_queue(mixed: Any) -> None:
    few = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "GPU_MAX_HW_QUEUES": "1"}
    check(mixed("nac", jitter="3:100", **few), [*cases_of(3, (1009,)), Case("allreduce", count=1_000_003)], run_on_own)


def exchange(comm: hetcoll.Communicator, most: int) -> None:
    """Rings of messages, both ways at once and in groups; and alltoallv in between, on edges of its own."""
    size, rank = comm.size, comm.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (1, most):
        values = np.arange(count, dtype=np.int32)
        mine, got = Own(comm, values + rank), Own(comm, np.zeros(count, np.int32))
        comm.sendrecv(mine.array, right, got.array, left).wait(60)
        assert (got.get() == values + left).all()
        counts = [3 + (rank + peer) % 2 for peer in range(size)]
        parts, taken = (Own(comm, np.full(sum(counts), value, np.int32)) for value in (rank, -1))
        comm.alltoall(parts.array, taken.array, sendcounts=counts, recvcounts=counts).wait(60)
        assert (taken.get() == np.repeat(np.arange(size), counts)).all()
        with comm.group():
            comm.send(mine.array, left)
            comm.recv(got.array, right)
        comm.barrier()
        assert (got.get() == values + right).all()
        if rank == 0:
            comm.send(mine.array, size - 1).wait(60)
        elif rank == size - 1:
            comm.recv(got.array, 0).wait(60)
            assert (got.get() == values).all()


def test_messages(mixed: Any) -> None:
    mixed("nac").run(exchange, 3_000_003, timeout=200)
    mixed("nacc", HETCOLL_HOST_ID=("a", "b", "a", "c")).run(exchange, 1_000_003, timeout=200)


def reduce_without_waiting(comm: hetcoll.Communicator) -> None:
    arrays = [Own(comm, np.full(300_003, i + comm.rank, np.float32)) for i in range(6)]
    works = [comm.allreduce(each.array, async_op=True) for each in arrays]
    for i, (each, work) in enumerate(zip(arrays, works, strict=True)):
        work.wait(60)
        assert (each.get() == sum(i + r for r in range(comm.size))).all()


def test_calls_that_are_not_waited_for(mixed: Any) -> None:
    mixed("nac").run(reduce_without_waiting, timeout=100)


def split_and_reduce(comm: hetcoll.Communicator) -> list[str]:
    """A part with a CPU, and one without any."""
    part = comm.split(int(comm.rank == 1))
    assert part is not None
    own = Own(comm, np.full(5, comm.rank, np.float32))
    part.allreduce(own.array).wait(60)
    assert (own.get() == (1 if comm.rank == 1 else 2)).all()
    paths = part.explain("allreduce", 20).paths
    part.close()
    return list(paths)


def test_parts_of_a_communicator_and_how_their_data_goes(mixed: Any) -> None:
    said = mixed("nac").run(split_and_reduce, timeout=60)
    assert said[0] == [
        "from the GPU to rank 1, a CPU: through slots in the host's memory that it has mapped (mapped: one host),"
        " tried with bytes"
    ]
    assert said[1] == []
    assert said[2] == [
        "from this rank, a CPU, to the GPU of rank 0 (cuda sm_90): through slots in the host's memory that the GPU has"
        " mapped (mapped: one host), tried with bytes"
    ]


def receive_late(comm: hetcoll.Communicator) -> None:
    """What a GPU sent before it left in order is there."""
    part = comm.split(0)
    assert part is not None
    for turn in range(2):
        own = Own(part, np.arange(5, dtype=np.float32) + turn * (1 - part.rank))
        if part.rank == 0:
            part.send(own.array, 1).wait(60)
            own.get()
        else:
            if turn == 1:
                wait_until(lambda: 0 in part._diagnosis._left, 30)
            part.recv(own.array, 0).wait(60)
            assert (own.get() == np.arange(5) + turn).all()
    part.close()


@pytest.mark.parametrize("kind", "na")
def test_what_a_gpu_sent_before_it_left(mixed: Any, kind: str) -> None:
    mixed(kind + "c").run(receive_late, timeout=60)


def get_help(comm: hetcoll.Communicator) -> int:
    """Calls while three threads help the rank without a GPU; how many there are in the end."""
    cpu_rank.helpers = lambda wiring: 3
    run_on_own(comm, [Case("allreduce", dtype, count) for dtype in ("float32", "uint8") for count in (70_001, 900_003)])
    run_on_own(comm, [Case("reduce_scatter", "bfloat16", 300_007, "max"), Case("alltoall", "int64", 90_000)])
    names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
    return names.count("hetcoll-helper\n")


@pytest.mark.thorough
def test_threads_help_where_there_are_cores() -> None:
    """They are gone with the communicator."""
    with start("ncn") as ranks:
        assert ranks.run(get_help, timeout=100) == [0, 3, 0]


def test_processes_that_see_gpus_of_both_vendors() -> None:
    """Each uses the kind that it was told, and so do its buffers."""
    env = {**fakes.environment("both", 3, timeout=120), "HETCOLL_DEVICE": ("cuda", "hip:1", "cpu")}
    with Ranks(3, env) as ranks:
        check(ranks, list(cases_of(3, (1009,))), run_on_own)


def reduce_on(comm: hetcoll.Communicator, devices: tuple[str, ...]) -> tuple[str, ...]:
    module = {"cuda": cuda, "hip": hip}[devices[comm.rank]]
    array = DeviceArray.of(module.devices()[comm.rank], np.full(70_001, comm.rank + 1, np.float32))
    comm.allreduce(array.buffer()).wait(60)
    assert (array.get() == sum(range(1, comm.size + 1))).all()
    return comm.explain("allreduce", 9).paths


def test_the_first_buffer_says_which_vendors_gpu_a_rank_uses() -> None:
    """Nothing else does: all see GPUs of both."""
    with Ranks(3, fakes.environment("both", 3, timeout=120)) as ranks:
        found = ranks.run(reduce_on, ("cuda", "hip", "hip"), timeout=100)
    assert "to that of rank 1 (hip gfx942)" in found[0][0]
    assert "to that of rank 0 (cuda sm_90)" in found[1][0]


def pass_memory_of_another(comm: hetcoll.Communicator) -> tuple[str, str]:
    """What this rank is told of memory that is not its own kind's; it stays whole."""
    host = np.ones(5, np.float32)
    wrong: Any = host if has_gpu(comm) else hetcoll.calls.buffers.Buffer(4096, 5, DType.FLOAT32, None, "rocm", 1)
    said = []
    for call in (lambda: comm.allreduce(wrong), lambda: comm.send(wrong, (comm.rank + 1) % comm.size)):
        with pytest.raises(BufferTypeError) as caught:
            call()
        said.append(str(caught.value))
    own = Own(comm, host)
    comm.allreduce(own.array).wait(60)
    assert (own.get() == comm.size).all()
    return said[0], said[1]


def test_memory_of_another_device_is_refused(mixed: Any) -> None:
    for rank, (kind, place) in enumerate([("cuda", "cpu"), ("hip", "cpu"), ("cpu", "rocm:1")]):
        for said in mixed("nac").run(pass_memory_of_another, timeout=60)[rank]:
            wanted = f"wanted memory of {kind}, the device that rank {rank} said it uses, got some of {place}"
            assert said == wanted


def exchange_two_types(comm: hetcoll.Communicator) -> None:
    """In one group: what a rank sends and what it receives differ in type."""
    types = (np.uint8, np.float64)
    mine, other = types[comm.rank], types[1 - comm.rank]
    for count in (9, 3001):
        sent, got = Own(comm, np.arange(count, dtype=mine)), Own(comm, np.zeros(2 * count, other))
        part = got.array.buffer(0, count) if has_gpu(comm) else got.array[:count]
        with comm.group():
            comm.send(sent.array, 1 - comm.rank)
            comm.recv(part, 1 - comm.rank)
        comm.barrier()
        assert (got.get()[:count] == np.arange(count, dtype=other)).all()
        assert not got.get()[count:].any(), "memory behind the message was written"


@parametrize("kinds", ["na", "nc"], first=1)
def test_a_group_of_two_types(mixed: Any, kinds: str) -> None:
    mixed(kinds).run(exchange_two_types, timeout=60)


def check_kinds(comm: hetcoll.Communicator) -> list[str]:
    """Under HETCOLL_CHECK, each rank with a kind of its own: calls that are right, of values that not both kinds hold,
    and one that is not."""
    kinds = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3fnuz", "float8_e4m3fn")
    kind, most = element_type(kinds[comm.rank]), 448 if comm.rank in (0, 3) else 240
    said = []
    for values in ([1, -0.0, 0.0, 5], [448, -448, 3 * 2.0**-10, 0.0], [-0.0] * 4):
        for collective in (comm.allreduce, comm.broadcast):
            own = Own(comm, np.array(values, np.float32).clip(-most, most).astype(kind))
            (collective(own.array, root=3) if collective == comm.broadcast else collective(own.array, op="max")).wait(
                60
            )
            said.append(str(own.get().astype(np.float32) + 0.0))
    comm.barrier()  # what fails next fails for whoever still waits here, too
    with pytest.raises(CollectiveMismatchError) as caught:
        comm.allreduce(Own(comm, np.ones(9 + comm.rank, kind)).array, op="max").wait(60)
    return [*said, str(caught.value)]


def test_check_takes_two_kinds_of_a_format_for_one() -> None:
    with start("nacc", HETCOLL_CHECK="1") as ranks:
        *found, root = ranks.run(check_kinds, timeout=120)
    for told in found:
        assert told[:-1] == found[0][:-1], "all ranks but the root of broadcasts have the same values"
    assert root[:-1:2] == found[0][:-1:2]
    assert root[3] != found[0][3], "what only OCP's kind holds is among them"
    for told in (*found, root):  # which two ranks notice first is a matter of time
        assert re.search(r"HETCOLL_CHECK before allreduce\(float8_e4m3fn, count=(9|10|11|12), op=max\)", told[-1]), told


def check_on_gpus(comm: hetcoll.Communicator) -> str:
    """Right calls on device memory, blocking and not, and one whose input is not finite on one rank."""
    own = Own(comm, np.full(5, comm.rank + 1.0, np.float32))
    comm.allreduce(own.array)
    assert own.get().tolist() == [6.0] * 5
    comm.allreduce(own.array, async_op=True).wait(60)
    assert own.get().tolist() == [18.0] * 5
    comm.barrier()
    values = np.ones(5, np.float32)
    values[3] = np.inf if comm.rank == 1 else 1.0
    with pytest.raises(hetcoll.ArgumentError) as caught:
        comm.allreduce(Own(comm, values).array)
    with pytest.raises(hetcoll.ArgumentError) as caught_later:
        comm.allreduce(Own(comm, values).array, async_op=True).wait(60)
    assert str(caught.value) == str(caught_later.value)
    exchange(comm, 600_003)  # more than a kernel carries
    send_oddly(comm)
    pass_memory_of_another(comm)
    comm.allreduce(own.array)  # nothing was touched
    assert own.get().tolist() == [54.0] * 5
    return str(caught.value)


def send_oddly(comm: hetcoll.Communicator) -> None:
    """Around the ranks, each of which receives before it sends, and goes on. Streams wait, not the hosts of GPUs."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, got = Own(comm, np.full(70_001, np.nan)), Own(comm, np.zeros(70_001))
    here = f"what rank {comm.rank} sends to rank {right} is not finite: 70001 of 70001 elements"
    there = f"what rank {left} sends to rank {comm.rank} is not finite: 70001 of 70001 elements"
    for async_op in (True, False):
        how: dict[str, Any] = {"async_op": True} if async_op or not has_gpu(comm) else {"stream": _stream(comm, 0)}
        receiving = comm.recv(got.array, left, **how)
        if "stream" in how:
            with pytest.raises(hetcoll.ArgumentError, match=here):
                comm.send(sent.array, right, stream=_stream(comm, 1))
        else:
            with pytest.raises(hetcoll.ArgumentError, match=here):
                comm.send(sent.array, right, async_op=True).wait(60)
        with pytest.raises(hetcoll.ArgumentError, match=there):
            receiving.wait(60)
    comm.barrier()


def _stream(comm: hetcoll.Communicator, number: int) -> int:
    """One of two that last as long as the communicator."""
    kept: dict[int, int] = vars(comm).setdefault("streams", {})
    if number not in kept:
        kept[number] = device_of(comm).stream()
    return kept[number]


def spoil_on_gpus(comm: hetcoll.Communicator, how: str) -> str:
    """Rank 0's memory changes before a message leaves it; rank 1 looks when it is over, or at its next call."""
    own, spoiled, core = Own(comm, np.ones(9)), np.arange(9.0), comm._core
    other, begin = Own(comm, np.zeros(9)), (core.exchange, core.exchange_all)

    def change(*words: Any) -> Any:
        own.array.set(spoiled)
        return begin[how == "group"](*words)

    try:
        if comm.rank < 2:
            if comm.rank == 0:
                core.__dict__["exchange" + "_all" * (how == "group")] = change
            peer, move = 1 - comm.rank, comm.send if comm.rank == 0 else comm.recv
            array = own.array if comm.rank == 0 else other.array
            if how == "group":
                with comm.group():
                    move(array, peer)
            else:
                work = move(array, peer, async_op=how != "blocking")
                if comm.rank == 1 and how == "stream":  # what comes on it may write there
                    work.wait_stream()
                    other.array.set(np.ones(9))
        wait_until(lambda: comm.barrier() is None, 20)  # calls until it finds out
    except hetcoll.CommunicationError as error:
        return str(error)
    return ""


@parametrize("how", ["stream", "blocking", "group"], first=1)
def test_messages_between_gpus_that_are_spoiled(how: str) -> None:
    with start("na", HETCOLL_CHECK="1") as ranks:
        (text,) = set(ranks.run(spoil_on_gpus, how, timeout=120))
    assert re.search(r"rank 1 received something else than rank 0 sent at .*: recv\(float64, count=9\)", text), text


def test_calls_on_gpus_are_inspected(tmp_path: Path) -> None:
    """HETCOLL_CHECK and HETCOLL_DIGEST see what lies on a GPU."""
    with start("nac", HETCOLL_CHECK="1", HETCOLL_DIGEST=str(tmp_path)) as ranks:
        told = ranks.run(check_on_gpus, timeout=120)
    for said in told:
        assert said.endswith("is not finite: rank 1: 1 of 5 elements, the first is inf at 3")
    lines = read(tmp_path)
    assert all(line.given != line.made for rank in range(3) for line in lines[rank] if "allreduce" in line.call)
    made = [[line.made for line in lines[rank] if "allreduce" in line.call] for rank in range(3)]
    assert made[0] == made[1] == made[2]
